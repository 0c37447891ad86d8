"""The Mosaic kernels: decodes interpreted, with a watch for races, against the reference; and what
the kernels take of a GPU that is not here."""

import importlib.util
import itertools
import re
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from pallas_kernels import aot, mosaic
from pallas_kernels.devices import Target
from pallas_kernels.plan import make_plan
from pallas_kernels.ptx import find_ptxas
from pallas_kernels.support import Case

needs_mosaic = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need JAX 0.11.2"
)
SHAPES = {
    "num_tokens": 12,
    "num_sequences": 6,
    "max_blocks": 20,
    "block_size": 16,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 64,
    "num_blocks": 24,
    "dtype": "bfloat16",
}
# One token, several, contexts on and around the edges of blocks and tiles, an empty row, a part of
# a context for each of several programs, and a row that is no decode.
ROWS = [(1, 33), (0, 0), (5, 300), (1, 1), (1, 64), (4, 81)]
H200 = Target("gpu", "NVIDIA H200", 132)


@pytest.fixture
def races_fail(capsys):
    """Kernels are interpreted with a watch for races: JAX 0.12 raises, 0.11 prints."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@partial(jax.jit, static_argnames=("soft_cap", "static_window", "backend", "return_lse"))
def attend(
    plan, *arguments, scale=0.1, static_window=None, window=None, return_lse=True, **keywords
):
    return pallas_kernels.paged_attention(
        *arguments,
        scale=scale,
        plan=plan,
        return_lse=return_lse,
        window=window if static_window is None else static_window,
        **keywords,
    )


def plan_for(batch, num_cores):
    return make_plan(
        batch.query_starts,
        batch.context_lens,
        num_tokens=batch.q.shape[0],
        num_heads=batch.q.shape[1],
        num_kv_heads=batch.kv_pool.shape[3],
        dtype=batch.q.dtype,
        num_cores=num_cores,
    )


def check(batch, assert_close, num_cores=1, **keywords):
    expected = attend(None, *batch.arguments, backend="reference", **keywords)
    got = attend(plan_for(batch, num_cores), *batch.arguments, backend="mosaic", **keywords)
    assert_close(got, expected, str(batch.q.dtype))
    return got


@st.composite
def decodes(draw, num_sequences: int, block_size: int, max_blocks: int, most: int):
    """(query_len, context_len) of rows of few query tokens; contexts end around the edges of a
    block, and may be shorter than the query."""
    rows = []
    for _ in range(draw(st.integers(1, num_sequences))):
        edge = draw(st.integers(0, max_blocks)) * block_size
        context_len = edge + draw(st.sampled_from((-1, 0, 1, block_size // 2)))
        context_len = min(max(context_len, 0), block_size * max_blocks)
        rows.append((draw(st.sampled_from((0, 1, 1, 1, 2, most))), context_len))
    return rows


@needs_mosaic
def test_decode_batches(races_fail, bucket_type, make_batch, assert_close):
    """Blocks are shuffled and shared, unused slots NaN, the tails of block tables garbage."""
    shapes = {"num_tokens": 10, "num_sequences": 2, "max_blocks": 7, "block_size": 64}
    bucket = bucket_type(**SHAPES | shapes)

    # Each interpreted tile takes some 50 ms.
    @settings(max_examples=4, deadline=None, derandomize=True, database=None)
    @given(decodes(2, 64, 7, 5), st.integers(0, 2**31))
    def run(rows, seed):
        check(make_batch(bucket, rows, seed), assert_close)

    run()


# With 12 query tokens of 6 heads and 2 KV heads; the plan cuts 300 keys into parts.
@needs_mosaic
@pytest.mark.parametrize(
    "features",
    [
        {"static_window": 19, "soft_cap": 1.5},
        {"window": np.int32(70), "sinks": np.linspace(-2, 2, 6, dtype=np.float32)},
        {"alibi_slopes": np.linspace(0, 0.2, 6, dtype=np.float32)},
    ],
    ids=" ".join,
)
def test_features(features, races_fail, bucket_type, make_batch, assert_close):
    batch = make_batch(bucket_type(**SHAPES), ROWS, seed=1)
    plain = attend(None, *batch.arguments, backend="reference")
    got = check(batch, assert_close, num_cores=2, **features)
    assert not np.allclose(got[1], plain[1])  # the features are seen


@needs_mosaic
@pytest.mark.parametrize(
    ("head_dim", "block_size", "num_heads", "dtype"),
    [
        (128, 128, 8, "bfloat16"),  # a block is more than a tile; heads fill shared memory's tiles
        pytest.param(64, 8, 2, "float16", marks=pytest.mark.slow),
        pytest.param(128, 32, 32, "bfloat16", marks=pytest.mark.slow),
        pytest.param(192, 64, 10, "bfloat16", marks=pytest.mark.slow),
        pytest.param(256, 16, 2, "bfloat16", marks=pytest.mark.slow),
        pytest.param(64, 16, 128, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_shapes(
    head_dim, block_size, num_heads, dtype, races_fail, bucket_type, make_batch, assert_close
):
    shapes = {
        "num_tokens": 6,
        "num_sequences": 3,
        "head_dim": head_dim,
        "block_size": block_size,
        "num_heads": num_heads,
        "dtype": dtype,
        "max_blocks": -(-150 // block_size),
    }
    batch = make_batch(bucket_type(**SHAPES | shapes), [(1, 150), (1, 64), (1, 17)], seed=2)
    check(batch, assert_close)


@needs_mosaic
def test_many_parts_merge(races_fail, bucket_type, make_batch, assert_close):
    """More parts than the merge loads at once, for several query tokens; parts without keys."""
    shapes = {"num_tokens": 5, "num_sequences": 2, "num_heads": 2, "num_kv_heads": 1}
    shapes |= {"max_blocks": 20, "block_size": 64}
    batch = make_batch(bucket_type(**SHAPES | shapes), [(3, 1270), (1, 140)], seed=3)
    assert plan_for(batch, 4).merged[3].max() == 10
    check(batch, assert_close, num_cores=4)
    # 33 parts of 20 tiles.
    items = np.zeros((6, 35), np.int32)
    items[:, :33] = np.array([0, 0, 3, 1267, 0, 33])[:, None]
    items[4, :33] = np.arange(33)
    items[:, 33] = 1, 3, 1, 139, 0, 1
    merged = np.array([[0, 1, 2, 3, 0], [0, 1, 2, 0, 0], [0, 0, 0, 33, 0], [33, 33, 33, 1, 0]])
    plan = plan_for(batch, 4)._replace(items=items, merged=merged.astype(np.int32))
    got = attend(plan, *batch.arguments, backend="mosaic")
    assert_close(got, attend(None, *batch.arguments, backend="reference"), "bfloat16")


@needs_mosaic
def test_a_pool_of_bits_and_no_plan(races_fail, bucket_type, make_batch, assert_close):
    shapes = {"num_tokens": 3, "num_sequences": 2, "max_blocks": 6}
    batch = make_batch(bucket_type(**SHAPES | shapes), [(1, 70), (2, 40)], seed=4)
    expected = attend(None, *batch.arguments, backend="reference")
    q, pool, *rest = batch.arguments
    out = attend(None, q, pool.view(np.uint16), *rest, backend="mosaic", return_lse=False)
    assert_close((out, expected[1]), expected, "bfloat16")


@needs_mosaic
def test_nothing_to_attend_to(bucket_type, make_batch):
    batch = make_batch(bucket_type(**SHAPES | {"max_blocks": 0}), [], seed=0)
    out, lse = attend(None, *batch.arguments, backend="mosaic")
    assert not np.asarray(out).any() and np.isneginf(lse).all()


@needs_mosaic
def test_another_batch_s_plan_is_refused(bucket_type, make_batch):
    batch = make_batch(bucket_type(**SHAPES), ROWS, seed=1)
    other = make_batch(bucket_type(**SHAPES | {"num_tokens": 40}), ROWS, seed=1)
    with pytest.raises(ValueError, match="plan must be made for 12 tokens of 6 sequences"):
        attend(plan_for(other, 1), *batch.arguments, backend="mosaic")


CASE = Case("paged_attention", jnp.dtype(jnp.bfloat16), head_dim=128, block_size=16, group=4)


@needs_mosaic
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"features": frozenset({"window", "sinks", "uint16 pool"})}, None),
        ({"dtype": jnp.dtype(jnp.float32)}, r"dtypes other than .* \(got float32\)"),
        ({"head_dim": 80}, r"head dims other than 64, 128, 192, 256 \(got 80\)"),
        ({"block_size": 48}, r"block sizes other than .* \(got 48\)"),
        ({"group": 70}, r"more than 64 query heads for a KV head \(got 70\)"),
        ({"operator": "merge_states"}, None),
    ],
)
def test_what_is_supported_is_said(changes, reason):
    said = mosaic.unsupported(CASE._replace(**changes), H200)
    if reason is None:
        assert said is None
    else:
        assert re.fullmatch(reason, said)
    assert mosaic.unsupported(CASE, Target("gpu", "NVIDIA A100-SXM4-80GB", 108))
    assert mosaic.unsupported(CASE, Target("cpu", "cpu", None)) is None


@pytest.mark.skipif(jax.__version_info__ >= (0, 11, 2), reason="for a JAX without the kernels")
def test_an_old_jax_is_refused():
    assert "JAX before 0.11.2" in mosaic.unsupported(CASE, H200)


def aot_arguments(group, head_dim, block_size, kv_heads=8, num_blocks=4096):
    def integers(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    q = jax.ShapeDtypeStruct((64, kv_heads * group, head_dim), jnp.bfloat16)
    shape = (4, num_blocks, 2, kv_heads, block_size, head_dim)
    pool = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return q, pool, integers(), integers(64, 256), integers(65), integers(64)


def compile_attention(shapes, gpu, **keywords):
    """All calls in one program."""

    def attend(calls):
        return [
            pallas_kernels.paged_attention(*call, scale=0.1, backend="mosaic", **keywords)
            for call in calls
        ]

    return aot.compile_for(attend, [aot_arguments(*shape) for shape in shapes], gpu=gpu)


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
PRODUCT = list(itertools.product((1, 3, 4, 8), (64, 128), (16, 32, 64)))


@needs_mosaic
@pytest.mark.parametrize(
    ("gpu", "shapes"),
    [
        pytest.param("H200", COVER, id="H200"),
        *(pytest.param(gpu, PRODUCT, id=f"{gpu}-all", marks=pytest.mark.slow)
          for gpu in ("H100", "H200")),
    ],
)  # fmt: skip
def test_no_spills_tensor_cores_and_bulk_copies(needs_cuda_plugin, gpu, shapes):
    kernels = compile_attention(shapes, gpu, return_lse=True).kernels
    for name in ("decode", "ragged", "merge"):
        found = [kernel for key, kernel in kernels.items() if f"attention_{name}" in key]
        assert 1 <= len(found) <= len(shapes)  # equal kernels are compiled once
        for kernel in found:
            assert kernel.spill_bytes == 0
            if name != "merge":
                assert kernel.instructions["wgmma"]
                assert kernel.instructions["cp.async.bulk.tensor"]
            if name == "decode":
                # Programs on a multiprocessor: at least three, by shared memory and registers.
                assert kernel.shared_bytes + 1024 <= 233472 // 3
                assert kernel.registers <= 168


@needs_mosaic
def test_outputs_are_merged_in_place_and_the_pool_is_not_copied(needs_cuda_plugin):
    """A pool of more than 2**32 elements, in two dtypes."""
    arguments = list(aot_arguments(4, 128, 16, num_blocks=2**17))
    for dtype in (jnp.bfloat16, jnp.uint16):
        arguments[1] = jax.ShapeDtypeStruct(arguments[1].shape, dtype)
        assert np.prod(arguments[1].shape) > 2**32
        compiled = aot.compile_for(
            partial(pallas_kernels.paged_attention, scale=0.1, backend="mosaic"), *arguments
        )
        assert " copy(" not in compiled.hlo
        assert compiled.temp_bytes < 2**24


@needs_mosaic
def test_cases_of_the_resource_table_can_be_traced():
    device = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
    names = set()
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        for name, fn, arguments, *_ in mosaic.kernel_cases():
            jax.eval_shape(fn, *arguments)
            names.add(name)
    assert {"write_kv", "copy_blocks", "paged_attention, sinks"} < names
