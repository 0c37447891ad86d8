"""Paged attention in Pallas/Triton, for NVIDIA GPUs from Ampere on.

Three launches, over the work lists of a plan (`plan.py`):

  ragged   Tiles of queries of one sequence and KV head walk over their keys (FlashAttention-2, Dao
           2023). A tile packs as many query tokens as fit, each with all the query heads that
           share the KV head. It takes any row, and writes zeros to rows that see no key.
  decode   Rows of few query tokens, whose tile is small: their keys are split among several
           programs as `plan` says (Flash-Decoding), each of which writes a normalised float32
           output and the logarithm of its softmax sum.
  merge    Joins the parts of the decode rows.

Which rows are decode rows is decided with the plan, from values: those with a context and with no
more query tokens than a decode tile has room for. So nothing compiles anew when the mix changes.

Scores are kept in base 2 (`exp2` is one instruction), with log2(e) folded into the scale. Keys that
every row of a tile sees are walked in a loop without masks; the rest, at the causal edge and at the
edge of a window, in a second one. Masked loads replace what is not visible by zeros, so that NaN in
unused slots meets neither the scores nor, as 0 * NaN, the outputs.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import plan as plans
from pallas_kernels.arguments import Attention
from pallas_kernels.devices import Target
from pallas_kernels.triton_tiles import Config, tile_configs

_LOG2_E = 1.4426950408889634
_LN_2 = 0.6931471805599453
# The score of a hidden key, and the least maximum of scores: finite, so that differences are never
# NaN, and far enough apart that exp2(_HIDDEN - _FLOOR) is 0 in a row that sees no key at all.
_HIDDEN = -1e30
_FLOOR = -1e20
_MERGED_AT_ONCE = 16  # parts


class Operands(NamedTuple):
    """The inputs that ragged and decode share; None where a feature is off."""

    q: Any  # [T, H, D]
    kv_pool: Any  # [L, N, 2, K, B, D]
    layer: Any  # [1]
    block_tables: Any  # [S, M]
    scales: Any  # [2]: factor on the products; soft_cap in base 2
    window: Any  # [1]
    slopes: Any  # [H], in base 2
    sinks: Any  # [H], in base 2


class Span(NamedTuple):
    """A tile's place: scalars, so that loop bounds follow from them."""

    sequence: Any
    position: Any  # of the first query token; negative if it sees no key
    num_tokens: Any  # live query tokens


def _div(x, size: int):
    """x // size for x >= 0; lax.div spares the corrections for negative numbers."""
    return lax.div(x, jnp.full_like(x, size))


def _rem(x, size: int):
    return lax.rem(x, jnp.full_like(x, size))


def _ceil_div(x, size: int):
    return _div(x + (size - 1), size)


def _clip(x, low, high):
    return jnp.minimum(jnp.maximum(x, low), high)


def _dot(a, b, config: Config):
    """A product in float32; IEEE products for float32 inputs (HIGHEST forbids TF32)."""
    precision = lax.Precision.HIGHEST if config.is_float32 else lax.Precision.DEFAULT
    return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


def _first_visible(position, window):
    """The first key that a query at this position sees."""
    if window is None:
        return jnp.zeros_like(position)
    # A negative position minus a large window would overflow.
    return jnp.where(window > 0, jnp.maximum(jnp.maximum(position, 0) - window + 1, 0), 0)


def _cap(scores, refs: Operands, config: Config):
    """cap * tanh(x / cap); `scores` come divided by the cap, and leave in base 2."""
    if config.is_float32:
        capped = jnp.tanh(scores)
    else:
        # Cheaper than tanh, with an error of 1e-7 that 16-bit inputs do not show; exp2 may
        # overflow to infinity, which gives 1 as it should.
        capped = 1.0 - 2.0 / (jnp.exp2(scores * (2 * _LOG2_E)) + 1.0)
    return capped * refs.scales[1]


class _Rows(NamedTuple):
    """The rows of a tile: row r is query token r // heads with query head r % heads."""

    token: Any  # [M], within the tile
    head: Any  # [M], of all query heads
    live: Any  # [M]


def _tile_rows(kv_head, chunk, num_tokens, config: Config) -> _Rows:
    row = jnp.arange(config.rows, dtype=jnp.int32)
    token, head = _div(row, config.heads), _rem(row, config.heads)
    live = token < jnp.minimum(num_tokens, config.tokens)
    if config.group % config.heads:
        live &= chunk * config.heads + head < config.group
    return _Rows(token, kv_head * config.group + chunk * config.heads + head, live)


def _attend(refs: Operands, first_token, span: Span, kv_head, rows: _Rows, part, parts, config):
    """One tile of queries over part `part` of the keys that it sees.

    Returns:
        The unnormalised output [M, D], the maximum (base 2) and the softmax sum [M].
    """
    keys, size = config.keys, config.block_size
    dims = jnp.arange(config.padded_dim, dtype=jnp.int32)
    columns = jnp.arange(keys, dtype=jnp.int32)
    is_dim = (dims < config.head_dim)[None, :] if config.padded_dim > config.head_dim else None

    def mask(visible):
        """A mask [..., D] of rows, without the padding of D; None if there is nothing to mask."""
        if visible is None:
            return is_dim
        return visible[:, None] if is_dim is None else visible[:, None] & is_dim

    q = plt.load(
        refs.q.at[(first_token + rows.token)[:, None], rows.head[:, None], dims[None, :]],
        mask=jnp.broadcast_to(mask(rows.live), (config.rows, config.padded_dim)),
        other=0.0,
    )
    layer = refs.layer[0]
    window = refs.window[0] if config.window else None
    position = span.position + rows.token
    last = span.position + span.num_tokens - 1
    low = _first_visible(span.position, window)
    slopes: Any = None
    if config.alibi:
        slopes = plt.load(refs.slopes.at[rows.head], mask=rows.live, other=0.0)

    # Tiles [begin, end) are this part's; every row sees all keys of those in [inner, outer).
    first_tile = _div(low, keys)
    num_tiles = jnp.maximum(_ceil_div(jnp.maximum(last + 1, 0), keys) - first_tile, 0)
    tiles_a_part = lax.div(num_tiles + parts - 1, parts)
    begin = jnp.minimum(part * tiles_a_part, num_tiles) + first_tile
    end = jnp.minimum((part + 1) * tiles_a_part, num_tiles) + first_tile
    inner = _clip(_ceil_div(_first_visible(last, window), keys), begin, end)
    outer = _clip(_div(jnp.maximum(span.position + 1, 0), keys), inner, end)

    def tile(index, state, masked: bool):
        output, maximum, total = state
        key_position = index * keys + columns
        visible: Any = None
        if masked:
            visible = (key_position >= low) & (key_position <= last)
        if size % keys == 0:
            # A tile lies in one block, and each tile that is walked has a visible key.
            block = refs.block_tables[span.sequence, _div(index * keys, size)]
            offset = _rem(index * keys, size) + columns[:, None]
        else:
            entry = refs.block_tables.at[span.sequence, _div(key_position, size)]
            if masked:
                block = plt.load(entry, mask=visible, other=0)[:, None]
            else:
                block = plt.load(entry)[:, None]
            offset = _rem(key_position, size)[:, None]

        def load(which):
            loads = mask(visible)
            values = plt.load(
                refs.kv_pool.at[layer, block, which, kv_head, offset, dims[None, :]],
                mask=None if loads is None else jnp.broadcast_to(loads, (keys, config.padded_dim)),
                other=None if loads is None else jnp.zeros((), refs.kv_pool.dtype),
            )
            if values.dtype == jnp.uint16:
                values = lax.bitcast_convert_type(values, jnp.bfloat16)
            return values

        scores = _dot(q, load(0).T, config) * refs.scales[0]
        if config.soft_cap:
            scores = _cap(scores, refs, config)
        if config.alibi:
            distance = key_position[None, :] - position[:, None]
            scores += slopes[:, None] * distance.astype(jnp.float32)
        if masked:
            seen = key_position[None, :] <= position[:, None]
            if config.window:
                seen &= key_position[None, :] >= _first_visible(position, window)[:, None]
            scores = jnp.where(seen & visible[None, :], scores, _HIDDEN)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
        keep = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - new_maximum[:, None])
        total = total * keep + jnp.sum(weights, axis=1)
        values = load(1)
        output = output * keep[:, None] + _dot(weights.astype(values.dtype), values, config)
        return output, new_maximum, total

    state = (
        jnp.zeros((config.rows, config.padded_dim), jnp.float32),
        jnp.full((config.rows,), _FLOOR, jnp.float32),
        jnp.zeros((config.rows,), jnp.float32),
    )
    state = lax.fori_loop(inner, outer, partial(tile, masked=False), state)
    before = inner - begin

    def edge_tile(i, state):
        return tile(jnp.where(i < before, begin + i, outer + i - before), state, masked=True)

    return lax.fori_loop(0, before + end - outer, edge_tile, state)


def _logarithm(maximum, total):
    """log2 of a softmax sum that is > 0, from its maximum and the sum relative to it."""
    return maximum + jnp.log(total) * _LOG2_E


def _ragged_kernel(refs: Operands, tiles, out_ref, lse_ref=None, *, config: Config):
    tile, head = pl.program_id(0), pl.program_id(1)
    kv_head, chunk = _div(head, config.chunks), _rem(head, config.chunks)
    num_tokens = tiles[2, tile]

    @pl.when(num_tokens > 0)
    def _():
        first_token = tiles[1, tile]
        span = Span(tiles[0, tile], tiles[3, tile], num_tokens)
        rows = _tile_rows(kv_head, chunk, num_tokens, config)
        one = jnp.int32(1)
        output, maximum, total = _attend(
            refs, first_token, span, kv_head, rows, jnp.int32(0), one, config
        )
        sees_keys = total > 0
        if config.sinks:
            sink = plt.load(refs.sinks.at[rows.head], mask=rows.live, other=_HIDDEN)
            new_maximum = jnp.maximum(maximum, sink)
            keep = jnp.exp2(maximum - new_maximum)
            total = total * keep + jnp.exp2(sink - new_maximum)
            output, maximum = output * keep[:, None], new_maximum
        total = jnp.where(sees_keys, total, 1.0)
        output = output / total[:, None]
        dims = jnp.arange(config.padded_dim, dtype=jnp.int32)
        token = first_token + rows.token
        plt.store(
            out_ref.at[token[:, None], rows.head[:, None], dims[None, :]],
            output.astype(out_ref.dtype),
            mask=rows.live[:, None] & (dims < config.head_dim)[None, :],
        )
        if lse_ref is not None:
            lse = jnp.where(sees_keys, _logarithm(maximum, total) * _LN_2, -jnp.inf)
            plt.store(lse_ref.at[token, rows.head], lse, mask=rows.live)


def _decode_kernel(refs: Operands, items, out_ref, lse_ref, *, config: Config):
    item, head = pl.program_id(0), pl.program_id(1)
    kv_head, chunk = _div(head, config.chunks), _rem(head, config.chunks)
    num_tokens = items[2, item]

    @pl.when(num_tokens > 0)
    def _():
        span = Span(items[0, item], items[3, item], num_tokens)
        rows = _tile_rows(kv_head, chunk, num_tokens, config)
        output, maximum, total = _attend(
            refs, items[1, item], span, kv_head, rows, items[4, item], items[5, item], config
        )
        sees_keys = total > 0
        total = jnp.where(sees_keys, total, 1.0)
        lse = jnp.where(sees_keys, _logarithm(maximum, total), _HIDDEN)
        dims = jnp.arange(config.padded_dim, dtype=jnp.int32)
        plt.store(
            out_ref.at[item, rows.token[:, None], rows.head[:, None], dims[None, :]],
            output / total[:, None],
            mask=rows.live[:, None] & (dims < config.head_dim)[None, :],
        )
        plt.store(lse_ref.at[item, rows.token, rows.head], lse, mask=rows.live)


def _merge_kernel(merged, parts_ref, lses_ref, sinks_ref, *refs, config: Config):
    # The outputs are aliased to the inputs before them, and only some of their rows written.
    out_ref, lse_ref = (refs[1], None) if len(refs) == 2 else refs[2:]
    row, head = pl.program_id(0), pl.program_id(1)
    num_parts = merged[3, row]

    @pl.when(num_parts > 0)
    def _():
        token, within, first = merged[0, row], merged[1, row], merged[2, row]
        dims = jnp.arange(config.padded_dim, dtype=jnp.int32)
        is_dim = dims < config.head_dim
        lanes = jnp.arange(_MERGED_AT_ONCE, dtype=jnp.int32)

        def step(i, state):
            output, maximum, total = state
            part = i * _MERGED_AT_ONCE + lanes
            live = part < num_parts
            item = first + part
            lse = plt.load(lses_ref.at[item, within, head], mask=live, other=_HIDDEN)
            out = plt.load(
                parts_ref.at[item[:, None], within, head, dims[None, :]],
                mask=live[:, None] & is_dim[None, :],
                other=0.0,
            )
            new_maximum = jnp.maximum(maximum, jnp.max(lse, axis=0))
            keep = jnp.exp2(maximum - new_maximum)
            weights = jnp.exp2(lse - new_maximum)
            output = output * keep + jnp.sum(weights[:, None] * out, axis=0)
            return output, new_maximum, total * keep + jnp.sum(weights, axis=0)

        state = jnp.zeros((config.padded_dim,), jnp.float32), jnp.float32(_FLOOR), jnp.float32(0)
        steps = _ceil_div(num_parts, _MERGED_AT_ONCE)
        output, maximum, total = lax.fori_loop(0, steps, step, state)
        sees_keys = total > 0
        if config.sinks:
            new_maximum = jnp.maximum(maximum, sinks_ref[head])
            keep = jnp.exp2(maximum - new_maximum)
            total = total * keep + jnp.exp2(sinks_ref[head] - new_maximum)
            output, maximum = output * keep, new_maximum
        total = jnp.where(sees_keys, total, 1.0)
        output = (output / total).astype(out_ref.dtype)
        plt.store(out_ref.at[token, head, dims], output, mask=is_dim)
        if lse_ref is not None:
            lse = jnp.where(sees_keys, _logarithm(maximum, total) * _LN_2, -jnp.inf)
            lse_ref[token, head] = lse


def paged_attention(call: Attention, target: Target):
    """The public operator's `triton` backend; its arguments are checked there."""
    q, kv_pool, window = call.q, call.kv_pool, call.window
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_pool.shape[3:5]
    num_sequences, max_blocks = call.block_tables.shape
    lse_shape = jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32)
    if 0 in (num_tokens, num_sequences, max_blocks):
        out = jnp.zeros_like(q)
        return (out, jnp.full(lse_shape.shape, -jnp.inf)) if call.return_lse else out

    shape = (call.group, head_dim, block_size, q.dtype)
    features = {
        "window": window is not None,
        "soft_cap": call.soft_cap is not None,
        "alibi": call.alibi_slopes is not None,
        "sinks": call.sinks is not None,
    }
    decode, ragged = tile_configs(*shape, is_hopper=target.is_hopper, **features)
    interpret = target.platform == "cpu"
    if window is not None:
        window = jnp.asarray(window, jnp.int32)
    context_lens = jnp.minimum(call.context_lens, max_blocks * block_size)
    plan = call.plan
    if plan is None:
        plan = plans.make_plan(
            call.query_starts,
            context_lens,
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            dtype=q.dtype,
            num_cores=target.num_cores,
            window=window,
            xp=jnp,
        )
    tiles, items, merged = plan
    expected = (
        (4, plans.num_tiles(num_tokens, num_sequences, ragged.tokens)),
        (4, plans.num_merged(num_tokens, num_sequences, decode.tokens)),
    )
    if (tiles.shape, merged.shape) != expected:
        raise ValueError(
            f"plan must be made for {num_tokens} tokens of {num_sequences} sequences, {num_heads} "
            f"query heads, {num_kv_heads} KV heads and {q.dtype}: tiles and merged must have "
            f"shapes {expected}, got {(tiles.shape, merged.shape)}"
        )

    cap = 1.0 if call.soft_cap is None else call.soft_cap
    factor = jnp.asarray(call.scale, jnp.float32) * (_LOG2_E if call.soft_cap is None else 1 / cap)
    operands = Operands(
        q=q,
        kv_pool=kv_pool,
        layer=jnp.reshape(jnp.asarray(call.layer, jnp.int32), (1,)),
        block_tables=call.block_tables,
        scales=jnp.stack([factor, jnp.asarray(cap, jnp.float32) * np.float32(_LOG2_E)]),
        window=None if window is None else jnp.reshape(window, (1,)),
        slopes=None if call.alibi_slopes is None else call.alibi_slopes * np.float32(_LOG2_E),
        sinks=None if call.sinks is None else call.sinks * np.float32(_LOG2_E),
    )
    out_shapes = (jax.ShapeDtypeStruct(q.shape, q.dtype),) + (lse_shape,) * call.return_lse
    results = pl.pallas_call(
        partial(_ragged_kernel, config=ragged),
        grid=(tiles.shape[1], num_kv_heads * ragged.chunks),
        out_shape=out_shapes,
        compiler_params=ragged.compiler_params,
        interpret=interpret,
        name="paged_attention_ragged",
    )(operands, tiles)

    num_items = items.shape[1]
    parts_shape = (num_items, decode.tokens, num_heads, head_dim)
    parts, lses = pl.pallas_call(
        partial(_decode_kernel, config=decode),
        grid=(num_items, num_kv_heads * decode.chunks),
        out_shape=(
            jax.ShapeDtypeStruct(parts_shape, jnp.float32),
            jax.ShapeDtypeStruct(parts_shape[:3], jnp.float32),
        ),
        compiler_params=decode.compiler_params,
        interpret=interpret,
        name="paged_attention_decode",
    )(operands, items)

    inputs = (merged, parts, lses, operands.sinks)
    first = len(jax.tree.leaves(inputs))
    results = pl.pallas_call(
        partial(_merge_kernel, config=decode),
        grid=(merged.shape[1], num_heads),
        out_shape=out_shapes,
        input_output_aliases={first + i: i for i in range(len(out_shapes))},
        compiler_params=plt.CompilerParams(num_warps=1, num_stages=2),
        interpret=interpret,
        name="paged_attention_merge",
    )(*inputs, *results)
    return tuple(results) if call.return_lse else results[0]
