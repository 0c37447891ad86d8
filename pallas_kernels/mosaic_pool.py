"""Writes and copies in the KV pool, in Pallas/Mosaic GPU, for Hopper.

Everything moves by bulk copies (TMA) through shared memory, so that the numbers are never looked at
and any dtype will do. The pool is written in place: the kernels take it as a mutable reference,
which XLA keeps in the memory of a donated pool.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.support import Case

_SHARED_BYTES = 49152  # that a program takes, so that four of them fit on a multiprocessor
_MAX_SHARED_BYTES = 196608  # that a program may take
_MAX_BOX = 256  # elements along one dimension of a bulk copy
_LINE = 128  # a bulk copy moves multiples of so many bytes
_TOKENS = 8  # that a program of write_kv takes


def unsupported(case: Case) -> str | None:
    """What of `case`, an operator on the pool, is not supported; None if nothing."""
    assert case.head_dim is not None
    step = _LINE // jnp.dtype(case.dtype).itemsize
    if case.head_dim % step or case.head_dim > _MAX_BOX:
        return f"head dims other than multiples of {step} up to {_MAX_BOX} (got {case.head_dim})"
    return None


def write_kv(kv_pool, layer, k, v, slot_mapping, *, interpret: Any = None):
    """One program for a few tokens: their keys and values are read at once, and written one token
    at a time.

    Args:
        kv_pool: [L, N, 2, K, B, D].
        layer: Scalar.
        k: [T, K, D], of the pool's dtype (bfloat16 for a pool of uint16).
        v: Likewise.
        slot_mapping: [T] int32; slots outside 0 .. N * B - 1 are dropped.
        interpret: Parameters to interpret the kernel with; None to compile it.

    Returns:
        The pool.
    """
    num_tokens = k.shape[0]
    if num_tokens == 0:
        return kv_pool
    _, num_blocks, _, num_kv_heads, block_size, head_dim = kv_pool.shape
    if kv_pool.dtype == jnp.uint16:
        k, v = (lax.bitcast_convert_type(x, jnp.uint16) for x in (k, v))
    token_bytes = 2 * num_kv_heads * head_dim * kv_pool.dtype.itemsize
    tokens = _divisor(num_tokens, min(_TOKENS, _SHARED_BYTES // token_bytes))

    def write_kv(k, v, slots, layer, pool, new, barrier):
        first = lax.axis_index("chunk") * tokens
        for which, source in enumerate((k, v)):
            plgpu.copy_gmem_to_smem(source.at[pl.ds(first, tokens)], new.at[which], barrier)
        page = layer[0]
        slot_of = [slots[first + token] for token in range(tokens)]
        plgpu.barrier_wait(barrier)
        for token, slot in enumerate(slot_of):

            @pl.when((slot >= 0) & (slot < num_blocks * block_size))
            def _(token=token, slot=slot):
                block = lax.div(slot, jnp.int32(block_size))
                offset = lax.rem(slot, jnp.int32(block_size))
                for which in range(2):
                    plgpu.copy_smem_to_gmem(
                        new.at[which, token], pool.at[page, block, which, :, offset]
                    )

        plgpu.wait_smem_to_gmem(0)

    pool = jax.new_ref(kv_pool)
    plgpu.kernel(
        write_kv,
        scratch_types=(
            plgpu.SMEM((2, tokens, num_kv_heads, head_dim), kv_pool.dtype),
            plgpu.Barrier(num_arrivals=2),
        ),
        grid=(num_tokens // tokens,),
        grid_names=("chunk",),
        interpret=interpret,
    )(k, v, slot_mapping, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), pool)
    return jax.ref.freeze(pool)


def copy_blocks(kv_pool, sources, destinations, *, interpret: Any = None):
    """One launch: a program takes the same few rows of all pairs, and has read them when it writes
    the first, whatever chains the pairs make. More pairs than fit into shared memory are gathered
    and scattered instead.

    Args:
        kv_pool: [L, N, 2, K, B, D].
        sources: [C] int32.
        destinations: [C] int32, each at most once; a pair with one outside 0 .. N - 1 is dropped.
        interpret: Parameters to interpret the kernel with; None to compile it.

    Returns:
        The pool.
    """
    count = sources.shape[0]
    if count == 0:
        return kv_pool
    flat = _rows(kv_pool)
    num_layers, num_blocks, num_rows, width = flat.shape
    row_bytes = count * width * flat.dtype.itemsize
    if row_bytes > _MAX_SHARED_BYTES:
        data = gather_blocks(kv_pool, sources, interpret=interpret)
        return scatter_blocks(kv_pool, destinations, data, interpret=interpret)
    rows = _divisor(num_rows, min(_MAX_BOX, max(1, _SHARED_BYTES // row_bytes)))

    def copy_blocks(sources, destinations, pool, held, barrier):
        layer = lax.axis_index("layer")
        chunk = pl.ds(lax.axis_index("chunk") * rows, rows)

        def exists(destination):
            return (destination >= 0) & (destination < num_blocks)

        def read(pair, state):
            source = jnp.clip(sources[pair], 0, num_blocks - 1)
            used = exists(destinations[pair])

            @pl.when(used)
            def _copy():
                plgpu.copy_gmem_to_smem(pool.at[layer, source, chunk], held.at[pair], barrier)

            @pl.when(~used)
            def _skip():
                plgpu.barrier_arrive(barrier)

            return state

        def write(pair, state):
            destination = destinations[pair]

            @pl.when(exists(destination))
            def _():
                plgpu.copy_smem_to_gmem(held.at[pair], pool.at[layer, destination, chunk])

            return state

        lax.fori_loop(0, count, read, ())
        plgpu.barrier_wait(barrier)
        plgpu.commit_smem()  # orders the writes after the reads, since a block may be in both
        lax.fori_loop(0, count, write, ())
        plgpu.wait_smem_to_gmem(0)

    pool = jax.new_ref(flat)
    plgpu.kernel(
        copy_blocks,
        scratch_types=(
            plgpu.SMEM((count, rows, width), flat.dtype),
            plgpu.Barrier(num_arrivals=count),
        ),
        grid=(num_layers, num_rows // rows),
        grid_names=("layer", "chunk"),
        interpret=interpret,
    )(sources, destinations, pool)
    return jnp.reshape(jax.ref.freeze(pool), kv_pool.shape)


def gather_blocks(kv_pool, blocks, *, interpret: Any = None):
    """One launch, with a program for some rows of a block in a layer.

    Args:
        kv_pool: [L, N, 2, K, B, D].
        blocks: [C] int32; those outside 0 .. N - 1 read some block or other.
        interpret: Parameters to interpret the kernel with; None to compile it.

    Returns:
        [L, C, 2, K, B, D], in the pool's dtype.
    """
    count = blocks.shape[0]
    shape = (kv_pool.shape[0], count, *kv_pool.shape[2:])
    if count == 0:
        return jnp.zeros(shape, kv_pool.dtype)
    flat = _rows(kv_pool)
    num_blocks = flat.shape[1]

    def gather_blocks(blocks, pool, out, held, barrier):
        layer, i, chunk = _place(held.shape[0])
        block = jnp.clip(blocks[i], 0, num_blocks - 1)
        _move(pool.at[layer, block, chunk], out.at[layer, i, chunk], held, barrier)

    gathered = plgpu.kernel(
        gather_blocks,
        out_type=jax.ShapeDtypeStruct((*shape[:2], *flat.shape[2:]), flat.dtype),
        **_a_program_a_chunk(flat, count),
        interpret=interpret,
    )(blocks, flat)
    return jnp.reshape(gathered, shape)


def scatter_blocks(kv_pool, blocks, data, *, interpret: Any = None):
    """One launch, with a program for some rows of a block in a layer.

    Args:
        kv_pool: [L, N, 2, K, B, D].
        blocks: [C] int32, each at most once; those outside 0 .. N - 1 are dropped.
        data: [L, C, 2, K, B, D], in the pool's dtype.
        interpret: Parameters to interpret the kernel with; None to compile it.

    Returns:
        The pool.
    """
    count = blocks.shape[0]
    if count == 0:
        return kv_pool
    flat = _rows(kv_pool)
    num_blocks = flat.shape[1]

    def scatter_blocks(blocks, data, pool, held, barrier):
        layer, i, chunk = _place(held.shape[0])
        block = blocks[i]

        @pl.when((block >= 0) & (block < num_blocks))
        def _():
            _move(data.at[layer, i, chunk], pool.at[layer, block, chunk], held, barrier)

    pool = jax.new_ref(flat)
    plgpu.kernel(scatter_blocks, **_a_program_a_chunk(flat, count), interpret=interpret)(
        blocks, _rows(data), pool
    )
    return jnp.reshape(jax.ref.freeze(pool), kv_pool.shape)


def _rows(blocks):
    """[L, N, 2, K, B, D] as [L, N, rows, D]."""
    return jnp.reshape(blocks, (*blocks.shape[:2], -1, blocks.shape[-1]))


def _divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` that is at most `limit`; 1 for limits below."""
    return max(i for i in range(1, max(min(size, limit), 1) + 1) if size % i == 0)


def _a_program_a_chunk(flat, count: int) -> dict[str, Any]:
    """The launch of a kernel that moves `count` blocks [rows, D] of every layer."""
    num_layers, _, num_rows, width = flat.shape
    limit = _SHARED_BYTES // (width * flat.dtype.itemsize)
    rows = _divisor(num_rows, min(_MAX_BOX, limit))
    return {
        "scratch_types": (plgpu.SMEM((rows, width), flat.dtype), plgpu.Barrier()),
        "grid": (num_layers, count, num_rows // rows),
        "grid_names": ("layer", "block", "chunk"),
    }


def _place(rows: int):
    """The layer, the index into the list of blocks and the rows that a program moves."""
    chunk = pl.ds(lax.axis_index("chunk") * rows, rows)
    return lax.axis_index("layer"), lax.axis_index("block"), chunk


def _move(source, destination, held, barrier):
    plgpu.copy_gmem_to_smem(source, held, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(held, destination)
    plgpu.wait_smem_to_gmem(0)
