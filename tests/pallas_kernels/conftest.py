"""Ragged batches over a poisoned pool, for the tests of the attention operator."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest


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


@pytest.fixture(scope="session")
def bucket_type() -> type[Bucket]:
    return Bucket


@pytest.fixture(scope="session")
def make_batch() -> Callable[[Bucket, list[tuple[int, int]], int], Batch]:
    return _make_batch
