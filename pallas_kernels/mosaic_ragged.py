"""Paged attention of chunks of prompts in Pallas/Mosaic GPU, for Hopper (FlashAttention-2, Dao
2023).

A program has a tile of 64 rows, which are what `wgmma` takes: as many query tokens of one sequence
as fit, each with all the query heads that share a KV head. Bulk copies bring the queries, and pages
of keys and values (`mosaic_tiles`); scores and outputs stay in registers. Tiles are those of the
plan: all rows of queries that are no decode rows, padding included.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_tiles import (
    FLOOR,
    LAYOUT,
    LN_2,
    LOG2_E,
    Config,
    Operands,
    Span,
    filled,
    hide_values,
    kv_scratch,
    load,
    plan_walk,
    store,
    swizzled,
    to_scores,
    transposed,
    walk_tiles,
    with_scalars,
)
from pallas_kernels.plan import ragged_rows

ROWS = LAYOUT.reduce(1)  # of arrays with one number a row of a tile
# Mosaic takes minutes to find accesses to wider rows that make no bank conflicts.
_MAX_OPTIMIZED_DIM = 192


def ragged_config(
    group: int, head_dim: int, block_size: int, *, window: bool, soft_cap: bool, alibi: bool
) -> Config:
    """Sizes of the ragged kernel's tiles; the features are what is in use."""
    tile = ragged_rows(group, False)
    return Config(
        group=group,
        rows=tile.rows,
        tokens=tile.tokens,
        keys=64,
        head_dim=head_dim,
        block_size=block_size,
        stages=2,
        window=window,
        soft_cap=soft_cap,
        alibi=alibi,
    )


def ragged_attention(
    operands: Operands,
    tiles,
    *,
    config: Config,
    return_lse: bool,
    interpret: Any = None,
    weights_in_registers: bool | None = None,
):
    """Attention of the rows of `tiles`, in one launch.

    Args:
        operands: The inputs; the pool as `pool_pages` makes it with `config`.
        tiles: `Plan.tiles`, [4, tiles] int32.
        config: As of `ragged_config`.
        return_lse: Also return the logarithms of the softmax sums.
        interpret: Parameters to interpret the kernel with; None to compile it.
        weights_in_registers: Whether softmax weights meet the values from registers, and not by
            way of shared memory. Default: when compiled, as JAX's interpreter cannot.

    Returns:
        The output [T, H, D], in the dtype of the queries, and lse [T, H] float32 or None. Rows
        that see no key are 0, with lse -inf. Rows of no tile are not written.
    """
    num_tokens, num_heads, head_dim = operands.q.shape
    num_kv_heads, num_tiles = operands.kv_pool.shape[3], tiles.shape[1]
    dtype = operands.q.dtype
    if weights_in_registers is None:
        weights_in_registers = interpret is None
    shape = (num_tokens, num_kv_heads, config.group, head_dim)
    operands = operands._replace(q=operands.q.reshape(shape))
    out_types = [jax.ShapeDtypeStruct(shape, dtype)]
    if return_lse:
        out_types.append(jax.ShapeDtypeStruct((num_tiles, num_kv_heads, config.rows), jnp.float32))

    tile_shape = (config.rows, head_dim)
    scratch = kv_scratch(config, dtype) | {
        "queries": swizzled(tile_shape, dtype),
        "queries_ready": plgpu.Barrier(num_arrivals=_num_copies(config)),
    }
    if not _whole_tiles(config):
        scratch["staged"] = plgpu.SMEM(tile_shape, dtype)
    if not weights_in_registers:
        scratch["weights"] = swizzled((config.rows, config.keys), dtype)

    leaves, structure = jax.tree.flatten((operands, tiles))
    accumulate = _accumulate if interpret is None else _accumulate_interpreted

    def body(*refs, **scratch):
        operands, tiles = jax.tree.unflatten(structure, refs[: len(leaves)])
        results = refs[len(leaves) :]
        _ragged_kernel(
            operands, tiles, *results, scratch=scratch, config=config, accumulate=accumulate
        )

    out, *lses = plgpu.kernel(
        body,
        out_type=out_types,
        scratch_types=scratch,
        # The last tiles of a prompt see the most keys: they start first.
        grid=(num_tiles, num_kv_heads),
        grid_names=("tile_from_last", "kv_head"),
        kernel_name="paged_attention_ragged",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(*leaves)
    out = out.reshape(num_tokens, num_heads, head_dim)
    if not return_lse:
        return out, None
    return out, _rows_of_tiles(lses[0], tiles, num_tokens, config)


def _whole_tiles(config: Config) -> bool:
    """Whether a token's heads fill whole rows of the tiles that shared memory is laid out in, so
    that bulk copies can write them there."""
    return config.group % 8 == 0


def _rows_of_tiles(values, tiles, num_tokens: int, config: Config):
    """[tiles, K, rows] as [T, H], with -inf where no tile has a row."""
    num_tiles, num_kv_heads, _ = values.shape
    values = values[..., : config.tokens * config.group]
    values = values.reshape(num_tiles, num_kv_heads, config.tokens, config.group)
    values = jnp.moveaxis(values, 2, 1)  # [tiles, tokens, K, G]
    within = jnp.arange(config.tokens, dtype=jnp.int32)
    token = jnp.where(within < tiles[2][:, None], tiles[1][:, None] + within, num_tokens)
    rows = jnp.full((num_tokens, num_kv_heads, config.group), -jnp.inf, jnp.float32)
    rows = rows.at[token].set(values, mode="drop", unique_indices=False)
    return rows.reshape(num_tokens, num_kv_heads * config.group)


def _ragged_kernel(refs: Operands, tiles, *results, scratch, config: Config, accumulate: Callable):
    index = tiles.shape[1] - 1 - lax.axis_index("tile_from_last")
    kv_head = lax.axis_index("kv_head")
    num_tokens = tiles[2, index]

    @pl.when(num_tokens > 0)
    def _():
        first_token = tiles[1, index]
        span = Span(tiles[0, index], tiles[3, index], num_tokens)
        _read_queries(refs.q, first_token, num_tokens, kv_head, scratch, config)
        output, lse = _attend(refs, span, kv_head, scratch, config, accumulate)
        out_ref, *lse_refs = results
        for lse_ref in lse_refs:
            store(lse_ref.at[index, kv_head], lse)
        _write_outputs(output, out_ref, first_token, num_tokens, kv_head, scratch, config)


def _num_copies(config: Config) -> int:
    """How many copies `_copy_tokens` makes at most."""
    return config.tokens.bit_length() if config.group == 1 else config.tokens


def _copy_tokens(
    num_tokens, config: Config, copy: Callable, skip: Callable[[], None] | None = None
) -> None:
    """Calls `copy(token, count)` for pieces of a tile's live tokens, and `skip` for each piece that
    is not there.

    The heads of a token are contiguous, but not those of the next one: a piece is one token,
    unless it has one head. Then it is a power of two.
    """
    if config.group == 1:
        for power in reversed(range(_num_copies(config))):
            count = 2**power
            exists = (num_tokens & count) != 0
            pl.when(exists)(partial(copy, num_tokens & -(2 * count), count))
            if skip is not None:
                pl.when(~exists)(skip)
        return

    def each(call: Callable, begin, end) -> None:
        def step(token, state):
            call(token)
            return state

        lax.fori_loop(begin, end, step, ())

    each(lambda token: copy(token, 1), 0, num_tokens)
    if skip is not None:
        each(lambda token: skip(), num_tokens, config.tokens)


def _heads_of(ref, first_token, kv_head, token, count: int, config: Config):
    """The rows of some tokens in [T, K, G, D], as [rows, D]."""
    token = first_token + token
    return ref.at[pl.ds(token, count), kv_head, 0] if config.group == 1 else ref.at[token, kv_head]


def _rows_of(ref, token, count: int, config: Config):
    """The rows of some tokens in a tile."""
    return ref.at[pl.ds(token * config.group, count * config.group)]


def _read_queries(q_ref, first_token, num_tokens, kv_head, scratch, config: Config) -> None:
    """Begins to read the queries of a tile."""
    target = scratch["queries" if _whole_tiles(config) else "staged"]
    ready = scratch["queries_ready"]

    def copy(token, count: int) -> None:
        source = _heads_of(q_ref, first_token, kv_head, token, count, config)
        plgpu.copy_gmem_to_smem(source, _rows_of(target, token, count, config), ready)

    _copy_tokens(num_tokens, config, copy, partial(plgpu.barrier_arrive, ready))


def _await_queries(scratch, config: Config) -> None:
    plgpu.barrier_wait(scratch["queries_ready"])
    if _whole_tiles(config):
        return
    for dim in range(0, config.head_dim, 64):  # all at once would take too many registers
        part = pl.ds(0, config.rows), pl.ds(dim, 64)
        scratch["queries"].at[part][...] = load(scratch["staged"].at[part], LAYOUT)
    plgpu.commit_smem()


def _write_outputs(output, out_ref, first_token, num_tokens, kv_head, scratch, config: Config):
    """Writes the live tokens alone: the next rows belong to other tiles."""
    source = scratch["queries" if _whole_tiles(config) else "staged"]  # both are free by now
    output = output.astype(out_ref.dtype)
    if config.head_dim <= _MAX_OPTIMIZED_DIM:
        source[...] = output
    else:
        store(source, output)
    plgpu.commit_smem()

    def copy(token, count: int) -> None:
        target = _heads_of(out_ref, first_token, kv_head, token, count, config)
        plgpu.copy_smem_to_gmem(_rows_of(source, token, count, config), target)

    _copy_tokens(num_tokens, config, copy)
    plgpu.wait_smem_to_gmem(0)


def _attend(refs: Operands, span: Span, kv_head, scratch, config: Config, accumulate: Callable):
    """Attention of one tile of queries.

    Returns:
        The output [rows, D] and the logarithm of the softmax sum [rows], float32.
    """
    refs = with_scalars(refs)
    window = refs.window[0] if config.window else None
    walk = plan_walk(span, jnp.int32(0), jnp.int32(1), window, config)
    slopes = load(refs.slopes.at[kv_head], ROWS) if config.alibi else None
    dtype = scratch["queries"].dtype

    def over_rows(values, shape):
        return lax.broadcast_in_dim(values, shape, [0])

    def tile(first_key, slot, state, masked: bool):
        output, maximum, total = state
        plgpu.barrier_wait(scratch["keys_ready"].at[slot])
        products = _product(scratch["queries"], transposed(scratch["keys"].at[slot]))
        scores = to_scores(products, refs, span, window, slopes, first_key, 1, masked, config)
        new_maximum = jnp.maximum(maximum, scores.max(axis=1))
        keep = jnp.exp2(maximum - new_maximum)
        weights = jnp.exp2(scores - over_rows(new_maximum, scores.shape))
        total = total * keep + weights.sum(axis=1)
        weights = weights.astype(dtype)
        if "weights" in scratch:
            scratch["weights"][...] = weights
            plgpu.commit_smem()
            weights = scratch["weights"]
        values = scratch["values"].at[slot]
        plgpu.barrier_wait(scratch["values_ready"].at[slot])
        if masked:
            outside = (first_key + config.keys - 1 > walk.last) | (first_key < walk.low)
            pl.when(outside)(partial(hide_values, values, first_key, walk, config))
        output = accumulate(output * over_rows(keep, output.shape), weights, values)
        return output, new_maximum, total

    state = (
        filled((config.rows, config.head_dim), 0.0),
        filled((config.rows,), FLOOR, ROWS),
        filled((config.rows,), 0.0, ROWS),
    )
    output, maximum, total = walk_tiles(
        refs, scratch, walk, span.sequence, kv_head, config, tile, state,
        meanwhile=partial(_await_queries, scratch, config),
    )  # fmt: skip
    sees_keys = total > 0
    if refs.sinks is not None:
        sinks = load(refs.sinks.at[kv_head], ROWS)
        new_maximum = jnp.maximum(maximum, sinks)
        keep = jnp.exp2(maximum - new_maximum)
        total = total * keep + jnp.exp2(sinks - new_maximum)
        output, maximum = output * over_rows(keep, output.shape), new_maximum
    total = jnp.where(sees_keys, total, 1.0)
    lse = jnp.where(sees_keys, (maximum + jnp.log(total) * LOG2_E) * LN_2, -jnp.inf)
    return output * over_rows(1.0 / total, output.shape), lse


def _product(a, b):
    """a @ b in float32 by the tensor cores; `b` lies in shared memory, `a` there or in
    registers."""

    def multiply(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _accumulate(output, weights, values):
    """output + weights @ values, in the registers of `output`."""

    def add(accumulator):
        plgpu.wgmma(accumulator, weights, values)

    return pl.run_state(add)(plgpu.ACC.init(output))


def _accumulate_interpreted(output, weights, values):
    """The same, as JAX's interpreter knows no accumulator with a first value."""
    return output + _product(weights, values)
