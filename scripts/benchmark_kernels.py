"""Times the paged-attention kernels and their rivals, and prints a table.

    benchmark_kernels.py --quick
    benchmark_kernels.py --batch 1,32,128 --context 4096,32768 --json times.json --plot times.png

The sweep is every batch with every context, at the first value of the other lists; then, at the
middle batch and the middle context, every other value of those lists alone, a skewed batch and,
with --ragged, chunks of prompts beside decodes.

bytes/s counts the keys and values of the live contexts, the queries and the outputs; "of copy" is
their share of the bandwidth of a large copy (bytes read and written), measured in the same run. A
rival that is absent or refuses a case is a row that says why.

Exit codes: 0 all is well, 1 a backend of ours broke or gave a wrong result, 2 bad usage.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

if TYPE_CHECKING:
    from _kernel_benchmark import Point, Row

_COLUMNS = "{:>5} {:>7} {:>9} {:>4} {:>3} {:>8}  {:<20} {:>11} {:>9} {:>7} {:>8}  {}"
_HEADER = ("batch", "context", "heads", "D", "B", "dtype", "", "time us", "GB/s", "of copy")
_QUICK = {"batch": ["8", "64"], "context": ["4096"], "block_size": ["16"], "dtype": ["bfloat16"]}
_ON_CPU = {"batch": ["1", "4"], "context": ["256", "1024"], "heads": ["8/2"], "head_dim": ["64"]}


class UsageError(Exception):
    """Told in one sentence on standard error; the exit code is 2."""


def parse_flags(argv: Sequence[str]) -> flags.FlagValues | None:
    """The parsed flags; None if --help was given and answered."""
    values = flags.FlagValues()

    def define_list(name: str, default: str, help_text: str) -> None:
        flags.DEFINE_list(name, default, help_text, flag_values=values)

    define_list("batch", "1,8,32,128", "Sequences in the batch.")
    define_list("context", "1024,4096,32768", "Tokens of the longest sequence.")
    define_list("heads", "32/8,9/3,32/32,64/8", "Query heads / KV heads.")
    define_list("head_dim", "128,64,256", "Head dims.")
    define_list("block_size", "16,32,64,128", "Token slots in a block.")
    define_list("dtype", "bfloat16,float16,float32", "Dtypes of queries, keys and values.")
    define_list("contenders", "", "What to time, by name; everything if not given.")
    flags.DEFINE_bool("ragged", True, "Also chunks of 256 beside decodes.", flag_values=values)
    flags.DEFINE_bool("quick", False, "A few points alone, a minute or two.", flag_values=values)
    flags.DEFINE_float("seconds", 0.5, "About how long to time each.", flag_values=values)
    flags.DEFINE_string("json", None, "File for the rows, as JSON.", flag_values=values)
    flags.DEFINE_string("plot", None, "File for a plot (needs matplotlib).", flag_values=values)
    flags.DEFINE_bool("help", False, "Show this.", flag_values=values)
    try:
        rest = values(list(argv))[1:]
    except flags.Error as error:
        raise UsageError(" ".join(str(error).split())) from error
    if values["help"].value:
        print(__doc__, values.get_help(), sep="\n")
        return None
    if rest:
        raise UsageError(f"unexpected argument {rest[0]!r}")
    if values.plot is not None:
        _pyplot()  # known before the sweep
    for name in ("json", "plot"):
        path = values[name].value
        if path is not None and not os.path.isdir(os.path.dirname(path) or "."):
            raise UsageError(f"{name} must be in a folder that exists, got {path!r}")
    return values


def _pyplot() -> Any:
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise UsageError(
            "plot needs matplotlib: install the `bench` extra, as `pip install -e '.[bench]'` or "
            "`uv run --extra bench scripts/benchmark_kernels.py` do"
        ) from error
    matplotlib.use("Agg")  # no display is needed
    return importlib.import_module("matplotlib.pyplot")


def make_points(values: flags.FlagValues, platform: str) -> list[Point]:
    """The sweep that the flags ask for; lists that were not given are smaller with --quick and on
    a CPU.

    Raises:
        UsageError: A list holds what is not allowed.
    """
    from _kernel_benchmark import CHUNK, Point

    def given(name: str) -> list[str]:
        value: Any = values[name].value
        if values[name].present:
            if not value:
                raise UsageError(f"{name} must hold at least one value")
            return value
        for defaults, wanted in ((_ON_CPU, platform == "cpu"), (_QUICK, values.quick)):
            if wanted and name in defaults:
                return defaults[name]
        return value[:1] if values.quick else value

    def integers(name: str) -> list[int]:
        return [_integer(name, text) for text in given(name)]

    batches, contexts = integers("batch"), integers("context")
    heads = [_heads(text) for text in given("heads")]
    dims, sizes, dtypes = integers("head_dim"), integers("block_size"), given("dtype")
    for dtype in dtypes:
        if dtype not in ("bfloat16", "float16", "float32"):
            raise UsageError(f"dtype must be bfloat16, float16 or float32, got {dtype!r}")

    def point(batch: int, context: int, **changes: Any) -> Point:
        fields: dict[str, Any] = {
            "num_heads": heads[0][0],
            "num_kv_heads": heads[0][1],
            "head_dim": dims[0],
            "block_size": sizes[0],
            "dtype": dtypes[0],
        }
        return Point(batch, context, **(fields | changes))

    middle = (batches[len(batches) // 2], contexts[len(contexts) // 2])
    try:
        points = [point(*pair) for pair in itertools.product(batches, contexts)]
        points += [point(*middle, num_heads=h, num_kv_heads=k) for h, k in heads[1:]]
        points += [point(*middle, head_dim=dim) for dim in dims[1:]]
        points += [point(*middle, block_size=size) for size in sizes[1:]]
        points += [point(*middle, dtype=dtype) for dtype in dtypes[1:]]
        if middle[0] > 1:
            points.append(point(*middle, skewed=True))
        if values.ragged and middle[1] >= CHUNK:
            points.append(point(*middle, chunks=max(1, middle[0] // 8)))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return points


def _integer(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{name} must be a list of ints >= 1, got {text!r}")
    return int(text)


def _heads(text: str) -> tuple[int, int]:
    query, slash, kv = text.partition("/")
    if not slash:
        raise UsageError(f"heads must be a list of QUERY/KV heads such as 32/8, got {text!r}")
    return _integer("heads", query), _integer("heads", kv)


def table_line(row: Row, copy_rate: float) -> str:
    """A row as a line of the table."""
    point, record = row.point, row.record(copy_rate)
    context = f"{point.context}{'s' if point.skewed else ''}"
    batch = f"{point.batch}{f'+{point.chunks}c' if point.chunks else ''}"
    shape = (
        batch,
        context,
        f"{point.num_heads}/{point.num_kv_heads}",
        point.head_dim,
        point.block_size,
        point.dtype,
        row.contender,
    )
    if row.seconds is None:
        return _COLUMNS.format(*shape, "-", "-", "-", "-", row.reason)
    figures = (
        f"{row.seconds * 1e6:.1f}",
        f"{record['bytes_per_second'] / 1e9:.0f}",
        f"{record['copy_share']:.1%}",
        f"{record['flops_per_second'] / 1e12:.2f}",
    )
    notes = [row.settings] if row.settings else []
    if row.plan_seconds is not None:
        notes.append(f"plan {row.plan_seconds * 1e6:.0f} us a step")
    if row.reason:
        notes.append(row.reason)
    return _COLUMNS.format(*shape, *figures, "; ".join(notes))


def comparisons(rows: list[Row]) -> list[str]:
    """For each point where both were timed: ours against JAX's kernel, and the price of paging."""
    lines = []
    for point, group in itertools.groupby(rows, key=lambda row: row.point):
        times = {row.contender: row.seconds for row in group if row.seconds and not row.failed}
        ours = {name: times[name] for name in ("triton", "mosaic", "xla") if name in times}
        contiguous = {name: time for name, time in times.items() if name.startswith("contiguous")}
        if not ours:
            continue
        best = min(ours, key=ours.__getitem__)
        facts = []
        if "JAX paged_attention" in times:
            facts.append(f"{times['JAX paged_attention'] / ours[best]:.2f}x JAX's kernel")
        if contiguous:
            rival = min(contiguous, key=contiguous.__getitem__)
            price = ours[best] / contiguous[rival] - 1
            facts.append(f"the price of paging is {price:+.0%} against {rival}")
        if facts:
            where = (
                f"batch {point.batch}, context {point.context}{' skewed' if point.skewed else ''}, "
                f"heads {point.num_heads}/{point.num_kv_heads}, D {point.head_dim}, "
                f"B {point.block_size}, {point.dtype}"
            )
            lines.append(f"{best} at {where}: {', '.join(facts)}")
    return lines


def plot(rows: list[Row], copy_rate: float, path: str, title: str) -> None:
    """Share of the copy bandwidth of each contender over the points, into an image file."""
    pyplot = _pyplot()
    points = list(dict.fromkeys(row.point for row in rows))
    figure, axes = pyplot.subplots(figsize=(max(7, 0.7 * len(points)), 5), layout="constrained")
    for name in dict.fromkeys(row.contender for row in rows):
        shares = {
            points.index(row.point): row.record(copy_rate)["copy_share"]
            for row in rows
            if row.contender == name and row.seconds
        }
        if shares:
            axes.plot(list(shares), list(shares.values()), "o-", label=name, markersize=4)
    axes.axhline(1, color="gray", linewidth=0.8)
    labels = [
        f"{p.batch} x {p.context}{' skewed' if p.skewed else ''}{' ragged' if p.chunks else ''}\n"
        f"{p.num_heads}/{p.num_kv_heads} D{p.head_dim} B{p.block_size}\n{p.dtype}"
        for p in points
    ]
    axes.set_xticks(range(len(points)), labels, fontsize=6, rotation=90)
    axes.set_ylabel("share of the copy bandwidth")
    axes.set_title(title)
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def run(values: flags.FlagValues) -> int:
    """Do what the flags ask for; returns the exit code."""
    from _attention_rivals import contenders
    from _kernel_benchmark import copy_bandwidth, device_facts, run_point

    facts = device_facts()
    points = make_points(values, facts["platform"])
    chosen = contenders()
    unknown = [name for name in values.contenders if name not in chosen]
    if unknown:
        raise UsageError(f"contenders must be among {', '.join(chosen)}, got {unknown[0]!r}")
    if values.contenders:
        chosen = {name: run for name, run in chosen.items() if name in values.contenders}
    copy_rate = copy_bandwidth(values.seconds)
    title = f"{facts['device']}, jax {facts['jax']}, copy {copy_rate / 1e9:.0f} GB/s"
    print(title, flush=True)
    if facts["platform"] == "cpu":
        print("No GPU was found: the Pallas backends would be interpreted and are not timed.")
    print(_COLUMNS.format(*_HEADER[:6], "contender", *_HEADER[7:], "TFLOP/s", "notes"))
    rows = []
    for point in points:
        for row in run_point(point, chosen, seconds=values.seconds):
            rows.append(row)
            print(table_line(row, copy_rate), flush=True)
    compared = comparisons(rows)
    print(*compared, sep="\n")
    if values.json is not None:
        result = facts | {
            "copy_bytes_per_second": copy_rate,
            "rows": [row.record(copy_rate) for row in rows],
            "comparisons": compared,
        }
        with open(values.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
    if values.plot is not None:
        plot(rows, copy_rate, values.plot, title)
    return 1 if any(row.failed for row in rows) else 0


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    try:
        values = parse_flags(argv)
        return 0 if values is None else run(values)
    except UsageError as error:
        print(f"{os.path.basename(argv[0])}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv))
