"""Products of few rows with the stacked weights of a model's layers."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from pallas_kernels import llvm
from pallas_kernels.devices import tracing_target

# Most rows for which the kernel is faster than XLA's product (measured, BUILD_NOTES.md).
_MOST_ROWS = {"float32": 64, "bfloat16": 32}
_MOST_ROWS_WIDENED = 8  # of bfloat16 on a machine that does not multiply it


def has_kernel(num_rows: int, shape: Sequence[int], dtype: DTypeLike) -> bool:
    """Whether `stacked_product` is for a product of num_rows rows with weights of this shape
    [L, E, *out], traced now: on a CPU, where the kernel is faster than what XLA does."""
    if tracing_target().platform != "cpu" or jnp.dtype(dtype).name not in _MOST_ROWS:
        return False
    if llvm.missing() is not None:
        return False
    from pallas_kernels import llvm_matmul

    if (
        num_rows % llvm_matmul.ROWS
        or shape[1] % llvm_matmul.UNROLL
        or np.prod(shape[2:]) % llvm_matmul.COLUMNS
    ):
        return False
    return num_rows <= _most_rows(jnp.dtype(dtype).name)


@functools.cache
def _most_rows(dtype: str) -> int:
    from pallas_kernels import llvm_matmul

    if dtype == "bfloat16" and not llvm_matmul.multiplies_pairs():
        return _MOST_ROWS_WIDENED
    return _MOST_ROWS[dtype]


def stacked_product(
    x: Float[Array, "T E"],
    weights: Float[Array, "L E ..."],
    layer: int | Int32[Array, ""],
    num_live: int | Int32[Array, ""] | None = None,
) -> Float32[Array, "T ..."]:
    """x @ weights[layer], which is read where it lies, where `has_kernel` says so.

    XLA's CPU copies a layer's weights out of the stack first, and takes up to twice as long as
    reading them takes. Sums are in float32, in an order that does not depend on the number of rows.

    Args:
        x: Rows, of the weights' dtype: float32 or bfloat16.
        weights: The weights of all layers.
        layer: Which of them; may be traced. One outside is the nearest.
        num_live: How many of the first rows count, all if None; may be traced. The others' results
            are theirs or 0.

    Raises:
        TypeError: x is not of the weights' dtype.
        ValueError: There is no kernel for these shapes.
    """
    from pallas_kernels import llvm_matmul

    # The kernel reads what it is told is there.
    if x.dtype != weights.dtype:
        raise TypeError(f"x must be {weights.dtype.name} like the weights, got {x.dtype.name}")
    if x.ndim != 2 or weights.ndim < 3 or x.shape[1] != weights.shape[1]:
        raise ValueError(
            f"x must be [T, {weights.shape[1]}] to go with weights {weights.shape}, got {x.shape}"
        )
    if not has_kernel(x.shape[0], weights.shape, weights.dtype):
        raise ValueError(
            f"x and weights must be of shapes that has_kernel takes, got {x.shape} and "
            f"{weights.shape} of {weights.dtype.name}"
        )
    layer = jnp.clip(jnp.asarray(layer, jnp.int32), 0, weights.shape[0] - 1)
    outputs = weights.shape[2:]
    flat = weights.reshape(*weights.shape[:2], -1)
    num_live = x.shape[0] if num_live is None else num_live
    return llvm_matmul.multiply(x, flat, layer, num_live).reshape(x.shape[0], *outputs)
