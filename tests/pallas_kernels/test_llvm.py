"""The kernel for CPUs against the reference: sizes, features, threads, memory never written."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from pallas_kernels import llvm, support, xla
from pallas_kernels.devices import Target
from pallas_kernels.support import Case

COMMON = {
    "num_tokens": 24,
    "num_sequences": 12,
    "max_blocks": 10,
    "block_size": 16,
    "num_heads": 6,
    "num_kv_heads": 2,
}
# Head dims of 4, 8 and 16 lanes, more heads than registers hold at once, blocks larger than a chunk
# and blocks that do not divide one, and every dtype.
SIZES = {
    "plain": {},
    "4 lanes": {"head_dim": 20, "block_size": 3},
    "16 lanes": {"head_dim": 64, "num_heads": 9, "num_kv_heads": 3},
    "wide": {"head_dim": 256, "num_heads": 7, "num_kv_heads": 1, "block_size": 1},
    "large blocks": {"block_size": 160, "max_blocks": 2, "num_blocks": 12, "num_kv_heads": 6},
    "bfloat16": {"dtype": "bfloat16", "head_dim": 32},
    "float16": {"dtype": "float16", "head_dim": 48},
}


def keywords_for(features: str, num_heads: int, window: int, seed: int) -> dict:
    if features == "plain":
        return {}
    rng = np.random.default_rng(seed)
    return {"window": np.int32(window), "sinks": rng.standard_normal(num_heads, dtype=np.float32)}


@pytest.mark.parametrize("features", ["plain", "window and sinks"])
@pytest.mark.parametrize("name", SIZES)
def test_is_reference(name, features, bucket_type, make_batch, attend, assert_close, ragged_rows):
    bucket = bucket_type(**COMMON | SIZES[name])

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(ragged_rows(bucket), st.integers(-1, 70), st.integers(0, 2**20))
    def check(rows, window, seed):
        batch = make_batch(bucket, rows, seed)
        keywords = keywords_for(features, bucket.num_heads, window, seed)
        expected = attend(*batch.arguments, backend="reference", **keywords)
        got = attend(*batch.arguments, backend="llvm", **keywords)
        assert got[0].dtype == batch.q.dtype and got[1].dtype == jnp.float32
        assert_close(got, expected, bucket.dtype)

    check()


def test_long_contexts_on_several_threads(bucket_type, make_batch, attend, assert_close):
    """Several chunks a sequence, and enough of them that helpers are called."""
    shapes = {"num_sequences": 12, "max_blocks": 130, "num_blocks": 140, "head_dim": 64}
    bucket = bucket_type(**COMMON | shapes)
    rows = [(1, n) for n in (2000, 1, 128, 129, 127, 1500, 16, 640, 2080, 300)]
    batch = make_batch(bucket, rows, seed=8)
    assert sum(n for _, n in rows) * 2 * 2 * 64 > 10 * (1 << 15)
    expected = attend(*batch.arguments, backend="reference")
    first = attend(*batch.arguments, backend="llvm")
    assert_close(first, expected, "float32")
    # Whichever thread takes a unit, it computes the same bits; helpers that come late do no harm.
    for _ in range(200):
        for got, wanted in zip(attend(*batch.arguments, backend="llvm"), first, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("features", ["plain", "window and sinks"])
def test_short_queries_beside_long_ones(
    features, dtype, bucket_type, make_batch, attend, assert_close
):
    """Up to 128 queries go row by row, longer ones by tiles; one sequence has no query."""
    shapes = {"num_tokens": 600, "max_blocks": 20, "num_blocks": 80, "head_dim": 16}
    bucket = bucket_type(**COMMON | shapes, dtype=dtype)
    rows = [(128, 128), (1, 60), (129, 129), (40, 300), (0, 9), (127, 200), (160, 320), (2, 2)]
    batch = make_batch(bucket, rows, seed=9)
    keywords = keywords_for(features, bucket.num_heads, 50, seed=9)
    expected = attend(*batch.arguments, backend="reference", **keywords)
    assert_close(attend(*batch.arguments, backend="llvm", **keywords), expected, dtype)


def test_memory_before_the_window_is_not_read(bucket_type, make_batch, attend):
    bucket = bucket_type(**COMMON)
    batch = make_batch(bucket, [(1, 150), (1, 100)], seed=3)
    keywords = {"static_window": 19, "backend": "llvm"}
    expected = attend(*batch.arguments, **keywords)
    visible = np.zeros((bucket.num_blocks, bucket.block_size), bool)
    for row, positions in enumerate((np.arange(131, 150), np.arange(81, 100))):
        visible[batch.block_tables[row, positions // 16], positions % 16] = True
    batch.kv_pool[:] = np.where(visible[None, :, None, None, :, None], batch.kv_pool, np.nan)
    batch.block_tables[0, :8] = -7
    batch.block_tables[1, :5] = 2**31 - 1
    for got, wanted in zip(attend(*batch.arguments, **keywords), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_sequence_of_nan_is_alone_with_it(bucket_type, make_batch, attend):
    bucket = bucket_type(**COMMON)
    batch = make_batch(bucket, [(1, 40), (1, 50), (1, 9)], seed=4)
    expected, _ = attend(*batch.arguments, backend="llvm")
    mine = set(batch.block_tables[1, :4].tolist())
    others = set(batch.block_tables[0, :3].tolist() + batch.block_tables[2, :1].tolist())
    batch.kv_pool[:, sorted(mine - others)] = np.nan
    got, _ = attend(*batch.arguments, backend="llvm")
    assert np.isnan(got[1]).all()
    for row in (0, 2):
        np.testing.assert_array_equal(got[row], expected[row])


@pytest.mark.parametrize("scale", [1e-30, 1.0, 40.0])
def test_scores_far_apart(scale, bucket_type, make_batch, assert_close):
    """Exponentials of everything between 0 and far below what float32 holds."""
    bucket = bucket_type(**COMMON | {"head_dim": 64})
    batch = make_batch(bucket, [(1, 150), (1, 3), (1, 64)], seed=5)
    run = partial(pallas_kernels.paged_attention, *batch.arguments, scale=scale, return_lse=True)
    assert_close(run(backend="llvm"), run(backend="reference"), "float32")


def test_a_pool_of_uint16_is_one_of_bfloat16(bucket_type, make_batch, attend):
    bucket = bucket_type(**COMMON | SIZES["bfloat16"])
    batch = make_batch(bucket, [(1, 33), (5, 40), (1, 16)], seed=4)
    q, pool, *rest = batch.arguments
    expected = attend(q, pool, *rest, backend="llvm")
    got = attend(q, pool.view(np.uint16), *rest, backend="llvm")
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_pool_is_read_where_it_lies(bucket_type, make_batch):
    """In a loop over layers that writes it too, as a model does."""
    bucket = bucket_type(**COMMON | {"num_blocks": 4000, "head_dim": 64, "num_sequences": 24})
    q = jax.ShapeDtypeStruct((24, 6, 64), jnp.float32)
    pool = jax.ShapeDtypeStruct((3, bucket.num_blocks, 2, 2, 16, 64), jnp.float32)

    def run(q, pool, tables, starts, context_lens, slots):
        def layer(carry, index):
            q, pool = carry
            pool = pallas_kernels.write_kv(pool, index, q[:, :2], q[:, 2:4], slots, backend="llvm")
            out = pallas_kernels.paged_attention(
                q, pool, index, tables, starts, context_lens, scale=0.1, backend="llvm"
            )
            return (q + out, pool), None

        return jax.lax.scan(layer, (q, pool), jnp.arange(3))[0]

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    compiled = (
        jax.jit(run, donate_argnums=1)
        .lower(q, pool, ints(24, 10), ints(25), ints(24), ints(24))
        .compile()
    )
    memory, size = compiled.memory_analysis(), 4 * np.prod(pool.shape)
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 50


def test_a_window_of_any_integer_type(bucket_type, make_batch, assert_close):
    bucket = bucket_type(**COMMON)
    batch = make_batch(bucket, [(1, 150), (1, 90), (1, 64)], seed=7)
    with jax.enable_x64(True):
        run = partial(pallas_kernels.paged_attention, *batch.arguments, scale=0.4, return_lse=True)
        window = jnp.int64(19)
        expected = run(window=window, backend="reference")
        assert_close(run(window=window, backend="llvm"), expected, "float32")


def test_what_has_no_kernel_goes_to_xla_and_is_said_once(caplog, bucket_type, make_batch):
    bucket = bucket_type(**COMMON)
    batch = make_batch(bucket, [(1, 40), (3, 50)], seed=6)
    support._warn_once.cache_clear()
    run = partial(pallas_kernels.paged_attention, *batch.arguments, scale=1.0, soft_cap=2.0)
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        for _ in range(2):
            np.testing.assert_array_equal(run(backend="auto"), run(backend="xla"))
    [record] = caplog.records
    assert record.message.startswith("paged_attention: backend 'llvm' is passed over on")
    with pytest.raises(NotImplementedError, match="backend 'llvm' does not support soft_cap"):
        run(backend="llvm")


def test_what_is_refused(monkeypatch):
    cpu = Target("cpu", "cpu", None)
    case = Case("paged_attention", jnp.dtype(jnp.float32), 64, 16, 4)
    assert llvm.unsupported(case, cpu) is None
    assert "head dims" in llvm.unsupported(case._replace(head_dim=30), cpu)
    assert "groups of 64" in llvm.unsupported(case._replace(group=64, block_size=2048), cpu)
    for feature in ("soft_cap", "alibi_slopes"):
        assert llvm.unsupported(case._replace(features=frozenset({feature})), cpu) == feature
    assert "head dims of 512" in llvm.unsupported(case._replace(group=64, head_dim=512), cpu)
    assert "CPUs" in llvm.unsupported(case, Target("gpu", "NVIDIA H200", 132))
    monkeypatch.setattr(llvm.importlib.util, "find_spec", lambda name: None)
    assert "without llvmlite" in llvm.unsupported(case, cpu)
    monkeypatch.setattr(llvm.sys, "platform", "win32")
    assert llvm.unsupported(case, cpu) == "Windows"


def test_all_else_is_xla():
    for name in set(llvm.__all__) - {"paged_attention", "unsupported"}:
        assert getattr(llvm, name) is getattr(xla, name)
