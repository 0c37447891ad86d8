"""Times paged attention on whatever device JAX finds: the points of a sweep, the clock, the rows.

How a call is timed. A pass is one compiled program that attends once in each of several equal pools
(layers), as a model's step does; together the pools are far larger than a GPU's L2 cache, so no
call finds its keys there. Passes are queued one behind the other and waited for once: what the host
needs to start a pass is hidden behind the pass before it. The first passes do not count, and the
figure is the median over several such queues.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import _repository  # noqa: F401 (makes the packages importable)
import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels

CHUNK = 256  # query tokens of a sequence whose prompt is under way
# Bytes of the pools that a pass goes through: some 17 times an H200's L2 cache, 8 times a B200's.
_PASS_BYTES = {"gpu": 2**30, "cpu": 2**26}
_MAX_POOLS = 64
_QUEUE_SECONDS = 0.01
_MAX_REPEATS = 15
_MIN_REPEATS = 3
_COPY_BYTES = {"gpu": 2**30, "cpu": 2**27}


class Refusal(Exception):
    """Why something cannot be timed, in words for a row of the table."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One batch of the sweep.

    batch     sequences
    context   tokens of the longest sequence in the cache, this step's included
    skewed    one sequence in eight has that context and the others a sixteenth of it
    chunks    so many sequences compute `CHUNK` tokens in this step; the others one
    """

    batch: int
    context: int
    skewed: bool = False
    chunks: int = 0
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"heads must be a multiple of the KV heads, got {self.num_heads}/"
                f"{self.num_kv_heads}"
            )
        if self.chunks > self.batch:
            raise ValueError(f"chunks must be at most batch={self.batch}, got {self.chunks}")
        if self.chunks and self.context < CHUNK:
            raise ValueError(f"context must be at least {CHUNK} with chunks, got {self.context}")

    @property
    def context_lens(self) -> np.ndarray:
        lens = np.full(self.batch, self.context, np.int32)
        if self.skewed:
            lens[np.arange(self.batch) % 8 != 0] = max(self.context // 16, 1)
        return np.maximum(lens, self.query_lens)

    @property
    def query_lens(self) -> np.ndarray:
        return np.where(np.arange(self.batch) < self.chunks, CHUNK, 1).astype(np.int32)

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    @property
    def max_blocks(self) -> int:
        return -(-int(self.context_lens.max()) // self.block_size)

    @property
    def num_blocks(self) -> int:
        return int((-(-self.context_lens // self.block_size)).sum())

    @property
    def _itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes that a call has to move: the keys and values of the contexts once, q and out."""
        kv = 2 * int(self.context_lens.sum()) * self.num_kv_heads
        return (kv + 2 * self.num_tokens * self.num_heads) * self.head_dim * self._itemsize

    @property
    def pool_bytes(self) -> int:
        """Bytes of one pool that holds the contexts."""
        slots = self.num_blocks * self.block_size
        return 2 * slots * self.num_kv_heads * self.head_dim * self._itemsize

    @property
    def num_flops(self) -> int:
        """Floating-point operations of both products, over the keys that each query sees."""
        queries, contexts = self.query_lens.astype(np.int64), self.context_lens.astype(np.int64)
        seen = queries * contexts - queries * (queries - 1) // 2
        return 4 * self.num_heads * self.head_dim * int(seen.sum())

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


class Inputs(NamedTuple):
    """Arguments of paged_attention for a point, on the device; the pool's layers are its pools."""

    q: Any  # [T, H, D]
    kv_pool: Any  # [L, N, 2, K, B, D]
    block_tables: Any  # [S, M]; tails are 0
    query_starts: Any  # [S + 1]
    context_lens: Any  # [S]

    @property
    def num_pools(self) -> int:
        return self.kv_pool.shape[0]


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: `reason` says why there is no time, or what is odd about the time."""

    point: Point
    contender: str
    seconds: float | None = None
    spread: float | None = None  # (slowest - fastest) / median
    relative_error: float | None = None  # against the reference
    pools: int | None = None
    settings: str = ""
    plan_seconds: float | None = None  # of making the plan, once a step
    reason: str = ""
    failed: bool = False  # one of ours broke, or its result is wrong

    def record(self, copy_rate: float) -> dict[str, Any]:
        """The row for JSON; `copy_rate` is the measured copy bandwidth in bytes per second."""
        fields = dataclasses.asdict(self)
        rate = self.point.num_bytes / self.seconds if self.seconds else None
        return (
            fields.pop("point")
            | fields
            | {
                "bytes": self.point.num_bytes,
                "bytes_per_second": rate,
                "copy_share": rate / copy_rate if rate else None,
                "flops_per_second": self.point.num_flops / self.seconds if self.seconds else None,
            }
        )


class Timing(NamedTuple):
    """Seconds of one pass: median, and the spread of the repeats around it."""

    seconds: float
    spread: float


def platform() -> str:
    """ "cpu" or "gpu"."""
    return "cpu" if jax.devices()[0].platform == "cpu" else "gpu"


def device_facts() -> dict[str, Any]:
    """What was measured on, for the head of a table."""
    device = jax.devices()[0]
    stats = (device.memory_stats() or {}) if device.platform != "cpu" else {}
    return {
        "platform": device.platform,
        "device": device.device_kind,
        "cores": getattr(device, "core_count", None),
        "memory_bytes": stats.get("bytes_limit"),
        "jax": jax.__version__,
    }


def free_bytes() -> int | None:
    """Bytes that may still be allocated on the device; None where that is not known (a CPU)."""
    stats = jax.devices()[0].memory_stats() if platform() != "cpu" else None
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def check_room(needed: int, what: str) -> None:
    """Refuses what would not fit into the memory that is left.

    Raises:
        Refusal: It would not.
    """
    free = free_bytes()
    if free is not None and needed > 0.95 * free:
        raise Refusal(f"{what} needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} are free")


def time_passes(run: Callable[..., Any], *arguments: Any, seconds: float) -> Timing:
    """Times `run(*arguments)`, which dispatches work and returns arrays; takes about `seconds`."""
    jax.block_until_ready(run(*arguments))  # compiles
    began = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    once = max(time.perf_counter() - began, 1e-6)
    queued = max(1, round(_QUEUE_SECONDS / once))
    repeats = int(min(max(seconds / (queued * once), _MIN_REPEATS), _MAX_REPEATS))
    samples = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(queued):
            results = run(*arguments)
        jax.block_until_ready(results)
        samples.append((time.perf_counter() - began) / queued)
    median = statistics.median(samples)
    return Timing(median, (max(samples) - min(samples)) / median)


def copy_bandwidth(seconds: float = 0.5) -> float:
    """Bytes per second, read and written, of the faster of two copies of a large array."""
    free = free_bytes()
    size = _COPY_BYTES[platform()]
    if free is not None:
        size = min(size, free // 4)
    array = jnp.arange(size // 4, dtype=jnp.int32)
    copies = (jax.jit(lambda x: x + 1), jax.jit(jnp.copy))
    best = min(time_passes(copy, array, seconds=seconds).seconds for copy in copies)
    return 2 * array.nbytes / best


def make_inputs(point: Point, seed: int = 0) -> Inputs:
    """Random queries, keys and values; the blocks of a sequence lie scattered over the pool.

    Raises:
        Refusal: The device's memory is too small.
    """
    pools = max(1, min(_MAX_POOLS, round(_PASS_BYTES[platform()] / point.pool_bytes)))
    # Room for the random bits that the numbers are made from.
    check_room(3 * pools * point.pool_bytes, "the pool")
    rng = np.random.default_rng(seed)
    tables = np.zeros((point.batch, point.max_blocks), np.int32)
    blocks = rng.permutation(point.num_blocks).astype(np.int32)
    used = 0
    for row, count in enumerate(-(-point.context_lens // point.block_size)):
        tables[row, :count] = blocks[used : used + count]
        used += count
    starts = np.concatenate([[0], np.cumsum(point.query_lens)]).astype(np.int32)
    key_q, key_pool = jax.random.split(jax.random.key(seed))
    shape = (pools, point.num_blocks, 2, point.num_kv_heads, point.block_size, point.head_dim)
    dtype = jnp.dtype(point.dtype)
    make = jax.jit(jax.random.normal, static_argnums=(1, 2))
    q = make(key_q, (point.num_tokens, point.num_heads, point.head_dim), dtype)
    pool = make(key_pool, shape, dtype)
    return Inputs(q, pool, *map(jnp.asarray, (tables, starts, point.context_lens)))


def relative_error(got: Any, expected: Any) -> float:
    """Frobenius norm of the difference over that of `expected`; infinite for NaN."""
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    error = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float("inf")


def run_point(point: Point, contenders: dict[str, Any], *, seconds: float) -> Iterator[Row]:
    """One row for each contender, whatever happens to it.

    Args:
        point: The batch.
        contenders: Name -> function of point and inputs that returns `Prepared`s to take the best
            of, or raises Refusal or NotImplementedError (see `_attention_rivals`).
        seconds: About how long to time each.
    """
    try:
        inputs = make_inputs(point)
        expected = expected_output(point, inputs)
    except (Refusal, jax.errors.JaxRuntimeError) as error:
        yield from (Row(point, name, reason=_one_line(error)) for name in contenders)
        return
    for name, prepare in contenders.items():
        yield run_contender(point, inputs, expected, name, prepare, seconds=seconds)


def expected_output(point: Point, inputs: Inputs) -> np.ndarray:
    """The result in the first pool, by the reference."""
    attend = jax.jit(
        functools.partial(pallas_kernels.paged_attention, scale=point.scale, backend="reference")
    )
    q, kv_pool, *batch = inputs
    return np.asarray(attend(q, kv_pool, jnp.int32(0), *batch), np.float32)


def run_contender(
    point: Point,
    inputs: Inputs,
    expected: np.ndarray,
    name: str,
    prepare: Any,
    *,
    seconds: float,
) -> Row:
    """Times one contender; `expected` is what `expected_output` gave, the rest as in run_point."""
    is_ours = getattr(prepare, "is_ours", False)
    best: Row | None = None
    failure = Row(point, name, reason="it offers nothing to run", failed=is_ours)
    try:
        for prepared in prepare(point, inputs):
            row = _time_prepared(point, name, prepared, expected, seconds, is_ours)
            if best is None or (row.seconds or 0) < (best.seconds or 0):
                best = row
    except (Refusal, NotImplementedError) as refusal:
        failure = Row(point, name, reason=_one_line(refusal))
    except Exception as error:  # a rival's internals, or a kernel of ours: a row, not the end
        failure = Row(
            point, name, reason=f"{type(error).__name__}: {_one_line(error)}", failed=is_ours
        )
    return best or failure


def _time_prepared(
    point: Point, name: str, prepared: Any, expected: np.ndarray, seconds: float, is_ours: bool
) -> Row:
    run = jax.jit(prepared.run)
    timing = time_passes(run, *prepared.arguments, seconds=seconds)
    plan_seconds = None
    if prepared.plan is not None:
        make_plan, batch = prepared.plan
        plan_seconds = time_passes(make_plan, *batch, seconds=seconds / 4).seconds
    out = np.asarray(prepared.output(run(*prepared.arguments)), np.float32)
    out = out.reshape(point.num_tokens, point.num_heads, point.head_dim)
    error = relative_error(out, expected)
    # Rivals sum in lower precision; a figure beyond this is no attention.
    is_wrong = error > (1e-2 if is_ours else 1e-1)
    notes = [f"WRONG RESULT (relative error {error:.1e})"] if is_wrong else []
    if platform() != "cpu" and prepared.num_pools * point.pool_bytes < _PASS_BYTES["gpu"] // 8:
        notes.append("small enough for the L2 cache to help")
    return Row(
        point,
        name,
        seconds=timing.seconds / prepared.num_pools,
        spread=timing.spread,
        relative_error=error,
        pools=prepared.num_pools,
        settings=prepared.settings,
        plan_seconds=plan_seconds,
        reason="; ".join(notes),
        failed=is_wrong and is_ours,
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 240 else text[:240] + " ..."
