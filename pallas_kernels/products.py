"""Products of rows with the stacked weights of a model's layers, on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int32

from pallas_kernels import llvm
from pallas_kernels.devices import tracing_target

# Most rows for which the kernel that needs no matrix unit is faster than XLA's product (measured,
# BUILD_NOTES.md).
_MOST_ROWS = {"float32": 64, "bfloat16": 32}
_MOST_ROWS_WIDENED = 8  # of bfloat16 on a machine that does not multiply it


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["columns"], meta_fields=["outputs"]
)
@dataclass(frozen=True)
class Arranged:
    """Weights [L, E, *outputs] in the order in which a kernel for a matrix unit reads them.

    Attributes:
        columns: [L, C, E, 32]: 32 columns of a layer's [E, prod(outputs)] after the other.
        outputs: the axes of the outputs.
    """

    columns: Float[Array, "L C E 32"]
    outputs: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, E, *outputs]."""
        return (self.columns.shape[0], self.columns.shape[2], *self.outputs)

    @property
    def dtype(self) -> jnp.dtype:
        """That of the weights."""
        return self.columns.dtype


def arranges(shape: Sequence[int], dtype: DTypeLike) -> bool:
    """Whether this machine's CPU has a kernel that reads weights [L, E, *outputs] as `arrange`
    leaves them: it has a matrix unit (Intel AMX), and the sizes are multiples of 32."""
    return _fits_tiles(shape[1], int(np.prod(shape[2:])), dtype)


def _fits_tiles(depth: int, width: int, dtype: DTypeLike) -> bool:
    if jnp.dtype(dtype).name not in _MOST_ROWS or llvm.missing() is not None:
        return False
    from pallas_kernels import llvm_tiles

    sizes = depth, width
    return all(n > 0 and n % llvm_tiles.DEPTH == 0 for n in sizes) and llvm_tiles.has_tiles()


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=[])
@dataclass(frozen=True)
class Table:
    """A table [V, E] that `head_product` may read: where `has_head` says so.

    Attributes:
        rows: the table.
    """

    rows: Float[Array, "V E"]


def has_head(shape: Sequence[int], dtype: DTypeLike) -> bool:
    """Whether this machine's CPU has a kernel of logits over a table [V, E]: it has a matrix unit
    (Intel AMX), and the sizes are multiples of 32."""
    return _fits_tiles(shape[1], shape[0], dtype)


def _check_target(what: str) -> None:
    platform = tracing_target().platform
    if platform != "cpu":
        raise ValueError(f"{what} must be as loaded for {platform}, got the form for CPUs")


def head_product(x: Float[Array, "R E"], table: Table) -> Float32[Array, "R V"]:
    """x @ table.T, as many rows at a time as the kernel takes; x is of the table's dtype.

    Raises:
        TypeError: x is not of the table's dtype.
        ValueError: x does not go with the table, or this is traced for another device than a CPU.
    """
    from pallas_kernels import llvm_head

    if x.dtype != table.rows.dtype:
        raise TypeError(f"x must be {table.rows.dtype.name} like the table, got {x.dtype.name}")
    if x.ndim != 2 or x.shape[1] != table.rows.shape[1]:
        raise ValueError(f"x must be [R, {table.rows.shape[1]}], got {x.shape}")
    _check_target("the table")
    if not x.shape[0]:
        return jnp.zeros((0, table.rows.shape[0]), jnp.float32)
    most = llvm_head.MOST_ROWS
    parts = [x[i : i + most] for i in range(0, x.shape[0], most)]
    return jnp.concatenate([llvm_head.logits(part, table.rows) for part in parts])


def arrange(weights: Float[Array, "L E ..."]) -> Arranged:
    """The weights in a kernel's order, where `arranges` says so; a copy."""
    from pallas_kernels.llvm_amx import COLUMNS

    layers, depth = weights.shape[:2]
    columns = weights.reshape(layers, depth, -1, COLUMNS).transpose(0, 2, 1, 3)
    return Arranged(columns, weights.shape[2:])


def has_kernel(num_rows: int, weights: Array | Arranged) -> bool:
    """Whether `stacked_product` is for a product of num_rows rows with these weights [L, E, *out],
    traced now: on a CPU, where the kernel is faster than what XLA does."""
    if isinstance(weights, Arranged):
        return True
    dtype = jnp.dtype(weights.dtype).name
    if tracing_target().platform != "cpu" or dtype not in _MOST_ROWS:
        return False
    if llvm.missing() is not None:
        return False
    from pallas_kernels import llvm_matmul

    shape = weights.shape
    if (
        num_rows % llvm_matmul.ROWS
        or shape[1] % llvm_matmul.UNROLL
        or np.prod(shape[2:]) % llvm_matmul.COLUMNS
    ):
        return False
    return num_rows <= _most_rows(dtype)


def _most_rows(dtype: str) -> int:
    from pallas_kernels import llvm_matmul, llvm_tiles

    if dtype == "bfloat16" and llvm_tiles.has_tiles():
        return 0  # XLA takes the matrix unit too, or is as fast (jax 0.12)
    if dtype == "bfloat16" and not llvm_matmul.multiplies_pairs():
        return _MOST_ROWS_WIDENED
    return _MOST_ROWS[dtype]


def stacked_product(
    x: Float[Array, "T E"],
    weights: Float[Array, "L E ..."] | Arranged,
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
        ValueError: There is no kernel for these shapes, or arranged weights meet another device
            than a CPU.
    """
    from pallas_kernels import llvm_amx, llvm_matmul

    # The kernel reads what it is told is there.
    if x.dtype != weights.dtype:
        raise TypeError(f"x must be {weights.dtype.name} like the weights, got {x.dtype.name}")
    shape = weights.shape
    if x.ndim != 2 or len(shape) < 3 or x.shape[1] != shape[1]:
        raise ValueError(f"x must be [T, {shape[1]}] to go with weights {shape}, got {x.shape}")
    if not has_kernel(x.shape[0], weights):
        raise ValueError(
            f"x and weights must be of shapes that has_kernel takes, got {x.shape} and "
            f"{shape} of {weights.dtype.name}"
        )
    if not x.shape[0]:
        return jnp.zeros((0, *shape[2:]), jnp.float32)
    layer = lax.clamp(np.int32(0), jnp.asarray(layer, jnp.int32), np.int32(shape[0] - 1))
    num_live = x.shape[0] if num_live is None else num_live
    if isinstance(weights, Arranged):
        _check_target("weights")
        y = llvm_amx.multiply(x, weights.columns, layer, num_live)
    else:
        y = llvm_matmul.multiply(x, weights.reshape(*shape[:2], -1), layer, num_live)
    return y.reshape(x.shape[0], *shape[2:])
