"""Runs steps on the device: holds weights and pools, compiles every bucket, executes batches."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.runner.block_moves import BlockMoves
from jpaged.runner.buckets import Bucket
from jpaged.runner.kv_pool import (
    allocate_pool,
    available_pool_bytes,
    block_bytes,
    blocks_in,
    host_bytes_left,
    storage_dtype,
)
from jpaged.runner.programs import Programs
from jpaged.runner.step_result import StepResult
from jpaged.runner.swap_pool import SwapPool, measure_link, swap_blocks_in
from jpaged.runner.weights import for_device, weights_dtype


def _zeros(like: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(like.shape, like.dtype)


def _is_usable(*arrays: Array) -> bool:
    try:
        jax.block_until_ready(arrays)
    except Exception:  # whatever made the step fail
        return False
    return True


class ModelRunner:
    """Weights, pools and compiled programs (`Programs`).

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
        leaf = jax.tree.leaves(params)[0]
        self.device = next(iter(leaf.devices()))
        self._pool_dtype = storage_dtype(weights_dtype(params), self.device.platform)
        self._pool_axes = (num_layers, num_kv_heads, head_dim)
        self.bytes_per_block = block_bytes(
            num_layers, num_kv_heads, block_size, head_dim, self._pool_dtype
        )
        # Before weights are copied into another form: the first one goes when this is made.
        left = host_bytes_left() if self.device.platform == "cpu" else math.inf
        params = for_device(params, self.device, backend)
        # Leaves and not a module, since walking a module costs milliseconds a call.
        self._leaves = jax.tree.leaves(params)
        self._programs = Programs(
            graphdef,
            params,
            device=self.device,
            backend=backend,
            buckets=buckets,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            num_slots=num_slots,
            block_size=block_size,
            pool_axes=self._pool_axes,
            pool_dtype=self._pool_dtype,
            row_tile=row_tile,
            max_decode_steps=max_decode_steps,
        )
        self._bias_table = _zeros(self._programs.bias_table)
        self._last_tokens = _zeros(self._programs.last_tokens)
        self._hidden = _zeros(self._programs.hidden)
        if num_blocks is None:
            on_cpu = self.device.platform == "cpu"
            temporary = 0 if on_cpu else self._programs.temporary_bytes()
            available = available_pool_bytes(self.device, temporary, gpu_memory_utilization)
            token_bytes = 4 * block_size  # of the token pool
            num_blocks = blocks_in(available, self.bytes_per_block + token_bytes, block_size)
        elif (size := num_blocks * self.bytes_per_block) > left:
            # A CPU's pool takes memory as it fills: one that is larger than what there is would end
            # the process, later on.
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
        L, K, D = self._pool_axes
        try:
            return allocate_pool(L, self.num_blocks, K, self.block_size, D, self._pool_dtype)
        except jax.errors.JaxRuntimeError as error:
            size = self.num_blocks * self.bytes_per_block
            raise ValueError(
                f"num_blocks={self.num_blocks} asks for a KV pool of {size} bytes, "
                "which cannot be allocated"
            ) from error

    def restore_pools(self) -> None:
        """Allocate anew, and empty, what a failed step has lost.

        Its arguments were donated; and what a step returns whose failure shows only later holds
        that failure, and would hand it on to all steps to come.
        """
        if not _is_usable(self._kv_pool, self._token_pool):
            self._kv_pool, self._token_pool = self._new_pools()
        if not _is_usable(self._bias_table):
            self._bias_table = _zeros(self._programs.bias_table)
        if not _is_usable(self._hidden):
            self._hidden = _zeros(self._programs.hidden)
        # Nobody is to be fed from it: all that ran has lost its memory.
        self._last_tokens = _zeros(self._programs.last_tokens)

    def programs(self) -> dict[Bucket, jax.stages.Compiled]:
        """The compiled forward program of each bucket (for its memory analysis, say)."""
        return dict(self._programs.forward)

    def decode_programs(self) -> dict[Bucket, jax.stages.Compiled]:
        """The compiled program of several decode steps of each bucket that has one."""
        return dict(self._programs.decode)

    def compile(self, *, progress: bool = True) -> float:
        """Compiles every bucket, in as many threads as there are cores; returns the seconds taken.

        progress  draw a bar on standard error
        """
        return self._programs.compile(self.num_blocks, self._moves, progress=progress)

    def set_bias(self, slot: int, row: Float[np.ndarray, " V"]) -> None:
        """Put a request's logit bias into its row of the bias table: once a request, not a step."""
        self._bias_table = self._programs.set_bias(self._bias_table, np.int32(slot), row)

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
        self._kv_pool, self._token_pool, self._hidden, sampling = self._programs.forward[bucket](
            self._leaves,
            self._kv_pool,
            self._token_pool,
            self._hidden,
            self._last_tokens,
            buffer,
        )
        rows, self._last_tokens = self._programs.sample(bucket)(
            self._leaves, self._token_pool, self._bias_table, self._last_tokens, sampling
        )
        rows.copy_to_host_async()
        if logprob_targets is None:
            return StepResult(rows)
        # Now, since the next step overwrites the hidden states.
        targets = np.full(len(self._hidden), -1, np.int32)
        targets[: len(logprob_targets)] = logprob_targets
        return StepResult(rows, self._programs.prompt_logprobs(self._leaves, self._hidden, targets))

    def execute_decodes(self, bucket: Bucket, buffer: Int[np.ndarray, " words"]) -> StepResult:
        """Dispatch several decode steps of the same sequences (`step.decode_steps`), as `execute`
        does one step. The bucket is one of `decode_buckets`."""
        self._kv_pool, self._token_pool, rows, self._last_tokens = self._programs.decode[bucket](
            self._leaves,
            self._kv_pool,
            self._token_pool,
            self._bias_table,
            self._last_tokens,
            buffer,
        )
        rows.copy_to_host_async()
        return StepResult(rows)
