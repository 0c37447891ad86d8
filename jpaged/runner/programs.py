"""The compiled programs that steps run: what each takes, and compiling them all."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import ShapeDtypeStruct, lax
from jaxtyping import Array
from tqdm import tqdm

from jpaged.runner.batch import PARAMETERS, buffer_size, unpack
from jpaged.runner.block_moves import BlockMoves
from jpaged.runner.buckets import Bucket, decode_buckets
from jpaged.runner.compilations import compiler_options
from jpaged.runner.step import Sampling, decode_steps, forward, prompt_logprobs, sample
from jpaged.runner.weights import weights_dtype

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


def _ints(*shape: int) -> Any:
    return ShapeDtypeStruct(shape, jnp.int32)


class Programs:
    """The compiled programs of a model: for each bucket one for the forward pass, and two that the
    buckets share (each takes as long to compile as a forward pass, and does not depend on the
    number of tokens): one for sampling, one for the logprobs of prompts. If several decode steps
    may be asked for in one call, there is one more for each bucket that decodes need, which does
    forward pass and sampling in a loop.

    Attributes:
        hidden, bias_table, last_tokens: shape and dtype of what the programs keep from step to
            step, beside the pools: hidden states [T of the largest bucket, E], logit bias by slot
            [slots, V], the token sampled last in each slot [slots].
        forward, decode: by bucket, once `compile` has made them.
    """

    def __init__(
        self,
        graphdef: Any,
        params: Any,
        *,
        device: jax.Device,
        backend: str,
        buckets: list[Bucket],
        hidden_size: int,
        vocab_size: int,
        num_slots: int,
        block_size: int,
        pool_axes: tuple[int, int, int],
        pool_dtype: jnp.dtype,
        row_tile: int | None,
        max_decode_steps: int,
    ) -> None:
        """As `ModelRunner`; params are in the form for the device, pool_axes are L, K and D."""
        self._graphdef = graphdef
        leaves, self._treedef = jax.tree.flatten(params)
        self._leaves = [ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
        self._dtype = weights_dtype(params)
        self._device = device
        self._backend = backend
        self._buckets = buckets
        self._block_size = block_size
        self._pool_axes, self._pool_dtype = pool_axes, pool_dtype
        self._row_tile = row_tile
        self._max_decode_steps = max_decode_steps
        self._tile = row_tile or (_CPU_TILE if device.platform == "cpu" else num_slots)
        self.hidden = ShapeDtypeStruct((buckets[-1].tokens, hidden_size), self._dtype)
        self.bias_table = ShapeDtypeStruct((num_slots, vocab_size), jnp.float32)
        self.last_tokens = _ints(num_slots)
        self.forward: dict[Bucket, jax.stages.Compiled] = {}
        self.decode: dict[Bucket, jax.stages.Compiled] = {}
        self._sample: dict[tuple[int, int], jax.stages.Compiled] = {}  # by rows and table width
        self._named: dict[str, jax.stages.Compiled] = {}  # the two that there is one of

    def sample(self, bucket: Bucket) -> jax.stages.Compiled:
        """The sampling program that a bucket uses."""
        return self._sample[self._sampling_rows(bucket), bucket.blocks]

    @property
    def prompt_logprobs(self) -> jax.stages.Compiled:
        """The program of the prompts' logprobs."""
        return self._named["prompt_logprobs"]

    @property
    def set_bias(self) -> jax.stages.Compiled:
        """The program that writes a row of the bias table."""
        return self._named["set_bias"]

    def temporary_bytes(self) -> int:
        """Of the program that needs most: compiles those of the largest bucket. It does not depend
        on the pool's size, since the pool is updated in place."""
        largest = self._buckets[-1]
        programs = [
            self.compile_forward(largest, num_blocks=2),
            self._compile_sample(self._sampling_rows(largest), largest.blocks, num_blocks=2),
            self._compile_prompt_logprobs(),
        ]
        if self._max_decode_steps > 1:
            programs.append(self._compile_decode(decode_buckets(self._buckets)[-1], num_blocks=2))
        return max(_temporary_bytes(program) for program in programs)

    def compile(self, num_blocks: int, moves: BlockMoves, *, progress: bool) -> float:
        """Compiles everything, `moves` too, in as many threads as there are cores; returns the
        seconds taken.

        num_blocks  of the pool
        progress    draw a bar on standard error
        """
        began = time.perf_counter()
        with _without_collections():
            self._compile_all(num_blocks, moves, progress)
        return time.perf_counter() - began

    def _compile_all(self, num_blocks: int, moves: BlockMoves, progress: bool) -> None:
        # The largest first: they take longest, so they should not be the last ones running.
        jobs: dict[Future, tuple[dict, Any]] = {}
        threads = min(8, os.cpu_count() or 1)
        with (
            ThreadPoolExecutor(threads) as pool,
            tqdm(desc="Compiling", unit="program", disable=not progress) as bar,
        ):
            for move in moves.keys():  # noqa: SIM118 (a method)
                job = pool.submit(moves.compile_program, *move)
                jobs[job] = moves.programs, move
            jobs[pool.submit(self._compile_set_bias)] = self._named, "set_bias"
            jobs[pool.submit(self._compile_prompt_logprobs)] = self._named, "prompt_logprobs"
            for key in sorted({(self._sampling_rows(b), b.blocks) for b in self._buckets}):
                jobs[pool.submit(self._compile_sample, *key, num_blocks)] = self._sample, key
            if self._max_decode_steps > 1:
                for bucket in reversed(decode_buckets(self._buckets)):
                    job = pool.submit(self._compile_decode, bucket, num_blocks)
                    jobs[job] = self.decode, bucket
            for bucket in reversed(self._buckets):
                job = pool.submit(self.compile_forward, bucket, num_blocks)
                jobs[job] = self.forward, bucket
            bar.reset(total=len(jobs))
            try:
                for job in as_completed(jobs):
                    programs, key = jobs[job]
                    programs[key] = job.result()
                    bar.update()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _sampling_rows(self, bucket: Bucket) -> int:
        """Rows of the sampling program that a bucket uses. Where results must not depend on the
        batch there is one program for all."""
        most = self._buckets[-1].sequences
        fewer = () if self._row_tile else _SAMPLING_ROWS.get(self._device.platform, ())
        return min(rows for rows in (*fewer, most) if bucket.sequences <= rows)

    def _model(self, leaves: list[Array]) -> nnx.Module:
        return nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves))

    def compile_forward(self, bucket: Bucket, num_blocks: int) -> jax.stages.Compiled:
        """The forward program of a bucket for a pool of so many blocks; not kept."""
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
            self._leaves,
            *self._pool_shapes(num_blocks),
            self.hidden,
            self.last_tokens,
            _ints(buffer_size(bucket)),
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
            self._leaves,
            *self._pool_shapes(num_blocks),
            self.bias_table,
            self.last_tokens,
            _ints(buffer_size(bucket)),
        )
        return self._compiled(jax.jit(run, donate_argnums=(1, 2)), *shapes)

    def _pool_shapes(self, num_blocks: int) -> tuple[Any, Any]:
        L, K, D = self._pool_axes
        return (
            ShapeDtypeStruct((L, num_blocks, 2, K, self._block_size, D), self._pool_dtype),
            _ints(num_blocks, self._block_size),
        )

    def _compile_sample(self, rows: int, width: int, num_blocks: int) -> jax.stages.Compiled:
        def run(leaves, token_pool, bias_table, last_tokens, sampling):
            model = self._model(leaves)
            return sample(model, token_pool, bias_table, last_tokens, sampling, tile=self._tile)

        run.__name__ = f"sample_{rows}_{width}"
        hidden: Any = ShapeDtypeStruct((rows, self.hidden.shape[1]), self._dtype)
        shapes = (
            self._leaves,
            _ints(num_blocks, self._block_size),
            self.bias_table,
            self.last_tokens,
            Sampling(
                _ints(), hidden, _ints(rows), _ints(rows), _ints(rows, len(PARAMETERS)),
                _ints(rows, width),
            ),
        )  # fmt: skip
        return self._compiled(jax.jit(run), *shapes)

    def _compile_prompt_logprobs(self) -> jax.stages.Compiled:
        def run(leaves, hidden, targets):
            return prompt_logprobs(self._model(leaves), hidden, targets, tile=self._tile)

        run.__name__ = "prompt_logprobs"
        shapes = (
            self._leaves,
            self.hidden,
            _ints(*self.hidden.shape[:1]),
        )
        return self._compiled(jax.jit(run), *shapes)

    def _compiled(self, program: Any, *shapes: Any) -> jax.stages.Compiled:
        # The kernels are chosen while tracing, by the default device, which is a thread's own.
        with jax.default_device(self._device):
            return program.lower(*shapes).compile(compiler_options(self._device.platform))

    def _compile_set_bias(self) -> jax.stages.Compiled:
        def set_bias(table, slot, row):
            return lax.dynamic_update_slice(table, row[None], (slot, 0))

        shapes = (
            self.bias_table,
            _ints(),
            ShapeDtypeStruct(self.bias_table.shape[1:], jnp.float32),
        )
        return self._compiled(jax.jit(set_bias, donate_argnums=0), *shapes)
