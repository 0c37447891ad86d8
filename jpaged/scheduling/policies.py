"""Who comes first: the order of the queues, as one small interface."""

from __future__ import annotations

import math
from typing import Protocol

from jpaged.scheduling.request import Request


class Policy(Protocol):
    """An order of requests that does not change with time, so that queues stay sorted."""

    def order(self, request: Request) -> tuple[float, int]:
        """The key by which all queues are sorted; no two requests have the same."""
        ...

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Whether a waiting request may push out a running one that stands behind it."""
        ...


class FirstComeFirstServed:
    """In order of arrival; a request is only ever pushed out to make room for what runs."""

    def order(self, request: Request) -> tuple[float, int]:
        return request.arrival_order

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        return False


class Priority:
    """Lower `sampling_params.priority` first; and whoever waits grows more urgent.

    A request that has waited `aging_seconds` counts as one level more urgent than when it came. All
    requests age alike, so the order of two of them never changes, and a key that does not change
    with time expresses it: the time of arrival put off by `aging_seconds` for each level. The bound
    that follows: a request of priority p that came at time t is overtaken by requests of priority q
    only if they came before t + (p - q) * aging_seconds. Nobody waits for ever.
    """

    def __init__(self, aging_seconds: float = 30.0) -> None:
        """aging_seconds: how long waiting is worth one level (> 0 and finite)."""
        if not 0 < aging_seconds < math.inf:
            raise ValueError(f"aging_seconds must be > 0 and finite, got {aging_seconds!r}")
        self.aging_seconds = aging_seconds

    def order(self, request: Request) -> tuple[float, int]:
        arrival_time, number = request.arrival_order
        return arrival_time + request.sampling_params.priority * self.aging_seconds, number

    def may_preempt(self, waiting: Request, running: Request) -> bool:
        """Only one of a more urgent level: of equals, who runs goes on."""
        return waiting.sampling_params.priority < running.sampling_params.priority and self.order(
            waiting
        ) < self.order(running)


POLICIES = {"fcfs": FirstComeFirstServed, "priority": Priority}
