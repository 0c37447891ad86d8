"""Building a function of LLVM IR that XLA can call: what the kernels for CPUs are written with.

Variables live on the stack (`Variable`); LLVM's optimiser puts them in registers. Loops are `with`
blocks. A function built here is a handler of XLA's foreign function interface (FFI), which finds
its operands in a call frame; the offsets are those of `xla/ffi/api/c_api.h`, equal in jax 0.10.2,
0.11.2 and 0.12.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32, F16 = ir.FloatType(), ir.HalfType()
POINTER = I8.as_pointer()


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite's IR has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


# XLA_FFI_CallFrame
_EXTENSION, _API, _CONTEXT, _STAGE, _ARGS, _RETS = 8, 16, 24, 32, 72, 112
_EXECUTE = 3  # XLA_FFI_ExecutionStage_EXECUTE
# XLA_FFI_Metadata_Extension (type 1), XLA_FFI_Api and XLA_FFI_Metadata: where the versions are
_EXTENSION_TYPE, _METADATA, _API_VERSION, _METADATA_VERSION = 8, 24, 32, 24
_IS_METADATA = 1
# XLA_FFI_Api: XLA_FFI_Error_Destroy, XLA_FFI_ThreadPool_Schedule, XLA_FFI_ThreadPool_NumThreads
_DESTROY_ERROR, _SCHEDULE, _NUM_THREADS = 64, 136, 144
_DATA = 24  # XLA_FFI_Buffer


class Variable:
    """A place for one value."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self._builder = builder
        with builder.goto_entry_block():
            self._place = builder.alloca(value.type)
        self.set(value)

    def get(self) -> ir.Value:
        """The value now."""
        return self._builder.load(self._place)

    def set(self, value: ir.Value) -> None:
        """Replace it."""
        self._builder.store(value, self._place)


@contextlib.contextmanager
def loop(
    builder: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int = 1
) -> Iterator[ir.Value]:
    """Runs what is built inside for start, start + step, ... below stop (int64)."""
    index = Variable(builder, start)
    head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    now = index.get()
    builder.cbranch(builder.icmp_signed("<", now, stop), body, end)
    builder.position_at_end(body)
    yield now
    index.set(builder.add(now, I64(step)))
    builder.branch(head)
    builder.position_at_end(end)


def smaller(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The smaller of two int64."""
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The larger of two int64."""
    return builder.select(builder.icmp_signed(">", a, b), a, b)


def at(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """A pointer to element `index` (int64) of the array of `kind` at `base`."""
    return builder.gep(builder.bitcast(base, kind.as_pointer()), [index])


def read(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type) -> ir.Value:
    """Element `index` of the array of `kind` at `base`."""
    return builder.load(at(builder, base, index, kind))


def read_int(builder: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    """Element `index` of the int32 array at `base`, as int64."""
    return builder.sext(read(builder, base, index, I32), I64)


class Vectors:
    """Arithmetic on vectors of `lanes` float32 or int32."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.builder = builder
        self.lanes = lanes
        self.floats, self.ints = (ir.VectorType(kind, lanes) for kind in (F32, I32))

    def call(
        self, name: str, kind: ir.Type, arguments: list[ir.Value], flags: tuple[str, ...] = ()
    ) -> ir.Value:
        """A call of LLVM's intrinsic function of this name, which yields a `kind`."""
        functions = self.builder.module.globals
        if name not in functions:
            signature = ir.FunctionType(kind, [argument.type for argument in arguments])
            ir.Function(self.builder.module, signature, name)  # adds itself
        return self.builder.call(functions[name], arguments, fastmath=flags)

    def name(self, operation: str) -> str:
        """The name of an intrinsic function for vectors of floats."""
        return f"llvm.{operation}.v{self.lanes}f32"

    def constant(self, value: float) -> ir.Constant:
        """A vector of this float."""
        return ir.Constant(self.floats, [value] * self.lanes)

    def constant_int(self, value: int) -> ir.Constant:
        """A vector of this int32."""
        return ir.Constant(self.ints, [value] * self.lanes)

    def splat(self, value: ir.Value) -> ir.Value:
        """A vector of this float32 or int32."""
        undefined = ir.Constant(ir.VectorType(value.type, self.lanes), ir.Undefined)
        first = self.builder.insert_element(undefined, value, I32(0))
        return self.builder.shuffle_vector(first, undefined, self.constant_int(0))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c."""
        return self.call(self.name("fma"), self.floats, [a, b, c])

    def sum(self, vector: ir.Value) -> ir.Value:
        """The sum of a vector's floats, in any order."""
        arguments = [F32(-0.0), vector]
        return self.call(self.name("vector.reduce.fadd"), F32, arguments, ("reassoc",))

    def load(self, base: ir.Value, index: ir.Value, element: ir.Type) -> ir.Value:
        """The numbers from element `index` on, as float32; int16 are the bits of bfloat16."""
        b = self.builder
        place = at(b, base, index, element)
        place = b.bitcast(place, ir.VectorType(element, self.lanes).as_pointer())
        loaded = b.load(place, align=4 if element is F32 else 2)
        if element is F32:
            return loaded
        if element is F16:
            return b.fpext(loaded, self.floats)
        return b.bitcast(b.shl(b.zext(loaded, self.ints), self.constant_int(16)), self.floats)

    def prefetch(self, place: ir.Value, nearness: int = 3, *, to_write: bool = False) -> None:
        """Ask for the cache line of a place, which may lie anywhere: into the nearest cache (3) or
        into further ones only (2, 1)."""
        options = [I32(int(to_write)), I32(nearness), I32(1)]  # 1: data
        place = self.builder.bitcast(place, POINTER)
        self.call("llvm.prefetch.p0i8", ir.VoidType(), [place, *options])


def _field(builder: ir.IRBuilder, base: ir.Value, offset: int, kind: ir.Type) -> ir.Value:
    place = builder.gep(base, [I64(offset)])
    return builder.load(builder.bitcast(place, kind.as_pointer()))


class Work(NamedTuple):
    """What a kernel's body is built from: what is done for a unit."""

    builder: ir.IRBuilder
    unit: ir.Value  # its number, int64
    numbers: list[ir.Value]  # those that the call gives, int64
    arrays: list[ir.Value]  # pointers to the memory of its arrays and results


Body = Callable[[Work], None]


def build_handler(num_numbers: int, num_arrays: int, num_results: int, body: Body) -> ir.Module:
    """A module of a handler that does its work in units, on several threads.

    Its operands are scalars (int32), and then arrays. The scalars are the number of units, how many
    threads beside XLA's own may be asked for help, and `num_numbers` others. Units are done in any
    order, so they must not write to the same place.

    Threads take units from a counter, so none waits for another as long as there is something to
    do. A helper may come late, when all is done and the handler has returned: what they share lies
    on the heap and is given back by the last one.
    """
    module = ir.Module()
    work = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "work")
    _build_work(work, num_numbers, num_arrays + num_results, body)
    handler = ir.Function(module, ir.FunctionType(POINTER, [POINTER]), "handler")
    _build_entry(handler, work, num_numbers, num_arrays, num_results)
    return module


# What the threads share: counters, each on a cache line of its own, then the numbers, then pointers
# to the arrays and the results. A thread that comes late finds nothing of XLA's any more, so it
# reads nothing else before it has a unit.
_NEXT, _DONE, _USERS, _NUM_UNITS, _REST = 0, 64, 128, 192, 200


def _counter(builder: ir.IRBuilder, shared: ir.Value, offset: int) -> ir.Value:
    return builder.bitcast(builder.gep(shared, [I64(offset)]), I64.as_pointer())


def _set(builder: ir.IRBuilder, base: ir.Value, offset: int, value: ir.Value) -> None:
    place = builder.gep(base, [I64(offset)])
    builder.store(value, builder.bitcast(place, value.type.as_pointer()))


def _build_work(work: ir.Function, num_numbers: int, num_pointers: int, body: Body) -> None:
    """The function of a thread: units until there are none, then it lets go of what is shared."""
    (shared,) = work.args
    blocks = [work.append_basic_block(name) for name in ("entry", "take", "unit", "leave", "done")]
    entry, take, one, leave, done = blocks
    builder = ir.IRBuilder(entry)
    kinds = [I64] * num_numbers + [POINTER] * num_pointers
    rest = [_field(builder, shared, _REST + 8 * i, kind) for i, kind in enumerate(kinds)]
    num_units = _field(builder, shared, _NUM_UNITS, I64)
    builder.branch(take)
    builder.position_at_end(take)
    unit = builder.atomic_rmw("add", _counter(builder, shared, _NEXT), I64(1), "seq_cst")
    builder.cbranch(builder.icmp_signed("<", unit, num_units), one, leave)
    builder.position_at_end(one)
    body(Work(builder, unit, rest[:num_numbers], rest[num_numbers:]))
    builder.atomic_rmw("add", _counter(builder, shared, _DONE), I64(1), "seq_cst")
    builder.branch(take)
    builder.position_at_end(leave)
    _let_go(builder, shared)
    builder.branch(done)
    builder.position_at_end(done)
    builder.ret_void()


def _let_go(builder: ir.IRBuilder, shared: ir.Value) -> None:
    """One user fewer; the last one frees what they share."""
    users = builder.atomic_rmw("sub", _counter(builder, shared, _USERS), I64(1), "seq_cst")
    with builder.if_then(builder.icmp_signed("==", users, I64(1))):
        free = _external(builder, "free", ir.VoidType(), [POINTER])
        builder.call(free, [shared])


def _external(
    builder: ir.IRBuilder, name: str, returned: ir.Type, arguments: list[ir.Type]
) -> ir.Function:
    functions = builder.module.globals
    if name not in functions:
        ir.Function(builder.module, ir.FunctionType(returned, arguments), name)  # adds itself
    return functions[name]


def _build_entry(
    handler: ir.Function, work: ir.Function, num_numbers: int, num_arrays: int, num_results: int
) -> None:
    """The function that XLA calls."""
    (frame,) = handler.args
    entry, metadata, stage, execute, done = (
        handler.append_basic_block(name)
        for name in ("entry", "metadata", "stage", "execute", "done")
    )
    builder = ir.IRBuilder(entry)
    extension = _field(builder, frame, _EXTENSION, POINTER)
    is_asked = builder.icmp_unsigned("!=", extension, POINTER(None))
    builder.cbranch(is_asked, metadata, stage)

    # XLA asks which version of the interface this was made for: the one that it has, since what is
    # used of it is the same in all.
    builder.position_at_end(metadata)
    kind = _field(builder, extension, _EXTENSION_TYPE, I32)
    with builder.if_then(builder.icmp_unsigned("==", kind, I32(_IS_METADATA))):
        asked = _field(builder, extension, _METADATA, POINTER)
        api = _field(builder, frame, _API, POINTER)
        _set(builder, asked, _METADATA_VERSION, _field(builder, api, _API_VERSION, I64))
        builder.branch(done)
    builder.branch(stage)

    builder.position_at_end(stage)
    now = _field(builder, frame, _STAGE, I32)
    builder.cbranch(builder.icmp_unsigned("==", now, I32(_EXECUTE)), execute, done)

    builder.position_at_end(execute)
    places = []
    for buffers, count in ((_ARGS, 2 + num_numbers + num_arrays), (_RETS, num_results)):
        table = _field(builder, frame, buffers, POINTER)
        for i in range(count):
            buffer = _field(builder, table, 8 * i, POINTER)
            places.append(_field(builder, buffer, _DATA, POINTER))
    scalars, pointers = places[: 2 + num_numbers], places[2 + num_numbers :]
    num_units, wanted, *numbers = (read_int(builder, place, I64(0)) for place in scalars)
    malloc = _external(builder, "malloc", POINTER, [I64])
    shared = builder.call(malloc, [I64(_REST + 8 * (num_numbers + len(pointers)))])
    for offset, value in ((_NEXT, 0), (_DONE, 0)):
        _set(builder, shared, offset, I64(value))
    _set(builder, shared, _NUM_UNITS, num_units)
    for i, value in enumerate([*numbers, *pointers]):
        _set(builder, shared, _REST + 8 * i, value)

    api, context = _field(builder, frame, _API, POINTER), _field(builder, frame, _CONTEXT, POINTER)
    num_threads = _stack(builder, I64, [I64(1)])
    error = _call_api(builder, api, _NUM_THREADS, [context, builder.bitcast(num_threads, POINTER)])
    _forget_error(builder, api, error)  # there is this thread alone, then
    helpers = builder.sub(builder.load(num_threads), I64(1))
    helpers = smaller(builder, smaller(builder, helpers, wanted), builder.sub(num_units, I64(1)))
    helpers = larger(builder, helpers, I64(0))
    _set(builder, shared, _USERS, builder.add(helpers, I64(2)))  # and this one, twice: see below
    with loop(builder, I64(0), helpers):
        task = builder.bitcast(work, POINTER)
        error = _call_api(builder, api, _SCHEDULE, [context, task, shared])
        with builder.if_then(builder.icmp_unsigned("!=", error, POINTER(None))):
            builder.atomic_rmw("sub", _counter(builder, shared, _USERS), I64(1), "seq_cst")
        _forget_error(builder, api, error)
    builder.call(work, [shared])  # lets go once
    wait, rest, ready = (handler.append_basic_block(name) for name in ("wait", "rest", "ready"))
    builder.branch(wait)
    builder.position_at_end(wait)
    finished = builder.load_atomic(_counter(builder, shared, _DONE), "acquire", 8)
    builder.cbranch(builder.icmp_signed("<", finished, num_units), rest, ready)
    builder.position_at_end(rest)
    # A helper is at its last unit. On a busy machine it may need this core for it.
    builder.call(_external(builder, "sched_yield", I32, []), [])
    builder.branch(wait)
    builder.position_at_end(ready)
    _let_go(builder, shared)
    builder.branch(done)

    builder.position_at_end(done)
    builder.ret(POINTER(None))  # no error


def _stack(builder: ir.IRBuilder, kind: ir.Type, values: list[ir.Value]) -> ir.Value:
    """An array on the stack that holds these values; a pointer to the first."""
    with builder.goto_entry_block():
        place = builder.alloca(kind, len(values))
    for i, value in enumerate(values):
        builder.store(value, builder.gep(place, [I64(i)]))
    return place


def _forget_error(builder: ir.IRBuilder, api: ir.Value, error: ir.Value) -> None:
    with builder.if_then(builder.icmp_unsigned("!=", error, POINTER(None))):
        _call_api(builder, api, _DESTROY_ERROR, [error])


def _call_api(
    builder: ir.IRBuilder, api: ir.Value, offset: int, values: list[ir.Value]
) -> ir.Value:
    """Calls a function of XLA_FFI_Api with its struct of arguments: size, extensions, values."""
    size = I64(16 + 8 * len(values)).inttoptr(POINTER)
    arguments = _stack(builder, POINTER, [size, POINTER(None), *values])
    kind = ir.FunctionType(POINTER, [POINTER]).as_pointer()
    return builder.call(_field(builder, api, offset, kind), [builder.bitcast(arguments, POINTER)])
