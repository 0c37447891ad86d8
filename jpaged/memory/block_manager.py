"""Block tables: which blocks of the pool hold the tokens of each sequence."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from jaxtyping import Int32

from jpaged.memory.block_pool import BlockPool, NoFreeBlocksError

_Count = TypeVar("_Count", int, np.ndarray)


class BlockManager:
    """Grows, shrinks and accounts for the block tables of all sequences that hold memory.

    A sequence that holds memory has a slot: a row of `tables`, from `allocate` until `free`. Its
    token i lies in block `tables[slot, i // block_size]` at offset `i % block_size`. Blocks are
    taken on demand, so a sequence never has more than block_size - 1 empty token slots. Every
    operation is all or nothing: when it raises, nothing has changed.

    Attributes:
        pool: the physical blocks.
        block_size: token slots in a block.
        tables: int32 [max_sequences, max_blocks_per_sequence]; a row's first
            ceil(num_tokens / block_size) entries are its blocks, the others may be any block id.
        num_tokens: int32 [max_sequences], token slots in use of each row; 0 is an unused row.
            Both arrays are read only for others.
    """

    def __init__(
        self, num_blocks: int, block_size: int, max_sequences: int, max_blocks_per_sequence: int
    ) -> None:
        for name, value in (
            ("max_sequences", max_sequences),
            ("max_blocks_per_sequence", max_blocks_per_sequence),
        ):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.pool = BlockPool(num_blocks, block_size)
        self.block_size = block_size
        self.tables: Int32[np.ndarray, "slots M"] = np.zeros(
            (max_sequences, max_blocks_per_sequence), np.int32
        )
        self.num_tokens: Int32[np.ndarray, " slots"] = np.zeros(max_sequences, np.int32)
        self._free_slots = list(range(max_sequences - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds."""
        return self.pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that some sequence holds."""
        return self.pool.num_used

    @property
    def num_free_slots(self) -> int:
        """Sequences that could still be allocated, were there blocks."""
        return len(self._free_slots)

    @property
    def num_used_token_slots(self) -> int:
        """Token slots that hold a token, of num_used_blocks * block_size allocated ones."""
        return int(self.num_tokens.sum())

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

    def blocks_needed(self, slot: int, n: int) -> int:
        """Free blocks that `append(slot, n)` takes."""
        held = int(self.num_tokens[slot])
        return self.blocks_for(held + n) - self.blocks_for(held)

    def blocks_needed_one(self, slots: Int32[np.ndarray, " n"]) -> int:
        """Free blocks that `append_one(slots)` takes."""
        return int(np.count_nonzero(self.num_tokens[slots] % self.block_size == 0))

    def allocate(self, num_tokens: int) -> int:
        """A slot for a new sequence, with blocks for its first num_tokens (>= 1) tokens.

        Raises:
            ValueError: num_tokens is not in 1 .. max_blocks_per_sequence * block_size.
            NoFreeBlocksError: the pool, or the table, is too full.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be >= 1, got {num_tokens}")
        self._check_length(num_tokens)
        if not self._free_slots:
            raise NoFreeBlocksError(f"all {len(self.tables)} rows of the block tables are in use")
        blocks = self.pool.allocate(self.blocks_for(num_tokens))
        slot = self._free_slots.pop()
        self.tables[slot, : len(blocks)] = blocks
        self.num_tokens[slot] = num_tokens
        return slot

    def append(self, slot: int, n: int) -> None:
        """Make room for n (>= 0) more tokens of a sequence.

        Raises:
            ValueError: n is negative, the slot is unused or its row of the tables too short.
            NoFreeBlocksError: the pool is too full.
        """
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        self._check_in_use(slot)
        held = int(self.num_tokens[slot])
        self._check_length(held + n)
        blocks = self.pool.allocate(self.blocks_needed(slot, n))
        first = self.blocks_for(held)
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
        at_edge = held % self.block_size == 0
        columns = held[at_edge] // self.block_size
        if columns.size:
            self._check_length(int(columns.max()) * self.block_size + 1)
            self.tables[slots[at_edge], columns] = self.pool.allocate(columns.size)
        self.num_tokens[slots] = held + 1

    def free(self, slot: int) -> None:
        """Give back a sequence's blocks and its slot (ValueError if it has none)."""
        self._check_in_use(slot)
        self.pool.free(self.block_table(slot))
        self.num_tokens[slot] = 0
        self._free_slots.append(slot)

    def _check_in_use(self, slot: int) -> None:
        if not 0 <= slot < len(self.tables) or not self.num_tokens[slot]:
            raise ValueError(f"slot must be a row that holds a sequence, got {slot}")

    def _check_length(self, num_tokens: int) -> None:
        limit = self.tables.shape[1] * self.block_size
        if num_tokens > limit:
            raise ValueError(f"a sequence holds at most {limit} tokens, got {num_tokens}")

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block's reference count is the number of tables that
        name it, no free block is in a table, no table names a block twice, and every row is either
        in use or free."""
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
