"""What must hold between steps; for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jpaged.scheduling.request import Request, RequestStatus, Sequence

if TYPE_CHECKING:
    from jpaged.scheduling.scheduler import Scheduler

_WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.SWAPPED)


def check_integrity(scheduler: Scheduler) -> None:
    """Raise AssertionError unless queues, requests and memory agree; between steps only.

    Holds before and after `schedule` and `update`: each row of a running sequence holds exactly
    its computed tokens, waiting ones have no row, finished ones only if they are kept, all queues
    are in order, and every request that the scheduler knows is in one of them.
    """
    manager = scheduler.block_manager
    manager.check_integrity()
    rows: list[int] = []
    for request in scheduler.running:
        _expect(request.status is RequestStatus.RUNNING, request, request.status)
        unfinished = request.unfinished if request.is_forked else [request.leader]
        _expect(bool(unfinished), request, "runs with nothing to do")
        _expect(len(unfinished) <= request.num_rows, request, "has more rows than it may")
        for sequence in request.sequences:
            if sequence not in unfinished:
                _expect(sequence.slot < 0, request, "holds a row that it does not compute")
                continue
            rows.append(_checked_row(scheduler, sequence))
            waits = sequence.num_pending > 0 or request.beams is not None
            _expect(waits or sequence.num_missing_tokens > 0, request, "has nothing to compute")
            most = 2 * scheduler.max_decode_steps  # those of two plans
            _expect(0 <= sequence.num_pending <= most, request, "has too many pending tokens")
        if not request.is_forked:
            computed = request.leader.num_computed_tokens
            _expect(computed < request.fork_point, request, "should have been forked")
    for request in scheduler.kept:
        _expect(request.status is RequestStatus.KEPT, request, request.status)
        rows.append(_checked_row(scheduler, request.sequences[0]))
    if sorted(rows) != np.flatnonzero(manager.num_tokens).tolist():
        raise AssertionError(f"rows held {sorted(rows)}, in use otherwise")
    for request in scheduler.waiting:
        _expect(request.status in _WAITING, request, request.status)
        swapped = request.status is RequestStatus.SWAPPED
        _expect((request.swapped is not None) == swapped, request, "is swapped out in part")
        for sequence in request.sequences:
            _expect(sequence.slot < 0, request, "waits with a row")
            if not swapped:
                _expect(sequence.num_computed_tokens == 0, request, "waits with computed tokens")
    for queue in (scheduler.waiting, scheduler.running):
        if [r.order for r in queue] != sorted(r.order for r in queue):
            raise AssertionError("a queue is out of order")
    known = scheduler.unfinished_request_ids()
    queued = [r.request_id for r in scheduler.waiting + scheduler.running]
    if sorted(queued) != sorted(known):
        raise AssertionError(f"queued {sorted(queued)}, unfinished {sorted(known)}")
    if scheduler.num_free_rows < 0:
        raise AssertionError(f"{-scheduler.num_free_rows} rows are promised that do not exist")


def _checked_row(scheduler: Scheduler, sequence: Sequence) -> int:
    _expect(sequence.slot >= 0, sequence.request, "runs without a row")
    held = int(scheduler.block_manager.num_tokens[sequence.slot])
    computed = sequence.num_computed_tokens
    _expect(held == computed, sequence.request, f"holds {held} tokens and computed {computed}")
    return sequence.slot


def _expect(condition: bool, request: Request, found: object) -> None:
    if not condition:
        raise AssertionError(f"request {request.request_id!r}: {found}")
