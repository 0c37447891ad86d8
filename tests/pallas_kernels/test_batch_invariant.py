"""paged_attention with batch_invariant: what the reference says, and to the bit the same result for
a query however its sequence is cut into calls and whatever else is in them."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from pallas_kernels.support import BACKENDS

SHAPES = {
    "gqa": {"num_tokens": 40, "max_blocks": 10, "block_size": 16, "num_heads": 6},
    "small blocks": {"num_tokens": 24, "max_blocks": 30, "block_size": 4, "num_heads": 2},
    "blocks beyond a chunk": {"num_tokens": 72, "max_blocks": 2, "block_size": 160, "num_heads": 4},
    "long queries": {"num_tokens": 200, "max_blocks": 20, "block_size": 16, "num_heads": 4},
    "odd blocks": {"num_tokens": 72, "max_blocks": 4, "block_size": 24, "num_heads": 4},
    "bfloat16": {
        "num_tokens": 40, "max_blocks": 10, "block_size": 16, "num_heads": 6, "dtype": "bfloat16",
    },
}  # fmt: skip
COMMON = {"num_sequences": 8, "num_kv_heads": 2, "num_blocks": 40}


INVARIANT = ("llvm", "xla")


def keywords_for(features: str, num_heads: int, backend: str) -> dict:
    if features == "plain":
        return {}
    rng = np.random.default_rng(0)
    keywords = {"window": np.int32(19), "sinks": rng.standard_normal(num_heads, dtype=np.float32)}
    if backend == "xla":
        slopes = rng.uniform(0, 0.2, num_heads).astype(np.float32)
        keywords |= {"soft_cap": 1.5, "alibi_slopes": slopes}
    return keywords


@pytest.fixture(params=INVARIANT)
def backend(request):
    return request.param


@pytest.fixture
def attend(attend, backend):
    return lambda *arguments, **keywords: attend(
        *arguments, backend=backend, batch_invariant=True, **keywords
    )


@pytest.fixture
def reference():
    call = jax.jit(
        pallas_kernels.paged_attention, static_argnames=("soft_cap", "backend", "return_lse")
    )
    return lambda *arguments, **keywords: call(
        *arguments, backend="reference", scale=0.4, return_lse=True, **keywords
    )


@pytest.mark.parametrize("features", ["plain", "everything"])
@pytest.mark.parametrize("name", SHAPES)
def test_is_reference(
    name, features, backend, bucket_type, make_batch, attend, reference, assert_close, ragged_rows
):
    bucket = bucket_type(**COMMON | SHAPES[name])
    keywords = keywords_for(features, bucket.num_heads, backend)

    @settings(max_examples=10, deadline=None, derandomize=True, database=None)
    @given(ragged_rows(bucket), st.integers(0, 2**20))
    def check(rows, seed):
        batch = make_batch(bucket, rows, seed)
        expected = reference(*batch.arguments, **keywords)
        assert_close(attend(*batch.arguments, **keywords), expected, bucket.dtype)

    check()


def test_memory_before_the_window_is_not_read(bucket_type, make_batch, attend):
    bucket = bucket_type(**COMMON | SHAPES["gqa"])
    batch = make_batch(bucket, [(1, 150), (9, 100)], seed=3)
    expected = attend(*batch.arguments, static_window=19)
    visible = np.zeros((bucket.num_blocks, bucket.block_size), bool)
    for row, positions in enumerate((np.arange(131, 150), np.arange(73, 100))):
        visible[batch.block_tables[row, positions // 16], positions % 16] = True
    batch.kv_pool[:] = np.where(visible[None, :, None, None, :, None], batch.kv_pool, np.nan)
    batch.block_tables[0, :8] = -7
    batch.block_tables[1, :4] = 2**31 - 1
    for got, wanted in zip(attend(*batch.arguments, static_window=19), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("features", ["plain", "everything"])
@pytest.mark.parametrize("name", SHAPES)
def test_bitwise(name, features, backend, bucket_type, make_batch, attend):
    """Five sequences: each whole and alone; then cut at random places, among chunks and decodes of
    the others, in calls of two sizes."""
    bucket = bucket_type(**COMMON | SHAPES[name])
    wide = bucket_type(**COMMON | SHAPES[name] | {"num_tokens": 2 * bucket.num_tokens})
    keywords = keywords_for(features, bucket.num_heads, backend)
    rng = np.random.default_rng(7)
    most = bucket.max_blocks * bucket.block_size
    lengths = [bucket.num_tokens, 1, 9, most - 1, most // 2]
    size = bucket.num_heads, bucket.head_dim
    queries = [rng.standard_normal((n, *size)).astype(bucket.dtype) for n in lengths]
    every = make_batch(bucket, [(0, n) for n in lengths], seed=1)
    # Sequences may share blocks, and all memory is written.
    pool = rng.standard_normal(every.kv_pool.shape).astype(bucket.dtype)

    def run(shape, parts):
        """Outputs and lse of the queries begin .. end - 1 of each sequence of `parts`."""
        q = np.full((shape.num_tokens, *size), np.nan, bucket.dtype)
        tables = np.full_like(every.block_tables, -1)
        starts = np.zeros_like(every.query_starts)
        context_lens = np.zeros_like(every.context_lens)
        for row, (sequence, begin, end) in enumerate(parts):
            starts[row + 1 :] = starts[row] + end - begin
            q[starts[row] : starts[row + 1]] = queries[sequence][begin:end]
            tables[row] = every.block_tables[sequence]
            context_lens[row] = end
        results = attend(q, pool, np.int32(1), tables, starts, context_lens, **keywords)
        results = [np.asarray(x) for x in results]
        return [[x[a:b] for x in results] for a, b in itertools.pairwise(starts)]

    begins = [max(0, n - bucket.num_tokens) for n in lengths]
    whole = [run(bucket, [(s, begin, n)])[0] for s, (begin, n) in enumerate(zip(begins, lengths))]
    done = list(begins)
    calls = 0
    while done != lengths:
        shape = (bucket, wide)[calls % 2]
        budget, parts = shape.num_tokens, []
        for s in rng.permutation(len(lengths)).tolist():
            left = min(lengths[s] - done[s], budget)
            if left and rng.random() < 0.8:
                take = 1 if rng.random() < 0.3 else int(rng.integers(1, left + 1))
                parts.append((s, done[s], done[s] + take))
                budget -= take
        if not parts:
            continue
        calls += 1
        for (s, begin, end), got in zip(parts, run(shape, parts)):
            for new, wanted in zip(got, whole[s], strict=True):
                wanted = wanted[begin - begins[s] : end - begins[s]]
                np.testing.assert_array_equal(new.view(np.uint8), wanted.view(np.uint8))
            done[s] = end
    assert calls > 3


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - set(INVARIANT)))
def test_other_backends_refuse(backend, bucket_type, make_batch):
    bucket = bucket_type(**COMMON | SHAPES["gqa"])
    batch = make_batch(bucket, [(1, 5)], seed=0)
    with pytest.raises(NotImplementedError, match=r"does not support (batch_invariant|JAX before)"):
        pallas_kernels.paged_attention(
            *batch.arguments, scale=1.0, batch_invariant=True, backend=backend
        )
