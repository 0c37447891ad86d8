"""Measures the latency of one batch of requests of equal lengths, with nothing else to do.

    benchmark_latency.py --batch_size 1 --input_len 32 --output_len 128
    benchmark_latency.py --batch_size 1 --compare transformers --rival_python venv/bin/python
        --rival_model FOLDER --repeat 5

Each iteration brings new random prompts, so no prefix cache helps. Decode tokens/s is the batch
size over the median time per output token after the first. Loading, compiling and the warm-up
iterations are reported apart.

Exit codes: 0 all is well, 1 a backend failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from _backends import as_requests, limits
from _benchmark_flags import (
    check_int,
    contenders,
    define_common_flags,
    define_length_flags,
)
from _benchmark_plots import plot_bars
from _benchmark_report import Measured
from _benchmark_run import Benchmark, describe, make_job, measure
from _command_line import as_usage_error, run_script
from _serving_metrics import RequestTimes, latencies
from absl import flags

from jpaged.simulation import random_workload

_PERCENTILES = (10, 25, 50, 75, 90, 99)
ROWS = {
    "avg_latency_ms": "batch latency, ms: mean",
    "p50_latency_ms": "  median",
    "p99_latency_ms": "  p99",
    "median_ttft_ms": "time to first token, ms: median",
    "median_tpot_ms": "time per output token, ms: median",
    "decode_throughput": "decode tokens/s",
}
_PLOTTED = ("p50_latency_ms", "median_ttft_ms", "decode_throughput")


def define_flags() -> flags.FlagValues:
    """The script's flags, not yet parsed."""
    values = flags.FlagValues()
    define_common_flags(values, plot="each backend's latencies")
    define_length_flags(values, 32, 128)
    flags.DEFINE_integer("batch_size", 8, "Requests of a batch.", flag_values=values)
    flags.DEFINE_integer("num_iters", 10, "Iterations that count.", flag_values=values)
    flags.DEFINE_integer("num_iters_warmup", 3, "Iterations before them.", flag_values=values)
    return values


def latency_figures(runs: list[list[RequestTimes]]) -> dict[str, Any]:
    """The figures of iterations: each a batch whose latency is that of its slowest request."""
    batches = 1e3 * np.array([max(request.e2el for request in run) for run in runs])
    figures: dict[str, Any] = {"avg_latency_ms": float(batches.mean())}
    for percentile in _PERCENTILES:
        figures[f"p{percentile}_latency_ms"] = float(np.percentile(batches, percentile))
    requests = [request for run in runs for request in run]
    figures |= latencies(requests, metrics=("ttft", "tpot"))
    tpot = figures["median_tpot_ms"]
    figures["decode_throughput"] = 1e3 * len(runs[0]) / tpot if tpot else None
    return figures


def _plot(path: str, measured: Sequence[Measured]) -> None:
    plot_bars(path, measured, {name: ROWS[name].strip() for name in _PLOTTED})


def run(values: flags.FlagValues) -> int:
    """Do what the flags ask for; returns the exit code."""
    chosen = contenders(values)
    with as_usage_error():
        batch_size = check_int(values, "batch_size", 1)
        if batch_size > values.max_num_seqs:
            raise ValueError(
                f"batch_size must be at most max_num_seqs={values.max_num_seqs}, got {batch_size}"
            )
        num_warmup = check_int(values, "num_iters_warmup", 0)
        num_iters = num_warmup + check_int(values, "num_iters", 1)
        lengths = random_workload(
            batch_size * num_iters,
            input_len=check_int(values, "input_len", 1),
            output_len=check_int(values, "output_len", 1),
            seed=values.seed,
        )
        allowed = limits(chosen, values.max_model_len)
        workload = (
            lengths.fitted(allowed.max_model_len)
            .with_arrivals(math.inf)
            .with_prompts(allowed.vocab_size, seed=values.seed)
        )
    requests = as_requests(workload)
    batches = [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]
    job = make_job(
        values, batches[num_warmup:], batches[:num_warmup], stream=True, static_batch=batch_size
    )
    benchmark = Benchmark("latency", latency_figures, ROWS, _plot)
    counted = f"batches of {batch_size}, the first {num_warmup} batches to warm up"
    return measure(values, benchmark, chosen, {"": job}, f"{describe(workload)}; {counted}")


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    return run_script(argv, __doc__, define_flags(), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
