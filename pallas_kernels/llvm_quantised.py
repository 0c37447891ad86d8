"""Reading quantised weights (`quantised.Quantised`) in kernels of LLVM IR, and a kernel that does
nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from llvmlite import ir

from pallas_kernels.llvm_build import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    BFloat,
    Vectors,
    Work,
    at,
    build_handler,
    loop,
)
from pallas_kernels.llvm_handler import Handler, call_handler, compiled_once
from pallas_kernels.llvm_tiles import LANES, Action
from pallas_kernels.quantised import COLUMNS, GROUP, Quantised, group_bytes

AHEAD = 4  # groups that are asked for in advance
# What is taken off numbers of 4 bits, so that none is larger than the largest weights are: in a sum
# with large ones the small ones would lose digits.
CENTRE = 8
# 0 to 15 less CENTRE as bits of bfloat16, twice: of an index of 5 bits the upper one is another
# number's.
_CENTRED = [int(x) for x in (np.arange(32) % 16 - CENTRE).astype(jnp.bfloat16).view(np.int16)]
_BFLOATS = 2 * LANES


class Groups(Vectors):
    """One group of COLUMNS outputs, at `place`; to be read in one basic block."""

    def __init__(self, builder: ir.IRBuilder, place: ir.Value, bits: int) -> None:
        super().__init__(builder, LANES)
        self.place = place
        self.bits = bits
        self.words = ir.VectorType(I16, 2 * LANES)
        self._numbers = COLUMNS * GROUP * bits // 8
        self._built: dict[tuple[str, int], Any] = {}

    def _load(self, offset: int, kind: ir.Type) -> ir.Value:
        place = self.builder.gep(self.place, [I64(offset)])
        return self.builder.load(self.builder.bitcast(place, kind.as_pointer()), align=2)

    def _of_outputs(self, offset: int, half: int) -> ir.Value:
        halves = self._load(offset + 2 * LANES * half, ir.VectorType(F16, LANES))
        return self.builder.fpext(halves, self.floats)

    def _once(self, what: str, half: int, build: Callable[[], Any]) -> Any:
        """What `build` builds, where it is first asked for: later code of the same group has it."""
        if (what, half) not in self._built:
            self._built[what, half] = build()
        return self._built[what, half]

    def scales(self, half: int) -> ir.Value:
        """Those of LANES outputs, in float32."""
        return self._once("scales", half, lambda: self._of_outputs(self._numbers, half))

    def offsets(self, half: int) -> ir.Value | None:
        """Those of LANES outputs, in float32, if there are any."""
        if self.bits != 4:
            return None
        begin = self._numbers + 2 * COLUMNS
        return self._once("offsets", half, lambda: self._of_outputs(begin, half))

    def _paired_scales(self, half: int) -> list[ir.Value | None]:
        return self._once("paired scales", half, lambda: self._paired(self.scales(half)))

    def _paired_offsets(self, half: int) -> list[ir.Value | None]:
        return self._once("paired offsets", half, lambda: self._paired(self.offsets(half)))

    def lines(self) -> range:
        """Offsets of the cache lines."""
        return range(0, group_bytes(self.bits), 64)

    def _fours(self, half: int, four: int) -> ir.Value:
        """Numbers of 4 bits of four pairs of inputs, four to a word."""
        return self._load((half * 4 + four) * 64, self.words)

    def _bytes(self, half: int, pair: int) -> ir.Value:
        place = half * LANES * GROUP + pair * 2 * LANES
        return self._load(place, ir.VectorType(I8, 2 * LANES))

    def centred_pairs(self, half: int, four: int) -> list[ir.Value]:
        """Numbers of LANES outputs and four pairs of inputs in bfloat16, exactly, as rows of a tile
        of B (`llvm_tiles`); of those of 4 bits CENTRE is taken off. For machines with AVX512-BW."""
        if self.bits == 8:
            return [self._exact_pairs(half, 4 * four + i) for i in range(4)]
        words, found = self._fours(half, four), []
        table = ir.Constant(self.words, _CENTRED)
        for i in range(4):
            shift = ir.Constant(self.words, [4 * i] * 2 * LANES)
            shifted = self.builder.lshr(words, shift) if i else words
            found.append(self.call("llvm.x86.avx512.permvar.hi.512", self.words, [table, shifted]))
        return found

    def _exact_pairs(self, half: int, pair: int) -> ir.Value:
        """int8 has no more digits than bfloat16, which are the upper ones of float32."""
        b = self.builder
        wide = [b.bitcast(x, self.words) for x in self._byte_floats(half, pair)]
        order = ir.Constant(ir.VectorType(I32, _BFLOATS), [2 * i + 1 for i in range(_BFLOATS)])
        return b.shuffle_vector(*wide, order)

    def _byte_floats(self, half: int, pair: int) -> list[ir.Value]:
        """Numbers of 8 bits of a pair of inputs: of the first outputs and of the others."""
        b, loaded = self.builder, self._bytes(half, pair)
        return [b.sitofp(b.sext(part, self.ints), self.floats) for part in self._halves(loaded)]

    def _halves(self, vector: ir.Value) -> list[ir.Value]:
        order = ir.VectorType(I32, LANES)
        return [
            self.builder.shuffle_vector(
                vector, vector, ir.Constant(order, list(range(start, start + LANES)))
            )
            for start in (0, LANES)
        ]

    def _paired(self, vector: ir.Value | None) -> list[ir.Value | None]:
        """A vector of LANES outputs as the numbers lie in pairs: each one twice."""
        if vector is None:
            return [None, None]
        kind, b = ir.VectorType(I32, LANES), self.builder
        orders = ([start + i // 2 for i in range(LANES)] for start in (0, LANES // 2))
        return [b.shuffle_vector(vector, vector, ir.Constant(kind, order)) for order in orders]

    def _number(self, words: ir.Value, shift: int) -> ir.Value:
        b = self.builder
        bits = b.and_(b.lshr(words, self.constant_int(shift)), self.constant_int(15))
        return b.sitofp(bits, self.floats)

    def _weight(self, number: ir.Value, scale: ir.Value, offset: ir.Value | None) -> ir.Value:
        """As a checkpoint's are dequantised: the product is exact, so that one rounding is left."""
        if offset is None:
            return self.builder.fmul(number, scale)
        return self.fma(number, scale, offset)

    def bfloat_pairs(self, half: int, four: int) -> list[ir.Value]:
        """Weights of LANES outputs and four pairs of inputs, rounded to bfloat16, in pairs."""
        scales, offsets = self._paired_scales(half), self._paired_offsets(half)
        found = []
        if self.bits == 4:
            parts = [self.builder.zext(x, self.ints) for x in self._halves(self._fours(half, four))]
        for i in range(4):
            if self.bits == 4:
                numbers = [self._number(part, 4 * i) for part in parts]
            else:
                numbers = self._byte_floats(half, 4 * four + i)
            low, high = (self._weight(*x) for x in zip(numbers, scales, offsets))
            found.append(self._rounded(low, high))
        return found

    def _rounded(self, low: ir.Value, high: ir.Value) -> ir.Value:
        kind = ir.VectorType(BFloat(), _BFLOATS)
        name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
        return self.builder.bitcast(self.call(name, kind, [high, low]), self.words)

    def float_rows(self, half: int, four: int) -> list[ir.Value]:
        """Weights of LANES outputs and eight inputs in float32."""
        b = self.builder
        scales, offsets = self.scales(half), self.offsets(half)
        numbers = []
        if self.bits == 4:
            words = b.bitcast(self._fours(half, four), self.ints)
            numbers = [self._number(words, 4 * i + j) for i in range(4) for j in (0, 16)]
        else:
            for i in range(4):
                pairs = b.bitcast(self._bytes(half, 4 * four + i), ir.VectorType(I16, LANES))
                eight = ir.Constant(pairs.type, [8] * LANES)
                for number in (b.ashr(b.shl(pairs, eight), eight), b.ashr(pairs, eight)):
                    numbers.append(b.sitofp(b.sext(number, self.ints), self.floats))
        return [self._weight(number, scales, offsets) for number in numbers]

    def rounded_to_bfloat(self, vector: ir.Value) -> ir.Value:
        """float32 rounded to bfloat16, as float32."""
        bits = self.builder.and_(self.rounded_bits(vector), self.constant_int(-0x10000))
        return self.builder.bitcast(bits, self.floats)

    def rounded_bits(self, vector: ir.Value) -> ir.Value:
        """int32 whose upper halves are the nearest bfloat16, of two the even one; not for NaN."""
        b = self.builder
        bits = b.bitcast(vector, self.ints)
        odd = b.and_(b.lshr(bits, self.constant_int(16)), self.constant_int(1))
        return b.add(b.add(bits, self.constant_int(0x7FFF)), odd)


def asking(
    groups: Groups, begin: ir.Value, group: ir.Value, *, size: ir.Value, further: ir.Value
) -> list[Action]:
    """What asks for the group AHEAD groups after this one of a stretch of `size` groups, which
    begins at `begin`: behind its end that of the stretch `further` groups after it."""
    b = groups.builder
    later = b.add(group, I64(AHEAD))
    over = b.icmp_signed(">=", later, size)
    later = b.add(later, b.select(over, b.sub(further, size), I64(0)))
    place = b.gep(begin, [b.mul(later, I64(group_bytes(groups.bits)))])
    places = [b.gep(place, [I64(offset)]) for offset in groups.lines()]
    return [functools.partial(groups.prefetch, place, 2) for place in places]


def _dequantise(bits: int, dtype: str, work: Work) -> None:
    """COLUMNS columns of w[layer]."""
    b, unit, numbers, arrays = work
    num_groups, columns, layer = numbers
    w, y = arrays
    first = b.mul(b.add(b.mul(layer, columns), unit), num_groups)
    width = b.mul(columns, I64(COLUMNS))
    with loop(b, I64(0), num_groups) as number:
        group = Groups(b, b.gep(w, [b.mul(b.add(first, number), I64(group_bytes(bits)))]), bits)
        for half in range(COLUMNS // LANES):
            for four in range(GROUP // 8):
                for i, row in enumerate(group.float_rows(half, four)):
                    line = b.add(b.mul(number, I64(GROUP)), I64(8 * four + i))
                    column = b.add(b.mul(unit, I64(COLUMNS)), I64(half * LANES))
                    if dtype == "bfloat16":
                        upper = b.lshr(group.rounded_bits(row), group.constant_int(16))
                        row = b.trunc(upper, ir.VectorType(I16, LANES))
                    kind = F32 if dtype == "float32" else I16
                    place = at(b, y, b.add(b.mul(line, width), column), kind)
                    b.store(row, b.bitcast(place, row.type.as_pointer()), align=2)


@compiled_once
def _kernel(bits: int, dtype: str) -> Handler:
    body = functools.partial(_dequantise, bits, dtype)
    return Handler("dequantise", build_handler(3, 1, 1, body))


def dequantise(w: Quantised, layer: Int[Array, ""] | int) -> Float[Array, "E F"]:
    """Return w[layer] in its dtype, the weights that a checkpoint's reader would make."""
    columns, num_groups = w.groups.shape[1:3]
    return call_handler(
        _kernel(w.bits, w.dtype_name),
        jax.ShapeDtypeStruct((num_groups * GROUP, columns * COLUMNS), w.dtype),
        w.groups,
        units=columns,
        alone=False,
        numbers=(num_groups, columns, layer),
    )
