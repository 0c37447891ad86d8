"""Runs steps on the device: holds weights and pools, compiles every bucket, executes batches."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int
from tqdm import tqdm

from jpaged.runner.batch import PARAMETERS, buffer_size, unpack
from jpaged.runner.block_moves import BlockMoves
from jpaged.runner.buckets import Bucket, decode_buckets
from jpaged.runner.compilations import compiler_options
from jpaged.runner.kv_pool import (
    allocate_pool,
    available_pool_bytes,
    block_bytes,
    blocks_in,
    host_bytes_left,
    storage_dtype,
)
from jpaged.runner.step import Sampling, decode_steps, forward, prompt_logprobs, sample
from jpaged.runner.step_result import StepResult
from jpaged.runner.swap_pool import SwapPool, measure_link, swap_blocks_in
from jpaged.runner.weights import for_device

logger = logging.getLogger(__name__)

# Rows that the head and the sampler work on at once on a CPU: a step pays for the tiles that its
# sampled rows fill, not for the bucket's padding. A GPU takes all rows at once.
_CPU_TILE = 32
# Rows computed at a time when results must not depend on the batch: what a decode step of many
# sequences fills. XLA's CPU products round differently from 64 rows on.
BATCH_INVARIANT_TILE = 32
# The sampling program is compiled for these numbers of rows too, beside the most. On a CPU that
# spares steps of few sequences a head of 32 rows: at 8 it only reads the weights.
_SAMPLING_ROWS = {"cpu": (8, 16), "gpu": (32, 128)}


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Python's garbage collector off. Tracing makes a great many objects that stay: what it looks
    for is not among them, and looking takes a tenth of a start from the cache."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
    """Weights, pools and compiled programs: for each bucket one for the forward pass, and two that
    the buckets share (each takes as long to compile as a forward pass, and does not depend on the
    number of tokens): one for sampling, one for the logprobs of prompts. If several decode steps
    may be asked for in one call, there is one more for each bucket that decodes need, which does
    forward pass and sampling in a loop.

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
        max_decode_steps: int = 1,
    ) -> None:
        """Allocates the pools; `compile` then makes the programs.

        graphdef, params  of the model, by `nnx.split`
        num_slots         rows of the bias table: most requests running at once
        num_blocks        blocks in the pool; None takes what memory allows (kv_pool.py)
        swap_space_gib    host memory for blocks of preempted requests; 0 for none
        row_tile          compute so many rows at a time, for batch invariance; T and S of the
                          buckets are multiples of it
        max_decode_steps  most steps of a call of `execute_decodes`; 1 for no such calls

        Raises ValueError if memory leaves no room for a pool.
        """
        self.buckets = buckets
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._graphdef = graphdef
        leaf = jax.tree.leaves(params)[0]
        self.device = next(iter(leaf.devices()))
        # Leaves and not a module, since walking a module costs milliseconds a call.
        self._leaves, self._treedef = jax.tree.flatten(for_device(params, self.device, backend))
        self._backend = backend
        self._hidden_size = hidden_size
        self._row_tile = row_tile
        self._max_decode_steps = max_decode_steps
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
        self._hidden = self._new_hidden()
        self._forward: dict[Bucket, jax.stages.Compiled] = {}
        self._sample: dict[tuple[int, int], jax.stages.Compiled] = {}  # by rows and table width
        self._decode: dict[Bucket, jax.stages.Compiled] = {}
        self._named: dict[str, jax.stages.Compiled] = {}  # set_bias and prompt_logprobs
        if num_blocks is None:
            temporary = 0
            if self.device.platform != "cpu":
                # Temporary memory does not depend on the pool's size: it is updated in place.
                largest = buckets[-1]
                rows = self._sampling_rows(largest)
                programs = [
                    self._compile_forward(largest, num_blocks=2),
                    self._compile_sample(rows, largest.blocks, num_blocks=2),
                    self._compile_prompt_logprobs(),
                ]
                if max_decode_steps > 1:
                    largest = decode_buckets(buckets)[-1]
                    programs.append(self._compile_decode(largest, num_blocks=2))
                temporary = max(_temporary_bytes(program) for program in programs)
            available = available_pool_bytes(self.device, temporary, gpu_memory_utilization)
            token_bytes = 4 * block_size  # of the token pool
            num_blocks = blocks_in(available, self.bytes_per_block + token_bytes, block_size)
        elif self.device.platform == "cpu":
            # The pool takes memory as it fills: one that is larger than what there is would end the
            # process, later on.
            size, left = num_blocks * self.bytes_per_block, host_bytes_left()
            if size > left:
                raise ValueError(
                    f"num_blocks={num_blocks} asks for a KV pool of {size} bytes, "
                    f"but only {left} bytes of memory are left"
                )
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
        size = self.num_blocks * self.bytes_per_block
        try:
            return allocate_pool(L, self.num_blocks, K, self.block_size, D, self._pool_dtype)
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(
                f"num_blocks={self.num_blocks} asks for a KV pool of {size} bytes, "
                "which cannot be allocated"
            ) from error

    def _new_bias_table(self) -> Float[Array, "slots V"]:
        return jnp.zeros((self._num_slots, self.vocab_size), jnp.float32)

    def _new_last_tokens(self) -> Int[Array, " slots"]:
        return jnp.zeros(self._num_slots, jnp.int32)

    def _new_hidden(self) -> Float[Array, "T E"]:
        """Where each step leaves its hidden states, as many as the largest bucket has."""
        shape = self.buckets[-1].tokens, self._hidden_size
        return jnp.zeros(shape, self._leaves[0].dtype)

    def restore_pools(self) -> None:
        """Allocate anew, and empty, what a failed step has lost.

        Its arguments were donated; and what a step returns whose failure shows only later holds
        that failure, and would hand it on to all steps to come.
        """
        if not _is_usable(self._kv_pool, self._token_pool):
            self._kv_pool, self._token_pool = self._new_pools()
        if not _is_usable(self._bias_table):
            self._bias_table = self._new_bias_table()
        if not _is_usable(self._hidden):
            self._hidden = self._new_hidden()
        # Nobody is to be fed from it: all that ran has lost its memory.
        self._last_tokens = self._new_last_tokens()

    def programs(self) -> dict[Bucket, jax.stages.Compiled]:
        """The compiled forward program of each bucket (for its memory analysis, say)."""
        return dict(self._forward)

    def decode_programs(self) -> dict[Bucket, jax.stages.Compiled]:
        """The compiled program of several decode steps of each bucket that has one."""
        return dict(self._decode)

    def _sampling_rows(self, bucket: Bucket) -> int:
        """Rows of the sampling program that a bucket uses. Where results must not depend on the
        batch there is one program for all."""
        most = self.buckets[-1].sequences
        fewer = () if self._row_tile else _SAMPLING_ROWS.get(self.device.platform, ())
        return min(rows for rows in (*fewer, most) if bucket.sequences <= rows)

    def _model(self, leaves: list[Array]) -> nnx.Module:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))

    def _leaf_shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._leaves]

    def _compile_forward(self, bucket: Bucket, num_blocks: int) -> jax.stages.Compiled:
        rows = self._sampling_rows(bucket)

        def run(leaves, kv_pool, token_pool, all_hidden, last_tokens, buffer):
            kv_pool, token_pool, sampling, hidden = forward(
                self._model(leaves), kv_pool, token_pool, last_tokens, unpack(buffer, bucket),
                sampling_rows=rows, backend=self._backend, row_tile=self._row_tile,
            )  # fmt: skip
            all_hidden = lax.dynamic_update_slice(all_hidden, hidden, (0, 0))
            return kv_pool, token_pool, all_hidden, sampling

        run.__name__ = f"forward_{bucket.tokens}_{bucket.sequences}_{bucket.blocks}"
        shapes = (
            self._leaf_shapes(),
            *self._pool_shapes(num_blocks),
            jax.ShapeDtypeStruct(self._hidden.shape, self._hidden.dtype),
            jax.ShapeDtypeStruct((self._num_slots,), jnp.int32),
            jax.ShapeDtypeStruct((buffer_size(bucket),), jnp.int32),
        )
        return self._compiled(jax.jit(run, donate_argnums=(1, 2, 3)), *shapes)

    def _compile_decode(self, bucket: Bucket, num_blocks: int) -> jax.stages.Compiled:

        def run(leaves, kv_pool, token_pool, bias_table, last_tokens, buffer):
            return decode_steps(
                self._model(leaves), kv_pool, token_pool, bias_table, last_tokens,
                unpack(buffer, bucket), most_steps=self._max_decode_steps,
                sampling_rows=self._sampling_rows(bucket), backend=self._backend, tile=self._tile,
            )  # fmt: skip

        run.__name__ = f"decode_{bucket.tokens}_{bucket.sequences}_{bucket.blocks}"
        shapes = (
            self._leaf_shapes(),
            *self._pool_shapes(num_blocks),
            jax.ShapeDtypeStruct(self._bias_table.shape, jnp.float32),
            jax.ShapeDtypeStruct((self._num_slots,), jnp.int32),
            jax.ShapeDtypeStruct((buffer_size(bucket),), jnp.int32),
        )
        return self._compiled(jax.jit(run, donate_argnums=(1, 2)), *shapes)

    def _pool_shapes(self, num_blocks: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        L, K, D = self._pool_shape
        return (
            jax.ShapeDtypeStruct((L, num_blocks, 2, K, self.block_size, D), self._pool_dtype),
            jax.ShapeDtypeStruct((num_blocks, self.block_size), jnp.int32),
        )

    def _compile_sample(self, rows: int, width: int, num_blocks: int) -> jax.stages.Compiled:
        def run(leaves, token_pool, bias_table, last_tokens, sampling):
            model = self._model(leaves)
            return sample(model, token_pool, bias_table, last_tokens, sampling, tile=self._tile)

        def ints(*shape: int) -> Any:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        run.__name__ = f"sample_{rows}_{width}"
        dtype = self._leaves[0].dtype
        hidden: Any = jax.ShapeDtypeStruct((rows, self._hidden_size), dtype)
        shapes = (
            self._leaf_shapes(),
            ints(num_blocks, self.block_size),
            jax.ShapeDtypeStruct(self._bias_table.shape, jnp.float32),
            ints(self._num_slots),
            Sampling(
                ints(), hidden, ints(rows), ints(rows), ints(rows, len(PARAMETERS)),
                ints(rows, width),
            ),
        )  # fmt: skip
        return self._compiled(jax.jit(run), *shapes)

    def _compile_prompt_logprobs(self) -> jax.stages.Compiled:
        def run(leaves, hidden, targets):
            return prompt_logprobs(self._model(leaves), hidden, targets, tile=self._tile)

        run.__name__ = "prompt_logprobs"
        shapes = (
            self._leaf_shapes(),
            jax.ShapeDtypeStruct(self._hidden.shape, self._hidden.dtype),
            jax.ShapeDtypeStruct(self._hidden.shape[:1], jnp.int32),
        )
        return self._compiled(jax.jit(run), *shapes)

    def _compiled(self, program: Any, *shapes: Any) -> jax.stages.Compiled:
        # The kernels are chosen while tracing, by the default device, which is a thread's own.
        with jax.default_device(self.device):
            return program.lower(*shapes).compile(compiler_options(self.device.platform))

    def _compile_set_bias(self) -> jax.stages.Compiled:
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
        with _without_collections():
            self._compile_all(progress)
        return time.perf_counter() - began

    def _compile_all(self, progress: bool) -> None:
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
            jobs[pool.submit(self._compile_set_bias)] = self._named, "set_bias"
            jobs[pool.submit(self._compile_prompt_logprobs)] = self._named, "prompt_logprobs"
            for key in sorted({(self._sampling_rows(b), b.blocks) for b in self.buckets}):
                jobs[pool.submit(self._compile_sample, *key, self.num_blocks)] = self._sample, key
            if self._max_decode_steps > 1:
                for bucket in reversed(decode_buckets(self.buckets)):
                    job = pool.submit(self._compile_decode, bucket, self.num_blocks)
                    jobs[job] = self._decode, bucket
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

    def set_bias(self, slot: int, row: Float[np.ndarray, " V"]) -> None:
        """Put a request's logit bias into its row of the bias table: once a request, not a step."""
        self._bias_table = self._named["set_bias"](self._bias_table, np.int32(slot), row)

    def execute(
        self,
        bucket: Bucket,
        buffer: Int[np.ndarray, " words"],
        logprob_targets: Int[np.ndarray, " tokens"] | None = None,
    ) -> StepResult:
        """Dispatch one step and return at once. `buffer` must not be written to afterwards.

        logprob_targets  of each token of the step the prompt token whose logprob after it is
                         wanted, or -1; None if none is
        """
        self._kv_pool, self._token_pool, self._hidden, sampling = self._forward[bucket](
            self._leaves,
            self._kv_pool,
            self._token_pool,
            self._hidden,
            self._last_tokens,
            buffer,
        )
        program = self._sample[self._sampling_rows(bucket), bucket.blocks]
        rows, self._last_tokens = program(
            self._leaves, self._token_pool, self._bias_table, self._last_tokens, sampling
        )
        rows.copy_to_host_async()
        if logprob_targets is None:
            return StepResult(rows)
        # Now, since the next step overwrites the hidden states.
        targets = np.full(len(self._hidden), -1, np.int32)
        targets[: len(logprob_targets)] = logprob_targets
        return StepResult(rows, self._named["prompt_logprobs"](self._leaves, self._hidden, targets))

    def execute_decodes(self, bucket: Bucket, buffer: Int[np.ndarray, " words"]) -> StepResult:
        """Dispatch several decode steps of the same sequences (`step.decode_steps`), as `execute`
        does one step. The bucket is one of `decode_buckets`."""
        self._kv_pool, self._token_pool, rows, self._last_tokens = self._decode[bucket](
            self._leaves,
            self._kv_pool,
            self._token_pool,
            self._bias_table,
            self._last_tokens,
            buffer,
        )
        rows.copy_to_host_async()
        return StepResult(rows)
