"""The memory of whole requests: giving them rows and blocks, and taking these back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from jpaged.memory import BlockManager, Swapped
from jpaged.memory.prefix_cache import CachedBlock
from jpaged.scheduling import admission
from jpaged.scheduling.beam_search import BeamStep
from jpaged.scheduling.request import Request, RequestStatus, Sequence
from jpaged.scheduling.step_plan import Moves

_NO_BLOCKS = np.empty(0, np.int32)


class RequestMemory:
    """Rows and blocks of requests with one or several sequences, in the KV pool or swapped out.

    Which request gets or loses memory is the scheduler's business; this is how.

    Attributes:
        block_manager: the blocks and their tables.
        preemptions_recompute, preemptions_swap: how often a request was preempted.
        swapped_out_blocks: blocks saved to the swap space so far.
        max_held: int32 [rows], the most token slots that the sequence of each row will ever hold.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        prefix_caching: bool,
        prefers_swap: Callable[[int, int], bool],
    ) -> None:
        self.block_manager = block_manager
        self.preemptions_recompute = 0
        self.preemptions_swap = 0
        self.swapped_out_blocks = 0
        self.max_held: Int32[np.ndarray, " rows"] = np.zeros_like(block_manager.num_tokens)
        self._prefix_caching = prefix_caching
        self._prefers_swap = prefers_swap
        # The waiting request that was looked up last, and what was found: it is judged again and
        # again, and then started.
        self._found: tuple[Request, list[CachedBlock]] | None = None
        self._placed: list[Sequence] = []  # given a row since the last `take_placed`
        self._swaps_out: list[Swapped] = []  # since the last `take_moves`
        self._swaps_in: list[Swapped] = []

    # --- What the next step is told

    def take_placed(self) -> list[Sequence]:
        """The sequences that were given a row since the last call, and still have it."""
        placed = [s for s in dict.fromkeys(self._placed) if s.slot >= 0]
        self._placed = []
        return placed

    def take_moves(self) -> Moves:
        """The blocks to move before the next step; forgotten here."""
        copied = np.stack(self.block_manager.take_copies())  # first: it settles the others
        moves = Moves(
            swapped_out=_pairs([(s.device_blocks, s.host_blocks) for s in self._swaps_out]),
            copied=copied,
            swapped_in=_pairs([(s.host_blocks, s.device_blocks) for s in self._swaps_in]),
        )
        self._swaps_out, self._swaps_in = [], []
        return moves

    # --- Giving memory

    def fits(
        self,
        request: Request,
        running: list[Request],
        *,
        budget: int,
        max_num_batched_tokens: int,
        watermark_blocks: int,
    ) -> bool:
        """Whether a waiting request finds blocks until it has sampled: see `admission.fits`."""
        return admission.fits(
            self.block_manager,
            request,
            _NO_BLOCKS if request.swapped is not None else self._prefix(request),
            running=running,
            budget=budget,
            max_num_batched_tokens=max_num_batched_tokens,
            watermark_blocks=watermark_blocks,
            max_held=self.max_held,
        )

    def start(self, request: Request, budget: int) -> list[tuple[Sequence, int]] | None:
        """Give a request rows, and blocks for its first chunks within the budget.

        Returns the chunks (sequence, tokens), or None if its sequences, which all run from the
        start, are more than the budget; then nothing has changed.
        """
        live = request.unfinished
        if request.swapped is not None:
            if not request.is_forked:
                live = [request.leader]
            if len(live) > budget:
                return None
            self._swap_in(request, live)
            return self._first_chunks(request, budget)
        leader = request.leader
        goal = leader.num_tokens if request.is_forked else request.fork_point
        looked_up = self._num_to_look_up(request)
        prefix = self._prefix(request)
        cached = len(prefix) * self.block_manager.block_size
        if goal > cached:
            rows, length = [leader], min(goal - cached, budget)
        elif len(live) <= budget:  # all that is to be shared is cached, or there is nothing
            rows, length = live, 1
            request.is_forked = True
        else:
            return None
        self._found = None
        for sequence in rows:
            slot = self.block_manager.allocate(
                cached + length, prefix, num_query_tokens=looked_up if sequence is leader else 0
            )
            self._place(sequence, slot)
            sequence.num_computed_tokens = cached
        return [(sequence, length) for sequence in rows]

    def share(
        self, parent: Sequence, children: list[Sequence], num_tokens: int | None = None
    ) -> None:
        """Give sequences that begin with the parent's tokens its blocks: those of all that it has
        computed, or of the first num_tokens (>= 1, full blocks alone) of these."""
        held = parent.num_computed_tokens if num_tokens is None else num_tokens
        slots = self.block_manager.fork(parent.slot, len(children), num_tokens)
        for child, slot in zip(children, slots, strict=True):
            child.num_computed_tokens = held
            self._place(child, slot)

    def wanted(self, request: Request) -> list[tuple[Sequence, int]]:
        """The sequences of a running request that compute something now, and how much is left."""
        if not request.is_forked:
            leader = request.leader
            return [(leader, request.fork_point - leader.num_computed_tokens)]
        live = [s for s in request.unfinished if not s.awaits_last_token]
        wanted = [(s, s.num_missing_tokens) for s in live]
        if request.beams is not None and any(missing > 1 for _, missing in wanted):
            # Beams are compared with each other, so they sample in the same step, once all are
            # one token short.
            wanted = [(s, missing - 1) for s, missing in wanted if missing > 1]
        return wanted

    def _first_chunks(self, request: Request, budget: int) -> list[tuple[Sequence, int]]:
        """Chunks for all sequences that want one, none of them empty."""
        wanted = self.wanted(request)
        started = []
        for i, (sequence, length) in enumerate(wanted):
            length = min(length, budget - (len(wanted) - i - 1))
            self.block_manager.append(sequence.slot, length)
            started.append((sequence, length))
            budget -= length
        return started

    def _place(self, sequence: Sequence, slot: int) -> None:
        sequence.slot = slot
        self.max_held[slot] = sequence.request.max_total_tokens - 1
        self._placed.append(sequence)

    def _prefix(self, request: Request) -> Int32[np.ndarray, " m"]:
        """Blocks of the cache that hold the beginning of what the leader is to compute."""
        end = self._num_to_look_up(request)
        if not end:
            return _NO_BLOCKS
        if self._found is None or self._found[0] is not request:
            self._found = request, []
        return self.block_manager.match_prefix(
            request.leader.token_ids[:end], request.sampling_params.cache_salt, self._found[1]
        )

    def _num_to_look_up(self, request: Request) -> int:
        """How many of the leader's tokens are looked for in the cache."""
        if not self._prefix_caching or request.sampling_params.prompt_logprobs is not None:
            return 0  # a cached token has no logits
        leader = request.leader
        return leader.num_tokens if request.is_forked else leader.num_prompt_tokens

    # --- As sequences grow

    def computed(self, sequence: Sequence, num_computed: int) -> None:
        """Note that a sequence's first num_computed tokens are in the pool, or will be before
        anything that is planned after this."""
        sequence.num_computed_tokens = num_computed
        request = sequence.request
        if not request.is_forked and num_computed == request.fork_point:
            leader = request.leader
            self.share(leader, [s for s in request.unfinished if s is not leader])
            request.is_forked = True

    def publish(self, sequence: Sequence) -> None:
        """Let others find the full blocks of what a sequence has computed and whose tokens are
        known.

        Not while a step is planned that has not been handed to the device: it writes to the blocks
        that the tables named when it was planned, and this may put others in their place.
        """
        if not self._prefix_caching or sequence.slot < 0:
            return
        manager = self.block_manager
        known = min(sequence.num_computed_tokens, sequence.num_tokens)
        if known // manager.block_size > manager.num_published(sequence.slot):
            salt = sequence.request.sampling_params.cache_salt
            manager.publish(sequence.slot, sequence.token_ids, known, salt)

    def replace_beams(self, request: Request, step: BeamStep) -> None:
        """Make the beams that a step of the search chose, each from its parent's blocks."""
        old = request.sequences
        children: list[list[int]] = [[] for _ in old]
        for beam, parent in enumerate(step.parents.tolist()):
            children[parent].append(beam)
        for sequence, places in zip(old, children, strict=True):
            if not places:  # first, since their rows may be needed
                self.release(sequence)
        new: dict[int, Sequence] = {}
        for sequence, places in zip(old, children, strict=True):
            copies = [sequence.copy() for _ in places[1:]]
            if copies:
                self.share(sequence, copies)
            new.update(zip(places, [sequence, *copies]))
        request.sequences = [new[beam] for beam in range(len(new))]
        tokens = step.token_ids.tolist()
        for index, (sequence, token) in enumerate(zip(request.sequences, tokens, strict=True)):
            sequence.index = index
            sequence.token_ids[sequence.num_tokens] = token
            sequence.num_tokens += 1

    # --- Taking memory

    def release(self, sequence: Sequence) -> None:
        """Take a sequence's row and blocks, if it has any; full ones can still be found. Of what is
        swapped out, take that of a finished sequence."""
        if sequence.finish_reason is not None:
            sequence.num_pending = 0  # `Scheduler.update` passes over what is still to come
        if sequence.slot >= 0:
            self.publish(sequence)
            self.block_manager.free(sequence.slot)
            sequence.slot = -1
            return
        # A group was swapped out, and a token that was on its way then has ended one of it.
        request = sequence.request
        if request.swapped is not None and request.is_forked and request.unfinished:
            saved = [s for s in request.sequences if s is sequence or s.finish_reason is None]
            self.block_manager.drop_one_swapped(request.swapped, saved.index(sequence))

    def preempt(self, request: Request) -> list[Sequence]:
        """Take a running request's rows and blocks, which are saved or lost; returns the sequences
        that had some."""
        manager = self.block_manager
        live = [s for s in request.sequences if s.slot >= 0]
        for sequence in live:
            self.publish(sequence)
        slots = [s.slot for s in live]
        if manager.can_swap_out(slots) and self._prefers_swap(
            manager.num_distinct_blocks(slots), admission.tokens_to_compute(request)
        ):
            request.swapped = manager.swap_out(slots)
            self._swaps_out.append(request.swapped)
            self.swapped_out_blocks += request.swapped.num_blocks
            self.preemptions_swap += 1
            request.status = RequestStatus.SWAPPED
            for sequence in live:
                sequence.slot = -1
        else:
            self.preemptions_recompute += 1
            self.forget(request)
        return live

    def forget(self, request: Request) -> None:
        """Take a request's rows and blocks, wherever they are; it is to be computed again."""
        if request.swapped is not None:
            self.block_manager.drop_swapped(request.swapped)
            request.swapped = None
        for sequence in request.sequences:
            self.release(sequence)
            sequence.num_computed_tokens = 0
        request.is_forked = len(request.unfinished) == 1
        request.status = RequestStatus.PREEMPTED

    def _swap_in(self, request: Request, live: list[Sequence]) -> None:
        swapped, request.swapped = request.swapped, None
        assert swapped is not None
        slots = self.block_manager.swap_in(swapped)
        self._swaps_in.append(swapped)
        for sequence, slot in zip(live, slots, strict=True):
            self._place(sequence, slot)


def _pairs(parts: list[tuple[np.ndarray, np.ndarray]]) -> Int32[np.ndarray, "2 m"]:
    if not parts:
        return np.empty((2, 0), np.int32)
    return np.concatenate([np.stack(pair) for pair in parts], axis=1)
