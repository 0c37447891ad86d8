"""The Mosaic kernel for chunks of prompts: interpreted against the reference with race detection,
and what it takes of a GPU that is not here."""

import importlib
import importlib.util
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels import aot
from pallas_kernels.plan import make_plan
from pallas_kernels.ptx import find_ptxas

if jax.__version_info__ < (0, 11, 2):
    pytest.skip("JAX's interpreter for Mosaic kernels is too old", allow_module_level=True)

import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels.mosaic_ragged import ragged_attention, ragged_config
from pallas_kernels.mosaic_tiles import LOG2_E, NO_WINDOW, Operands, pool_pages

SCALE = 0.4  # the fixture's
BUCKET = {
    "num_tokens": 48,
    "num_sequences": 4,
    "max_blocks": 9,
    "block_size": 16,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 64,
    "dtype": "bfloat16",
}
# A whole prompt, a decode row, a chunk whose context ends with a block; then padding.
ROWS = [(17, 17), (1, 33), (23, 128)]
RNG = np.random.default_rng(0)
FEATURES = {
    "window": {"window": np.int32(19)},
    "wide window": {"window": np.int32(90)},
    "no window": {"window": np.int32(0)},
    "soft_cap": {"soft_cap": 1.5},
    "alibi_slopes": {"alibi_slopes": RNG.uniform(0, 0.2, 4).astype(np.float32)},
    "sinks": {"sinks": RNG.standard_normal(4, dtype=np.float32)},
}
FEATURES["all"] = {name: value for pair in FEATURES.values() for name, value in pair.items()}
FEATURES["all"]["window"] = np.int32(70)


@pytest.fixture
def interpreter():
    """JAX's interpreter of Mosaic kernels."""
    pytest.importorskip("absl")
    name = "jax._src.pallas.mosaic_gpu.interpret"
    yield importlib.import_module(f"{name}.interpret_pallas_call")
    # What a failed kernel leaves behind would fail the next one.
    importlib.import_module(f"{name}.interpret_pallas_call").reset_gpu_interpret_mode_state()


def config_for(group, head_dim, block_size, *, window=None, soft_cap=None, alibi_slopes=None):
    return ragged_config(
        group,
        head_dim,
        block_size,
        window=window is not None,
        soft_cap=soft_cap is not None,
        alibi=alibi_slopes is not None,
    )


@partial(jax.jit, static_argnames=("soft_cap", "return_lse", "interpret", "weights_in_registers"))
def ragged(
    q, kv_pool, layer, block_tables, tiles, *,
    window=None, soft_cap=None, alibi_slopes=None, sinks=None,
    return_lse=True, interpret=None, weights_in_registers=None,
):  # fmt: skip
    """The kernel, with arguments like those of paged_attention."""
    num_kv_heads, block_size, head_dim = kv_pool.shape[3:]
    group = q.shape[1] // num_kv_heads
    features = {"window": window, "soft_cap": soft_cap, "alibi_slopes": alibi_slopes}
    config = config_for(group, head_dim, block_size, **features)

    def of_rows(array):
        if array is None:
            return None
        return jnp.reshape(array * LOG2_E, (num_kv_heads, group))[:, np.arange(64) % group]

    if window is not None:
        window = jnp.where(window > 0, window, NO_WINDOW).reshape(1)
    scales = [SCALE * LOG2_E, 1.0] if soft_cap is None else [SCALE / soft_cap, soft_cap * LOG2_E]
    operands = Operands(
        q=q,
        kv_pool=pool_pages(kv_pool, config),
        layer=jnp.reshape(layer, (1,)),
        block_tables=block_tables,
        scales=jnp.array(scales, jnp.float32),
        window=window,
        slopes=of_rows(alibi_slopes),
        sinks=of_rows(sinks),
    )
    return ragged_attention(
        operands,
        tiles,
        config=config,
        return_lse=return_lse,
        interpret=interpret,
        weights_in_registers=weights_in_registers,
    )


def tiles_of(batch):
    """The plan's tiles, and which rows of q they hold."""
    plan = make_plan(
        batch.query_starts,
        batch.context_lens,
        num_tokens=batch.q.shape[0],
        num_heads=batch.q.shape[1],
        num_kv_heads=batch.kv_pool.shape[3],
        dtype=batch.q.dtype,
    )
    rows = np.zeros(batch.q.shape[0], bool)
    for _, first, count, _ in plan.tiles.T:
        rows[first : first + count] = True
    return plan.tiles, rows


@pytest.fixture
def check(interpreter, attend, assert_close):
    """Compares the kernel with the reference on the rows of a batch's tiles."""

    def check(batch, weights_in_registers=None, **features):
        dtype = batch.q.dtype
        tiles, rows = tiles_of(batch)
        expected = attend(*batch.arguments, backend="reference", **features)
        out, lse = ragged(
            *batch.arguments[:4],
            tiles,
            interpret=plgpu.InterpretGPUParams(detect_races=True),
            weights_in_registers=weights_in_registers,
            **features,
        )
        got = np.asarray(out), np.asarray(lse)
        assert not interpreter.get_races().races_found
        assert got[0].dtype == dtype
        assert np.isneginf(got[1][~rows]).all()
        assert_close([x[rows] for x in got], [np.asarray(x)[rows] for x in expected], dtype.name)
        return got

    return check


@pytest.fixture
def make(bucket_type, make_batch):
    """A batch in a bucket with changes to BUCKET; its scores are of usual size."""

    def make(rows, **changes):
        bucket = bucket_type(**BUCKET | changes)
        batch = make_batch(bucket, rows, seed=1)
        batch.q[:] = batch.q * bucket.head_dim**-0.5
        return batch

    return make


@pytest.mark.parametrize(
    ("group", "head_dim", "block_size", "dtype"),
    [
        (1, 128, 128, "bfloat16"),  # a block holds two tiles of keys
        (3, 64, 16, "float16"),  # a tile of queries has a row to spare
        (8, 128, 64, "bfloat16"),
        (16, 64, 32, "bfloat16"),
    ],
)
def test_shapes(group, head_dim, block_size, dtype, make, check):
    shape = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim, "dtype": dtype}
    tokens = 64 // group
    # Two tiles and a bit, with a context just past a block; a context that ends with one.
    rows = [(min(2 * tokens + 1, 70), block_size + 65), (tokens, 2 * block_size)]
    num_tokens = sum(query_len for query_len, _ in rows) + 3
    max_blocks = -(-max(context_len for _, context_len in rows) // block_size)
    sizes = {"num_tokens": num_tokens, "max_blocks": max_blocks, "block_size": block_size}
    check(make(rows, **shape, **sizes))


@pytest.mark.parametrize("name", FEATURES)
def test_features(name, make, check):
    batch = make(ROWS)
    got = check(batch, **FEATURES[name])
    tiles, rows = tiles_of(batch)
    plain = ragged(
        *batch.arguments[:4], tiles, interpret=plgpu.InterpretGPUParams(detect_races=True)
    )
    seen = np.isfinite(got[1]) & rows[:, None]
    assert np.allclose(got[1][seen], np.asarray(plain[1])[seen]) == (name == "no window")


def test_rows_that_see_no_key(make, check):
    """More query tokens than context: the first ones see nothing, sink or not."""
    batch = make([(33, 33)])
    batch.context_lens[0] = 9
    check(batch, **FEATURES["sinks"])


def test_ragged_batches(make, check, ragged_rows, bucket_type):
    @settings(
        max_examples=8,
        deadline=None,
        derandomize=True,
        database=None,
        # Nothing in the fixtures is left over from one example to the next.
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(ragged_rows(bucket_type(**BUCKET)), st.integers(-1, 99))
    def examples(rows, window):
        check(make(rows), window=np.int32(window))

    examples()


def test_softmax_weights_from_registers(make, check, monkeypatch):
    """What is compiled differs from what is interpreted in where the weights are: JAX's
    interpreter knows no first operand in registers. Here it is taught."""
    callbacks = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.gpu_callbacks")
    original = callbacks.wgmma
    products = 0

    def wgmma(*, a_allocation_key_as_array, **arguments):
        nonlocal products
        if a_allocation_key_as_array.ndim == 1:
            arguments["a_allocation_key_as_array"] = a_allocation_key_as_array
            return original(**arguments)
        products += 1
        memory = callbacks._get_shared_memory()
        info = callbacks.memory.GPULoggingInfo(
            arguments["mesh_location"], arguments["thread"], arguments.get("source_info")
        )

        def access(name):
            array = arguments[f"{name}_allocation_key_as_array"]
            key = callbacks.HostAllocationKey.from_array(array)
            transforms = callbacks._remove_noop_transforms(arguments[f"{name}_transforms"])
            return key, memory.access(key, jax.tree.map(int, transforms))

        def read(name):
            thread = arguments["thread"]
            return memory.get_buffer_content(*access(name), thread, logging_info=info)[0]

        a = np.asarray(a_allocation_key_as_array)
        result = read("acc") + np.matmul(a, read("b"), dtype=np.float32)
        memory.store_buffer_content(*access("acc"), result, arguments["thread"], logging_info=info)
        return arguments["token"]

    monkeypatch.setattr(callbacks, "wgmma", wgmma)
    batch = make(ROWS)
    got = check(batch, weights_in_registers=True)
    assert products
    monkeypatch.undo()
    expected = check(batch)
    _, rows = tiles_of(batch)
    for result, wanted in zip(got, expected, strict=True):
        np.testing.assert_array_equal(result[rows], wanted[rows])


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


def compile_ragged(calls, gpu):
    """All calls in one program, which is faster to compile: tuples of group, head_dim, block_size,
    dtype and features."""

    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def avals(group, head_dim, block_size, dtype, features):
        num_kv_heads = 4
        num_heads = num_kv_heads * group
        per_head = jax.ShapeDtypeStruct((num_heads,), jnp.float32)
        arguments = (
            jax.ShapeDtypeStruct((256, num_heads, head_dim), dtype),
            jax.ShapeDtypeStruct((2, 64, 2, num_kv_heads, block_size, head_dim), dtype),
            integers(),
            integers(8, 32),
            integers(4, 40),
        )
        arrays = {"window": integers(), "alibi_slopes": per_head, "sinks": per_head}
        return arguments, {name: arrays[name] for name in features if name in arrays}

    def run(all_avals):
        outputs = []
        for (*_, features), (arguments, arrays) in zip(calls, all_avals, strict=True):
            static = {
                "soft_cap": 30.0 if "soft_cap" in features else None,
                "return_lse": "return_lse" in features,
            }
            outputs.append(ragged(*arguments, **arrays, **static))
        return outputs

    compiled = aot.compile_for(run, [avals(*call) for call in calls], gpu=gpu)
    kernels = {name: k for name, k in compiled.kernels.items() if "attention_ragged" in name}
    assert len(kernels) == len(calls)
    return kernels


def check_kernels(kernels):
    for name, kernel in kernels.items():
        assert kernel.pallas and kernel.threads == 128
        assert kernel.spill_bytes == 0, name
        # Two programs on a multiprocessor.
        assert kernel.shared_bytes <= 227 * 1024 // 2
        assert kernel.instructions["wgmma"]
        assert kernel.instructions["cp.async.bulk.tensor"]


SHAPES = list(itertools.product((1, 3, 4, 8, 16), (64, 128), (16, 32, 64, 128)))
ALL = ("window", "soft_cap", "alibi_slopes", "sinks", "return_lse")


def test_no_spills_wgmma_and_bulk_copies(needs_cuda_plugin):
    check_kernels(
        compile_ragged(
            [
                (4, 128, 16, "bfloat16", ()),
                (1, 64, 128, "float16", ("sinks",)),
                (8, 128, 64, "bfloat16", ("window", "return_lse")),
                (3, 128, 16, "bfloat16", ALL),
            ],
            "H200",
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "dtype", "features"),
    [
        # Each feature alone: test_compile_cover.py.
        ("H200", "bfloat16", ()),
        ("H200", "bfloat16", ALL),
        ("H200", "float16", ALL),
        ("H100", "bfloat16", ()),
    ],
)
def test_no_spills_anywhere(needs_cuda_plugin, gpu, dtype, features):
    for i in range(0, len(SHAPES), 10):
        calls = [(*shape, dtype, features) for shape in SHAPES[i : i + 10]]
        check_kernels(compile_ragged(calls, gpu))
