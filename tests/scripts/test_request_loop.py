"""scripts/_request_loop.py under a clock of the test's own: who is sent when, what is noted."""

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture(scope="module")
def loop():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("_request_loop")
    sys.path.remove(str(SCRIPTS))


class FakeEngine:
    """A token for every queued request each step, which takes a second."""

    def __init__(self):
        self.now = 100.0
        self.added: list[tuple[str, float]] = []
        self.slept: list[float] = []
        self.patience: list[float | None] = []
        self._left: dict[str, int] = {}

    def add(self, name, token_ids, output_len):
        self.added.append((name, self.now - 100))
        self._left[name] = output_len

    def step(self, deliver, patience):
        self.patience.append(patience)
        self.now += 1.0
        for name in list(self._left):
            self._left[name] -= 1
            deliver(name, [int(self.now)], not self._left[name])
            if not self._left[name]:
                del self._left[name]

    def facts(self):
        return {"fake": True}

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def requests(*arrivals_and_lengths):
    return [
        {"prompt_token_ids": [1], "output_len": output_len, "arrival_time": arrival}
        for arrival, output_len in arrivals_and_lengths
    ]


def drive(loop, engine, wanted, **settings):
    return loop.drive(engine, wanted, clock=lambda: engine.now, sleep=engine.sleep, **settings)


def test_requests_are_sent_when_they_are_due_and_count_from_then(loop):
    engine = FakeEngine()
    records = drive(loop, engine, requests((0.0, 2), (0.5, 1), (5.0, 1)))
    # The second one comes during the first step and is sent after it.
    assert engine.added == [("0", 0.0), ("1", 1.0), ("2", 5.0)]
    assert [record["start"] for record in records] == [0.0, 0.5, 5.0]
    assert [record["delivery_times"] for record in records] == [[1.0, 2.0], [2.0], [6.0]]
    assert [record["token_ids"] for record in records] == [[101, 102], [102], [106]]
    assert engine.slept == [3.0]


def test_the_engine_knows_how_long_nobody_comes(loop):
    engine = FakeEngine()
    drive(loop, engine, requests((0.0, 3), (1.5, 1)))
    assert engine.patience == [1.5, 0.5, None]


def test_concurrency_holds_requests_back(loop):
    engine = FakeEngine()
    records = drive(loop, engine, requests((0.0, 2), (0.0, 1), (0.0, 1)), max_concurrency=1)
    assert engine.added == [("0", 0.0), ("1", 2.0), ("2", 3.0)]
    # A request is due when it has come and a place is free.
    assert [record["start"] for record in records] == [0.0, 2.0, 3.0]
    assert engine.patience == [None] * 4


def test_a_place_that_is_free_already_delays_nobody(loop):
    engine = FakeEngine()
    records = drive(loop, engine, requests((0.0, 1), (0.0, 3), (2.5, 1)), max_concurrency=2)
    assert [record["start"] for record in records] == [0.0, 0.0, 2.5]


def test_names_differ_between_runs(loop):
    engine = FakeEngine()
    drive(loop, engine, requests((0.0, 1)), prefix="warmup-0-")
    drive(loop, engine, requests((0.0, 1)), prefix="0-")
    assert [name for name, _ in engine.added] == ["warmup-0-0", "0-0"]


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3]], ids=len)
def test_other_than_the_tokens_asked_for_are_an_error(loop, tokens):
    class Inexact(FakeEngine):
        def step(self, deliver, patience):
            deliver("0", tokens, True)

    message = f"request 0 got {len(tokens)} tokens, 2 were asked for"
    with pytest.raises(RuntimeError, match=message):
        drive(loop, Inexact(), requests((0.0, 2)))


def test_a_job_is_loaded_warmed_up_and_run(loop):
    engine = FakeEngine()
    job = {
        "warmup": [requests((0.0, 1))],
        "runs": [requests((0.0, 1), (0.0, 2)), requests((0.0, 1))],
        "max_concurrency": None,
    }
    result = loop.run_job(job, lambda given: engine)
    assert [name for name, _ in engine.added] == ["warmup-0-0", "0-0", "0-1", "1-0"]
    assert [[len(r["token_ids"]) for r in run] for run in result["runs"]] == [[1, 2], [1]]
    assert result["facts"]["fake"]
    assert result["load_seconds"] >= 0
    assert result["warmup_seconds"] >= 0
