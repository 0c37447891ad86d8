"""paged_attention: the reference against a naive loop, and the other backends against the
reference (triton interpreted)."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

BUCKETS = {
    "mha": {
        "num_tokens": 8,
        "num_sequences": 8,
        "max_blocks": 10,
        "block_size": 4,
        "num_heads": 3,
        "num_kv_heads": 3,
    },
    "gqa": {
        "num_tokens": 40,
        "num_sequences": 8,
        "max_blocks": 10,
        "block_size": 16,
        "num_heads": 6,
        "num_kv_heads": 2,
    },
    # More than 128 queries in a row; blocks larger than a chunk of keys.
    "mqa": {
        "num_tokens": 168,
        "num_sequences": 4,
        "max_blocks": 2,
        "block_size": 160,
        "num_heads": 4,
        "num_kv_heads": 1,
        "num_blocks": 6,
    },
}
# A decode step of one sequence.
BUCKETS["alone"] = BUCKETS["gqa"] | {"num_tokens": 1, "num_sequences": 1}
BUCKETS["gqa_bfloat16"] = BUCKETS["gqa"] | {"dtype": "bfloat16"}
FEATURES = ("plain", "window", "everything")


def keywords_for(features: str, num_heads: int, window: int, seed: int) -> dict:
    """The optional arguments of one variant; "everything" has a traced window."""
    if features == "plain":
        return {}
    if features == "window":
        return {"static_window": 19}
    rng = np.random.default_rng(seed)
    return {
        "window": np.int32(window),
        "soft_cap": 1.5,
        "alibi_slopes": rng.uniform(0, 0.2, num_heads).astype(np.float32),
        "sinks": rng.standard_normal(num_heads, dtype=np.float32),
    }


def naive_attention(batch, *, scale, window, soft_cap, alibi_slopes, sinks):
    """The definition as plain loops in float64, from the contract's words."""
    num_tokens, num_heads, head_dim = batch.q.shape
    group = num_heads // batch.kv_pool.shape[3]
    size = batch.kv_pool.shape[4]
    out = np.zeros((num_tokens, num_heads, head_dim))
    lse = np.full((num_tokens, num_heads), -np.inf)
    for s, context_len in enumerate(batch.context_lens):
        first, last = batch.query_starts[s], batch.query_starts[s + 1]
        for token in range(first, last):
            p = context_len - (last - first) + token - first
            begin = max(0, p - window + 1) if window is not None and window > 0 else 0
            for h in range(num_heads):
                logits, values = [], []
                for j in range(begin, p + 1):
                    tile = batch.kv_pool[batch.layer, batch.block_tables[s, j // size]]
                    key, value = tile[:, h // group, j % size].astype(np.float64)
                    x = scale * float(batch.q[token, h].astype(np.float64) @ key)
                    if soft_cap is not None:
                        x = soft_cap * np.tanh(x / soft_cap)
                    if alibi_slopes is not None:
                        x += alibi_slopes[h] * (j - p)
                    logits.append(x)
                    values.append(value)
                if not logits:
                    continue
                extra = [] if sinks is None else [float(sinks[h])]
                lse[token, h] = np.log(np.sum(np.exp(logits + extra)))
                weights = np.exp(np.array(logits) - lse[token, h])
                out[token, h] = weights @ np.array(values)
    return out, lse


# What is run every day of them; the rest are a sweep.
EVERYDAY = {"mha": ["window"], "gqa": FEATURES, "mqa": ["everything"], "alone": ["plain"]}
EVERYDAY["gqa_bfloat16"] = ["plain", "everything"]
VARIANTS = [
    pytest.param(name, features, marks=[] if features in EVERYDAY[name] else pytest.mark.slow)
    for name in BUCKETS
    for features in FEATURES
]


@pytest.mark.parametrize("backend", ["xla", "triton"])
@pytest.mark.parametrize("name, features", VARIANTS)
def test_is_reference(
    name, features, backend, bucket_type, make_batch, attend, assert_close, ragged_rows
):
    bucket = bucket_type(**BUCKETS[name])

    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(ragged_rows(bucket), st.integers(-1, 70), st.integers(0, 2**20))
    def check(rows, window, seed):
        batch = make_batch(bucket, rows, seed)
        keywords = keywords_for(features, bucket.num_heads, window, seed)
        expected = attend(*batch.arguments, backend="reference", **keywords)
        got = attend(*batch.arguments, backend=backend, **keywords)
        assert got[0].dtype == batch.q.dtype and got[1].dtype == jnp.float32
        assert_close(got, expected, bucket.dtype)

    check()


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("backend", ["reference", "xla", "triton"])
def test_naive_loop(features, backend, bucket_type, make_batch, attend, assert_close):
    bucket = bucket_type(**BUCKETS["gqa"])
    rows = [(1, 33), (0, 0), (17, 17), (1, 1), (0, 12), (5, 64), (1, 160)]
    batch = make_batch(bucket, rows, seed=1)
    keywords = keywords_for(features, bucket.num_heads, window=11, seed=2)
    expected = naive_attention(
        batch,
        scale=0.4,
        window=keywords.get("window", keywords.get("static_window")),
        **{name: keywords.get(name) for name in ("soft_cap", "alibi_slopes", "sinks")},
    )
    got = attend(*batch.arguments, backend=backend, **keywords)
    assert_close(got, expected, "float32")


@pytest.mark.parametrize("backend", ["reference", "xla", "triton"])
def test_memory_before_the_window_is_not_read(backend, bucket_type, make_batch, attend):
    bucket = bucket_type(**BUCKETS["gqa"])
    batch = make_batch(bucket, [(1, 150), (9, 100)], seed=3)
    keywords = {"static_window": 19, "backend": backend}
    expected = attend(*batch.arguments, **keywords)
    # The first visible keys are 150 - 19 = 131 and 100 - 9 + 1 - 19 = 73: in blocks 8 and 4, of
    # which the first slots are hidden.
    visible = np.zeros((bucket.num_blocks, bucket.block_size), bool)
    for row, positions in enumerate((np.arange(131, 150), np.arange(73, 100))):
        visible[batch.block_tables[row, positions // 16], positions % 16] = True
    assert not visible[batch.block_tables[[0, 1], [8, 4]], 0].any()
    batch.kv_pool[:] = np.where(visible[None, :, None, None, :, None], batch.kv_pool, np.nan)
    batch.block_tables[0, :8] = -7
    batch.block_tables[1, :4] = 2**31 - 1
    for got, wanted in zip(attend(*batch.arguments, **keywords), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("features", ["plain", "everything"])
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_long_contexts(backend, features, bucket_type, make_batch, attend, assert_close):
    """Sequences of several trips of the decode loop, and tiles of many chunks."""
    shapes = {"num_tokens": 8, "num_sequences": 4, "max_blocks": 125, "num_blocks": 130}
    bucket = bucket_type(**BUCKETS["gqa"] | shapes)
    batch = make_batch(bucket, [(1, 1999), (5, 1500), (1, 700)], seed=8)
    keywords = keywords_for(features, bucket.num_heads, window=1100, seed=9)
    expected = attend(*batch.arguments, backend="reference", **keywords)
    got = attend(*batch.arguments, backend=backend, **keywords)
    assert_close(got, expected, "float32")


def test_bfloat16_pool_stored_as_uint16(bucket_type, make_batch, attend):
    bucket = bucket_type(**BUCKETS["gqa_bfloat16"])
    batch = make_batch(bucket, [(1, 33), (17, 40), (1, 16)], seed=4)
    q, pool, *rest = batch.arguments
    for backend in ("reference", "xla", "triton"):
        expected = attend(q, pool, *rest, backend=backend)
        got = attend(q, pool.view(np.uint16), *rest, backend=backend)
        np.testing.assert_array_equal(got[0], expected[0])
        np.testing.assert_array_equal(got[1], expected[1])


def test_row_does_not_depend_on_the_batch(bucket_type, make_batch, attend):
    """Not bitwise, since items are added up in another order; see TOLERANCE."""
    bucket = bucket_type(**BUCKETS["gqa"])
    rows = [(1, 100), (9, 77), (1, 160), (20, 20), (1, 5)]
    batch = make_batch(bucket, rows, seed=5)
    together, _ = attend(*batch.arguments, backend="xla")
    for s, (query_len, context_len) in enumerate(rows):
        start = batch.query_starts[s]
        q = np.zeros_like(batch.q)
        q[:query_len] = batch.q[start : start + query_len]
        tables = np.zeros_like(batch.block_tables)
        tables[0] = batch.block_tables[s]
        starts = np.full_like(batch.query_starts, query_len)
        starts[0] = 0
        context_lens = np.zeros_like(batch.context_lens)
        context_lens[0] = context_len
        alone, _ = attend(
            q, batch.kv_pool, np.int32(1), tables, starts, context_lens, backend="xla"
        )
        np.testing.assert_allclose(
            alone[:query_len], together[start : start + query_len], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_context_shorter_than_the_query(backend, bucket_type, make_batch, attend, assert_close):
    """Queries before position 0 see no key."""
    bucket = bucket_type(**BUCKETS["gqa"])
    batch = make_batch(bucket, [(1, 30), (9, 9), (4, 20)], seed=6)
    batch.context_lens[1] = 5
    expected = attend(*batch.arguments, backend="reference")
    got = attend(*batch.arguments, backend=backend)
    assert_close(got, expected, "float32")
    assert not np.asarray(got[0][1:5]).any()


@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_without_sequences_or_blocks(backend, bucket_type, make_batch, attend):
    bucket = bucket_type(**BUCKETS["gqa"] | {"max_blocks": 0})
    batch = make_batch(bucket, [], seed=7)
    out, lse = attend(*batch.arguments, backend=backend)
    assert not np.asarray(out).any()
    assert np.isneginf(lse).all()
