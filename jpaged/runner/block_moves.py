"""Device programs that copy, read and write whole blocks: copy-on-write and swapping.

A block is moved in the KV pool and in the token pool at once. Lists of blocks are padded to a few
lengths whose programs are compiled ahead, and longer lists are moved in several calls, so nothing
compiles while serving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

import pallas_kernels
from jpaged.runner.kv_pool import set_tokens

# (KV pool [L, N, 2, K, B, D], token pool int32 [N, B]), as allocated by kv_pool.allocate_pool.
Pools = tuple[Shaped[Array, "L N 2 K B D"], Int[Array, "N B"]]

# What a call moves at most. It holds these blocks in memory of its own. When that is much, a CPU's
# allocator takes it from the system anew each time: a gather of 47 MB at once spends 44 ms, most of
# it on page faults, one of 6 MB 0.2 ms. A GPU's link needs longer calls to be at full speed.
_CPU_CALL_BYTES = 4 * 2**20
_GPU_CALL_BYTES = 16 * 2**20
_MOST_BLOCKS = 512
# Copy-on-write mostly moves a block or two, and each padded one costs the read of a block.
_SHORT_LENGTHS = (8, 64)


def list_lengths(bytes_per_block: int, num_blocks: int, platform: str) -> tuple[int, ...]:
    """The lengths that lists of blocks are padded to, ascending.

    The longest is what a call may hold and the pool (of num_blocks blocks) has; shorter ones are
    there where they spare at least half of the padding.
    """
    call_bytes = _CPU_CALL_BYTES if platform == "cpu" else _GPU_CALL_BYTES
    longest = max(1, min(_MOST_BLOCKS, call_bytes // bytes_per_block, num_blocks))
    return (*(length for length in _SHORT_LENGTHS if 2 * length <= longest), longest)


def copy(
    kv_pool: Shaped[Array, "L N 2 K B D"],
    token_pool: Int[Array, "N B"],
    sources: Int[Array, " C"],
    destinations: Int[Array, " C"],
    *,
    backend: str,
) -> Pools:
    """The pools after the copies; a destination of N is dropped."""
    kv_pool = pallas_kernels.copy_blocks(kv_pool, sources, destinations, backend=backend)
    return kv_pool, set_tokens(token_pool, (destinations,), token_pool[sources])


def gather(
    kv_pool: Shaped[Array, "L N 2 K B D"],
    token_pool: Int[Array, "N B"],
    blocks: Int[Array, " C"],
    *,
    backend: str,
) -> tuple[Shaped[Array, "C L 2 K B D"], Int[Array, "C B"]]:
    """The contents of blocks, block by block as host memory keeps them."""
    kv = pallas_kernels.gather_blocks(kv_pool, blocks, backend=backend)
    return kv.swapaxes(0, 1), token_pool[blocks]


def scatter(
    kv_pool: Shaped[Array, "L N 2 K B D"],
    token_pool: Int[Array, "N B"],
    blocks: Int[Array, " C"],
    kv: Shaped[Array, "C L 2 K B D"],
    tokens: Int[Array, "C B"],
    *,
    backend: str,
) -> Pools:
    """The pools with what `gather` returned written into blocks; a block of N is dropped."""
    kv_pool = pallas_kernels.scatter_blocks(kv_pool, blocks, kv.swapaxes(0, 1), backend=backend)
    return kv_pool, set_tokens(token_pool, (blocks,), tokens)


_FUNCTIONS = {"copy": copy, "gather": gather, "scatter": scatter}


def check_blocks(
    name: str, blocks: Sequence[int] | Int[np.ndarray, " n"], count: int, *, distinct: bool = True
) -> Int[np.ndarray, " n"]:
    """`blocks` as int32; ValueError unless they are in 0 .. count - 1 and, if asked, distinct."""
    array = np.asarray(blocks, np.int32)
    if array.ndim != 1:
        raise ValueError(f"{name} must be a list of blocks, got an array of shape {array.shape}")
    if array.size and not (array.min() >= 0 and array.max() < count):
        raise ValueError(f"{name} must be in 0 .. {count - 1}, got {array.tolist()}")
    if distinct and len(set(array.tolist())) != array.size:
        raise ValueError(f"{name} must be distinct, got {array.tolist()}")
    return array


class BlockMoves:
    """The compiled programs of one pair of pools. They are donated to `copy` and `scatter`, and
    updated in place.

    Attributes:
        num_blocks: N.
        lengths: what lists of blocks are padded to, ascending.
        bytes_per_block: of keys, values and token ids of one block.
        programs: by (kind, length): fill in with what `compile_program` returns, for each of
            `keys()`, or call `compile`.
    """

    def __init__(
        self,
        pool_shape: tuple[int, ...],
        dtype: Any,
        *,
        device: jax.Device,
        backend: str,
        swapping: bool,
        lengths: tuple[int, ...] | None = None,
    ) -> None:
        """Compiles nothing yet.

        Args:
            pool_shape: L, N, 2, K, B, D.
            dtype: That the pool is stored in.
            device: Where the pools are.
            backend: Of `pallas_kernels`.
            swapping: Whether `gather` and `scatter` are wanted.
            lengths: None takes `list_lengths`.
        """
        L, N, _, K, B, D = pool_shape
        self.num_blocks = N
        self.block_shape = (L, 2, K, B, D)
        self.block_size = B
        self.dtype = jnp.dtype(dtype)
        self.bytes_per_block = L * 2 * K * B * D * self.dtype.itemsize + 4 * B
        self.lengths = lengths or list_lengths(self.bytes_per_block, N, device.platform)
        self.programs: dict[tuple[str, int], jax.stages.Compiled] = {}
        self._pool_shape = pool_shape
        self._device = device
        self._backend = backend
        self._kinds = tuple(_FUNCTIONS) if swapping else ("copy",)

    def keys(self) -> list[tuple[str, int]]:
        """(kind, length) of every program."""
        return [(kind, length) for kind in self._kinds for length in self.lengths]

    def compile_program(self, kind: str, length: int) -> jax.stages.Compiled:
        """One program; may be called from several threads at once."""

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        kv: Any = jax.ShapeDtypeStruct((length, *self.block_shape), self.dtype)
        arguments = {
            "copy": (ints(length), ints(length)),
            "gather": (ints(length),),
            "scatter": (ints(length), kv, ints(length, self.block_size)),
        }[kind]

        def run(*args: Array) -> Any:
            return _FUNCTIONS[kind](*args, backend=self._backend)  # type: ignore[operator]

        run.__name__ = f"{kind}_blocks_{length}"
        program: Any = jax.jit(run, donate_argnums=() if kind == "gather" else (0, 1))
        pools = (
            jax.ShapeDtypeStruct(self._pool_shape, self.dtype),
            ints(self.num_blocks, self.block_size),
        )
        # The kernels are chosen while tracing, by the default device, which is a thread's own.
        with jax.default_device(self._device):
            return program.lower(*pools, *arguments).compile()

    def compile(self) -> None:
        """Compiles every program."""
        for key in self.keys():
            self.programs[key] = self.compile_program(*key)

    def split(self, count: int) -> Iterator[tuple[slice, int]]:
        """(part, padded length) of each call that a list of `count` blocks takes."""
        start = 0
        while start < count:
            left = count - start
            length = next((x for x in self.lengths if x >= left), self.lengths[-1])
            yield slice(start, start + length), length
            start += length

    def padded(
        self, blocks: Int[np.ndarray, " n"], length: int, fill: int
    ) -> Int[np.ndarray, " C"]:
        """A fresh int32 [length]: the device may read it after the call has returned."""
        out = np.full(length, fill, np.int32)
        out[: len(blocks)] = blocks
        return out

    def copy(
        self,
        pools: Pools,
        sources: Sequence[int] | Int[np.ndarray, " n"],
        destinations: Sequence[int] | Int[np.ndarray, " n"],
    ) -> Pools:
        """The pools after block destinations[i] became a copy of block sources[i], for all i.

        Made for copy-on-write, where sources hold tokens and destinations are fresh: no block is
        both, so every source is read as it was before, however many calls the list takes. The pools
        are donated; returns without waiting.

        Raises:
            ValueError: The lists differ in length, a block does not exist, is written twice, or is
                both read and written. The pools are as before.
        """
        written = check_blocks("destinations", destinations, self.num_blocks)
        read = check_blocks("sources", sources, self.num_blocks, distinct=False)
        if read.size != written.size:
            raise ValueError(
                f"sources must be as many as destinations ({written.size}), got {read.size}"
            )
        both = set(read.tolist()).intersection(written.tolist())
        if both:
            raise ValueError(f"destinations must not be sources as well, got both: {sorted(both)}")
        for part, length in self.split(written.size):
            pools = self.programs["copy", length](
                *pools,
                self.padded(read[part], length, 0),
                self.padded(written[part], length, self.num_blocks),
            )
        return pools
