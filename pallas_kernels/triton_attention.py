"""Paged attention in Pallas/Triton, for NVIDIA GPUs from Ampere on.

Three launches, over the work lists of a plan (`plan.py`):

  ragged   Tiles of queries of one sequence and KV head walk over their keys (`triton_walk.py`). A
           tile packs as many query tokens as fit, each with all the query heads that share the KV
           head. It takes any row, and writes zeros to rows that see no key.
  decode   Rows of few query tokens, whose tile is small: their keys are split among several
           programs as `plan` says (Flash-Decoding), each of which writes a normalised float32
           output and the logarithm of its softmax sum.
  merge    Joins the parts of the decode rows (`triton_merge.py`).

Which rows are decode rows is decided with the plan, from values: those with a context and with no
more query tokens than a decode tile has room for. So nothing compiles anew when the mix changes.
"""

from functools import partial
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.triton as plt
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import Attention, plan_of_call
from pallas_kernels.devices import Target
from pallas_kernels.triton_merge import merge_parts
from pallas_kernels.triton_tiles import Config, tile_configs
from pallas_kernels.triton_walk import (
    HIDDEN,
    LN_2,
    LOG2_E,
    Operands,
    Span,
    attend,
    div,
    logarithm,
    rem,
    tile_rows,
)


def _ragged_kernel(refs: Operands, tiles, out_ref, lse_ref=None, *, config: Config):
    tile, head = pl.program_id(0), pl.program_id(1)
    kv_head, chunk = div(head, config.chunks), rem(head, config.chunks)
    num_tokens = tiles[2, tile]

    @pl.when(num_tokens > 0)
    def _():
        first_token = tiles[1, tile]
        span = Span(tiles[0, tile], tiles[3, tile], num_tokens)
        rows = tile_rows(kv_head, chunk, num_tokens, config)
        one = jnp.int32(1)
        output, maximum, total = attend(
            refs, first_token, span, kv_head, rows, jnp.int32(0), one, config
        )
        sees_keys = total > 0
        if config.sinks:
            sink = plt.load(refs.sinks.at[rows.head], mask=rows.live, other=HIDDEN)
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
            lse = jnp.where(sees_keys, logarithm(maximum, total) * LN_2, -jnp.inf)
            plt.store(lse_ref.at[token, rows.head], lse, mask=rows.live)


def _decode_kernel(refs: Operands, items, out_ref, lse_ref, *, config: Config):
    item, head = pl.program_id(0), pl.program_id(1)
    kv_head, chunk = div(head, config.chunks), rem(head, config.chunks)
    num_tokens = items[2, item]

    @pl.when(num_tokens > 0)
    def _():
        span = Span(items[0, item], items[3, item], num_tokens)
        rows = tile_rows(kv_head, chunk, num_tokens, config)
        output, maximum, total = attend(
            refs, items[1, item], span, kv_head, rows, items[4, item], items[5, item], config
        )
        sees_keys = total > 0
        total = jnp.where(sees_keys, total, 1.0)
        lse = jnp.where(sees_keys, logarithm(maximum, total), HIDDEN)
        dims = jnp.arange(config.padded_dim, dtype=jnp.int32)
        plt.store(
            out_ref.at[item, rows.token[:, None], rows.head[:, None], dims[None, :]],
            output / total[:, None],
            mask=rows.live[:, None] & (dims < config.head_dim)[None, :],
        )
        plt.store(lse_ref.at[item, rows.token, rows.head], lse, mask=rows.live)


def _operands(call: Attention) -> Operands:
    """The kernels' inputs: scalars as arrays, and what is added to scores in base 2."""

    def base_2(array: Any):
        return None if array is None else array * np.float32(LOG2_E)

    def scalar(value: Any):
        return jnp.reshape(jnp.asarray(value, jnp.int32), (1,))

    cap = 1.0 if call.soft_cap is None else call.soft_cap
    factor = jnp.asarray(call.scale, jnp.float32) * (LOG2_E if call.soft_cap is None else 1 / cap)
    return Operands(
        q=call.q,
        kv_pool=call.kv_pool,
        layer=scalar(call.layer),
        block_tables=call.block_tables,
        scales=jnp.stack([factor, jnp.asarray(cap, jnp.float32) * np.float32(LOG2_E)]),
        window=None if call.window is None else scalar(call.window),
        slopes=base_2(call.alibi_slopes),
        sinks=base_2(call.sinks),
    )


def paged_attention(call: Attention, target: Target):
    """The public operator's `triton` backend; its arguments are checked there."""
    q = call.q
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = call.kv_pool.shape[3:5]
    lse_shape = jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32)
    if 0 in (num_tokens, *call.block_tables.shape):
        out = jnp.zeros_like(q)
        return (out, jnp.full(lse_shape.shape, -jnp.inf)) if call.return_lse else out

    if call.window is not None:
        call = call._replace(window=jnp.asarray(call.window, jnp.int32))
    decode, ragged = tile_configs(
        call.group,
        head_dim,
        block_size,
        q.dtype,
        is_hopper=target.is_hopper,
        window=call.window is not None,
        soft_cap=call.soft_cap is not None,
        alibi=call.alibi_slopes is not None,
        sinks=call.sinks is not None,
    )
    tiles, items, merged = plan_of_call(call, target.num_cores)
    operands = _operands(call)
    interpret = target.platform == "cpu"

    results = pl.pallas_call(
        partial(_ragged_kernel, config=ragged),
        grid=(tiles.shape[1], num_kv_heads * ragged.chunks),
        out_shape=(jax.ShapeDtypeStruct(q.shape, q.dtype),) + (lse_shape,) * call.return_lse,
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
    results = merge_parts(merged, parts, lses, operands.sinks, results, decode, interpret=interpret)
    return tuple(results) if call.return_lse else results[0]
