"""Iteration-level scheduling: which tokens of which sequences each step computes."""

from __future__ import annotations

import bisect
import operator
from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from jpaged.memory import BlockManager
from jpaged.scheduling import admission
from jpaged.scheduling.integrity import check_integrity
from jpaged.scheduling.policies import FirstComeFirstServed, Policy
from jpaged.scheduling.request import UNKNOWN_TOKEN, Request, RequestStatus, Sequence
from jpaged.scheduling.request_memory import RequestMemory
from jpaged.scheduling.step_plan import StepPlan, make_plan

_order = operator.attrgetter("order")

# For a row of a beam: token ids and log-probabilities of the tokens that may follow, best first.
Candidates = Callable[[int], tuple[np.ndarray, np.ndarray]]


class Scheduler:
    """Iteration by iteration (Orca's scheduling, OSDI 2022, over PagedAttention's memory, SOSP
    2023), with prompts cut into chunks that share a token budget with the decodes (Sarathi-Serve,
    OSDI 2024). A policy orders the requests: first come first served, or by priority.

    Each step:
      1. Every running sequence that is one token short (a decode) computes it; as many run at most
         as there are tokens in the budget, so none is ever left out.
      2. Running sequences that are further behind, in order, share what is left of the budget, each
         up to the whole rest of its context (a chunk).
      3. If the free blocks do not suffice for that, the last running request is preempted, with
         all its sequences: it loses rows and blocks and goes back to its place in the waiting
         queue. Its blocks are saved to the swap space, or computed again later (prompt and
         generated tokens as one prefill), whichever `prefers_swap` says. Repeat from 1. Blocks are
         only taken once the whole plan fits, so a request that drops out of it holds none.
      4. Unless one was preempted, waiting requests are admitted in order while budget, rows and
         memory last, up to the first that does not fit. A request fits if its whole context, not
         just its first chunk, finds room beside what the running ones will take until it is
         computed, with the watermark to spare. Its blocks are then taken chunk by chunk. So
         whatever is admitted, for the first time or again, samples at least one token before it
         can be preempted: nobody comes and goes without progress. (But the policy may let the
         first waiting request push out running ones that stand behind it.)

    Every request finishes. Take the first unfinished one. Running, it is preempted only when it is
    the last one running, that is alone; but alone it fits, since `add` refuses what does not. So it
    computes at least one token a step (the first decode, or the first chunk, for which the other
    decodes leave at least one token) and ends. Waiting, it heads the queue, so nothing else is
    admitted; what runs comes to an end by the same argument, within itself; and when nothing runs
    the pool is empty and the watermark is not asked for. Under either policy only finitely many
    requests can come before a given one.

    A step may be planned while the one before it runs, without knowing the tokens that this one
    samples: each counts as pending, and a sequence with a pending token decodes like any other (the
    device feeds it the token). What such a token brings to an end is found out a step late, and
    the surplus row passed over; ends by length are foreseen. Beams cannot be planned ahead
    (`StepPlan.needs_tokens`). A preempted request comes back once its tokens are known.

    When nobody comes or goes a plan may be of several decode steps, up to max_decode_steps and up
    to the first end that is foreseen: blocks are then taken for the tokens of all of them, and what
    a stop token leaves over is given back by `end_early`.

    Not thread-safe. Plans go to `update` in order, each before the next but one is made, or all to
    `abandon`; requests may be added, forked, aborted and finished in between.

    Attributes:
        memory: what the requests hold, with counters of preemptions and cache hits.
        block_manager: its blocks.
        policy: the order of the requests.
        max_num_batched_tokens, max_model_len, max_decode_steps: as given.
        waiting, running: requests in order. Read only for others.
        kept: finished requests that hold their blocks for forks. Read only for others.
        steps: steps planned that compute something.
        prompt_tokens: tokens of the prompts admitted so far, each counted once.
        generated_tokens: tokens appended so far; of a beam search, one a beam and step.
        scheduled_tokens: tokens of all plans, repeated ones included.
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
        num_swap_blocks: int = 0,
        enable_prefix_caching: bool = False,
        policy: Policy | None = None,
        prefers_swap: Callable[[int, int], bool] = lambda num_blocks, num_tokens: False,
        max_decode_steps: int = 1,
    ) -> None:
        """
        watermark     the share of num_blocks that an admission leaves free, in [0, 1)
        prefers_swap  whether to save a request's num_blocks blocks rather than compute its
                      num_tokens tokens again, asked when it is preempted and the swap space has
                      room
        max_decode_steps  most steps of a plan (>= 1)
        """
        for name, value in (
            ("block_size", block_size),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_model_len", max_model_len),
            ("max_decode_steps", max_decode_steps),
        ):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if not 0 <= watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {watermark}")
        self.memory = RequestMemory(
            BlockManager(
                num_blocks,
                block_size,
                # A running sequence computes at least one token a step: more are never in use.
                max_sequences=min(max_num_seqs, max_num_batched_tokens),
                max_blocks_per_sequence=-(-max_model_len // block_size),
                num_swap_blocks=num_swap_blocks,
                enable_prefix_caching=enable_prefix_caching,
            ),
            prefix_caching=enable_prefix_caching,
            prefers_swap=prefers_swap,
        )
        self.block_manager = self.memory.block_manager
        self.policy = FirstComeFirstServed() if policy is None else policy
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_decode_steps = max_decode_steps
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.kept: list[Request] = []
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.scheduled_tokens = 0
        self._watermark_blocks = int(watermark * num_blocks)
        self._requests: dict[str, Request] = {}  # the unfinished and the kept ones
        self._slots_used_share = 1.0  # of the last plan
        self._slots_used_share_sum = 0.0
        self._saved: list[Request] = []  # those that the last plan swaps out

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.running or self.waiting)

    def unfinished_request_ids(self) -> list[str]:
        """The ids of all requests that are waiting or running."""
        return [name for name, request in self._requests.items() if not request.finished]

    def get(self, request_id: str) -> Request | None:
        """The unfinished or kept request of this name, or None."""
        return self._requests.get(request_id)

    @property
    def slots_used_share(self) -> float:
        """Share of the allocated token slots that hold a token, averaged over steps; 1.0 before
        the first."""
        return self._slots_used_share_sum / self.steps if self.steps else 1.0

    @property
    def num_free_rows(self) -> int:
        """Rows of the block tables that no running request may need, and no kept one has."""
        needed = sum(request.num_rows for request in self.running)
        return len(self.block_manager.tables) - needed - len(self.kept)

    def check_fits(self, prompt_len: int, max_total_tokens: int, num_sequences: int = 1) -> None:
        """Raise ValueError if a request of num_sequences sequences, each of up to max_total_tokens
        tokens, could never run, whatever else does."""
        if max_total_tokens > self.max_model_len:
            raise ValueError(
                f"max_total_tokens must be at most max_model_len={self.max_model_len}, "
                f"got {max_total_tokens}"
            )
        manager = self.block_manager
        if num_sequences > len(manager.tables):
            raise ValueError(
                f"a request of {num_sequences} sequences needs as many rows, and max_num_seqs and "
                f"max_num_batched_tokens leave {len(manager.tables)}"
            )
        # The last token is never fed back.
        needed = admission.blocks_of_group(
            manager, prompt_len - 1, [max_total_tokens - 1] * num_sequences
        )
        if needed > manager.num_blocks:
            raise ValueError(
                f"a request of {num_sequences} sequence{'s' * (num_sequences > 1)} of up to "
                f"{max_total_tokens} tokens needs "
                f"{needed} blocks of {manager.block_size} token slots, and the KV pool has "
                f"{manager.num_blocks}"
            )

    def add(self, request: Request) -> None:
        """Put a new request in the waiting queue, at its place in the policy's order.

        Raises:
            ValueError: its id belongs to an unfinished or kept request, or it could never fit.
        """
        self._register(request)
        bisect.insort(self.waiting, request, key=_order)

    def _register(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise ValueError(
                f"request_id must be new, {request.request_id!r} is unfinished or kept"
            )
        self.check_fits(len(request.prompt_token_ids), request.max_total_tokens, request.num_rows)
        request.order = self.policy.order(request)
        self._requests[request.request_id] = request

    def fork(self, request_id: str, children: list[Request]) -> None:
        """Add requests that begin with the tokens of an unfinished or kept one, sharing its blocks.

        request_id  of a request of one sequence, without beams
        children    of one sequence each, whose prompts are the parent's tokens so far

        Where the parent holds no blocks, rows run out, or it is finished and others wait, the
        children wait like any other request.

        Raises:
            ValueError: no such request, or a child cannot be added.
        """
        parent = self._requests.get(request_id)
        if parent is None:
            raise ValueError(
                f"request_id must name an unfinished or kept request, got {request_id!r}"
            )
        for i, child in enumerate(children):
            try:
                self._register(child)
            except ValueError:
                for registered in children[:i]:
                    del self._requests[registered.request_id]
                raise
        (source,) = parent.sequences
        # A search that goes on from finished requests must not run past those who wait.
        waits = parent.finished and self.waiting
        # Each child computes its last token itself, to sample from it. Where the parent's is
        # computed already, or on its way, the child shares the full blocks before it.
        held, most = source.num_computed_tokens, source.num_tokens - 1
        shared = None
        if held > most:
            held = shared = most // self.block_manager.block_size * self.block_manager.block_size
        if source.slot < 0 or not held or self.num_free_rows < len(children) or waits:
            for child in children:
                bisect.insort(self.waiting, child, key=_order)
            return
        self.memory.share(source, [child.sequences[0] for child in children], shared)
        for child in children:
            self.prompt_tokens += len(child.prompt_token_ids)
            self._run(child)

    def release(self, request_id: str) -> bool:
        """Give back the blocks of a kept request; False if there is no such one."""
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.KEPT:
            return False
        if request in self.kept:
            self.kept.remove(request)
            self.memory.release(request.sequences[0])
        request.status = RequestStatus.FINISHED
        del self._requests[request_id]
        return True

    def abort(self, request_id: str) -> bool:
        """End an unfinished request, wherever it is, with reason "abort"; False if unknown."""
        request = self._requests.get(request_id)
        if request is None or request.finished:
            return False
        request.keep = False
        for sequence in request.unfinished:
            self.finish(sequence, "abort")
        return True

    # --- Planning a step

    def schedule(self) -> StepPlan:
        """Choose the tokens of the next step and take the memory for them.

        From then on they count as computed. The plan is empty only if no request is unfinished, or
        all that are wait for the tokens of the step under way.
        """
        manager = self.block_manager
        self._saved = []
        pushed_out = self._push_out()
        preempted: list[Sequence] = []
        while True:
            decodes, chunks = self._plan_running()
            decode_slots = np.fromiter((s.slot for s in decodes), np.int32, len(decodes))
            needed = manager.blocks_needed_one(decode_slots)
            needed += sum(manager.blocks_needed(s.slot, length) for s, length in chunks)
            # A request that is alone fits, as `add` has seen to; `needed` may count a copy too many
            # for a group whose sequences share their last block.
            is_alone = len(self.running) == 1 and not self.kept
            if needed <= manager.num_free_blocks or is_alone:
                break
            if self.kept:
                self._forget_kept()
            else:
                preempted.extend(self._preempt(self.running[-1]))
        manager.append_one(decode_slots)
        for sequence, length in chunks:
            manager.append(sequence.slot, length)
        if not preempted:
            self._admit(decodes, chunks)
        slots_used_share = manager.slots_used_share  # without what is taken for later steps
        num_steps = 1
        if self.max_decode_steps > 1 and not (chunks or preempted or pushed_out):
            num_steps = self._steps_ahead(decodes, decode_slots)
            manager.append_ahead(decode_slots, num_steps - 1)
        plan = make_plan(
            decodes,
            chunks,
            admitted=self.memory.take_placed(),
            preempted=pushed_out + preempted,
            moves=self.memory.take_moves(),
            num_steps=num_steps,
        )
        self._count_as_computed(plan)
        if plan.sequences:
            self.steps += num_steps
            self.scheduled_tokens += plan.num_tokens * num_steps
            self._slots_used_share = slots_used_share
            self._slots_used_share_sum += slots_used_share * num_steps
        return plan

    def _steps_ahead(self, decodes: list[Sequence], slots: Int[np.ndarray, " n"]) -> int:
        """How many steps these decodes can run before something changes that is foreseen, or the
        free blocks run out."""
        if not decodes or any(s.num_pending for r in self.waiting[:1] for s in r.sequences):
            return 1  # who waits is only waiting for a token that is on its way
        steps = self.max_decode_steps
        for sequence in decodes:
            request = sequence.request
            if request.beams is not None:
                return 1
            known = sequence.num_tokens + sequence.num_pending
            steps = min(steps, request.max_total_tokens - known)
            least = sequence.num_prompt_tokens + request.sampling_params.min_tokens
            if request.stop_token_ids and known < least:  # banned until then
                steps = min(steps, least - known)
        manager = self.block_manager
        while manager.blocks_needed_ahead(slots, steps - 1) > manager.num_free_blocks:
            steps -= 1
        return steps

    def _plan_running(self) -> tuple[list[Sequence], list[tuple[Sequence, int]]]:
        """What the running sequences would like to compute: decodes, and (sequence, tokens)."""
        decodes: list[Sequence] = []
        behind: list[tuple[Sequence, int]] = []
        for request in self.running:
            sequences = request.sequences
            # Nearly all requests have one sequence, and this loop is most of a step's host time.
            if len(sequences) == 1:
                sequence = sequences[0]
                ahead = sequence.num_tokens + sequence.num_pending
                length = ahead - sequence.num_computed_tokens
                if length == 1:
                    # Or its last token is on its way.
                    if not sequence.num_pending or ahead < request.max_total_tokens:
                        decodes.append(sequence)
                else:
                    behind.append((sequence, length))
                continue
            for sequence, length in self.memory.wanted(request):
                if length == 1 and sequence.num_missing_tokens == 1:
                    decodes.append(sequence)
                else:
                    behind.append((sequence, length))
        budget = self.max_num_batched_tokens - len(decodes)
        chunks = []
        for sequence, length in behind:
            if budget == 0:
                break
            length = min(length, budget)
            chunks.append((sequence, length))
            budget -= length
        return decodes, chunks

    def _count_as_computed(self, plan: StepPlan) -> None:
        steps = plan.num_steps
        for row, (sequence, length) in enumerate(zip(plan.sequences, plan.lengths.tolist())):
            self.memory.computed(sequence, sequence.num_computed_tokens + length * steps)
            if row < plan.num_sampled and sequence.request.beams is None:
                known = sequence.num_tokens + sequence.num_pending
                sequence.token_ids[known : known + steps] = UNKNOWN_TOKEN
                sequence.num_pending += steps

    def _push_out(self) -> list[Sequence]:
        """Preempt what the policy lets the first waiting request push out, until it fits."""
        pushed_out: list[Sequence] = []
        while (
            self.waiting
            and self.running
            and self.policy.may_preempt(self.waiting[0], self.running[-1])
            and not self._fits(self.waiting[0], self.max_num_batched_tokens)
        ):
            if self.kept:
                self._forget_kept()
            else:
                pushed_out.extend(self._preempt(self.running[-1]))
        return pushed_out

    def _preempt(self, request: Request) -> list[Sequence]:
        sequences = self.memory.preempt(request)
        if request.status is RequestStatus.SWAPPED:
            self._saved.append(request)
        self._remove(self.running, request)
        bisect.insort(self.waiting, request, key=_order)
        return sequences

    def _forget_kept(self) -> None:
        """Take the blocks of the finished request that was kept first; it can still be forked, at
        the price of computing it again."""
        self.memory.release(self.kept.pop(0).sequences[0])

    def _admit(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]]) -> None:
        """Admit waiting requests and append their first chunks to `chunks`."""
        budget = self.max_num_batched_tokens - len(decodes) - sum(length for _, length in chunks)
        # While there is budget left, every running sequence has its whole context in this plan and
        # its blocks: a chunk that is cut short uses up the budget. So the free blocks are promised
        # to no one but the sequences that are still to be forked, and the next request would be
        # the only one that is still behind.
        while self.waiting and budget > 0:
            request = self.waiting[0]
            # Its blocks are only on their way out, or its last token on its way here.
            if request in self._saved or any(s.num_pending for s in request.sequences):
                break
            while self.kept and not self._fits(request, budget):
                self._forget_kept()
            if not self._fits(request, budget):
                break
            started = self.memory.start(request, budget)
            if started is None:
                break
            if request.status is RequestStatus.WAITING:  # its first time
                self.prompt_tokens += len(request.prompt_token_ids)
            chunks.extend(started)
            budget -= sum(length for _, length in started)
            del self.waiting[0]
            self._run(request)

    def _fits(self, request: Request, budget: int) -> bool:
        if request.num_rows > self.num_free_rows:
            return False
        return self.memory.fits(
            request,
            self.running,
            budget=budget,
            max_num_batched_tokens=self.max_num_batched_tokens,
            watermark_blocks=self._watermark_blocks,
        )

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=_order)

    # --- Taking in its result

    def end_early(self, plan: StepPlan, num_steps: int) -> None:
        """Take back what a plan's steps after the first num_steps (>= 1) would have computed: a
        stop token has ended it. To be called before `update`, and before another plan is made."""
        if not 1 <= num_steps <= plan.num_steps:
            raise ValueError(f"num_steps must be in [1, {plan.num_steps}], got {num_steps}")
        surplus = plan.num_steps - num_steps
        for sequence in plan.sequences:
            if sequence.finish_reason is None:
                self.block_manager.trim(sequence.slot, surplus)
                sequence.num_computed_tokens -= surplus
                sequence.num_pending -= surplus
        self._slots_used_share_sum -= self._slots_used_share * surplus
        self.steps -= surplus
        self.scheduled_tokens -= plan.num_tokens * surplus
        plan.num_steps = num_steps

    def update(
        self,
        plan: StepPlan,
        tokens: Int[np.ndarray, " num_sampled"],
        candidates: Candidates | None = None,
    ) -> list[Sequence]:
        """Take in a step's result: the token sampled by each of the plan's first num_sampled rows.
        Of a plan of several steps to be called once for each, in order.

        A sequence ends with "stop" at one of its request's stop_token_ids once it has at least
        min_tokens generated tokens, that one included, else with "length" at max_total_tokens; its
        blocks are then free. Rows of sequences that were finished meanwhile are passed over. Rows
        of beams take their tokens from `candidates` instead, which gives a row's
        `request.beams.num_candidates` best tokens.

        Returns the sequences that got a token, in the order of the plan, without beams.
        """
        if len(tokens) != plan.num_sampled:
            raise ValueError(f"tokens must be {plan.num_sampled} token ids, got {len(tokens)}")
        updated = []
        beam_rows: dict[Request, list[int]] = {}
        for row, (sequence, token) in enumerate(zip(plan.sequences, tokens.tolist())):
            if sequence.finish_reason is not None:
                continue
            request = sequence.request
            if request.beams is not None:
                self.memory.publish(sequence)
                beam_rows.setdefault(request, []).append(row)
                continue
            num_tokens = sequence.num_tokens
            sequence.token_ids[num_tokens] = token
            sequence.num_tokens = num_tokens + 1
            sequence.num_pending -= 1
            self.memory.publish(sequence)
            updated.append(sequence)
            if token in request.stop_token_ids and self._may_stop(sequence):
                listed = request.sampling_params.stop_token_ids or ()
                self.finish(sequence, "stop", token if token in listed else None)
            elif num_tokens + 1 == request.max_total_tokens:
                self.finish(sequence, "length")
        for sequence in plan.sequences[plan.num_sampled :]:
            self.memory.publish(sequence)
        self.generated_tokens += len(updated)
        for request, rows in beam_rows.items():
            assert candidates is not None, "beams need candidates"
            self._advance_beams(request, {plan.sequences[row]: candidates(row) for row in rows})
        return updated

    def _advance_beams(
        self, request: Request, candidates: dict[Sequence, tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """Go on with the beams that the request's search chooses among their candidates."""
        assert request.beams is not None
        token_ids, logprobs = zip(*(candidates[s] for s in request.sequences), strict=True)
        step = request.beams.advance(np.stack(token_ids), np.stack(logprobs))
        self.generated_tokens += request.beams.width
        if step.done:
            for sequence in request.unfinished:
                self.finish(sequence, "stop")
        else:
            self.memory.replace_beams(request, step)

    def abandon(self) -> None:
        """Take back the plans that were not updated, because a step failed.

        What the KV pool holds now cannot be trusted, nor what the step was to save, so all running
        requests go back to the waiting queue without memory, as if preempted to be computed again
        (and not counted as such), and the cache and kept blocks are forgotten.
        """
        while self.kept:
            self._forget_kept()
        while self.running:
            request = self.running.pop()
            self.memory.forget(request)
            bisect.insort(self.waiting, request, key=_order)
        for request in self._saved:
            if request.swapped is not None:
                self.memory.forget(request)
        self._saved = []
        for request in self.waiting:
            for sequence in request.sequences:
                sequence.num_pending = 0
        self.memory.take_placed()
        self.memory.take_moves()
        self.block_manager.reset_prefix_cache()

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
        request = sequence.request
        if not request.keep:
            self.memory.release(sequence)
        if request.unfinished:
            return
        self._remove(
            self.running if request.status is RequestStatus.RUNNING else self.waiting, request
        )
        if request.swapped is not None:
            self.block_manager.drop_swapped(request.swapped)
            request.swapped = None
        if request.keep:
            request.status = RequestStatus.KEPT
            if sequence.slot >= 0:
                self.kept.append(request)
        else:
            request.status = RequestStatus.FINISHED
            del self._requests[request.request_id]

    @staticmethod
    def _remove(queue: list[Request], request: Request) -> None:
        del queue[bisect.bisect_left(queue, request.order, key=_order)]

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, requests and memory agree: see `integrity`."""
        check_integrity(self)
