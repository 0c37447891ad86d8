"""Pictures of the end-to-end benchmarks (matplotlib comes with the extra "bench")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from _benchmark_report import Measured, medians
from _serving_metrics import samples


def plot_bars(path: str, measured: Sequence[Measured], figures: Mapping[str, str]) -> None:
    """A bar a backend: the median of each figure, with the repetitions as dots."""
    found = medians(measured)
    figure, axes = _axes(len(figures), path)
    for axis, (name, label) in zip(axes, figures.items(), strict=True):
        for place, backend in enumerate(found):
            axis.bar(place, found[backend][name] or 0.0, width=0.6, color=f"C{place}")
            values = [one.figures[name] for one in measured if one.run.backend == backend]
            axis.plot([place] * len(values), values, "k.", alpha=0.6)
        axis.set_xticks(range(len(found)), list(found))
        axis.set_title(label)
    figure.savefig(path, dpi=150)


def plot_distributions(path: str, measured: Sequence[Measured], metrics: Mapping[str, str]) -> None:
    """Shares of requests (of deliveries, for itl) up to each latency, all repetitions together."""
    figure, axes = _axes(len(metrics), path)
    for axis, (metric, label) in zip(axes, metrics.items(), strict=True):
        for place, backend in enumerate(dict.fromkeys(one.run.backend for one in measured)):
            times = [
                request
                for one in measured
                if one.run.backend == backend
                for requests in one.requests
                for request in requests
            ]
            values = [1e3 * value for value in samples(times, metric)]
            if values:
                axis.ecdf(values, label=backend, color=f"C{place}")
        axis.set_title(label)
        axis.set_xlim(left=0)
        axis.legend()
    figure.savefig(path, dpi=150)


def plot_rates(path: str, measured: Sequence[Measured], figures: Mapping[str, str]) -> None:
    """Each figure's median over the request rate, a line a backend."""
    figure, axes = _axes(len(figures), path)
    rates = list(dict.fromkeys(one.rate for one in measured))
    found = {rate: medians([one for one in measured if one.rate == rate]) for rate in rates}
    for axis, (name, label) in zip(axes, figures.items(), strict=True):
        for backend in found[rates[0]]:
            values = [found[rate][backend][name] for rate in rates]
            axis.plot(range(len(rates)), values, "o-", label=backend)
        axis.set_xticks(range(len(rates)), rates)
        axis.set_xlabel("requests/s")
        axis.set_title(label)
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.savefig(path, dpi=150)


def _axes(num: int, path: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: no display is needed

    figure = Figure(figsize=(4.2 * num, 3.6), layout="constrained")
    return figure, figure.subplots(1, num, squeeze=False)[0]
