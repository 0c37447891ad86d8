"""Iteration-level scheduling: which tokens of which sequences each step computes."""

from __future__ import annotations

import bisect
import operator

import numpy as np
from jaxtyping import Int

from jpaged.memory import BlockManager
from jpaged.scheduling.request import Request, RequestStatus, Sequence
from jpaged.scheduling.step_plan import StepPlan

_arrival_order = operator.attrgetter("arrival_order")


class Scheduler:
    """First come, first served, iteration by iteration (Orca's scheduling, OSDI 2022, over
    PagedAttention's memory, SOSP 2023), with prompts cut into chunks that share a token budget with
    the decodes (Sarathi-Serve, OSDI 2024).

    Each step:
      1. Every running sequence that is one token short (a decode) computes it; as many run at most
         as there are tokens in the budget, so none is ever left out.
      2. Running sequences that are further behind, in order of arrival, share what is left of the
         budget, each up to the whole rest of its context (a chunk).
      3. If the free blocks do not suffice for that, the running request that arrived last is
         preempted: it loses slot and blocks, goes back to its place in the waiting queue, and later
         computes prompt and generated tokens again, as one prefill. Repeat from 1. Blocks are only
         taken once the whole plan fits, so a request that drops out of it holds none.
      4. Unless one was preempted, waiting requests are admitted in order of arrival while budget,
         slots and memory last, up to the first that does not fit. A request fits if its whole
         context, not just its first chunk, finds room beside what the running ones will take
         until it is computed, with the watermark to spare. Its blocks are then taken chunk by
         chunk. So whatever is admitted, for the first time or again, samples at least one token
         before it can be preempted: nobody comes and goes without progress.

    Every request finishes. Take the earliest unfinished one. Running, it is preempted only when it
    is the last one running, that is alone; but alone it fits, since `add` refuses what does not.
    So it computes at least one token a step (the first decode, or the first chunk, for which the
    other decodes leave at least one token) and ends. Waiting, it heads the queue, so
    nothing else is admitted; what runs comes to an end by the same argument, within itself; and
    when nothing runs the pool is empty and the watermark is not asked for.

    Not thread-safe. A plan goes to `update` (or `abandon`) before the next one is made; requests
    may be added, aborted and finished in between.

    Attributes:
        block_manager: the memory of the running sequences.
        max_num_batched_tokens, max_model_len: as given.
        waiting, running: requests in order of arrival. Read only for others.
        steps: plans made that compute something.
        prompt_tokens: tokens of the prompts admitted so far, each counted once.
        generated_tokens: tokens appended so far.
        scheduled_tokens: tokens of all plans, repeated ones included.
        preemptions_recompute: how often a request was preempted.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        watermark: float = 0.01,
    ) -> None:
        """watermark: the share of num_blocks that an admission leaves free, in [0, 1)."""
        for name, value in (
            ("block_size", block_size),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
        ):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {watermark}")
        self.block_manager = BlockManager(
            num_blocks,
            block_size,
            # A running sequence computes at least one token a step: more rows are never in use.
            max_sequences=min(max_num_seqs, max_num_batched_tokens),
            max_blocks_per_sequence=-(-max_model_len // block_size),
        )
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.scheduled_tokens = 0
        self.preemptions_recompute = 0
        self._watermark_blocks = int(watermark * num_blocks)
        self._requests: dict[str, Request] = {}  # the unfinished ones
        self._slots_used_share_sum = 0.0
        # int32 [slots], the most token slots that the sequence of each slot will ever hold.
        self._max_held = np.zeros_like(self.block_manager.num_tokens)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    @property
    def slots_used_share(self) -> float:
        """Share of the allocated token slots that hold a token, averaged over steps; 1.0 before
        the first."""
        return self._slots_used_share_sum / self.steps if self.steps else 1.0

    def check_fits(self, max_total_tokens: int) -> None:
        """Raise ValueError if a request of so many tokens could never run, whatever else does."""
        if max_total_tokens > self.max_model_len:
            raise ValueError(
                f"max_total_tokens must be at most max_model_len={self.max_model_len}, "
                f"got {max_total_tokens}"
            )
        manager = self.block_manager
        needed = manager.blocks_for(max_total_tokens - 1)  # the last token is never fed back
        if needed > manager.num_blocks:
            raise ValueError(
                f"a request of up to {max_total_tokens} tokens needs {needed} blocks of "
                f"{manager.block_size} token slots, and the KV pool has {manager.num_blocks}"
            )

    def add(self, request: Request) -> None:
        """Put a new request in the waiting queue, at its place by arrival.

        Raises:
            ValueError: its id belongs to an unfinished request, or it could never fit in the pool.
        """
        if request.request_id in self._requests:
            raise ValueError(f"request_id must be new, {request.request_id!r} is unfinished")
        self.check_fits(request.max_total_tokens)
        self._requests[request.request_id] = request
        bisect.insort(self.waiting, request, key=_arrival_order)

    def abort(self, request_id: str) -> bool:
        """End an unfinished request, wherever it is, with reason "abort"; False if unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        for sequence in request.sequences:
            self.finish(sequence, "abort")
        return True

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next step and take the memory for them.

        The plan is empty only if no request is unfinished.
        """
        manager = self.block_manager
        preempted: list[Sequence] = []
        while True:
            decodes, chunks = self._plan_running()
            decode_slots = np.fromiter((s.slot for s in decodes), np.int32, len(decodes))
            needed = manager.blocks_needed_one(decode_slots)
            needed += sum(manager.blocks_needed(s.slot, length) for s, length in chunks)
            if needed <= manager.num_free_blocks:
                break
            preempted.extend(self._preempt(self.running[-1]))
            self.preemptions_recompute += 1
        manager.append_one(decode_slots)
        for sequence, length in chunks:
            manager.append(sequence.slot, length)
        admitted = [] if preempted else self._admit(decodes, chunks)
        return self._make_plan(decodes, chunks, admitted, preempted)

    def _plan_running(self) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """What the running sequences would like to compute: decodes, and (sequence, tokens)."""
        decodes: list[Sequence] = []
        behind: list[Sequence] = []
        for request in self.running:
            for sequence in request.sequences:
                if sequence.num_tokens - sequence.num_computed_tokens == 1:
                    decodes.append(sequence)
                else:
                    behind.append(sequence)
        budget = self.max_num_batched_tokens - len(decodes)
        chunks = []
        for sequence in behind:
            if budget == 0:
                break
            length = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            chunks.append((sequence, length))
            budget -= length
        return decodes, chunks

    def _preempt(self, request: Request) -> list[Sequence]:
        for sequence in request.sequences:
            self.block_manager.free(sequence.slot)
            sequence.slot = -1
            sequence.num_computed_tokens = 0
        self._remove(self.running, request)
        bisect.insort(self.waiting, request, key=_arrival_order)
        request.status = RequestStatus.PREEMPTED
        return request.sequences

    def _admit(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]]) -> list[Sequence]:
        """Admit waiting requests and append their first chunks to `chunks`."""
        manager = self.block_manager
        budget = self.max_num_batched_tokens - len(decodes) - sum(length for _, length in chunks)
        admitted: list[Sequence] = []
        # While there is budget left, every running sequence has its whole context in this plan and
        # its blocks: a chunk that is cut short uses up the budget. So the free blocks are not
        # promised to anyone, and the next request would be the only one that is still behind.
        while self.waiting and budget > 0 and manager.num_free_slots > 0:
            request = self.waiting[0]
            (sequence,) = request.sequences
            length = min(sequence.num_tokens, budget)
            if not self._fits(sequence, length):
                break
            budget -= length
            sequence.slot = manager.allocate(length)
            self._max_held[sequence.slot] = request.max_total_tokens - 1
            chunks.append((sequence, length))
            admitted.append(sequence)
            if request.status is RequestStatus.WAITING:  # its first time
                self.prompt_tokens += sequence.num_prompt_tokens
            request.status = RequestStatus.RUNNING
            del self.waiting[0]
            bisect.insort(self.running, request, key=_arrival_order)
        return admitted

    def _fits(self, sequence: Sequence, first_chunk: int) -> bool:
        """Whether a sequence can be computed to its end and sampled without preempting any."""
        manager = self.block_manager
        # Its context and, unless that will be the last, the token sampled next.
        num_tokens = min(sequence.num_tokens + 1, sequence.request.max_total_tokens - 1)
        needed = manager.blocks_for(num_tokens)
        if not self.running:  # the whole pool is free
            return needed <= manager.num_free_blocks
        needed += self._watermark_blocks
        if needed > manager.num_free_blocks:
            return False
        # Steps until its last chunk: the others decode meanwhile, one token each at most.
        budget = self.max_num_batched_tokens - len(self.running)
        steps = -(-(sequence.num_tokens - first_chunk) // budget)
        held = manager.num_tokens[used := np.flatnonzero(manager.num_tokens)]
        ahead = np.minimum(held + steps, self._max_held[used])
        needed += int((manager.blocks_for(ahead) - manager.blocks_for(held)).sum())
        return needed <= manager.num_free_blocks

    def _make_plan(
        self,
        decodes: list[Sequence],
        chunks: list[tuple[Sequence, int]],
        admitted: list[Sequence],
        preempted: list[Sequence],
    ) -> StepPlan:
        unfinished = []  # chunks that end before the last known token
        sequences = decodes
        lengths = [1] * len(decodes)
        for sequence, length in chunks:
            if sequence.num_computed_tokens + length == sequence.num_tokens:
                sequences.append(sequence)
                lengths.append(length)
            else:
                unfinished.append((sequence, length))
        num_sampled = len(sequences)
        for sequence, length in unfinished:
            sequences.append(sequence)
            lengths.append(length)
        plan = StepPlan(
            sequences=sequences,
            slots=np.fromiter((s.slot for s in sequences), np.int32, len(sequences)),
            starts=np.fromiter(
                (s.num_computed_tokens for s in sequences), np.int32, len(sequences)
            ),
            lengths=np.array(lengths, np.int32),
            num_sampled=num_sampled,
            num_tokens=sum(lengths),
            admitted=admitted,
            preempted=preempted,
        )
        if sequences:
            self.steps += 1
            self.scheduled_tokens += plan.num_tokens
            self._slots_used_share_sum += self.block_manager.slots_used_share
        return plan

    def update(self, plan: StepPlan, tokens: Int[np.ndarray, " num_sampled"]) -> list[Sequence]:
        """Take in a step's result: the token sampled by each of the plan's first num_sampled rows.

        A sequence ends with "stop" at one of its request's stop_token_ids once it has at least
        min_tokens generated tokens, that one included, else with "length" at max_total_tokens; its
        blocks are then free. Rows of sequences that were finished meanwhile are passed over.

        Returns the sequences that got a token, in the order of the plan.
        """
        if len(tokens) != plan.num_sampled:
            raise ValueError(f"tokens must be {plan.num_sampled} token ids, got {len(tokens)}")
        updated = []
        for sequence, token in zip(plan.sequences, tokens.tolist()):
            if sequence.finish_reason is not None:
                continue
            num_tokens = sequence.num_tokens
            sequence.token_ids[num_tokens] = token
            sequence.num_computed_tokens = num_tokens
            sequence.num_tokens = num_tokens + 1
            updated.append(sequence)
            request = sequence.request
            if token in request.stop_token_ids and self._may_stop(sequence):
                listed = request.sampling_params.stop_token_ids or ()
                self.finish(sequence, "stop", token if token in listed else None)
            elif num_tokens + 1 == request.max_total_tokens:
                self.finish(sequence, "length")
        for row in range(plan.num_sampled, len(plan.sequences)):
            sequence = plan.sequences[row]
            if sequence.finish_reason is None:
                sequence.num_computed_tokens += int(plan.lengths[row])
        self.generated_tokens += len(updated)
        return updated

    def abandon(self) -> None:
        """Take back the last plan instead of updating it, because its step failed.

        What the KV pool holds now cannot be trusted, so all running requests go back to the
        waiting queue without memory, as if preempted (and not counted as such).
        """
        while self.running:
            self._preempt(self.running[-1])

    @staticmethod
    def _may_stop(sequence: Sequence) -> bool:
        return sequence.num_output_tokens >= sequence.request.sampling_params.min_tokens

    def finish(self, sequence: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End a sequence and give back its memory; one that is finished only changes its reason.

        The engine calls it when a stop string is complete, which may be in the same step in which
        `update` found the sequence finished.
        """
        already_finished = sequence.finish_reason is not None
        sequence.finish_reason = reason
        sequence.stop_reason = stop_reason
        if already_finished:
            return
        if sequence.slot >= 0:
            self.block_manager.free(sequence.slot)
            sequence.slot = -1
        request = sequence.request
        if all(s.finish_reason is not None for s in request.sequences):
            queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
            self._remove(queue, request)
            request.status = RequestStatus.FINISHED
            del self._requests[request.request_id]

    @staticmethod
    def _remove(queue: list[Request], request: Request) -> None:
        del queue[bisect.bisect_left(queue, request.arrival_order, key=_arrival_order)]

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, requests and memory agree; between steps only.

        Holds between `update` and `schedule`: each running sequence's row holds exactly its
        computed tokens, waiting ones hold nothing, both queues are in order of arrival, and every
        unfinished request is in one of them.
        """
        manager = self.block_manager
        manager.check_integrity()
        slots = []
        for request in self.running:
            _expect(request.status is RequestStatus.RUNNING, request, request.status)
            for s in request.sequences:
                _expect(s.slot >= 0, request, "runs without a slot")
                held = int(manager.num_tokens[s.slot])
                _expect(held == s.num_computed_tokens, request, (held, s.num_computed_tokens))
                _expect(s.num_computed_tokens < s.num_tokens, request, "has nothing to compute")
                slots.append(s.slot)
        if sorted(slots) != np.flatnonzero(manager.num_tokens).tolist():
            raise AssertionError(f"running sequences hold slots {sorted(slots)}")
        for request in self.waiting:
            waits = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
            _expect(waits, request, request.status)
            for s in request.sequences:
                _expect(s.slot < 0, request, "waits with a slot")
                _expect(s.num_computed_tokens == 0, request, "waits with computed tokens")
        for queue in (self.waiting, self.running):
            if queue != sorted(queue, key=_arrival_order):
                raise AssertionError("a queue is out of order")
        queued = [r.request_id for r in self.waiting + self.running]
        if sorted(queued) != sorted(self._requests):
            raise AssertionError(f"queued {sorted(queued)}, unfinished {sorted(self._requests)}")


def _expect(condition: bool, request: Request, found: object) -> None:
    if not condition:
        raise AssertionError(f"request {request.request_id!r}: {found}")
