"""Checks of the operators that move keys and values about, and of pools beyond 2^31 numbers."""

from __future__ import annotations

import functools
from typing import Any

import _repository  # noqa: F401 (makes the packages importable)
import jax
import jax.numpy as jnp
import numpy as np
from _device_batches import (
    Batch,
    Mismatch,
    Shape,
    check_attention,
    make_batch,
    mixed_rows,
    random_pool,
)
from _device_checks import Check, check_repeats, is_required

import pallas_kernels
from pallas_kernels.devices import tracing_target

_SHAPES = {
    "bfloat16, D 128": Shape(num_layers=3, max_context=256),
    "float32, D 64, B 8": Shape(
        num_heads=9, num_kv_heads=3, head_dim=64, block_size=8, dtype="float32", max_context=64
    ),
    "float16, D 64, B 64": Shape(
        num_kv_heads=2, head_dim=64, block_size=64, dtype="float16", max_context=256
    ),
    "bfloat16, D 80, B 32": Shape(num_kv_heads=5, head_dim=80, block_size=32, max_context=128),
}
_ON_CPU = ("float32, D 64, B 8", "float16, D 64, B 64")
_LARGE = 2**31  # numbers in a pool whose offsets take more than 32 bits
_SLOTS_WRONG = (
    "next: look at the bounds of the slot, the block and the layer, and at 64-bit offsets"
)


def pool_checks(backend: str, operators: Any) -> list[Check]:
    """The pool checks of one backend on this device."""
    target = tracing_target()
    on_cpu = target.platform == "cpu"
    checks = []
    for name, shape in _SHAPES.items():
        if on_cpu and name not in _ON_CPU:
            continue
        features: frozenset[str] = frozenset()
        required = is_required(backend, shape, features, target)
        for operator, check in (
            ("write_kv", _check_write),
            ("copy_blocks", _check_copy),
            ("gather, scatter", _check_swap),
            ("merge_states", _check_merge),
        ):
            # The contract asks of mosaic the KV write alone.
            must = required and (backend != "mosaic" or operator == "write_kv")
            run = functools.partial(check, shape, backend, operators)
            checks.append(Check(f"{operator}: {name}", run, must))
    if not on_cpu:
        run = functools.partial(_check_large_pool, Shape(), backend, operators)
        required = is_required(backend, Shape(), frozenset(), target)
        checks.append(Check("a pool of more than 2^31 numbers", run, required))
    return checks


def _poisoned(shape: Shape, seed: int) -> np.ndarray:
    """A pool of which a third is NaN."""
    rng = np.random.default_rng(seed)
    pool = random_pool(shape, rng)
    pool[:, rng.random(pool.shape[1]) < 0.3] = np.nan
    return pool.astype(jnp.dtype(shape.dtype))


def _bits(array: Any) -> np.ndarray:
    array = np.ascontiguousarray(np.asarray(array))
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def _check_bits(got: Any, expected: np.ndarray, what: str) -> None:
    got, expected = _bits(got), _bits(expected)
    wrong = np.argwhere(got != expected)
    if len(wrong):
        raise Mismatch(
            f"{what}: {len(wrong)} of {got.size} numbers differ, first at index "
            f"{tuple(map(int, wrong[0]))}. {_SLOTS_WRONG}"
        )


def _check_in_place(operator: Any, pool: jax.Array, *arguments: Any) -> None:
    """A donated pool keeps its memory (which a CPU's runtime need not do)."""
    if tracing_target().platform == "cpu":
        return
    donated = jnp.copy(pool)
    before = donated.unsafe_buffer_pointer()
    after = jax.jit(operator, donate_argnums=0)(donated, *arguments)
    if after.unsafe_buffer_pointer() != before:
        raise Mismatch(
            "a donated pool came back in other memory, so it was copied. next: look for a copy of "
            "the pool in the optimised HLO (pallas_kernels.aot.compile_for(...).hlo)"
        )


def _check_write(shape: Shape, backend: str, operators: Any) -> str:
    rng = np.random.default_rng(1)
    pool = _poisoned(shape, 2)
    num_slots = shape.num_blocks * shape.block_size
    num_tokens = min(67, num_slots)
    slots = rng.permutation(num_slots)[:num_tokens].astype(np.int32)
    slots[::7] = num_slots  # padding
    slots[3], slots[5], slots[11] = -1, num_slots + 17, np.iinfo(np.int32).max
    kv = rng.standard_normal((2, num_tokens, shape.num_kv_heads, shape.head_dim), dtype=np.float32)
    kv = kv.astype(pool.dtype)
    layer = np.int32(shape.num_layers - 1)
    expected = pool.copy()
    for token, slot in enumerate(slots):
        if 0 <= slot < num_slots:
            block, offset = divmod(int(slot), shape.block_size)
            expected[layer, block, :, :, offset] = kv[:, token]
    operator = functools.partial(operators.write_kv, backend=backend)
    arguments = tuple(map(jnp.asarray, (layer, kv[0], kv[1], slots)))
    on_device, write = jnp.asarray(pool), jax.jit(operator)
    got = write(on_device, *arguments)
    _check_bits(got, expected, "the pool")
    check_repeats(lambda: write(on_device, *arguments), got)
    _check_in_place(operator, on_device, *arguments)
    return "bitwise"


def _check_copy(shape: Shape, backend: str, operators: Any) -> str:
    pool = _poisoned(shape, 3)
    num_blocks = shape.num_blocks
    order = np.random.default_rng(4).permutation(num_blocks)[:6]
    # A block that is both read and written, and destinations that do not exist.
    sources = np.array([*order[:3], order[3], order[0], -5, num_blocks], np.int32)
    targets = np.array([*order[3:6], order[1], num_blocks, -1, 2**31 - 1], np.int32)
    expected = pool.copy()
    for source, target in zip(sources, targets, strict=True):
        if 0 <= target < num_blocks:
            expected[:, target] = pool[:, source]
    operator = functools.partial(operators.copy_blocks, backend=backend)
    arguments = (jnp.asarray(sources), jnp.asarray(targets))
    on_device, copy = jnp.asarray(pool), jax.jit(operator)
    got = copy(on_device, *arguments)
    _check_bits(got, expected, "the pool")
    check_repeats(lambda: copy(on_device, *arguments), got)
    _check_in_place(operator, on_device, *arguments)
    return "bitwise"


def _check_swap(shape: Shape, backend: str, operators: Any) -> str:
    pool, other = _poisoned(shape, 5), _poisoned(shape, 6)
    num_blocks = shape.num_blocks
    blocks = np.random.default_rng(7).permutation(num_blocks)[:5].astype(np.int32)
    gather = jax.jit(functools.partial(operators.gather_blocks, backend=backend))
    data = gather(jnp.asarray(pool), jnp.asarray(blocks))
    _check_bits(data, pool[:, blocks], "gathered blocks")
    check_repeats(lambda: gather(jnp.asarray(pool), jnp.asarray(blocks)), data)
    places = np.array([*blocks[1:4], num_blocks, -1], np.int32)
    expected = other.copy()
    expected[:, places[:3]] = pool[:, blocks[:3]]
    operator = functools.partial(operators.scatter_blocks, backend=backend)
    scatter, on_device = jax.jit(operator), jnp.asarray(other)
    got = scatter(on_device, jnp.asarray(places), data)
    _check_bits(got, expected, "the pool after the scatter")
    check_repeats(lambda: scatter(on_device, jnp.asarray(places), data), got)
    _check_in_place(operator, on_device, jnp.asarray(places), data)
    return "bitwise"


def _check_merge(shape: Shape, backend: str, operators: Any) -> str:
    rng = np.random.default_rng(8)
    sizes = (3, 19, shape.num_heads)
    outs = rng.standard_normal((*sizes, shape.head_dim), dtype=np.float32)
    lses = 3 * rng.standard_normal(sizes, dtype=np.float32)
    empty = rng.random(sizes) < 0.3
    empty[:, 4] = True  # a row of which no part saw a key
    lses[empty], outs[empty] = -np.inf, np.nan
    arguments = (jnp.asarray(outs.astype(jnp.dtype(shape.dtype))), jnp.asarray(lses))
    merge = jax.jit(functools.partial(operators.merge_states, backend=backend))
    reference = jax.jit(functools.partial(pallas_kernels.merge_states, backend="reference"))
    starts = np.arange(sizes[1] + 1, dtype=np.int32)  # a sequence for each token, for messages
    batch = Batch(None, None, None, None, starts, np.ones(sizes[1], np.int32))
    got = merge(*arguments)
    error = check_attention(batch, shape.dtype, got, reference(*arguments))
    check_repeats(lambda: merge(*arguments), got)
    return f"error {error:.1e}"


def _check_large_pool(shape: Shape, backend: str, operators: Any) -> str:
    """The last blocks of the last layer of a pool whose offsets need more than 32 bits."""
    small = make_batch(shape, mixed_rows(shape), 9)
    per_block = 2 * shape.num_kv_heads * shape.block_size * shape.head_dim
    num_blocks = (_LARGE // (shape.num_layers * per_block)) * 11 // 10
    sizes = (shape.num_layers, num_blocks, *small.kv_pool.shape[2:])
    layer = jnp.int32(shape.num_layers - 1)
    first = num_blocks - shape.num_blocks
    place = jax.jit(
        lambda pool, blocks: jax.lax.dynamic_update_slice(
            pool, blocks[None], (layer, first, 0, 0, 0, 0)
        ),
        donate_argnums=0,
    )
    pool = jnp.full(sizes, jnp.nan, shape.dtype)
    pool = place(pool, jnp.asarray(small.kv_pool[shape.num_layers - 1]))
    # Entries past the last block stay any integers.
    known = (small.block_tables >= 0) & (small.block_tables < shape.num_blocks)
    tables = np.where(known, small.block_tables.astype(np.int64) + first, small.block_tables)
    far = (jnp.asarray(tables.astype(np.int32)), *map(jnp.asarray, small[4:]))
    attend = jax.jit(
        lambda q, pool, *batch: operators.paged_attention(
            q, pool, layer, *batch, scale=shape.head_dim**-0.5, return_lse=True, backend=backend
        )
    )
    got: Any = attend(jnp.asarray(small.q), pool, *far)
    expected: Any = pallas_kernels.paged_attention(
        *map(jnp.asarray, small),
        scale=shape.head_dim**-0.5,
        return_lse=True,
        backend="reference",
    )
    try:
        error = check_attention(small, shape.dtype, got, expected)
        last = num_blocks * shape.block_size - 1
        kv = jnp.full((1, shape.num_kv_heads, shape.head_dim), 3, shape.dtype)
        write = jax.jit(functools.partial(operators.write_kv, backend=backend), donate_argnums=0)
        pool = write(pool, layer, kv, 2 * kv, jnp.full(1, last, jnp.int32))
        block = np.asarray(pool[shape.num_layers - 1, num_blocks - 1], np.float32)
        written = small.kv_pool[shape.num_layers - 1, -1].astype(np.float32)
        written[:, :, -1] = np.array([3, 6], np.float32)[:, None, None]
        _check_bits(block, written, "the last block")
    except Mismatch as mismatch:
        raise Mismatch(f"{mismatch}; if small pools pass: offsets that overflow 32 bits") from None
    return f"{pool.size / _LARGE:.2f} x 2^31 numbers, error {error:.1e}"
