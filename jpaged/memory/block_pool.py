"""The physical blocks of the KV pool: a free list, a reference count a block, and what is kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Int32


class NoFreeBlocksError(RuntimeError):
    """More blocks (or rows of the block tables) were asked for than are free. Nothing was taken."""


def _itself(block: int) -> list[int]:
    return [block]


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1 and takes them back.

    A block is free exactly when its reference count is 0. A free block is either empty or, if its
    contents were worth keeping when the last table let go of it, cached: `share` brings it back
    into use as it is. Empty blocks are handed out first, of these the one freed last (its memory is
    the likeliest to be in a cache); when there are none left, the block that has been cached
    longest is emptied. Every operation costs time in proportion to the blocks it names, whatever
    the size of the pool.

    Attributes:
        num_blocks: blocks in the pool (>= 1).
        block_size: token slots in a block (>= 1).
        ref_counts: int32 [num_blocks], how many block tables name each block.
        kept: bool [num_blocks], whether each block has contents to be kept when it is free.
            Both arrays are read only for others.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        on_evict: Callable[[int], Iterable[int]] = _itself,
    ) -> None:
        """on_evict: called with a cached block that is being emptied; gives the blocks that lose
        their contents with it: that block, and those whose contents cannot be found without it."""
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.ref_counts: Int32[np.ndarray, " N"] = np.zeros(num_blocks, np.int32)
        # A stack: the first _num_empty entries are the empty blocks, the top one is taken first.
        self._empty = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_empty = num_blocks
        self.kept = np.zeros(num_blocks, np.bool_)
        # Longest cached first. Not a dict: finding the first of one is slow after many removals.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def num_free(self) -> int:
        """Blocks that no table names, cached ones included."""
        return self._num_empty + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that no table names and whose contents are kept."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table names."""
        return self.num_blocks - self.num_free

    @property
    def cached(self) -> list[int]:
        """The cached blocks, in the order in which they will be emptied."""
        return list(self._cached)

    def allocate(self, n: int) -> Int32[np.ndarray, " n"]:
        """Take n (>= 0) free blocks, each with a reference count of 1.

        Raises:
            NoFreeBlocksError: fewer than n are free; then none is taken.
        """
        if n < 0:
            raise ValueError(f"n must be >= 0, got {n}")
        if n > self.num_free:
            raise NoFreeBlocksError(
                f"n must be at most the {self.num_free} free blocks of {self.num_blocks}, got {n}"
            )
        while n > self._num_empty:
            self._evict()
        blocks = self._empty[self._num_empty - n : self._num_empty][::-1].copy()
        self._num_empty -= n
        self.ref_counts[blocks] = 1
        return blocks

    def share(
        self, blocks: Int32[np.ndarray, " n"], times: int | Int32[np.ndarray, " n"] = 1
    ) -> None:
        """`times` more tables name these blocks (distinct, in use or cached, else ValueError and no
        change); times is >= 1."""
        self._check(blocks, "in use or cached", cached_too=True)
        if self._cached:
            for block in blocks[self.ref_counts[blocks] == 0].tolist():
                del self._cached[block]
        self.ref_counts[blocks] += times

    def unshare(self, blocks: Int32[np.ndarray, " n"]) -> None:
        """For each entry one table less names that block (repeats allowed), and others still do."""
        np.subtract.at(self.ref_counts, blocks, 1)

    def free(self, blocks: Int32[np.ndarray, " n"]) -> None:
        """One table less names these blocks (distinct, in use, else ValueError and no change).

        Those that no table names any more are free again. Of the empty ones the first is handed out
        first; of the kept ones the last is emptied first.
        """
        self._check(blocks, "in use", cached_too=False)
        self.ref_counts[blocks] -= 1
        released = blocks[self.ref_counts[blocks] == 0][::-1]
        kept = self.kept[released]
        if kept.any():
            self._cached.update(dict.fromkeys(released[kept].tolist()))
            released = released[~kept]
        self._empty[self._num_empty : self._num_empty + len(released)] = released
        self._num_empty += len(released)

    def keep(self, block: int) -> None:
        """Cache a block in use, once no table names it any more, instead of emptying it."""
        self.kept[block] = True

    def _evict(self) -> None:
        """Empty the block that has been cached longest."""
        for block in self._on_evict(next(iter(self._cached))):
            self.kept[block] = False
            if block in self._cached:
                del self._cached[block]
                self._empty[self._num_empty] = block
                self._num_empty += 1

    def _check(self, blocks: Int32[np.ndarray, " n"], allowed: str, *, cached_too: bool) -> None:
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
            unused = blocks[counts == 0].tolist()
            wrong = [b for b in unused if not (cached_too and b in self._cached)]
            if wrong:
                raise ValueError(f"blocks must be {allowed}, got free ones: {wrong}")

    def check_integrity(self) -> None:
        """Raise AssertionError unless each block of reference count 0 is either once in the free
        list or cached, and the cached ones are those of them that are to be kept."""
        if (self.ref_counts < 0).any():
            raise AssertionError(f"negative reference counts: {self.ref_counts.min()}")
        empty, cached = self._empty[: self._num_empty], np.array(self.cached, np.int32)
        free = np.sort(np.concatenate([empty, cached]))
        unreferenced = np.flatnonzero(self.ref_counts == 0)
        if not np.array_equal(free, unreferenced):
            raise AssertionError(
                f"the free list holds {len(free)} entries, {len(unreferenced)} blocks are "
                f"unreferenced, and they are not the same: {np.setxor1d(free, unreferenced)}"
            )
        if self.kept[empty].any() or not self.kept[cached].all():
            raise AssertionError(f"empty blocks are kept, or cached ones {self.cached} are not")
