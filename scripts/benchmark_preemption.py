"""What bringing a preempted request back costs, by recompute and by swap, over block sizes: figure
19a of the PagedAttention paper on the machine at hand.

    benchmark_preemption.py
    benchmark_preemption.py --block_size 16,32 --tokens 1024 --json costs.json --plot costs.png

Recompute is a request of --tokens prompt tokens until its one token is sampled. Swap out copies as
many tokens' blocks, scattered over the pool, to host memory; swap in copies them back into other
blocks. All layers count, and the wait until everything is done; the first touch of host memory does
not, which an engine pays once. Each is the median of --rounds, one of each in turn. "auto" is what
preemption_mode="auto" would take for the request, from the rates that it measures itself.

A block size that the attention backend refuses is a row that says why.

Exit codes: 0 all is well, 2 bad usage, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from _command_line import (
    UsageError,
    as_usage_error,
    define_output_flags,
    device_facts,
    integers,
    pyplot,
    run_script,
    write_json,
)
from absl import flags

if TYPE_CHECKING:
    from jpaged.checkpoints import Checkpoint
    from jpaged.engine import Engine
    from jpaged.runner.block_moves import BlockMoves, Pools
    from jpaged.runner.swap_pool import SwapPool

_COLUMNS = "{:>10} {:>12} {:>9} {:>9} {:>13} {:>9}  {}"
_HEADER = _COLUMNS.format(
    "block size", "recompute ms", "in ms", "out ms", "in + out ms", "link GB/s", "auto"
)
# Beyond this ratio of the highest to the lowest time, a linear axis would show one line alone.
_LINEAR_RANGE = 30.0


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured at one block size.

    Attributes:
        block_size: token slots of a block.
        recompute, swap_in, swap_out: seconds; None if it was refused.
        link: bytes a second to host memory or back, as the engine measures it when it starts.
        auto: "swap" or "recompute": what preemption_mode="auto" would take.
        reason: why it was refused.
    """

    block_size: int
    recompute: float | None = None
    swap_in: float | None = None
    swap_out: float | None = None
    link: float | None = None
    auto: str = ""
    reason: str = ""

    @property
    def swap(self) -> float | None:
        """Seconds out and in again."""
        if self.swap_in is None or self.swap_out is None:
            return None
        return self.swap_in + self.swap_out

    def line(self) -> str:
        """A line of the table."""
        times = (self.recompute, self.swap_in, self.swap_out, self.swap)
        cells = ["-" if seconds is None else f"{seconds * 1e3:.2f}" for seconds in times]
        link = "-" if self.link is None else f"{self.link / 1e9:.2f}"
        return _COLUMNS.format(self.block_size, *cells, link, self.auto or self.reason)


class Bench:
    """One block size: an engine that computes prompts, and pools of its own to swap.

    Attributes:
        num_blocks: blocks that the tokens fill.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        block_size: int,
        *,
        tokens: int,
        pool_tokens: int,
        backend: str,
        seed: int,
    ) -> None:
        """Compiles what will be timed.

        Raises:
            NotImplementedError: The backend refuses the block size.
        """
        import jax

        from jpaged.runner.block_moves import BlockMoves
        from jpaged.runner.kv_pool import allocate_pool, storage_dtype
        from jpaged.runner.swap_pool import SwapPool
        from jpaged.runner.weights import weights_dtype

        self.tokens = tokens
        self.num_blocks = -(-tokens // block_size)
        self._rng = np.random.default_rng(seed)
        num_pool_blocks = max(pool_tokens // block_size, 2 * self.num_blocks)
        self._engine = _make_engine(checkpoint, block_size, tokens, backend)
        model = checkpoint.config
        leaf = jax.tree.leaves(checkpoint.params)[0]
        device = next(iter(leaf.devices()))
        dtype = storage_dtype(weights_dtype(checkpoint.params), device.platform)
        self.pools: Pools = allocate_pool(
            model.num_layers, num_pool_blocks, model.num_kv_heads, block_size, model.head_dim, dtype
        )
        self.moves: BlockMoves = BlockMoves(
            self.pools[0].shape, dtype, device=device, backend=backend, swapping=True
        )
        self.moves.compile()
        self._store: SwapPool = SwapPool(self.num_blocks, self.moves)
        self._sources, self._destinations = self._two_lists()

    def _two_lists(self) -> tuple[np.ndarray, np.ndarray]:
        blocks = self._rng.permutation(self.moves.num_blocks).astype(np.int32)
        return blocks[: self.num_blocks], blocks[-self.num_blocks :]

    def recompute(self) -> None:
        """Compute the tokens as a prompt, up to the sampled one."""
        from jpaged.sampling_params import SamplingParams

        token_ids = self._rng.integers(0, self._engine.vocab_size, self.tokens).tolist()
        self._engine.add_request(
            token_ids, SamplingParams(temperature=0, max_tokens=1), stream=False
        )
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def swap_out(self) -> None:
        """Copy the blocks to host memory."""
        self._sources, self._destinations = self._two_lists()
        rows = np.arange(self.num_blocks, dtype=np.int32)
        self._store.swap_out(self.pools, self._sources, rows)

    def swap_in(self) -> None:
        """Copy the blocks back, into others."""
        import jax

        rows = np.arange(self.num_blocks, dtype=np.int32)
        self.pools = self._store.swap_in(self.pools, rows, self._destinations)
        jax.block_until_ready(self.pools)


def _make_engine(checkpoint: Checkpoint, block_size: int, tokens: int, backend: str) -> Engine:
    from jpaged.config import EngineConfig
    from jpaged.engine import Engine

    engine = Engine(
        checkpoint,
        EngineConfig(
            max_model_len=tokens + 1,
            block_size=block_size,
            num_blocks=-(-(tokens + 1) // block_size),
            max_num_seqs=1,
            max_num_batched_tokens=tokens,
            enable_prefix_caching=False,
            preemption_mode="recompute",
            attention_backend=backend,
        ),
    )
    del engine.runner.buckets[:-1]  # the others would be compiled and never used
    engine.warmup(progress=False)
    return engine


def seconds_of(call: Callable[[], None]) -> float:
    """What a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(bench: Bench, rounds: int) -> list[float]:
    """Medians in seconds of recompute, swap out and swap in; a first round does not count."""
    calls = (bench.recompute, bench.swap_out, bench.swap_in)
    times = [[seconds_of(call) for call in calls] for _ in range(1 + rounds)]
    return [statistics.median(column) for column in zip(*times[1:], strict=True)]


def measure_row(
    checkpoint: Checkpoint,
    block_size: int,
    *,
    tokens: int,
    pool_tokens: int,
    backend: str,
    rounds: int,
    seed: int = 0,
) -> Row:
    """Measure at one block size; a refusal is a row too.

    Raises:
        UsageError: The engine cannot be made.
    """
    from jpaged.runner.preemption_costs import PreemptionCosts
    from jpaged.runner.swap_pool import measure_link

    try:
        bench = Bench(
            checkpoint,
            block_size,
            tokens=tokens,
            pool_tokens=pool_tokens,
            backend=backend,
            seed=seed,
        )
    except NotImplementedError as refusal:
        return Row(block_size, reason=" ".join(str(refusal).split()))
    except ValueError as error:
        raise UsageError(" ".join(str(error).split())) from error
    recompute, swap_out, swap_in = measure(bench, rounds)
    bench.pools, link = measure_link(bench.moves, bench.pools)
    costs = PreemptionCosts(link, tokens / recompute)
    prefers_swap = costs.prefers_swap(bench.num_blocks * bench.moves.bytes_per_block, tokens)
    auto = "swap" if prefers_swap else "recompute"
    return Row(block_size, recompute, swap_in=swap_in, swap_out=swap_out, link=link, auto=auto)


def plot(rows: list[Row], tokens: int, title: str, path: str) -> None:
    """The lines of the paper's figure 19a, into an image file."""
    measured = [row for row in rows if row.recompute is not None]
    sizes = [row.block_size for row in measured]
    lines: dict[str, list[Any]] = {
        "Recompute": [row.recompute for row in measured],
        "Swap in": [row.swap_in for row in measured],
        "Swap out": [row.swap_out for row in measured],
        "Swap in + out": [row.swap for row in measured],
    }
    figure, axes = pyplot().subplots(figsize=(5.5, 4), layout="constrained")
    for name, seconds in lines.items():
        axes.plot(sizes, np.array(seconds) * 1e3, "o-", markersize=4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("Block size")
    axes.set_ylabel(f"Time (ms) for {tokens} tokens")
    every = np.concatenate(list(lines.values()))
    if every.max() > _LINEAR_RANGE * every.min():
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot().close(figure)


def define_flags() -> flags.FlagValues:
    """The script's flags, not yet parsed."""
    values = flags.FlagValues()

    def define(name: str, default: str | None, help_text: str) -> None:
        flags.DEFINE_string(name, default, help_text, flag_values=values)

    def define_integer(name: str, default: int, help_text: str) -> None:
        flags.DEFINE_integer(name, default, help_text, lower_bound=1, flag_values=values)

    define("model", "smollm2-135m", "As for generate.py.")
    define("dtype", "auto", "auto (bfloat16 on a GPU, float32 on a CPU), float32 or bfloat16.")
    define("attention_backend", "auto", "auto, xla, triton or mosaic.")
    define("compilation_cache_dir", None, "Folder that keeps compiled programs.")
    flags.DEFINE_list(
        "block_size", "1,2,4,8,16,32,64,128,256", "Token slots in a block.", flag_values=values
    )
    define_integer("tokens", 256, "Tokens of the request that comes back.")
    define_integer("pool_tokens", 4096, "Token slots of the pool that its blocks lie in.")
    define_integer("rounds", 9, "How often each is timed.")
    define_output_flags(values, plot="the times over the block size")
    return values


def run(values: flags.FlagValues) -> int:
    """Do what the flags ask for; returns the exit code."""
    sizes = integers("block_size", values.block_size)
    from jpaged.checkpoints import load_checkpoint  # importing jax takes seconds
    from jpaged.compilation_cache import enable_compilation_cache
    from jpaged.llm import resolve_dtype
    from jpaged.runner.weights import reads_quantised_weights

    with as_usage_error():
        if values.compilation_cache_dir:
            enable_compilation_cache(values.compilation_cache_dir)
        checkpoint = load_checkpoint(
            values.model,
            dtype=resolve_dtype(values.dtype),
            keep_quantised=reads_quantised_weights(values.attention_backend),
        )
    limit = checkpoint.config.max_position_embeddings - 1
    if values.tokens > limit:
        raise UsageError(f"tokens must be at most the model's {limit}, got {values.tokens}")
    facts = device_facts()
    title = f"{values.model}, {facts['device']}, {facts['cores']} cores, jax {facts['jax']}"
    print(f"{title}: {values.tokens} tokens")
    print(_HEADER, flush=True)
    rows = []
    for size in sizes:
        row = measure_row(
            checkpoint,
            size,
            tokens=values.tokens,
            pool_tokens=values.pool_tokens,
            backend=values.attention_backend,
            rounds=values.rounds,
        )
        rows.append(row)
        print(row.line(), flush=True)
    write_json(
        values.json,
        facts
        | {"model": values.model, "tokens": values.tokens, "rounds": values.rounds}
        | {"rows": [dataclasses.asdict(row) for row in rows]},
    )
    if values.plot is not None and any(row.recompute is not None for row in rows):
        plot(rows, values.tokens, title, values.plot)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run the script; returns the exit code."""
    return run_script(argv, __doc__, define_flags(), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
