"""A model's head on a CPU with a matrix unit (`llvm_tiles`): logits of few rows, as a kernel that
LLVM compiles for the machine.

The table [V, E] is read once, front to back: a unit of work takes VOCABULARY of its rows and
multiplies them with all rows of x, so what it computes lies transposed. It is turned in registers
before it is written. A row's logits are the same, to the bit, whatever rows are beside it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float
from llvmlite import ir

from pallas_kernels.llvm_build import (
    F32,
    I8,
    I64,
    Work,
    at,
    build_handler,
    loop,
)
from pallas_kernels.llvm_handler import Handler, call_handler, compiled_once
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

VOCABULARY = 32  # rows of the table in a unit: two tiles
MOST_ROWS = 32  # of x: two tiles


class Head(NamedTuple):
    """What a kernel is compiled for."""

    dtype: str  # of the rows and of the table
    halves: int  # tiles of rows, 1 or 2


def _multiply(sizes: Head, work: Work) -> None:
    """VOCABULARY columns of x @ table.T."""
    b, unit, numbers, arrays = work
    parts, halves = num_parts(sizes.dtype), sizes.halves
    tiles = Tiles(b, parts, 2, halves)
    depth, vocabulary, num_rows, apart = numbers
    x, table, y = arrays
    steps = b.sdiv(depth, I64(DEPTH))
    first = b.mul(unit, I64(VOCABULARY))
    step_bytes = 2 * parts * TILE
    with b.goto_entry_block():
        room = b.alloca(I8, 2 * step_bytes)
        room.align = 64
        turned = b.alloca(I8, 2 * halves * TILE)
        turned.align = 64

    def tiles_of_table(step: ir.Value) -> ir.Value:
        return b.gep(room, [b.mul(b.and_(step, I64(1)), I64(step_bytes))])

    def read_row(step: ir.Value, place: ir.Value, row: int) -> None:
        line = b.mul(b.add(first, I64(row)), depth)
        k = b.mul(step, I64(DEPTH))
        further = b.mul(b.mul(apart, I64(VOCABULARY)), depth)
        later = b.add(k, I64(AHEAD * DEPTH))
        tiles.ask(table, line, later, size=depth, further=further, count=DEPTH, dtype=sizes.dtype)
        start = b.add(line, k)
        halves_of_row = tiles.load_rows(table, start, b.add(start, I64(LANES)), sizes.dtype)
        for part, half in enumerate(halves_of_row):
            offset = (2 * part + row // ROWS) * TILE + row % ROWS * 64
            tiles.keep(tiles.joined(*half), place, I64(offset))

    def reading(step: ir.Value) -> list[Action]:
        place = tiles_of_table(step)
        return [functools.partial(read_row, step, place, row) for row in range(VOCABULARY)]

    def multiplying(step: ir.Value) -> list[Action]:
        rows = b.gep(x, [b.mul(step, I64(halves * parts * TILE))])
        return tiles.products(tiles_of_table(step), rows)

    tiles.configure()
    tiles.zero()
    for act in reading(I64(0)):
        act()
    with loop(b, I64(1), steps) as step:
        interleave(reading(step), multiplying(b.sub(step, I64(1))))
    for act in multiplying(b.sub(steps, I64(1))):
        act()
    tiles.store(lambda block, half: b.gep(turned, [I64((block * halves + half) * TILE)]), I64(64))
    tiles.release()
    for block in range(2):
        for half in range(halves):
            begin = LANES * ROWS * (block * halves + half)
            lines = [tiles.load(turned, I64(begin + LANES * i), F32) for i in range(ROWS)]
            for i, line in enumerate(tiles.transposed(lines)):
                row = I64(half * LANES + i)
                with b.if_then(b.icmp_signed("<", row, num_rows)):
                    column = b.add(first, I64(block * ROWS))
                    place = at(b, y, b.add(b.mul(row, vocabulary), column), F32)
                    b.store(line, b.bitcast(place, tiles.floats.as_pointer()), align=4)


@compiled_once
def _kernel(sizes: Head) -> Handler:
    return Handler("head", build_handler(4, 2, 1, functools.partial(_multiply, sizes)))


def logits(x: Float[Array, "R E"], table: Float[Array, "V E"]) -> Float[Array, "R V"]:
    """Return float32 x @ table.T; R is at most MOST_ROWS, E a multiple of DEPTH and V one of
    VOCABULARY."""
    num_rows, depth = x.shape
    sizes = Head(x.dtype.name, 1 if num_rows <= LANES else 2)
    parts = [x]
    if num_parts(sizes.dtype) == 3:  # as Tiles.split does, but for ties
        first = lax.reduce_precision(x, 8, 7)
        second = lax.reduce_precision(x - first, 8, 7)
        parts = [first, second, x - first - second]
    rows = jnp.stack(parts).astype(jnp.bfloat16)
    rows = jnp.pad(rows, [(0, 0), (0, LANES * sizes.halves - num_rows), (0, 0)])
    rows = rows.reshape(len(parts), sizes.halves, LANES, depth // DEPTH, DEPTH // 2, 2)
    rows = rows.transpose(3, 0, 1, 4, 2, 5)  # [step, part, half, pair, row, 2]
    return call_handler(
        _kernel(sizes),
        jax.ShapeDtypeStruct((num_rows, table.shape[0]), jnp.float32),
        rows,
        table,
        units=table.shape[0] // VOCABULARY,
        alone=False,
        numbers=(depth, table.shape[0], num_rows, threads()),
    )
