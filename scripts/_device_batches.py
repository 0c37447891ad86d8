"""Batches that try a paged-attention kernel: a poisoned pool, hostile block tables, block edges."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import _repository  # noqa: F401 (makes the packages importable)
import jax.numpy as jnp
import numpy as np

# Relative Frobenius errors that rounding explains. float32: sums in another order (1e-6 is usual).
# 16-bit inputs: the output is rounded, and so are the softmax weights on their way to the tensor
# cores. A single element may be off four times as far, measured against the largest.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 1e-3}
# Absolute and relative, of the logarithms: float32 sums, whatever the inputs.
LSE_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-5, "float16": 2e-5}

_PADDING_ROWS = 5


class Mismatch(Exception):
    """A result is wrong; the message says how, and what to do next."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a batch. `max_context` tokens fit in a block table."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    max_context: int = 1024
    num_layers: int = 2

    @property
    def max_blocks(self) -> int:
        return self.max_context // self.block_size

    @property
    def num_blocks(self) -> int:
        return 2 * self.max_blocks + 3


class Batch(NamedTuple):
    """Arguments of paged_attention, as NumPy arrays, in its order; `layer` is the last one."""

    q: Any
    kv_pool: Any
    layer: Any
    block_tables: Any
    query_starts: Any
    context_lens: Any


def mixed_rows(shape: Shape) -> list[tuple[int, int]]:
    """(query_len, context_len) of decodes, speculative decodes, chunks and empty rows, with
    contexts on, just below and just above the edge of a block; fewer where contexts are short."""
    size, most = shape.block_size, shape.max_context
    rows = [(1, size - 1), (1, size), (1, size + 1), (1, most), (0, 0), (0, size + 2)]
    rows += [(2, size + 1), (size + 1, size + 1)]
    if most >= 8 * size:
        rows += [(1, 1), (1, most // 2 + 3), (5, 2 * size), (8, most - 1)]
        rows += [(min(70, most), min(70, most)), (min(100, most), most)]
    return rows


def decode_rows(shape: Shape) -> list[tuple[int, int]]:
    """At most as many rows as `mixed_rows` has, decodes alone, of all lengths."""
    size, most = shape.block_size, shape.max_context
    lens = [most, 1, size * 3 - 1, size * 3, size * 3 + 1, most - size, most - size + 1, 2]
    lens += [most // 3, most // 2 - 1, most // 2, most // 2 + 1, size * 2, most - 1]
    return [(1, min(context, most)) for context in lens[: len(mixed_rows(shape))]]


def make_batch(shape: Shape, rows: list[tuple[int, int]], seed: int) -> Batch:
    """A batch of these rows, then two empty ones, in the shapes that `mixed_rows` needs.

    Blocks are shuffled, and some are shared between rows. Slots that no row uses and padding rows
    of q are NaN; entries past a sequence's last block are any integers.
    """
    rng = np.random.default_rng(seed)
    wanted = mixed_rows(shape)
    num_sequences = len(wanted) + 2
    num_tokens = sum(query_len for query_len, _ in wanted) + _PADDING_ROWS
    size = shape.block_size
    tables = rng.integers(-(2**31), 2**31, size=(num_sequences, shape.max_blocks), dtype=np.int32)
    used = np.zeros((shape.num_blocks, size), bool)
    for row, (_, context_len) in enumerate(rows):
        blocks = rng.permutation(shape.num_blocks)[: -(-context_len // size)]
        tables[row, : len(blocks)] = blocks
        positions = np.arange(context_len)
        used[blocks[positions // size], positions % size] = True
    pool = random_pool(shape, rng)
    pool = np.where(used[None, :, None, None, :, None], pool, np.nan)
    starts = np.zeros(num_sequences + 1, np.int32)
    starts[1 : len(rows) + 1] = np.cumsum([query_len for query_len, _ in rows])
    starts[len(rows) + 1 :] = starts[len(rows)]
    context_lens = np.zeros(num_sequences, np.int32)
    context_lens[: len(rows)] = [context_len for _, context_len in rows]
    q = rng.standard_normal((num_tokens, shape.num_heads, shape.head_dim), dtype=np.float32)
    q[starts[-1] :] = np.nan
    dtype = jnp.dtype(shape.dtype)
    layer = np.int32(shape.num_layers - 1)
    return Batch(q.astype(dtype), pool.astype(dtype), layer, tables, starts, context_lens)


def random_pool(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """A float32 pool [L, N, 2, K, B, D] of normal numbers."""
    sizes = (
        shape.num_layers,
        shape.num_blocks,
        2,
        shape.num_kv_heads,
        shape.block_size,
        shape.head_dim,
    )
    return rng.standard_normal(sizes, dtype=np.float32)


def check_attention(
    batch: Batch, dtype: str, got: tuple[Any, Any], expected: tuple[Any, Any]
) -> float:
    """Compares outputs and logarithms with the reference's; None as logarithms are not compared.

    Returns:
        The relative Frobenius error of the outputs.

    Raises:
        Mismatch: They differ by more than rounding explains.
    """
    out, expected_out = (np.asarray(x, np.float64) for x in (got[0], expected[0]))
    if out.shape != expected_out.shape:
        raise Mismatch(f"the output has shape {out.shape}. next: look at the operator's reshapes")
    if not np.isfinite(out).all():
        bad = np.argwhere(~np.isfinite(out))
        raise Mismatch(
            f"{len(bad)} elements are NaN or infinite, first {_where(batch, bad[0])}. next: memory "
            "that was never written reached the result: a mask, the zeroing of V's tail, an "
            "unclamped block id, or a wait that comes too early"
        )
    difference = np.abs(out - expected_out)
    size = np.linalg.norm(expected_out)
    error = float(np.linalg.norm(difference) / size) if size else float(difference.max(initial=0))
    allowed = TOLERANCE[dtype]
    largest = float(difference.max(initial=0) / max(np.abs(expected_out).max(initial=0), 1e-30))
    if error > allowed or largest > 4 * allowed:
        worst = np.unravel_index(difference.argmax(), difference.shape)
        rows = np.flatnonzero(difference.max(axis=(1, 2)) > 4 * allowed)
        raise Mismatch(
            f"relative error {error:.2e} (allowed {allowed:.0e}), largest {largest:.2e} (allowed "
            f"{4 * allowed:.0e}), worst {_where(batch, worst)}, {len(rows)} of {len(out)} rows "
            "off. next: rows of one kind (decode, chunk, block edge) point to their kernel or "
            "mask; all rows a little to the arithmetic (TF32, a 16-bit accumulator)"
        )
    if got[1] is not None:
        _check_lse(batch, dtype, np.asarray(got[1]), np.asarray(expected[1]))
    seen = np.isfinite(np.asarray(expected[1])) if expected[1] is not None else None
    if seen is not None and out[~seen].any():
        raise Mismatch("rows that see no key are not 0. next: look at how padding rows are written")
    return error


def _check_lse(batch: Batch, dtype: str, lse: np.ndarray, expected: np.ndarray) -> None:
    seen = np.isfinite(expected)
    if lse.shape != expected.shape or (np.isneginf(lse) != ~seen).any():
        raise Mismatch("lse is not -inf in just the rows that see no key. next: the merge's end")
    allowed = LSE_TOLERANCE[dtype]
    off = np.abs(lse - np.where(seen, expected, 0)) - allowed * np.abs(np.where(seen, expected, 0))
    off = np.where(seen, off, 0)
    if not (off <= allowed).all():
        worst = np.unravel_index(np.nanargmax(np.where(np.isnan(off), np.inf, off)), off.shape)
        raise Mismatch(
            f"lse is {lse[worst]!r}, expected {expected[worst]!r}, {_where(batch, (*worst, 0))}. "
            "next: the base of the logarithm, the scale, sinks counted twice over the splits"
        )


def _where(batch: Batch, index: Any) -> str:
    """A place in the output, in words."""
    token, head = int(index[0]), int(index[1])
    starts = batch.query_starts
    if token >= starts[-1]:
        return f"at token {token} (a padding row), head {head}"
    row = int(np.searchsorted(starts, token, side="right")) - 1
    query_len = int(starts[row + 1] - starts[row])
    return (
        f"at token {token}, head {head} (query {token - int(starts[row])} of {query_len} of "
        f"sequence {row} with context {int(batch.context_lens[row])})"
    )
