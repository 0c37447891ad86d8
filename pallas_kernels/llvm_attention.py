"""Attention of single queries on a CPU: a kernel that LLVM compiles for the machine at hand.

One query attends to its sequence's keys block by block, with an online softmax (FlashAttention, Dao
et al. 2022) over chunks of keys: scores of a chunk, their maximum and exponentials, then its
values. All is in float32, and 16-bit floats are widened as they are read. Keys and values are read
in the pool, where they lie: XLA, which has no such loops, would gather them first.

A unit of work is one KV head of one query, with the query heads that share it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32
from llvmlite import ir

from pallas_kernels.llvm import CHUNK
from pallas_kernels.llvm_build import (
    F16,
    F32,
    I16,
    I32,
    I64,
    Variable,
    Vectors,
    Work,
    at,
    build_handler,
    larger,
    loop,
    read,
    read_int,
    smaller,
)
from pallas_kernels.llvm_handler import Handler, call_handler, compiled_once
from pallas_kernels.xla_attention import HIDDEN, Call, State

_LANES = (16, 8, 4)  # floats in a vector; 16 are a register of AVX-512, or two of AVX2
# Query heads whose sums are held in registers at once, in vectors.
_ACCUMULATORS = 16
_LINE = 64  # bytes of a cache line
# Floats of the pool below which a second thread is not worth calling (about 10 us).
_FLOATS_ALONE = 1 << 15
_LOWEST = -87.0  # exp of less is 0 here (about the least normal float32)


class Sizes(NamedTuple):
    """What a kernel is compiled for."""

    num_kv_heads: int
    group: int  # query heads a KV head
    block_size: int
    head_dim: int
    dtype: str  # of queries, keys and values: float32, bfloat16 or float16

    @property
    def lanes(self) -> int:
        """Floats in a vector: head_dim is a multiple of them."""
        return next(lanes for lanes in _LANES if self.head_dim % lanes == 0)


class _Emitter(Vectors):
    """Builds the body of a kernel."""

    def __init__(self, sizes: Sizes, builder: ir.IRBuilder) -> None:
        super().__init__(builder, sizes.lanes)
        self.sizes = sizes
        self.element = {"float32": F32, "bfloat16": I16, "float16": F16}[sizes.dtype]
        self.item_size = 4 if sizes.dtype == "float32" else 2
        self.vectors = sizes.head_dim // self.lanes  # of one head
        self.chunk = max(CHUNK // sizes.block_size, 1) * sizes.block_size
        # Scores of a chunk for each head of the group, to the end of a vector.
        self.row = -(-self.chunk // self.lanes) * self.lanes
        with builder.goto_entry_block():
            scores = builder.alloca(F32, sizes.group * self.row)
            scores.align = _LINE
            outputs = builder.alloca(self.floats, sizes.group * self.vectors)
        self.scores, self.outputs = scores, outputs

    def score(self, head: int, key: ir.Value) -> ir.Value:
        """Where the score of a head and a key of the chunk is."""
        return at(self.builder, self.scores, self.builder.add(I64(head * self.row), key), F32)

    def scores_from(self, head: int, key: ir.Value) -> ir.Value:
        """Where a vector of them begins; `key` is a multiple of the lanes."""
        return self.builder.bitcast(self.score(head, key), self.floats.as_pointer())

    def output(self, head: int, vector: int) -> ir.Value:
        """Where a vector of a head's sum of values is kept between chunks."""
        return at(self.builder, self.outputs, I64(head * self.vectors + vector), self.floats)

    def exp(self, x: ir.Value) -> ir.Value:
        """exp of a vector of numbers <= 0, to 2 units in the last place; 0 below _LOWEST.

        x = n ln 2 + r, and a polynomial for exp(r), |r| <= ln 2 / 2 (the coefficients are those of
        Cephes' expf, S. L. Moshier).
        """
        b = self.builder
        is_zero = b.fcmp_ordered("<", x, self.constant(_LOWEST))
        n = self.call(
            self.name("roundeven"),
            self.floats,
            [b.fmul(x, self.constant(1.4426950408889634))],
        )
        r = self.fma(n, self.constant(-0.693359375), x)  # ln 2 in two parts
        r = self.fma(n, self.constant(2.12194440054690583e-4), r)
        p = self.constant(1.9875691500e-4)
        for coefficient in (
            1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
        ):  # fmt: skip
            p = self.fma(p, r, self.constant(coefficient))
        p = b.fadd(self.fma(p, b.fmul(r, r), r), self.constant(1.0))
        # Saturating: of a NaN, which stays one, the plain conversion may make anything.
        power = self.call(self.name(f"fptosi.sat.v{self.lanes}i32"), self.ints, [n])
        bits = b.shl(b.add(power, self.constant_int(127)), self.constant_int(23))
        return b.select(is_zero, self.constant(0.0), b.fmul(p, b.bitcast(bits, self.floats)))

    def prefetch_token(self, base: ir.Value, row: ir.Value) -> None:
        """Ask for one key or value of the next block while this one is worked on: they lie anywhere
        in the pool, where no hardware foresees them."""
        b = self.builder
        for start in range(0, self.sizes.head_dim, _LINE // self.item_size):
            self.prefetch(at(b, base, b.add(row, I64(start)), self.element))

    def heads(self) -> list[range]:
        """The group's heads, as many at once as registers hold."""
        step = max(_ACCUMULATORS // self.vectors, 1)
        group = self.sizes.group
        return [range(i, min(i + step, group)) for i in range(0, group, step)]


def _attend(sizes: Sizes, work: Work) -> None:
    """One KV head of one row. The arrays are operands and results of `attend_rows`'s call."""
    b, unit, numbers, arrays = work
    emit = _Emitter(sizes, b)
    first_row, last_block, num_columns = numbers
    q, pool, tables, sequences, low, high, scale_of, maxima, totals, outputs = arrays
    K, G, B, D = sizes.num_kv_heads, sizes.group, sizes.block_size, sizes.head_dim
    scale = emit.splat(read(b, scale_of, I64(0), F32))
    maximum, total = ([Variable(b, F32(0)) for _ in range(G)] for _ in range(2))
    row_of_q, kv_head = b.sdiv(unit, I64(K)), b.srem(unit, I64(K))
    sequence, first, stop = (read_int(b, x, row_of_q) for x in (sequences, low, high))
    query = b.mul(unit, I64(G * D))
    for g in range(G):
        maximum[g].set(F32(HIDDEN))
        total[g].set(F32(0))
        for v in range(emit.vectors):
            b.store(emit.constant(0.0), emit.output(g, v))

    def tile(column, which):
        """Element of the pool where a block's keys (0) or values (1) begin."""
        place = smaller(b, column, b.sub(num_columns, I64(1)))
        row = b.add(b.mul(sequence, num_columns), place)
        block = read_int(b, tables, row)
        block = larger(b, smaller(b, block, last_block), I64(0))
        row = b.add(b.add(first_row, b.mul(block, I64(2 * K))), b.add(kv_head, I64(which * K)))
        return b.mul(row, I64(B * D))

    aligned = b.mul(b.sdiv(first, I64(B)), I64(B))
    with loop(b, aligned, stop, emit.chunk) as chunk:
        here = smaller(b, b.sub(stop, chunk), I64(emit.chunk))
        hidden = larger(b, b.sub(first, chunk), I64(0))  # keys before the window
        column = b.sdiv(chunk, I64(B))
        for heads in emit.heads():
            queries = {
                (g, v): b.fmul(
                    scale,
                    emit.load(q, b.add(query, I64(g * D + v * emit.lanes)), emit.element),
                )
                for g in heads
                for v in range(emit.vectors)
            }
            with loop(b, I64(0), here, B) as key:
                now = b.add(column, b.sdiv(key, I64(B)))
                keys, after = tile(now, 0), tile(b.add(now, I64(1)), 0)
                # Whole blocks: what is beyond the context is left out below.
                with loop(b, I64(0), I64(B)) as offset:
                    row = b.mul(offset, I64(D))
                    emit.prefetch_token(pool, b.add(after, row))
                    sums = dict.fromkeys(heads, emit.constant(0.0))
                    for v in range(emit.vectors):
                        place = b.add(b.add(keys, row), I64(v * emit.lanes))
                        part = emit.load(pool, place, emit.element)
                        sums = {g: emit.fma(part, queries[g, v], sums[g]) for g in heads}
                    for g in heads:
                        b.store(emit.sum(sums[g]), emit.score(g, b.add(key, offset)))
        for g in range(G):
            _softmax(emit, g, hidden, here, maximum[g], total[g])
        for heads in emit.heads():
            added = {
                (g, v): Variable(b, b.load(emit.output(g, v)))
                for g in heads
                for v in range(emit.vectors)
            }
            with loop(b, I64(0), here, B) as key:
                now = b.add(column, b.sdiv(key, I64(B)))
                values, after = tile(now, 1), tile(b.add(now, I64(1)), 1)
                # Live ones alone: the others may hold NaN, and 0 * NaN is NaN.
                least = larger(b, b.sub(hidden, key), I64(0))
                with loop(b, least, smaller(b, b.sub(here, key), I64(B))) as offset:
                    row = b.mul(offset, I64(D))
                    emit.prefetch_token(pool, b.add(after, row))
                    weights = {
                        g: emit.splat(b.load(emit.score(g, b.add(key, offset)))) for g in heads
                    }
                    for v in range(emit.vectors):
                        place = b.add(b.add(values, row), I64(v * emit.lanes))
                        part = emit.load(pool, place, emit.element)
                        for g in heads:
                            variable = added[g, v]
                            variable.set(emit.fma(weights[g], part, variable.get()))
            for (g, v), variable in added.items():
                b.store(variable.get(), emit.output(g, v))

    head = b.mul(unit, I64(G))
    for g in range(G):
        index = b.add(head, I64(g))
        b.store(maximum[g].get(), at(b, maxima, index, F32))
        b.store(total[g].get(), at(b, totals, index, F32))
        for v in range(emit.vectors):
            place = at(b, outputs, b.add(b.mul(index, I64(D)), I64(v * emit.lanes)), F32)
            place = b.bitcast(place, emit.floats.as_pointer())
            b.store(b.load(emit.output(g, v)), place, align=4)


def _softmax(
    emit: _Emitter,
    head: int,
    hidden: ir.Value,
    here: ir.Value,
    maximum: Variable,
    total: Variable,
) -> None:
    """Turns a head's scores of a chunk, of which hidden .. here - 1 count, into weights, and brings
    its maximum, its total and what it has added up so far to the new maximum."""
    b = emit.builder
    places = ir.Constant(emit.ints, list(range(emit.lanes)))

    def shown(start):
        """The scores from `start` on, and which of them count."""
        place = b.add(emit.splat(b.trunc(start, I32)), places)
        from_first = b.icmp_signed(">=", place, emit.splat(b.trunc(hidden, I32)))
        to_last = b.icmp_signed("<", place, emit.splat(b.trunc(here, I32)))
        return b.load(emit.scores_from(head, start)), b.and_(from_first, to_last)

    largest = Variable(b, emit.splat(maximum.get()))
    with loop(b, I64(0), here, emit.lanes) as start:
        scores, counts = shown(start)
        scores = b.select(counts, scores, emit.constant(HIDDEN))
        is_larger = b.fcmp_ordered(">", scores, largest.get())
        largest.set(b.select(is_larger, scores, largest.get()))
    old = maximum.get()
    new = emit.call(emit.name("vector.reduce.fmax"), F32, [largest.get()])
    maximum.set(new)
    sums = Variable(b, emit.constant(0.0))
    with loop(b, I64(0), here, emit.lanes) as start:
        scores, counts = shown(start)
        weights = emit.exp(b.fsub(scores, emit.splat(new)))
        weights = b.select(counts, weights, emit.constant(0.0))
        b.store(weights, emit.scores_from(head, start))
        sums.set(b.fadd(sums.get(), weights))
    keep = emit.exp(emit.splat(b.fsub(old, new)))
    kept = b.extract_element(keep, I32(0))
    total.set(b.fadd(b.fmul(total.get(), kept), emit.sum(sums.get())))
    for v in range(emit.vectors):
        place = emit.output(head, v)
        b.store(b.fmul(b.load(place), keep), place)


@compiled_once
def kernel(sizes: Sizes) -> Handler:
    """The compiled kernel for these sizes."""
    return Handler(
        "paged_attention_rows", build_handler(3, 7, 3, functools.partial(_attend, sizes))
    )


def attend_rows(
    call: Call,
    sequence: Int32[Array, " T"],
    low: Int[Array, " T"],
    high: Int[Array, " T"],
) -> State:
    """The softmax of row t of q over the keys low[t] .. high[t] - 1 of sequence[t], a State of T
    rows; `low` is a context's first key, or the first that a window shows."""
    num_tokens, num_columns = call.q.shape[0], call.block_tables.shape[1]
    num_heads = call.q.shape[1] // call.head_dim
    sizes = Sizes(
        call.num_kv_heads,
        num_heads // call.num_kv_heads,
        call.block_size,
        call.head_dim,
        call.q.dtype.name,
    )
    low, high = low.astype(jnp.int32), high.astype(jnp.int32)  # a window is of any integer type
    num_keys = (high - low).sum(dtype=jnp.float32)  # whose numbers int32 may not hold
    num_floats = num_keys * (2 * call.num_kv_heads * call.head_dim)
    # Rows after the last one with keys are left as they are.
    num_rows = jnp.max(jnp.where(low < high, jnp.arange(1, num_tokens + 1, dtype=jnp.int32), 0))
    scale = jnp.asarray(call.scale, jnp.float32).reshape(1)
    shapes = (
        jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens, num_heads), jnp.float32),
        jax.ShapeDtypeStruct((num_tokens, num_heads, call.head_dim), jnp.float32),
    )
    found = call_handler(
        kernel(sizes),
        shapes,
        call.q,
        call.rows,
        call.block_tables,
        sequence,
        low,
        high,
        scale,
        units=num_rows * call.num_kv_heads,
        alone=num_floats < _FLOATS_ALONE,
        numbers=(call.first_row, call.num_blocks - 1, num_columns),
    )
    return State(*found)
