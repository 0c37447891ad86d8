"""The physical blocks of the KV pool: a free list and a reference count a block."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32


class NoFreeBlocksError(RuntimeError):
    """More blocks were asked for than are free. Nothing was taken."""


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1 and takes them back.

    A block is free exactly when its reference count is 0. The block freed last is handed out first
    (its memory is the likeliest to be in a cache), and every operation costs time in proportion to
    the blocks it names, whatever the size of the pool.

    Attributes:
        num_blocks: blocks in the pool (>= 1).
        block_size: token slots in a block (>= 1).
        ref_counts: int32 [num_blocks], how many block tables name each block. Read only for others.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts: Int32[np.ndarray, " N"] = np.zeros(num_blocks, np.int32)
        # A stack: the first _num_free entries are the free blocks, the top one is taken first.
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no table names."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks that at least one table names."""
        return self.num_blocks - self._num_free

    def allocate(self, n: int) -> Int32[np.ndarray, " n"]:
        """Take n (>= 0) free blocks, each with a reference count of 1.

        Raises:
            NoFreeBlocksError: fewer than n are free; then none is taken.
        """
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        if n > self._num_free:
            raise NoFreeBlocksError(
                f"n must be at most the {self._num_free} free blocks of {self.num_blocks}, got {n}"
            )
        blocks = self._free[self._num_free - n : self._num_free][::-1].copy()
        self._num_free -= n
        self.ref_counts[blocks] = 1
        return blocks

    def share(self, blocks: Int32[np.ndarray, " n"]) -> None:
        """One more table names these blocks (distinct, in use, else ValueError and no change)."""
        self._check_in_use(blocks)
        self.ref_counts[blocks] += 1

    def free(self, blocks: Int32[np.ndarray, " n"]) -> None:
        """One table less names these blocks (distinct, in use, else ValueError and no change).

        Those that no table names any more are free again; the first of them is handed out first.
        """
        self._check_in_use(blocks)
        self.ref_counts[blocks] -= 1
        released = blocks[self.ref_counts[blocks] == 0]
        self._free[self._num_free : self._num_free + len(released)] = released[::-1]
        self._num_free += len(released)

    def _check_in_use(self, blocks: Int32[np.ndarray, " n"]) -> None:
        ids = blocks.tolist()
        if not ids:
            return
        # Negative ids would wrap around silently, and a repeated one would be counted once.
        if min(ids) < 0 or max(ids) >= self.num_blocks or len(set(ids)) != len(ids):
            raise ValueError(
                f"blocks must be distinct ids in [0, {self.num_blocks}), got {sorted(ids)}"
            )
        counts = self.ref_counts[blocks]
        if not counts.all():
            raise ValueError(
                f"blocks must be in use, got free ones: {blocks[counts == 0].tolist()}"
            )

    def check_integrity(self) -> None:
        """Raise AssertionError unless the free list names each block of reference count 0 once."""
        free = np.sort(self._free[: self._num_free])
        unreferenced = np.flatnonzero(self.ref_counts == 0)
        if (self.ref_counts < 0).any():
            raise AssertionError(f"negative reference counts: {self.ref_counts.min()}")
        if not np.array_equal(free, unreferenced):
            raise AssertionError(
                f"the free list holds {len(free)} entries, {len(unreferenced)} blocks are "
                f"unreferenced, and they are not the same: {np.setxor1d(free, unreferenced)}"
            )
