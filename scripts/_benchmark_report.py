"""Medians over repetitions, the table and the record of the end-to-end benchmarks."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from _backends import Run
from _serving_metrics import RequestTimes

Figures = Mapping[str, float | None]


class Measured(NamedTuple):
    """A run with its figures. `rate` is the request rate as the flags have it, "" if there is none.

    requests  of each of the job's runs
    """

    run: Run
    rate: str
    figures: Figures
    requests: list[list[RequestTimes]]


def request_times(run: Run, job: Mapping[str, Any]) -> list[list[RequestTimes]]:
    """What the metrics are computed from, for each of the job's runs."""
    return [
        [
            RequestTimes(
                record["start"],
                record["delivery_times"],
                len(request["prompt_token_ids"]),
                request["output_len"],
            )
            for record, request in zip(records, requests, strict=True)
        ]
        for records, requests in zip(run.result["runs"], job["runs"], strict=True)
    ]


def medians(measured: Sequence[Measured]) -> dict[str, dict[str, float | None]]:
    """Backend -> figure -> median over its repetitions; None where a repetition has none."""
    found: dict[str, dict[str, float | None]] = {}
    for backend in dict.fromkeys(one.run.backend for one in measured):
        runs = [one.figures for one in measured if one.run.backend == backend]
        found[backend] = {name: _median([run[name] for run in runs]) for name in runs[0]}
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def ratios(found: Mapping[str, Figures]) -> dict[str, dict[str, float | None]]:
    """Rival -> figure -> the first backend's median over the rival's."""
    first, *rivals = found
    return {
        rival: {
            name: None if ours is None or not theirs else ours / theirs
            for name, ours in found[first].items()
            for theirs in [found[rival][name]]
        }
        for rival in rivals
    }


def table(measured: Sequence[Measured], rows: Mapping[str, str]) -> list[str]:
    """Lines of a table: a figure a row, the backends' medians (with the range of several
    repetitions), and the first backend's over each rival's.

    rows  figure -> how it is called
    """
    found = medians(measured)
    first, *rivals = found
    header = ["", *found, *(f"{first} / {rival}" for rival in rivals)]
    cells = [header]
    shares = ratios(found)
    for name, label in rows.items():
        line = [label]
        for backend in found:
            values = [one.figures[name] for one in measured if one.run.backend == backend]
            line.append(_cell(found[backend][name], values))
        line += [_number(shares[rival][name]) for rival in rivals]
        cells.append(line)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in cells
    ]


def _cell(median: float | None, values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return _number(median)
    return f"{_number(median)} [{_number(min(known))}, {_number(max(known))}]"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def agreement(measured: Sequence[Measured]) -> dict[str, dict[str, int]]:
    """Rival -> how many requests got the same tokens as from the first backend, and how many tokens
    stand before each request's first difference; of the first repetitions.

    Greedy tokens may differ where two candidates are close (a tie in bfloat16, say), and all that
    follow then do.
    """
    tokens: dict[str, list[list[int]]] = {}
    for one in measured:
        records = [record for run in one.run.result["runs"] for record in run]
        tokens.setdefault(one.run.backend, [record["token_ids"] for record in records])
    first, *rivals = tokens
    found = {}
    for rival in rivals:
        pairs = list(zip(tokens[first], tokens[rival], strict=True))
        found[rival] = {
            "requests": len(pairs),
            "requests_equal": sum(ours == theirs for ours, theirs in pairs),
            "tokens": sum(len(ours) for ours, _ in pairs),
            "tokens_equal": sum(_common_prefix(ours, theirs) for ours, theirs in pairs),
        }
    return found


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def print_report(measured: Sequence[Measured], rows: Mapping[str, str], *, tokens: bool) -> None:
    """Print the table for each request rate, and with `tokens` who agrees with whom."""
    for rate in dict.fromkeys(one.rate for one in measured):
        of_rate = [one for one in measured if one.rate == rate]
        if rate:
            print(f"request rate {rate}:")
        print(*table(of_rate, rows), sep="\n", flush=True)
        if tokens:
            for rival, found in agreement(of_rate).items():
                print(
                    f"{rival} agrees in {found['tokens_equal']:,} of {found['tokens']:,} tokens "
                    f"before a first difference, {found['requests_equal']} of "
                    f"{found['requests']} requests wholly"
                )


def as_json(
    job: Mapping[str, Any], measured: Sequence[Measured], *, detailed: bool
) -> dict[str, Any]:
    """What was measured so far, for a file.

    job       whose engine arguments go into it
    detailed  whether every request's times and tokens go into it
    """
    runs = []
    for one in measured:
        result = dict(one.run.result)
        records = result.pop("runs")
        runs.append(
            {
                "backend": one.run.backend,
                "repetition": one.run.repetition,
                "request_rate": one.rate,
                "figures": one.figures,
                "others_cpu_share": one.run.others_cpu_share,
                **result,
                **({"requests": records} if detailed else {}),
            }
        )
    by_rate = {}
    for rate in dict.fromkeys(one.rate for one in measured):
        of_rate = [one for one in measured if one.rate == rate]
        found = medians(of_rate)
        by_rate[rate] = {
            "medians": found,
            "ratios": ratios(found),
            "token_agreement": agreement(of_rate),
        }
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "machine": {"cpus": os.cpu_count(), "processor": platform.machine()},
        "engine": job["engine"],
        "max_concurrency": job["max_concurrency"],
        **({"by_request_rate": by_rate} if list(by_rate) != [""] else by_rate[""]),
        "runs": runs,
    }
