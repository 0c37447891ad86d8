"""Products of a few rows of float32 with weights that are arranged for a matrix unit
(`products.Arranged`), by the vector units.

The matrix unit takes float32 in three parts, and to split the weights takes the vector units
longer than to multiply them by a few rows: here each number of the weights is loaded once and
multiplied by every row. What is left is the time that reading the weights takes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from llvmlite import ir

from pallas_kernels.llvm_build import F32, I64, Variable, Work, at, build_handler, loop, read
from pallas_kernels.llvm_handler import Handler, call_handler, compiled_once
from pallas_kernels.llvm_tiles import DEPTH, LANES, Tiles, threads

MOST_ROWS = 8  # whose sums the registers hold
COLUMNS = 32  # of x @ w, in a unit
_AHEAD = 8192  # bytes of w that are asked for in advance
_ALONE = 1 << 15  # numbers of w below which a second thread is not worth calling


def _multiply(num_rows: int, work: Work) -> None:
    """COLUMNS columns of x @ w[layer]."""
    b, unit, numbers, arrays = work
    depth, width, layer, apart = numbers
    x, w, y = arrays
    vectors = Tiles(b, 1, 1, COLUMNS // LANES)
    column = b.mul(unit, I64(COLUMNS))
    matrix = b.mul(b.add(b.mul(layer, width), column), depth)
    size = b.mul(depth, I64(COLUMNS))
    places = [(row, half) for row in range(num_rows) for half in range(vectors.halves)]
    zero = vectors.constant(0.0)
    sums = {place: Variable(b, zero) for place in places}

    def result(row: int, half: int) -> ir.Value:
        index = b.add(b.add(b.mul(I64(row), width), column), I64(half * LANES))
        return b.bitcast(at(b, y, index, F32), vectors.floats.as_pointer())

    for place in places:
        b.store(zero, result(*place), align=4)
    # Sums of DEPTH products are added up apart: sums of sums round less.
    with loop(b, I64(0), depth, DEPTH) as start:
        for total in sums.values():
            total.set(zero)
        with loop(b, start, b.add(start, I64(DEPTH))) as step:
            index = b.mul(step, I64(COLUMNS))
            vectors.ask(
                w,
                matrix,
                b.add(index, I64(_AHEAD // 4)),
                size=size,
                further=b.mul(apart, size),
                count=COLUMNS,
                dtype="float32",
            )
            begin = b.add(matrix, index)
            halves = [
                vectors.load(w, b.add(begin, I64(half * LANES)), F32)
                for half in range(vectors.halves)
            ]
            for row in range(num_rows):
                number = read(b, x, b.add(b.mul(I64(row), depth), step), F32)
                spread = vectors.splat(number)
                for half, weights in enumerate(halves):
                    total = sums[row, half]
                    total.set(vectors.fma(spread, weights, total.get()))
        for place, total in sums.items():
            where = result(*place)
            b.store(b.fadd(b.load(where, align=4), total.get()), where, align=4)


@compiled_once
def _kernel(num_rows: int) -> Handler:
    body = functools.partial(_multiply, num_rows)
    return Handler("columns_product", build_handler(4, 2, 1, body))


def multiply(
    x: Float[Array, "T E"], w: Float[Array, "L C E COLUMNS"], layer: Int[Array, ""] | int
) -> Float[Array, "T F"]:
    """Return float32 x @ w[layer] of at most MOST_ROWS rows, read in the stack. w holds columns of
    [L, E, F], COLUMNS side by side; E is a multiple of DEPTH."""
    num_rows, depth = x.shape
    width = w.shape[1] * COLUMNS
    alone = depth * width < _ALONE
    return call_handler(
        _kernel(num_rows),
        jax.ShapeDtypeStruct((num_rows, width), jnp.float32),
        x,
        w,
        units=width // COLUMNS,
        alone=alone,
        numbers=(depth, width, layer, 1 if alone else threads()),
    )
