"""Ragged batches over a poisoned pool, and comparisons, for the tests of the attention operator."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import pallas_kernels

# Relative Frobenius errors. float32: sums over the keys in another order, 1e-6 is typical.
# bfloat16: the result is rounded to 8 bits (2e-3 on average) and so are the softmax weights, whose
# errors partly cancel.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-3}


@dataclass(frozen=True)
class Bucket:
    """Fixed shapes, so that a whole property test compiles each operator once."""

    num_tokens: int
    num_sequences: int
    max_blocks: int
    block_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 8
    num_blocks: int = 24
    num_layers: int = 2
    dtype: str = "float32"


@dataclass(frozen=True)
class Batch:
    """Arguments of paged_attention, as NumPy arrays (the pool and q in the bucket's dtype)."""

    q: np.ndarray
    kv_pool: np.ndarray
    layer: int
    block_tables: np.ndarray
    query_starts: np.ndarray
    context_lens: np.ndarray

    @property
    def arguments(self) -> tuple:
        layer = np.int32(self.layer)
        return (
            self.q,
            self.kv_pool,
            layer,
            self.block_tables,
            self.query_starts,
            self.context_lens,
        )


def _make_batch(bucket: Bucket, rows: list[tuple[int, int]], seed: int) -> Batch:
    """A batch with these (query_len, context_len) rows, and empty rows after them.

    Blocks are shuffled, and some are shared between rows. Every slot that no row uses, and every
    padding row of q, is NaN; the tails of the block tables hold any integers.
    """
    rng = np.random.default_rng(seed)
    size = bucket.block_size
    tables = rng.integers(
        -(2**31), 2**31, size=(bucket.num_sequences, bucket.max_blocks), dtype=np.int32
    )
    shape = (
        bucket.num_layers,
        bucket.num_blocks,
        2,
        bucket.num_kv_heads,
        size,
        bucket.head_dim,
    )
    content = rng.standard_normal(shape, dtype=np.float32)
    used = np.zeros((bucket.num_blocks, size), bool)
    for row, (_, context_len) in enumerate(rows):
        blocks = rng.permutation(bucket.num_blocks)[: -(-context_len // size)]
        tables[row, : len(blocks)] = blocks
        positions = np.arange(context_len)
        used[blocks[positions // size], positions % size] = True
    pool = np.where(used[None, :, None, None, :, None], content, np.nan)
    starts = np.zeros(bucket.num_sequences + 1, np.int32)
    starts[1 : len(rows) + 1] = np.cumsum([query_len for query_len, _ in rows])
    starts[len(rows) + 1 :] = starts[len(rows)]
    context_lens = np.zeros(bucket.num_sequences, np.int32)
    context_lens[: len(rows)] = [context_len for _, context_len in rows]
    q = rng.standard_normal((bucket.num_tokens, bucket.num_heads, bucket.head_dim))
    q[starts[-1] :] = np.nan
    dtype = jnp.dtype(bucket.dtype)
    return Batch(q.astype(dtype), pool.astype(dtype), 1, tables, starts, context_lens)


@partial(jax.jit, static_argnames=("soft_cap", "static_window", "backend", "batch_invariant"))
def _attend(*arguments, static_window=None, window=None, **keywords):
    window = static_window if window is None else window
    return pallas_kernels.paged_attention(
        *arguments, scale=0.4, return_lse=True, window=window, **keywords
    )


def _assert_close(got, expected, dtype):
    """Outputs and logarithms agree: in the mean, and (four times looser) each one."""
    out, lse = (np.asarray(x, np.float64) for x in got)
    expected_out, expected_lse = (np.asarray(x, np.float64) for x in expected)
    assert np.isfinite(out).all()
    tolerance, size = TOLERANCE[dtype], np.linalg.norm(expected_out)
    assert np.linalg.norm(out - expected_out) <= tolerance * size
    assert np.abs(out - expected_out).max(initial=0) <= 4 * tolerance * np.abs(expected_out).max(
        initial=0
    )
    live = np.isfinite(expected_lse)
    np.testing.assert_array_equal(np.isneginf(lse), ~live)
    np.testing.assert_allclose(lse[live], expected_lse[live], rtol=1e-5, atol=1e-5)
    assert not out[~live].any()


@st.composite
def _ragged_rows(draw, bucket):
    """(query_len, context_len) of each row: empty, decode or several queries; the contexts end in
    the middle, on, just below and just above the edge of a block."""
    rows = []
    size, left = bucket.block_size, bucket.num_tokens
    for _ in range(draw(st.integers(1, bucket.num_sequences))):
        most = min(left, size * bucket.max_blocks)
        query_len = draw(st.sampled_from((0, 1, 1, 2, 7, size, size + 1, most)))
        query_len = min(query_len, most)
        edge = draw(st.integers(0, bucket.max_blocks)) * size
        context_len = edge + draw(st.sampled_from((-1, 0, 1, size // 2)))
        context_len = min(max(context_len, query_len), size * bucket.max_blocks)
        # A row without a query may still have a context.
        if query_len == 0 and draw(st.booleans()):
            context_len = 0
        rows.append((query_len, context_len))
        left -= query_len
    return rows


@pytest.fixture(scope="session")
def bucket_type() -> type[Bucket]:
    return Bucket


@pytest.fixture(scope="session")
def make_batch() -> Callable[[Bucket, list[tuple[int, int]], int], Batch]:
    return _make_batch


@pytest.fixture(scope="session")
def attend() -> Callable:
    """paged_attention with scale 0.4 and its lse, jitted; `static_window` is one known when traced,
    `window` one that is not."""
    return _attend


@pytest.fixture(scope="session")
def assert_close() -> Callable:
    return _assert_close


@pytest.fixture(scope="session")
def ragged_rows() -> Callable:
    return _ragged_rows
