"""Products of few rows with a large matrix on a CPU: kernels that LLVM compiles for the machine.

A decode step multiplies one to some dozens of rows by every weight of the model, so it should take
as long as reading the weights. Each unit of work reads its part of the matrix once, front to back,
and keeps sums of a few rows in registers meanwhile; more than MOST_ROWS rows are several units.
Sums are in float32, and each is added up in an order that depends on the matrix alone: a row's
results are the same, to the bit, whatever rows are beside it. bfloat16 is multiplied in pairs where
the machine can (AVX512-BF16), else widened. Quantised weights are dequantised some rows at a time,
onto the stack.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from llvmlite import binding, ir

from pallas_kernels.llvm_build import (
    F32,
    I16,
    I32,
    I64,
    BFloat,
    Variable,
    Vectors,
    Work,
    at,
    build_handler,
    loop,
    read,
    smaller,
)
from pallas_kernels.llvm_handler import Handler, call_handler, compiled_once
from pallas_kernels.llvm_quantised import Groups, asking
from pallas_kernels.quantised import COLUMNS, GROUP, Quantised, group_bytes

_LANES = 16
ROWS = 8  # rows of x that are worked on at once
# Rows of w that all rows of x are multiplied by before the next ones are read: those of a unit stay
# in the nearest cache.
_DEPTH = 64
UNROLL = 4
_AHEAD = 4096  # bytes of a unit that are asked for in advance
MOST_ROWS = 64
# Below so many numbers in a matrix a second thread is not worth calling.
_ALONE = 1 << 15


class Product(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str  # of x and of the matrix
    in_pairs: bool  # whether bfloat16 is multiplied in pairs
    bits: int = 0  # of a quantised matrix's numbers

    @property
    def element(self) -> ir.Type:
        return F32 if self.dtype == "float32" else I16

    @property
    def item_size(self) -> int:
        return 4 if self.dtype == "float32" else 2


class _Products(Vectors):
    """Products of numbers of x, and of vectors of the matrix, added to vectors of sums."""

    def __init__(self, sizes: Product, builder: ir.IRBuilder) -> None:
        super().__init__(builder, _LANES)
        self.sizes = sizes
        # Successive rows of the matrix in a product.
        self.step = 2 if sizes.in_pairs else 1

    def dot_pairs(self, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        """total[i] + a[2i] b[2i] + a[2i + 1] b[2i + 1], of bfloat16 in vectors of int32."""
        kind = ir.VectorType(BFloat(), 2 * _LANES)
        pairs = [self.builder.bitcast(x, kind) for x in (a, b)]
        return self.call("llvm.x86.avx512bf16.dpbf16ps.512", self.floats, [total, *pairs])

    def add(self, total: ir.Value, factor: ir.Value, loaded: ir.Value) -> ir.Value:
        if self.sizes.in_pairs:
            return self.dot_pairs(total, factor, loaded)
        return self.fma(factor, loaded, total)

    def factor(self, x: ir.Value, index: ir.Value) -> ir.Value:
        """The number of x, or the pair from there on, that a product multiplies by."""
        b = self.builder
        if self.sizes.in_pairs:
            place = b.bitcast(at(b, x, index, I16), I32.as_pointer())
            return self.splat(b.load(place, align=2))
        if self.sizes.element is F32:
            return self.splat(read(b, x, index, F32))
        bits = b.shl(b.zext(read(b, x, index, I16), I32), I32(16))
        return self.splat(b.bitcast(bits, F32))

    def columns(self, w: ir.Value, index: ir.Value, width: ir.Value) -> list[ir.Value]:
        """COLUMNS columns of a row of the matrix (or of two, in pairs), in vectors."""
        b = self.builder
        if not self.sizes.in_pairs:
            places = [b.add(index, I64(i)) for i in range(0, COLUMNS, _LANES)]
            return [self.load(w, place, self.sizes.element) for place in places]
        kind = ir.VectorType(I16, COLUMNS)
        first, second = (
            b.load(b.bitcast(at(b, w, place, I16), kind.as_pointer()), align=2)
            for place in (index, b.add(index, width))
        )
        found = []
        for start in range(0, COLUMNS, _LANES):
            order = [i + half for i in range(start, start + _LANES) for half in (0, COLUMNS)]
            mask = ir.Constant(ir.VectorType(I32, COLUMNS), order)
            found.append(b.bitcast(b.shuffle_vector(first, second, mask), self.ints))
        return found


class _Dequantised:
    """A quantised matrix's sheets of _DEPTH rows, one at a time, as vectors on the stack."""

    def __init__(self, products: _Products, w: ir.Value, first: ir.Value, steps: ir.Value) -> None:
        self._products = products
        self._bits = products.sizes.bits
        self._steps = steps  # groups in a column
        b = products.builder
        self._w = b.gep(w, [b.mul(first, I64(group_bytes(self._bits)))])
        with b.goto_entry_block():
            self._room = b.alloca(products.floats, _DEPTH * COLUMNS // _LANES // products.step)
            self._room.align = 64

    def read(self, first: ir.Value, last: ir.Value) -> None:
        """Dequantise rows first to last - 1."""
        products = self._products
        b, parts = products.builder, COLUMNS // _LANES
        group_rows = GROUP // products.step  # of vectors
        begin = b.sdiv(first, I64(GROUP))
        with loop(b, begin, b.sdiv(last, I64(GROUP))) as number:
            place = b.gep(self._w, [b.mul(number, I64(group_bytes(self._bits)))])
            group = Groups(b, place, self._bits)
            for ask in asking(group, self._w, number, size=self._steps, further=self._steps):
                ask()
            line = b.mul(b.sub(number, begin), I64(group_rows))
            for half in range(parts):
                for four in range(GROUP // 8):
                    for i, vector in enumerate(self._rows(group, half, four)):
                        row = b.add(line, I64(four * group_rows // 4 + i))
                        spot = b.gep(self._room, [b.add(b.mul(row, I64(parts)), I64(half))])
                        b.store(vector, b.bitcast(spot, vector.type.as_pointer()), align=64)

    def _rows(self, group: Groups, half: int, four: int) -> list[ir.Value]:
        if self._products.sizes.in_pairs:
            return group.bfloat_pairs(half, four)
        rows = group.float_rows(half, four)
        if self._products.sizes.element is F32:
            return rows
        return [group.rounded_to_bfloat(row) for row in rows]

    def columns(self, row: ir.Value) -> list[ir.Value]:
        """COLUMNS columns of this row of the sheet (or of two, in pairs), as `_Products` takes
        them."""
        products = self._products
        b, parts = products.builder, COLUMNS // _LANES
        kind = products.ints if products.sizes.in_pairs else products.floats
        index = b.mul(b.sdiv(row, I64(products.step)), I64(parts))
        places = [b.gep(self._room, [b.add(index, I64(part))]) for part in range(parts)]
        return [b.load(b.bitcast(place, kind.as_pointer()), align=64) for place in places]


def _multiply(sizes: Product, work: Work) -> None:
    """COLUMNS columns of x @ w[layer], of a panel of MOST_ROWS rows."""
    b, unit, numbers, arrays = work
    products = _Products(sizes, b)
    depth, width, layer, num_blocks, num_live = numbers
    x, w, y = arrays
    parts = COLUMNS // _LANES
    columns = b.sdiv(width, I64(COLUMNS))
    first_block = b.mul(b.sdiv(unit, columns), I64(MOST_ROWS // ROWS))
    unit = b.srem(unit, columns)
    num_blocks = smaller(b, b.sub(num_blocks, first_block), I64(MOST_ROWS // ROWS))
    num_live = smaller(b, b.sub(num_live, first_block), num_blocks)
    matrix = b.add(b.mul(layer, b.mul(depth, width)), b.mul(unit, I64(COLUMNS)))
    with b.goto_entry_block():
        kept = b.alloca(products.floats, MOST_ROWS * parts)
    sheet = None
    if sizes.bits:
        steps = b.sdiv(depth, I64(GROUP))
        column = b.add(b.mul(layer, columns), unit)
        sheet = _Dequantised(products, w, b.mul(column, steps), steps)

    def place(block, row, part):
        index = b.add(b.mul(block, I64(ROWS)), I64(row))
        return at(b, kept, b.add(b.mul(index, I64(parts)), I64(part)), products.floats)

    pairs = [(row, part) for row in range(ROWS) for part in range(parts)]
    with loop(b, I64(0), num_blocks) as block:  # those that are not live stay 0
        for pair in pairs:
            b.store(products.constant(0.0), place(block, *pair))
    with loop(b, I64(0), depth, _DEPTH) as first:
        last = smaller(b, b.add(first, I64(_DEPTH)), depth)
        if sheet is not None:
            sheet.read(first, last)
        with loop(b, I64(0), num_live) as block:
            sums = {pair: Variable(b, b.load(place(block, *pair))) for pair in pairs}
            begin = b.mul(b.mul(b.add(first_block, block), I64(ROWS)), depth)
            reads_first = b.icmp_signed("==", block, I64(0))
            with loop(b, first, last, UNROLL) as start:
                for step in range(0, UNROLL, products.step):
                    k = b.add(start, I64(step))
                    if sheet is not None:
                        loaded = sheet.columns(b.sub(k, first))
                    else:
                        here = b.add(matrix, b.mul(k, width))
                        with b.if_then(reads_first):
                            _ask(products, w, matrix, k, depth, width)
                        loaded = products.columns(w, here, width)
                    for row in range(ROWS):
                        index = b.add(b.add(begin, b.mul(I64(row), depth)), k)
                        factor = products.factor(x, index)
                        for part in range(parts):
                            total = sums[row, part]
                            total.set(products.add(total.get(), factor, loaded[part]))
            for pair, total in sums.items():
                b.store(total.get(), place(block, *pair))
    with loop(b, I64(0), num_blocks) as block:
        for row, part in pairs:
            line = b.add(b.mul(b.add(first_block, block), I64(ROWS)), I64(row))
            line = b.mul(line, width)
            index = b.add(b.add(line, b.mul(unit, I64(COLUMNS))), I64(part * _LANES))
            spot = b.bitcast(at(b, y, index, F32), products.floats.as_pointer())
            b.store(b.load(place(block, row, part)), spot, align=4)


def _ask(
    products: _Products,
    w: ir.Value,
    matrix: ir.Value,
    k: ir.Value,
    depth: ir.Value,
    width: ir.Value,
) -> None:
    """Ask for what is read some rows after row k: too far apart for hardware to foresee."""
    b, sizes = products.builder, products.sizes
    ahead = _AHEAD // (COLUMNS * sizes.item_size)
    for later in range(ahead, ahead + products.step):
        row = smaller(b, b.add(k, I64(later)), b.sub(depth, I64(1)))
        row = b.add(matrix, b.mul(row, width))
        for start in range(0, COLUMNS, 64 // sizes.item_size):
            products.prefetch(at(b, w, b.add(row, I64(start)), sizes.element))


@functools.cache
def multiplies_pairs() -> bool:
    """Whether this machine multiplies bfloat16 (AVX512-BF16)."""
    return bool(binding.get_host_cpu_features().get("avx512bf16", False))


@compiled_once
def kernel(sizes: Product) -> Handler:
    """The compiled kernel for these sizes."""
    return Handler("few_rows_product", build_handler(5, 2, 1, functools.partial(_multiply, sizes)))


def multiply(
    x: Float[Array, "T E"],
    w: Float[Array, "L E F"] | Quantised,
    layer: Int[Array, ""] | int,
    num_live: Int[Array, ""] | int,
) -> Float[Array, "T F"]:
    """Return float32 x @ w[layer], read in the stack, of the first num_live rows; others may be 0.
    T is a multiple of ROWS, E of UNROLL and F of COLUMNS. MOST_ROWS rows share what is read."""
    num_rows, depth = x.shape
    in_pairs = x.dtype == jnp.bfloat16 and multiplies_pairs()
    sizes = Product(x.dtype.name, in_pairs)
    if isinstance(w, Quantised):
        sizes, matrices = sizes._replace(bits=w.bits), w.groups
        width = matrices.shape[1] * COLUMNS
    else:
        matrices, width = w, w.shape[2]
    live = jnp.clip((jnp.asarray(num_live, jnp.int32) + ROWS - 1) // ROWS, 0, num_rows // ROWS)
    return call_handler(
        kernel(sizes),
        jax.ShapeDtypeStruct((num_rows, width), jnp.float32),
        x,
        matrices,
        units=width // COLUMNS * -(-num_rows // MOST_ROWS),
        alone=depth * width < _ALONE,
        numbers=(depth, width, layer, num_rows // ROWS, live),
    )
