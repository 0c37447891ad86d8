"""A step on the device: KV writes, forward pass, sampling, and logprobs of prompts where they are
wanted; or several decode steps in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.runner.batch import STOP_TOKENS, Batch, parameter
from jpaged.runner.kv_pool import set_tokens
from jpaged.runner.sampler import MAX_LOGPROBS, SamplingRows, log_probabilities, sample_rows

# One row of the packed result: token, chosen logprob, ids and logprobs of the best.
RESULT_WIDTH = 2 + 2 * MAX_LOGPROBS


def _pack_rows(token, logprob, top_ids, top_logprobs) -> Int[Array, "R W"]:
    def bits(x):
        return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    return jnp.concatenate(
        [token[:, None], bits(logprob)[:, None], top_ids, bits(top_logprobs)], axis=1
    )


def _at(x: Array, *index: Int[Array, " n"]) -> Array:
    """x[index], of indices that lie inside."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _over_tiles(
    tile: int, rows: int, live: Int[Array, ""], compute: Callable[[Int[Array, ""]], Array]
) -> Int[Array, "rows W"]:
    """`compute(start)` -> [tile, W] for the tiles that hold the first `live` rows, joined."""

    def body(i, out):
        start = jnp.minimum(i * tile, rows - tile)  # the last tile may overlap: same values again
        return lax.dynamic_update_slice_in_dim(out, compute(start), start, axis=0)

    out = jnp.zeros((rows, RESULT_WIDTH), jnp.int32)
    return lax.fori_loop(0, -(-live // tile), body, out)


class Sampling(NamedTuple):
    """What the sampling program takes from the forward program: R rows, of which the first
    `num_sampled` count."""

    num_sampled: Int[Array, ""]
    hidden: Float[Array, "R E"]
    context_lens: Int[Array, " R"]
    slots: Int[Array, " R"]
    parameters: Int[Array, "R P"]
    block_tables: Int[Array, "R M"]


def forward(
    model: nnx.Module,
    kv_pool: Float[Array, "L N 2 K B D"],
    token_pool: Int[Array, "N B"],
    last_tokens: Int[Array, " slots"],
    batch: Batch,
    *,
    sampling_rows: int,
    backend: str,
    row_tile: int | None = None,
) -> tuple[Array, Array, Sampling, Float[Array, "T E"]]:
    """The first half of a step: KV writes and the forward pass.

    last_tokens  the token sampled last in each slot, for rows whose token the host did not know
                 (-1)

    Returns the pools, what sampling needs (padded to `sampling_rows`), and all hidden states.
    """
    T, S = len(batch.token_ids), len(batch.slots)
    N, B = token_pool.shape
    starts = batch.query_starts

    token = jnp.arange(T, dtype=jnp.int32)
    ended = jnp.searchsorted(starts[1:], token, side="right", method="compare_all")
    row = jnp.minimum(ended, S - 1)
    live = token < starts[-1]
    position = _at(batch.context_lens, row) - _at(starts, row + 1) + token
    position = jnp.where(live, position, 0)
    # lax's division truncates. Python's is nine operations more: each costs every start something.
    block, offset = lax.div(position, np.int32(B)), lax.rem(position, np.int32(B))
    block = jnp.where(live, _at(batch.block_tables, row, block), N)  # out of range: not written

    last = _at(last_tokens, _at(batch.slots, row))
    token_ids = jnp.where(batch.token_ids < 0, last, batch.token_ids)
    token_pool = set_tokens(token_pool, (block, offset), token_ids)
    hidden, kv_pool = model(
        token_ids,
        position,
        kv_pool,
        block * B + offset,
        batch.block_tables,
        starts,
        batch.context_lens,
        backend=backend,
        row_tile=row_tile,
    )

    def padded(x):
        return lax.pad(x, x.dtype.type(0), [(0, sampling_rows - S, 0)] + [(0, 0, 0)] * (x.ndim - 1))

    sampling = Sampling(
        batch.num_sampled,
        padded(_at(hidden, jnp.maximum(starts[1:] - 1, 0))),
        padded(batch.context_lens),
        padded(batch.slots),
        padded(batch.parameters),
        padded(batch.block_tables),
    )
    return kv_pool, token_pool, sampling, hidden


def prompt_logprobs(
    model: nnx.Module, hidden: Float[Array, "T E"], targets: Int[Array, " T"], *, tile: int
) -> Int[Array, "T W"]:
    """The logprobs of prompt tokens, where a step is asked for any: of each row of hidden states
    its target's and the best ones, packed. Rows whose target is -1 mean nothing."""
    T = len(targets)
    tile = min(tile, T)

    def compute(start):
        rows, wanted = (lax.dynamic_slice_in_dim(x, start, tile, axis=0) for x in (hidden, targets))

        def packed():
            logits = model.logits(rows)  # type: ignore[attr-defined]
            tokens = jnp.maximum(wanted, 0)
            return _pack_rows(tokens, *log_probabilities(logits, tokens))

        nothing = jnp.zeros((tile, RESULT_WIDTH), jnp.int32)
        return lax.cond((wanted >= 0).any(), packed, lambda: nothing)

    live = jnp.max(jnp.where(targets >= 0, jnp.arange(1, T + 1), 0))
    return _over_tiles(tile, T, live, compute)


def sample(
    model: nnx.Module,
    token_pool: Int[Array, "N B"],
    bias_table: Float[Array, "slots V"],
    last_tokens: Int[Array, " slots"],
    sampling: Sampling,
    *,
    tile: int,
) -> tuple[Int[Array, "R W"], Int[Array, " slots"]]:
    """The second half of a step: a token for each of the first num_sampled rows, packed with its
    logprobs; and last_tokens with these tokens in their rows' slots."""
    rows = sampling.hidden.shape[0]

    def compute(start):
        hidden, *fields = (
            lax.dynamic_slice_in_dim(x, start, min(tile, rows), axis=0) for x in sampling[1:]
        )
        logits = model.logits(hidden)  # type: ignore[attr-defined]
        return _pack_rows(*sample_rows(logits, SamplingRows(*fields), token_pool, bias_table))

    packed = _over_tiles(min(tile, rows), rows, sampling.num_sampled, compute)
    sampled = jnp.arange(rows) < sampling.num_sampled
    slots = jnp.where(sampled, sampling.slots, len(last_tokens))
    return packed, last_tokens.at[slots].set(packed[:, 0], mode="drop")


def decode_steps(
    model: nnx.Module,
    kv_pool: Float[Array, "L N 2 K B D"],
    token_pool: Int[Array, "N B"],
    bias_table: Float[Array, "slots V"],
    last_tokens: Int[Array, " slots"],
    batch: Batch,
    *,
    most_steps: int,
    sampling_rows: int,
    backend: str,
    tile: int,
) -> tuple[Array, Array, Int[Array, "most_steps R W"], Int[Array, " slots"]]:
    """Several decode steps of the same sequences: `batch.num_steps` of them, at most `most_steps`,
    and none after a step in which a sequence sampled one of its stop tokens (of the first
    len(STOP_TOKENS) of them).

    batch  decodes alone: one token of each of the first num_sampled rows. Its block tables name
           blocks for the tokens of all steps.

    Returns the pools, each step's packed tokens (those of steps that did not run begin with -1),
    and last_tokens.
    """
    feeds = jnp.arange(len(batch.token_ids)) < batch.num_sampled
    live = jnp.arange(len(batch.slots)) < batch.num_sampled
    stops = jnp.stack([parameter(batch.parameters, name) for name in STOP_TOKENS], axis=1)

    def goes_on(state):
        step, ended, *_ = state
        return (step < batch.num_steps) & ~ended

    def one(state):
        step, _, kv_pool, token_pool, last_tokens, results = state
        now = batch._replace(
            token_ids=jnp.where(feeds & (step > 0), -1, batch.token_ids),
            context_lens=jnp.where(live, batch.context_lens + step, 0),
        )
        kv_pool, token_pool, sampling, _ = forward(
            model, kv_pool, token_pool, last_tokens, now,
            sampling_rows=sampling_rows, backend=backend,
        )  # fmt: skip
        rows, last_tokens = sample(model, token_pool, bias_table, last_tokens, sampling, tile=tile)
        stopped = (rows[: len(live), :1] == stops).any(axis=1)
        results = results.at[step].set(rows)
        return step + 1, (live & stopped).any(), kv_pool, token_pool, last_tokens, results

    results = jnp.full((most_steps, sampling_rows, RESULT_WIDTH), -1, jnp.int32)
    start = jnp.int32(0), jnp.bool_(False), kv_pool, token_pool, last_tokens, results
    _, _, kv_pool, token_pool, last_tokens, results = lax.while_loop(goes_on, one, start)
    return kv_pool, token_pool, results, last_tokens
