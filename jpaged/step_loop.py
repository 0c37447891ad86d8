"""The loop over steps: plan, dispatch, take in; with overlap one step ahead of the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from jpaged.request_state import RequestState
from jpaged.runner.preemption_costs import PreemptionCosts
from jpaged.scheduling import Scheduler, Sequence, StepPlan
from jpaged.step_execution import (
    StepExecutor,
    StepResults,
    StepRunner,
    collect_prompt_logprobs,
)


class _StepUnderWay(NamedTuple):
    plan: StepPlan
    result: StepResults
    dispatched: float  # by time.perf_counter


class StepLoop:
    """Runs a scheduler's plans on a runner.

    With `overlap` a step is planned and dispatched while the one before it runs, so that the device
    need not wait for the host: sampled tokens feed the next step on the device, and the host takes
    them in a step later. What one of them ends has a surplus row in the step that is under way by
    then, which is passed over. (Asynchronous scheduling, as other engines call it.)

    What is planned ahead also makes an arrival wait for one step more: its own comes after the one
    that is under way and the one that is planned. Where steps are long and the host's part of them
    is small, as on a CPU, that is a bad bargain while requests keep coming, so of the `patience`
    steps after an arrival none is planned before the one that is under way has been taken in (the
    first of them finds what was planned before the arrival).

    Attributes:
        costs: told how long prefills take, or None.
        patience: as said, in steps; 0 to plan ahead always.
    """

    def __init__(
        self, runner: StepRunner, scheduler: Scheduler, *, overlap: bool, patience: int = 0
    ) -> None:
        self.costs: PreemptionCosts | None = None
        self.patience = patience
        self._steps_to_wait = 0  # before one is planned ahead again
        self._runner = runner
        self._scheduler = scheduler
        self._overlap = overlap
        self._executor = StepExecutor(runner, scheduler.block_manager)
        self._under_way: _StepUnderWay | None = None
        # Requests that changed; told by the next step if this one fails after it has taken some in.
        self._changed: dict[str, RequestState] = {}
        self._taken_in = 0.0  # when the last step was, by time.perf_counter

    @property
    def padded_tokens(self) -> int:
        """Token rows computed for nothing so far: bucket sizes less the plans' tokens."""
        return self._executor.padded_tokens

    @property
    def is_idle(self) -> bool:
        """Whether no step is under way, and nothing that one has brought is left to tell."""
        return self._under_way is None and not self._changed

    def arrived(self) -> None:
        """Note that a request has come."""
        self._steps_to_wait = self.patience

    def step(self, tracked: Mapping[str, RequestState]) -> list[RequestState]:
        """Dispatch the next step, if there is anything to compute, and take in those whose tokens
        are needed now; returns the requests that changed.

        tracked  the unfinished requests by id
        """
        plans_ahead = self._overlap and not self._steps_to_wait
        self._steps_to_wait = max(0, self._steps_to_wait - 1)
        before, self._under_way = self._under_way, None
        if before is not None and all(s.finish_reason for s in before.plan.sequences):
            before = None  # surplus rows alone: nobody is to suffer from how they fare
        # One that is there already may have been for long: the caller was away.
        is_timed = before is not None and not before.result.is_ready()
        with self._careful():
            plan = self._scheduler.schedule()
            result = self._executor.execute(plan, tracked)
        if result is not None:
            self._under_way = _StepUnderWay(plan, result, time.perf_counter())
        if before is not None:
            self._take_in(before, tracked, is_timed=is_timed)
        now = self._under_way
        if now is not None and (not plans_ahead or plan.needs_tokens):
            self._under_way = None
            self._take_in(now, tracked, is_timed=True)
        changed, self._changed = self._changed, {}
        return list(changed.values())

    @contextlib.contextmanager
    def _careful(self) -> Iterator[None]:
        """Go on from a failing device: what was planned was not computed for certain. The running
        requests lose their memory and the tokens that are not taken in yet, and compute both
        again."""
        try:
            yield
        except BaseException:
            self._under_way = None
            self._scheduler.abandon()
            self._runner.restore_pools()
            raise

    def _take_in(
        self, done: _StepUnderWay, tracked: Mapping[str, RequestState], *, is_timed: bool
    ) -> None:
        """Wait for a plan's tokens and hand them on, one step after another."""
        plan, result, dispatched = done
        is_one_step = plan.num_steps == 1
        with self._careful():
            tokens = result.tokens(plan.num_sampled)
            if not is_one_step and (ran := result.num_steps()) < plan.num_steps:
                self._scheduler.end_early(plan, ran)
            result.wait_for_prompt_logprobs()
        now = time.perf_counter()
        began = max(dispatched, self._taken_in)  # the step before it had the device until then
        self._taken_in = now
        is_prefill = plan.num_tokens >= 2 * len(plan.sequences) and not plan.moves
        if self.costs is not None and is_prefill and is_timed:
            self.costs.observe_prefill(plan.num_tokens, now - began)
        if is_one_step:
            self._hand_on(plan, tokens, result, 0, tracked)
            collect_prompt_logprobs(plan, result, tracked)
        else:
            # Whatever breaks off in between: tokens that are not handed on must not stay pending.
            with self._careful():
                for step in range(plan.num_steps):
                    tokens = result.tokens(plan.num_sampled, step)
                    self._hand_on(plan, tokens, result, step, tracked)
        if plan.needs_tokens:
            for sequence in plan.sequences[: plan.num_sampled]:
                beams = tracked.get(sequence.request.request_id)
                if sequence.request.beams is not None and beams is not None:
                    self._changed[sequence.request.request_id] = beams

    def _hand_on(
        self,
        plan: StepPlan,
        tokens: Int[np.ndarray, " num_sampled"],
        result: StepResults,
        step: int,
        tracked: Mapping[str, RequestState],
    ) -> None:
        """Hand the tokens of one of a plan's steps to scheduler and requests."""
        updated = self._scheduler.update(plan, tokens, result.candidates)
        # The rows that sample come first, and `updated` keeps their order.
        rows: Iterable[int] = range(plan.num_sampled)
        if len(updated) < plan.num_sampled:
            row_of = {id(sequence): row for row, sequence in enumerate(plan.sequences)}
            rows = [row_of[id(sequence)] for sequence in updated]
        for sequence, row in zip(updated, rows, strict=True):
            request_id = sequence.request.request_id
            state = self._changed[request_id] = tracked[request_id]
            if state.reads_tokens:
                self._advance(state, sequence, result, row, step)

    def _advance(
        self, state: RequestState, sequence: Sequence, result: StepResults, row: int, step: int
    ) -> None:
        """Take in a sequence's new token: logprobs and stop strings."""
        params = state.request.sampling_params
        sample = state.samples[sequence.index]
        if state.needs_logprobs:
            chosen, logprobs = result.logprobs(row, params.logprobs or 0, step)
            sample.cumulative_logprob += chosen
            if params.logprobs is not None:
                sample.logprobs.append(logprobs)
        if params.stop or state.reports_progress:
            stop_string = sample.detokenize()
            if stop_string is not None:
                self._scheduler.finish(sequence, "stop", stop_string)
