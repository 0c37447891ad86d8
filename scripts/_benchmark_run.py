"""What the end-to-end benchmarks have in common: run every contender, report as it goes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from _backends import BackendError, Contender, repeated
from _benchmark_report import Measured, as_json, print_report, request_times
from _command_line import write_json
from _serving_metrics import RequestTimes
from absl import flags

from jpaged.flags import engine_arguments
from jpaged.simulation import Workload

_STATIC_BATCH = 16  # of rivals that batch statically
_APART = {"load_seconds": "loading, s (apart)", "warmup_seconds": "warm-up, s (apart)"}


class Benchmark(NamedTuple):
    """What one of them is.

    name      for the JSON file
    figures   from the requests of each of a job's runs to the figures
    rows      the figures in the table, and how they are called; the first is told after each run
    plot      draws a picture of what was measured into a file
    """

    name: str
    figures: Callable[[list[list[RequestTimes]]], dict[str, Any]]
    rows: Mapping[str, str]
    plot: Callable[[str, Sequence[Measured]], None]


def make_job(
    values: flags.FlagValues,
    runs: list[list[dict[str, Any]]],
    warmup: list[list[dict[str, Any]]],
    *,
    stream: bool,
    online: bool = False,
    max_concurrency: int | None = None,
    static_batch: int = _STATIC_BATCH,
) -> dict[str, Any]:
    """A job for a backend, as JSON can hold it.

    Args:
        values: the flags, of which the engine's are taken.
        runs, warmup: each run a list of requests (`as_requests`).
        stream: whether each token is delivered when it comes, or all at a request's end.
        online: whether requests come while others run.
        max_concurrency: most requests in flight.
        static_batch: most requests of a batch of a backend that batches statically.
    """
    return {
        "engine": engine_arguments(values),
        "runs": runs,
        "warmup": warmup,
        "stream": stream,
        "online": online,
        "max_concurrency": max_concurrency,
        "static_batch": static_batch,
    }


def measure(
    values: flags.FlagValues,
    benchmark: Benchmark,
    chosen: Sequence[Contender],
    jobs: Mapping[str, dict[str, Any]],
    workload: str,
) -> int:
    """Run the jobs (by request rate; "" if there is none) on all contenders, and report.

    workload  what is run, in a line

    Returns the exit code: 1 if a backend failed (--json then has what was measured before).
    """
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("jpaged").setLevel(logging.INFO)
    print(workload, flush=True)
    try:
        measured = _run_all(values, benchmark, chosen, jobs, workload)
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1
    print_report(measured, {**benchmark.rows, **_APART}, tokens=values.check_tokens)
    if values.plot is not None:
        benchmark.plot(values.plot, measured)
    return 0


def _run_all(
    values: flags.FlagValues,
    benchmark: Benchmark,
    chosen: Sequence[Contender],
    jobs: Mapping[str, dict[str, Any]],
    workload: str,
) -> list[Measured]:
    measured: list[Measured] = []
    alone = len(chosen) * len(jobs) * values.repeat == 1
    headline, label = next(iter(benchmark.rows.items()))
    for rate, job in jobs.items():
        for one in repeated(chosen, job, repeat=values.repeat, alone=alone):
            requests = request_times(one, job)
            figures = benchmark.figures(requests)
            figures |= {name: one.result[name] for name in _APART}
            measured.append(Measured(one, rate, figures, requests))
            print(f"  {label}: {figures[headline]:.4g}", file=sys.stderr, flush=True)
            facts = {"benchmark": benchmark.name, "command": sys.argv, "workload": workload}
            result = facts | as_json(job, measured, detailed=values.save_detailed)
            write_json(values.json, result)
    return measured


def describe(workload: Workload) -> str:
    """The workload in a line."""
    text = (
        f"{workload.name}: {len(workload.requests):,} requests, "
        f"{workload.num_prompt_tokens:,} prompt and {workload.num_output_tokens:,} output tokens"
    )
    if workload.num_skipped:
        text += f"; {workload.num_skipped} too long and skipped"
    if workload.num_truncated:
        text += f"; {workload.num_truncated} too long and truncated"
    return text
