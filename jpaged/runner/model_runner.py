"""Runs steps on the device: holds weights and pools, compiles every bucket, executes batches."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from jpaged.models import separate_layers
from jpaged.runner.batch import PARAMETERS, buffer_size, unpack
from jpaged.runner.block_moves import BlockMoves
from jpaged.runner.buckets import Bucket
from jpaged.runner.compilations import compiler_options
from jpaged.runner.kv_pool import (
    allocate_pool,
    available_pool_bytes,
    block_bytes,
    blocks_in,
    set_tokens,
    storage_dtype,
)
from jpaged.runner.sampler import (
    MAX_LOGPROBS,
    SamplingRows,
    log_probabilities,
    sample_rows,
)
from jpaged.runner.swap_pool import SwapPool, measure_link, swap_blocks_in

logger = logging.getLogger(__name__)

# Rows that the head and the sampler work on at once on a CPU: a step pays for the tiles that its
# sampled rows fill, not for the bucket's padding. A GPU takes all rows at once.
_CPU_TILE = 32
# Rows computed at a time when results must not depend on the batch: what a decode step of many
# sequences fills. XLA's CPU products round differently from 64 rows on.
BATCH_INVARIANT_TILE = 32
# Up to this many tokens a float32 step on a CPU takes the layers' weights one by one (LayerOf).
# With more, its products take too long for the copy to matter, and it compiles faster without.
_SEPARATE_TOKENS = 64
# The sampling program is compiled for these numbers of rows too, beside the most. On a CPU that
# spares steps of few sequences a head of 32 rows: at 8 it only reads the weights.
_SAMPLING_ROWS = {"cpu": (8, 16), "gpu": (32, 128)}
# One row of the packed result: token, chosen logprob, ids and logprobs of the best.
RESULT_WIDTH = 2 + 2 * MAX_LOGPROBS


class StepResult:
    """The result of one step, on its way from the device."""

    def __init__(self, rows: Int[Array, "S W"], prompt_rows: Int[Array, "T W"]) -> None:
        self._rows = rows
        self._prompt_rows = prompt_rows

    def is_ready(self) -> bool:
        """Whether the step has run."""
        return self._rows.is_ready()  # type: ignore[attr-defined]

    def wait_for_prompt_logprobs(self) -> None:
        """Wait until `prompt_logprobs` can be read."""
        self._prompt_rows.block_until_ready()

    def tokens(self, count: int) -> Int[np.ndarray, " count"]:
        """The sampled tokens of the first `count` rows; waits for the step."""
        return np.asarray(self._rows)[:count, 0]

    def logprobs(self, row: int, best: int) -> tuple[float, dict[int, float]]:
        """Of sampled row `row`: its token's logprob, and {token: logprob} of it and the best."""
        return _read_logprobs(np.asarray(self._rows)[row], best)

    def candidates(self, row: int) -> tuple[Int[np.ndarray, " best"], Float[np.ndarray, " best"]]:
        """Of sampled row `row`: ids and logprobs of the best tokens, best first (asked for as
        logprobs are)."""
        values = np.asarray(self._rows)[row, 2:]
        ids, logprobs = values[:MAX_LOGPROBS], values[MAX_LOGPROBS:].view(np.float32)
        return ids[ids >= 0], logprobs[ids >= 0]

    def prompt_logprobs(self, index: int, best: int) -> dict[int, float]:
        """{token: logprob} for the target of query token `index` of the step, as `logprobs`."""
        return _read_logprobs(np.asarray(self._prompt_rows)[index], best)[1]


def _read_logprobs(row: Int[np.ndarray, " W"], best: int) -> tuple[float, dict[int, float]]:
    values = row.view(np.float32)
    ids = row[2 : 2 + best].tolist()
    logprobs = values[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + best].tolist()
    chosen = float(values[1])
    found = {token: value for token, value in zip(ids, logprobs) if token >= 0}
    return chosen, {int(row[0]): chosen} | found


def _pack_rows(token, logprob, top_ids, top_logprobs) -> Int[Array, "R W"]:
    def bits(x):
        return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)

    return jnp.concatenate(
        [token[:, None], bits(logprob)[:, None], top_ids, bits(top_logprobs)], axis=1
    )


def _over_tiles(
    tile: int, rows: int, live: Int[Array, ""], compute: Callable[[Int[Array, ""]], Array]
) -> Int[Array, "rows W"]:
    """`compute(start)` -> [tile, W] for the tiles that hold the first `live` rows, joined."""

    def body(i, out):
        start = jnp.minimum(i * tile, rows - tile)  # the last tile may overlap: same values again
        return lax.dynamic_update_slice_in_dim(out, compute(start), start, axis=0)

    out = jnp.zeros((rows, RESULT_WIDTH), jnp.int32)
    return lax.fori_loop(0, -(-live // tile), body, out)


class Sampling(NamedTuple):
    """What the sampling program takes from the forward program: R rows, of which the first
    `num_sampled` count."""

    num_sampled: Int[Array, ""]
    hidden: Float[Array, "R E"]
    context_lens: Int[Array, " R"]
    slots: Int[Array, " R"]
    parameters: Int[Array, "R P"]
    block_tables: Int[Array, "R M"]


def forward(
    model: nnx.Module,
    kv_pool: Float[Array, "L N 2 K B D"],
    token_pool: Int[Array, "N B"],
    last_tokens: Int[Array, " slots"],
    buffer: Int[Array, " words"],
    *,
    bucket: Bucket,
    sampling_rows: int,
    backend: str,
    tile: int,
    row_tile: int | None = None,
) -> tuple[Array, Array, Sampling, Int[Array, "T W"]]:
    """The first half of a step: KV writes, forward pass, logprobs of prompt tokens.

    last_tokens  the token sampled last in each slot, for rows whose token the host did not know
                 (UNKNOWN_TOKEN)

    Returns the pools, what sampling needs (padded to `sampling_rows`), and the prompt tokens'
    logprobs (rows of RESULT_WIDTH int32; zero where not asked for).
    """
    T, S, _ = bucket
    N, B = token_pool.shape
    batch = unpack(buffer, bucket)
    starts = batch.query_starts

    token = jnp.arange(T)
    row = jnp.clip(jnp.searchsorted(starts, token, side="right") - 1, 0, S - 1)
    live = token < starts[-1]
    position = batch.context_lens[row] - starts[row + 1] + token
    position = jnp.where(live, position, 0)
    slot = batch.block_tables[row, position // B] * B + position % B
    slot = jnp.where(live, slot, N * B)  # out of range: dropped by the writes

    token_ids = jnp.where(batch.token_ids < 0, last_tokens[batch.slots[row]], batch.token_ids)
    token_pool = set_tokens(token_pool, (slot // B, slot % B), token_ids)
    hidden, kv_pool = model(
        token_ids,
        position,
        kv_pool,
        slot,
        batch.block_tables,
        starts,
        batch.context_lens,
        backend=backend,
        row_tile=row_tile,
    )

    def prompt_logprobs(start):
        targets = lax.dynamic_slice_in_dim(batch.logprob_targets, start, min(tile, T), axis=0)

        def compute():
            rows = lax.dynamic_slice_in_dim(hidden, start, min(tile, T), axis=0)
            wanted = jnp.maximum(targets, 0)
            logits = model.logits(rows)  # type: ignore[attr-defined]
            return _pack_rows(wanted, *log_probabilities(logits, wanted))

        nothing = jnp.zeros((min(tile, T), RESULT_WIDTH), jnp.int32)
        return lax.cond((targets >= 0).any(), compute, lambda: nothing)

    wanted = jnp.where(batch.wants_prompt_logprobs > 0, starts[-1], 0)
    prompt_rows = _over_tiles(min(tile, T), T, wanted, prompt_logprobs)

    def padded(x):
        return jnp.pad(x, [(0, sampling_rows - S)] + [(0, 0)] * (x.ndim - 1))

    sampling = Sampling(
        batch.num_sampled,
        padded(hidden[jnp.maximum(starts[1:] - 1, 0)]),
        padded(batch.context_lens),
        padded(batch.slots),
        padded(batch.parameters),
        padded(batch.block_tables),
    )
    return kv_pool, token_pool, sampling, prompt_rows


def sample(
    model: nnx.Module,
    token_pool: Int[Array, "N B"],
    bias_table: Float[Array, "slots V"],
    last_tokens: Int[Array, " slots"],
    sampling: Sampling,
    *,
    tile: int,
) -> tuple[Int[Array, "R W"], Int[Array, " slots"]]:
    """The second half of a step: a token for each of the first num_sampled rows, packed with its
    logprobs; and last_tokens with these tokens in their rows' slots."""
    rows = sampling.hidden.shape[0]

    def compute(start):
        hidden, *fields = (
            lax.dynamic_slice_in_dim(x, start, min(tile, rows), axis=0) for x in sampling[1:]
        )
        logits = model.logits(hidden)  # type: ignore[attr-defined]
        return _pack_rows(*sample_rows(logits, SamplingRows(*fields), token_pool, bias_table))

    packed = _over_tiles(min(tile, rows), rows, sampling.num_sampled, compute)
    sampled = jnp.arange(rows) < sampling.num_sampled
    slots = jnp.where(sampled, sampling.slots, len(last_tokens))
    return packed, last_tokens.at[slots].set(packed[:, 0], mode="drop")


class _Weights(NamedTuple):
    """A model's parameters as a program takes them: leaves and not a module, since walking a module
    costs milliseconds a call."""

    leaves: list[Array]
    treedef: Any

    def shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self.leaves]


def _temporary_bytes(program: jax.stages.Compiled) -> int:
    analysis = program.memory_analysis()
    assert analysis is not None, "a GPU's compiler reports memory"
    return analysis.temp_size_in_bytes


def _is_usable(*arrays: Array) -> bool:
    try:
        jax.block_until_ready(arrays)
    except Exception:  # whatever made the step fail
        return False
    return True


class ModelRunner:
    """Weights, pools and compiled programs: for each bucket one for the forward pass, and one for
    sampling that the buckets share (it takes as long to compile as a forward pass, and does not
    depend on the number of tokens).

    Not thread-safe. The pools are donated to each step and replaced by what it returns, so a step
    that is under way must be the only user of them.
    """

    def __init__(
        self,
        graphdef: Any,
        params: Any,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        hidden_size: int,
        vocab_size: int,
        buckets: list[Bucket],
        block_size: int,
        num_blocks: int | None,
        num_slots: int,
        gpu_memory_utilization: float,
        swap_space_gib: float,
        backend: str,
        row_tile: int | None = None,
    ) -> None:
        """Allocates the pools; `compile` then makes the programs.

        graphdef, params  of the model, by `nnx.split`
        num_slots         rows of the bias table: most requests running at once
        num_blocks        blocks in the pool; None takes what memory allows (kv_pool.py)
        swap_space_gib    host memory for blocks of preempted requests; 0 for none
        row_tile          compute so many rows at a time, for batch invariance; T and S of the
                          buckets are multiples of it

        Raises ValueError if memory leaves no room for a pool.
        """
        self.buckets = buckets
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._graphdef = graphdef
        leaf = jax.tree.leaves(params)[0]
        self.device = next(iter(leaf.devices()))
        self._stacked = _Weights(*jax.tree.flatten(params))
        self._separate = self._stacked
        if self.device.platform == "cpu" and leaf.dtype == jnp.float32:
            self._separate = _Weights(*jax.tree.flatten(separate_layers(params)))
        self._backend = backend
        self._hidden_size = hidden_size
        self._row_tile = row_tile
        self._tile = _CPU_TILE if self.device.platform == "cpu" else num_slots
        if row_tile is not None:
            self._tile = row_tile
        self._pool_dtype = storage_dtype(leaf.dtype, self.device.platform)
        self._pool_shape = (num_layers, num_kv_heads, head_dim)
        self._num_slots = num_slots
        self.bytes_per_block = block_bytes(
            num_layers, num_kv_heads, block_size, head_dim, self._pool_dtype
        )
        self._bias_table = self._new_bias_table()
        self._last_tokens = self._new_last_tokens()
        self._set_bias: Callable | None = None
        self._forward: dict[Bucket, jax.stages.Compiled] = {}
        self._sample: dict[tuple[int, int], jax.stages.Compiled] = {}  # by rows and table width
        if num_blocks is None:
            temporary = 0
            if self.device.platform != "cpu":
                # Temporary memory does not depend on the pool's size: it is updated in place.
                largest = buckets[-1]
                rows = self._sampling_rows(largest)
                temporary = max(
                    _temporary_bytes(self._compile_forward(largest, num_blocks=2)),
                    _temporary_bytes(self._compile_sample(rows, largest.blocks, num_blocks=2)),
                )
            available = available_pool_bytes(self.device, temporary, gpu_memory_utilization)
            token_bytes = 4 * block_size  # of the token pool
            num_blocks = blocks_in(available, self.bytes_per_block + token_bytes, block_size)
        self.num_blocks = num_blocks
        self._kv_pool, self._token_pool = self._new_pools()
        self._moves = BlockMoves(
            self._kv_pool.shape,
            self._pool_dtype,
            device=self.device,
            backend=backend,
            swapping=swap_space_gib > 0,
        )
        self.swap_pool = SwapPool(
            swap_blocks_in(swap_space_gib, self._moves.bytes_per_block), self._moves
        )

    @property
    def bytes_per_swapped_block(self) -> int:
        """Of keys, values and token ids."""
        return self._moves.bytes_per_block

    def measure_link(self) -> float:
        """Bytes a second to host memory or back, measured with the (idle) pools."""
        pools = self._kv_pool, self._token_pool
        (self._kv_pool, self._token_pool), rate = measure_link(self._moves, pools)
        return rate

    def move_blocks(
        self,
        swapped_out: Int[np.ndarray, "2 m"],
        copied: Int[np.ndarray, "2 c"],
        swapped_in: Int[np.ndarray, "2 n"],
    ) -> None:
        """Move blocks before a step, in this order.

        swapped_out  pairs (block of the pool, block of host memory) to save
        copied       pairs (source, destination) of the pool
        swapped_in   pairs (block of host memory, block of the pool) to bring back
        """
        if swapped_out.size:
            self.swap_pool.swap_out((self._kv_pool, self._token_pool), *swapped_out)
        if copied.size:
            pools = self._kv_pool, self._token_pool
            self._kv_pool, self._token_pool = self._moves.copy(pools, *copied)
        if swapped_in.size:
            pools = self._kv_pool, self._token_pool
            self._kv_pool, self._token_pool = self.swap_pool.swap_in(pools, *swapped_in)

    def _new_pools(self) -> tuple[Array, Array]:
        L, K, D = self._pool_shape
        try:
            return allocate_pool(L, self.num_blocks, K, self.block_size, D, self._pool_dtype)
        except jax.errors.JaxRuntimeError as error:
            size = self.num_blocks * self.bytes_per_block
            raise ValueError(
                f"num_blocks={self.num_blocks} asks for a KV pool of {size} bytes, "
                "which cannot be allocated"
            ) from error

    def _new_bias_table(self) -> Float[Array, "slots V"]:
        return jnp.zeros((self._num_slots, self.vocab_size), jnp.float32)

    def _new_last_tokens(self) -> Int[Array, " slots"]:
        return jnp.zeros(self._num_slots, jnp.int32)

    def restore_pools(self) -> None:
        """Allocate anew, and empty, what a failed step has lost.

        Its arguments were donated; and what a step returns whose failure shows only later holds
        that failure, and would hand it on to all steps to come.
        """
        if not _is_usable(self._kv_pool, self._token_pool):
            self._kv_pool, self._token_pool = self._new_pools()
        if not _is_usable(self._bias_table):
            self._bias_table = self._new_bias_table()
        # Nobody is to be fed from it: all that ran has lost its memory.
        self._last_tokens = self._new_last_tokens()

    def programs(self) -> dict[Bucket, jax.stages.Compiled]:
        """The compiled forward program of each bucket (for its memory analysis, say)."""
        return dict(self._forward)

    def _sampling_rows(self, bucket: Bucket) -> int:
        """Rows of the sampling program that a bucket uses. Where results must not depend on the
        batch there is one program for all."""
        most = self.buckets[-1].sequences
        fewer = () if self._row_tile else _SAMPLING_ROWS.get(self.device.platform, ())
        return min(rows for rows in (*fewer, most) if bucket.sequences <= rows)

    def _weights(self, bucket: Bucket) -> _Weights:
        """The weights in the form that the bucket's forward program takes. Where results must not
        depend on the batch there is one form for all."""
        few = bucket.tokens <= _SEPARATE_TOKENS or self._row_tile is not None
        return self._separate if few else self._stacked

    def _merge(self, weights: _Weights, leaves: list) -> nnx.Module:
        return nnx.merge(self._graphdef, jax.tree.unflatten(weights.treedef, leaves))

    def _compile_forward(self, bucket: Bucket, num_blocks: int) -> jax.stages.Compiled:
        L, K, D = self._pool_shape
        rows = self._sampling_rows(bucket)
        weights = self._weights(bucket)

        def run(leaves, kv_pool, token_pool, last_tokens, buffer):
            return forward(
                self._merge(weights, leaves), kv_pool, token_pool, last_tokens, buffer,
                bucket=bucket, sampling_rows=rows, backend=self._backend, tile=self._tile,
                row_tile=self._row_tile,
            )  # fmt: skip

        run.__name__ = f"forward_{bucket.tokens}_{bucket.sequences}_{bucket.blocks}"
        shapes = (
            weights.shapes(),
            jax.ShapeDtypeStruct((L, num_blocks, 2, K, self.block_size, D), self._pool_dtype),
            jax.ShapeDtypeStruct((num_blocks, self.block_size), jnp.int32),
            jax.ShapeDtypeStruct((self._num_slots,), jnp.int32),
            jax.ShapeDtypeStruct((buffer_size(bucket),), jnp.int32),
        )
        return self._compiled(jax.jit(run, donate_argnums=(1, 2)), *shapes)

    def _compile_sample(self, rows: int, width: int, num_blocks: int) -> jax.stages.Compiled:
        def run(leaves, token_pool, bias_table, last_tokens, sampling):
            model = self._merge(self._stacked, leaves)
            return sample(model, token_pool, bias_table, last_tokens, sampling, tile=self._tile)

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        run.__name__ = f"sample_{rows}_{width}"
        dtype = self._stacked.leaves[0].dtype
        hidden: Any = jax.ShapeDtypeStruct((rows, self._hidden_size), dtype)
        shapes = (
            self._stacked.shapes(),
            ints(num_blocks, self.block_size),
            jax.ShapeDtypeStruct(self._bias_table.shape, jnp.float32),
            ints(self._num_slots),
            Sampling(
                ints(), hidden, ints(rows), ints(rows), ints(rows, len(PARAMETERS)),
                ints(rows, width),
            ),
        )  # fmt: skip
        return self._compiled(jax.jit(run), *shapes)

    def _compiled(self, program: Any, *shapes: Any) -> jax.stages.Compiled:
        # The kernels are chosen while tracing, by the default device, which is a thread's own.
        with jax.default_device(self.device):
            return program.lower(*shapes).compile(compiler_options(self.device.platform))

    def _compile_set_bias(self) -> Callable:
        def set_bias(table, slot, row):
            return lax.dynamic_update_slice(table, row[None], (slot, 0))

        shapes = (
            jax.ShapeDtypeStruct(self._bias_table.shape, jnp.float32),
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.ShapeDtypeStruct((self.vocab_size,), jnp.float32),
        )
        return self._compiled(jax.jit(set_bias, donate_argnums=0), *shapes)

    def compile(self, *, progress: bool = True) -> float:
        """Compiles every bucket, in as many threads as there are cores; returns the seconds taken.

        progress  draw a bar on standard error
        """
        began = time.perf_counter()
        self._set_bias = self._compile_set_bias()
        # The largest first: they take longest, so they should not be the last ones running.
        jobs: dict[Future, tuple[dict, Any]] = {}
        threads = min(8, os.cpu_count() or 1)
        with (
            ThreadPoolExecutor(threads) as pool,
            tqdm(desc="Compiling", unit="program", disable=not progress) as bar,
        ):
            for move in self._moves.keys():  # noqa: SIM118 (a method)
                job = pool.submit(self._moves.compile_program, *move)
                jobs[job] = self._moves.programs, move
            for key in sorted({(self._sampling_rows(b), b.blocks) for b in self.buckets}):
                jobs[pool.submit(self._compile_sample, *key, self.num_blocks)] = self._sample, key
            for bucket in reversed(self.buckets):
                job = pool.submit(self._compile_forward, bucket, self.num_blocks)
                jobs[job] = self._forward, bucket
            bar.reset(total=len(jobs))
            try:
                for job in as_completed(jobs):
                    programs, key = jobs[job]
                    programs[key] = job.result()
                    bar.update()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return time.perf_counter() - began

    def set_bias(self, slot: int, row: Float[np.ndarray, " V"]) -> None:
        """Put a request's logit bias into its row of the bias table: once a request, not a step."""
        assert self._set_bias is not None, "compile() comes first"
        self._bias_table = self._set_bias(self._bias_table, np.int32(slot), row)

    def execute(self, bucket: Bucket, buffer: Int[np.ndarray, " words"]) -> StepResult:
        """Dispatch one step and return at once. `buffer` must not be written to afterwards."""
        self._kv_pool, self._token_pool, sampling, prompt_rows = self._forward[bucket](
            self._weights(bucket).leaves,
            self._kv_pool,
            self._token_pool,
            self._last_tokens,
            buffer,
        )
        program = self._sample[self._sampling_rows(bucket), bucket.blocks]
        rows, self._last_tokens = program(
            self._stacked.leaves, self._token_pool, self._bias_table, self._last_tokens, sampling
        )
        rows.copy_to_host_async()
        return StepResult(rows, prompt_rows)
