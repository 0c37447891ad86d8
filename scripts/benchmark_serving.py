"""Measures serving: requests come at their own times, latencies are what their senders see.

    benchmark_serving.py --request_rate 4 --num_prompts 64 --goodput ttft:500,tpot:100
    benchmark_serving.py --dataset_name mooncake --dataset_path trace.jsonl --request_rate trace
    benchmark_serving.py --request_rate 1,2,4,8 --compare vllm --rival_python venv/bin/python
        --rival_model FOLDER --plot rates.png

The engine runs in the benchmark's process, without HTTP between. A latency counts from the moment
when the request is due, even if a step keeps the engine from seeing it; with --max_concurrency a
request is not due before a place is free. TTFT is the time to the first token, TPOT (E2E - TTFT) /
(output - 1), ITL the time between deliveries, the normalised latency the mean of E2E / output.

Greedy, and every request gets exactly its output length. Loading, compiling and warming up are
reported apart.

Exit codes: 0 all is well, 1 a backend failed, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from _backends import as_requests, limits
from _benchmark_flags import (
    check_int,
    check_positive,
    contenders,
    define_common_flags,
    define_dataset_flags,
    make_workload,
    warmup_requests,
)
from _benchmark_plots import plot_distributions, plot_rates
from _benchmark_report import Measured
from _benchmark_run import Benchmark, describe, make_job, measure
from _command_line import as_usage_error, run_script
from _serving_metrics import SLO_METRICS, RequestTimes, goodput, latencies, throughput
from absl import flags

from jpaged.simulation import Workload

_LABELS = {
    "ttft": "TTFT, ms",
    "tpot": "TPOT, ms",
    "itl": "ITL, ms",
    "e2el": "E2E, ms",
    "normalized_latency": "E2E / output, ms",
}
_RATES = {
    "output_throughput": "output tokens/s",
    "total_token_throughput": "total tokens/s",
    "request_throughput": "requests/s",
}
_GOODPUT = {
    "request_goodput": "goodput, requests/s",
    "request_goodput_share": "goodput, share of requests",
}
_DISTRIBUTIONS = ("ttft", "tpot", "e2el")
_OVER_RATES = {
    "mean_normalized_latency_ms": "normalised latency, ms a token",
    "median_ttft_ms": "TTFT, ms (median)",
    "output_throughput": "output tokens/s",
}


def define_flags() -> flags.FlagValues:
    """The script's flags, not yet parsed."""
    values = flags.FlagValues()
    define_common_flags(values, plot="the latencies, or of several rates what becomes of them")
    define_dataset_flags(values)
    flags.DEFINE_list(
        "request_rate",
        ["inf"],
        "Requests a second; inf for all at once, trace for the trace's own times; several are run "
        "one after another.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "burstiness",
        1.0,
        "Shape of the gamma distribution of the times between requests: 1 is Poisson, less comes "
        "in bursts, more comes evenly.",
        flag_values=values,
    )
    flags.DEFINE_float("trace_speed", 1.0, "How much faster than the trace.", flag_values=values)
    flags.DEFINE_integer(
        "max_concurrency", None, "Most requests sent and not finished.", flag_values=values
    )
    flags.DEFINE_list(
        "goodput",
        [],
        "Objectives in ms, as ttft:500,tpot:100,e2el:5000: requests that meet all are counted.",
        flag_values=values,
    )
    flags.DEFINE_list("metric_percentiles", ["99"], "Percentiles to report.", flag_values=values)
    return values


def parse_goodput(given: Sequence[str]) -> dict[str, float]:
    """ "ttft:500" texts as {metric: ms}.

    Raises:
        ValueError: a text is not of that form.
    """
    objectives: dict[str, float] = {}
    for text in given:
        name, _, number = text.partition(":")
        if name not in SLO_METRICS or name in objectives or not _is_number(number, above=0.0):
            raise ValueError(
                f"goodput must be METRIC:MS, METRIC one of {', '.join(SLO_METRICS)} and each once, "
                f"got {text!r}"
            )
        objectives[name] = float(number)
    return objectives


def _is_number(text: str, *, above: float) -> bool:
    try:
        return above < float(text) < math.inf
    except ValueError:
        return False


def parse_percentiles(given: Sequence[str]) -> list[float]:
    """Texts as numbers in [0, 100].

    Raises:
        ValueError: one is not.
    """
    for text in given:
        if not (_is_number(text, above=-1.0) and 0 <= float(text) <= 100):
            raise ValueError(f"metric_percentiles must be in [0, 100], got {text!r}")
    return list(dict.fromkeys(map(float, given)))


def with_rate(workload: Workload, rate: str, values: flags.FlagValues) -> Workload:
    """The workload with arrival times at a rate as the flag has it.

    Raises:
        ValueError: it is none, or the trace has no times.
    """
    if rate == "trace":
        if values.shuffle:
            raise ValueError("shuffle must be false with request_rate=trace, got true")
        return workload.with_trace_arrivals(check_positive(values, "trace_speed"))
    if values["trace_speed"].present:
        raise ValueError(f"trace_speed must not be given with request_rate={rate}")
    if rate != "inf" and not _is_number(rate, above=0.0):
        raise ValueError(f"request_rate must be a number > 0, inf or trace, got {rate!r}")
    burstiness = check_positive(values, "burstiness")
    return workload.with_arrivals(float(rate), burstiness=burstiness, seed=values.seed)


def _figures(
    slo_ms: Mapping[str, float], percentiles: Sequence[float], runs: list[list[RequestTimes]]
) -> dict[str, Any]:
    (requests,) = runs
    figures = throughput(requests) | latencies(requests, percentiles=percentiles)
    return figures | (goodput(requests, slo_ms) if slo_ms else {})


def _rows(percentiles: Sequence[float], *, has_goodput: bool) -> dict[str, str]:
    rows = dict(_RATES)
    if has_goodput:
        rows |= _GOODPUT
    for metric, label in _LABELS.items():
        rows[f"mean_{metric}_ms"] = f"{label}: mean"
        rows[f"median_{metric}_ms"] = "  median"
        rows |= {f"p{percentile:g}_{metric}_ms": f"  p{percentile:g}" for percentile in percentiles}
    return rows


def _plot(path: str, measured: Sequence[Measured]) -> None:
    if len({one.rate for one in measured}) > 1:
        plot_rates(path, measured, _OVER_RATES)
    else:
        plot_distributions(path, measured, {metric: _LABELS[metric] for metric in _DISTRIBUTIONS})


def run(values: flags.FlagValues) -> int:
    """Do what the flags ask for; returns the exit code."""
    chosen = contenders(values)
    lengths = make_workload(values)
    with as_usage_error():
        slo_ms = parse_goodput(values.goodput)
        percentiles = parse_percentiles(values.metric_percentiles)
        if values.max_concurrency is not None:
            check_int(values, "max_concurrency", 1)
        allowed = limits(chosen, values.max_model_len)
        fitted = lengths.fitted(allowed.max_model_len, long_requests=values.long_requests)
        if not values.request_rate:
            raise ValueError("request_rate must hold at least one rate, got none")
        workloads = {rate: with_rate(fitted, rate, values) for rate in values.request_rate}
        filled = {
            rate: workload.with_prompts(allowed.vocab_size, seed=values.seed)
            for rate, workload in workloads.items()
        }
    warmup = as_requests(warmup_requests(values, fitted, allowed.vocab_size))
    jobs = {
        rate: make_job(
            values,
            [as_requests(workload)],
            [warmup],
            stream=True,
            online=True,
            max_concurrency=values.max_concurrency,
        )
        for rate, workload in filled.items()
    }
    benchmark = Benchmark(
        "serving",
        functools.partial(_figures, slo_ms, percentiles),
        _rows(percentiles, has_goodput=bool(slo_ms)),
        _plot,
    )
    return measure(values, benchmark, chosen, jobs, describe(fitted))


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    return run_script(argv, __doc__, define_flags(), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
