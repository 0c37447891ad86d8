"""Blocks in host memory, and the moves of blocks that a step has still to make."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int32

from jpaged.memory.block_pool import NoFreeBlocksError


@dataclasses.dataclass(slots=True, eq=False)
class Swapped:
    """Sequences whose blocks are in host memory; made by `BlockManager.swap_out`.

    Attributes:
        num_blocks: distinct blocks, which is what it takes of the pool to bring them back.
        num_tokens: token slots in use of each sequence, in the order of the slots given.
        tables: each sequence's block table, as indices of the distinct blocks.
        moves: {block of the pool: block of host memory}: to be copied to host memory after
            `swap_out`, into the pool after `swap_in`. Kept up to date by the manager until
            `take_copies`, to be carried out after that.
    """

    num_blocks: int
    num_tokens: tuple[int, ...]
    tables: list[Int32[np.ndarray, " m"]]
    moves: dict[int, int]

    @property
    def num_sequences(self) -> int:
        """Sequences, which is how many rows of the block tables it takes to bring them back."""
        return len(self.num_tokens)

    @property
    def device_blocks(self) -> Int32[np.ndarray, " m"]:
        """Blocks of the pool to read after `swap_out`, to write after `swap_in`; all distinct."""
        return np.fromiter(self.moves.keys(), np.int32, len(self.moves))

    @property
    def host_blocks(self) -> Int32[np.ndarray, " m"]:
        """Blocks of host memory to write after `swap_out`, to read after `swap_in` (then perhaps
        one for several blocks of the pool)."""
        return np.fromiter(self.moves.values(), np.int32, len(self.moves))

    def drop(self, index: int) -> list[int]:
        """Leave out one of several sequences, and the blocks that it alone holds: gives what the
        indices of these were."""
        del self.tables[index]
        self.num_tokens = self.num_tokens[:index] + self.num_tokens[index + 1 :]
        used = np.unique(np.concatenate(self.tables))
        dropped = np.setdiff1d(np.arange(self.num_blocks), used).tolist()
        moves = list(self.moves.items())
        self.moves = dict(moves[i] for i in used.tolist())
        self.tables = [np.searchsorted(used, table).astype(np.int32) for table in self.tables]
        self.num_blocks = len(used)
        return dropped


class SwapSpace:
    """Hands out block ids 0 .. num_blocks - 1 of host memory and takes them back.

    A block that this step still reads or writes is not handed out again before the step's end: a
    step fills host blocks before it reads any, all in one go.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"num_swap_blocks must be >= 0, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._busy: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free)

    def allocate(self, n: int) -> list[int]:
        """Take n free blocks (NoFreeBlocksError if there are fewer; then none is taken)."""
        if n > len(self._free):
            raise NoFreeBlocksError(
                f"{n} blocks do not fit in the {len(self._free)} free blocks of the swap space's "
                f"{self.num_blocks}"
            )
        return [self._free.pop() for _ in range(n)]

    def free(self, blocks: list[int], *, busy: bool) -> None:
        """Give blocks back, now or, if this step reads or writes them, at its end."""
        (self._busy if busy else self._free).extend(reversed(blocks))

    def end_step(self) -> None:
        """What the step did with host memory is done, or will be before anything else is."""
        self._free.extend(self._busy)
        self._busy.clear()

    def check_integrity(self, held: list[int]) -> None:
        """Raise AssertionError unless every block is once free, or busy, or in `held`."""
        if sorted([*self._free, *self._busy, *held]) != list(range(self.num_blocks)):
            raise AssertionError(
                f"swap blocks free {self._free}, busy {self._busy}, held {held}: not each of "
                f"{self.num_blocks} once"
            )


class PendingMoves:
    """The copies and swap-ins that have been decided for this step and not been carried out.

    A step copies before it swaps in, and reads all sources of copies before it writes any.

    Attributes:
        copies: {destination: source}, blocks of the pool.
        arrivals: {block of the pool that will be written: the swapped sequences it belongs to}.
    """

    def __init__(self) -> None:
        self.copies: dict[int, int] = {}
        self.arrivals: dict[int, Swapped] = {}

    def __contains__(self, block: int) -> bool:
        """Whether a block does not hold its contents yet."""
        return block in self.copies or block in self.arrivals

    def copy(self, source: int, destination: int) -> None:
        """A copy-on-write. Of a block that is still on its way from host memory, a second copy is
        sent for instead: there is nothing yet to copy from."""
        swapped = self.arrivals.get(source)
        if swapped is None:
            self.copies[destination] = source
        else:
            self.arrivals[destination] = swapped
            swapped.moves[destination] = swapped.moves[source]

    def swap_in(self, swapped: Swapped) -> None:
        """The moves of `swapped` are now into the pool."""
        self.arrivals.update(dict.fromkeys(swapped.moves, swapped))

    def cancel(self, blocks: Int32[np.ndarray, " n"]) -> None:
        """These blocks have been taken anew: what was to be written to them is not wanted."""
        if not (self.copies or self.arrivals):
            return
        for block in blocks.tolist():
            self.copies.pop(block, None)
            swapped = self.arrivals.pop(block, None)
            if swapped is not None:
                del swapped.moves[block]

    def take(self) -> tuple[Int32[np.ndarray, " C"], Int32[np.ndarray, " C"]]:
        """Sources and destinations of the copies; forgets these and the swap-ins."""
        copies = self.copies
        sources = np.fromiter(copies.values(), np.int32, len(copies))
        destinations = np.fromiter(copies.keys(), np.int32, len(copies))
        copies.clear()
        self.arrivals.clear()
        return sources, destinations
