"""Which of `pallas_kernels`' backends attention takes."""

from __future__ import annotations

import logging

import jax
from jaxtyping import DTypeLike

from jpaged.models import LlamaConfig
from jpaged.runner.kv_pool import storage_dtype
from pallas_kernels.arguments import pool_case
from pallas_kernels.devices import tracing_target
from pallas_kernels.support import choose

logger = logging.getLogger(__name__)

# Pallas kernels, which a CPU can only interpret.
_KERNELS = ("triton", "mosaic")


def resolve_attention_backend(
    backend: str,
    model: LlamaConfig,
    dtype: DTypeLike,
    block_size: int,
    *,
    batch_invariant: bool = False,
) -> str:
    """The name of the backend that a model's attention takes on JAX's default device.

    backend  as EngineConfig.attention_backend
    dtype    of the weights

    Raises NotImplementedError, naming attention_backend and what stands against it, if the backend
    was asked for by name and cannot serve this model on this device.
    """
    stored = storage_dtype(dtype, tracing_target().platform)
    shape = (model.num_layers, 1, 2, model.num_kv_heads, block_size, model.head_dim)
    pool = jax.ShapeDtypeStruct(shape, stored)
    group = model.num_heads // model.num_kv_heads
    try:
        choose(pool_case("write_kv", pool), backend)
        case = pool_case("paged_attention", pool)._replace(group=group)
        if batch_invariant:
            case = case._replace(features=case.features | {"batch_invariant"})
        module = choose(case, backend)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"attention_backend={backend!r} cannot serve this model here: {error}"
        ) from error
    return module.__name__.rpartition(".")[2]


def log_attention_backend(
    backend: str,
    model: LlamaConfig,
    dtype: DTypeLike,
    block_size: int,
    *,
    batch_invariant: bool = False,
) -> None:
    """State the backend that `resolve_attention_backend` finds."""
    name = resolve_attention_backend(
        backend, model, dtype, block_size, batch_invariant=batch_invariant
    )
    slow = name in _KERNELS and tracing_target().platform == "cpu"
    logger.info("attention backend: %s%s", name, " (interpreted)" if slow else "")
