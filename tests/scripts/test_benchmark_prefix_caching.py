"""scripts/benchmark_prefix_caching.py on the tiny model: its figures, and that it sees what is
wrong."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest

from jpaged.llm import LLM

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
TINY = (
    *("--requests", "4", "--system_tokens", "70", "--own_tokens", "5", "--max_tokens", "3"),
    *("--chat_tokens", "20"),
)


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("benchmark_prefix_caching")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def llms(make_engine):
    return {
        caching: LLM.from_engine(make_engine(enable_prefix_caching=caching))
        for caching in (False, True)
    }


@pytest.fixture
def run(script, tmp_path, monkeypatch, llms, capsys):
    """Runs the script on the tiny model; returns exit code, outputs and what is in the JSON."""
    monkeypatch.setattr(script, "load", lambda values, caching: llms[caching])

    def run(*arguments):
        file = tmp_path / "result.json"
        code = script.main(["benchmark_prefix_caching.py", "--json", str(file), *arguments])
        captured = capsys.readouterr()
        return code, captured, json.loads(file.read_text()) if file.exists() else {}

    return run


def test_the_script(run, llms):
    llms[True].engine.scheduler.block_manager.reset_prefix_cache()
    code, printed, result = run(*TINY)
    assert (code, result["wrong"]) == (0, [])
    off, on = result["prefill_without"], result["prefill_with"]
    assert off["prompt_tokens"] == on["prompt_tokens"] == 4 * 75
    assert off["cached_tokens"] == 0
    # The first one computes 32, 32 and 11 tokens; beside these last ones there is room for the
    # others, which find all four full blocks of what they share with it.
    assert on["cached_tokens"] == 3 * 4 * 16
    assert off["token_ids"] == on["token_ids"]
    assert result["speedup"] == pytest.approx(off["seconds"] / on["seconds"])
    chat = result["chat"]
    assert chat["cached_tokens"] == chat["common_tokens"] // 16 * 16 >= 32
    assert result["two_salts"] == {"shared_blocks": 0, "cached_tokens": 0}
    assert result["one_salt"] == {"shared_blocks": 4, "cached_tokens": 64}
    assert f"{chat['cached_tokens']} found" in printed.out
    assert not llms[True].engine.has_unfinished_requests()


def test_an_engine_that_does_not_cache_is_seen(run, llms, monkeypatch):
    monkeypatch.setitem(llms, True, llms[False])
    code, printed, result = run(*TINY)
    assert code == 1
    assert len(result["wrong"]) == 2
    assert "found 0 tokens instead of" in result["wrong"][0]
    assert "of one salt shared nothing" in result["wrong"][1]
    assert "WRONG: " + result["wrong"][1] in printed.out


def test_an_engine_that_caches_when_it_should_not_is_seen(run, llms, monkeypatch):
    monkeypatch.setitem(llms, False, llms[True])
    code, _, result = run(*TINY)
    assert code == 1
    assert "something was found with caching off" in result["wrong"]


def test_what_must_not_be_is_said(script):
    prefill = script.Prefill(1.0, [[1], [2]], 0, 40)
    cached = dataclasses.replace(prefill, cached_tokens=16)
    chat = script.Chat(50, 40, 0, [[1, 2], [3]])
    cached_chat = dataclasses.replace(chat, cached_tokens=32)
    apart, together = script.Neighbours(0, 0), script.Neighbours(2, 32)

    def wrong(on=cached, chat_on=cached_chat, different=apart, same=together):
        prefills, chats = {False: prefill, True: on}, {False: chat, True: chat_on}
        return script.check(prefills, chats, different, same, 16)

    assert wrong() == []
    (sentence,) = wrong(on=dataclasses.replace(cached, token_ids=[[1], [3]]))
    assert "tokens behind the system prompt" in sentence
    (sentence,) = wrong(chat_on=dataclasses.replace(cached_chat, answers=[[1, 2], [4]]))
    assert "an answer of the chat" in sentence
    (sentence,) = wrong(chat_on=dataclasses.replace(cached_chat, cached_tokens=48))
    assert "found 48 tokens instead of 32" in sentence
    (sentence,) = wrong(different=script.Neighbours(1, 0))
    assert "of different salts" in sentence
    (sentence,) = wrong(different=script.Neighbours(0, 16))
    assert "of different salts" in sentence
    # One token at least is computed.
    whole = script.Chat(48, 48, 32, [[1, 2], [3]])
    assert wrong(chat_on=whole) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("--requests", "0"),
        ("--system_tokens", "300"),  # more than the model's length
        ("--enable_prefix_caching",),
        ("--json", "no/such/folder/rows.json"),
        ("more",),
    ],
)
def test_bad_usage(run, arguments):
    code, printed, _ = run(*arguments)
    assert code == 2
    assert len(printed.err.splitlines()) == 1
