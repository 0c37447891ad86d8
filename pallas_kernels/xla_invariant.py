"""Batch-invariant paged attention in plain JAX: a query's result is bitwise the same whatever else
is in the batch, and however its sequence was cut into steps.

`xla_attention` adds up items of many sequences trip by trip, so where a trip begins, which depends
on the others, decides in which order a sequence's sums are rounded. Here the order is fixed:

  - Every product has the same shape, decode or prefill: tiles of `_TILE` queries of one sequence
    against chunks of `_CHUNK` keys, `_WIDTH` tiles at a time. A tile has rows without a query
    where its sequence brings fewer.
  - A tile meets its keys in chunks that begin at multiples of the chunk's size, in order, with an
    online softmax (FlashAttention, Dao et al. 2022). A chunk that hides all keys from a query
    leaves its sums as they are, bit by bit.

Tiles of about the same number of chunks are walked over together, so that a long context costs
little more than itself. Invariance to the batch this way: Horace He and Thinking Machines Lab,
"Defeating Nondeterminism in LLM Inference", 2025.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.xla_attention import HIDDEN, Call, State, dot, finish, multiple_below, owners

# Products of one query a tile would decode a third faster, and take twice as long for prompts.
_TILE = 4  # queries
_CHUNK = 64  # keys
_WIDTH = 8  # tiles


def attend(call: Call, sinks, out_dtype):
    """Outputs [T, H * D] and lse [T, H]; zero and -inf where a row sees no key."""
    num_tokens = call.q.shape[0]
    num_sequences = call.query_lens.shape[0]
    num_kv_heads, head_dim = call.num_kv_heads, call.head_dim
    num_heads = call.q.shape[1] // head_dim
    group = num_heads // num_kv_heads
    chunk = multiple_below(_CHUNK, call.block_size)

    query_lens = jnp.where(call.context_lens > 0, call.query_lens, 0)
    num_tiles = -(-query_lens // _TILE)
    ends = jnp.cumsum(num_tiles, dtype=jnp.int32)
    most_tiles = -(-num_tokens // _TILE) + num_sequences
    most_tiles = -(-most_tiles // _WIDTH) * _WIDTH
    tile = jnp.arange(most_tiles)
    owner = owners(ends, tile)
    skipped = (tile - ends[owner] + num_tiles[owner]) * _TILE
    num_live = jnp.where(tile < ends[-1], jnp.minimum(query_lens[owner] - skipped, _TILE), 0)
    first_row = call.query_starts[owner] + skipped
    first_position = call.context_lens[owner] - query_lens[owner] + skipped
    tile_low = call.first_visible(jnp.maximum(first_position, 0))  # what is before it may be NaN
    start = tile_low // chunk * chunk
    high = jnp.where(num_live > 0, first_position + num_live, 0)
    num_chunks = jnp.maximum(-(-(high - start) // chunk), 0)
    order = jnp.argsort(-num_chunks, stable=True)
    owner, num_live, first_row, first_position, tile_low, start, high, num_chunks = (
        x[order]
        for x in (owner, num_live, first_row, first_position, tile_low, start, high, num_chunks)
    )

    def one_group(i, results):
        def mine(x):
            return lax.dynamic_slice_in_dim(x, i * _WIDTH, _WIDTH)

        sequence, live, low, first, end = map(mine, (owner, num_live, tile_low, start, high))
        row = jnp.arange(_TILE)
        is_live = row < live[:, None]  # [W, Q]
        position = mine(first_position)[:, None] + row
        source = jnp.where(is_live, mine(first_row)[:, None] + row, 0)
        query = call.q[source].reshape(_WIDTH, _TILE, num_kv_heads, group, head_dim)
        query = query.transpose(0, 2, 3, 1, 4)
        query = query.reshape(_WIDTH, num_kv_heads, group * _TILE, head_dim)
        first_key = call.first_visible(position)  # [W, Q]

        def one_chunk(j, state):
            begin = first + j * chunk
            last = jnp.where(begin < end, end, 0)
            begin = jnp.where(begin < end, begin, 0)
            keys, values = call.gather(sequence, begin, chunk, low, last)
            key_position = begin[:, None, None] + jnp.arange(chunk)  # [W, 1, C]
            distance = key_position - position[..., None]
            visible = (distance <= 0) & (key_position >= first_key[..., None])
            visible &= (key_position < last[:, None, None]) & is_live[..., None]
            products = dot("wkqd,wkcd->wkqc", query, keys)
            products = products.reshape(_WIDTH, num_kv_heads, group, _TILE, chunk)
            scores = call.score(products, distance, visible)
            maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - maximum[..., None])
            weights = jnp.where(visible[:, None, None], weights, 0.0)
            keep = jnp.exp(state.maximum - maximum)
            rows = weights.reshape(_WIDTH, num_kv_heads, group * _TILE, chunk)
            output = dot("wkqc,wkcd->wkqd", rows.astype(values.dtype), values)
            output = output.reshape(*keep.shape, head_dim)
            return State(
                maximum,
                state.total * keep + jnp.sum(weights, axis=-1),
                state.output * keep[..., None] + output,
            )

        shape = (_WIDTH, num_kv_heads, group, _TILE)
        state = State(
            jnp.full(shape, HIDDEN, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, head_dim), jnp.float32),
        )
        state = lax.fori_loop(0, jnp.max(mine(num_chunks)), one_chunk, state)
        state = State(*(jnp.moveaxis(x, 3, 1) for x in state))  # [W, Q, K, G, ...]
        rows = _WIDTH * _TILE
        state = State(
            state.maximum.reshape(rows, num_heads),
            state.total.reshape(rows, num_heads),
            state.output.reshape(rows, num_heads, head_dim),
        )
        new = finish(state, sinks, out_dtype)
        sees_keys = is_live & (position >= 0)
        target = jnp.where(sees_keys, source, num_tokens).reshape(-1)
        return jax.tree.map(lambda old, x: old.at[target].set(x, mode="drop"), results, new)

    results = (
        jnp.zeros((num_tokens, num_heads * head_dim), out_dtype),
        jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32),
    )
    return lax.fori_loop(0, -(-ends[-1] // _WIDTH), one_group, results)
