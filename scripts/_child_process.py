"""Runs checks in child processes, so that one that hangs or crashes is reported and not suffered.

A child writes a line of JSON to its report as it goes: `{"planned": [names]}`, `{"started": name}`,
then a result with that name. The parent watches the file. A child that adds nothing for too long is
killed with all that it started; one that dies leaves its last words in its output. In both cases
the check under way is to blame, and a new child does the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_POLL_SECONDS = 0.05
_TAIL_LINES = 12
_MAX_CASUALTIES = 2  # of a group: after that many the rest of it is not tried


# From best to worst.
STATUSES = ("unsupported", "info", "pass", "not run", "hang", "crash", "FAIL")


class Result(NamedTuple):
    """What became of one check.

    status  one of STATUSES
    detail  the figures, or what went wrong and what to do next
    """

    group: str
    name: str
    status: str
    detail: str = ""
    seconds: float | None = None
    data: dict[str, Any] | None = None

    @property
    def is_good(self) -> bool:
        return self.status in ("pass", "unsupported", "info")


class Budget:
    """Time that all children share; may be ended early from another thread."""

    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        self._cancelled = threading.Event()

    @property
    def is_spent(self) -> bool:
        return self._cancelled.is_set() or time.monotonic() >= self._deadline

    def cancel(self) -> None:
        """Have all children stopped."""
        self._cancelled.set()


class Report:
    """The child's end: writes events, each at once, for the parent to see."""

    def __init__(self, path: str) -> None:
        self._path = path

    def write(self, **event: Any) -> None:
        """Append one event; "-" as the path prints it."""
        line = json.dumps(event)
        if self._path == "-":
            print(line, flush=True)
            return
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


class _Attempt(NamedTuple):
    """How a child ended: why it was stopped ("", "hang" or "budget"), its exit code, last words."""

    events: list[dict[str, Any]]
    stopped: str
    code: int | None
    tail: str
    seconds: float


def run_group(
    group: str,
    command: Callable[[str, list[str]], Sequence[str]],
    *,
    environment: Mapping[str, str],
    idle_seconds: float,
    budget: Budget,
    rerun: Callable[[str], str],
) -> list[Result]:
    """Runs all checks of a group, in as many children as it takes.

    Args:
        group: The group's name, for the results.
        command: Makes a child's command line from the report's path and the names to leave out.
        environment: The child's environment.
        idle_seconds: A child that reports nothing for so long hangs.
        budget: When it is spent, children are stopped and the rest is "not run".
        rerun: Makes a command that runs a check alone, for the messages.
    """
    results: dict[str, Result] = {}
    casualties = 0
    while True:
        if budget.is_spent:
            return [*results.values(), Result(group, "the rest", "not run", _out_of_time())]
        attempt = _run_child(command, list(results), environment, idle_seconds, budget)
        planned: list[str] | None = None
        culprit = "starting"
        for event in attempt.events:
            if "planned" in event:
                planned = event["planned"]
            elif "started" in event:
                culprit = event["started"]
            elif "name" in event:
                results[event["name"]] = Result(group, **event)
                culprit = "ending"
        unfinished = [name for name in planned or () if name not in results]
        if planned is not None and not unfinished:
            return list(results.values())
        if attempt.stopped == "budget":
            names = unfinished or ["all of it"]
            not_run = [Result(group, name, "not run", _out_of_time()) for name in names]
            return [*results.values(), *not_run]
        results[culprit] = _casualty(group, culprit, attempt, idle_seconds, rerun(culprit))
        casualties += 1
        unfinished = [name for name in unfinished if name != culprit]
        if culprit in ("starting", "ending") or casualties >= _MAX_CASUALTIES:
            why = f"{casualties} of this group's checks hung or crashed. next: mend those first"
            rest = [Result(group, name, "not run", why) for name in unfinished]
            return [*results.values(), *rest]
        if not unfinished:
            return list(results.values())


def _out_of_time() -> str:
    return "the budget was used up. next: give more with --budget_seconds, or less with --only"


def _casualty(group: str, name: str, attempt: _Attempt, idle_seconds: float, rerun: str) -> Result:
    """The result of the check under way when its child hung or died."""
    if attempt.stopped == "hang":
        detail = (
            f"nothing happened for {idle_seconds:.0f} s, so its process was killed. next: look for "
            "a wait on a barrier that too few arrive at (a copy left out or predicated off, a "
            f"wrong num_arrivals) or a loop without end; alone: {rerun}"
        )
        return Result(group, name, "hang", detail, attempt.seconds)
    code = attempt.code
    died = f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"
    detail = (
        f"the process ended {died}. next: compute-sanitizer --tool memcheck {rerun} -- last words: "
        f"{attempt.tail or 'none'}"
    )
    return Result(group, name, "crash", detail, attempt.seconds)


def _run_child(
    command: Callable[[str, list[str]], Sequence[str]],
    done: list[str],
    environment: Mapping[str, str],
    idle_seconds: float,
    budget: Budget,
) -> _Attempt:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report"), Path(folder, "output")
        report.touch()
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command(str(report), done),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,  # so that all that it starts can be killed with it
            )
        stopped = ""
        try:
            stopped = _watch(process, report, idle_seconds, budget)
        finally:
            code = _kill(process)
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = " | ".join(line.strip() for line in lines[-_TAIL_LINES:] if line.strip())
        return _Attempt(_read_events(report), stopped, code, tail, time.monotonic() - began)


def _watch(process: subprocess.Popen, report: Path, idle_seconds: float, budget: Budget) -> str:
    """Waits for the child's end; "hang" or "budget" if it has to be stopped."""
    size, changed = 0, time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if report.stat().st_size != size:
            size, changed = report.stat().st_size, now
        if budget.is_spent:
            return "budget"
        if now - changed >= idle_seconds:
            return "hang"
        time.sleep(_POLL_SECONDS)
    return ""


def _kill(process: subprocess.Popen) -> int | None:
    """Ends the child's whole process group; its exit code, None if it cannot be killed."""
    if process.returncode is not None:
        return process.returncode
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        return process.wait(timeout=20)
    except subprocess.TimeoutExpired:  # stuck in the driver
        return None


def _read_events(report: Path) -> list[dict[str, Any]]:
    """The complete lines of a report."""
    text = report.read_text(encoding="utf-8", errors="replace")
    return [json.loads(line) for line in text.split("\n")[:-1]]
