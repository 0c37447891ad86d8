"""Products of rows with the stacked weights of a model's layers, on a CPU."""

from __future__ import annotations

import functools
import math
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
from pallas_kernels.quantised import COLUMNS, GROUP, Quantised, groups_shape

# Most rows for which the kernel that needs no matrix unit is faster than XLA's product (measured,
# BUILD_NOTES.md). With quantised float32 weights it is so for any number.
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


def reads_quantised(depth: int, width: int) -> bool:
    """Whether `stacked_product` on this machine's CPU reads quantised weights [L, depth, width]: it
    has the means to compile kernels, and the sizes fit."""
    return llvm.missing() is None and not (depth % GROUP or width % COLUMNS)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["rows", "quantised"], meta_fields=[]
)
@dataclass(frozen=True)
class Table:
    """A table [V, E] that `head_product` may read: where `has_head` says so, or it is quantised.

    Attributes:
        rows: the table; None where it is only a head's, and quantised.
        quantised: the same weights [1, E, V] as a checkpoint has them, if they are there.
    """

    rows: Float[Array, "V E"] | None
    quantised: Quantised | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[V, E]."""
        return self._weights.shape[:0:-1] if self.rows is None else self.rows.shape

    @property
    def dtype(self) -> jnp.dtype:
        """That of the weights."""
        return self._weights.dtype if self.rows is None else self.rows.dtype

    @property
    def _weights(self) -> Quantised:
        assert self.quantised is not None, "a table is there in one form at least"
        return self.quantised


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

    vocab_size, features = table.shape
    if x.dtype != table.dtype:
        raise TypeError(f"x must be {table.dtype.name} like the table, got {x.dtype.name}")
    if x.ndim != 2 or x.shape[1] != features:
        raise ValueError(f"x must be [R, {features}], got {x.shape}")
    _check_target("the table")
    if not x.shape[0]:
        return jnp.zeros((0, vocab_size), jnp.float32)
    if table.quantised is not None:
        return stacked_product(x, table.quantised, 0)
    assert table.rows is not None, "a table is there in one form at least"
    most = llvm_head.MOST_ROWS
    parts = [x[i : i + most] for i in range(0, x.shape[0], most)]
    return jnp.concatenate([llvm_head.logits(part, table.rows) for part in parts])


def arrange(weights: Float[Array, "L E ..."]) -> Arranged:
    """The weights in a kernel's order, where `arranges` says so; a copy."""
    layers, depth = weights.shape[:2]
    columns = weights.reshape(layers, depth, -1, COLUMNS).transpose(0, 2, 1, 3)
    return Arranged(columns, weights.shape[2:])


def has_kernel(num_rows: int, weights: Array | Arranged | Quantised) -> bool:
    """Whether `stacked_product` is for a product of num_rows rows with these weights [L, E, *out],
    traced now: on a CPU, where the kernel is faster than what XLA does, or only it reads them."""
    if isinstance(weights, Arranged | Quantised):
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
    weights: Float[Array, "L E ..."] | Arranged | Quantised,
    layer: int | Int32[Array, ""],
    num_live: int | Int32[Array, ""] | None = None,
) -> Float32[Array, "T ..."]:
    """x @ weights[layer], which is read where it lies, where `has_kernel` says so.

    XLA's CPU copies a layer's weights out of the stack first, and takes up to twice as long as
    reading them takes. Sums are in float32, in an order that does not depend on the number of rows
    (but of quantised bfloat16 on a machine without a matrix unit, where XLA takes many rows).

    Args:
        x: Rows, of the weights' dtype: float32 or bfloat16.
        weights: The weights of all layers. Quantised ones count as what they stand for, rounded to
            their dtype if that is bfloat16.
        layer: Which of them; may be traced. One outside is the nearest.
        num_live: How many of the first rows count, all if None; may be traced. The others' results
            are theirs or 0.

    Raises:
        TypeError: x is not of the weights' dtype.
        ValueError: There is no kernel for these shapes, or arranged or quantised weights meet
            another device than a CPU.
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
    elif isinstance(weights, Quantised):
        _check_target("weights")
        y = _quantised_product(x, weights, layer, num_live)
    else:
        y = llvm_matmul.multiply(x, weights.reshape(*shape[:2], -1), layer, num_live)
    return y.reshape(x.shape[0], *shape[2:])


def _quantised_product(
    x: Float[Array, "T E"],
    weights: Quantised,
    layer: Int32[Array, ""],
    num_live: int | Int32[Array, ""],
) -> Float32[Array, "T F"]:
    from pallas_kernels import (
        llvm_amx,
        llvm_matmul,
        llvm_quantised,
        llvm_quantised_tiles,
        llvm_tiles,
    )

    num_rows, dtype = x.shape[0], x.dtype.name
    layers, depth, *outputs = weights.shape
    expected = groups_shape(layers, depth, math.prod(outputs), weights.bits)
    if weights.groups.shape != expected or weights.groups.dtype != jnp.uint8:
        raise ValueError(
            f"groups of weights {weights.shape} of {weights.bits} bits must be uint8 {expected}, "
            f"got {weights.groups.dtype.name} {weights.groups.shape}"
        )
    if llvm_tiles.has_tiles():
        # float32 weights would have to be split into parts. Those of bfloat16 need not, and scaling
        # the results of many rows takes longer.
        module = llvm_quantised_tiles if dtype == "float32" else llvm_amx
        return module.multiply(x, weights, layer, num_live)
    if dtype == "float32" or num_rows <= _most_rows(dtype):
        padding = -num_rows % llvm_matmul.ROWS
        padded = jnp.pad(x, [(0, padding), (0, 0)]) if padding else x
        return llvm_matmul.multiply(padded, weights, layer, num_live)[:num_rows]
    matrix = llvm_quantised.dequantise(weights, layer)
    return lax.dot(x, matrix, preferred_element_type=jnp.float32)
