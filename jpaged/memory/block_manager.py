"""The block manager: block tables with swapping to host memory and automatic prefix caching."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from jpaged.memory.block_pool import BlockPool
from jpaged.memory.block_tables import BlockIds, BlockTables
from jpaged.memory.prefix_cache import CachedBlock, HashBlock, PrefixCache, hash_block
from jpaged.memory.swap_space import Swapped, SwapSpace


class BlockManager(BlockTables):
    """Grows, shrinks, shares and accounts for the block tables of all sequences that hold memory.

    Adds to the primitives of `BlockTables`:

    Swapping: `swap_out` gives back a group of sequences' slots and blocks after their contents
    have been copied to host memory, `swap_in` brings them back in other slots and blocks, and
    `drop_swapped` gives them up, `drop_one_swapped` one of them.

    Prefix caching (off unless enabled; then `match_prefix` finds nothing and `publish` does
    nothing): blocks that are full and computed are published; whoever starts with the same tokens
    under the same salt shares them instead of computing them again. Unused ones count as free and
    keep their contents until they are taken: least recently used first, of one sequence the last
    one first.

    A step is what happens between two calls of `take_copies`. It moves blocks in this order: swap
    outs are read, copies made, swap ins written, then tokens computed. Between steps everything
    that was appended has been computed; during one, a sequence that was appended to or swapped in
    may be appended to or freed, but not forked, published or swapped out.

    Attributes:
        prefix_query_tokens: tokens that were looked up for sequences that were then allocated,
            running sum.
        prefix_hit_tokens: tokens among these that were found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_sequences: int,
        max_blocks_per_sequence: int,
        *,
        num_swap_blocks: int = 0,
        enable_prefix_caching: bool = False,
        hash_block: HashBlock = hash_block,
    ) -> None:
        """num_swap_blocks: blocks of host memory (>= 0); hash_block: as `prefix_cache.hash_block`,
        to be replaced by tests alone."""
        self._cache = PrefixCache(block_size, hash_block) if enable_prefix_caching else None
        if self._cache is None:
            pool = BlockPool(num_blocks, block_size)
        else:
            pool = BlockPool(num_blocks, block_size, self._cache.remove)
        super().__init__(pool, max_sequences, max_blocks_per_sequence)
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        # The last block of each sequence that is published, or was found: the ones before it are.
        self._published: list[CachedBlock | None] = [None] * max_sequences
        self._swap_space = SwapSpace(num_swap_blocks)
        self._swapped: dict[Swapped, list[int]] = {}  # the blocks of host memory that they hold
        self._leaving: set[Swapped] = set()  # those that were swapped out in this step

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that hold contents which can be found."""
        return self.pool.num_cached

    @property
    def num_swap_blocks(self) -> int:
        """Blocks of host memory."""
        return self._swap_space.num_blocks

    @property
    def num_free_swap_blocks(self) -> int:
        """Blocks of host memory that can be taken now; those that this step reads are not yet."""
        return self._swap_space.num_free

    def allocate(
        self,
        num_tokens: int,
        prefix_blocks: BlockIds = (),
        *,
        num_query_tokens: int | None = None,
    ) -> int:
        """A slot for a new sequence, with blocks for its first num_tokens (>= 1) tokens.

        Args:
            num_tokens: tokens to make room for, those in prefix_blocks included.
            prefix_blocks: what `match_prefix` returned for this sequence, or the beginning of that;
                nothing may have been taken in between. They are shared.
            num_query_tokens: how many tokens were looked up, for the statistics: None means
                num_tokens; 0 that the look-up was another sequence's, and is not counted again.

        Raises:
            ValueError: num_tokens is not in 1 .. max_blocks_per_sequence * block_size, or leaves no
                token to compute after prefix_blocks, or these are not a cached chain.
            NoFreeBlocksError: the pool, or the table, is too full.
        """
        chain = self._chain(prefix_blocks)
        slot = super().allocate(num_tokens, prefix_blocks)
        self._published[slot] = chain
        if self._cache is not None:
            looked_up = num_tokens if num_query_tokens is None else num_query_tokens
            self.prefix_query_tokens += looked_up
            self.prefix_hit_tokens += min(len(prefix_blocks) * self.block_size, looked_up)
        return slot

    def fork(self, slot: int, n: int = 1, num_tokens: int | None = None) -> list[int]:
        forks = super().fork(slot, n, num_tokens)
        for fork in forks:
            published = self._published[slot]
            while published is not None and published.depth > self.num_blocks_of(fork):
                published = published.parent
            self._published[fork] = published
        return forks

    def free(self, slot: int) -> None:
        super().free(slot)
        self._published[slot] = None

    def trim(self, slot: int, n: int) -> None:
        self._check_in_use(slot)
        published = self.num_published(slot) * self.block_size
        if n > self.num_tokens[slot] - published:
            raise ValueError(f"n must leave the {published} tokens that are published, got {n}")
        super().trim(slot, n)

    def take_copies(self) -> tuple[Int32[np.ndarray, " C"], Int32[np.ndarray, " C"]]:
        copies = super().take_copies()
        self._swap_space.end_step()
        self._leaving.clear()
        return copies

    def match_prefix(
        self,
        token_ids: Int32[np.ndarray, " n"],
        salt: str | None = None,
        chain: list[CachedBlock] | None = None,
    ) -> Int32[np.ndarray, " p"]:
        """The longest cached chain of full blocks that holds a prefix of these n (>= 1) tokens.

        At most (n - 1) // block_size blocks: one token at least is left to compute, since the next
        one is sampled from what it gives. Changes nothing: hand the blocks to `allocate` before
        anything else is taken.
        """
        if self._cache is None:
            return np.zeros(0, np.int32)
        limit = (len(token_ids) - 1) // self.block_size * self.block_size
        chain = self._cache.match(token_ids[:limit], salt, chain)
        return np.fromiter((entry.block for entry in chain), np.int32, len(chain))

    def num_published(self, slot: int) -> int:
        """How many of a sequence's first blocks can be found."""
        last = self._published[slot]
        return 0 if last is None else last.depth

    def publish(
        self,
        slot: int,
        token_ids: Int32[np.ndarray, " n"],
        num_computed: int,
        salt: str | None = None,
    ) -> None:
        """Let others find a sequence's full blocks among its first num_computed tokens.

        Costs time in proportion to the blocks that have not been published before; there is nothing
        to do until num_computed has passed a multiple of block_size. Where the same
        contents are cached already, that block takes the place of the sequence's own in its table
        and the own one is given back: full blocks are never written, so nobody sees a difference.

        Args:
            slot: the sequence.
            token_ids: its tokens from the first on, num_computed at least.
            num_computed: tokens whose keys and values are in the pool, or will be before anything
                that is decided after this.
            salt: sequences of different salts share nothing. Always the same for one sequence.

        Raises:
            ValueError: the slot is unused, num_computed more than it or token_ids holds, or tokens
                or salt are not those that its blocks were published with before (by a fork, say;
                the blocks before the one at fault are then published).
        """
        cache = self._cache
        if cache is None:
            return
        self._check_in_use(slot)
        most = min(int(self.num_tokens[slot]), len(token_ids))
        if not 0 <= num_computed <= most:
            raise ValueError(f"num_computed must be in [0, {most}], got {num_computed}")
        last = self._published[slot]
        first = 0 if last is None else last.depth
        if last is not None and last.salt != salt:
            raise ValueError(f"salt must be {last.salt!r} as before, got {salt!r}")
        new = token_ids[first * self.block_size : num_computed]
        for column, tokens in enumerate(cache.split(new), first):
            own = int(self.tables[slot, column])
            last = cache.find_or_add(last, tokens, salt, own)
            if last.block == own:
                self.pool.keep(own)
            else:
                self.pool.share(np.array([last.block], np.int32))
                self.tables[slot, column] = last.block
                self.pool.free(np.array([own], np.int32))
            self._published[slot] = last

    def reset_prefix_cache(self) -> None:
        """Forget what is cached: nobody finds it any more. To be called while no sequence holds
        blocks, since what these have published would be found again."""
        self.pool.empty_cached()

    def can_swap_out(self, slots: Sequence[int]) -> bool:
        """Whether `swap_out(slots)` is possible now."""
        blocks = self._distinct_blocks(slots)
        if any(block in self._moves for block in blocks):
            return False
        return len(blocks) <= self.num_free_swap_blocks

    def swap_out(self, slots: Sequence[int]) -> Swapped:
        """Give back the slots and blocks of these sequences (>= 1, distinct), to be kept in host
        memory: each distinct block once, whether others share it or not.

        The step copies `Swapped.device_blocks` of the pool to `Swapped.host_blocks` of host memory
        before it does anything else.

        Raises:
            ValueError: no slots, a repeated or an unused one, or one whose blocks this step has
                still to copy or swap in.
            NoFreeBlocksError: the swap space is too full.
        """
        for slot in slots:
            self._check_in_use(slot)
        if len(slots) == 0 or len(set(slots)) != len(slots):
            raise ValueError(f"slots must be distinct and at least one, got {list(slots)}")
        blocks = self._distinct_blocks(slots)
        pending = [block for block in blocks if block in self._moves]
        if pending:
            raise ValueError(f"blocks {pending} must hold their contents before they are swapped")
        host_blocks = self._swap_space.allocate(len(blocks))
        index = {block: i for i, block in enumerate(blocks)}
        swapped = Swapped(
            num_blocks=len(blocks),
            num_tokens=tuple(self.num_tokens[list(slots)].tolist()),
            tables=[
                np.array([index[b] for b in self.block_table(slot).tolist()], np.int32)
                for slot in slots
            ],
            moves=dict(zip(blocks, host_blocks)),
        )
        for slot in slots:
            self.free(slot)
        self._swapped[swapped] = host_blocks
        self._leaving.add(swapped)
        return swapped

    def swap_in(self, swapped: Swapped) -> list[int]:
        """New slots of sequences that were swapped out, in the order in which they were given, in
        fresh blocks that they share as before. Takes num_sequences rows and num_blocks blocks.

        The step copies `Swapped.host_blocks` of host memory to `Swapped.device_blocks` of the pool,
        read after `take_copies`; the host blocks can be taken again in the next step.

        Raises:
            ValueError: they are not swapped out, or only in this very step.
            NoFreeBlocksError: the pool, or the table, is too full.
        """
        self._check_swapped(swapped)
        if swapped in self._leaving:
            raise ValueError(
                "sequences swapped out in a step can be swapped in after it, not in it"
            )
        self._check_rows(swapped.num_sequences)
        blocks = self._take(swapped.num_blocks)
        times = np.bincount(np.concatenate(swapped.tables), minlength=len(blocks)).astype(np.int32)
        self.pool.share(blocks[times > 1], times[times > 1] - 1)
        slots = [self._free_slots.pop() for _ in swapped.tables]
        for slot, table, num_tokens in zip(slots, swapped.tables, swapped.num_tokens):
            self.tables[slot, : len(table)] = blocks[table]
            self.num_tokens[slot] = num_tokens
        if len(slots) > 1:
            self._note_sharers(slots)
        host_blocks = self._swapped.pop(swapped)
        swapped.moves = dict(zip(blocks.tolist(), host_blocks))
        self._moves.swap_in(swapped)
        self._swap_space.free(host_blocks, busy=True)
        return slots

    def drop_swapped(self, swapped: Swapped) -> None:
        """Give up sequences that are swapped out (ValueError if they are not)."""
        self._check_swapped(swapped)
        self._swap_space.free(self._swapped.pop(swapped), busy=swapped in self._leaving)

    def drop_one_swapped(self, swapped: Swapped, index: int) -> None:
        """Give up one of several sequences that are swapped out, and the blocks that it alone
        holds; the others move up.

        index: its place among the sequences that are left.

        Raises:
            ValueError: they are not swapped out, or it is not one of several.
        """
        self._check_swapped(swapped)
        if not 0 <= index < swapped.num_sequences or swapped.num_sequences == 1:
            raise ValueError(
                f"index must be that of one of several sequences, got {index} of "
                f"{swapped.num_sequences}"
            )
        held = self._swapped[swapped]
        dropped = {held[i] for i in swapped.drop(index)}
        self._swapped[swapped] = [block for block in held if block not in dropped]
        self._swap_space.free(sorted(dropped), busy=swapped in self._leaving)

    def _check_swapped(self, swapped: Swapped) -> None:
        if swapped not in self._swapped:
            raise ValueError(
                "swapped must be sequences that are swapped out, got ones that are not"
            )

    def _chain(self, blocks: BlockIds) -> CachedBlock | None:
        """The entry of the last of these cached blocks."""
        last = None
        for block in blocks:
            entry = None if self._cache is None else self._cache.entry(int(block))
            if entry is None or entry.parent is not last:
                raise ValueError(
                    f"prefix_blocks must be a chain of cached blocks, got {list(map(int, blocks))}"
                )
            last = entry
        return last

    def check_integrity(self) -> None:
        """Raise AssertionError unless all of `BlockTables.check_integrity` holds, every block of
        host memory is free or held by sequences that are swapped out, and the cache holds full
        blocks alone: those in use that were published, and all that are kept though unused."""
        super().check_integrity()
        self._swap_space.check_integrity([b for held in self._swapped.values() for b in held])
        for swapped, held in self._swapped.items():
            indices = np.unique(np.concatenate(swapped.tables)).tolist()
            if not len(held) == swapped.num_blocks == len(indices):
                raise AssertionError(f"{swapped} holds the blocks {held} of host memory")
        if self._cache is None:
            return
        self._cache.check_integrity()
        kept = np.flatnonzero(self.pool.kept).tolist()
        if kept != [b for b in range(self.num_blocks) if self._cache.entry(b) is not None]:
            raise AssertionError(f"blocks {kept} are kept, others are cached")
        for slot in np.flatnonzero(self.num_tokens).tolist():
            entry = self._published[slot]
            while entry is not None:
                if self.tables[slot, entry.depth - 1] != entry.block:
                    raise AssertionError(f"slot {slot} does not hold what it published: {entry}")
                entry = entry.parent
            self._check_cached(slot)

    def _check_cached(self, slot: int) -> None:
        assert self._cache is not None
        for column, block in enumerate(self.block_table(slot).tolist()):
            entry = self._cache.entry(block)
            full = (column + 1) * self.block_size <= self.num_tokens[slot]
            if entry is not None and not (full and entry.depth == column + 1):
                raise AssertionError(f"block {column} of slot {slot} is cached as {entry}")
