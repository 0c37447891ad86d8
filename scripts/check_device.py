"""Checks the kernels, the engine and their speed on the device at hand, and prints one table.

    check_device.py
    check_device.py --groups 'mosaic features' --only soft_cap

Needs this repository and its dependencies alone: no model files, no network. Every kernel and
feature of each backend is compared with the reference, over memory poisoned with NaN, and repeated
for equal bits; then come a model of SmolLM2's shape with random weights, a short benchmark and the
speed of a model of Llama 3 8B's shape. Checks run in child processes with a time limit: one that
hangs or crashes is a line of the table. Without a GPU the same code runs interpreted, on small
sizes.

Exit codes: 0 all held, 1 something did not or was not run, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _child_process import STATUSES, Budget, Result, run_group
from _device_groups import ON_GPU_ALONE, RUNNING_ALONE, Task, groups, run_child
from absl import flags

# Seconds without news after which a child hangs. A model's programs are compiled in one go.
_LIMITS = {"gpu": 90.0, "cpu": 240.0}
_MODEL_LIMIT = 240.0
_MOST_JOBS = 8
_MOST_COMMANDS = 8


class UsageError(Exception):
    """Told in one sentence on standard error; the exit code is 2."""


def parse_flags(argv: Sequence[str]) -> flags.FlagValues | None:
    """The parsed flags; None if --help was given and answered."""
    values = flags.FlagValues()
    flags.DEFINE_float("budget_seconds", 300, "Stop after so long.", flag_values=values)
    flags.DEFINE_string(
        "only", None, "Regular expression: only checks with a 'group: name' like it.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_list("groups", groups(), "Only these groups.", flag_values=values)
    flags.DEFINE_float(
        "hang_seconds", None, "A check that is silent for so long hangs.", flag_values=values
    )
    flags.DEFINE_integer("jobs", None, "Children at a time.", flag_values=values)
    flags.DEFINE_string("json", None, "File for the results, as JSON.", flag_values=values)
    flags.DEFINE_bool("help", False, "Show this.", flag_values=values)
    flags.DEFINE_string(
        "child", None, "Run this group here, without a parent (for debuggers).", flag_values=values
    )
    flags.DEFINE_string("report", "-", "Where a child reports to.", flag_values=values)
    flags.DEFINE_string("skip", "[]", "JSON list of checks to leave out.", flag_values=values)
    try:
        rest = values(list(argv))[1:]
        re.compile(values.only or "")
    except (flags.Error, re.error) as error:
        raise UsageError(" ".join(str(error).split())) from error
    if values["help"].value:
        print(__doc__, values.get_help(), sep="\n")
        return None
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}")
    for name in ("budget_seconds", "hang_seconds", "jobs"):
        value: Any = values[name].value
        if value is not None and not value > 0:
            raise UsageError(f"{name} must be > 0, got {value}")
    unknown = [name for name in values.groups if name not in groups()]
    if unknown:
        raise UsageError(f"groups must be among {', '.join(groups())}, got {unknown[0]!r}")
    if values.child is not None and values.child not in ("device", *groups()):
        raise UsageError(f"child must be one of {', '.join(groups())}, got {values.child!r}")
    return values


class Parent:
    """Runs the groups in children and collects their results.

    program    command line that starts this script
    """

    def __init__(self, values: flags.FlagValues, program: Sequence[str]) -> None:
        self._values = values
        self._program = list(program)
        self._budget = Budget(values.budget_seconds)
        self._platform = "gpu"

    def _command(self, group: str, report: str, done: list[str]) -> list[str]:
        only = [] if self._values.only is None else [f"--only={self._values.only}"]
        return [
            *self._program,
            f"--child={group}",
            f"--report={report}",
            f"--skip={json.dumps(done)}",
            *only,
        ]

    def _run_group(self, group: str) -> list[Result]:
        environment = dict(os.environ)
        if group not in RUNNING_ALONE:
            # Several at a time: none may take most of the GPU's memory for itself.
            environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        limit = _MODEL_LIMIT if group in ("model", "throughput") else _LIMITS[self._platform]
        began = time.monotonic()
        results = run_group(
            group,
            functools.partial(self._command, group),
            environment=environment,
            idle_seconds=self._values.hang_seconds or limit,
            budget=self._budget,
            rerun=functools.partial(_alone, self._program, group),
        )
        if group != "device" and results:
            seconds = time.monotonic() - began
            print(f"{group}: {_count(results)}, {seconds:.0f} s", file=sys.stderr, flush=True)
        return results

    def run(self) -> tuple[dict[str, Any], list[Result]]:
        """What the device is, and the results of all groups: those for correctness side by side,
        then those for speed one by one."""
        device, *_ = self._run_group("device")
        if device.data is None:
            return {}, [device]
        facts = device.data
        self._platform = "cpu" if facts["platform"] == "cpu" else "gpu"
        print(_describe(facts), flush=True)
        results = []
        hidden = _hidden_gpu() if self._platform == "cpu" else None
        if hidden is not None:
            results.append(Result("device", "GPU", "FAIL", hidden))
        jobs = self._values.jobs or min(_MOST_JOBS, max(2, (os.cpu_count() or 1) // 2))
        wanted = [name for name in groups() if name in self._values.groups]
        if self._platform == "cpu":
            wanted = [name for name in wanted if name not in ON_GPU_ALONE]
        side_by_side = [name for name in wanted if name not in RUNNING_ALONE]
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            try:
                for group_results in pool.map(self._run_group, side_by_side):
                    results += group_results
            except BaseException:
                self._budget.cancel()
                raise
        for group in wanted[len(side_by_side) :]:
            results += self._run_group(group)
        return facts, results


def _describe(facts: dict[str, Any]) -> str:
    """The head of the output: what is checked, on what."""
    versions = f"jax {facts['jax']}, Python {facts['python']}"
    if facts["platform"] == "cpu":
        return (
            f"No GPU was found: the kernels run interpreted, on small sizes ({versions}). This "
            "says nothing about races, or about speed on a GPU."
        )
    memory = f", {facts['memory_bytes'] / 2**30:.0f} GiB to use" if facts["memory_bytes"] else ""
    cores = f", {facts['cores']} multiprocessors" if facts["cores"] else ""
    return (
        f"{facts['device']}{memory}{cores}, {facts['num_devices']} of them; driver "
        f"{_nvidia_smi('--query-gpu=driver_version', '--format=csv,noheader') or 'unknown'}; "
        f"{versions}; {facts['runtime']}"
    )


def _nvidia_smi(*arguments: str) -> str:
    """First line of its output; "" where there is no such program or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().split("\n")[0] if done.returncode == 0 else ""


def _hidden_gpu() -> str | None:
    """Why it is wrong that JAX uses the CPU, if it is."""
    if os.environ.get("JAX_PLATFORMS", "") == "cpu":
        return None
    found = _nvidia_smi("-L")
    if not found:
        return None
    return (
        f"JAX uses the CPU, but the machine has {found}. next: install jax[cuda13] or jax[cuda12] "
        "in jax's own version; JAX_PLATFORMS=cuda makes JAX say what keeps it from the GPU"
    )


def _count(results: list[Result]) -> str:
    counts = dict.fromkeys(STATUSES, 0)
    for result in results:
        counts[result.status] += 1
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)


def _alone(program: Sequence[str], group: str, name: str) -> str:
    """The command that runs one check in a process of its own, without a parent."""
    return shlex.join([*program, f"--child={group}", f"--only={re.escape(f'{group}: {name}')}"])


def _line(result: Result) -> str:
    seconds = "" if result.seconds is None else f"{result.seconds:.1f} s"
    head = f"{result.status:<11} {result.group + ': ' + result.name:<66} {seconds:>7}"
    return f"{head}  {result.detail}".rstrip()


def check(values: flags.FlagValues, program: Sequence[str]) -> int:
    """Runs all that the flags ask for and prints the table; returns the exit code."""
    began = time.monotonic()
    facts, results = Parent(values, program).run()
    # What needs a look comes last, where the end of a long output shows it.
    results.sort(key=lambda result: STATUSES.index(result.status))
    for result in results:
        print(_line(result))
    bad = [result for result in results if not result.is_good and result.status != "not run"]
    for result in bad[:_MOST_COMMANDS]:
        print(f"alone: {_alone(program, result.group, result.name)}")
    held = bool(results) and all(result.is_good for result in results)
    verdict = "all held" if held else "NOT all held"
    print(f"{verdict}: {_count(results) or 'nothing was run'}, {time.monotonic() - began:.0f} s")
    if values.json is not None:
        rows = [result._asdict() for result in results]
        with open(values.json, "w", encoding="utf-8") as file:
            json.dump({"device": facts, "held": held, "results": rows}, file, indent=1)
    return 0 if held else 1


def main(
    argv: Sequence[str], *, program: Sequence[str] | None = None, operators: Any = None
) -> int:
    """Runs the script; returns the exit code.

    program    how to start it anew, for children; this file by default
    operators  the module whose operators are checked; pallas_kernels by default
    """
    try:
        values = parse_flags(argv)
        if values is None:
            return 0
        if values.child is None:
            return check(values, program or [sys.executable, str(Path(__file__).resolve())])
        if operators is None:
            operators = importlib.import_module("pallas_kernels")
        task = Task(values.child, values.only, json.loads(values.skip), values.report)
        return run_child(task, operators)
    except UsageError as error:
        print(f"{os.path.basename(argv[0])}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv))
