"""Sampling on the device: from logits to one token a row.

The order of operations is transformers': penalties, logit bias, temperature, top-k, top-p, min-p.
Each costs nothing in a batch that does not ask for it: it stands in a branch of a `lax.cond` that
only a batch with such a row enters, and what a row gets there depends on that row alone, so its
tokens do not depend on its neighbours.

Every filter keeps the tokens whose logit is at least some threshold, so filtering is the search for
one number a row; then one uniform draw is looked up in the cumulative distribution, in vocabulary
order, first over groups of 128 tokens, then inside the group (a cumulative sum over the whole
vocabulary costs eight times as much on a CPU).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from jpaged.runner.batch import parameter

MAX_LOGPROBS = 20
_GROUP = 128  # tokens of the vocabulary in one group of the two-level searches
_CANDIDATES = 256  # the threshold is looked for among this many best tokens first
_TABLE_COLUMNS = 16  # columns of a block table read at once when tokens are counted
# Stands for minus infinity where arithmetic on it must stay free of NaN.
MASKED_LOGIT = -1e30


class SamplingRows(NamedTuple):
    """What sampling needs to know of R sequences; as in Batch."""

    context_lens: Int[Array, " R"]
    slots: Int[Array, " R"]
    parameters: Int[Array, "R P"]
    block_tables: Int[Array, "R M"]

    def parameter(self, name: str) -> Float[Array, " R"] | Int[Array, " R"]:
        """One sampling parameter of every row."""
        return parameter(self.parameters, name)


class SampledRows(NamedTuple):
    """What was sampled in R rows. The logprobs are zero unless a row of the batch wants them."""

    token: Int[Array, " R"]
    logprob: Float[Array, " R"]
    top_ids: Int[Array, "R 20"]
    top_logprobs: Float[Array, "R 20"]


def _groups(x: Float[Array, "R V"]) -> Float[Array, "R groups 128"]:
    R, V = x.shape
    padding = -V % _GROUP
    if padding:
        x = jnp.pad(x, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return x.reshape(R, -1, _GROUP)


def argmax(x: Float[Array, "R V"]) -> Int[Array, " R"]:
    """The first index of each row's largest value, in two levels (XLA's CPU argmax is slow)."""
    groups = _groups(x)
    group = jnp.argmax(groups.max(axis=2), axis=1)
    inside = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    return (group * _GROUP + jnp.argmax(inside, axis=1)).astype(jnp.int32)


def inverse_cdf(weights: Float[Array, "R V"], uniform: Float[Array, " R"]) -> Int[Array, " R"]:
    """The token where each row's cumulative weight passes `uniform` (in [0, 1)) of its total.

    Weights are not negative, and some weight of each row is positive; a token of weight 0 is never
    returned, whatever the rounding.
    """
    groups = _groups(weights)
    groups = jnp.where(jnp.isneginf(groups), 0.0, groups)  # the padding of _groups

    def first_past(w, target):
        total = jnp.cumsum(w, axis=1)
        past = (total > target[:, None]) & (w > 0)
        # Rounding can leave the target at or past the last total: then the last positive weight.
        last = w.shape[1] - 1 - jnp.argmax((w > 0)[:, ::-1], axis=1)
        index = jnp.where(past.any(axis=1), jnp.argmax(past, axis=1), last)
        before = jnp.take_along_axis(total - w, index[:, None], axis=1)[:, 0]
        return index, target - before

    sums = groups.sum(axis=2)
    group, rest = first_past(sums, uniform * sums.sum(axis=1))
    inside = jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]
    token, _ = first_past(inside, rest)
    return (group * _GROUP + token).astype(jnp.int32)


def row_uniforms(
    seed_high: Int[Array, " R"],
    seed_low: Int[Array, " R"],
    sample_index: Int[Array, " R"],
    position: Int[Array, " R"],
) -> Float[Array, " R"]:
    """One draw from [0, 1) a row: uniform(fold_in(fold_in(key(seed), sample_index), position))."""

    def draw(high, low, index, place):
        words = jnp.stack([high, low]).astype(jnp.uint32)
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, index), place))

    return jax.vmap(draw)(seed_high, seed_low, sample_index, position)


def _sortable(x: Float[Array, "*n"]) -> UInt[Array, "*n"]:
    """float32 to uint32, keeping the order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _unsortable(key: UInt[Array, "*n"]) -> Float[Array, "*n"]:
    bits = jnp.where(key >> 31 == 1, key & jnp.uint32(0x7FFFFFFF), ~key)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _largest_threshold(
    keys: UInt[Array, " V"], weights: Float[Array, " V"], target: Float[Array, ""]
) -> UInt[Array, ""]:
    """The largest t with sum(weights[keys >= t]) >= target, found bit by bit from the top."""

    def bit(i, threshold):
        candidate = threshold | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        mass = jnp.sum(jnp.where(keys >= candidate, weights, 0.0))
        return jnp.where(mass >= target, candidate, threshold)

    return lax.fori_loop(0, 32, bit, jnp.uint32(0))


def _exact_threshold(
    x: Float[Array, " V"], top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, ""]:
    """The threshold of one row for any top_k and top_p, by search over the bits of the logits."""
    keys = _sortable(x)
    kth = _largest_threshold(keys, jnp.ones_like(x), top_k.astype(jnp.float32))
    weights = jnp.where(keys >= kth, jnp.exp(x), 0.0)
    # A target of 0 (top_p below float32's smallest share) would be reached by no token at all.
    target = jnp.maximum(top_p * jnp.sum(weights), jnp.finfo(jnp.float32).tiny)
    nucleus = _largest_threshold(keys, weights, target)
    return _unsortable(jnp.where(top_p < 1.0, jnp.maximum(kth, nucleus), kth))


def filter_threshold(
    x: Float[Array, "R V"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    min_p: Float[Array, " R"],
) -> Float[Array, " R"]:
    """The smallest logit that top-k, top-p (over what top-k leaves) and min-p all keep, a row.

    x        float32, each row's largest value is 0
    top_k    <= 0 or >= V: off. Tokens that tie with the k-th stay, as in transformers.
    top_p    1: off. Keeps the fewest best tokens whose share is at least top_p (and their ties).
    min_p    0: off. Keeps tokens at least min_p times as likely as the best.
    """
    V = x.shape[1]
    candidates = min(_CANDIDATES, V)
    # Without the barrier XLA may turn the sliced top_k into a full sort (20x slower).
    best, _ = lax.optimization_barrier(lax.top_k(x, candidates))
    uses_k = (top_k > 0) & (top_k < V)
    k = jnp.where(uses_k, top_k, V)
    kth = jnp.take_along_axis(best, jnp.clip(k - 1, 0, candidates - 1)[:, None], axis=1)[:, 0]
    kth = jnp.where(uses_k, kth, -jnp.inf)
    # All ties of the k-th are among the candidates if the last candidate is smaller still.
    k_fits = ~uses_k | ((k <= candidates) & ((best[:, -1] < kth) | (candidates == V)))

    weights = jnp.where(best >= kth[:, None], jnp.exp(best), 0.0)
    total = jnp.where(uses_k, weights.sum(axis=1), jnp.exp(x).sum(axis=1))
    reached = jnp.cumsum(weights, axis=1) >= (top_p * total)[:, None]
    nucleus = jnp.take_along_axis(best, jnp.argmax(reached, axis=1)[:, None], axis=1)[:, 0]
    uses_p = top_p < 1.0
    nucleus = jnp.where(uses_p, nucleus, -jnp.inf)
    p_fits = ~uses_p | reached.any(axis=1)

    def exact(i, threshold):
        return lax.cond(
            k_fits[i] & p_fits[i],
            lambda: threshold,
            lambda: threshold.at[i].set(_exact_threshold(x[i], k[i], top_p[i])),
        )

    threshold = lax.fori_loop(0, x.shape[0], exact, jnp.maximum(kth, nucleus))
    return jnp.maximum(threshold, jnp.log(min_p))  # log(0) = -inf: off


def count_tokens(
    token_pool: Int[Array, "N B"],
    block_tables: Int[Array, "R M"],
    context_lens: Int[Array, " R"],
    prompt_lens: Int[Array, " R"],
    vocab_size: int,
) -> tuple[Int[Array, "R V"], Int[Array, "R V"]]:
    """How often each token occurs in each row's whole context, and in its generated part alone."""
    R, M = block_tables.shape
    N, B = token_pool.shape
    columns = min(_TABLE_COLUMNS, M)
    rows = jnp.arange(R)[:, None]

    def count(i, counts):
        everywhere, generated = counts
        blocks = lax.dynamic_slice_in_dim(block_tables, i * columns, columns, axis=1)
        ids = token_pool[jnp.clip(blocks, 0, N - 1)].reshape(R, columns * B)
        position = i * columns * B + jnp.arange(columns * B)
        ids = jnp.where(position < context_lens[:, None], ids, vocab_size)  # dropped below
        everywhere = everywhere.at[rows, ids].add(1, mode="drop")
        late = (position >= prompt_lens[:, None]).astype(jnp.int32)
        return everywhere, generated.at[rows, ids].add(late, mode="drop")

    trips = -(-jnp.max(context_lens) // (columns * B))
    zeros = jnp.zeros((R, vocab_size), jnp.int32)
    return lax.fori_loop(0, trips, count, (zeros, zeros))


def apply_penalties(
    logits: Float[Array, "R V"],
    everywhere: Int[Array, "R V"],
    generated: Int[Array, "R V"],
    repetition: Float[Array, " R"],
    presence: Float[Array, " R"],
    frequency: Float[Array, " R"],
) -> Float[Array, "R V"]:
    """Repetition penalty (transformers' definition, over prompt and generated tokens), then
    presence and frequency penalties (OpenAI's definition, over generated tokens)."""
    penalty = repetition[:, None]
    repeated = jnp.where(logits < 0, logits * penalty, logits / penalty)
    logits = jnp.where(everywhere > 0, repeated, logits)
    logits = logits - presence[:, None] * (generated > 0)
    return logits - frequency[:, None] * generated


def _sample(
    logits: Float[Array, "R V"],
    rows: SamplingRows,
    sampling: Bool[Array, " R"],
    greedy: Int[Array, " R"],
) -> Int[Array, " R"]:
    """One sampled token a row from edited logits."""
    temperature = jnp.where(sampling, rows.parameter("temperature"), 1.0)
    top_k, top_p, min_p = (rows.parameter(name) for name in ("top_k", "top_p", "min_p"))
    # Subtracting first keeps tiny temperatures finite: the best token stays at exactly 0.
    x = logits - logits.max(axis=1, keepdims=True)
    x = x / jnp.maximum(temperature, 1e-30)[:, None]
    filters = sampling & ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0))
    threshold = lax.cond(
        filters.any(),
        lambda: jnp.where(filters, filter_threshold(x, top_k, top_p, min_p), -jnp.inf),
        lambda: jnp.full(x.shape[0], -jnp.inf),
    )
    weights = jnp.where(x >= threshold[:, None], jnp.exp(x), 0.0)
    uniform = row_uniforms(
        rows.parameter("seed_high"),
        rows.parameter("seed_low"),
        rows.parameter("sample_index"),
        rows.context_lens,  # the position of the token that is being sampled
    )
    sampled = inverse_cdf(weights, uniform)
    # A row with a NaN (a broken model's) has no weights: it gets some token of the vocabulary.
    return jnp.where((weights > 0).any(axis=1), sampled, greedy)


def log_probabilities(
    logits: Float[Array, "R V"], chosen: Int[Array, " R"]
) -> tuple[Float[Array, " R"], Int[Array, "R 20"], Float[Array, "R 20"]]:
    """The chosen tokens' logprobs, and the ids and logprobs of the 20 best (if V < 20, ids of -1
    follow them)."""
    normaliser = jax.nn.logsumexp(logits, axis=1)
    count = min(MAX_LOGPROBS, logits.shape[1])
    best, ids = lax.optimization_barrier(lax.top_k(logits, count))
    padding = ((0, 0), (0, MAX_LOGPROBS - count))
    picked = jnp.take_along_axis(logits, chosen[:, None], axis=1)[:, 0]
    return (
        picked - normaliser,
        jnp.pad(ids.astype(jnp.int32), padding, constant_values=-1),
        jnp.pad(best - normaliser[:, None], padding),
    )


def sample_rows(
    logits: Float[Array, "R V"],
    rows: SamplingRows,
    token_pool: Int[Array, "N B"],
    bias_table: Float[Array, "slots V"],
) -> SampledRows:
    """One token for each of R sequences.

    token_pool  the ids of the cached tokens, read through the block tables by the penalties
    bias_table  logit bias by slot, added for rows that have one

    Greedy where the temperature is 0. Logprobs are those of the model: before penalties, bias,
    temperature and filters.
    """
    R, V = logits.shape
    repetition = rows.parameter("repetition_penalty")
    presence = rows.parameter("presence_penalty")
    frequency = rows.parameter("frequency_penalty")
    # No request's repetition penalty is 0, but that of a row of padding: it asks for nothing.
    penalised = ((repetition != 1.0) & (repetition != 0.0)) | (presence != 0.0) | (frequency != 0.0)
    biased = rows.parameter("has_bias") > 0

    def with_penalties():
        context = jnp.where(penalised, rows.context_lens, 0)
        prompt_lens = rows.parameter("prompt_len")
        counts = count_tokens(token_pool, rows.block_tables, context, prompt_lens, V)
        return apply_penalties(logits, *counts, repetition, presence, frequency)

    sampling = rows.parameter("temperature") > 0.0

    def from_edited():
        edited = lax.cond(penalised.any(), with_penalties, lambda: logits)
        edited = lax.cond(
            biased.any(),
            lambda: jnp.where(biased[:, None], edited + bias_table[rows.slots], edited),
            lambda: edited,
        )
        greedy = argmax(edited)
        return lax.cond(
            sampling.any(),
            lambda: jnp.where(sampling, _sample(edited, rows, sampling, greedy), greedy),
            lambda: greedy,
        )

    # A branch that hands logits on copies them: a batch that wants only the best token has none.
    token = lax.cond((penalised | biased | sampling).any(), from_edited, lambda: argmax(logits))
    logprob, top_ids, top_logprobs = lax.cond(
        (rows.parameter("wants_logprobs") > 0).any(),
        lambda: log_probabilities(logits, token),
        lambda: (
            jnp.zeros(R),
            jnp.zeros((R, MAX_LOGPROBS), jnp.int32),
            jnp.zeros((R, MAX_LOGPROBS)),
        ),
    )
    return SampledRows(token, logprob, top_ids, top_logprobs)
