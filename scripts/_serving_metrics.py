"""From the times at which tokens came to the figures that the field reports. NumPy alone.

Names are those of vLLM's benchmarks: ttft (time to first token), tpot (time per output token after
the first), itl (inter-token latency), e2el (end-to-end latency), all in ms. The normalised latency
is the PagedAttention paper's: end-to-end latency over output tokens, averaged over requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

METRICS = ("ttft", "tpot", "itl", "e2el", "normalized_latency")
SLO_METRICS = ("ttft", "tpot", "e2el")


class RequestTimes(NamedTuple):
    """One finished request.

    start           when it was due, in s
    delivery_times  when tokens came (one or several at once), in s, ascending
    prompt_len, output_len  tokens
    """

    start: float
    delivery_times: Sequence[float]
    prompt_len: int
    output_len: int

    @property
    def ttft(self) -> float:
        return self.delivery_times[0] - self.start

    @property
    def e2el(self) -> float:
        return self.delivery_times[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """(E2E - TTFT) / (output - 1); None with a single output token."""
        if self.output_len == 1:
            return None
        return (self.e2el - self.ttft) / (self.output_len - 1)

    @property
    def itl(self) -> list[float]:
        """Times between deliveries. Tokens that come together count as one delivery, so a
        scheduler cannot better the figure by holding tokens back."""
        return np.diff(self.delivery_times).tolist()

    @property
    def normalized_latency(self) -> float:
        """End-to-end latency over output tokens, in s a token."""
        return self.e2el / self.output_len


def samples(requests: Iterable[RequestTimes], metric: str) -> list[float]:
    """A metric's values in s: one a request, or of `itl` one a delivery after the first."""
    values = [getattr(request, metric) for request in requests]
    if metric == "itl":
        return [gap for gaps in values for gap in gaps]
    return [value for value in values if value is not None]


def throughput(requests: Sequence[RequestTimes]) -> dict[str, Any]:
    """Counts, and rates over the time from the first request's start to the last token."""
    start = min(request.start for request in requests)
    duration = max(request.delivery_times[-1] for request in requests) - start
    prompt = sum(request.prompt_len for request in requests)
    output = sum(request.output_len for request in requests)
    return {
        "completed": len(requests),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "duration": duration,
        "request_throughput": len(requests) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
    }


def latencies(
    requests: Sequence[RequestTimes],
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99,),
) -> dict[str, float | None]:
    """Mean, median and percentiles of each metric, in ms; None where no request has the metric.

    percentiles  in [0, 100], interpolated linearly between the two nearest values
    """
    figures: dict[str, float | None] = {}
    for metric in metrics:
        values = 1e3 * np.array(samples(requests, metric))
        names = [f"mean_{metric}_ms", f"median_{metric}_ms"]
        names += [f"p{percentile:g}_{metric}_ms" for percentile in percentiles]
        if not len(values):
            figures |= dict.fromkeys(names)
            continue
        numbers = [values.mean(), np.median(values), *np.percentile(values, percentiles)]
        figures |= {name: float(number) for name, number in zip(names, numbers, strict=True)}
    return figures


def goodput(requests: Sequence[RequestTimes], slo_ms: Mapping[str, float]) -> dict[str, float]:
    """Requests that meet every objective: as a rate and as a share of all.

    slo_ms  most ms of ttft, tpot or e2el; a request without a second token meets any tpot
    """

    def is_good(request: RequestTimes) -> bool:
        return all(1e3 * (getattr(request, name) or 0.0) <= most for name, most in slo_ms.items())

    good = sum(map(is_good, requests))
    rates = throughput(requests)
    return {
        "request_goodput": good / rates["duration"],
        "request_goodput_share": good / len(requests),
    }
