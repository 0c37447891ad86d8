"""The inner loop of the Triton attention kernels: one tile of queries walks over tiles of keys.

The softmax is a running one (FlashAttention-2, Dao 2023). Scores are kept in base 2 (`exp2` is one
instruction), with log2(e) folded into the scale. Keys that every row of a tile sees are walked in a
loop without masks; the rest, at the causal edge and at the edge of a window, in a second one.
Masked loads replace what is not visible by zeros, so that NaN in unused slots meets neither the
scores nor, as 0 * NaN, the outputs.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
from jax import lax

from pallas_kernels.triton_tiles import Config

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# The score of a hidden key, and the least maximum of scores: finite, so that differences are never
# NaN, and far enough apart that exp2(HIDDEN - FLOOR) is 0 in a row that sees no key at all.
HIDDEN = -1e30
FLOOR = -1e20


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


def div(x, size: int):
    """x // size for x >= 0; lax.div spares the corrections for negative numbers."""
    return lax.div(x, jnp.full_like(x, size))


def rem(x, size: int):
    return lax.rem(x, jnp.full_like(x, size))


def ceil_div(x, size: int):
    return div(x + (size - 1), size)


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
        capped = 1.0 - 2.0 / (jnp.exp2(scores * (2 * LOG2_E)) + 1.0)
    return capped * refs.scales[1]


class Rows(NamedTuple):
    """The rows of a tile: row r is query token r // heads with query head r % heads."""

    token: Any  # [M], within the tile
    head: Any  # [M], of all query heads
    live: Any  # [M]


def tile_rows(kv_head, chunk, num_tokens, config: Config) -> Rows:
    row = jnp.arange(config.rows, dtype=jnp.int32)
    token, head = div(row, config.heads), rem(row, config.heads)
    live = token < jnp.minimum(num_tokens, config.tokens)
    if config.group % config.heads:
        live &= chunk * config.heads + head < config.group
    return Rows(token, kv_head * config.group + chunk * config.heads + head, live)


def attend(refs: Operands, first_token, span: Span, kv_head, rows: Rows, part, parts, config):
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
    first_tile = div(low, keys)
    num_tiles = jnp.maximum(ceil_div(jnp.maximum(last + 1, 0), keys) - first_tile, 0)
    tiles_a_part = lax.div(num_tiles + parts - 1, parts)
    begin = jnp.minimum(part * tiles_a_part, num_tiles) + first_tile
    end = jnp.minimum((part + 1) * tiles_a_part, num_tiles) + first_tile
    inner = _clip(ceil_div(_first_visible(last, window), keys), begin, end)
    outer = _clip(div(jnp.maximum(span.position + 1, 0), keys), inner, end)

    def tile(index, state, masked: bool):
        output, maximum, total = state
        key_position = index * keys + columns
        visible: Any = None
        if masked:
            visible = (key_position >= low) & (key_position <= last)
        if size % keys == 0:
            # A tile lies in one block, and each tile that is walked has a visible key.
            block = refs.block_tables[span.sequence, div(index * keys, size)]
            offset = rem(index * keys, size) + columns[:, None]
        else:
            entry = refs.block_tables.at[span.sequence, div(key_position, size)]
            if masked:
                block = plt.load(entry, mask=visible, other=0)[:, None]
            else:
                block = plt.load(entry)[:, None]
            offset = rem(key_position, size)[:, None]

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
            scores = jnp.where(seen & visible[None, :], scores, HIDDEN)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=1))
        keep = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - new_maximum[:, None])
        total = total * keep + jnp.sum(weights, axis=1)
        values = load(1)
        output = output * keep[:, None] + _dot(weights.astype(values.dtype), values, config)
        return output, new_maximum, total

    state = (
        jnp.zeros((config.rows, config.padded_dim), jnp.float32),
        jnp.full((config.rows,), FLOOR, jnp.float32),
        jnp.zeros((config.rows,), jnp.float32),
    )
    state = lax.fori_loop(inner, outer, partial(tile, masked=False), state)
    before = inner - begin

    def edge_tile(i, state):
        return tile(jnp.where(i < before, begin + i, outer + i - before), state, masked=True)

    return lax.fori_loop(0, before + end - outer, edge_tile, state)


def logarithm(maximum, total):
    """log2 of a softmax sum that is > 0, from its maximum and the sum relative to it."""
    return maximum + jnp.log(total) * LOG2_E
