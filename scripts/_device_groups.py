"""The groups of checks, and what a child process does with one.

JAX is imported by the functions that need it: a parent asks for the groups' names alone.
"""

from __future__ import annotations

import functools
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import _repository  # noqa: F401 (makes the packages importable)
from _child_process import Report

RUNNING_ALONE = ("benchmark", "throughput")  # beside others their times would suffer
ON_GPU_ALONE = ("xla",)  # what runs on a CPU all the time has tests enough

_BACKENDS = ("mosaic", "triton")
_PARTS = ("shapes", "features", "pool")
_OUR_FOLDERS = ("pallas_kernels", "jpaged", "runner", "models", "scripts")


class Task(NamedTuple):
    """What a child does, in its parent's words."""

    group: str
    only: str | None
    skip: list[str]
    report: str


def groups() -> list[str]:
    """The groups of checks, in the order in which they start."""
    correctness = [f"{backend} {part}" for backend in _BACKENDS for part in _PARTS]
    return ["model", *correctness, *ON_GPU_ALONE, *RUNNING_ALONE]


def checks_of(group: str, operators: Any) -> list[Any]:
    """The checks of a group, on the device that JAX finds here."""
    from _device_checks import Check, attention_checks, feature_cases, shape_cases
    from _device_pool_checks import pool_checks

    backend, _, part = group.partition(" ")
    if part in ("shapes", "features"):
        cases = shape_cases() if part == "shapes" else feature_cases()
        return attention_checks(backend, cases, operators)
    if part == "pool":
        return pool_checks(backend, operators)
    if group == "xla":
        cases = [case for case in shape_cases() + feature_cases() if case.on_cpu]
        return attention_checks("xla", cases, operators) + pool_checks("xla", operators)
    from _kernel_benchmark import copy_bandwidth, platform

    if group == "model":
        return _model_checks()
    if group == "benchmark":
        return _benchmark_checks(operators)
    from _device_models import throughput

    return [
        Check(
            "tokens/s, attention_backend auto",
            lambda: throughput(platform(), "auto", copy_bandwidth()),
            required=False,
        )
    ]


def _model_checks() -> list[Any]:
    from _device_batches import Shape
    from _device_checks import Check, is_required
    from _device_models import ModelRuns

    from pallas_kernels.devices import tracing_target

    target = tracing_target()
    runs = ModelRuns("cpu" if target.platform == "cpu" else "gpu")
    checks = []
    for backend in ("triton", "mosaic"):
        for dtype, check in (("float32", runs.check_float32), ("bfloat16", runs.check_bfloat16)):
            if backend == "mosaic" and (dtype == "float32" or target.platform == "cpu"):
                continue  # it has no float32, and takes minutes to interpret
            shape = Shape(num_heads=9, num_kv_heads=3, head_dim=64, dtype=dtype)
            required = is_required(backend, shape, frozenset(), target)
            name = f"{dtype}, {backend} against xla"
            checks.append(Check(name, functools.partial(check, backend), required))
    return checks


def _benchmark_checks(operators: Any) -> list[Any]:
    from _attention_rivals import contenders
    from _device_checks import Check
    from _kernel_benchmark import Point, copy_bandwidth, platform

    if platform() == "cpu":
        points = {"decode": Point(2, 256, num_heads=8, num_kv_heads=2, head_dim=64)}
        seconds = 0.1
    else:
        points = {
            "decode": Point(64, 4096),
            "skewed decode": Point(64, 8192, skewed=True),
            "ragged": Point(64, 4096, chunks=8),
        }
        seconds = 0.25
    chosen = contenders(operators)
    rate = functools.cache(copy_bandwidth)
    rows: list[Any] = []
    checks = [Check("copy bandwidth", lambda: f"{rate() / 1e9:.0f} GB/s", required=False)]
    for kind, point in points.items():
        shape = f"{kind}, batch {point.batch}, context {point.context}"
        for name, prepare in chosen.items():
            if name == "xla" and kind != "decode":
                continue  # slow, and slow to compile
            run = functools.partial(_benchmark, point, name, prepare, rate, seconds, rows)
            checks.append(Check(f"{shape}: {name}", run, required=False))
    checks.append(Check("compared", lambda: _compared(rows), required=False))
    return checks


@functools.cache
def _inputs(point: Any) -> Any:
    from _kernel_benchmark import expected_output, make_inputs

    _inputs.cache_clear()  # the arrays of one point at a time
    inputs = make_inputs(point)
    return inputs, expected_output(point, inputs)


def _benchmark(
    point: Any, name: str, prepare: Any, rate: Any, seconds: float, rows: list[Any]
) -> str:
    """Figures of one contender, whose row joins the others'."""
    from _device_batches import Mismatch
    from _kernel_benchmark import run_contender

    inputs, expected = _inputs(point)
    row = run_contender(point, inputs, expected, name, prepare, seconds=seconds)
    rows.append(row)
    if row.failed:
        raise Mismatch(f"{row.reason}. next: scripts/benchmark_kernels.py --contenders '{name}'")
    if row.seconds is None:
        raise NotImplementedError(row.reason)
    record, micro = row.record(rate()), row.seconds * 1e6
    notes = "".join(f", {note}" for note in (row.settings, row.reason) if note)
    return (
        f"{micro:.1f} us, {record['bytes_per_second'] / 1e9:.0f} GB/s, "
        f"{record['copy_share']:.1%} of copy, {record['flops_per_second'] / 1e12:.2f} TFLOP/s"
        f"{notes}"
    )


def _compared(rows: list[Any]) -> str:
    from benchmark_kernels import comparisons

    target = "targets at batch >= 32, context >= 4096: 85% of copy, 1.3x JAX's kernel"
    return "; ".join([*comparisons(rows), target])


def run_child(task: Task, operators: Any) -> int:
    """Runs a group's checks and reports each; the exit code does not say whether they held."""
    report = Report(task.report)
    if task.group == "device":
        report.write(planned=["device"])
        report.write(started="device")
        report.write(name="device", status="info", data=_probe())
        return 0
    checks = [
        check
        for check in checks_of(task.group, operators)
        if check.name not in task.skip and _is_wanted(task.only, task.group, check.name)
    ]
    report.write(planned=[check.name for check in checks])
    for check in checks:
        report.write(started=check.name)
        began = time.monotonic()
        status, detail = _run_check(check)
        seconds = round(time.monotonic() - began, 2)
        report.write(name=check.name, status=status, detail=detail, seconds=seconds)
    return 0


def _run_check(check: Any) -> tuple[str, str]:
    """Status and detail of one check; whatever it raises is told."""
    from _device_batches import Mismatch

    try:
        return "pass", check.run()
    except Mismatch as mismatch:
        return "FAIL", str(mismatch)
    except NotImplementedError as error:
        reason = " ".join(str(error).split())
        if check.required:
            return "FAIL", f"{reason}. next: the issue asks for this; see the backend's unsupported"
        return "unsupported", reason
    except Exception as error:  # a kernel that does not compile, say: the others should still run
        frames = traceback.extract_tb(error.__traceback__)
        ours = [f for f in frames if Path(f.filename).parent.name in _OUR_FOLDERS] or frames
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return "FAIL", f"{text[:1500]} (at {where}). next: run it alone, see below"


def _probe() -> dict[str, Any]:
    """What the device is."""
    import jax
    from _kernel_benchmark import device_facts

    return device_facts() | {
        "python": sys.version.split()[0],
        "runtime": " ".join(jax.devices()[0].client.platform_version.split()),
        "num_devices": jax.local_device_count(),
    }


def _is_wanted(only: str | None, group: str, name: str) -> bool:
    return only is None or re.search(only, f"{group}: {name}") is not None
