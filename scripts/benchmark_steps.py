"""What a step costs on the device, in milliseconds, the best of some:

buckets   each bucket just filled with decodes, and with one chunk of a prompt. Whether a bucket
          pays is then arithmetic: without it, its steps run in the next larger one, which the
          last two columns show. One that saves little is compiled at every cold start for nothing.
contexts  32 decodes of equal contexts, and one long one among short ones; then the same load with
          a pool, and with a max_model_len, eight times as large.

  python scripts/benchmark_steps.py --json=steps.json
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
    integers,
    run_script,
    write_json,
)

# isort: split
import numpy as np
from absl import flags

from jpaged.checkpoints import Checkpoint, load_checkpoint
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.llm import resolve_dtype
from jpaged.runner.batch import PARAMETERS, build_batch
from jpaged.runner.buckets import Bucket, choose_bucket
from jpaged.runner.weights import reads_quantised_weights

BLOCK_SIZE = 16
DECODES = 32


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


def best_ms(cases: list[tuple[Engine, Bucket, Any]], steps: int) -> list[float]:
    """Milliseconds of the fastest of some steps of each case. They take turns, since a machine's
    speed may change from minute to minute."""
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(steps + 1):
        for (engine, bucket, buffer), taken in zip(cases, times, strict=True):
            began = time.perf_counter()
            engine.runner.execute(bucket, buffer.copy()).tokens(1)
            taken.append(time.perf_counter() - began)
    return [min(taken) * 1e3 for taken in times]


def measure_buckets(engine: Engine, context: int, steps: int) -> list[dict[str, Any]]:
    """A row for each bucket, smallest first."""
    num_blocks = engine.runner.num_blocks
    rows = []
    buckets = engine.runner.buckets
    for i, bucket in enumerate(buckets):
        decodes = bucket.sequences
        buffer = full_step(bucket, [1] * decodes, [context] * decodes, num_blocks)
        cases = {"decodes_ms": (engine, bucket, buffer)}
        # The chunk in the next bucket, too: its padding is what is lost.
        names = ("chunk_ms", "chunk_in_next_ms")
        for name, taken in zip(names, buckets[i : i + 2]):
            if taken.blocks == bucket.blocks:
                chunk = full_step(taken, [bucket.tokens], [bucket.tokens], num_blocks)
                cases[name] = engine, taken, chunk
        sizes = {"tokens": bucket.tokens, "sequences": bucket.sequences, "blocks": bucket.blocks}
        rows.append(sizes | dict(zip(cases, best_ms(list(cases.values()), steps))))
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
    flags.DEFINE_list(
        "contexts",
        ["128", "1024", "4096"],
        "Tokens that a decode attends to, ascending; the first is that of the buckets' decodes.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "steps", 10, "Steps to take the best of.", lower_bound=1, flag_values=values
    )
    define_output_flags(values)
    return values


def make_engine(checkpoint: Checkpoint, values: flags.FlagValues, **settings: Any) -> Engine:
    """An engine, not warmed up, with settings in place of those of the flags."""
    config = {
        "max_num_seqs": values.max_num_seqs,
        "max_num_batched_tokens": values.max_num_batched_tokens,
        "block_size": BLOCK_SIZE,
        "num_blocks": 4096,
        "preemption_mode": "recompute",
    }
    return Engine(checkpoint, EngineConfig(**config | settings))


def measure_contexts(
    checkpoint: Checkpoint, values: flags.FlagValues, contexts: list[int]
) -> list[dict[str, Any]]:
    """Milliseconds a step of DECODES decodes; all engines read the same blocks of their pools."""
    most = checkpoint.config.max_position_embeddings
    short, long = contexts[0], contexts[-1]
    settings = {"max_num_seqs": DECODES, "max_num_batched_tokens": DECODES}
    few_blocks = 512
    small = {"num_blocks": few_blocks, "max_model_len": most // 8}
    engines = {
        f"pool of {8 * few_blocks} blocks, max_model_len {most}": {"num_blocks": 8 * few_blocks},
        f"pool of {few_blocks} blocks, max_model_len {most}": {"num_blocks": few_blocks},
        f"pool of {few_blocks} blocks, max_model_len {most // 8}": small,
    }
    rows, measured = [], []
    for name, change in engines.items():
        engine = make_engine(checkpoint, values, **settings | change)
        engine.warmup(progress=False)
        cases = {str(context): [context] * DECODES for context in contexts}
        cases[f"{long}, others {short}"] = [long] + [short] * (DECODES - 1)
        for case, lengths in cases.items():
            if max(lengths) > engine.max_model_len:
                continue
            bucket = choose_bucket(
                engine.runner.buckets, DECODES, DECODES, -(-max(lengths) // BLOCK_SIZE)
            )
            buffer = full_step(bucket, [1] * DECODES, lengths, few_blocks)
            measured.append((engine, bucket, buffer))
            rows.append({"engine": name, "contexts": case})
    times = best_ms(measured, values.steps)
    return [row | {"ms": taken} for row, taken in zip(rows, times, strict=True)]


def run(values: flags.FlagValues) -> int:
    """Measure and print; returns the exit code."""
    contexts = integers("contexts", values.contexts)
    if contexts != sorted(set(contexts)):
        raise UsageError(f"contexts must ascend, got {','.join(values.contexts)}")
    with as_usage_error():
        checkpoint = load_checkpoint(
            values.model,
            dtype=resolve_dtype(values.dtype),
            keep_quantised=reads_quantised_weights("auto"),
        )
        most = checkpoint.config.max_position_embeddings
        largest = max(contexts[-1], values.max_num_batched_tokens)
        if largest > most:
            raise UsageError(
                f"contexts and max_num_batched_tokens must be at most the model's {most}, got "
                f"{largest}"
            )
        engine = make_engine(checkpoint, values)
    seconds = engine.warmup()
    buckets = measure_buckets(engine, contexts[0], values.steps)
    print(f"{len(buckets)} buckets compiled in {seconds:.1f} s\n")
    print("| T | S | S decodes, ms | a chunk of T, ms | in the next bucket, ms | lost |")
    print("|---|---|---|---|---|---|")
    for row in buckets:
        lost = row.get("chunk_in_next_ms")
        more = "| | |" if lost is None else f"| {lost:.1f} | {lost / row['chunk_ms'] - 1:.0%} |"
        print(
            f"| {row['tokens']} | {row['sequences']} | {row['decodes_ms']:.1f} | "
            f"{row['chunk_ms']:.1f} {more}",
            flush=True,
        )
    del engine
    rows = measure_contexts(checkpoint, values, contexts)
    print(f"\n| engine | contexts of {DECODES} decodes | ms |\n|---|---|---|")
    for row in rows:
        print(f"| {row['engine']} | {row['contexts']} | {row['ms']:.1f} |")
    result = {"warmup_seconds": seconds, "buckets": buckets, "contexts": rows}
    write_json(values.json, device_facts() | result)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    return run_script(argv, __doc__, define_flags(), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
