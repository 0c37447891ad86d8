"""The operators' semantics, in float32: slow and obvious, one query token at a time.

Every other backend is tested against this one. Arguments are those of the public operators in
`pallas_kernels`, which has checked them.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arguments import Attention
from pallas_kernels.devices import Target
from pallas_kernels.support import Case


def unsupported(case: Case, target: Target) -> str | None:
    """What about the case it cannot do, in words; None if nothing."""
    if "batch_invariant" in case.features:
        return "batch_invariant (it is the definition of everything else)"
    return None


def paged_attention(call: Attention):
    """Attention of one token after the other over its sequence's whole block table."""
    num_tokens, num_heads, head_dim = call.q.shape
    _, num_blocks, _, num_kv_heads, block_size, _ = call.kv_pool.shape
    num_sequences, max_blocks = call.block_tables.shape
    block_tables = jnp.clip(call.block_tables, 0, num_blocks - 1)
    query_starts, context_lens = call.query_starts, call.context_lens
    window, soft_cap = call.window, call.soft_cap

    def attend(token):
        sequence = jnp.searchsorted(query_starts, token, side="right") - 1
        is_padding = sequence >= num_sequences
        sequence = jnp.minimum(sequence, num_sequences - 1)
        query_len = query_starts[sequence + 1] - query_starts[sequence]
        position = context_lens[sequence] - query_len + token - query_starts[sequence]

        tiles = call.kv_pool[call.layer, block_tables[sequence]]  # [M, 2, K, B, D]
        if tiles.dtype == jnp.uint16:
            tiles = lax.bitcast_convert_type(tiles, jnp.bfloat16)
        tiles = jnp.moveaxis(tiles.astype(jnp.float32), 0, 2)  # [2, K, M, B, D]
        keys, values = tiles.reshape(2, num_kv_heads, max_blocks * block_size, head_dim)

        key_positions = jnp.arange(max_blocks * block_size)
        visible = (key_positions <= position) & ~is_padding
        if window is not None:
            visible &= (window <= 0) | (key_positions > position - window)
        # What is not visible may be NaN, and 0 * NaN is NaN.
        keys = jnp.where(visible[:, None], keys, 0)
        values = jnp.where(visible[:, None], values, 0)

        query = call.q[token].astype(jnp.float32).reshape(num_kv_heads, call.group, head_dim)
        highest = lax.Precision.HIGHEST
        scores = jnp.einsum("kgd,kcd->kgc", query, keys, precision=highest) * call.scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        if call.alibi_slopes is not None:
            slopes = jnp.reshape(call.alibi_slopes, (num_kv_heads, call.group, 1))
            scores += slopes * (key_positions - position)
        scores = jnp.where(visible, scores, -jnp.inf)

        logits = scores
        if call.sinks is not None:
            extra = jnp.reshape(call.sinks, (num_kv_heads, call.group, 1))
            logits = jnp.concatenate([scores, extra], axis=-1)
        lse = jax.nn.logsumexp(logits, axis=-1)
        any_visible = jnp.any(visible)
        lse = jnp.where(any_visible, lse, -jnp.inf)
        weights = jnp.where(visible, jnp.exp(scores - lse[..., None]), 0)
        out = jnp.einsum("kgc,kcd->kgd", weights, values, precision=highest)
        return out.reshape(num_heads, head_dim).astype(call.q.dtype), lse.reshape(num_heads)

    out, lse = lax.map(attend, jnp.arange(num_tokens))
    return (out, lse) if call.return_lse else out


def plan_attention(query_starts, context_lens, **shapes):
    """No plan: nothing is split."""


def write_kv(kv_pool, layer, k, v, slot_mapping):
    """One token after the other, each written only if its slot exists."""
    _, num_blocks, _, _, block_size, _ = kv_pool.shape
    kv = jnp.stack([k, v], axis=1)  # [T, 2, K, D]
    if kv_pool.dtype == jnp.uint16:
        kv = lax.bitcast_convert_type(kv, jnp.uint16)

    def write(token, pool):
        slot = slot_mapping[token]
        exists = (slot >= 0) & (slot < num_blocks * block_size)
        block, offset = jnp.divmod(jnp.where(exists, slot, 0), block_size)
        old = pool[layer, block, :, :, offset]
        return pool.at[layer, block, :, :, offset].set(jnp.where(exists, kv[token], old))

    return lax.fori_loop(0, kv.shape[0], write, kv_pool)


def copy_blocks(kv_pool, sources, destinations):
    """All sources are read from the pool as it was; then the copies are written one by one."""
    return scatter_blocks(kv_pool, destinations, gather_blocks(kv_pool, sources))


def gather_blocks(kv_pool, blocks):
    """The blocks with these ids (clamped into the pool), in this order."""
    return kv_pool[:, jnp.clip(blocks, 0, kv_pool.shape[1] - 1)]


def scatter_blocks(kv_pool, blocks, data):
    """One block after the other, each written only if its id exists."""
    num_blocks = kv_pool.shape[1]

    def write(i, pool):
        exists = (blocks[i] >= 0) & (blocks[i] < num_blocks)
        block = jnp.where(exists, blocks[i], 0)
        return pool.at[:, block].set(jnp.where(exists, data[:, i], pool[:, block]))

    return lax.fori_loop(0, blocks.shape[0], write, kv_pool)


def merge_states(outs, lses):
    """The weighted mean of the outputs; the weights are the parts' shares of the softmax sum."""
    lse = jax.nn.logsumexp(lses, axis=0)  # [T, H]
    weights = jnp.where(lses == -jnp.inf, 0, jnp.exp(lses - lse))[..., None]
    # A part that saw no key weighs nothing, whatever its output holds.
    out = jnp.sum(jnp.where(weights > 0, outs.astype(jnp.float32), 0) * weights, axis=0)
    return out.astype(outs.dtype), lse
