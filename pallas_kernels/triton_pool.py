"""Writes and copies in the KV pool, in Pallas/Triton; in place by aliasing the pool to the result.

An index that must not be written stays out of range even where its lanes are masked: interpreted, a
masked lane writes the old value back, which a second lane may just have changed.
"""

from functools import partial

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels.plan import power_of_two

_CHUNK = 2048  # elements of a block that a program moves at once
_TILE = 8192  # elements that a program of copy_blocks holds
_MIN_CHUNK = 32
_MAX_TILE = 2**20  # Triton's limit on a tensor's elements


def _write_kernel(k, v, slots, layer_ref, pool_in, pool, *, padded):
    del pool_in  # the same memory as `pool`
    _, num_blocks, _, num_kv_heads, block_size, head_dim = pool.shape
    token = pl.program_id(0)
    slot = slots[token]

    @pl.when((slot >= 0) & (slot < num_blocks * block_size))
    def write():
        block = lax.div(slot, jnp.int32(block_size))
        offset = lax.rem(slot, jnp.int32(block_size))
        head = jnp.arange(padded[0], dtype=jnp.int32)[:, None]
        dim = jnp.arange(padded[1], dtype=jnp.int32)[None, :]
        mask = (head < num_kv_heads) & (dim < head_dim)
        for which, source in enumerate((k, v)):
            values = plt.load(source.at[token, head, dim], mask=mask, other=0.0)
            if pool.dtype == jnp.uint16:
                values = lax.bitcast_convert_type(values, jnp.uint16)
            plt.store(pool.at[layer_ref[0], block, which, head, offset, dim], values, mask=mask)


def write_kv(kv_pool, layer, k, v, slot_mapping, *, interpret):
    """One program a token."""
    if k.shape[0] == 0:
        return kv_pool
    padded = tuple(power_of_two(size) for size in k.shape[1:])
    return pl.pallas_call(
        partial(_write_kernel, padded=padded),
        grid=(k.shape[0],),
        out_shape=jax.ShapeDtypeStruct(kv_pool.shape, kv_pool.dtype),
        input_output_aliases={4: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="write_kv",
    )(k, v, slot_mapping, jnp.reshape(jnp.asarray(layer, jnp.int32), (1,)), kv_pool)


def _flat(blocks):
    """[L, N, 2, K, B, D] as [L, N, elements]: a block of a layer is contiguous."""
    return jnp.reshape(blocks, (*blocks.shape[:2], -1))


def _copy_kernel(sources, destinations, pool_in, pool, *, count, padded, chunk, interpret):
    del pool_in
    _, num_blocks, num_elements = pool.shape
    layer = pl.program_id(0)
    pair = jnp.arange(padded, dtype=jnp.int32)
    source = plt.load(sources.at[pair], mask=pair < count, other=0)
    destination = plt.load(destinations.at[pair], mask=pair < count, other=-1)
    exists = (destination >= 0) & (destination < num_blocks)
    destination = jnp.where(exists, destination, num_blocks)[:, None]
    source = jnp.minimum(jnp.maximum(source, 0), num_blocks - 1)[:, None]
    element = (pl.program_id(1) * chunk + jnp.arange(chunk, dtype=jnp.int32))[None, :]
    mask = exists[:, None] & (element < num_elements)
    values = plt.load(pool.at[layer, source, element], mask=mask)
    if not interpret:
        # All threads have read before the first one writes: a source may be a destination too.
        plt.debug_barrier()
    plt.store(pool.at[layer, destination, element], values, mask=mask)


def copy_blocks(kv_pool, sources, destinations, *, interpret):
    """One launch: a program takes the same few elements of all pairs, so it reads before it writes
    whatever chains the pairs make."""
    count = sources.shape[0]
    if count == 0:
        return kv_pool
    pool = _flat(kv_pool)
    padded = power_of_two(count)
    chunk = min(max(_TILE // padded, _MIN_CHUNK), power_of_two(pool.shape[2]))
    if padded * chunk > _MAX_TILE:
        raise NotImplementedError(
            f"copy_blocks with backend 'triton' takes at most {_MAX_TILE // _MIN_CHUNK} pairs, "
            f"got {count}"
        )
    copied = pl.pallas_call(
        partial(_copy_kernel, count=count, padded=padded, chunk=chunk, interpret=interpret),
        grid=(pool.shape[0], -(-pool.shape[2] // chunk)),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={2: 0},
        compiler_params=plt.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="copy_blocks",
    )(sources, destinations, pool)
    return jnp.reshape(copied, kv_pool.shape)


def _chunk(num_elements, chunk):
    element = pl.program_id(2) * chunk + jnp.arange(chunk, dtype=jnp.int32)
    return element, element < num_elements


def _gather_kernel(blocks, pool, out, *, chunk):
    layer, i = pl.program_id(0), pl.program_id(1)
    element, mask = _chunk(pool.shape[2], chunk)
    block = jnp.minimum(jnp.maximum(blocks[i], 0), pool.shape[1] - 1)
    values = plt.load(pool.at[layer, block, element], mask=mask)
    plt.store(out.at[layer, i, element], values, mask=mask)


def _scatter_kernel(blocks, data, pool_in, pool, *, chunk):
    del pool_in
    layer, i = pl.program_id(0), pl.program_id(1)
    element, mask = _chunk(pool.shape[2], chunk)
    block = blocks[i]

    @pl.when((block >= 0) & (block < pool.shape[1]))
    def _():
        values = plt.load(data.at[layer, i, element], mask=mask)
        plt.store(pool.at[layer, block, element], values, mask=mask)


def _grid(pool, count):
    chunk = min(_CHUNK, power_of_two(pool.shape[2]))
    return chunk, (pool.shape[0], count, -(-pool.shape[2] // chunk))


def gather_blocks(kv_pool, blocks, *, interpret):
    """One program a block, layer and chunk."""
    pool, count = _flat(kv_pool), blocks.shape[0]
    shape = (kv_pool.shape[0], count, *kv_pool.shape[2:])
    if count == 0:
        return jnp.zeros(shape, kv_pool.dtype)
    chunk, grid = _grid(pool, count)
    gathered = pl.pallas_call(
        partial(_gather_kernel, chunk=chunk),
        grid=grid,
        out_shape=jax.ShapeDtypeStruct((pool.shape[0], count, pool.shape[2]), pool.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="gather_blocks",
    )(blocks, pool)
    return jnp.reshape(gathered, shape)


def scatter_blocks(kv_pool, blocks, data, *, interpret):
    """One program a block, layer and chunk."""
    count = blocks.shape[0]
    if count == 0:
        return kv_pool
    pool = _flat(kv_pool)
    chunk, grid = _grid(pool, count)
    scattered = pl.pallas_call(
        partial(_scatter_kernel, chunk=chunk),
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={2: 0},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="scatter_blocks",
    )(blocks, _flat(data), pool)
    return jnp.reshape(scattered, kv_pool.shape)
