"""What each bucket costs: milliseconds a step that it is just filled with decodes, or with one
chunk of a prompt, and seconds to compile. Whether a bucket pays is then arithmetic: without it, its
steps run in the next larger one.

The last column is what a full step of the bucket would lose there. A bucket that saves little is
a compilation that every cold start pays for nothing.

    python scripts/benchmark_buckets.py --context=128 --json=buckets.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from _command_line import (
    UsageError,
    as_usage_error,
    define_output_flags,
    device_facts,
    run_script,
    write_json,
)

# isort: split
import jax
import numpy as np
from absl import flags

from jpaged.checkpoints import load_checkpoint
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.llm import resolve_dtype
from jpaged.runner.batch import PARAMETERS, build_batch
from jpaged.runner.buckets import Bucket

BLOCK_SIZE = 16


def full_step(bucket: Bucket, lengths: list[int], contexts: list[int], num_blocks: int) -> Any:
    """A buffer of rows of these query lengths and context lengths, all of which sample."""
    rng = np.random.default_rng(0)
    rows = len(lengths)
    tables = rng.integers(0, num_blocks, (rows, bucket.blocks)).astype(np.int32)
    return build_batch(
        bucket,
        token_ids=rng.integers(0, 1000, sum(lengths)).astype(np.int32),
        lengths=np.array(lengths, np.int32),
        context_lens=np.array(contexts, np.int32),
        slots=np.arange(rows, dtype=np.int32),
        num_sampled=rows,
        tables=tables,
        parameters=np.zeros((rows, len(PARAMETERS)), np.int32),
    )


def best_ms(engine: Engine, bucket: Bucket, buffer: Any, steps: int) -> float:
    """Milliseconds of the fastest of some steps."""
    times = []
    for _ in range(steps + 1):
        began = time.perf_counter()
        engine.runner.execute(bucket, buffer.copy()).tokens(1)
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def measure(engine: Engine, context: int, steps: int) -> list[dict[str, Any]]:
    """A row for each bucket, smallest first."""
    num_blocks = engine.runner.num_blocks
    rows = []
    for bucket in engine.runner.buckets:
        decodes = bucket.sequences
        buffer = full_step(bucket, [1] * decodes, [context] * decodes, num_blocks)
        chunk = full_step(bucket, [bucket.tokens], [bucket.tokens], num_blocks)
        rows.append(
            {
                "tokens": bucket.tokens,
                "sequences": bucket.sequences,
                "blocks": bucket.blocks,
                "decodes_ms": best_ms(engine, bucket, buffer, steps),
                "chunk_ms": best_ms(engine, bucket, chunk, steps),
            }
        )
    # What each full step would take in the next bucket: its padding is what is lost.
    for row, bucket, larger in zip(rows, engine.runner.buckets, engine.runner.buckets[1:]):
        if larger.blocks != bucket.blocks:
            continue
        chunk = full_step(larger, [bucket.tokens], [bucket.tokens], num_blocks)
        row["chunk_in_next_ms"] = best_ms(engine, larger, chunk, steps)
    return rows


def define_flags() -> flags.FlagValues:
    """The script's flags, not parsed."""
    values = flags.FlagValues()
    flags.DEFINE_string("model", "smollm2-135m", "As for generate.py.", flag_values=values)
    flags.DEFINE_string("dtype", "auto", "As for generate.py.", flag_values=values)
    flags.DEFINE_integer(
        "max_num_seqs", 256, "As for the engine.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer(
        "max_num_batched_tokens", 2048, "As for the engine.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer(
        "context", 128, "Tokens that a decode attends to.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer(
        "steps", 10, "Steps to take the best of.", lower_bound=1, flag_values=values
    )
    define_output_flags(values)
    return values


def run(values: flags.FlagValues) -> int:
    """Measure and print; returns the exit code."""
    with as_usage_error():
        dtype = resolve_dtype(values.dtype)
        config = EngineConfig(
            max_num_seqs=values.max_num_seqs,
            max_num_batched_tokens=values.max_num_batched_tokens,
            block_size=BLOCK_SIZE,
            num_blocks=4096,
            preemption_mode="recompute",
        )
        engine = Engine(load_checkpoint(values.model, dtype=dtype), config)
        most = engine.max_model_len
        if max(values.context, values.max_num_batched_tokens) > most:
            raise UsageError(
                f"context and max_num_batched_tokens must be at most the model's {most}, got "
                f"{values.context} and {values.max_num_batched_tokens}"
            )
    seconds = engine.warmup()
    rows = measure(engine, values.context, values.steps)
    print(f"{len(rows)} buckets compiled in {seconds:.1f} s; {jax.device_count()} device(s)\n")
    print("| T | S | S decodes, ms | a chunk of T, ms | in the next bucket, ms | lost |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        lost = row.get("chunk_in_next_ms")
        more = "| | |" if lost is None else f"| {lost:.1f} | {lost / row['chunk_ms'] - 1:.0%} |"
        print(
            f"| {row['tokens']} | {row['sequences']} | {row['decodes_ms']:.1f} | "
            f"{row['chunk_ms']:.1f} {more}"
        )
    result = {"device": device_facts(), "warmup_seconds": seconds, "buckets": rows}
    write_json(values.json, result)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    return run_script(argv, __doc__, define_flags(), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
