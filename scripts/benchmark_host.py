"""What the host does between two steps, without a model: the scheduler, the block manager, the
batch builder and the update, driven by the engine's own step loop against a runner that computes
nothing.

The first table is the host's time a step (schedule, build, update) while every sequence decodes,
over the batch, the context and the pool. The second runs the loop against an imitation of a GPU,
which returns at once and has its tokens ready after a set time without using the CPU: with overlap
a step should take as long as the slower of the two, without it as long as both together, and with
several decode steps in one call the host's part is shared by these.

    python scripts/benchmark_host.py --batch=256,1024 --device_ms=2,10,20 --json=host.json
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

from _command_line import UsageError, define_output_flags, integers, run_script, write_json

# isort: split
import numpy as np
from absl import flags

from jpaged import SamplingParams
from jpaged.request_builder import RequestBuilder
from jpaged.request_state import RequestState
from jpaged.runner.batch import read_num_steps
from jpaged.runner.buckets import make_buckets, round_up, table_width
from jpaged.scheduling import Scheduler
from jpaged.step_loop import StepLoop

VOCAB_SIZE = 32000
BLOCK_SIZE = 16


class ImitationResult:
    """The tokens of one or several steps, which are there from a time on, or at once."""

    def __init__(self, ready: float | None, num_steps: int = 1) -> None:
        self.ready = ready
        self._num_steps = num_steps

    def is_ready(self) -> bool:
        """Whether the time has come."""
        return self.ready is None or self.ready <= time.perf_counter()

    def wait_for_prompt_logprobs(self) -> None:
        """There are none."""

    def num_steps(self) -> int:
        """All that were asked for."""
        return self._num_steps

    def tokens(self, count: int, step: int = 0) -> np.ndarray:
        """Any tokens; waits until they are there."""
        if self.ready is not None and (left := self.ready - time.perf_counter()) > 0:
            time.sleep(left)
        return np.full(count, 7, np.int32)

    def logprobs(self, row: int, best: int = 0, step: int = 0) -> Any:
        """Nobody asks."""
        raise NotImplementedError

    candidates = prompt_logprobs = logprobs


class ImitationRunner:
    """Stands in for ModelRunner: takes steps at once and one after another, `seconds` each."""

    vocab_size = VOCAB_SIZE

    def __init__(self, batch: int, max_model_len: int, seconds: float) -> None:
        width = table_width(max_model_len, BLOCK_SIZE)
        self.buckets = make_buckets(round_up(max(batch, 2048), 8), batch, width)
        self.seconds = seconds
        self._free = 0.0

    def move_blocks(self, *moves: np.ndarray) -> None:
        """Nothing to move: decodes share no blocks."""
        assert not any(move.size for move in moves)

    def set_bias(self, slot: int, row: np.ndarray) -> None:
        """Nobody asks."""
        raise NotImplementedError

    def restore_pools(self) -> None:
        """There are none."""

    def execute(
        self, bucket: Any, buffer: np.ndarray, targets: np.ndarray | None = None, num_steps: int = 1
    ) -> ImitationResult:
        """Begin a step when the one before it ends."""
        if not self.seconds:
            return ImitationResult(None, num_steps)
        self._free = max(time.perf_counter(), self._free) + self.seconds * num_steps
        return ImitationResult(self._free, num_steps)

    def execute_decodes(self, bucket: Any, buffer: np.ndarray) -> ImitationResult:
        """The same for several."""
        return self.execute(bucket, buffer, None, read_num_steps(buffer))


class Decodes:
    """`batch` sequences of `context` tokens, past their prefill."""

    def __init__(
        self,
        batch: int,
        context: int,
        num_blocks: int,
        steps: int,
        *,
        seconds: float = 0.0,
        overlap: bool = False,
        max_decode_steps: int = 1,
    ) -> None:
        max_model_len = context + steps + 100
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=batch,
            max_num_batched_tokens=max(batch, 2048),
            max_model_len=max_model_len,
            enable_prefix_caching=True,
            max_decode_steps=max_decode_steps,
        )
        self.runner = ImitationRunner(batch, max_model_len, 0.0)
        self.loop = StepLoop(self.runner, self.scheduler, overlap=overlap)
        builder = RequestBuilder(
            self.scheduler,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=[2],
            tokenizer=None,
            seed=0,
        )
        rng = np.random.default_rng(0)
        self.tracked: dict[str, RequestState] = {}
        for number in range(batch):
            state = builder.build(
                # Of several lengths, so that not all take a block in the same step.
                rng.integers(8, VOCAB_SIZE, context - number % BLOCK_SIZE).tolist(),
                SamplingParams(max_tokens=steps + 90, temperature=0.0),
                request_id=str(number),
                arrival_time=0.0,
                number=number,
                prompt=None,
                stream=False,
            )
            self.tracked[str(number)] = state
            self.scheduler.add(state.request)
        sequences = [state.request.sequences[0] for state in self.tracked.values()]
        while any(s.num_computed_tokens < s.num_prompt_tokens for s in sequences):
            self.loop.step(self.tracked)
        for _ in range(3):  # the last prefill's tokens are in, and the decodes are under way
            self.loop.step(self.tracked)
        self.runner.seconds = seconds

    def run(self, steps: int) -> np.ndarray:
        """Seconds of each step, by the clock."""
        times = np.empty(steps + 1)
        gc.collect()
        times[0] = time.perf_counter()
        for i in range(steps):
            self.loop.step(self.tracked)
            times[i + 1] = time.perf_counter()
        return np.diff(times)


def check_room(batch: int, context: int, num_blocks: int, steps: int) -> None:
    """Refuse what would not fit at the end."""
    needed = batch * -(-(context + steps + 10) // BLOCK_SIZE)
    if needed > num_blocks:
        raise UsageError(
            f"num_blocks must be at least {needed} for {batch} sequences of {context} tokens and "
            f"{steps} steps, got {num_blocks}"
        )


def measure_host(batch: int, context: int, num_blocks: int, steps: int) -> dict[str, Any]:
    """The host's milliseconds a step."""
    seconds = Decodes(batch, context, num_blocks, steps).run(steps) * 1e3
    return {
        "batch": batch,
        "context": context,
        "num_blocks": num_blocks,
        "median_ms": float(np.median(seconds)),
        "p99_ms": float(np.percentile(seconds, 99)),
    }


def measure_overlap(
    batch: int,
    context: int,
    num_blocks: int,
    steps: int,
    device_ms: float,
    host_ms: float,
    max_decode_steps: int,
) -> dict[str, Any]:
    """Milliseconds a step against an imitated GPU: the plain loop, overlap, several decode steps in
    one call (the next of which is only planned when it is known where this one ends)."""

    def mean(overlap: bool, steps_a_call: int) -> float:
        decodes = Decodes(
            batch, context, num_blocks, steps, seconds=device_ms / 1e3, overlap=overlap,
            max_decode_steps=steps_a_call,
        )  # fmt: skip
        before = decodes.scheduler.steps
        began = time.perf_counter()
        decodes.run(max(1, steps // steps_a_call))
        return (time.perf_counter() - began) * 1e3 / (decodes.scheduler.steps - before)

    plain, overlapped = mean(False, 1), mean(True, 1)
    return {
        "batch": batch,
        "device_ms": device_ms,
        "host_ms": host_ms,
        "plain_ms": plain,
        "overlap_ms": overlapped,
        "over_slower": overlapped / max(host_ms, device_ms) - 1,
        "several_steps_ms": mean(True, max_decode_steps),
    }


def define_flags() -> flags.FlagValues:
    """The script's flags, not parsed."""
    values = flags.FlagValues()
    flags.DEFINE_list("batch", ["64", "256", "1024"], "Sequences that decode.", flag_values=values)
    flags.DEFINE_list(
        "context", ["128", "1024"], "Tokens of each at the start.", flag_values=values
    )
    flags.DEFINE_list(
        "num_blocks", ["100000", "1000000"], "Blocks in the pool.", flag_values=values
    )
    flags.DEFINE_list(
        "device_ms",
        ["1", "2", "5", "10", "20"],
        "Milliseconds of an imitated step.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "max_decode_steps", 8, "Most decode steps a call, in the last column.", lower_bound=2,
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer("steps", 300, "Steps to measure.", lower_bound=1, flag_values=values)
    define_output_flags(values)
    return values


def run(values: flags.FlagValues) -> int:
    """Measure and print; returns the exit code."""
    batches = integers("batch", values.batch)
    contexts = integers("context", values.context)
    pools = integers("num_blocks", values.num_blocks)
    device = integers("device_ms", values.device_ms)
    steps = values.steps
    if min(contexts) < 2 * BLOCK_SIZE:
        raise UsageError(f"context must be at least {2 * BLOCK_SIZE}, got {min(contexts)}")
    cases = [(b, c, n) for b in batches for c in contexts for n in pools]
    for case in cases:
        check_room(*case, steps)
    host = []
    print("| sequences | context | blocks in pool | host ms a step, median | p99 |")
    print("|---|---|---|---|---|")
    for case in cases:
        row = measure_host(*case, steps)
        host.append(row)
        print(
            f"| {row['batch']} | {row['context']} | {row['num_blocks']} | {row['median_ms']:.2f} | "
            f"{row['p99_ms']:.2f} |",
            flush=True,
        )
    overlap = []
    print(
        "\n| sequences | device ms | host ms | plain loop | overlap | over the slower | "
        f"{values.max_decode_steps} steps a call |"
    )
    print("|---|---|---|---|---|---|---|")
    for batch in batches:
        host_ms = next(row["median_ms"] for row in host if row["batch"] == batch)
        for device_ms in device:
            row = measure_overlap(
                batch, contexts[0], pools[0], steps, device_ms, host_ms, values.max_decode_steps
            )
            overlap.append(row)
            print(
                f"| {batch} | {device_ms} | {host_ms:.2f} | {row['plain_ms']:.2f} | "
                f"{row['overlap_ms']:.2f} | {row['over_slower']:+.1%} | "
                f"{row['several_steps_ms']:.2f} |",
                flush=True,
            )
    write_json(values.json, {"host": host, "overlap": overlap})
    return 0


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    return run_script(argv, __doc__, define_flags(), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
