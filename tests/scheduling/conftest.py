"""A serving loop without a model, which checks every plan that the scheduler makes."""

from __future__ import annotations

import types
from collections.abc import Callable

import numpy as np
import pytest

from jpaged.scheduling import Request, Scheduler, StepPlan


def _make_request(
    number: int,
    prompt: int,
    output: int,
    *,
    arrival_time: float = 0.0,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    eos: tuple[int, ...] = (),
) -> Request:
    """Request "number" with `prompt` tokens, all distinct from other requests' and positions'."""
    return Request(
        str(number),
        number,
        [_token(number, position) for position in range(prompt)],
        types.SimpleNamespace(
            min_tokens=min_tokens,
            stop_token_ids=stop_token_ids or None,
            priority=0,
            cache_salt=None,
            prompt_logprobs=None,
        ),
        stop_token_ids=frozenset(stop_token_ids + eos),
        max_total_tokens=prompt + output,
        arrival_time=arrival_time,
    )


def _token(number: int, position: int) -> int:
    return number * 10_000 + position


class ServingLoop:
    """Drives a scheduler as an engine does, on a KV pool that holds the tokens themselves.

    `step` writes the tokens of the plan through the block tables, reads back every row's whole
    context, "samples" token number * 10_000 + position, and asserts what must hold in any step.
    """

    def __init__(self, **config) -> None:
        config = {"max_model_len": 4096, "watermark": 0.0, **config}
        self.scheduler = Scheduler(**config)
        self.manager = self.scheduler.block_manager
        self.block_size = config["block_size"]
        self.budget = config["max_num_batched_tokens"]
        self.kv_pool = np.full(config["num_blocks"] * self.block_size, -1)
        self.computed: dict = {}  # sequence -> tokens in the pool, as seen from outside
        self.sampled_since_admission: dict = {}
        self.plans: list[StepPlan] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def step(self, between: Callable[[StepPlan], None] = lambda plan: None) -> StepPlan:
        """One step; `between` is called while the device would compute."""
        ran_before = list(self.scheduler.running)
        assert self.scheduler.has_unfinished
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        self._check_choice(plan, ran_before)
        self._check_rows(plan)
        sampled = plan.sequences[: plan.num_sampled]
        results: list[np.ndarray] = []
        while len(results) < plan.num_steps:
            step = len(results)
            self._write_and_read(plan, step)
            numbers = [(s.request.number, s.num_tokens + step) for s in sampled]
            results.append(np.array([_token(*number) for number in numbers], np.int64))
            stops = [s.request.stop_token_ids for s in sampled]
            if any(token in stop for token, stop in zip(results[-1].tolist(), stops)):
                break
        between(plan)
        if len(results) < plan.num_steps:
            self.scheduler.end_early(plan, len(results))
        for tokens in results:
            alive = [s for s in sampled if s.finish_reason is None]
            assert self.scheduler.update(plan, tokens) == alive
        for sequence, length in zip(plan.sequences, plan.lengths.tolist(), strict=True):
            self.computed[sequence] += length * plan.num_steps
        for sequence in sampled:
            self.sampled_since_admission[sequence] += plan.num_steps
        self.scheduler.check_integrity()
        return plan

    def run(self, max_steps: int = 20_000) -> int:
        """Steps until nothing is unfinished; returns their number."""
        for steps in range(max_steps):
            if not self.scheduler.has_unfinished:
                assert self.manager.num_used_blocks == 0
                return steps
            self.step()
        raise AssertionError(f"unfinished after {max_steps} steps")

    def _check_choice(self, plan: StepPlan, ran_before: list[Request]) -> None:
        scheduler = self.scheduler
        order = [request.arrival_order for request in scheduler.running]
        assert order == sorted(order)
        admitted = {s.request for s in plan.admitted}
        preempted = {s.request for s in plan.preempted}
        assert not (admitted and preempted)
        assert set(scheduler.running) == (set(ran_before) - preempted) | admitted
        assert len(scheduler.running) <= min(len(self.manager.tables), self.budget)
        if preempted:  # the latest ones, never all
            assert min(r.arrival_order for r in preempted) > max(order)
        if admitted and scheduler.waiting:  # the earliest ones
            first_waiting = scheduler.waiting[0].arrival_order
            assert max(r.arrival_order for r in admitted) < first_waiting
        for sequence in plan.preempted:
            assert sequence.slot == -1
            assert self.sampled_since_admission.pop(sequence) > 0, "preempted without progress"
            del self.computed[sequence]
        for sequence in plan.admitted:
            assert sequence not in self.computed
            self.computed[sequence] = 0
            self.sampled_since_admission[sequence] = 0

    def _check_rows(self, plan: StepPlan) -> None:
        assert plan.sequences, "a step without work"
        assert len(set(plan.sequences)) == len(plan.sequences)
        for array in (plan.slots, plan.starts, plan.lengths):
            assert array.dtype == np.int32
            assert array.shape == (len(plan.sequences),)
        assert plan.num_tokens == plan.lengths.sum() <= self.budget
        assert plan.lengths.min() >= 1
        later = plan.num_steps - 1
        assert 0 <= later < self.scheduler.max_decode_steps
        assert not later or plan.num_decodes == len(plan.sequences)
        for row, sequence in enumerate(plan.sequences):
            end = plan.starts[row] + plan.lengths[row]
            # Every token is computed once, in order, since the sequence was admitted.
            assert plan.starts[row] == self.computed[sequence]
            assert end <= sequence.num_tokens
            assert (row < plan.num_sampled) == (end == sequence.num_tokens)
            assert plan.slots[row] == sequence.slot
            # Blocks for the tokens of the plan's steps, and for no later one.
            assert self.manager.num_tokens[sequence.slot] == end + later
            blocks = -(-(end + later) // self.block_size)
            assert len(self.manager.block_table(sequence.slot)) == blocks
            # Nobody samples more than it may, nor a stop token before its time.
            assert end + later < sequence.request.max_total_tokens or end + later == end
            least = sequence.request.sampling_params.min_tokens
            if later and sequence.num_output_tokens < least:
                assert sequence.num_output_tokens + later < least
        # Nobody whom only one token is missing waits for it, nor does the earliest.
        planned = set(plan.sequences)
        running = [s for request in self.scheduler.running for s in request.sequences]
        assert running[0] in planned
        assert all(s in planned for s in running if s.num_tokens - s.num_computed_tokens == 1)
        # Blocks are held by running sequences alone, each less than one block too much.
        held = sum(self.manager.num_blocks_of(s.slot) for s in running)
        assert held == self.manager.num_used_blocks
        empty = held * self.block_size - self.manager.num_used_token_slots
        assert 0 <= empty <= len(running) * (self.block_size - 1)

    def _write_and_read(self, plan: StepPlan, step: int) -> None:
        slot_mappings = []
        for row, sequence in enumerate(plan.sequences):
            start = plan.starts[row] + step
            end = start + plan.lengths[row]
            positions = np.arange(end)
            table = self.manager.tables[plan.slots[row]]
            mapping = table[positions // self.block_size] * self.block_size
            mapping += positions % self.block_size
            number = sequence.request.number
            known = sequence.token_ids[start:end] if not step else [_token(number, start)]
            self.kv_pool[mapping[start:]] = known
            slot_mappings.append(mapping)
        for sequence, mapping in zip(plan.sequences, slot_mappings, strict=True):
            expected = [_token(sequence.request.number, p) for p in range(len(mapping))]
            assert self.kv_pool[mapping].tolist() == expected


@pytest.fixture(scope="session")
def serving_loop() -> type[ServingLoop]:
    return ServingLoop


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    return _make_request
