"""The operators as Pallas/Mosaic GPU kernels, for Hopper GPUs; interpreted on a CPU."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels
from pallas_kernels import mosaic_decode, mosaic_pool, mosaic_ragged
from pallas_kernels import plan as plans
from pallas_kernels.arguments import Attention, plan_of_call
from pallas_kernels.cases import KernelCase, operator_cases
from pallas_kernels.devices import Target, tracing_target
from pallas_kernels.mosaic_tiles import (
    LOG2_E,
    NO_WINDOW,
    Config,
    Operands,
    interpret_params,
    pool_pages,
)
from pallas_kernels.plan import Plan
from pallas_kernels.reference import merge_states
from pallas_kernels.support import Case

__all__ = [
    "copy_blocks",
    "gather_blocks",
    "kernel_cases",
    "merge_states",
    "paged_attention",
    "plan_attention",
    "scatter_blocks",
    "unsupported",
    "write_kv",
]

_OLDEST_JAX = (0, 11, 2)
_DTYPES = (jnp.bfloat16, jnp.float16)
_HEAD_DIMS = (64, 128, 192, 256)
_SMALL_BLOCKS = (8, 16, 32)  # of which a tile of 64 keys has several
_MAX_GROUP = 64
_POOL_OPERATORS = ("write_kv", "copy_blocks", "gather_blocks", "scatter_blocks")


def unsupported(case: Case, target: Target) -> str | None:
    """What about the case these kernels cannot do on the device, in words; None if nothing."""
    if jax.__version_info__ < _OLDEST_JAX:
        return f"JAX before {'.'.join(map(str, _OLDEST_JAX))} (this is {jax.__version__})"
    if target.platform != "cpu" and not target.is_hopper:
        return f"GPUs other than Hopper's (this is {target.kind!r})"
    if case.operator == "paged_attention":
        return _unsupported_attention(case)
    if case.operator in _POOL_OPERATORS:
        return mosaic_pool.unsupported(case)
    return None


def _unsupported_attention(case: Case) -> str | None:
    if "batch_invariant" in case.features:
        return "batch_invariant (what else is in the batch decides how contexts are cut)"
    if case.dtype not in _DTYPES:
        return f"dtypes other than bfloat16 and float16 (got {jnp.dtype(case.dtype).name})"
    if case.head_dim not in _HEAD_DIMS:
        return f"head dims other than {', '.join(map(str, _HEAD_DIMS))} (got {case.head_dim})"
    size = case.block_size or 0
    if size % 64 and size not in _SMALL_BLOCKS:
        return f"block sizes other than 8, 16, 32 and multiples of 64 (got {size})"
    if case.group is not None and case.group > _MAX_GROUP:
        return f"more than {_MAX_GROUP} query heads for a KV head (got {case.group})"
    return None


def _interpret() -> Any:
    """Parameters to interpret a kernel with, on a CPU; else None."""
    return interpret_params() if tracing_target().platform == "cpu" else None


def _num_cores() -> int | None:
    # Each program that is interpreted takes milliseconds, even one that has nothing to do.
    target = tracing_target()
    return 1 if target.platform == "cpu" else target.num_cores


def paged_attention(call: Attention):
    """Prefill and decode in two launches, and a merge; see `mosaic_ragged` and `mosaic_decode`."""
    num_tokens, num_heads, head_dim = call.q.shape
    block_size = call.kv_pool.shape[4]
    if 0 in (num_tokens, *call.block_tables.shape):
        out = jnp.zeros_like(call.q)
        lse = jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32)
        return (out, lse) if call.return_lse else out
    if call.kv_pool.dtype == jnp.uint16:
        call = call._replace(kv_pool=lax.bitcast_convert_type(call.kv_pool, jnp.bfloat16))
    sizes = {
        "group": call.group,
        "head_dim": head_dim,
        "block_size": block_size,
        "window": call.window is not None,
        "soft_cap": call.soft_cap is not None,
        "alibi": call.alibi_slopes is not None,
    }
    ragged = mosaic_ragged.ragged_config(**sizes)
    decode = mosaic_decode.decode_config(**sizes)
    plan = plan_of_call(call, _num_cores())
    interpret = _interpret()
    out, lse = mosaic_ragged.ragged_attention(
        _operands(call, ragged),
        plan.tiles,
        config=ragged,
        return_lse=call.return_lse,
        interpret=interpret,
    )
    # The merge writes the decode rows in place.
    out_ref, lse_ref = jax.new_ref(out), None if lse is None else jax.new_ref(lse)
    mosaic_decode.decode_attention(
        _operands(call, decode),
        plan.items,
        plan.merged,
        out_ref,
        lse_ref,
        config=decode,
        interpret=interpret,
    )
    if lse_ref is None:
        return jax.ref.freeze(out_ref)
    return jax.ref.freeze(out_ref), jax.ref.freeze(lse_ref)


def _operands(call: Attention, config: Config) -> Operands:
    """A kernel's inputs: scalars as arrays, what is added to scores in base 2 and for each row."""
    num_kv_heads = call.kv_pool.shape[3]

    def of_rows(array: Any):
        """[H] as [K, rows]: row r of a tile has head r % group."""
        if array is None:
            return None
        heads = jnp.reshape(array * np.float32(LOG2_E), (num_kv_heads, call.group))
        return heads[:, np.arange(config.rows) % call.group]

    def scalar(value: Any):
        return jnp.reshape(jnp.asarray(value, jnp.int32), (1,))

    window = None
    if call.window is not None:
        window = scalar(call.window)
        window = jnp.where(window > 0, jnp.minimum(window, NO_WINDOW), NO_WINDOW)
    cap = 1.0 if call.soft_cap is None else call.soft_cap
    factor = jnp.asarray(call.scale, jnp.float32) * (LOG2_E if call.soft_cap is None else 1 / cap)
    return Operands(
        q=call.q,
        kv_pool=pool_pages(call.kv_pool, config),
        layer=scalar(call.layer),
        block_tables=call.block_tables,
        scales=jnp.stack([factor, jnp.asarray(cap, jnp.float32) * np.float32(LOG2_E)]),
        window=window,
        slopes=of_rows(call.alibi_slopes),
        sinks=of_rows(call.sinks),
    )


def plan_attention(query_starts, context_lens, **shapes) -> Plan:
    """The plan, by XLA."""
    return plans.make_plan(query_starts, context_lens, num_cores=_num_cores(), xp=jnp, **shapes)


def write_kv(kv_pool, layer, k, v, slot_mapping):
    """One launch, in place when the pool is donated."""
    return mosaic_pool.write_kv(kv_pool, layer, k, v, slot_mapping, interpret=_interpret())


def copy_blocks(kv_pool, sources, destinations):
    """In place when the pool is donated."""
    return mosaic_pool.copy_blocks(kv_pool, sources, destinations, interpret=_interpret())


def gather_blocks(kv_pool, blocks):
    """One launch for all layers."""
    return mosaic_pool.gather_blocks(kv_pool, blocks, interpret=_interpret())


def scatter_blocks(kv_pool, blocks, data):
    """One launch for all layers, in place when the pool is donated."""
    return mosaic_pool.scatter_blocks(kv_pool, blocks, data, interpret=_interpret())


def kernel_cases() -> Iterator[KernelCase]:
    """The operators with arguments of usual sizes, and attention with each feature alone."""
    cases = tuple(operator_cases("mosaic"))
    yield from cases
    arguments = cases[0].avals
    q = arguments[0]
    attention = partial(pallas_kernels.paged_attention, scale=q.shape[2] ** -0.5, backend="mosaic")
    per_head = jax.ShapeDtypeStruct((q.shape[1],), jnp.float32)
    integer = jax.ShapeDtypeStruct((), jnp.int32)

    def with_array(name):
        return lambda array, *arguments: attention(*arguments, **{name: array})

    for name, array in {"window": integer, "alibi_slopes": per_head, "sinks": per_head}.items():
        yield KernelCase(f"paged_attention, {name}", with_array(name), (array, *arguments))
    for keywords in ({"soft_cap": 50.0}, {"return_lse": True}):
        name = f"paged_attention, {next(iter(keywords))}"
        yield KernelCase(name, partial(attention, **keywords), arguments)
