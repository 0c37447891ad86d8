"""Arrays whose numbers do not matter yet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import llvm
from pallas_kernels.devices import tracing_target


def unwritten(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """An array of any numbers, to be written before it is read.

    On a CPU with the means to compile kernels a large one takes no memory until then; elsewhere it
    is zero.
    """
    if tracing_target().platform != "cpu" or llvm.missing() is not None:
        return jnp.zeros(shape, dtype)
    from pallas_kernels import llvm_memory

    return llvm_memory.unwritten(shape, dtype)
