"""Measures offline throughput: all requests at once, tokens and requests a second.

    benchmark_throughput.py --num_prompts 64 --input_len 128 --output_len 128
    benchmark_throughput.py --dataset_name jsonl --dataset_path requests.jsonl --max_num_seqs 32
    benchmark_throughput.py --compare vllm --rival_python venv/bin/python --rival_model FOLDER
        --repeat 5

Greedy, and every request gets exactly its output length. Loading, compiling and warming up are
reported apart.

Exit codes: 0 all is well, 1 a backend failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

from _backends import as_requests, limits
from _benchmark_flags import (
    contenders,
    define_common_flags,
    define_dataset_flags,
    make_workload,
    warmup_requests,
)
from _benchmark_plots import plot_bars
from _benchmark_report import Measured
from _benchmark_run import Benchmark, describe, make_job, measure
from _command_line import as_usage_error, run_script
from _serving_metrics import RequestTimes, throughput
from absl import flags

ROWS = {
    "output_throughput": "output tokens/s",
    "total_token_throughput": "total tokens/s",
    "request_throughput": "requests/s",
    "duration": "seconds",
}
_PLOTTED = ("output_throughput", "request_throughput")


def define_flags() -> flags.FlagValues:
    """The script's flags, not yet parsed."""
    values = flags.FlagValues()
    define_common_flags(values, plot="each backend's rates")
    define_dataset_flags(values)
    return values


def _figures(runs: list[list[RequestTimes]]) -> dict[str, Any]:
    return throughput(runs[0])


def _plot(path: str, measured: Sequence[Measured]) -> None:
    plot_bars(path, measured, {name: ROWS[name] for name in _PLOTTED})


def run(values: flags.FlagValues) -> int:
    """Do what the flags ask for; returns the exit code."""
    chosen = contenders(values)
    lengths = make_workload(values)
    with as_usage_error():
        allowed = limits(chosen, values.max_model_len)
        workload = (
            lengths.fitted(allowed.max_model_len, long_requests=values.long_requests)
            .with_arrivals(math.inf)
            .with_prompts(allowed.vocab_size, seed=values.seed)
        )
    warmup = warmup_requests(values, workload, allowed.vocab_size)
    job = make_job(values, [as_requests(workload)], [as_requests(warmup)], stream=False)
    benchmark = Benchmark("throughput", _figures, ROWS, _plot)
    return measure(values, benchmark, chosen, {"": job}, describe(workload))


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    return run_script(argv, __doc__, define_flags(), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
