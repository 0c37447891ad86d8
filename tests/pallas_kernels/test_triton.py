"""The Triton kernels: every feature, head dim and block size interpreted against the reference, and
what they take of a GPU that is not here."""

import importlib.util
import itertools
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from pallas_kernels import aot, triton
from pallas_kernels.devices import Target, tracing_target
from pallas_kernels.plan import UNIT, make_plan
from pallas_kernels.ptx import find_ptxas
from pallas_kernels.triton_tiles import tile_configs

BUCKET = {
    "num_tokens": 40,
    "num_sequences": 8,
    "max_blocks": 10,
    "block_size": 16,
    "num_heads": 6,
    "num_kv_heads": 2,
}
# Decode rows of one and of several query tokens, tiles of more, on and around block edges; rows
# without a context or a query, and padding.
ROWS = [(1, 33), (0, 0), (17, 17), (1, 1), (0, 12), (5, 64), (1, 160), (3, 111)]
RNG = np.random.default_rng(0)
FEATURES = {
    "static_window": 19,
    "window": np.int32(50),
    "soft_cap": 1.5,
    "alibi_slopes": RNG.uniform(0, 0.2, 6).astype(np.float32),
    "sinks": RNG.standard_normal(6, dtype=np.float32),
}


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_alone(name, bucket_type, make_batch, attend, assert_close):
    bucket = bucket_type(**BUCKET)
    batch = make_batch(bucket, ROWS, seed=1)
    keywords = {name: FEATURES[name]}
    expected = attend(*batch.arguments, backend="reference", **keywords)
    plain = attend(*batch.arguments, backend="reference")
    assert not np.allclose(expected[1], plain[1])  # the feature is seen
    got = attend(*batch.arguments, backend="triton", **keywords)
    assert_close(got, expected, bucket.dtype)


def test_the_largest_window_hides_nothing(bucket_type, make_batch, attend):
    batch = make_batch(bucket_type(**BUCKET), ROWS, seed=1)
    batch.context_lens[2] = 5  # less than its 17 query tokens: the first ones see no key
    expected = attend(*batch.arguments, backend="triton")
    got = attend(*batch.arguments, backend="triton", window=np.int32(2**31 - 1))
    for result, wanted in zip(got, expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "num_heads", "dtype"),
    [
        (64, 8, 2, "float16"),
        (80, 32, 8, "bfloat16"),
        (96, 64, 16, "bfloat16"),
        (128, 128, 6, "float32"),
        (256, 16, 2, "bfloat16"),
        (64, 48, 140, "bfloat16"),  # a group larger than a tile
    ],
)
def test_shapes(
    head_dim, block_size, num_heads, dtype, bucket_type, make_batch, attend, assert_close
):
    shape = {"head_dim": head_dim, "block_size": block_size, "num_heads": num_heads}
    max_blocks = -(-160 // block_size)
    bucket = bucket_type(**BUCKET | shape | {"dtype": dtype, "max_blocks": max_blocks})
    batch = make_batch(bucket, ROWS, seed=2)
    batch.q[:] = batch.q * head_dim**-0.5  # scores of usual size under the fixture's scale
    expected = attend(*batch.arguments, backend="reference")
    got = attend(*batch.arguments, backend="triton")
    assert_close(got, expected, dtype)


def plan_for(batch, num_cores, window=None):
    return make_plan(
        batch.query_starts,
        batch.context_lens,
        num_tokens=batch.q.shape[0],
        num_heads=batch.q.shape[1],
        num_kv_heads=batch.kv_pool.shape[3],
        dtype=batch.q.dtype,
        num_cores=num_cores,
        window=window,
    )


def test_plans_give_the_same_result(bucket_type, make_batch, assert_close):
    """Few parts, many, those of what the window shows, and the plan made in the call."""
    shapes = {"max_blocks": 40, "num_blocks": 50, "num_tokens": 16, "num_sequences": 4}
    bucket = bucket_type(**BUCKET | shapes)
    batch = make_batch(bucket, [(1, 600), (2, 333), (9, 70), (1, 5)], seed=3)

    @partial(jax.jit, static_argnames="backend")
    def attend(plan, *arguments, backend):
        return pallas_kernels.paged_attention(
            *arguments, scale=0.4, return_lse=True, plan=plan, window=150, backend=backend
        )

    expected = attend(None, *batch.arguments, backend="reference")
    plans = [plan_for(batch, num_cores) for num_cores in (1, 132)]
    assert [plan.items[5].max() for plan in plans] == [2, 5]
    for plan in [None, *plans, plan_for(batch, 1, window=150)]:
        got = attend(plan, *batch.arguments, backend="triton")
        assert_close(got, expected, bucket.dtype)
    other = make_batch(bucket_type(**BUCKET), ROWS, seed=1)
    with pytest.raises(ValueError, match="plan must be made for 16 tokens of 4 sequences"):
        attend(plan_for(other, 1), *batch.arguments, backend="triton")


PLAN_SHAPES = {"num_tokens": 60, "num_heads": 12, "num_kv_heads": 3, "dtype": jnp.bfloat16}


@jax.jit
def device_plan(query_starts, context_lens):
    return pallas_kernels.plan_attention(
        query_starts, context_lens, **PLAN_SHAPES, backend="triton"
    )


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 40_000)), min_size=20, max_size=20),
    st.sampled_from([1, 132]),
)
def test_plans_cover_each_row_once(rows, num_cores):
    query_lens, context_lens = np.array(rows, np.int32).T
    query_lens = np.diff(np.minimum(np.cumsum(query_lens), 60), prepend=0)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    plan = make_plan(starts, context_lens, **PLAN_SHAPES, num_cores=num_cores)
    assert all(array.dtype == np.int32 for array in plan)
    covered = np.zeros(60, int)
    for sequence, first, count, position in plan.tiles.T:
        covered[first : first + count] += 1
        if first < starts[-1] and count:
            expected = context_lens[sequence] - starts[sequence + 1] + first
            assert position == expected and first + count <= starts[sequence + 1]
    for row, within, first_item, num_parts in plan.merged.T:
        if num_parts:
            covered[row] += 1
            parts = plan.items[:, first_item : first_item + num_parts]
            sequence = parts[0, 0]
            assert row == starts[sequence] + within
            head = [sequence, starts[sequence], query_lens[sequence]]
            head.append(context_lens[sequence] - query_lens[sequence])
            assert (head == parts[:4].T).all()
            np.testing.assert_array_equal(parts[4], np.arange(num_parts))
            assert (parts[5] == num_parts).all()
    np.testing.assert_array_equal(covered, 1)
    # Parts of different sequences are of about equal length.
    used = plan.items[:, plan.items[2] > 0]
    if used.size and used[5].max() > 1:
        units = -(-context_lens // UNIT)
        decodes = np.unique(used[0])
        part = -(-units[decodes].sum() // (plan.items.shape[1] - 20))
        assert (units[used[0]] / used[5]).max() <= max(2, part)


def test_host_and_device_make_the_same_plan():
    rng = np.random.default_rng(0)
    for _ in range(10):
        query_lens = rng.choice([0, 1, 1, 2, 5, 9], 12)
        starts = np.minimum(np.concatenate([[0], np.cumsum(query_lens)]), 60).astype(np.int32)
        context_lens = rng.integers(0, 5000, 12, dtype=np.int32)
        cores = tracing_target().num_cores
        expected = make_plan(starts, context_lens, **PLAN_SHAPES, num_cores=cores)
        for got, wanted in zip(device_plan(starts, context_lens), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_plans_follow_the_contexts_and_not_the_batch_alone():
    def parts(context_lens):
        num_tokens = len(context_lens)
        starts = np.arange(num_tokens + 1, dtype=np.int32)
        shapes = {"num_heads": 32, "num_kv_heads": 8, "dtype": jnp.bfloat16, "num_cores": 132}
        context_lens = np.array(context_lens, np.int32)
        return make_plan(starts, context_lens, num_tokens=num_tokens, **shapes).merged[3]

    assert parts([32768])[0] > 100
    assert parts([100])[0] == 1
    assert parts([4096] * 128).max() <= 2
    skewed = parts([65536] + [512] * 63)
    assert skewed[0] > 60 and skewed[1:].max() == 1
    with pytest.raises(ValueError, match="query_starts must have shape"):
        make_plan(np.zeros(3, np.int32), np.zeros(3, np.int32), **PLAN_SHAPES)


def abstract_device(kind):
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def num_kernels(function, *arguments):
    equations = jax.make_jaxpr(function)(*arguments).eqns
    return sum(equation.primitive.name == "pallas_call" for equation in equations)


def test_triton_is_for_nvidia_gpus_and_asked_for_by_name(bucket_type, make_batch):
    batch = make_batch(bucket_type(**BUCKET), ROWS, seed=1)

    def attend(*arguments, backend="triton"):
        return pallas_kernels.paged_attention(*arguments, scale=1.0, backend=backend)

    with abstract_device("NVIDIA H200"):
        assert tracing_target() == Target("gpu", "NVIDIA H200", 132)
        assert num_kernels(attend, *batch.arguments) == 3
    message = "'triton' does not support devices other than NVIDIA GPUs"
    with abstract_device("AMD MI300X"), pytest.raises(NotImplementedError, match=message):
        attend(*batch.arguments)
    large = make_batch(bucket_type(**BUCKET | {"head_dim": 300}), ROWS, seed=1)
    with pytest.raises(NotImplementedError, match="'triton' does not support head dims above 256"):
        attend(*large.arguments)


def test_tiles_pack_query_tokens_while_they_fit():
    features = {"window": False, "soft_cap": False, "alibi": False, "sinks": False}
    tokens = {}
    for group in (1, 3, 4, 8, 16, 70):
        tiles = tile_configs(group, 128, 16, jnp.bfloat16, is_hopper=True, **features)
        tokens[group] = tuple(tile.tokens for tile in tiles)
    assert tokens == {1: (8, 64), 3: (5, 21), 4: (4, 16), 8: (2, 8), 16: (1, 4), 70: (1, 1)}


def aot_arguments(group, head_dim, block_size, dtype=jnp.bfloat16, kv_heads=8, num_blocks=4096):
    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    q = jax.ShapeDtypeStruct((64, kv_heads * group, head_dim), dtype)
    pool = jax.ShapeDtypeStruct((4, num_blocks, 2, kv_heads, block_size, head_dim), dtype)
    return q, pool, integers(), integers(64, 256), integers(65), integers(64)


def compile_attention(shapes, gpu, **keywords):
    """All calls in one program, which is faster to compile."""

    def attend(calls):
        return [
            pallas_kernels.paged_attention(*call, scale=0.1, backend="triton", **keywords)
            for call in calls
        ]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        return aot.compile_for(attend, [aot_arguments(*shape) for shape in shapes], gpu=gpu)


def check_attention_kernels(compiled, num_shapes):
    kernels = compiled.kernels
    for name in ("decode", "ragged"):
        found = [kernel for key, kernel in kernels.items() if f"attention_{name}" in key]
        assert 1 <= len(found) <= num_shapes  # equal kernels are compiled once
        for kernel in found:
            assert kernel.spill_bytes == 0
            assert kernel.instructions["cp.async"]
            assert kernel.instructions["mma.sync"] or kernel.instructions["wgmma"]


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


# A cover of the pairs; all of them run with the slow tests.
COVER = [(1, 64, 16), (3, 128, 32), (4, 64, 64), (8, 128, 16)]
SHAPES = list(itertools.product((1, 3, 4, 8), (64, 128), (16, 32, 64)))


@pytest.mark.parametrize(
    ("gpu", "shapes"),
    [
        pytest.param("A100-80GB", COVER, id="A100"),
        pytest.param("H200", COVER, id="H200"),
        *(
            pytest.param(gpu, SHAPES, id=f"{gpu}-all", marks=pytest.mark.slow)
            for gpu in ("A100-80GB", "H100", "H200")
        ),
    ],
)
def test_no_spills_tensor_cores_and_asynchronous_copies(needs_cuda_plugin, gpu, shapes):
    check_attention_kernels(compile_attention(shapes, gpu), len(shapes))


def test_large_pool_and_float32_compile(needs_cuda_plugin):
    """A pool of more than 2**32 elements; and float32 products without TF32."""
    large = (4, 128, 16, jnp.bfloat16, 8, 2**17)
    compiled = compile_attention([large, (4, 128, 16, jnp.float32)], "H200")
    assert any(k.instructions["mma.sync"] for k in compiled.kernels.values())
    assert "tf32" not in compiled.ptx


def test_pool_operators_compile_in_place(needs_cuda_plugin):
    pool = jax.ShapeDtypeStruct((8, 1024, 2, 8, 16, 128), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((8, 64, 8, 128), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((64,), jnp.int32)

    def step(pool, rows, slots):
        def layer(pool, xs):
            index, k = xs
            return pallas_kernels.write_kv(pool, index, k, k, slots, backend="triton"), None

        pool, _ = jax.lax.scan(layer, pool, (jnp.arange(8, dtype=jnp.int32), rows))
        pool = pallas_kernels.copy_blocks(pool, slots, slots[::-1], backend="triton")
        data = pallas_kernels.gather_blocks(pool, slots[:2], backend="triton")
        return pallas_kernels.scatter_blocks(pool, slots[2:4], data, backend="triton")

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        compiled = aot.compile_for(step, pool, row, slots, gpu="H200", donate_argnums=0)
    pool_bytes = 2 * np.prod(pool.shape)
    assert compiled.alias_bytes == pool_bytes
    assert compiled.temp_bytes < pool_bytes / 20
    assert all(kernel.spill_bytes == 0 for kernel in compiled.kernels.values())


def test_cases_of_the_resource_table_can_be_traced():
    names = set()
    with abstract_device("NVIDIA H200"):
        for name, fn, arguments, *_ in triton.kernel_cases():
            assert name == "merge_states" or num_kernels(fn, *arguments) >= 1
            names.add(name)
    assert {"write_kv", "copy_blocks", "paged_attention, sinks"} < names
