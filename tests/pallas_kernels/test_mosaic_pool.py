"""The Mosaic kernels that write and copy in the pool: interpreted with race detection, and what
they take of a GPU that is not here."""

import importlib
import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import aot
from pallas_kernels.ptx import find_ptxas
from pallas_kernels.support import Case

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("JAX's interpreter for Mosaic kernels is too old", allow_module_level=True)

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels import mosaic_pool

SHAPE = (2, 5, 2, 3, 4, 64)  # L N 2 K B D
NUM_BLOCKS, BLOCK_SIZE = SHAPE[1], SHAPE[4]
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "uint16": "bfloat16"}

all_dtypes = pytest.mark.parametrize("dtype", DTYPES)
few_examples = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    # The fixture holds no state that one example could leave to the next.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def interpreted():
    """Calls a jitted operator, interpreted; no access may race with another."""
    pytest.importorskip("absl")
    name = "jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call"
    interpreter = importlib.import_module(name)
    jitted = {}

    def call(operator, *arguments):
        if operator not in jitted:
            interpret = plgpu.InterpretGPUParams(detect_races=True)
            jitted[operator] = jax.jit(partial(operator, interpret=interpret))
        result = np.asarray(jitted[operator](*arguments))
        assert not interpreter.get_races().races_found
        return result

    yield call
    # What a failed kernel leaves behind would fail the next one.
    interpreter.reset_gpu_interpret_mode_state()


def random_array(shape, dtype, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    if dtype == "uint16":
        return values.astype(jnp.bfloat16).view(np.uint16)
    return values.astype(jnp.dtype(dtype))


def out_of_range(size):
    return st.integers(-2 * size, -1) | st.integers(size, 3 * size) | st.sampled_from([-(2**31)])


def indices(size, count):
    """`count` indices, of which those in range are distinct."""
    return st.lists(
        st.integers(0, size - 1) | out_of_range(size), min_size=count, max_size=count
    ).filter(lambda xs: len({x for x in xs if 0 <= x < size}) == sum(0 <= x < size for x in xs))


# Five tokens are one program, twelve are two.
@pytest.mark.parametrize(
    ("dtype", "num_tokens"), [("bfloat16", 5), ("float16", 12), ("float32", 5), ("uint16", 12)]
)
def test_write_kv(interpreted, dtype, num_tokens):
    pool = random_array(SHAPE, dtype)
    shape = (num_tokens, SHAPE[3], SHAPE[5])
    k, v = (random_array(shape, DTYPES[dtype], seed) for seed in (1, 2))

    @few_examples
    @given(indices(NUM_SLOTS, num_tokens), st.integers(0, SHAPE[0] - 1))
    def check(slots, layer):
        expected = pool.copy()
        for token, slot in enumerate(slots):
            if 0 <= slot < NUM_SLOTS:
                where = (layer, slot // BLOCK_SIZE, slice(None), slice(None), slot % BLOCK_SIZE)
                expected[where] = np.stack([k[token], v[token]]).view(pool.dtype)
        slots = np.array(slots, np.int32)
        got = interpreted(mosaic_pool.write_kv, pool, np.int32(layer), k, v, slots)
        np.testing.assert_array_equal(got, expected)

    check()


@pytest.mark.parametrize(
    ("dtype", "fits"), [("bfloat16", True), ("float32", True), ("uint16", False)]
)
def test_copy_blocks(interpreted, dtype, fits, monkeypatch):
    """Simultaneous copies, some of them in chains and cycles; also of more pairs than fit into
    shared memory."""
    if not fits:
        monkeypatch.setattr(mosaic_pool, "_MAX_SHARED_BYTES", 256)
    pool = random_array(SHAPE, dtype)
    any_source = st.integers(0, NUM_BLOCKS - 1)

    @few_examples
    @given(st.lists(any_source, min_size=4, max_size=4), indices(NUM_BLOCKS, 4))
    def check(sources, destinations):
        expected = pool.copy()
        for source, destination in zip(sources, destinations, strict=True):
            if 0 <= destination < NUM_BLOCKS:
                expected[:, destination] = pool[:, source]
        pairs = np.array([sources, destinations], np.int32)
        np.testing.assert_array_equal(interpreted(mosaic_pool.copy_blocks, pool, *pairs), expected)

    check()


def test_copies_in_a_cycle(interpreted):
    pool = random_array(SHAPE, "bfloat16")
    # A dropped pair's source may be anything.
    pairs = np.array([[0, 1, 2, 2**30], [1, 2, 0, -1]], np.int32)
    got = interpreted(mosaic_pool.copy_blocks, pool, *pairs)
    np.testing.assert_array_equal(got[:, :3], pool[:, [2, 0, 1]])
    np.testing.assert_array_equal(got[:, 3:], pool[:, 3:])


@all_dtypes
def test_gather_and_scatter_blocks(interpreted, dtype):
    pool, other = random_array(SHAPE, dtype), random_array(SHAPE, dtype, seed=1)

    @few_examples
    @given(indices(NUM_BLOCKS, 4))
    def check(ids):
        blocks = np.array(ids, np.int32)
        data = interpreted(mosaic_pool.gather_blocks, pool, blocks)
        expected = other.copy()
        for i, block in enumerate(ids):
            if 0 <= block < NUM_BLOCKS:
                np.testing.assert_array_equal(data[:, i], pool[:, block])
                expected[:, block] = pool[:, block]
        got = interpreted(mosaic_pool.scatter_blocks, other, blocks, data)
        np.testing.assert_array_equal(got, expected)

    check()


def test_empty_lists_launch_nothing():
    pool = jnp.asarray(random_array(SHAPE, "bfloat16"))
    none = jnp.zeros(0, jnp.int32)
    row = jnp.zeros((0, SHAPE[3], SHAPE[5]), pool.dtype)
    assert mosaic_pool.write_kv(pool, 0, row, row, none) is pool
    assert mosaic_pool.copy_blocks(pool, none, none) is pool
    data = mosaic_pool.gather_blocks(pool, none)
    assert data.shape == (SHAPE[0], 0, *SHAPE[2:]) and data.dtype == pool.dtype
    assert mosaic_pool.scatter_blocks(pool, none, data) is pool


def test_outside_jit_the_argument_stays_as_it_was(interpreted):
    """The kernels write their reference in place, which is a copy of what the caller keeps."""
    pool = jnp.asarray(random_array(SHAPE, "bfloat16"))
    before = np.array(pool)
    block = np.array([1], np.int32)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    got = mosaic_pool.copy_blocks(pool, block, block + 1, interpret=interpret)
    np.testing.assert_array_equal(got[:, 2], before[:, 1])
    np.testing.assert_array_equal(pool, before)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        ("bfloat16", 64, None),
        ("float16", 256, None),
        ("float32", 96, None),
        ("bfloat16", 80, "head dims other than multiples of 64 up to 256 (got 80)"),
        ("float32", 16, "head dims other than multiples of 32 up to 256 (got 16)"),
        ("bfloat16", 512, "head dims other than multiples of 64 up to 256 (got 512)"),
    ],
)
def test_what_is_unsupported(dtype, head_dim, reason):
    case = Case("write_kv", np.dtype(jnp.dtype(dtype)), head_dim=head_dim, block_size=16)
    assert mosaic_pool.unsupported(case) == reason


@pytest.fixture(scope="module")
def needs_cuda_plugin():
    """Compiling for a GPU needs JAX's CUDA plugin and a ptxas, which not every machine has."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(plugin) for plugin in plugins):
        pytest.skip("JAX's CUDA plugin is not installed")
    try:
        find_ptxas()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("dtype", "block_size", "head_dim", "num_tokens", "gpu"),
    [
        ("bfloat16", 16, 128, 64, "H200"),
        ("uint16", 16, 64, 7, "H200"),
        ("float16", 128, 256, 64, "H100"),
        ("float32", 32, 96, 512, "H200"),
    ],
)
def test_in_place_by_bulk_copies(needs_cuda_plugin, dtype, block_size, head_dim, num_tokens, gpu):
    """All operators, writes in a loop over the layers: nothing copies the pool."""
    num_layers, num_heads = 8, 8
    shape = (num_layers, 1024, 2, num_heads, block_size, head_dim)
    pool = jax.ShapeDtypeStruct(shape, dtype)
    rows = jax.ShapeDtypeStruct((num_layers, num_tokens, num_heads, head_dim), DTYPES[dtype])
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    listed = jax.ShapeDtypeStruct((4,), jnp.int32)

    def step(pool, rows, slots, sources, destinations):
        def layer(pool, xs):
            index, row = xs
            return mosaic_pool.write_kv(pool, index, row, row, slots), None

        pool, _ = jax.lax.scan(layer, pool, (jnp.arange(num_layers, dtype=jnp.int32), rows))
        pool = mosaic_pool.copy_blocks(pool, sources, destinations)
        data = mosaic_pool.gather_blocks(pool, sources[:2])
        return mosaic_pool.scatter_blocks(pool, destinations[:2], data)

    compiled = aot.compile_for(step, pool, rows, slots, listed, listed, gpu=gpu, donate_argnums=0)
    pool_bytes = np.prod(shape) * pool.dtype.itemsize
    assert compiled.alias_bytes == pool_bytes
    assert compiled.temp_bytes < pool_bytes / 50
    for name in ("write_kv", "copy_blocks", "gather_blocks", "scatter_blocks"):
        kernel = compiled.kernels[name]
        assert kernel.pallas and kernel.spill_bytes == 0
        assert kernel.instructions["cp.async.bulk.tensor"] + kernel.instructions["cp.async.bulk"]
        assert not kernel.instructions["st.global"]


def test_offsets_of_a_large_pool(needs_cuda_plugin):
    """A pool of more than 2**32 elements, and more pairs than fit into shared memory."""
    pool = jax.ShapeDtypeStruct((32, 2**14, 2, 8, 16, 128), jnp.bfloat16)
    assert np.prod(pool.shape, dtype=np.int64) > 2**32
    pairs = jax.ShapeDtypeStruct((1000,), jnp.int32)
    compiled = aot.compile_for(
        mosaic_pool.copy_blocks, pool, pairs, pairs, gpu="H200", donate_argnums=0
    )
    kernels = {name for name, kernel in compiled.kernels.items() if kernel.pallas}
    assert kernels == {"gather_blocks", "scatter_blocks"}
    data_bytes = 2 * 32 * 1000 * np.prod(pool.shape[2:])
    assert compiled.temp_bytes < 1.01 * data_bytes
