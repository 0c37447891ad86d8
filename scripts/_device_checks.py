"""Checks of a backend's kernels on the device that JAX finds; each is run alone by a child."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import _repository  # noqa: F401 (makes the packages importable)
import jax
import jax.numpy as jnp
import numpy as np
from _device_batches import (
    Batch,
    Mismatch,
    Shape,
    check_attention,
    decode_rows,
    make_batch,
    mixed_rows,
)
from jax import lax

import pallas_kernels
from pallas_kernels.devices import Target, tracing_target
from pallas_kernels.plan import make_plan

_REPEATS = {"gpu": 50, "cpu": 1}
_FEATURES = ("window", "soft_cap", "alibi_slopes", "sinks", "return_lse")
_RACE = (
    "next: a race: look for a missing wait, fence or barrier between the copies and the products; "
    "compute-sanitizer --tool racecheck on this check alone"
)


class Check(NamedTuple):
    """One check. `run` returns figures for the table, or raises: Mismatch for a wrong result,
    NotImplementedError for what is not supported, which is a failure if it is `required`."""

    name: str
    run: Callable[[], str]
    required: bool = True


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """A call of paged_attention that is tried.

    features  names of _FEATURES; "traced window" and "traced scale" for values known only when it
              runs; "plan" and "host plan" for work lists made beforehand on the device or the host
    on_cpu    whether it is also among the few that run interpreted
    """

    name: str
    shape: Shape
    features: frozenset[str] = frozenset()
    on_cpu: bool = False


_SMALL: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}


def _case(name: str, *features: str, on_cpu: bool = False, **sizes: Any) -> AttentionCase:
    return AttentionCase(name, Shape(**sizes), frozenset(features), on_cpu)


def shape_cases() -> list[AttentionCase]:
    """Each dtype, head dim, block size and group, without features."""
    cases = [_case("bfloat16", on_cpu=True), _case("float16", dtype="float16")]
    cases += [_case("float32", dtype="float32")]
    cases += [_case(f"D {dim}", head_dim=dim) for dim in (64, 80, 96, 256)]
    cases += [_case(f"B {size}", block_size=size) for size in (8, 32, 64, 128)]
    cases += [
        _case(f"H/K {heads}/{kv_heads}", num_heads=heads, num_kv_heads=kv_heads)
        for heads, kv_heads in ((8, 8), (24, 8), (64, 8), (32, 2), (71, 1))
    ]
    cases += [
        _case("H/K 9/3, D 64", **_SMALL),
        _case("float16, H/K 9/3, D 64, B 64", dtype="float16", block_size=64, **_SMALL),
        _case("float32, H/K 9/3, D 64, B 8", dtype="float32", block_size=8, on_cpu=True, **_SMALL),
    ]
    return cases


def feature_cases() -> list[AttentionCase]:
    """Each feature alone, and combinations of features and shapes."""
    alone = (*_FEATURES, "traced window", "traced scale", "plan", "host plan")
    cases = [_case(name, name) for name in alone]
    common = ("window", "soft_cap", "sinks", "return_lse")
    cases += [
        _case("window, soft_cap, sinks, return_lse", *common, on_cpu=True),
        _case(
            "the same, float16, D 64, B 128", *common, dtype="float16", head_dim=64, block_size=128
        ),
        _case("all features", *_FEATURES, "traced window"),
        _case("all features, H/K 9/3, D 64", *_FEATURES, on_cpu=True, **_SMALL),
        _case(
            "all features, float32, D 80, B 8",
            *_FEATURES,
            dtype="float32",
            head_dim=80,
            block_size=8,
        ),
        _case("all features, D 256, B 128", *_FEATURES, head_dim=256, block_size=128),
    ]
    return cases


def for_cpu(case: AttentionCase) -> AttentionCase:
    """The same case in sizes that an interpreter gets through."""
    shape = case.shape
    group = shape.num_heads // shape.num_kv_heads
    shape = dataclasses.replace(
        shape,
        num_heads=2 * group if shape.num_kv_heads > 3 else shape.num_heads,
        num_kv_heads=2 if shape.num_kv_heads > 3 else shape.num_kv_heads,
        head_dim=min(shape.head_dim, 64),
        max_context=3 * shape.block_size,
    )
    return dataclasses.replace(case, shape=shape)


def is_required(backend: str, shape: Shape, features: frozenset[str], target: Target) -> bool:
    """Whether the backend has to support this on the device."""
    if backend == "xla":
        return True
    if target.platform != "cpu" and not target.is_nvidia:
        return False
    if backend == "triton":
        return target.capability is None or target.capability >= (8, 0)
    version = tuple(int(part) for part in jax.__version__.split(".")[:3])
    if version < (0, 11, 2) or not (target.is_hopper or target.platform == "cpu"):
        return False
    return (
        shape.dtype != "float32"
        and shape.head_dim in (64, 128)
        and 16 <= shape.block_size <= 128
        and shape.num_heads // shape.num_kv_heads <= 16
        and "alibi_slopes" not in features
    )


def attention_checks(backend: str, cases: list[AttentionCase], operators: Any) -> list[Check]:
    """The cases that this device can run, as checks of one backend."""
    target = tracing_target()
    on_cpu = target.platform == "cpu"
    checks = []
    for case in cases:
        if on_cpu:
            if not case.on_cpu:
                continue
            case = for_cpu(case)
        required = is_required(backend, case.shape, case.features, target)
        run = functools.partial(_check_case, case, backend, operators)
        checks.append(Check(f"attention: {case.name}", run, required))
    return checks


def _keywords(case: AttentionCase) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call's keyword arguments: those known when it is traced, and those that are not."""
    shape, features = case.shape, case.features
    rng = np.random.default_rng(7)
    static: dict[str, Any] = {"scale": shape.head_dim**-0.5}
    traced: dict[str, Any] = {}
    window = 2 * shape.block_size + 3
    if "traced window" in features:
        traced["window"] = np.int32(window)
    elif "window" in features:
        static["window"] = window
    if "traced scale" in features:
        traced["scale"] = np.float32(static.pop("scale"))
    if "soft_cap" in features:
        static["soft_cap"] = 5.0
    if "return_lse" in features:
        static["return_lse"] = True
    heads = shape.num_heads
    if "alibi_slopes" in features:
        slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
        traced["alibi_slopes"] = slopes.astype(np.float32)
    if "sinks" in features:
        traced["sinks"] = rng.standard_normal(heads).astype(np.float32)
    return static, traced


def _check_case(case: AttentionCase, backend: str, operators: Any) -> str:
    shape = case.shape
    static, traced = _keywords(case)
    attend = jax.jit(
        lambda batch, traced, plan: operators.paged_attention(
            *batch, **static, **traced, plan=plan, backend=backend
        )
    )
    with_lse = static | {"return_lse": True, "backend": "reference"}
    operator: Any = pallas_kernels.paged_attention
    reference = jax.jit(lambda batch, traced: operator(*batch, **with_lse, **traced))
    worst = 0.0
    kinds = (mixed_rows, decode_rows)[: 1 if tracing_target().platform == "cpu" else None]
    for seed, rows in enumerate(make(shape) for make in kinds):
        batch = make_batch(shape, rows, seed)
        on_device = Batch(*map(jnp.asarray, batch))
        plan = _plan(case, backend, operators, on_device)
        results = attend(on_device, traced, plan)
        expected = reference(on_device, traced)
        got = results if "return_lse" in case.features else (results, None)
        worst = max(worst, check_attention(batch, shape.dtype, got, expected))
        if seed == 0:
            check_repeats(lambda: attend(on_device, traced, plan), results)  # noqa: B023
    return f"error {worst:.1e}"


def _plan(case: AttentionCase, backend: str, operators: Any, batch: Batch) -> Any:
    sizes = {
        "num_tokens": batch.q.shape[0],
        "num_heads": case.shape.num_heads,
        "num_kv_heads": case.shape.num_kv_heads,
        "dtype": batch.q.dtype,
    }
    if "plan" in case.features:
        make = functools.partial(operators.plan_attention, **sizes, backend=backend)
        return jax.jit(make)(batch.query_starts, batch.context_lens)
    if "host plan" in case.features:
        cores = tracing_target().num_cores
        arrays = map(np.asarray, (batch.query_starts, batch.context_lens))
        return jax.tree.map(jnp.asarray, make_plan(*arrays, **sizes, num_cores=cores))
    return None


@jax.jit
def _same_bits(a: Any, b: Any) -> jax.Array:
    def bits(x: jax.Array) -> jax.Array:
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        return lax.bitcast_convert_type(x, kind)

    same = jax.tree.map(lambda x, y: jnp.all(bits(x) == bits(y)), a, b)
    return jnp.all(jnp.stack(jax.tree.leaves(same)))


def check_repeats(call: Callable[[], Any], expected: Any) -> None:
    """Calls many times and compares bits.

    Raises:
        Mismatch: A result differs.
    """
    repeats = _REPEATS[tracing_target().platform]
    same = [_same_bits(call(), expected) for _ in range(repeats)]
    different = repeats - sum(map(bool, same))
    if different:
        raise Mismatch(f"{different} of {repeats} repeats differ in their bits. {_RACE}")
