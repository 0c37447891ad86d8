"""The instructions of Intel's matrix unit (AMX), and numbers as it takes them, for kernels of LLVM
IR.

The unit has eight registers, tiles of 16 rows of 64 bytes. It multiplies bfloat16 and adds up in
float32: C += A @ B with A [16, 32], B [32, 16] (as [16, 16, 2]: successive rows in pairs) and C
[16, 16]. float32 operands are split into three bfloat16 numbers each whose sum they are, a = a1 +
a2 + a3, and of the nine products the six are added that matter: those left out are at most 2^-23 of
a b, and about what a float32 product itself rounds away (Henry, Tang and Heinecke 2019,
arXiv:1904.06376; in XLA's terms BF16_BF16_F32_X6). It takes a fraction of the time that float32
units take. Parts and results below 2^-126 count as 0 (a part is up to 2^-16 of its number), and a
float32 number from 3.396e38 on, which has no first part, gives NaN.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence

from llvmlite import binding, ir

from pallas_kernels.llvm_build import F32, I8, I16, I32, I64, POINTER, Vectors, at

LANES = 16
ROWS = 16  # of a tile of A or C
DEPTH = 32  # that a product of tiles sums over
TILE = 1024  # bytes
AHEAD = 2  # products of tiles for which numbers are asked for in advance
# Which tiles hold what: up to two tiles of A times two of B.
_SUMS, _A, _B = (0, 1, 2, 3), (4, 5), (6, 7)
# Products of parts (of A, of B), in an order that loads few tiles.
_PAIRS = {1: [(0, 0)], 3: [(0, 2), (0, 1), (1, 1), (1, 0), (0, 0), (2, 0)]}
# The same where B is bfloat16 itself.
_EXACT_PAIRS = {3: [(2, 0), (1, 0), (0, 0)]}
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA): Linux keeps tiles for threads that asked.
_ARCH_PRCTL, _REQUEST, _TILE_DATA = 158, 0x1023, 18

Action = Callable[[], None]
_LOG = logging.getLogger(__name__)


@functools.cache
def has_tiles() -> bool:
    """Whether this machine has the matrix unit, and vectors that round to bfloat16 (AVX512-BF16, as
    all machines with the one have unless it is hidden), and the system lets this process use it."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    features = binding.get_host_cpu_features()
    if not all(features.get(name) for name in ("amx-tile", "amx-bf16", "avx512bf16")):
        return False
    syscall = ctypes.CDLL(None).syscall
    syscall.restype = ctypes.c_long
    granted = syscall(*map(ctypes.c_long, (_ARCH_PRCTL, _REQUEST, _TILE_DATA))) == 0
    if not granted:
        _LOG.warning("the CPU's matrix unit (AMX) is not used: the system refuses it")
    return granted


def num_parts(dtype: str) -> int:
    """bfloat16 numbers whose sum a number of this dtype is."""
    return 3 if dtype == "float32" else 1


def tile_rows(num_rows: int) -> int:
    """Rows of a tile of A, of so many in all: fewer than ROWS are less to read and to compute, and
    a row's results are the same."""
    return next((rows for rows in (4, 8) if num_rows <= rows), ROWS)


def element(dtype: str) -> ir.Type:
    """A number of this dtype in memory; int16 are the bits of bfloat16."""
    return F32 if dtype == "float32" else I16


def threads() -> int:
    """Threads that XLA computes with, about: how far apart a thread's successive units are."""
    return len(os.sched_getaffinity(0))


class Tiles(Vectors):
    """Products of tiles, of `blocks` tiles of A at once with `halves` of B (1 or 2).

    rows      of a tile of A and of the sums: fewer are faster, and a row's sums are the same
    exact_b   whether tiles of B are bfloat16 even where A is in three parts
    """

    def __init__(
        self,
        builder: ir.IRBuilder,
        parts: int,
        blocks: int,
        halves: int,
        *,
        rows: int = ROWS,
        exact_b: bool = False,
    ) -> None:
        super().__init__(builder, LANES)
        self.parts = parts
        self.blocks = blocks
        self.halves = halves
        self.rows = rows
        self.pairs = (_EXACT_PAIRS if exact_b else _PAIRS)[parts]

    def configure(self) -> None:
        """Make all tiles rows of 64 bytes, those of B 16 and the others `rows`, for this thread."""
        b = self.builder
        with b.goto_entry_block():
            place = b.alloca(I8, 64)
            place.align = 64
        rows = sum((ROWS if tile in _B else self.rows) << 8 * tile for tile in (*_SUMS, *_A, *_B))
        words = [1, 0] + [0x0040_0040_0040_0040] * 2 + [0] * 2 + [rows, 0]
        for i, word in enumerate(words):  # the palette; bytes of a row, eight times; rows, too
            b.store(I64(word), b.gep(b.bitcast(place, I64.as_pointer()), [I64(i)]))
        self._do("ldtilecfg", place)

    def release(self) -> None:
        """Let go of the tiles: the system need not keep them any more."""
        self._do("tilerelease")

    def _do(self, instruction: str, *operands: ir.Value) -> None:
        self.call(f"llvm.x86.{instruction}", ir.VoidType(), list(operands))

    def _load(self, tile: int, place: ir.Value, stride: ir.Value) -> None:
        self._do("tileloadd64", I8(tile), self.builder.bitcast(place, POINTER), stride)

    def _each_sum(self) -> list[tuple[int, int, int]]:
        pairs = [(block, half) for block in range(self.blocks) for half in range(self.halves)]
        return [(block, half, _SUMS[2 * block + half]) for block, half in pairs]

    def zero(self) -> None:
        """Set the sums to 0."""
        for _, _, tile in self._each_sum():
            self._do("tilezero", I8(tile))

    def resume(self, place: Callable[[int, int], ir.Value], stride: ir.Value) -> None:
        """Take the sums from place(block, half), rows so many bytes apart."""
        for block, half, tile in self._each_sum():
            self._load(tile, place(block, half), stride)

    def store(self, place: Callable[[int, int], ir.Value], stride: ir.Value) -> None:
        """Put them there."""
        for block, half, tile in self._each_sum():
            where = self.builder.bitcast(place(block, half), POINTER)
            self._do("tilestored64", I8(tile), where, stride)

    def products(self, a: ir.Value, b: ir.Value) -> list[Action]:
        """What builds, in order, sums += A @ B of DEPTH: of A's tiles [parts, blocks] at `a` and
        B's [parts, halves] at `b`."""
        actions: list[Action] = []

        def load(tile: int, base: ir.Value, offset: int) -> None:
            place = self.builder.gep(base, [I64(offset)])
            actions.append(functools.partial(self._load, tile, place, I64(64)))

        held: tuple[int | None, int | None] = (None, None)
        for pair in self.pairs:
            if pair[0] != held[0]:
                for block in range(self.blocks):
                    load(_A[block], a, (pair[0] * self.blocks + block) * self.rows * 64)
            if pair[1] != held[1]:
                for half in range(self.halves):
                    load(_B[half], b, (pair[1] * self.halves + half) * TILE)
            held = pair
            for block, half, tile in self._each_sum():
                operands = I8(tile), I8(_A[block]), I8(_B[half])
                actions.append(functools.partial(self._do, "tdpbf16ps", *operands))
        return actions

    def split(self, vectors: Sequence[ir.Value]) -> list[list[ir.Value]]:
        """For each part its bits, in the upper half of int32, of vectors of float32. Rounded as
        usual (halves upwards), so that what is left is small; the last part is what is left."""
        b, found = self.builder, []
        rest = list(vectors)
        for part in range(self.parts):
            bits = [b.bitcast(x, self.ints) for x in rest]
            if part < self.parts - 1:
                half, mask = self.constant_int(0x8000), self.constant_int(-0x10000)
                bits = [b.and_(b.add(x, half), mask) for x in bits]
                rest = [b.fsub(x, b.bitcast(y, self.floats)) for x, y in zip(rest, bits)]
            found.append(bits)
        return found

    def load_rows(
        self, base: ir.Value, first: ir.Value, second: ir.Value, dtype: str
    ) -> list[tuple[ir.Value, ir.Value]]:
        """For each part, its bits of LANES numbers from element `first` and from `second` on, each
        in the upper half of int32 (float32) or as int16 (bfloat16)."""
        b = self.builder
        kind = element(dtype)
        loaded = []
        for index in (first, second):
            place = b.bitcast(at(b, base, index, kind), ir.VectorType(kind, LANES).as_pointer())
            loaded.append(b.load(place, align=4 if kind is F32 else 2))
        if kind is I16:
            return [(loaded[0], loaded[1])]
        return [(x, y) for x, y in self.split(loaded)]

    def ask(
        self,
        base: ir.Value,
        begin: ir.Value,
        index: ir.Value,
        *,
        size: ir.Value,
        further: ir.Value,
        count: int,
        dtype: str,
    ) -> None:
        """Ask for `count` numbers from begin + index on. Of a stretch that begins at `begin` and is
        read in order, `size` numbers, the thread's next one begins `further` numbers after it."""
        b = self.builder
        over = b.icmp_signed(">=", index, size)
        index = b.add(index, b.select(over, b.sub(further, size), I64(0)))
        for start in range(0, count, 16 if dtype == "float32" else 32):
            place = b.add(b.add(begin, index), I64(start))
            self.prefetch(at(b, base, place, element(dtype)), nearness=1)

    def in_pairs(self, first: ir.Value, second: ir.Value) -> ir.Value:
        """A row of B: first[0], second[0], first[1], second[1], ..., as int16."""
        b, kind = self.builder, ir.VectorType(I16, 2 * LANES)
        if first.type != self.ints:
            return self._shuffle(first, second, [i + j for i in range(LANES) for j in (0, LANES)])
        low = b.lshr(first, self.constant_int(16))
        return b.bitcast(b.or_(low, b.and_(second, self.constant_int(-0x10000))), kind)

    def joined(self, first: ir.Value, second: ir.Value) -> ir.Value:
        """A row of A: first, then second, as int16."""
        b, kind = self.builder, ir.VectorType(I16, 2 * LANES)
        if first.type != self.ints:
            return self._shuffle(first, second, list(range(2 * LANES)))
        first, second = b.bitcast(first, kind), b.bitcast(second, kind)
        return self._shuffle(first, second, [2 * i + 1 for i in range(2 * LANES)])

    def _shuffle(self, first: ir.Value, second: ir.Value, order: list[int]) -> ir.Value:
        mask = ir.Constant(ir.VectorType(I32, len(order)), order)
        return self.builder.shuffle_vector(first, second, mask)

    def transposed(self, lines: Sequence[ir.Value]) -> list[ir.Value]:
        """LANES vectors of LANES float32, rows of a matrix: its columns."""
        lines = list(lines)
        for apart in (1, 2, 4, 8):
            for i in range(LANES):
                if i & apart:
                    continue
                first, second = lines[i], lines[i + apart]
                lower = [j + LANES - apart if j & apart else j for j in range(LANES)]
                upper = [j + LANES if j & apart else j + apart for j in range(LANES)]
                lines[i] = self._shuffle(first, second, lower)
                lines[i + apart] = self._shuffle(first, second, upper)
        return lines

    def keep(self, vector: ir.Value, base: ir.Value, offset: ir.Value) -> None:
        """Store 64 bytes at this offset."""
        place = self.builder.gep(base, [offset])
        self.builder.store(vector, self.builder.bitcast(place, vector.type.as_pointer()), align=1)


def interleave(many: Sequence[Action], few: Sequence[Action]) -> None:
    """Build all actions, those of each list in order, the second list's spread over the first's:
    the matrix unit and the vector units then work side by side."""
    for i, act in enumerate(many):
        act()
        for other in few[i * len(few) // len(many) : (i + 1) * len(few) // len(many)]:
            other()
