"""Memory for large arrays on a CPU: pages that nobody has used yet, and large ones."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels import llvm
from pallas_kernels.devices import tracing_target

_MADV_HUGEPAGE = 14  # of Linux


def _has_kernel() -> bool:
    return tracing_target().platform == "cpu" and llvm.missing() is None


def unwritten(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """An array of any numbers, to be written before it is read.

    On a CPU with the means to compile kernels a large one takes no memory until then; elsewhere it
    is zero.
    """
    if not _has_kernel():
        return jnp.zeros(shape, dtype)
    from pallas_kernels import llvm_memory

    return llvm_memory.unwritten(shape, dtype)


def in_large_pages(make: Callable[..., jax.Array], *arguments: jax.Array) -> jax.Array:
    """`make(*arguments)`, jitted, in large pages of memory where Linux hands them out to who asks.

    To read such an array misses fewer translations of addresses. Elsewhere the pages are as usual.
    `make` is compiled once for the same shapes if it is the same function.
    """
    if not _has_kernel() or sys.platform != "linux":
        return jax.jit(make)(*arguments)
    result = jax.eval_shape(make, *arguments)
    place = unwritten(result.shape, result.dtype).block_until_ready()
    _ask_for_large_pages(place.unsafe_buffer_pointer(), place.nbytes)
    return _fill(make, place, *arguments)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _fill(make: Callable[..., jax.Array], place: jax.Array, *arguments: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(place, make(*arguments), (0,) * place.ndim)


def _ask_for_large_pages(address: int, size: int) -> None:
    """Before the memory is first written to. A request: a system without them says no."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_int(_MADV_HUGEPAGE))
