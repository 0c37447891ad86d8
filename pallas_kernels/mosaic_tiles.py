"""What the Mosaic attention kernels share: tile sizes, the pipeline of K/V pages, and scores.

A program walks over tiles of `keys` keys. The Tensor Memory Accelerator (TMA) copies the pages of a
tile from the pool into one of `stages` slots of shared memory; the copies of the tiles after it are
on their way while a tile is used. Page ids are read from the block table a tile before they are
needed, so that no copy waits for them.

Scores are kept in base 2 (`exp2` is one instruction), with log2(e) folded into the scale. Tiles
whose keys all rows see come first, and are not masked; those at the edge of a window and at the
causal edge follow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# The score of a hidden key, and the least maximum of scores: finite, so that differences are never
# NaN, and far enough apart that exp2(HIDDEN - FLOOR) is 0 in a row that sees no key at all.
HIDDEN = -1e30
FLOOR = -1e20
NO_WINDOW = 2**30  # larger than any context, small enough to subtract from a position
LAYOUT = plgpu.Layout.WGMMA
_VERSIONED: Any = plgpu  # for names that differ between the versions of JAX
_TILE_ROWS = 8  # of shared memory's layout; a page has at least as many


class Config(NamedTuple):
    """What is static in a kernel."""

    group: int  # query heads that share a KV head
    rows: int  # query tokens * group, padded
    tokens: int  # query tokens in a tile
    keys: int  # keys in a tile
    head_dim: int
    block_size: int
    stages: int  # slots of shared memory for tiles of keys and values
    window: bool
    soft_cap: bool
    alibi: bool

    @property
    def page(self) -> int:
        """Keys in one copy: a block, or a part of one that is larger than a tile."""
        return min(self.block_size, self.keys)

    @property
    def copies(self) -> int:
        """Copies that bring a tile's keys, and as many for its values."""
        return self.keys // self.page


class Operands(NamedTuple):
    """The inputs of the attention kernels; None where a feature is off."""

    q: Any  # [T, H, D]
    kv_pool: Any  # [L, N, 2, K, B / page, page, D]
    layer: Any  # [1]
    block_tables: Any  # [S, M]
    scales: Any  # [2]: factor on the products; soft_cap in base 2
    window: Any  # [1]: in [1, NO_WINDOW]
    slopes: Any  # [K, rows], in base 2: of each row of a tile
    sinks: Any  # [K, rows], in base 2


class Span(NamedTuple):
    """A tile of query tokens of one sequence: scalars."""

    sequence: Any
    position: Any  # of the first query token; negative if it sees no key
    num_tokens: Any  # live query tokens


class Walk(NamedTuple):
    """The tiles of keys that a program walks over, begin to end; of those in [inner, outer), each
    row sees all keys. Pages are counted in the block table. All are scalars."""

    begin: Any
    inner: Any
    outer: Any
    end: Any
    low: Any  # the first key that any row sees
    last: Any  # the last one

    @property
    def steps(self):
        return self.end - self.begin

    def tile(self, step):
        """The tile of a step: those in [inner, outer) come first."""
        unmasked, before = self.outer - self.inner, self.inner - self.begin
        edge = step - unmasked
        edge_tile = jnp.where(edge < before, self.begin + edge, self.outer + edge - before)
        return jnp.where(edge < 0, self.inner + step, edge_tile)


def div(x, size: int):
    """x // size for x >= 0; lax.div spares the corrections for negative numbers."""
    return lax.div(x, lax.full_like(x, size))


def rem(x, size: int):
    """x % size for x >= 0."""
    return lax.rem(x, lax.full_like(x, size))


def ceil_div(x, size: int):
    """ceil(x / size) for x >= 0."""
    return div(x + (size - 1), size)


def transposed(ref):
    """A view of a matrix in memory with its axes exchanged."""
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return _VERSIONED.transpose_ref(ref, (1, 0))


def load(ref, layout=None):
    """Reads an array; `optimized=False` allows layouts that take more than whole lines."""
    return _VERSIONED.load(ref, layout=layout, optimized=False)


def store(ref, value) -> None:
    """Writes an array. JAX 0.12 wants to be told that a store need not move whole lines; 0.11 has
    no function to say so."""
    if hasattr(plgpu, "store"):
        _VERSIONED.store(ref, value, optimized=False)
    else:
        ref[...] = value


def interpret_params() -> Any:
    """Parameters to interpret a kernel with, where there is no GPU."""
    return _VERSIONED.InterpretGPUParams()


def filled(shape: tuple[int, ...], value: float, layout=LAYOUT):
    """An array of one float32 value in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def swizzled(shape: tuple[int, ...], dtype):
    """Shared memory for matrices [..., rows, columns] that the tensor cores read."""
    transforms = (plgpu.TilingTransform((_TILE_ROWS, 64)), plgpu.SwizzleTransform(128))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def pool_pages(kv_pool, config: Config):
    """The pool with its blocks split into pages: [L, N, 2, K, B / page, page, D]."""
    *outer, block_size, head_dim = kv_pool.shape
    return kv_pool.reshape(*outer, block_size // config.page, config.page, head_dim)


def kv_scratch(config: Config, dtype) -> dict[str, Any]:
    """The scratch that `walk_tiles` wants, by name: slots of keys and values, and a barrier for
    each."""
    tiles = (config.stages, config.keys, config.head_dim)

    def barriers():
        return plgpu.Barrier(num_arrivals=config.copies, num_barriers=config.stages)

    return {
        "keys": swizzled(tiles, dtype),
        "values": swizzled(tiles, dtype),
        "keys_ready": barriers(),
        "values_ready": barriers(),
    }


def with_scalars(refs: Operands) -> Operands:
    """The operands with their scalars read, as tuples, so that no loop waits for them."""
    window = None if refs.window is None else (refs.window[0],)
    return refs._replace(
        layer=(refs.layer[0],), scales=(refs.scales[0], refs.scales[1]), window=window
    )


def first_visible(position, window):
    """The first key that a query at this position (scalar or array) sees."""
    if window is None:
        return jnp.int32(0)
    return jnp.maximum(position - (window - 1), 0)


def plan_walk(span: Span, part, parts, window, config: Config) -> Walk:
    """Part `part` of `parts` of the keys that a tile of queries sees; `window` is a scalar or
    None."""
    keys = config.keys
    last = span.position + span.num_tokens - 1
    low = first_visible(span.position, window)
    first_tile = div(low, keys)
    num_tiles = jnp.maximum(ceil_div(jnp.maximum(last + 1, 0), keys) - first_tile, 0)
    tiles_a_part = lax.div(num_tiles + parts - 1, parts)
    begin = jnp.minimum(part * tiles_a_part, num_tiles) + first_tile
    end = jnp.minimum((part + 1) * tiles_a_part, num_tiles) + first_tile
    all_see = ceil_div(first_visible(last, window), keys)
    inner = jnp.minimum(jnp.maximum(all_see, begin), end)
    outer = div(jnp.maximum(span.position + 1, 0), keys)
    outer = jnp.minimum(jnp.maximum(outer, inner), end)
    return Walk(begin, inner, outer, end, low, last)


def walk_tiles(
    refs: Operands,
    scratch: dict[str, Any],
    walk: Walk,
    sequence,
    kv_head,
    config: Config,
    tile: Callable,
    state,
    meanwhile: Callable[[], None] | None = None,
):
    """Runs `tile` over the tiles of a walk, with the copies of later ones on their way.

    Args:
        refs: The operands, as of `with_scalars`.
        scratch: References to what `kv_scratch` describes.
        walk: The tiles.
        sequence: Whose block table is used.
        kv_head: The KV head.
        config: Sizes.
        tile: `tile(first_key, slot, state, masked) -> state`. It waits for `keys_ready` and
            `values_ready` at `slot`, and is done with both when it returns. `masked` is static.
        state: The first state, a pytree of arrays.
        meanwhile: What to do before the first tile, after its copy has begun.

    Returns:
        The last state.
    """
    layer = refs.layer[0]
    stages, steps = config.stages, walk.steps
    # What a window hides may be in no block any more, and so may what is past the end.
    first_block = div(walk.low, config.block_size)
    last_block = jnp.maximum(div(jnp.maximum(walk.last, 0), config.block_size), first_block)

    def read_blocks(step):
        first = div(walk.tile(step) * config.keys, config.block_size)
        return tuple(
            refs.block_tables[sequence, jnp.clip(first + i, first_block, last_block)]
            for i in range(config.copies)
        )

    def copy(step, blocks) -> None:
        slot = rem(step, stages)
        page = div(rem(walk.tile(step) * config.keys, config.block_size), config.page)
        for which, name in enumerate(("keys", "values")):
            for i, block in enumerate(blocks):
                plgpu.copy_gmem_to_smem(
                    refs.kv_pool.at[layer, block, which, kv_head, page],
                    scratch[name].at[slot, pl.ds(i * config.page, config.page)],
                    scratch[f"{name}_ready"].at[slot],
                )

    first_steps = [jnp.int32(step) for step in range(stages)]
    for step, blocks in [(step, read_blocks(step)) for step in first_steps]:
        pl.when(step < steps)(partial(copy, step, blocks))
    if meanwhile is not None:
        meanwhile()

    def advance(step, carry, masked: bool):
        state, blocks = carry
        state = tile(walk.tile(step) * config.keys, rem(step, stages), state, masked)
        ahead = step + stages
        pl.when(ahead < steps)(partial(copy, ahead, blocks))
        return state, read_blocks(ahead + 1)

    carry = state, read_blocks(jnp.int32(stages))
    unmasked = walk.outer - walk.inner
    carry = lax.fori_loop(0, unmasked, partial(advance, masked=False), carry)
    carry = lax.fori_loop(unmasked, steps, partial(advance, masked=True), carry)
    return carry[0]


def hide_values(values, first_key, walk: Walk, config: Config) -> None:
    """Zeros in a tile of values [keys, D] where no row looks: a weight of 0 would not do, as
    0 * NaN is NaN."""
    block = (64, 64)  # at once: more would take many registers
    for start in range(0, config.keys, 64):
        key = plgpu.broadcasted_iota(jnp.int32, block, 0, layout=LAYOUT) + (first_key + start)
        seen = (key >= walk.low) & (key <= walk.last)
        for dim in range(0, config.head_dim, 64):
            part = values.at[pl.ds(start, 64), pl.ds(dim, 64)]
            old = load(part, LAYOUT)
            part[...] = jnp.where(seen, old, jnp.zeros_like(old))
    plgpu.commit_smem()


def to_scores(
    products, refs: Operands, span: Span, window, slopes, first_key, key_axis: int, masked, config
):
    """Scores in base 2 of a tile.

    Args:
        products: float32, of queries and keys; keys lie along `key_axis`, rows along the other.
        refs: The operands, as of `with_scalars`.
        span: The query tokens.
        window: A scalar or None.
        slopes: [rows], in base 2, or None.
        first_key: The position of the tile's first key.
        key_axis: 0 or 1.
        masked: Whether some row may not see some key; static.
        config: Sizes.
    """
    shape = products.shape

    def iota(axis: int):
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=LAYOUT)

    scores = products * refs.scales[0]
    if config.soft_cap:
        # cap * tanh(x / cap), where the scores come divided by the cap. This is cheaper than tanh,
        # with an error of 1e-7; exp2 may overflow to infinity, which gives 1 as it should.
        scores = 1.0 - 2.0 / (jnp.exp2(scores * (2 * LOG2_E)) + 1.0)
        scores = scores * refs.scales[1]
    if not (masked or config.alibi):
        return scores
    key = iota(key_axis) + first_key
    position = div(iota(1 - key_axis), config.group) + span.position
    if config.alibi:
        slope = lax.broadcast_in_dim(slopes, shape, [1 - key_axis])
        scores = scores + slope * (key - position).astype(jnp.float32)
    if masked:
        seen = key <= position
        if window is not None:
            seen &= key > position - window
        scores = jnp.where(seen, scores, HIDDEN)
    return scores
