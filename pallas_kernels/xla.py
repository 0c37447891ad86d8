"""The operators in plain JAX: all features, any platform, the default on a CPU."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.devices import Target
from pallas_kernels.reference import merge_states, plan_attention
from pallas_kernels.support import Case
from pallas_kernels.xla_attention import paged_attention

__all__ = [
    "copy_blocks",
    "gather_blocks",
    "merge_states",
    "paged_attention",
    "plan_attention",
    "scatter_blocks",
    "unsupported",
    "write_kv",
]


def unsupported(case: Case, target: Target) -> str | None:
    """Nothing: `auto` ends here."""


def write_kv(kv_pool, layer, k, v, slot_mapping):
    """One scatter of the tokens' keys and values."""
    block_size = kv_pool.shape[4]
    kv = jnp.stack([k, v], axis=1)  # [T, 2, K, D]
    if kv_pool.dtype == jnp.uint16:
        kv = lax.bitcast_convert_type(kv, jnp.uint16)
    # Of a negative slot one of the two is negative.
    size = np.int32(block_size)
    blocks, offsets = lax.div(slot_mapping, size), lax.rem(slot_mapping, size)
    blocks, offsets, kv = (_at_least_two(x) for x in (blocks, offsets, kv))
    places = kv_pool.at[layer, blocks, :, :, offsets]
    return places.set(kv, mode="drop", wrap_negative_indices=False)


def copy_blocks(kv_pool, sources, destinations):
    """A gather of all sources, then a scatter."""
    return scatter_blocks(kv_pool, destinations, gather_blocks(kv_pool, sources))


def gather_blocks(kv_pool, blocks):
    """One gather over the block axis."""
    blocks = jnp.clip(blocks, 0, kv_pool.shape[1] - 1)
    return kv_pool.at[:, blocks].get(mode="promise_in_bounds")


def scatter_blocks(kv_pool, blocks, data):
    """One scatter over the block axis."""
    blocks, data = _at_least_two(blocks), _at_least_two(data, axis=1)
    return kv_pool.at[:, blocks].set(data, mode="drop", wrap_negative_indices=False)


def _at_least_two(x, axis=0):
    """A lone index, or its update, twice: XLA makes of a scatter with one index a select between
    two whole pools."""
    return jnp.repeat(x, 2, axis=axis) if x.shape[axis] == 1 else x
