"""The README's Python examples run as they stand (on a small model in place of SmolLM2)."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# This one sets JAX's number of CPU devices, so it needs a process of its own.
ALONE = "shard_map"


@pytest.fixture
def small_model(monkeypatch, tiny_llm):
    import jpaged

    monkeypatch.setattr(jpaged, "LLM", lambda model: tiny_llm)


def test_the_examples_run_in_order(small_model, tiny_llm, capsys):
    blocks = [block for block in BLOCKS if ALONE not in block]
    assert len(blocks) == 3
    namespace: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert len(namespace["best"]) == 2
    assert tiny_llm.stats().blocks_used == 0
    assert len(namespace["outputs"]) == 2
    assert namespace["text"]
    assert not tiny_llm.engine.has_unfinished_requests()


def test_the_operators_example_runs_alone():
    (block,) = [block for block in BLOCKS if ALONE in block]
    checks = "\nassert out.shape == (4, H, D)\nassert len(sharded_out.sharding.device_set) == 2\n"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", block + checks],
        check=True,
        timeout=300,
        cwd=Path(__file__).parent.parent,
        env=environment | {"JAX_PLATFORMS": "cpu"},
    )


def test_the_two_commands_are_those_that_ci_runs():
    ci = (Path(__file__).parent.parent / ".ci" / "run").read_text()
    commands = re.findall(r"^uv run .*$", README, re.MULTILINE)
    assert commands[0] == 'uv run scripts/generate.py --prompt "Once upon a time"'
    assert commands[1] == "uv run --extra test pytest -n 2 --dist loadfile"
    for command in commands[:2]:
        assert command in ci
