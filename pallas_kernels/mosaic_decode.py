"""Decode rows of paged attention on Hopper: a split kernel, and the merge of its parts.

A decode row has few query heads for each KV head, and the tensor cores of Hopper (wgmma) want 64
rows. So the operands change places: the keys of a tile are the rows, and the query tokens with
their heads the columns, of which 8 or more do:

    scores^T [keys, rows] = K [keys, D] @ q^T [D, rows]
    output^T [D, rows]   += V^T [D, keys] @ weights^T [keys, rows]

A context is split into parts as a plan says (Flash-Decoding, Dao et al. 2023), each of which leaves
a normalised float32 output and the logarithm of its softmax sum, in base 2. The merge joins them in
a fixed order, so that equal inputs give equal bits. What is not split needs no merge.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_tiles import (
    FLOOR,
    HIDDEN,
    LAYOUT,
    LN_2,
    LOG2_E,
    Config,
    Operands,
    Span,
    ceil_div,
    div,
    filled,
    hide_values,
    kv_scratch,
    load,
    plan_walk,
    rem,
    store,
    swizzled,
    to_scores,
    transposed,
    walk_tiles,
    with_scalars,
)
from pallas_kernels.plan import decode_rows

_BLOCK = 8  # rows that are stored together: those without a query token are left out
_MERGED_AT_ONCE = 8  # parts whose loads are in flight together
_MERGED_DIMS = 64  # of D, in one program of the merge


def decode_config(
    group: int, head_dim: int, block_size: int, *, window: bool, soft_cap: bool, alibi: bool
) -> Config:
    """The tiles of the decode kernel."""
    tile = decode_rows(group)
    # A slot takes 256 * D bytes of a multiprocessor's 228 KB. Two leave room for three programs of
    # D = 128, and for two of 192. Registers allow four programs of D = 64, and there is room for
    # one of 256 whatever it takes.
    stages = 3 if head_dim == 64 or (head_dim == 256 and tile.rows == 16) else 2
    return Config(
        group=group,
        rows=tile.rows,
        tokens=tile.tokens,
        keys=64,
        head_dim=head_dim,
        block_size=block_size,
        stages=stages,
        window=window,
        soft_cap=soft_cap,
        alibi=alibi,
    )


def _columns(row, shape: tuple[int, ...]):
    """A value for each column of a matrix."""
    return lax.broadcast_in_dim(row, shape, [1])


def _product(left, right):
    """A product of matrices in shared memory, in float32."""
    shape = left.shape[0], right.shape[1]

    def multiply(accumulator):
        plgpu.wgmma(accumulator, left, right)
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))


def _whole_tiles(config: Config) -> bool:
    """Whether a token's heads fill whole rows of the tiles that shared memory is laid out in, so
    that bulk copies can write them there."""
    return config.group % 8 == 0


def _decode_scratch(config: Config, dtype) -> dict[str, Any]:
    queries = swizzled((config.rows, config.head_dim), dtype)
    weights = swizzled((config.rows, config.keys), dtype)
    lses = plgpu.SMEM((config.rows,), jnp.float32)
    # There are no weights before the queries are in place, and neither at the end: three programs
    # just fit on a multiprocessor.
    if _whole_tiles(config):
        shared = plgpu.RefUnion(weights, lses)
    else:
        moved = plgpu.SMEM((config.rows, config.head_dim), dtype)
        queries, shared = plgpu.RefUnion(queries, lses), plgpu.RefUnion(weights, moved)
    return {
        "queries": queries,
        "shared": shared,
        "queries_ready": plgpu.Barrier(num_arrivals=config.tokens),
        **kv_scratch(config, dtype),
    }


class _Softmax(NamedTuple):
    """What has been summed of some rows, one a column."""

    output: Any  # [dims, rows], unnormalised
    maximum: Any  # [rows], base 2
    total: Any  # [rows], relative to the maximum

    def rescaled(self, maximum) -> "_Softmax":
        keep = jnp.exp2(self.maximum - maximum)
        return _Softmax(self.output * _columns(keep, self.output.shape), maximum, self.total * keep)

    def finished(self, sinks=None) -> tuple[Any, Any]:
        """The output, and the logarithm in base 2 of the softmax sum: 0 and HIDDEN in rows that
        have seen no key, whatever the sinks."""
        sees_keys = self.total > 0
        output, maximum, total = self
        if sinks is not None:
            output, maximum, total = self.rescaled(jnp.maximum(maximum, sinks))
            total = total + jnp.exp2(sinks - maximum)
        total = jnp.where(sees_keys, total, 1.0)
        lse = jnp.where(sees_keys, maximum + jnp.log(total) * LOG2_E, HIDDEN)
        return output / _columns(total, output.shape), lse


class _Results(NamedTuple):
    """References to the results, of which decode rows are written; lse is None where unwanted."""

    out: Any  # [T, H, D]
    lse: Any  # [T, H], float32

    def write(self, rows, lses, first_token, num_tokens, kv_head, first_dim, group: int) -> None:
        """Writes the live tokens' rows [tokens * group, dims], and with the first of D their lse
        (base 2), from shared memory."""
        plgpu.commit_smem()
        first_head, dims = kv_head * group, pl.ds(first_dim, rows.shape[1])

        def write_token(i, _):
            plgpu.copy_smem_to_gmem(
                rows.at[pl.ds(i * group, group)],
                self.out.at[first_token + i, pl.ds(first_head, group), dims],
            )
            return ()

        def write_lse(i, _):
            lse = lses[i]
            lse = jnp.where(lse > FLOOR, lse * LN_2, -jnp.inf)
            store(self.lse.at[first_token + div(i, group), first_head + rem(i, group)], lse)
            return ()

        lax.fori_loop(0, num_tokens, write_token, ())
        if self.lse is not None:
            num_lses = jnp.where(first_dim == 0, num_tokens * group, 0)
            lax.fori_loop(0, num_lses, write_lse, ())
        plgpu.wait_smem_to_gmem(0)


def _decode_kernel(
    refs: Operands, items, results: _Results, parts_ref, lses_ref, *, config: Config, **scratch
):
    item, kv_head = lax.axis_index("item"), lax.axis_index("kv_head")
    rows, group = config.rows, config.group
    num_tokens = items[2, item]
    if _whole_tiles(config):
        queries = moved = scratch["queries"]  # `moved` is what bulk copies write and read
        weights_tile, lses = scratch["shared"]
    else:
        (queries, lses), (weights_tile, moved) = scratch["queries"], scratch["shared"]

    @pl.when(num_tokens > 0)
    def _():
        first_token, part, parts = items[1, item], items[4, item], items[5, item]
        span = Span(items[0, item], items[3, item], num_tokens)
        scalars = with_scalars(refs)
        window = scalars.window[0] if config.window else None
        walk = plan_walk(span, part, parts, window, config)
        slopes: Any = None
        if config.alibi:
            slopes = load(refs.slopes.at[kv_head], LAYOUT.reduce(0))

        def read_queries():
            # A token's heads lie together, those of the next one do not. Past the last one there
            # are copies of it.
            for i in range(config.tokens):
                token = first_token + jnp.minimum(i, num_tokens - 1)
                plgpu.copy_gmem_to_smem(
                    refs.q.at[token, pl.ds(kv_head * group, group)],
                    moved.at[pl.ds(i * group, group)],
                    scratch["queries_ready"],
                )
            plgpu.barrier_wait(scratch["queries_ready"])
            if moved is not queries:
                transposed(queries)[...] = load(transposed(moved), LAYOUT)
                plgpu.commit_smem()

        def tile(first_key, slot, state, masked: bool):
            output, maximum, total = state
            keys, values = scratch["keys"].at[slot], scratch["values"].at[slot]
            plgpu.barrier_wait(scratch["keys_ready"].at[slot])
            products = _product(keys, transposed(queries))
            scores = to_scores(
                products, scalars, span, window, slopes, first_key, 0, masked, config
            )
            new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=0))
            keep = jnp.exp2(maximum - new_maximum)
            weights = jnp.exp2(scores - _columns(new_maximum, scores.shape))
            # Summed over the keys only once, at the end.
            total = total * _columns(keep, total.shape) + weights
            output = output * _columns(keep, output.shape)
            transposed(weights_tile)[...] = weights.astype(weights_tile.dtype)
            plgpu.barrier_wait(scratch["values_ready"].at[slot])
            if masked:
                hide_values(values, first_key, walk, config)
            else:
                plgpu.commit_smem()
            output += _product(transposed(values), transposed(weights_tile))
            return output, new_maximum, total

        state = (
            filled((config.head_dim, rows), 0.0),
            filled((rows,), FLOOR, LAYOUT.reduce(0)),
            filled((config.keys, rows), 0.0),
        )
        output, maximum, total = walk_tiles(
            scalars, scratch, walk, span.sequence, kv_head, config, tile, state, read_queries
        )
        is_whole = parts == 1
        sinks: Any = None
        if refs.sinks is not None:  # which count once: the merge adds them to several parts
            sinks = load(refs.sinks.at[kv_head], LAYOUT.reduce(0))
            sinks += jnp.where(is_whole, 0.0, HIDDEN)
        output, lse = _Softmax(output, maximum, jnp.sum(total, axis=0)).finished(sinks)

        @pl.when(is_whole)
        def _():
            store(transposed(moved), output.astype(moved.dtype))
            store(lses, lse)
            results.write(moved, lses, first_token, num_tokens, kv_head, 0, group)

        @pl.when(jnp.logical_not(is_whole))
        def _():
            store(lses_ref.at[item, kv_head], lse)
            for i in range(rows // _BLOCK):

                @pl.when(i * _BLOCK < num_tokens * group)
                def _(i=i):
                    block = output[:, i * _BLOCK : (i + 1) * _BLOCK]
                    store(parts_ref.at[item, kv_head, i], block)


def _merge_parts(parts_ref, lses_ref, first_item, num_parts, kv_head, block, dims) -> _Softmax:
    """Joins the parts of one block of rows, some at once so that their loads overlap."""
    rows = pl.ds(block * _BLOCK, _BLOCK)

    def step(i, merged: _Softmax) -> _Softmax:
        lses, outputs = [], []
        for j in range(_MERGED_AT_ONCE):
            part = i * _MERGED_AT_ONCE + j
            item = first_item + jnp.minimum(part, num_parts - 1)
            lse = load(lses_ref.at[item, kv_head, rows], LAYOUT.reduce(0))
            lses.append(lse + jnp.where(part < num_parts, 0.0, HIDDEN))
            outputs.append(load(parts_ref.at[item, kv_head, block, dims], LAYOUT))
        merged = merged.rescaled(reduce(jnp.maximum, lses, merged.maximum))
        output, maximum, total = merged
        for lse, part_output in zip(lses, outputs, strict=True):
            weight = jnp.exp2(lse - maximum)
            output += part_output * _columns(weight, output.shape)
            total += weight
        return _Softmax(output, maximum, total)

    nothing = _Softmax(
        filled((_MERGED_DIMS, _BLOCK), 0.0),
        filled((_BLOCK,), FLOOR, LAYOUT.reduce(0)),
        filled((_BLOCK,), 0.0, LAYOUT.reduce(0)),
    )
    return lax.fori_loop(0, ceil_div(num_parts, _MERGED_AT_ONCE), step, nothing)


def _merge_kernel(
    merged, items, parts_ref, lses_ref, sinks_ref, results: _Results, *, rows, lses, config: Config
):
    row, kv_head = lax.axis_index("row"), lax.axis_index("kv_head")
    first_dim = lax.axis_index("chunk") * _MERGED_DIMS
    dims = pl.ds(first_dim, _MERGED_DIMS)
    num_parts, first_item = merged[3, row], merged[2, row]
    group = config.group

    def merge(first_token, num_tokens, num_blocks: int):
        for block in range(num_blocks):
            of_block = pl.ds(block * _BLOCK, _BLOCK)
            sinks: Any = None
            if sinks_ref is not None:
                sinks = load(sinks_ref.at[kv_head, of_block], LAYOUT.reduce(0))
            softmax = _merge_parts(parts_ref, lses_ref, first_item, num_parts, kv_head, block, dims)
            output, lse = softmax.finished(sinks)
            store(transposed(rows.at[of_block]), output.astype(rows.dtype))
            store(lses.at[of_block], lse)
        results.write(rows, lses, first_token, num_tokens, kv_head, first_dim, group)

    # The first query token of a sequence takes the others along.
    @pl.when((num_parts > 1) & (merged[1, row] == 0))
    def _():
        first_token, num_tokens = items[1, first_item], items[2, first_item]
        fewest, most = -(-group // _BLOCK), config.rows // _BLOCK
        few = num_tokens * group <= fewest * _BLOCK
        pl.when(few)(partial(merge, first_token, num_tokens, fewest))
        if most > fewest:
            pl.when(jnp.logical_not(few))(partial(merge, first_token, num_tokens, most))


def decode_attention(
    refs: Operands, items, merged, out, lse, *, config: Config, interpret: Any = None
):
    """Attention of the decode rows.

    Args:
        refs: The operands.
        items: int32 [6, items], as in `plan.Plan`.
        merged: int32 [4, rows], as in `plan.Plan`.
        out: A reference to the output [T, H, D]; the decode rows are written.
        lse: A reference to the logarithms of the softmax sums, float32 [T, H], or None.
        config: What `decode_config` returns.
        interpret: None to compile the kernels, else plgpu.InterpretGPUParams.
    """
    num_kv_heads, num_items = refs.kv_pool.shape[3], items.shape[1]
    rows, head_dim, dtype = config.rows, config.head_dim, refs.q.dtype
    results = _Results(out, lse)
    launch = {
        "compiler_params": plgpu.CompilerParams(approx_math=True),
        "interpret": interpret,
    }
    parts, lses = plgpu.kernel(
        partial(_decode_kernel, config=config),
        out_type=(
            jax.ShapeDtypeStruct(
                (num_items, num_kv_heads, rows // _BLOCK, head_dim, _BLOCK), jnp.float32
            ),
            jax.ShapeDtypeStruct((num_items, num_kv_heads, rows), jnp.float32),
        ),
        scratch_types=_decode_scratch(config, dtype),
        grid=(num_items, num_kv_heads),
        grid_names=("item", "kv_head"),
        kernel_name="paged_attention_decode",
        **launch,
    )(refs, items, results)
    plgpu.kernel(
        partial(_merge_kernel, config=config),
        scratch_types={
            "rows": plgpu.SMEM((rows, _MERGED_DIMS), dtype),
            "lses": plgpu.SMEM((rows,), jnp.float32),
        },
        grid=(merged.shape[1], num_kv_heads, head_dim // _MERGED_DIMS),
        grid_names=("row", "kv_head", "chunk"),
        kernel_name="paged_attention_merge",
        **launch,
    )(merged, items, parts, lses, refs.sinks, results)
