"""The operators with arguments of usual sizes, to compile and look at what they take."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels

# Llama 3 8B's heads and 64 sequences of up to 4096 tokens. Two layers: more change no kernel.
_LAYERS, _BLOCKS, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM = 2, 1024, 8, 16, 128
_QUERY_HEADS, _SEQUENCES, _TABLE = 32, 64, 256
_PARTS, _LISTED_BLOCKS = 4, 32
_DTYPE = jnp.bfloat16

_BACKENDS = ("mosaic", "triton", "xla")


class KernelCase(NamedTuple):
    """A function to compile, and its arguments."""

    name: str
    fn: Callable
    avals: tuple[Any, ...]
    donate_argnums: int | tuple[int, ...] = ()


def operator_cases(backend: str) -> Iterator[KernelCase]:
    """Each operator by one backend: attention of 64 decodes and of 512 tokens in chunks, writing,
    copying, gathering and scattering blocks, merging."""

    def shape(*sizes: int, dtype: Any = _DTYPE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    integers = functools.partial(shape, dtype=jnp.int32)
    pool = shape(_LAYERS, _BLOCKS, 2, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM)

    def attention(q, kv_pool, layer, block_tables, query_starts, context_lens):
        return pallas_kernels.paged_attention(
            q, kv_pool, layer, block_tables, query_starts, context_lens,
            scale=_HEAD_DIM**-0.5, backend=backend,
        )  # fmt: skip

    for name, tokens in (("decode", _SEQUENCES), ("ragged", 512)):
        arguments = (
            shape(tokens, _QUERY_HEADS, _HEAD_DIM),
            pool,
            integers(),
            integers(_SEQUENCES, _TABLE),
            integers(_SEQUENCES + 1),
            integers(_SEQUENCES),
        )
        yield KernelCase(f"paged_attention, {name}", attention, arguments)

    def operator(name: str) -> Callable:
        return functools.partial(getattr(pallas_kernels, name), backend=backend)

    row = shape(512, _KV_HEADS, _HEAD_DIM)
    listed = integers(_LISTED_BLOCKS)
    data = shape(_LAYERS, _LISTED_BLOCKS, *pool.shape[2:])
    yield KernelCase(
        "write_kv", operator("write_kv"), (pool, integers(), row, row, integers(512)), 0
    )
    yield KernelCase("copy_blocks", operator("copy_blocks"), (pool, listed, listed), 0)
    yield KernelCase("gather_blocks", operator("gather_blocks"), (pool, listed))
    yield KernelCase("scatter_blocks", operator("scatter_blocks"), (pool, listed, data), 0)
    outs = shape(_PARTS, _SEQUENCES, _QUERY_HEADS, _HEAD_DIM)
    yield KernelCase(
        "merge_states", operator("merge_states"), (outs, shape(*outs.shape[:3], dtype=jnp.float32))
    )


def kernel_cases() -> Iterator[KernelCase]:
    """Every backend's kernels: what its module's `kernel_cases` yields, if it has one, as tuples
    like KernelCase, else `operator_cases`."""
    for backend in _BACKENDS:
        if importlib.util.find_spec(f"pallas_kernels.{backend}") is None:
            continue
        module = importlib.import_module(f"pallas_kernels.{backend}")
        own = getattr(module, "kernel_cases", None)
        for case in own() if own else operator_cases(backend):
            name, *rest = case
            yield KernelCase(f"{backend}: {name}", *rest)
