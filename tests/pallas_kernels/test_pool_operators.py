"""write_kv, copy_blocks, gather_blocks, scatter_blocks and merge_states, on all backends (triton
interpreted)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels

SHAPE = (3, 6, 2, 2, 4, 5)  # L N 2 K B D
NUM_BLOCKS, BLOCK_SIZE = SHAPE[1], SHAPE[4]
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "uint16": "bfloat16"}

all_backends = pytest.mark.parametrize("backend", ["reference", "xla", "triton"])
few_examples = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def random_array(shape, dtype, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    if dtype == "uint16":
        return values.astype(jnp.bfloat16).view(np.uint16)
    return values.astype(jnp.dtype(dtype))


def out_of_range(size):
    """Integers below 0 (which JAX would count from the end) and past the end."""
    return st.integers(-2 * size, -1) | st.integers(size, 3 * size) | st.just(-(2**31))


def indices(size, count):
    """`count` indices, of which those in range are distinct."""
    return st.lists(
        st.integers(0, size - 1) | out_of_range(size), min_size=count, max_size=count
    ).filter(lambda xs: len({x for x in xs if 0 <= x < size}) == sum(0 <= x < size for x in xs))


@all_backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [7, 1])
def test_write_kv(backend, dtype, count):
    pool = random_array(SHAPE, dtype)
    k, v = (random_array((count, SHAPE[3], SHAPE[5]), DTYPES[dtype], seed) for seed in (1, 2))
    write = jax.jit(pallas_kernels.write_kv, static_argnames="backend")

    @few_examples
    @given(indices(NUM_SLOTS, count), st.integers(0, SHAPE[0] - 1))
    def check(slots, layer):
        expected = pool.copy()
        for token, slot in enumerate(slots):
            if 0 <= slot < NUM_SLOTS:
                where = (layer, slot // BLOCK_SIZE, slice(None), slice(None), slot % BLOCK_SIZE)
                expected[where] = np.stack([k[token], v[token]]).view(pool.dtype)
        got = write(pool, np.int32(layer), k, v, np.array(slots, np.int32), backend=backend)
        np.testing.assert_array_equal(got, expected)

    check()


@pytest.mark.parametrize("backend", ["reference", "xla", "triton", "auto"])
def test_write_kv_where_python_ints_are_of_64_bits(backend):
    pool = random_array(SHAPE, "float32")
    k, v = (random_array((3, SHAPE[3], SHAPE[5]), "float32", seed) for seed in (1, 2))
    expected = pool.copy()
    expected[1, 2, :, :, 1] = np.stack([k[0], v[0]])
    with jax.enable_x64(True):
        slots = jnp.asarray([2 * BLOCK_SIZE + 1, -1, NUM_SLOTS], jnp.int32)
        got = pallas_kernels.write_kv(pool, 1, k, v, slots, backend=backend)
    np.testing.assert_array_equal(got, expected)


@all_backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [4, 1])
def test_copy_blocks(backend, dtype, count):
    pool = random_array(SHAPE, dtype)
    copy = jax.jit(pallas_kernels.copy_blocks, static_argnames="backend")
    any_source = st.integers(0, NUM_BLOCKS - 1)

    @few_examples
    @given(st.lists(any_source, min_size=count, max_size=count), indices(NUM_BLOCKS, count))
    def check(sources, destinations):
        expected = pool.copy()
        for source, destination in zip(sources, destinations, strict=True):
            if 0 <= destination < NUM_BLOCKS:
                expected[:, destination] = pool[:, source]
        pairs = np.array([sources, destinations], np.int32)
        np.testing.assert_array_equal(copy(pool, *pairs, backend=backend), expected)

    check()


@all_backends
def test_copies_are_simultaneous(backend):
    pool = random_array(SHAPE, "float32")
    cycle = np.array([0, 1, 2, 2], np.int32), np.array([1, 2, 0, -1], np.int32)
    got = pallas_kernels.copy_blocks(pool, *cycle, backend=backend)
    np.testing.assert_array_equal(got[:, :3], pool[:, [2, 0, 1]])


@all_backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [4, 1])
def test_gather_and_scatter_blocks(backend, dtype, count):
    pool, other = random_array(SHAPE, dtype), random_array(SHAPE, dtype, seed=1)
    gather = jax.jit(pallas_kernels.gather_blocks, static_argnames="backend")
    scatter = jax.jit(pallas_kernels.scatter_blocks, static_argnames="backend")

    @few_examples
    @given(indices(NUM_BLOCKS, count))
    def check(ids):
        blocks = np.array(ids, np.int32)
        data = np.asarray(gather(pool, blocks, backend=backend))
        expected = other.copy()
        for i, block in enumerate(ids):
            if 0 <= block < NUM_BLOCKS:
                np.testing.assert_array_equal(data[:, i], pool[:, block])
                expected[:, block] = pool[:, block]
        np.testing.assert_array_equal(scatter(other, blocks, data, backend=backend), expected)

    check()


@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("count", [4, 1])
def test_writes_leave_the_pool_in_place(dtype, count):
    pool = jnp.zeros((8, 512, 2, 2, 16, 16), dtype)
    ids = jnp.arange(count, dtype=jnp.int32)
    kv = jnp.zeros((count, 2, 16), DTYPES[dtype])
    calls = (
        (pallas_kernels.copy_blocks, ids, ids),
        (pallas_kernels.scatter_blocks, ids, pool[:, :count]),
        (pallas_kernels.write_kv, jnp.int32(3), kv, kv, ids),
    )
    for function, *arguments in calls:
        compiled = jax.jit(function, donate_argnums=0).lower(pool, *arguments).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == pool.nbytes
        assert memory.temp_size_in_bytes < pool.nbytes / 20


@all_backends
def test_merge_states_is_attention_over_the_union(backend):
    """Three decode rows hold 2 blocks, 1 block and 9 slots of what a fourth holds together."""
    size, num_heads = 4, 4
    pool = random_array((1, 8, 2, 2, size, 8), "float32")
    q = np.repeat(random_array((1, num_heads, 8), "float32", seed=1), 4, axis=0)
    blocks = np.array([5, 2, 7, 0, 3, 6], np.int32)
    tables = np.zeros((4, 6), np.int32)
    tables[0, :2], tables[1, :1], tables[2, :3], tables[3] = (
        blocks[:2],
        blocks[2:3],
        blocks[3:],
        blocks,
    )
    context_lens = np.array([8, 4, 9, 21], np.int32)
    starts = np.arange(5, dtype=np.int32)
    out, lse = pallas_kernels.paged_attention(
        q, pool, 0, tables, starts, context_lens, scale=0.5, return_lse=True, backend=backend
    )
    # A part that saw no key counts for nothing, whatever its output holds.
    outs = jnp.concatenate([out[:3], jnp.full_like(out[:1], jnp.nan)])[:, None]
    lses = jnp.concatenate([lse[:3], jnp.full_like(lse[:1], -jnp.inf)])[:, None]
    merged, merged_lse = pallas_kernels.merge_states(outs, lses, backend=backend)
    np.testing.assert_allclose(merged[0], out[3], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(merged_lse[0], lse[3], rtol=1e-6)


@all_backends
def test_merge_states_of_rows_without_keys(backend):
    outs = jnp.full((2, 3, 4, 5), jnp.nan, jnp.bfloat16)
    lses = jnp.full((2, 3, 4), -jnp.inf)
    out, lse = pallas_kernels.merge_states(outs, lses, backend=backend)
    assert out.dtype == jnp.bfloat16
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()
