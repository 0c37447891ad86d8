"""Host memory for the blocks of preempted requests."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np
from jaxtyping import Array, Int

from jpaged.runner.block_moves import BlockMoves, Pools, check_blocks

_GIB = 2**30
_MEASURED_CALLS = 8  # several, since a call overlaps with the host's work for the one before
_MEASURED_ROUNDS = 3


def swap_blocks_in(swap_space_gib: float, bytes_per_block: int) -> int:
    """Blocks that fit in `swap_space_gib` GiB.

    bytes_per_block  as BlockMoves.bytes_per_block: keys, values and token ids
    """
    return int(swap_space_gib * _GIB) // bytes_per_block


class SwapPool:
    """A bounded store of blocks in host memory: a row holds one block of all layers.

    The memory is reserved at once, but the operating system gives a row its pages when it is first
    written to, so what is never swapped out costs nothing; rows that were used before are faster
    to write to than new ones.

    Attributes:
        num_blocks: rows.
        swapped_out_bytes: bytes that `swap_out` has copied to the host so far.
    """

    def __init__(self, num_blocks: int, moves: BlockMoves) -> None:
        """Reserves the memory.

        moves  the pools' programs, made with swapping=True; used once they are compiled

        Raises ValueError if the memory cannot be reserved.
        """
        self.num_blocks = num_blocks
        self.swapped_out_bytes = 0
        self._moves = moves
        try:
            self._kv = np.empty((num_blocks, *moves.block_shape), moves.dtype)
            self._tokens = np.empty((num_blocks, moves.block_size), np.int32)
        except MemoryError as error:
            size = num_blocks * moves.bytes_per_block
            raise ValueError(
                f"swap_space_gib asks for {size} bytes of host memory, which cannot be reserved"
            ) from error

    def swap_out(
        self, pools: Pools, device_blocks: Int[np.ndarray, " n"], host_blocks: Int[np.ndarray, " n"]
    ) -> None:
        """Copy device blocks into rows of the store; waits until they are there.

        The pools stay as they are. The blocks are read as all calls before this one leave them. A
        block may go to several rows: requests that share it may be swapped out together.

        Raises:
            ValueError: The lists differ in length, or name a block that does not exist, or
                host_blocks names one twice.
        """
        blocks, rows = self._checked(device_blocks, host_blocks, written="host_blocks")
        under_way: list[tuple[Int[np.ndarray, " C"], tuple[Array, Array]]] = []
        for part, length in self._moves.split(blocks.size):
            ids = self._moves.padded(blocks[part], length, 0)
            arrays = self._moves.programs["gather", length](*pools, ids)
            for array in arrays:
                array.copy_to_host_async()
            under_way.append((rows[part], arrays))
            # The device gathers the next blocks while the host stores the last ones.
            if len(under_way) == 2:
                self._store(*under_way.pop(0))
        for item in under_way:
            self._store(*item)
        self.swapped_out_bytes += blocks.size * self._moves.bytes_per_block

    def _store(self, rows: Int[np.ndarray, " C"], arrays: tuple[Array, Array]) -> None:
        for store, array in zip((self._kv, self._tokens), arrays, strict=True):
            store[rows] = np.asarray(array)[: rows.size]

    def swap_in(
        self, pools: Pools, host_blocks: Int[np.ndarray, " n"], device_blocks: Int[np.ndarray, " n"]
    ) -> Pools:
        """The pools with rows of the store in device blocks; returns without waiting for them.

        A row may go to several blocks; rows are free again at once. The pools are donated.

        Raises:
            ValueError: The lists differ in length, or name a block that does not exist, or
                device_blocks names one twice; the pools are as before.
        """
        blocks, rows = self._checked(device_blocks, host_blocks, written="device_blocks")
        for part, length in self._moves.split(blocks.size):
            count = rows[part].size
            # Fresh memory for each call: the device may read it after the call has returned.
            staged = []
            for store in (self._kv, self._tokens):
                data = np.empty((length, *store.shape[1:]), store.dtype)
                np.take(store, rows[part], axis=0, out=data[:count], mode="clip")
                staged.append(data)
            ids = self._moves.padded(blocks[part], length, self._moves.num_blocks)
            pools = self._moves.programs["scatter", length](*pools, ids, *staged)
        return pools

    def _checked(self, device_blocks, host_blocks, *, written: str):
        """The lists, of which the one named `written` is to be distinct."""
        lists = {
            "device_blocks": (device_blocks, self._moves.num_blocks),
            "host_blocks": (host_blocks, self.num_blocks),
        }
        blocks, rows = (
            check_blocks(name, ids, count, distinct=name == written)
            for name, (ids, count) in lists.items()
        )
        if blocks.size != rows.size:
            raise ValueError(
                f"host_blocks must be as many as device_blocks ({blocks.size}), got {rows.size}"
            )
        return blocks, rows


def measure_link(moves: BlockMoves, pools: Pools) -> tuple[Pools, float]:
    """The pools, unchanged, and the bytes a second at which blocks go to the host or come back.

    Sends the pool's first blocks out and back again, into memory of its own: host copies, transfers
    and the programs on the device count, the first touch of host memory does not. The median of a
    few rounds.
    """
    count = min(_MEASURED_CALLS * moves.lengths[-1], moves.num_blocks)
    store = SwapPool(count, moves)
    ids = np.arange(count, dtype=np.int32)
    seconds = []
    for _ in range(1 + _MEASURED_ROUNDS):
        began = time.perf_counter()
        store.swap_out(pools, ids, ids)
        pools = store.swap_in(pools, ids, ids)
        jax.block_until_ready(pools)
        seconds.append(time.perf_counter() - began)
    return pools, 2 * count * moves.bytes_per_block / statistics.median(seconds[1:])
