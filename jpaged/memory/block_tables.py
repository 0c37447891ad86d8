"""Block tables: which blocks of the pool hold the tokens of each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Int32

from jpaged.memory.block_pool import BlockPool, NoFreeBlocksError
from jpaged.memory.swap_space import PendingMoves

_Count = TypeVar("_Count", int, np.ndarray)
BlockIds = Sequence[int] | Int32[np.ndarray, " n"]


class BlockTables:
    """The block tables of all sequences that hold memory, and the primitives that change them:
    `allocate`, `append`, `trim`, `fork` and `free` (Kwon et al., SOSP 2023, sections 4.3 and 4.4).

    A sequence that holds memory has a slot: a row of `tables`, from `allocate` or `fork` until
    `free`. Its token i lies in block `tables[slot, i // block_size]` at offset `i % block_size`.
    Blocks are taken on demand, so a sequence never has more than block_size - 1 empty token slots
    (those that `append_ahead` takes count as filled until `trim` gives back what was not).
    Several sequences may share blocks that none of them writes. Every operation is all or nothing:
    when it raises, nothing has changed.

    Attributes:
        pool: the physical blocks.
        block_size: token slots in a block.
        tables: int32 [max_sequences, max_blocks_per_sequence]; a row's first
            ceil(num_tokens / block_size) entries are its blocks, the others may be any block id.
        num_tokens: int32 [max_sequences], token slots in use of each row; 0 is an unused row.
            Both arrays are read only for others.
        copy_on_write_blocks: blocks copied so far because they were shared and about to be written.
    """

    def __init__(self, pool: BlockPool, max_sequences: int, max_blocks_per_sequence: int) -> None:
        for name, value in (
            ("max_sequences", max_sequences),
            ("max_blocks_per_sequence", max_blocks_per_sequence),
        ):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.pool = pool
        self.block_size = pool.block_size
        self.tables: Int32[np.ndarray, "slots M"] = np.zeros(
            (max_sequences, max_blocks_per_sequence), np.int32
        )
        self.num_tokens: Int32[np.ndarray, " slots"] = np.zeros(max_sequences, np.int32)
        self.copy_on_write_blocks = 0
        self._free_slots = list(range(max_sequences - 1, -1, -1))
        # Rows whose last block has room and may be shared. While there are none, which is nearly
        # always, an append need not look at the reference counts.
        self._sharers: set[int] = set()
        self._moves = PendingMoves()

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones included: what can be taken."""
        return self.pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence holds, each counted once."""
        return self.pool.num_used

    @property
    def num_shared_blocks(self) -> int:
        """Blocks that several sequences hold. Takes time in proportion to the pool."""
        return int(np.count_nonzero(self.pool.ref_counts > 1))

    @property
    def num_sharers(self) -> int:
        """Sequences whose last block has room and may be shared: at most so many copies are made
        before each of them has one of its own."""
        return len(self._sharers)

    @property
    def num_table_blocks(self) -> int:
        """Blocks that the sequences would hold if they shared none."""
        return int(self.blocks_for(self.num_tokens).sum())

    @property
    def num_free_slots(self) -> int:
        """Sequences that could still be allocated, were there blocks."""
        return len(self._free_slots)

    @property
    def num_used_token_slots(self) -> int:
        """Token slots that hold a token, of num_used_blocks * block_size allocated ones.

        The token slots of a shared block count once.
        """
        unused = int((-self.num_tokens % self.block_size).sum())
        if self._sharers:
            seen = set()
            for slot in self._sharers:
                block = int(self.block_table(slot)[-1])
                if block in seen:
                    unused -= -int(self.num_tokens[slot]) % self.block_size
                seen.add(block)
        return self.num_used_blocks * self.block_size - unused

    @property
    def slots_used_share(self) -> float:
        """Share of the allocated token slots that hold a token; 1.0 when none is allocated."""
        allocated = self.num_used_blocks * self.block_size
        return self.num_used_token_slots / allocated if allocated else 1.0

    def blocks_for(self, num_tokens: _Count) -> _Count:
        """Blocks that num_tokens tokens fill: ceil(num_tokens / block_size); for arrays too."""
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, slot: int) -> int:
        """Blocks that a sequence holds."""
        return self.blocks_for(int(self.num_tokens[slot]))

    def block_table(self, slot: int) -> Int32[np.ndarray, " m"]:
        """A sequence's blocks, in the order of its tokens: a read-only view of its row."""
        view = self.tables[slot, : self.num_blocks_of(slot)]
        view.flags.writeable = False
        return view

    def num_distinct_blocks(self, slots: Sequence[int]) -> int:
        """Blocks that these sequences hold together, each counted once."""
        return len(self._distinct_blocks(slots))

    def _distinct_blocks(self, slots: Sequence[int]) -> list[int]:
        """The blocks of these sequences, each once, in the order of their tables."""
        return list(dict.fromkeys(b for slot in slots for b in self.block_table(slot).tolist()))

    def blocks_needed(self, slot: int, n: int) -> int:
        """Free blocks that `append(slot, n)` takes, a copy of a shared last block included.

        Of several sequences that share it the last one to append copies nothing, so the sum over
        them may be more than they take.
        """
        held = int(self.num_tokens[slot])
        return self.blocks_for(held + n) - self.blocks_for(held) + self._copies(slot, n)

    def blocks_needed_one(self, slots: Int32[np.ndarray, " n"]) -> int:
        """Free blocks that `append_one(slots)` takes, copies of shared last blocks included."""
        held = self.num_tokens[slots]
        needed = int(np.count_nonzero(held % self.block_size == 0))
        if self._sharers:
            needed += int(np.count_nonzero(self._copies_one(slots, held)))
        return needed

    def blocks_needed_new(self, num_tokens: int, prefix_blocks: BlockIds = ()) -> int:
        """Free blocks that `allocate(num_tokens, prefix_blocks)` takes: fresh ones, and those of
        prefix_blocks that no sequence holds."""
        prefix = np.asarray(prefix_blocks, np.int32)
        unused = int(np.count_nonzero(self.pool.ref_counts[prefix] == 0))
        return self.blocks_for(num_tokens) - len(prefix) + unused

    def allocate(self, num_tokens: int, prefix_blocks: BlockIds = ()) -> int:
        """A slot for a new sequence, with blocks for its first num_tokens (>= 1) tokens.

        Args:
            num_tokens: tokens to make room for, those in prefix_blocks included.
            prefix_blocks: full blocks, in use or cached, that hold its first tokens. It shares
                them.

        Raises:
            ValueError: num_tokens is not in 1 .. max_blocks_per_sequence * block_size, or leaves no
                token to compute after prefix_blocks, or one of these is empty.
            NoFreeBlocksError: the pool, or the table, is too full.
        """
        prefix = np.asarray(prefix_blocks, np.int32)
        found = len(prefix) * self.block_size
        if num_tokens <= found:
            least = f">= {found + 1}, after {len(prefix)} prefix_blocks" if found else ">= 1"
            raise ValueError(f"num_tokens must be {least}, got {num_tokens}")
        self._check_length(num_tokens)
        self._check_rows(1)
        if prefix.size:
            needed = self.blocks_needed_new(num_tokens, prefix)
            if needed > self.num_free_blocks:
                raise NoFreeBlocksError(
                    f"{needed} blocks do not fit in the {self.num_free_blocks} free ones"
                )
            self.pool.share(prefix)  # before the others are taken, which may empty cached blocks
        blocks = self._take(self.blocks_for(num_tokens) - len(prefix))
        slot = self._free_slots.pop()
        self.tables[slot, : len(prefix)] = prefix
        self.tables[slot, len(prefix) : len(prefix) + len(blocks)] = blocks
        self.num_tokens[slot] = num_tokens
        return slot

    def append(self, slot: int, n: int) -> None:
        """Make room for n (>= 0) more tokens of a sequence.

        If other sequences share its last block and that block has room, a fresh one takes its
        place in this sequence's table, and the copy is left to `take_copies`. The last of the
        sequences that share it keeps the block.

        Raises:
            ValueError: n is negative, the slot is unused or its row of the tables too short.
            NoFreeBlocksError: the pool is too full.
        """
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        self._check_in_use(slot)
        held = int(self.num_tokens[slot])
        self._check_length(held + n)
        copies = self._copies(slot, n)
        first = self.blocks_for(held) - copies
        blocks = self._take(self.blocks_for(held + n) - first)
        if copies:
            self._copy_on_write(self.tables[slot, first : first + 1], blocks[:1])
        if n:
            self._sharers.discard(slot)
        self.tables[slot, first : first + len(blocks)] = blocks
        self.num_tokens[slot] = held + n

    def append_one(self, slots: Int32[np.ndarray, " n"]) -> None:
        """Make room for one more token of each of these sequences (distinct slots, all in use).

        The same as `append(slot, 1)` for each, without a loop over those that need no block.

        Raises:
            ValueError: a slot is unused or its row of the tables too short.
            NoFreeBlocksError: the pool is too full for all of them.
        """
        held = self.num_tokens[slots]
        if not held.all():
            raise ValueError(f"slots must be rows that hold sequences, got {slots[held == 0]}")
        takes = held % self.block_size == 0
        copies = None
        if self._sharers:
            copies = self._copies_one(slots, held)
            takes |= copies
        columns = held[takes] // self.block_size
        if columns.size:
            self._check_length(int(columns.max()) * self.block_size + 1)
            blocks = self._take(columns.size)
            if copies is not None:
                copied = copies[takes]
                rows = slots[takes][copied]
                self._copy_on_write(self.tables[rows, columns[copied]], blocks[copied])
            self.tables[slots[takes], columns] = blocks
        if copies is not None:
            self._sharers.difference_update(slots.tolist())
        self.num_tokens[slots] = held + 1

    def blocks_needed_ahead(self, slots: Int32[np.ndarray, " n"], n: int) -> int:
        """Free blocks that `append_ahead(slots, n)` takes."""
        held = self.num_tokens[slots]
        return int((self.blocks_for(held + n) - self.blocks_for(held)).sum())

    def append_ahead(self, slots: Int32[np.ndarray, " m"], n: int) -> None:
        """Make room for n (>= 0) more tokens of each of these sequences (distinct slots, none of
        which shares a last block with room: `append_one` has just been called for them). What turns
        out not to be needed is to be given back by `trim`.

        Raises:
            ValueError: n is negative, a slot is unused or its row of the tables too short, or its
                last block may be shared.
            NoFreeBlocksError: the pool is too full for all of them.
        """
        held = self.num_tokens[slots]
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        if not held.all():
            raise ValueError(f"slots must be rows that hold sequences, got {slots[held == 0]}")
        if self._sharers and not self._sharers.isdisjoint(slots.tolist()):
            raise ValueError(f"slots must not share their last blocks, got {slots}")
        if not held.size:
            return
        self._check_length(int(held.max()) + n)
        first = self.blocks_for(held)
        counts = self.blocks_for(held + n) - first
        blocks = self._take(int(counts.sum()))
        columns = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        self.tables[np.repeat(slots, counts), columns] = blocks
        self.num_tokens[slots] = held + n

    def trim(self, slot: int, n: int) -> None:
        """Give back the room for the last n (>= 0) tokens of a sequence, which have not been
        written.

        Raises:
            ValueError: n is negative, the slot is unused or no token would be left.
        """
        self._check_in_use(slot)
        held = int(self.num_tokens[slot])
        if not 0 <= n < held:
            raise ValueError(f"n must be in [0, {held - 1}], got {n}")
        table = self.block_table(slot)
        self.pool.free(table[self.blocks_for(held - n) :])
        self.num_tokens[slot] = held - n

    def fork(self, slot: int, n: int = 1, num_tokens: int | None = None) -> list[int]:
        """n (>= 0) more slots with the tokens of a sequence, sharing its blocks.

        The tokens of a last block with room must have been computed before any of these sequences
        appends: copies are made at the start of a step.

        num_tokens: how many of its first tokens; None means all, else they must end with a block,
            so that nobody writes what others have.

        Raises:
            ValueError: n is negative, or the slot unused, or its last block not copied yet, or
                num_tokens not a multiple of block_size in 1 .. the tokens that it holds.
            NoFreeBlocksError: the tables have fewer than n free rows.
        """
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        self._check_in_use(slot)
        held = int(self.num_tokens[slot])
        if num_tokens is None:
            num_tokens = held
        elif num_tokens % self.block_size or not 1 <= num_tokens <= held:
            raise ValueError(
                f"num_tokens must be None or a multiple of block_size={self.block_size} in "
                f"[1, {held}], got {num_tokens}"
            )
        if int(self.block_table(slot)[-1]) in self._moves.copies:
            raise ValueError(f"slot must be forked before it is appended to or later, got {slot}")
        self._check_rows(n)
        if n == 0:
            return []
        table = self.block_table(slot)[: self.blocks_for(num_tokens)]
        self.pool.share(table, n)
        forks = [self._free_slots.pop() for _ in range(n)]
        self.tables[forks, : len(table)] = table
        self.num_tokens[forks] = num_tokens
        if num_tokens % self.block_size:
            self._sharers.update([slot, *forks])
        return forks

    def free(self, slot: int) -> None:
        """Give back a sequence's blocks and its slot (ValueError if it has none)."""
        self._check_in_use(slot)
        self.pool.free(self.block_table(slot))
        self.num_tokens[slot] = 0
        self._sharers.discard(slot)
        self._free_slots.append(slot)

    def take_copies(self) -> tuple[Int32[np.ndarray, " C"], Int32[np.ndarray, " C"]]:
        """Source and destination blocks of the copies that the appends since the last call need.

        To be called once a step, after all memory of the step has been taken. The step copies
        before it writes tokens, and reads all sources before it writes any destination: a source
        may be another copy's destination. Destinations are distinct.
        """
        return self._moves.take()

    def _take(self, n: int) -> Int32[np.ndarray, " n"]:
        blocks = self.pool.allocate(n)
        self._moves.cancel(blocks)
        return blocks

    def _note_sharers(self, slots: list[int]) -> None:
        """These rows may share last blocks now."""
        self._sharers.update(s for s in slots if self.num_tokens[s] % self.block_size)

    def _copies(self, slot: int, n: int) -> int:
        """Copies (0 or 1) that `append(slot, n)` makes."""
        if n == 0 or slot not in self._sharers:
            return 0
        return int(self.pool.ref_counts[self.block_table(slot)[-1]] > 1)

    def _copies_one(
        self, slots: Int32[np.ndarray, " n"], held: Int32[np.ndarray, " n"]
    ) -> Bool[np.ndarray, " n"]:
        """Which of these sequences, of `held` tokens, get a copy of their block in `append_one`."""
        ref_counts = self.pool.ref_counts
        last = self.tables[slots, np.maximum(held - 1, 0) // self.block_size]
        copies = (held % self.block_size != 0) & (ref_counts[last] > 1)
        shared = np.flatnonzero(copies)
        if shared.size:
            # A block that only these share stays with the last of them.
            blocks, from_end, counts = np.unique(
                last[shared][::-1], return_index=True, return_counts=True
            )
            kept = from_end[counts == ref_counts[blocks]]
            copies[shared[len(shared) - 1 - kept]] = False
        return copies

    def _copy_on_write(
        self, shared: Int32[np.ndarray, " n"], fresh: Int32[np.ndarray, " n"]
    ) -> None:
        """Fresh blocks take the place of shared ones in one table each."""
        for source, destination in zip(shared.tolist(), fresh.tolist()):
            self._moves.copy(source, destination)
        self.pool.unshare(shared)
        self.copy_on_write_blocks += len(fresh)

    def _check_in_use(self, slot: int) -> None:
        if not 0 <= slot < len(self.tables) or not self.num_tokens[slot]:
            raise ValueError(f"slot must be a row that holds a sequence, got {slot}")

    def _check_length(self, num_tokens: int) -> None:
        limit = self.tables.shape[1] * self.block_size
        if num_tokens > limit:
            raise ValueError(f"a sequence holds at most {limit} tokens, got {num_tokens}")

    def _check_rows(self, n: int) -> None:
        if not self._free_slots and n:
            raise NoFreeBlocksError(f"all {len(self.tables)} rows of the block tables are in use")
        if n > len(self._free_slots):
            raise NoFreeBlocksError(
                f"{n} sequences do not fit in the {len(self._free_slots)} free rows of the block "
                f"tables' {len(self.tables)}"
            )

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block's reference count is the number of tables that
        name it, no free block is in a table, no table names a block twice, every row is either in
        use or free, and no two sequences may write one token slot."""
        self.pool.check_integrity()
        in_use = np.flatnonzero(self.num_tokens)
        if sorted([*in_use.tolist(), *self._free_slots]) != list(range(len(self.tables))):
            raise AssertionError(f"rows in use {in_use.tolist()}, rows free {self._free_slots}")
        counts = np.zeros(self.num_blocks, np.int32)
        for slot in in_use.tolist():
            table = self.block_table(slot)
            if len(np.unique(table)) != len(table):
                raise AssertionError(f"the table of slot {slot} names a block twice: {table}")
            counts[table] += 1
        wrong = np.flatnonzero(counts != self.pool.ref_counts)
        if wrong.size:
            raise AssertionError(
                f"blocks {wrong.tolist()} have reference counts "
                f"{self.pool.ref_counts[wrong].tolist()}, tables name them {counts[wrong].tolist()}"
                " times"
            )
        self._check_last_blocks(in_use.tolist())

    def _check_last_blocks(self, in_use: list[int]) -> None:
        # A shared block with room: everyone has the same tokens in it and knows that it is shared.
        ends: dict[int, list[int]] = {}
        for slot in in_use:
            if self.num_tokens[slot] % self.block_size:
                ends.setdefault(int(self.block_table(slot)[-1]), []).append(slot)
        for block, slots in ends.items():
            count = self.pool.ref_counts[block]
            same = len(set(self.num_tokens[slots].tolist())) == 1
            if count > 1 and not (count == len(slots) and same and self._sharers.issuperset(slots)):
                raise AssertionError(
                    f"block {block} can be written by slots {slots} of "
                    f"{self.num_tokens[slots].tolist()} tokens; {count} tables name it"
                )
        if not self._sharers.issubset(in_use):
            raise AssertionError(f"unused rows are thought to share blocks: {self._sharers}")
