"""The operators as Pallas/Triton kernels, for NVIDIA GPUs from Ampere on; interpreted on a CPU."""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

import pallas_kernels
from pallas_kernels import plan as plans
from pallas_kernels import triton_attention, triton_pool
from pallas_kernels.arguments import Attention
from pallas_kernels.cases import KernelCase, operator_cases
from pallas_kernels.devices import Target, tracing_target
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

_MAX_HEAD_DIM = 256


def unsupported(case: Case, target: Target) -> str | None:
    """What about the case these kernels cannot do on the device, in words; None if nothing."""
    if target.platform != "cpu":
        if not target.is_nvidia:
            return f"devices other than NVIDIA GPUs (this is {target.kind!r})"
        if target.capability is not None and target.capability < (8, 0):
            return f"GPUs before Ampere (this is {target.kind!r})"
    if "batch_invariant" in case.features:
        return "batch_invariant (what else is in the batch decides how contexts are cut)"
    if case.operator == "paged_attention" and (case.head_dim or 0) > _MAX_HEAD_DIM:
        return f"head dims above {_MAX_HEAD_DIM} (got {case.head_dim})"
    return None


def _interpret() -> bool:
    return tracing_target().platform == "cpu"


def paged_attention(call: Attention):
    """Prefill and decode in two launches, and a merge; see `triton_attention`."""
    return triton_attention.paged_attention(call, tracing_target())


def plan_attention(query_starts, context_lens, **shapes):
    """The plan, by XLA."""
    num_cores = tracing_target().num_cores
    return plans.make_plan(query_starts, context_lens, num_cores=num_cores, xp=jnp, **shapes)


def write_kv(kv_pool, layer, k, v, slot_mapping):
    """One launch, in place when the pool is donated."""
    return triton_pool.write_kv(kv_pool, layer, k, v, slot_mapping, interpret=_interpret())


def copy_blocks(kv_pool, sources, destinations):
    """One launch for all layers, in place when the pool is donated."""
    return triton_pool.copy_blocks(kv_pool, sources, destinations, interpret=_interpret())


def gather_blocks(kv_pool, blocks):
    """One launch for all layers."""
    return triton_pool.gather_blocks(kv_pool, blocks, interpret=_interpret())


def scatter_blocks(kv_pool, blocks, data):
    """One launch for all layers, in place when the pool is donated."""
    return triton_pool.scatter_blocks(kv_pool, blocks, data, interpret=_interpret())


def kernel_cases() -> Iterator[KernelCase]:
    """The operators with arguments of usual sizes, and attention with each feature alone."""
    cases = tuple(operator_cases("triton"))
    yield from cases
    arguments = cases[0].avals
    q = arguments[0]
    attention = partial(pallas_kernels.paged_attention, scale=q.shape[2] ** -0.5, backend="triton")
    per_head = jax.ShapeDtypeStruct((q.shape[1],), jnp.float32)
    integer = jax.ShapeDtypeStruct((), jnp.int32)

    def with_array(name):
        return lambda array, *arguments: attention(*arguments, **{name: array})

    for name, array in {"window": integer, "alibi_slopes": per_head, "sinks": per_head}.items():
        yield KernelCase(f"paged_attention, {name}", with_array(name), (array, *arguments))
    for keywords in ({"soft_cap": 50.0}, {"return_lse": True}):
        name = f"paged_attention, {next(iter(keywords))}"
        yield KernelCase(name, partial(attention, **keywords), arguments)
