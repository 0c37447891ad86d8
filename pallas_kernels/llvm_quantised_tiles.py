"""Products of float32 rows with quantised weights on a CPU with a matrix unit (`llvm_tiles`), as
kernels that LLVM compiles for the machine.

A group's numbers have few bits, so they are bfloat16 as they are, and float32 rows are three parts
of bfloat16: three products of tiles add up a group's numbers times the rows, exactly but for the
sums. Each result is then scaled, and the group's offset times the sum of the row's numbers added:
less work than to make weights of the numbers first, which would have to be split into parts too.

A unit of work reads COLUMNS columns, front to back; while it lays out one group's numbers as tiles,
it multiplies those of the group before and scales the results of the one before that. Each sum is
added up in an order that depends on the matrix alone: a row's results are the same, to the bit,
whatever rows are beside it. Numbers are added up before they are scaled, so what is above some
2^120 may overflow that would not with the weights themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from llvmlite import ir

from pallas_kernels.llvm_build import F32, I8, I64, Work, at, build_handler, larger, loop, smaller
from pallas_kernels.llvm_handler import Handler, call_handler, compiled_once
from pallas_kernels.llvm_quantised import CENTRE, Groups, asking
from pallas_kernels.llvm_tiles import (
    DEPTH,
    LANES,
    ROWS,
    TILE,
    Action,
    Tiles,
    interleave,
    num_parts,
    threads,
    tile_rows,
)
from pallas_kernels.quantised import COLUMNS, Quantised, group_bytes

# Groups after which sums are put aside, so that there is room on the stack for their tiles: 128
# KiB. A power of 2.
_STEPS = 64
_PARTS = num_parts("float32")
# Bytes of rows that take all of w before the next ones do: they stay in the second nearest cache.
# But each time all of w is read, so there are at least some panels of rows.
_AT_ONCE, _LEAST = 1 << 20, 4
# Below so many numbers a second thread is not worth calling: of rows to lay out, and of a matrix.
_ALONE_ROWS, _ALONE = 1 << 17, 1 << 15


class Product(NamedTuple):
    """What a kernel is compiled for."""

    blocks: int  # tiles of rows that are multiplied at once, a panel: 1 or 2
    rows: int  # of a tile of them
    bits: int  # of a number


def _lay_out(sizes: Product, work: Work) -> None:
    """One tile's rows of x, as tiles [panel, step, part, block] of the first result, and what each
    group of their numbers adds up to, [panel, step, block] of the second."""
    b, unit, numbers, arrays = work
    blocks = sizes.blocks
    tiles = Tiles(b, _PARTS, blocks, 2, rows=sizes.rows)
    num_rows, depth = numbers
    x, y, sums = arrays
    steps = b.sdiv(depth, I64(DEPTH))
    panel, block = b.sdiv(unit, I64(blocks)), b.srem(unit, I64(blocks))
    first = b.mul(unit, I64(sizes.rows))
    last = smaller(b, b.add(first, I64(sizes.rows)), num_rows)  # rows of padding stay what they are
    with loop(b, I64(0), steps) as step:  # outside, so that what is written is adjacent
        group = b.add(b.mul(panel, steps), step)
        with loop(b, first, last) as row:
            line = b.sub(row, first)
            index = b.add(b.mul(row, depth), b.mul(step, I64(DEPTH)))
            second = b.add(index, I64(LANES))
            for part, half in enumerate(tiles.load_rows(x, index, second, "float32")):
                tile = b.add(b.mul(b.add(b.mul(group, I64(_PARTS)), I64(part)), I64(blocks)), block)
                place = b.mul(b.add(b.mul(tile, I64(sizes.rows)), line), I64(64))
                tiles.keep(tiles.joined(*half), y, place)
            total = tiles.sum(b.fadd(tiles.load(x, index, F32), tiles.load(x, second, F32)))
            place = b.add(b.mul(b.add(b.mul(group, I64(blocks)), block), I64(sizes.rows)), line)
            b.store(total, at(b, sums, place, F32))


def _multiply(sizes: Product, work: Work) -> None:
    """COLUMNS columns of x @ w[layer], of the rows of several panels."""
    b, unit, numbers, arrays = work
    blocks, rows = sizes.blocks, sizes.blocks * sizes.rows
    tiles = Tiles(b, _PARTS, blocks, 2, rows=sizes.rows, exact_b=True)
    depth, width, layer, panels, num_live, panels_at_once, apart = numbers
    x, sums, w, y = arrays
    steps, columns = b.sdiv(depth, I64(DEPTH)), b.sdiv(width, I64(COLUMNS))
    first = b.mul(b.sdiv(unit, columns), panels_at_once)
    last = smaller(b, b.add(first, panels_at_once), panels)
    live = smaller(b, last, num_live)
    column = b.srem(unit, columns)
    size = group_bytes(sizes.bits)
    matrix = b.gep(w, [b.mul(b.mul(b.add(b.mul(layer, columns), column), steps), I64(size))])
    column = b.mul(column, I64(COLUMNS))
    result_bytes = 2 * rows * 64
    with b.goto_entry_block():
        room, products, totals, zeros = (
            b.alloca(I8, size) for size in (_STEPS * 2 * TILE, 2 * result_bytes, result_bytes, 128)
        )
        for place in (room, products, totals, zeros):
            place.align = 64
    # What only one panel of rows needs, it needs once: two places do, in the nearest cache.
    once = b.icmp_signed("<=", live, b.add(first, I64(1)))
    mask = b.select(once, I64(1), I64(_STEPS - 1))

    def tiles_of_w(step: ir.Value) -> ir.Value:
        return b.gep(room, [b.mul(b.and_(step, mask), I64(2 * TILE))])

    def group_of(step: ir.Value) -> Groups:
        return Groups(b, b.gep(matrix, [b.mul(step, I64(size))]), sizes.bits)

    def reading(step: ir.Value, place: ir.Value) -> list[Action]:
        group = group_of(step)

        def read_pairs(half: int, four: int) -> None:
            for i, row in enumerate(group.centred_pairs(half, four)):
                tiles.keep(row, place, I64(half * TILE + (4 * four + i) * 64))

        further = b.mul(apart, steps)
        asks = asking(group, matrix, step, size=steps, further=further)
        reads = [functools.partial(read_pairs, i, j) for i in range(2) for j in range(4)]
        return [*reads, *asks]

    def products_of(step: ir.Value) -> ir.Value:
        return b.gep(products, [b.mul(b.and_(step, I64(1)), I64(result_bytes))])

    def in_rows(step: ir.Value, panel: ir.Value, size: int) -> ir.Value:
        return b.mul(b.add(b.mul(panel, steps), step), I64(size))

    def multiplying(panel: ir.Value, step: ir.Value, place: ir.Value) -> list[Action]:
        results = products_of(step)
        a = b.gep(x, [in_rows(step, panel, _PARTS * rows * 64)])

        def keep() -> None:
            tiles.store(lambda block, half: place_of(results, block, half, 0), I64(64))

        return [tiles.zero, *tiles.products(a, place), keep]

    def place_of(base: ir.Value, block: int, half: int, row: int) -> ir.Value:
        return b.gep(base, [I64(((block * 2 + half) * sizes.rows + row) * 64)])

    def vector_at(place: ir.Value) -> ir.Value:
        return b.bitcast(place, tiles.floats.as_pointer())

    def each_row() -> Iterator[tuple[int, int, int]]:
        for half in range(2):
            for block in range(blocks):
                for row in range(sizes.rows):
                    yield block, half, row

    def scaling(panel: ir.Value, step: ir.Value, start: ir.Value) -> list[Action]:
        """totals += scales * products + offsets * sums of a step; before `start` they are all 0."""
        none = b.icmp_signed("<", step, start)
        group = group_of(larger(b, step, start))
        of_rows = b.gep(b.bitcast(sums, F32.as_pointer()), [in_rows(step, panel, rows)])
        of_rows = b.select(none, b.bitcast(zeros, F32.as_pointer()), of_rows)
        results = products_of(step)
        scales, offsets = [], []
        for half in range(2):
            scale, offset = group.scales(half), group.offsets(half)
            scales.append(scale)
            if offset is not None:
                offsets.append(tiles.fma(tiles.constant(CENTRE), scale, offset))

        def scale_row(block: int, half: int, row: int) -> None:
            place = vector_at(place_of(totals, block, half, row))
            product = b.load(vector_at(place_of(results, block, half, row)), align=64)
            total = tiles.fma(scales[half], product, b.load(place, align=64))
            if offsets:
                number = b.load(b.gep(of_rows, [I64(block * sizes.rows + row)]))
                total = tiles.fma(offsets[half], tiles.splat(number), total)
            b.store(total, place, align=64)

        return [functools.partial(scale_row, *where) for where in each_row()]

    def result(panel: ir.Value, block: int, half: int, row: int) -> ir.Value:
        line = b.add(b.mul(panel, I64(rows)), I64(block * sizes.rows + row))
        index = b.add(b.mul(line, width), b.add(column, I64(half * LANES)))
        return vector_at(at(b, y, index, F32))

    def clear(place: ir.Value, size: int) -> None:
        for offset in range(0, size, 64):
            b.store(tiles.constant(0.0), vector_at(b.gep(place, [I64(offset)])), align=64)

    def with_totals(panel: ir.Value, begins: ir.Value, build: Action) -> None:
        clear(products, 2 * result_bytes)
        for where in each_row():
            tiles.prefetch(result(panel, *where), to_write=True)
        with b.if_else(begins) as (then, otherwise):
            with then:
                clear(totals, result_bytes)
            with otherwise:
                for where in each_row():
                    kept = b.load(result(panel, *where), align=4)
                    b.store(kept, vector_at(place_of(totals, *where)), align=64)
        build()
        for where in each_row():
            total = b.load(vector_at(place_of(totals, *where)), align=64)
            b.store(total, result(panel, *where), align=4)

    tiles.configure()
    clear(zeros, 128)
    with loop(b, I64(0), steps, _STEPS) as start:
        count = smaller(b, b.sub(steps, start), I64(_STEPS))
        begins = b.icmp_signed("==", start, I64(0))

        def before(now: ir.Value, by: int) -> ir.Value:
            return b.add(start, b.sub(now, I64(by)))

        def first_panel() -> None:
            for act in reading(start, tiles_of_w(I64(0))):
                act()
            with loop(b, I64(1), count) as now:
                step = before(now, 1)
                reads = reading(b.add(start, now), tiles_of_w(now))
                multiplies = multiplying(first, step, tiles_of_w(b.sub(now, I64(1))))
                interleave(multiplies, [*reads, *scaling(first, before(now, 2), start)])
            multiplies = multiplying(first, before(count, 1), tiles_of_w(b.sub(count, I64(1))))
            interleave(multiplies, scaling(first, before(count, 2), start))
            for act in scaling(first, before(count, 1), start):
                act()

        with b.if_then(b.icmp_signed("<", first, live)):
            with_totals(first, begins, first_panel)
        with loop(b, b.add(first, I64(1)), live) as panel:

            def another_panel() -> None:
                with loop(b, I64(0), count) as now:
                    multiplies = multiplying(panel, b.add(start, now), tiles_of_w(now))
                    interleave(multiplies, scaling(panel, before(now, 1), start))
                for act in scaling(panel, before(count, 1), start):
                    act()

            with_totals(panel, begins, another_panel)
    with loop(b, larger(b, first, live), last) as panel:
        for where in each_row():
            b.store(tiles.constant(0.0), result(panel, *where), align=4)
    tiles.release()


@compiled_once
def _rows_kernel(sizes: Product) -> Handler:
    return Handler("rows_and_sums", build_handler(2, 1, 2, functools.partial(_lay_out, sizes)))


@compiled_once
def _kernel(sizes: Product) -> Handler:
    return Handler("quantised_product", build_handler(7, 3, 1, functools.partial(_multiply, sizes)))


def multiply(
    x: Float[Array, "T E"],
    w: Quantised,
    layer: Int[Array, ""] | int,
    num_live: Int[Array, ""] | int,
) -> Float[Array, "T F"]:
    """Return x @ w[layer], read in the stack, of the first num_live rows; others may be 0. x is
    float32, and the outputs are a multiple of COLUMNS."""
    num_rows, depth = x.shape
    width = w.groups.shape[1] * COLUMNS
    sizes = Product(1 if num_rows <= ROWS else 2, tile_rows(num_rows), w.bits)
    panel_rows = sizes.rows * sizes.blocks
    panels = -(-num_rows // panel_rows)
    shape = (panels, depth // DEPTH, _PARTS, sizes.blocks, sizes.rows, DEPTH)
    rows, sums = call_handler(
        # Sums do not depend on the numbers' bits.
        _rows_kernel(sizes._replace(bits=0)),
        (
            jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            jax.ShapeDtypeStruct((panels, depth // DEPTH, panel_rows), jnp.float32),
        ),
        x,
        units=-(-num_rows // sizes.rows),
        alone=x.size < _ALONE_ROWS,
        numbers=(num_rows, depth),
    )
    most = max(_AT_ONCE // (panel_rows * depth * _PARTS * 2), _LEAST)
    at_once = -(-panels // -(-panels // most))
    live = jnp.asarray(num_live, jnp.int32) + (panel_rows - 1)
    live = lax.clamp(np.int32(0), lax.div(live, np.int32(panel_rows)), np.int32(panels))
    alone = depth * width < _ALONE
    y = call_handler(
        _kernel(sizes),
        jax.ShapeDtypeStruct((panels * panel_rows, width), jnp.float32),
        rows,
        sums,
        w.groups,
        units=width // COLUMNS * -(-panels // at_once),
        alone=alone,
        numbers=(depth, width, layer, panels, live, at_once, 1 if alone else threads()),
    )
    return y[:num_rows]
