"""Paged attention in plain JAX: loops whose trip counts follow the live tokens.

A batch's shapes are those of its bucket: M blocks a sequence for the longest context, S sequences
of which many may be empty. So nothing here is computed for every entry of a block table. Two loops
with traced trip counts walk over lists of what is there:

  decode   Rows with one query. Their contexts are cut into items of `_ITEM` keys; each trip takes
           the next `_ITEMS_A_TRIP` items of all sequences together and adds their softmax sums to
           the accumulators of the sequences that they belong to. A long sequence is many items, so
           it costs its tokens and makes no short one longer.
  prefill  Rows with several queries. One tile of queries after the other walks over its keys in
           chunks, from the first that its window shows to its own end (FlashAttention, Dao et al.
           2022, with its online softmax).

A batch without rows of one kind pays for one loop of no trips. Another backend may bring a kernel
for single queries (`attend_rows`); then short queries are computed by it, one by one, and only
long ones walk over their keys here.

Keys and values are gathered from the stacked pool seen as rows of one head of one block
(`[L * N * 2 * K, B * D]`): XLA's CPU gather computes an index for each element, and that of
a two-dimensional gather is cheap (half the time of a gather over the pool's six axes).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import Attention

# Sizes were measured on two CPU cores at H 9, K 3, D 64, on contexts of 20 to 200 tokens: longer
# items or more of them a trip leave more of it empty there, and gain 5 to 12 % at 1,024.
_ITEM = 32  # keys
_ITEMS_A_TRIP = 32
# Queries a tile and keys a chunk. Small tiles waste little on short queries and are as fast as
# large ones up to about 128 queries; at 2048 they are 1.4 times slower.
SHORT_QUERY = 128
_SHORT_TILE, _SHORT_CHUNK = 32, 64
_LONG_TILE, _LONG_CHUNK = 128, 128

# Stands for the score of a hidden key and for the maximum over none; finite, so that differences
# are never NaN. exp(HIDDEN - anything real) is 0.
HIDDEN = -1e30


class Call(NamedTuple):
    """What the loops, or a kernel, need of the call."""

    q: jax.Array  # [T, H * D]
    rows: jax.Array  # the pool as [L * N * 2 * K, B * D]
    first_row: jax.Array  # row of the layer's first block
    block_tables: jax.Array  # [S, M], any integers in the tails
    query_starts: jax.Array  # [S]
    query_lens: jax.Array  # [S]
    context_lens: jax.Array  # [S]
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    scale: float | jax.Array
    window: jax.Array | None
    soft_cap: float | jax.Array | None
    alibi_slopes: jax.Array | None  # [K, G]

    def first_visible(self, positions):
        """The first key that a query at each of these positions sees."""
        if self.window is None:
            return jnp.zeros_like(positions)
        return jnp.where(self.window > 0, jnp.maximum(positions - self.window + 1, 0), 0)

    def gather(self, sequences, starts, size, low, high):
        """Keys and values of `size` positions of each of W sequences: two of [W, K, size, D].

        `starts` [W] are multiples of the block size. Values outside `low` .. `high` - 1 ([W]) are
        zero: that memory may hold NaN, and 0 * NaN is NaN. Keys there are left, since their scores
        are replaced.
        """
        width = sequences.shape[0]
        blocks_an_item = size // self.block_size
        max_blocks = self.block_tables.shape[1]
        index = starts[:, None] // self.block_size + jnp.arange(blocks_an_item)  # [W, b]
        blocks = self.block_tables.at[sequences[:, None], jnp.minimum(index, max_blocks - 1)].get(
            mode="promise_in_bounds"
        )
        blocks = jnp.clip(blocks, 0, self.num_blocks - 1)
        key_rows = (
            self.first_row
            + (blocks * (2 * self.num_kv_heads))[:, None, :]
            + jnp.arange(self.num_kv_heads)[:, None]
        )  # [W, K, b]
        head_dim = self.head_dim
        element = jnp.arange(self.block_size * head_dim)
        block_start = index * self.block_size
        begin, end = ((x[:, None] - block_start) * head_dim for x in (low, high))  # [W, b]
        begin, end = (
            jnp.broadcast_to(x[:, None, :], key_rows.shape).reshape(-1, 1) for x in (begin, end)
        )

        def take(row_ids):
            rows = self.rows.at[row_ids.reshape(-1)].get(mode="promise_in_bounds")
            if rows.dtype == jnp.uint16:
                rows = lax.bitcast_convert_type(rows, jnp.bfloat16)
            return rows

        keys = take(key_rows)
        values = take(key_rows + self.num_kv_heads)
        values = jnp.where((element >= begin) & (element < end), values, 0)
        shape = (width, self.num_kv_heads, size, head_dim)
        # Without the barrier XLA folds the reshape into the gather, and looks each element's row up
        # instead of copying rows: 1.6 times slower.
        keys, values = lax.optimization_barrier((keys, values))
        return keys.reshape(shape), values.reshape(shape)

    def score(self, products, distance, visible):
        """Scores [W, K, G, queries, keys] from the products of queries and keys.

        `distance` (key position - query position) and `visible` are [W, queries, keys].
        """
        scores = products * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        if self.alibi_slopes is not None:
            slopes = self.alibi_slopes[None, :, :, None, None]
            scores += slopes * distance[:, None, None].astype(jnp.float32)
        return jnp.where(visible[:, None, None], scores, HIDDEN)


class State(NamedTuple):
    """A softmax under way, over the keys met so far: sum of exp(score - maximum) * value, ..."""

    maximum: jax.Array  # [..., H]
    total: jax.Array  # [..., H]
    output: jax.Array  # [..., H, D]


def dot(subscripts, a, b):
    """An einsum in float32; IEEE products for float32 inputs (HIGHEST forbids TF32)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=jnp.float32)


def multiple_below(limit, unit):
    """The largest multiple of unit that is <= limit, and at least unit."""
    return max(limit // unit, 1) * unit


def owners(ends, items):
    """Which sequence each item belongs to, when sequence s owns items ends[s - 1] .. ends[s] - 1.

    Items past the end belong to the last sequence.
    """
    owners = jnp.sum(ends[None, :] <= items[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(owners, ends.shape[0] - 1)


def _decode(call, is_decode, num_rows):
    """Attention of the sequences with one query.

    Returns:
        The states of the decode rows, at least `num_rows` of them, in the order of the sequences,
        and each sequence's place among them [S].
    """
    num_kv_heads, head_dim = call.num_kv_heads, call.head_dim
    num_heads = call.q.shape[1] // head_dim
    group = num_heads // num_kv_heads
    item_size = multiple_below(_ITEM, call.block_size)
    width = min(_ITEMS_A_TRIP, max(8, 4 * num_rows))

    position = call.context_lens - 1
    low = call.first_visible(position)
    first_start = low // call.block_size * call.block_size
    num_items = jnp.where(is_decode, -(-(call.context_lens - first_start) // item_size), 0)
    ends = jnp.cumsum(num_items, dtype=jnp.int32)
    place = jnp.cumsum(is_decode, dtype=jnp.int32) - 1

    def trip(i, states):
        item = i * width + jnp.arange(width)
        owner = owners(ends, item)
        live = item < ends[-1]
        start = first_start[owner] + (item - ends[owner] + num_items[owner]) * item_size
        start = jnp.where(live, start, 0)
        high = jnp.where(live, call.context_lens[owner], 0)
        keys, values = call.gather(owner, start, item_size, low[owner], high)

        query = call.q[call.query_starts[owner]].reshape(width, num_kv_heads, group, head_dim)
        key_position = start[:, None] + jnp.arange(item_size)
        visible = (key_position >= low[owner][:, None]) & (key_position < high[:, None])
        distance = key_position - position[owner][:, None]
        products = dot("wkgd,wkcd->wkgc", query, keys)
        scores = call.score(products[:, :, :, None], distance[:, None], visible[:, None])
        scores = scores[:, :, :, 0]
        maximum = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - maximum[..., None])
        total = jnp.sum(weights, axis=-1).reshape(width, num_heads)
        output = dot("wkgc,wkcd->wkgd", weights.astype(values.dtype), values)
        output = output.reshape(width, num_heads * head_dim)
        maximum = maximum.reshape(width, num_heads)

        # The items of a trip belong to at most `width` decode rows that lie side by side. Adding
        # them up by a product with a 0/1 matrix is much faster than XLA's scatter on a CPU.
        first = place[owner[0]]
        local = jnp.clip(place[owner] - first, 0, width - 1)
        belongs = (local[None, :] == jnp.arange(width)[:, None]) & live[None, :]  # [row, item]
        old = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, width), states)
        new_maximum = jnp.max(
            jnp.where(belongs[:, :, None], maximum[None], HIDDEN), axis=1, initial=HIDDEN
        )
        new_maximum = jnp.maximum(new_maximum, old.maximum)
        keep = jnp.exp(old.maximum - new_maximum)
        factor = jnp.exp(maximum - new_maximum[local])  # [item, H]
        spread = jnp.repeat(factor, head_dim, axis=1)
        total, output = total * factor, output * spread
        # 0 * NaN is NaN: an item that is not finite must not enter the product, or it would spoil
        # the other sequences of the trip. Its own sequence is NaN from here on.
        is_finite = jnp.isfinite(total).all(axis=1) & jnp.isfinite(output).all(axis=1)
        is_spoilt = (belongs & ~is_finite).any(axis=1)
        total, output = (jnp.where(is_finite[:, None], x, 0.0) for x in (total, output))
        belongs = belongs.astype(jnp.float32)
        added = jnp.where(is_spoilt[:, None], jnp.nan, dot("rw,we->re", belongs, output))
        new = State(
            new_maximum,
            old.total * keep + dot("rw,wh->rh", belongs, total),
            old.output * keep[..., None] + added.reshape(width, num_heads, head_dim),
        )
        return jax.tree.map(
            lambda x, y: lax.dynamic_update_slice_in_dim(x, y, first, axis=0), states, new
        )

    size = num_rows + width
    states = State(
        jnp.full((size, num_heads), HIDDEN, jnp.float32),
        jnp.zeros((size, num_heads), jnp.float32),
        jnp.zeros((size, num_heads, head_dim), jnp.float32),
    )
    return lax.fori_loop(0, (ends[-1] + width - 1) // width, trip, states), place


def finish(state, sinks, dtype):
    """Outputs [rows, H * D] and lse [rows, H]; those of rows that saw no key mean nothing."""
    maximum, total = state.maximum, state.total
    scale = jnp.ones_like(total)
    if sinks is not None:
        maximum = jnp.maximum(maximum, sinks)
        scale = jnp.exp(state.maximum - maximum)
        total = total * scale + jnp.exp(sinks - maximum)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    out = state.output * (scale / total)[..., None]
    return out.astype(dtype).reshape(out.shape[0], -1), maximum + jnp.log(total)


def _prefill(call, is_prefill, tile, chunk, sinks, out, lse):
    """Attention of the sequences with several queries, written into their rows of out and lse."""
    num_kv_heads, head_dim = call.num_kv_heads, call.head_dim
    num_heads = call.q.shape[1] // head_dim
    group = num_heads // num_kv_heads
    tile = min(tile, call.q.shape[0])
    chunk = multiple_below(chunk, call.block_size)

    num_tiles = jnp.where(is_prefill, -(-call.query_lens // tile), 0)
    ends = jnp.cumsum(num_tiles, dtype=jnp.int32)

    def one_tile(i, results):
        owner = owners(ends, jnp.reshape(i, (1,)))  # [1]
        sequence = owner[0]
        skipped = (i - ends[sequence] + num_tiles[sequence]) * tile
        first_row = call.query_starts[sequence] + skipped
        num_live = jnp.minimum(call.query_lens[sequence] - skipped, tile)
        # The tile is moved back where it would reach past q's end, so it may begin and end with
        # rows of other sequences, whose results are thrown away.
        top = jnp.minimum(first_row, call.q.shape[0] - tile)
        row = jnp.arange(tile) + top - first_row
        is_live = (row >= 0) & (row < num_live)
        context_len = call.context_lens[sequence]
        first_position = context_len - call.query_lens[sequence] + skipped
        position = first_position + row
        low = call.first_visible(position)
        tile_low = call.first_visible(jnp.maximum(first_position, 0))
        high = first_position + num_live
        start = tile_low // call.block_size * call.block_size
        query = lax.dynamic_slice_in_dim(call.q, top, tile)
        query = query.reshape(tile, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3)
        query = query.reshape(num_kv_heads, group * tile, head_dim)

        def one_chunk(j, state):
            begin = start + j * chunk
            keys, values = call.gather(owner, begin[None], chunk, tile_low[None], high[None])
            key_position = begin + jnp.arange(chunk)
            distance = key_position - position[:, None]  # [tile, chunk]
            visible = (distance <= 0) & (key_position >= low[:, None])
            products = dot("kqd,kcd->kqc", query, keys[0])
            products = products.reshape(1, num_kv_heads, group, tile, chunk)
            scores = call.score(products, distance[None], visible[None])
            scores = scores.reshape(num_kv_heads, group * tile, chunk)
            maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - maximum[..., None])
            keep = jnp.exp(state.maximum - maximum)
            output = dot("kqc,kcd->kqd", weights.astype(values.dtype), values[0])
            return State(
                maximum,
                state.total * keep + jnp.sum(weights, axis=-1),
                state.output * keep[..., None] + output,
            )

        rows = (num_kv_heads, group * tile)
        state = State(
            jnp.full(rows, HIDDEN, jnp.float32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros((*rows, head_dim), jnp.float32),
        )
        state = lax.fori_loop(0, -(-(high - start) // chunk), one_chunk, state)
        state = State(
            state.maximum.reshape(num_heads, tile).T,
            state.total.reshape(num_heads, tile).T,
            state.output.reshape(num_heads, tile, head_dim).transpose(1, 0, 2),
        )
        new = finish(state, sinks, out.dtype)
        sees_keys = (position >= 0)[:, None]
        new = jnp.where(sees_keys, new[0], 0), jnp.where(sees_keys, new[1], -jnp.inf)

        def replace(all_rows, rows):
            old = lax.dynamic_slice_in_dim(all_rows, top, tile)
            rows = jnp.where(is_live[:, None], rows, old)
            return lax.dynamic_update_slice_in_dim(all_rows, rows, top, axis=0)

        return jax.tree.map(replace, results, new)

    return lax.fori_loop(0, ends[-1], one_tile, (out, lse))


def paged_attention(arguments: Attention, attend_rows=None):
    """The public operator's `xla` backend; its arguments are checked there.

    `attend_rows(call, sequence, low, high)`, if given, computes the sequences with at most
    SHORT_QUERY queries, and all of them if they are to be batch-invariant, row by row: row t
    attends to the keys low[t] .. high[t] - 1 of sequence[t], to none if there are none. It returns
    a State of T rows, each of which depends on its own keys alone; that of one without keys is any.
    """
    q, kv_pool, query_starts = arguments.q, arguments.kv_pool, arguments.query_starts
    num_tokens, num_heads, head_dim = q.shape
    _, num_blocks, _, num_kv_heads, block_size, _ = kv_pool.shape
    num_sequences, max_blocks = arguments.block_tables.shape
    if 0 in (num_tokens, num_sequences, max_blocks):
        out = jnp.zeros_like(q)
        empty = jnp.full((num_tokens, num_heads), -jnp.inf)
        return (out, empty) if arguments.return_lse else out
    slopes, sinks = arguments.alibi_slopes, arguments.sinks
    if slopes is not None:
        slopes = jnp.reshape(slopes, (num_kv_heads, arguments.group))
    query_lens = jnp.diff(query_starts)
    call = Call(
        q=jnp.reshape(q, (num_tokens, num_heads * head_dim)),
        rows=jnp.reshape(kv_pool, (-1, block_size * head_dim)),
        first_row=jnp.asarray(arguments.layer, jnp.int32) * (num_blocks * 2 * num_kv_heads),
        block_tables=arguments.block_tables,
        query_starts=query_starts[:-1],
        query_lens=query_lens,
        context_lens=jnp.minimum(arguments.context_lens, max_blocks * block_size),
        num_blocks=num_blocks,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        head_dim=head_dim,
        scale=arguments.scale,
        window=arguments.window,
        soft_cap=arguments.soft_cap,
        alibi_slopes=slopes,
    )

    if arguments.batch_invariant and attend_rows is None:
        from pallas_kernels.xla_invariant import attend  # which uses this module

        out, lse = attend(call, sinks, q.dtype)
        out = out.reshape(q.shape)
        return (out, lse) if arguments.return_lse else out
    token = jnp.arange(num_tokens)
    sequence = owners(query_starts[1:], token)
    has_keys = call.context_lens > 0
    if attend_rows is None:
        is_decode = (query_lens == 1) & has_keys
        decoded, place = _decode(call, is_decode, min(num_sequences, num_tokens))
        rows = (x[jnp.maximum(place[sequence], 0)] for x in finish(decoded, sinks, q.dtype))
        is_row = is_decode[sequence] & (token < query_starts[-1])
    else:

        def of_its_sequence(x):  # each token's
            return x.at[sequence].get(mode="promise_in_bounds", wrap_negative_indices=False)

        position = of_its_sequence(call.context_lens - query_starts[1:]) + token
        by_rows = (query_lens <= SHORT_QUERY) | arguments.batch_invariant
        is_row = of_its_sequence(by_rows) & (token < query_starts[-1]) & (position >= 0)
        low, high = (jnp.where(is_row, x, 0) for x in (call.first_visible(position), position + 1))
        rows = finish(attend_rows(call, sequence, low, high), sinks, q.dtype)
    out, lse = (jnp.where(is_row[:, None], x, nothing) for x, nothing in zip(rows, (0, -jnp.inf)))
    if num_tokens > 1 and attend_rows is None:
        is_short = has_keys & (query_lens > 1) & (query_lens <= SHORT_QUERY)
        out, lse = _prefill(call, is_short, _SHORT_TILE, _SHORT_CHUNK, sinks, out, lse)
    if num_tokens > SHORT_QUERY and not arguments.batch_invariant:
        is_long = has_keys & (query_lens > SHORT_QUERY)
        out, lse = _prefill(call, is_long, _LONG_TILE, _LONG_CHUNK, sinks, out, lse)
    out = out.reshape(q.shape)
    return (out, lse) if arguments.return_lse else out
