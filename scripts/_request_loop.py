"""Sends requests to an engine as they come due, and notes when their tokens come back.

The same loop drives every backend. It runs in the rivals' Pythons too, which have none of our
packages, so it needs the standard library alone.
"""

from __future__ import annotations

import heapq
import json
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

Clock = Callable[[], float]
# What an engine calls with a request's name, its new tokens and whether it is finished, as soon as
# it has them.
Deliver = Callable[[str, list[int], bool], None]


class Engine(Protocol):
    """What a backend makes of its engine."""

    def add(self, name: str, token_ids: list[int], output_len: int) -> None:
        """Queue a request: greedy, exactly output_len tokens."""

    def step(self, deliver: Deliver, patience: float | None) -> None:
        """Compute something for the queued requests, or wait for what is computed elsewhere, at
        most `patience` seconds (None: until it comes)."""

    def facts(self) -> dict[str, Any]:
        """Versions, settings and counters, for the report."""


class RequestLog:
    """The requests of one run: which are due, and what came back when.

    A request is due at its arrival time, and with `max_concurrency` not before so many of those
    before it are finished; its latency counts from that moment, whenever the engine gets to see it.

    Args:
        requests: dictionaries with prompt_token_ids, output_len and arrival_time (s, from the
            run's begin), in the order of their arrival.
        max_concurrency: most requests sent and not finished, or None.
        clock: seconds.
    """

    def __init__(
        self,
        requests: list[dict[str, Any]],
        *,
        max_concurrency: int | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._requests = requests
        self._clock = clock
        # When each place that a request may take was given back; a heap.
        self._free_since = [0.0] * min(max_concurrency or len(requests), len(requests))
        self._num_sent = 0
        self._num_finished = 0
        self.records: list[dict[str, Any]] = [
            {"start": 0.0, "delivery_times": [], "token_ids": []} for _ in requests
        ]
        self._began = clock()

    @property
    def num_in_flight(self) -> int:
        return self._num_sent - self._num_finished

    @property
    def is_done(self) -> bool:
        return self._num_finished == len(self._requests)

    def seconds_until_due(self) -> float | None:
        """Time to the next request, 0 if one is due; None if none is before another finishes."""
        if self._num_sent == len(self._requests) or not self._free_since:
            return None
        return max(0.0, self._requests[self._num_sent]["arrival_time"] - self._now())

    def take_due(self) -> list[int]:
        """Places of the requests to be sent now."""
        due = []
        while self.seconds_until_due() == 0.0:
            arrival = self._requests[self._num_sent]["arrival_time"]
            self.records[self._num_sent]["start"] = max(arrival, heapq.heappop(self._free_since))
            due.append(self._num_sent)
            self._num_sent += 1
        return due

    def deliver(self, place: int, token_ids: list[int], finished: bool) -> None:
        """Note new tokens of a request.

        Raises:
            RuntimeError: it got more tokens than were asked for, or is finished with fewer.
        """
        record, wanted = self.records[place], self._requests[place]["output_len"]
        now = self._now()
        record["delivery_times"].append(now)
        record["token_ids"] += token_ids
        num_tokens = len(record["token_ids"])
        if num_tokens > wanted or (finished and num_tokens < wanted):
            raise RuntimeError(f"request {place} got {num_tokens} tokens, {wanted} were asked for")
        if num_tokens == wanted:
            self._num_finished += 1
            heapq.heappush(self._free_since, now)

    def _now(self) -> float:
        return self._clock() - self._began


def drive(
    engine: Engine,
    requests: list[dict[str, Any]],
    *,
    max_concurrency: int | None = None,
    prefix: str = "",
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[dict[str, Any]]:
    """Run requests to their end; returns a record for each.

    A record has start (s after the run's begin), delivery_times (when tokens came, one or several
    at once) and token_ids. `prefix` keeps the engine's names of one run's requests from another's.
    """
    log = RequestLog(requests, max_concurrency=max_concurrency, clock=clock)
    names = {f"{prefix}{place}": place for place in range(len(requests))}

    def deliver(name: str, token_ids: list[int], finished: bool) -> None:
        log.deliver(names[name], token_ids, finished)

    while not log.is_done:
        for place in log.take_due():
            request = requests[place]
            engine.add(f"{prefix}{place}", request["prompt_token_ids"], request["output_len"])
        if log.num_in_flight:
            engine.step(deliver, log.seconds_until_due())
        else:
            sleep(log.seconds_until_due() or 0.0)
    return log.records


def run_job(job: dict[str, Any], load: Callable[[dict[str, Any]], Engine]) -> dict[str, Any]:
    """What a backend does: load, warm up, run.

    `job["warmup"]` and `job["runs"]` are lists of runs, each a list of requests.
    """
    began = time.monotonic()
    engine = load(job)
    loaded = time.monotonic()
    for number, requests in enumerate(job["warmup"]):
        drive(engine, requests, prefix=f"warmup-{number}-")
    warm = time.monotonic()
    runs = [
        drive(engine, requests, max_concurrency=job["max_concurrency"], prefix=f"{number}-")
        for number, requests in enumerate(job["runs"])
    ]
    return {
        "load_seconds": loaded - began,
        "warmup_seconds": warm - loaded,
        "runs": runs,
        "facts": {"python": sys.version.split()[0], **engine.facts()},
    }


def main(argv: list[str], load: Callable[[dict[str, Any]], Engine]) -> None:
    """A backend as a program: `PROGRAM JOB.json RESULT.json`."""
    with open(argv[1], encoding="utf-8") as file:
        job = json.load(file)
    result = run_job(job, load)
    with open(argv[2], "w", encoding="utf-8") as file:
        json.dump(result, file)
