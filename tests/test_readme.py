"""The README's Python examples run as they stand (on a small model in place of SmolLM2)."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def small_model(monkeypatch, tiny_llm):
    import jpaged

    monkeypatch.setattr(jpaged, "LLM", lambda model: tiny_llm)


def test_the_examples_run_in_order(small_model, tiny_llm, capsys):
    assert len(BLOCKS) == 3
    namespace: dict = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["out"].shape == (2, 4, 64)
    assert len(namespace["outputs"]) == 2
    assert namespace["text"]
    assert not tiny_llm.engine.has_unfinished_requests()


def test_the_two_commands_are_those_that_ci_runs():
    ci = (Path(__file__).parent.parent / ".ci" / "run").read_text()
    commands = re.findall(r"^uv run .*$", README, re.MULTILINE)
    assert commands[0] == 'uv run scripts/generate.py --prompt "Once upon a time"'
    assert commands[1] == "uv run --extra test pytest"
    for command in commands[:2]:
        assert command in ci
