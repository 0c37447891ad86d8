"""Products of rows with a large matrix on a CPU with a matrix unit (`llvm_tiles`), as kernels that
LLVM compiles for the machine.

The rows are laid out as tiles once. Then a unit of work reads COLUMNS columns of the matrix, front
to back, and lays them out as tiles on its stack; meanwhile it multiplies the tiles before with the
first rows, so that reading and multiplying overlap. Other rows are multiplied with the tiles as
they lie there. Each sum is added up in an order that depends on the matrix alone: a row's results
are the same, to the bit, whatever rows are beside it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from llvmlite import ir

from pallas_kernels.llvm_build import (
    F32,
    I8,
    I64,
    Work,
    at,
    build_handler,
    larger,
    loop,
    smaller,
)
from pallas_kernels.llvm_handler import Handler, call_handler, compiled_once
from pallas_kernels.llvm_quantised import Groups, asking
from pallas_kernels.llvm_tiles import (
    AHEAD,
    DEPTH,
    LANES,
    ROWS,
    TILE,
    Action,
    Tiles,
    interleave,
    num_parts,
    threads,
)
from pallas_kernels.quantised import COLUMNS, Quantised, group_bytes

# Products of tiles after which sums are put aside, so that there is room on the stack for the tiles
# of w: 108 KiB of three parts, which stay in the second nearest cache.
_STEPS = 18
_PLACES = 32  # a power of 2 from _STEPS on
# Bytes of rows that take all of w before the next ones do: they stay there too. But each panel
# reads all of w, so it has at least some groups of rows.
_PANEL, _LEAST = 1 << 20, 4
# Below so many numbers a second thread is not worth calling: of rows to lay out, and of a matrix.
_ALONE_ROWS, _ALONE = 1 << 17, 1 << 15


class Product(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str  # of the rows and of the matrix
    blocks: int  # tiles of rows that are multiplied at once, 1 or 2
    bits: int = 0  # of a quantised matrix's numbers


def _lay_out(sizes: Product, work: Work) -> None:
    """One tile's rows of x, as tiles [group, step, part, block] of the result."""
    b, unit, numbers, arrays = work
    parts, blocks = num_parts(sizes.dtype), sizes.blocks
    tiles = Tiles(b, parts, blocks, 2)
    num_rows, depth = numbers
    x, y = arrays
    steps = b.sdiv(depth, I64(DEPTH))
    group, block = b.sdiv(unit, I64(blocks)), b.srem(unit, I64(blocks))
    first = b.mul(unit, I64(ROWS))
    last = smaller(b, b.add(first, I64(ROWS)), num_rows)  # rows of padding stay what they are
    # In this order what is written is adjacent.
    with loop(b, I64(0), steps) as step, loop(b, first, last) as row:
        line = b.mul(b.sub(row, first), I64(64))
        index = b.add(b.mul(row, depth), b.mul(step, I64(DEPTH)))
        where = b.mul(b.add(b.mul(group, steps), step), I64(parts))
        halves = tiles.load_rows(x, index, b.add(index, I64(LANES)), sizes.dtype)
        for part, half in enumerate(halves):
            tile = b.add(b.mul(b.add(where, I64(part)), I64(blocks)), block)
            tiles.keep(tiles.joined(*half), y, b.add(b.mul(tile, I64(TILE)), line))


def _multiply(sizes: Product, work: Work) -> None:
    """COLUMNS columns of x @ w[layer], of the rows of a panel."""
    b, unit, numbers, arrays = work
    parts, blocks = num_parts(sizes.dtype), sizes.blocks
    tiles = Tiles(b, parts, blocks, 2)
    depth, width, layer, groups, num_live, panel, apart = numbers
    x, w, y = arrays
    steps, columns = b.sdiv(depth, I64(DEPTH)), b.sdiv(width, I64(COLUMNS))
    first = b.mul(b.sdiv(unit, columns), panel)  # groups of rows
    last = smaller(b, b.add(first, panel), groups)
    live = smaller(b, last, num_live)
    column = b.mul(b.srem(unit, columns), I64(COLUMNS))
    matrix = b.mul(b.add(b.mul(layer, width), column), depth)
    if sizes.bits:
        size = group_bytes(sizes.bits)
        matrix = b.gep(w, [b.mul(b.sdiv(matrix, I64(DEPTH * COLUMNS)), I64(size))])
    step_bytes = 2 * parts * TILE
    with b.goto_entry_block():
        room = b.alloca(I8, _STEPS * step_bytes)
        room.align = 64
    # What only one group of rows needs, it needs once: two places do, in the nearest cache.
    once = b.icmp_signed("<=", live, b.add(first, I64(1)))
    mask = b.select(once, I64(1), I64(_PLACES - 1))

    def tiles_of_w(step: ir.Value) -> ir.Value:
        return b.gep(room, [b.mul(b.and_(step, mask), I64(step_bytes))])

    def read_pair(step: ir.Value, place: ir.Value, row: int) -> None:
        """Two rows of a step's w become one of its tiles."""
        index = b.mul(b.add(b.mul(step, I64(DEPTH)), I64(row)), I64(COLUMNS))
        tiles.ask(
            w,
            matrix,
            b.add(index, I64(AHEAD * DEPTH * COLUMNS)),
            size=b.mul(depth, I64(COLUMNS)),
            further=b.mul(b.mul(apart, depth), I64(COLUMNS)),
            count=2 * COLUMNS,
            dtype=sizes.dtype,
        )
        begin = b.add(matrix, index)
        for half in range(2):
            start = b.add(begin, I64(half * LANES))
            pairs = tiles.load_rows(w, start, b.add(start, I64(COLUMNS)), sizes.dtype)
            for part, pair in enumerate(pairs):
                offset = (2 * part + half) * TILE + row // 2 * 64
                tiles.keep(tiles.in_pairs(*pair), place, I64(offset))

    def read_quantised(step: ir.Value, place: ir.Value) -> list[Action]:
        """A group's weights, rounded to bfloat16, become a step's tiles."""
        group = Groups(b, b.gep(matrix, [b.mul(step, I64(size))]), sizes.bits)

        def read_pairs(half: int, four: int) -> None:
            for i, row in enumerate(group.bfloat_pairs(half, four)):
                tiles.keep(row, place, I64(half * TILE + (4 * four + i) * 64))

        asks = asking(group, matrix, step, size=steps, further=b.mul(apart, steps))
        return [functools.partial(read_pairs, i, j) for i in range(2) for j in range(4)] + asks

    def reading(step: ir.Value, place: ir.Value) -> list[Action]:
        if sizes.bits:
            return read_quantised(step, place)
        return [functools.partial(read_pair, step, place, row) for row in range(0, DEPTH, 2)]

    def tiles_of_x(group: ir.Value, step: ir.Value) -> ir.Value:
        return b.gep(x, [b.mul(b.add(b.mul(group, steps), step), I64(parts * blocks * TILE))])

    def multiplying(group: ir.Value, step: ir.Value, place: ir.Value) -> list[Action]:
        return tiles.products(tiles_of_x(group, step), place)

    def result(group: ir.Value, row: int, half: int) -> ir.Value:
        line = b.add(b.mul(group, I64(blocks * ROWS)), I64(row))
        index = b.add(b.mul(line, width), b.add(column, I64(half * LANES)))
        return at(b, y, index, F32)

    def with_sums(group: ir.Value, begins: ir.Value, build: Action) -> None:
        def place(block: int, half: int) -> ir.Value:
            return result(group, block * ROWS, half)

        stride = b.mul(width, I64(4))
        with b.if_else(begins) as (then, otherwise):
            with then:
                tiles.zero()
            with otherwise:
                tiles.resume(place, stride)
        build()
        tiles.store(place, stride)

    tiles.configure()
    with loop(b, I64(0), steps, _STEPS) as start:
        count = smaller(b, b.sub(steps, start), I64(_STEPS))
        begins = b.icmp_signed("==", start, I64(0))

        def first_group() -> None:
            for act in reading(start, tiles_of_w(I64(0))):
                act()
            with loop(b, I64(1), count) as now:
                before = b.sub(now, I64(1))
                interleave(
                    reading(b.add(start, now), tiles_of_w(now)),
                    multiplying(first, b.add(start, before), tiles_of_w(before)),
                )
            now = b.sub(count, I64(1))
            for act in multiplying(first, b.add(start, now), tiles_of_w(now)):
                act()

        with b.if_then(b.icmp_signed("<", first, live)):
            with_sums(first, begins, first_group)
        with loop(b, b.add(first, I64(1)), live) as group:

            def another_group() -> None:
                for row in range(blocks * ROWS):
                    for half in range(2):
                        tiles.prefetch(result(group, row, half), to_write=True)
                with loop(b, I64(0), count) as now:
                    step = b.add(start, now)
                    later = tiles_of_x(group, b.add(step, I64(AHEAD)))
                    lines = [b.gep(later, [I64(i)]) for i in range(0, parts * blocks * TILE, 64)]
                    interleave(
                        multiplying(group, step, tiles_of_w(now)),
                        [functools.partial(tiles.prefetch, line) for line in lines],
                    )

            with_sums(group, begins, another_group)
    with loop(b, larger(b, first, live), last) as group:
        with_sums(group, ir.Constant(ir.IntType(1), 1), lambda: None)
    tiles.release()


# With how many numbers and arrays each takes.
_BODIES = {"rows_as_tiles": (2, 1, _lay_out), "tiles_product": (7, 2, _multiply)}


@compiled_once
def _kernel(name: str, sizes: Product) -> Handler:
    num_numbers, num_arrays, body = _BODIES[name]
    body = functools.partial(body, sizes)
    return Handler(name, build_handler(num_numbers, num_arrays, 1, body))


def multiply(
    x: Float[Array, "T E"],
    w: Float[Array, "L C E COLUMNS"] | Quantised,
    layer: Int[Array, ""] | int,
    num_live: Int[Array, ""] | int,
) -> Float[Array, "T F"]:
    """Return float32 x @ w[layer], read in the stack, of the first num_live rows; others may be 0.
    w holds columns of [L, E, F], COLUMNS side by side; E is a multiple of DEPTH. Quantised ones are
    for x of bfloat16."""
    num_rows, depth = x.shape
    sizes = Product(x.dtype.name, 1 if num_rows <= ROWS else 2)
    if isinstance(w, Quantised):
        sizes, matrices = sizes._replace(bits=w.bits), w.groups
    else:
        matrices = w
    width = matrices.shape[1] * COLUMNS
    parts, group_rows = num_parts(sizes.dtype), ROWS * sizes.blocks
    groups = -(-num_rows // group_rows)
    rows = call_handler(
        _kernel("rows_as_tiles", sizes._replace(bits=0)),
        jax.ShapeDtypeStruct(
            (groups, depth // DEPTH, parts, sizes.blocks, ROWS, DEPTH), jnp.bfloat16
        ),
        x,
        units=-(-num_rows // ROWS),
        alone=x.size < _ALONE_ROWS,
        numbers=(num_rows, depth),
    )
    most = max(_PANEL // (group_rows * depth * parts * 2), _LEAST)
    panel = -(-groups // -(-groups // most))
    live = jnp.asarray(num_live, jnp.int32) + (group_rows - 1)
    live = lax.clamp(np.int32(0), lax.div(live, np.int32(group_rows)), np.int32(groups))
    alone = depth * width < _ALONE
    y = call_handler(
        _kernel("tiles_product", sizes),
        jax.ShapeDtypeStruct((groups * group_rows, width), jnp.float32),
        rows,
        matrices,
        units=width // COLUMNS * -(-groups // panel),
        alone=alone,
        numbers=(depth, width, layer, groups, live, panel, 1 if alone else threads()),
    )
    return y[:num_rows]
