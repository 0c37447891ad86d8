"""How many blocks sharing saves, as figure 15 of the PagedAttention paper has it.

    benchmark_sharing.py
    benchmark_sharing.py --nobeams --json sharing.json
    benchmark_sharing.py --beam_data_set sharegpt --beam_requests 8 --plot sharing.png

Parallel sampling: a saturated queue is scheduled without a model (whose tokens decide nothing),
with lengths drawn from the paper's figure 11 and the pool that OPT-13B leaves in an A100 with 40
GB. Beam search: real beams of the model, from instructions cut to drawn lengths, to drawn output
lengths; --max_num_seqs and the like are for these.

The figure is the share that is saved by sharing of the blocks that would be held without. How it is
averaged over steps: "saved" is 1 - 1 / mean(without / held), as the paper's authors plot it; "mean"
is the mean over steps; "of all" the sum of what is saved over the sum of what would be held. For
beams, of which few are run and not in a steady state, "of all" is the figure to look at; "at most"
is what it would be if beams shared everything but their last blocks, and "apart" how many tokens
lie after the last one that all beams of a request share.

Exit codes: 0 all is well, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from _command_line import (
    as_usage_error,
    define_output_flags,
    device_facts,
    integers,
    pyplot,
    run_script,
    write_json,
)
from _paper_lengths import FIGURE_11, FIGURE_15, MAX_MODEL_LEN, TOKEN_SLOTS, draw_lengths
from _sharing import Sharing, beam_requests, make_prompt, run_beams, simulate_parallel
from absl import flags

from jpaged.flags import define_engine_flags, engine_arguments

if TYPE_CHECKING:
    from jpaged.llm import LLM

_COLUMNS = "{:<9} {:<9} {:>2} {:>8} {:>8} {:>8} {:>8} {:>6} {:>10} {:>7} {:>6}"
_HEADER = _COLUMNS.format(
    "lengths", "", "n", "saved", "mean", "of all", "at most", "apart", "slots used", "paper", "s"
)
_PAPER_COLOR, _OUR_COLOR = "0.75", "tab:blue"


@dataclasses.dataclass(frozen=True)
class Row:
    """What one run saved.

    Attributes:
        data_set, kind: as in `FIGURE_15`.
        n: samples, or beams, of each request.
        num_requests: requests of the run.
        sharing: its steps.
        seconds: what it took.
    """

    data_set: str
    kind: str
    n: int
    num_requests: int
    sharing: Sharing
    seconds: float

    @property
    def is_beam(self) -> bool:
        return self.kind == "beam"

    @property
    def paper(self) -> float | None:
        """The paper's percentage, where it has one."""
        return FIGURE_15[self.data_set, self.kind].get(self.n)

    @property
    def percent(self) -> float:
        """The figure to hold against the paper's."""
        return 100 * (self.sharing.total_saving if self.is_beam else self.sharing.saving)

    def line(self) -> str:
        """A line of the table."""
        sharing = self.sharing
        return _COLUMNS.format(
            self.data_set,
            self.kind,
            self.n,
            f"{sharing.saving:.2%}",
            f"{sharing.mean_saving:.2%}",
            f"{sharing.total_saving:.2%}",
            f"{sharing.largest_total_saving:.2%}" if self.is_beam else "",
            f"{sharing.mean_apart:.1f}" if self.is_beam else "",
            f"{sharing.slots_used_share:.1%}",
            "" if self.paper is None else f"{self.paper:.2f}%",
            f"{self.seconds:.0f}",
        )

    def record(self) -> dict[str, Any]:
        """The row as JSON has it; shares, not percentages."""
        sharing = self.sharing
        record = {
            "data_set": self.data_set,
            "kind": self.kind,
            "n": self.n,
            "requests": self.num_requests,
            "steps": len(sharing.held),
            "saved": sharing.saving,
            "mean_saved": sharing.mean_saving,
            "total_saved": sharing.total_saving,
            "slots_used_share": sharing.slots_used_share,
            "preemptions": sharing.preemptions,
            "paper": None if self.paper is None else self.paper / 100,
            "seconds": self.seconds,
        }
        if self.is_beam:
            record["largest_total_saved"] = sharing.largest_total_saving
            record["mean_tokens_apart"] = sharing.mean_apart
        return record


def define_flags() -> flags.FlagValues:
    """The script's flags, not yet parsed."""
    values = flags.FlagValues()
    names = sorted(FIGURE_11)
    define_engine_flags(values)
    flags.DEFINE_multi_enum(
        "data_set", names, names, "Lengths of parallel sampling (repeatable).", flag_values=values
    )
    flags.DEFINE_list("n", "2,4,6", "Samples, or beams, of a request.", flag_values=values)
    flags.DEFINE_integer(
        "requests", 3000, "Requests of parallel sampling.", lower_bound=100, flag_values=values
    )
    flags.DEFINE_bool("beams", True, "Also beam search, with the model.", flag_values=values)
    flags.DEFINE_enum(
        "beam_data_set", "alpaca", names, "Lengths of beam search.", flag_values=values
    )
    flags.DEFINE_integer(
        "beam_requests", 48, "Requests of beam search.", lower_bound=1, flag_values=values
    )
    define_output_flags(values, plot="the savings beside the paper's")
    for name, default in (
        ("max_model_len", MAX_MODEL_LEN),
        ("max_num_seqs", 96),
        ("max_num_batched_tokens", 256),
        ("enable_prefix_caching", False),  # samples share by forking alone, as in the paper
    ):
        values.set_default(name, default)
    return values


def measure_parallel(values: flags.FlagValues, counts: list[int]) -> Iterator[Row]:
    """A row for each data set and number of samples."""
    for data_set in values.data_set:
        for n in counts:
            began = time.perf_counter()
            rng = np.random.default_rng(values.seed)
            with as_usage_error():
                sharing = simulate_parallel(
                    *draw_lengths(data_set, rng, values.requests),
                    n,
                    num_blocks=values.num_blocks or TOKEN_SLOTS // values.block_size,
                    block_size=values.block_size,
                    max_model_len=values.max_model_len,
                )
            seconds = time.perf_counter() - began
            yield Row(data_set, "parallel", n, values.requests, sharing, seconds)


def measure_beams(values: flags.FlagValues, llm: LLM, counts: list[int]) -> Iterator[Row]:
    """A row for each number of beams."""
    rng = np.random.default_rng(values.seed)
    prompt_lens, output_lens = draw_lengths(values.beam_data_set, rng, values.beam_requests)
    prompts = [make_prompt(llm, length, rng) for length in prompt_lens.tolist()]
    for n in counts:
        with as_usage_error():
            requests = beam_requests(llm, prompts, output_lens, n)
        began = time.perf_counter()
        sharing = run_beams(llm, requests)
        seconds = time.perf_counter() - began
        yield Row(values.beam_data_set, "beam", n, len(prompts), sharing, seconds)


def load(values: flags.FlagValues) -> LLM:
    """The model and engine that the flags ask for."""
    from jpaged.llm import LLM  # importing jax takes seconds

    arguments = engine_arguments(values)
    if arguments["num_blocks"] is None:
        arguments["num_blocks"] = TOKEN_SLOTS // values.block_size
    with as_usage_error():
        return LLM(**arguments)


def plot(rows: list[Row], path: str) -> None:
    """Bars of what was saved beside the paper's, a panel for each data set and kind."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        panels.setdefault((row.data_set, row.kind), []).append(row)
    figure, all_axes = pyplot().subplots(
        1, len(panels), figsize=(3.2 * len(panels), 3.2), layout="constrained", squeeze=False
    )
    for axes, ((data_set, kind), members) in zip(all_axes[0], panels.items(), strict=True):
        places = np.arange(len(members))
        ours = axes.bar(
            places + 0.2, [r.percent for r in members], 0.38, color=_OUR_COLOR, label="jpaged"
        )
        axes.bar_label(ours, fmt="%.1f", fontsize=8)
        theirs = axes.bar(
            places - 0.2, [r.paper or 0.0 for r in members], 0.38, color=_PAPER_COLOR, label="paper"
        )
        labels = ["" if r.paper is None else f"{r.paper:.1f}" for r in members]
        axes.bar_label(theirs, labels=labels, fontsize=8)
        axes.set_xticks(places, [str(row.n) for row in members])
        axes.set_xlabel("beam width" if kind == "beam" else "output sequences")
        axes.set_title(f"{data_set}, {kind}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.12)
    all_axes[0][0].set_ylabel("memory saving (%)")
    all_axes[0][0].legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=150)
    pyplot().close(figure)


def run(values: flags.FlagValues) -> int:
    """Do what the flags ask for; returns the exit code."""
    counts = integers("n", values.n)
    facts: dict[str, Any] = {"block_size": values.block_size, "seed": values.seed}
    llm = None
    if values.beams:  # loaded first: a bad flag shows at once
        llm = load(values)
        facts |= device_facts() | {"model": values.model}
    print(_HEADER, flush=True)
    rows: list[Row] = []
    for row in measure_parallel(values, counts):
        rows.append(row)
        print(row.line(), flush=True)
    if llm is not None:
        for row in measure_beams(values, llm, counts):
            rows.append(row)
            print(row.line(), flush=True)
    write_json(values.json, facts | {"rows": [row.record() for row in rows]})
    if values.plot is not None:
        plot(rows, values.plot)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    return run_script(argv, __doc__, define_flags(), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
