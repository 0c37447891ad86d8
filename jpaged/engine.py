"""The engine: joins the scheduler (host) and the runner (device), one step at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Sized
from typing import Any

import jax

from jpaged.checkpoints import Checkpoint
from jpaged.config import EngineConfig
from jpaged.interrupts import deferred_interrupt
from jpaged.models import LlamaConfig
from jpaged.outputs import RequestOutput
from jpaged.request_builder import RequestBuilder, check_params
from jpaged.request_state import RequestState
from jpaged.runner.attention_backend import log_attention_backend, resolve_attention_backend
from jpaged.runner.buckets import make_buckets, table_width
from jpaged.runner.compilations import CompilationCounter
from jpaged.runner.kv_pool import log_pool
from jpaged.runner.model_runner import ModelRunner
from jpaged.runner.preemption_costs import PreemptionCosts
from jpaged.runner.programs import BATCH_INVARIANT_TILE
from jpaged.runner.weights import weights_dtype
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import POLICIES, Scheduler
from jpaged.stats import EngineStats
from jpaged.step_loop import StepLoop
from jpaged.validation import as_int

logger = logging.getLogger(__name__)

# Parameters that a generation_config.json may set, by our names.
_GENERATION_CONFIG_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}

# Steps after an arrival that are not planned ahead (`StepLoop.patience`). On a CPU the host takes a
# few per cent of a step: who asks for requests all at once hardly feels that some are not.
_CPU_PATIENCE = 16


def check_model(config: EngineConfig, model: LlamaConfig, dtype: Any) -> None:
    """Raise what `Engine` would raise for a model of this config and dtype, before it is loaded.

    ValueError if sequences are to be longer than the model was made for, NotImplementedError if the
    attention backend that was asked for by name cannot serve it on this device.
    """
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len must be at most the model's {limit} positions, "
            f"got {config.max_model_len}"
        )
    resolve_attention_backend(
        config.attention_backend,
        model,
        dtype,
        config.block_size,
        batch_invariant=config.batch_invariant,
    )


def _checked_arrival_time(value: float | None) -> float:
    if value is None:
        return time.monotonic()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"arrival_time must be a number or None, got {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"arrival_time must be finite, got {value!r}")
    return value


class Engine:
    """Serves requests from one paged KV pool, with continuous batching.

    Add requests, then call `step` until `has_unfinished_requests` is false. Single-threaded: a call
    from another thread while one is under way raises RuntimeError. Call `warmup` once before the
    first step.

    Attributes:
        config: the EngineConfig, as given.
        tokenizer: the checkpoint's tokenizer, or None.
        vocab_size: token ids are 0 .. vocab_size - 1.
        max_model_len: most tokens of a sequence, prompt and generated together.
        scheduler, runner: the two halves; for reading.
        after_step: called, without arguments, at the end of every step that computed something or
            brought tokens.
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        """Allocates the KV pool.

        Raises ValueError if config.max_model_len exceeds what the model was made for, or memory
        leaves no room for a pool, or weights are quantised for another backend or device than reads
        them so, and NotImplementedError if config.attention_backend cannot serve the model on this
        device.
        """
        model = checkpoint.config
        leaf = jax.tree.leaves(checkpoint.params)[0]
        dtype, platform = weights_dtype(checkpoint.params), next(iter(leaf.devices())).platform
        self.config = config
        self.tokenizer = checkpoint.tokenizer
        self.vocab_size = model.vocab_size
        check_model(config, model, dtype)
        log_attention_backend(
            config.attention_backend,
            model,
            dtype,
            config.block_size,
            batch_invariant=config.batch_invariant,
        )
        row_tile = BATCH_INVARIANT_TILE if config.batch_invariant else None
        self.max_model_len = config.max_model_len or model.max_position_embeddings
        self._generation_config = checkpoint.generation_config
        self.runner = ModelRunner(
            checkpoint.graphdef,
            checkpoint.params,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            hidden_size=model.hidden_size,
            vocab_size=model.vocab_size,
            buckets=make_buckets(
                config.max_num_batched_tokens,
                min(config.max_num_seqs, config.max_num_batched_tokens),
                table_width(self.max_model_len, config.block_size),
                row_tile=row_tile,
            ),
            row_tile=row_tile,
            max_decode_steps=config.max_decode_steps,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            num_slots=min(config.max_num_seqs, config.max_num_batched_tokens),
            gpu_memory_utilization=config.gpu_memory_utilization,
            swap_space_gib=0.0 if config.preemption_mode == "recompute" else config.swap_space_gib,
            backend=config.attention_backend,
        )
        log_pool(
            self.runner.num_blocks,
            config.block_size,
            self.max_model_len,
            self.runner.bytes_per_block,
        )
        self.scheduler = Scheduler(
            num_blocks=self.runner.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            num_swap_blocks=self.runner.swap_pool.num_blocks,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=POLICIES[config.scheduling_policy](),
            prefers_swap=self._prefers_swap,
            max_decode_steps=config.max_decode_steps,
        )
        patience = _CPU_PATIENCE if platform == "cpu" else 0
        self._loop = StepLoop(
            self.runner, self.scheduler, overlap=config.overlap, patience=patience
        )
        self._requests = RequestBuilder(
            self.scheduler,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=checkpoint.eos_token_ids,
            tokenizer=self.tokenizer,
            seed=config.seed,
        )
        self.after_step: list[Callable[[], None]] = []
        self._lock = threading.RLock()
        self._tracked: dict[str, RequestState] = {}  # the unfinished requests
        self._kept: dict[str, RequestState] = {}  # finished ones that can be forked
        self._pending_outputs: list[RequestOutput] = []  # for the next `step` to return
        self._requests_added = 0
        self._last_arrival = -math.inf
        self._warmup_seconds = 0.0
        self._compilations = CompilationCounter()

    def warmup(self, *, progress: bool = True) -> float:
        """Compiles every bucket, with a progress bar on standard error; returns the seconds."""
        self._warmup_seconds = self.runner.compile(progress=progress)
        if self.config.preemption_mode == "auto" and self.runner.swap_pool.num_blocks:
            self._loop.costs = PreemptionCosts(self.runner.measure_link())
        logger.info("compiled %d buckets in %.1f s", len(self.runner.buckets), self._warmup_seconds)
        return self._warmup_seconds

    def _prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether a preempted request's blocks are saved rather than its tokens computed again."""
        costs = self._loop.costs
        if costs is None:
            return self.config.preemption_mode == "swap"
        return costs.prefers_swap(num_blocks * self.runner.bytes_per_swapped_block, num_tokens)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for, over SamplingParams' defaults.

        Raises ValueError or TypeError if the file asks for what SamplingParams does not allow.
        """
        given = {
            ours: self._generation_config[theirs]
            for theirs, ours in _GENERATION_CONFIG_NAMES.items()
            if self._generation_config.get(theirs) is not None
        }
        if self._generation_config.get("do_sample") is False:
            given["temperature"] = 0.0
        try:
            return SamplingParams(**given)
        except (ValueError, TypeError) as error:
            raise type(error)(f"generation_config.json: {error}") from error

    def validate_request(
        self, prompt_token_ids: Sized[int], sampling_params: SamplingParams
    ) -> None:
        """Raise what `add_request` would raise for these, without queueing anything."""
        self._requests.check(prompt_token_ids, check_params(sampling_params))

    def add_request(
        self,
        prompt_token_ids: Sized[int],
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
        prompt: str | None = None,
        stream: bool = True,
        keep: bool = False,
    ) -> str:
        """Queue a request; returns its id.

        request_id    a name that no unfinished request has; made up if None
        arrival_time  seconds, on any one clock: earlier requests run first; now if None
        prompt        the text of the prompt, to be handed back in the outputs
        stream        whether `step` returns the request whenever it has a new token, or only once
                      it is finished
        keep          whether a finished request can still be forked, until `release`: its blocks
                      stay while nobody else needs them

        Raises ValueError or TypeError, naming the argument, if the request is malformed or could
        never fit in the pool; then nothing is queued.
        """
        check_params(sampling_params)
        if keep and (sampling_params.num_sequences > 1 or sampling_params.beam_width):
            raise ValueError("keep=True is for requests of one sequence: others cannot be forked")
        tracked = self._requests.build(
            prompt_token_ids,
            sampling_params,
            request_id=self._new_id(request_id),
            arrival_time=_checked_arrival_time(arrival_time),
            number=self._requests_added,
            prompt=prompt,
            stream=stream,
            keep=keep,
        )
        with self._alone(), deferred_interrupt():
            self.scheduler.add(tracked.request)
            self._track(tracked)
        return tracked.request.request_id

    def _track(self, tracked: RequestState) -> None:
        self._loop.arrived()
        self._tracked[tracked.request.request_id] = tracked
        self._last_arrival = max(self._last_arrival, tracked.request.arrival_time)
        self._requests_added += 1

    def _new_id(self, request_id: str | None) -> str:
        """The name asked for, if it is free, or a free one."""
        if request_id is None:
            # A caller may have used a name of the same form.
            first = self._requests_added
            names = map(str, itertools.count(first))
            return next(name for name in names if self.scheduler.get(name) is None)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string or None, got {request_id!r}")
        if self.scheduler.get(request_id) is not None:
            raise ValueError(f"request_id must be new, {request_id!r} is unfinished or kept")
        return request_id

    def abort(self, request_id: str, *, report: bool = True) -> bool:
        """End a request at any point and give back its blocks; False if it is not unfinished.

        The next `step` returns its output, with finish_reason "abort", unless `report` is False.
        """
        with self._alone(), deferred_interrupt():
            if not self.scheduler.abort(request_id):
                return False
            tracked = self._tracked.pop(request_id)
            if report:
                self._pending_outputs.append(tracked.output())
        return True

    def has_request(self, request_id: str) -> bool:
        """Whether a request of this name is unfinished."""
        return request_id in self._tracked

    def fork(
        self,
        request_id: str,
        n: int = 1,
        sampling_params: SamplingParams | None = None,
        *,
        keep: bool = False,
    ) -> list[str]:
        """Branch a request at its current token into n more requests, which share its blocks.

        A branch is a request of its own: its prompt is the parent's prompt and everything that the
        parent has generated so far, its outputs are what it generates itself. The parent, of one
        sequence, must be unfinished, or finished and added with keep=True. It goes on unharmed.

        sampling_params  of the branches; None takes the parent's (without prompt_logprobs), for up
                         to max_tokens more tokens. Branches of one seed draw different samples.
        keep             whether the branches can be forked when they are finished, as `add_request`
                         has it

        Returns the ids of the new requests. Raises ValueError if there is no such request, it has
        several sequences, or a branch would not fit in max_model_len or the pool.
        """
        n = as_int("n", n, allowed="an int >= 1", low=1)
        parent = self.scheduler.get(request_id) if isinstance(request_id, str) else None
        if parent is None:
            raise ValueError(
                f"request_id must name an unfinished or kept request, got {request_id!r}"
            )
        if len(parent.sequences) > 1 or parent.beams is not None:
            raise ValueError(f"request {request_id!r} has several sequences and cannot be forked")
        if sampling_params is None:
            sampling_params = dataclasses.replace(parent.sampling_params, prompt_logprobs=None)
        elif check_params(sampling_params).prompt_logprobs is not None:
            raise ValueError("prompt_logprobs must be None: a branch does not compute its prompt")
        if sampling_params.cache_salt != parent.sampling_params.cache_salt:
            raise ValueError(
                f"cache_salt must be the parent's {parent.sampling_params.cache_salt!r}, whose "
                f"blocks the branches share, got {sampling_params.cache_salt!r}"
            )
        if sampling_params.num_sequences > 1:
            raise ValueError("n, best_of and beam_width must ask for one sequence: fork with n > 1")
        sequence = parent.sequences[0]
        state = self._tracked.get(request_id) or self._kept[request_id]
        children: list[RequestState] = []
        for i in range(n):
            child = self._requests.build(
                sequence.token_ids[: sequence.num_tokens].tolist(),
                sampling_params,
                request_id=self._new_branch_id(request_id, children),
                # Who goes on from what is finished stands behind those who came meanwhile.
                arrival_time=self._last_arrival if parent.finished else parent.arrival_time,
                number=self._requests_added + i,
                prompt=state.text_so_far(),
                stream=state.stream,
                keep=keep,
                first_sample_index=next(state.branch_numbers),
            )
            child.branch_numbers = state.branch_numbers
            children.append(child)
        with self._alone(), deferred_interrupt():
            self.scheduler.fork(request_id, [child.request for child in children])
            for child in children:
                self._track(child)
        return [child.request.request_id for child in children]

    def _new_branch_id(self, parent_id: str, siblings: list[RequestState]) -> str:
        taken = {sibling.request.request_id for sibling in siblings}
        taken.update(output.request_id for output in self._pending_outputs)  # aborted ones
        names = (f"{parent_id}.{i}" for i in itertools.count(1))
        return next(n for n in names if n not in taken and self.scheduler.get(n) is None)

    def release(self, request_id: str) -> bool:
        """Give back the blocks of a finished request that was kept; False if there is none."""
        with self._alone(), deferred_interrupt():
            self._kept.pop(request_id, None)
            return self.scheduler.release(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to compute."""
        return self.scheduler.has_unfinished

    def block_map(self) -> dict[int, list[str]]:
        """Block id -> ids of the requests that hold it, for every block in use."""
        owners: dict[int, list[str]] = {}
        manager = self.scheduler.block_manager
        for request in (*self.scheduler.running, *self.scheduler.kept):
            held: set[int] = set()
            for sequence in request.sequences:
                if sequence.slot >= 0:
                    held.update(manager.block_table(sequence.slot).tolist())
            for block in held:
                owners.setdefault(block, []).append(request.request_id)
        return owners

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the requests that changed (those added with stream=False only
        once they are finished), in no particular order. Without unfinished requests it computes
        nothing.

        With config.overlap it returns what the step before this one has brought, while the device
        works on this one."""
        with self._alone():
            if self.scheduler.has_unfinished or not self._loop.is_idle:
                # Ctrl-C waits for the end of the step: memory is taken, the pool donated and
                # tokens noted down in it, and a half of that would be worse than a late answer.
                with deferred_interrupt(), self._compilations:
                    self._compute_step()
                    for call in self.after_step:
                        call()
            outputs, self._pending_outputs = self._pending_outputs, []
            return outputs

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a second thread rather than let it spoil the books."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("an engine serves one thread: another is inside it now")
        try:
            yield
        finally:
            self._lock.release()

    def _compute_step(self) -> None:
        for tracked in self._loop.step(self._tracked):
            request_id = tracked.request.request_id
            if self._tracked.get(request_id) is not tracked:
                continue  # aborted since, which has been reported
            if tracked.request.finished:
                del self._tracked[request_id]
                if tracked.request.keep:
                    self._kept[request_id] = tracked
            if tracked.request.finished or tracked.reports_progress:
                self._pending_outputs.append(tracked.output())

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        return EngineStats(
            num_blocks=manager.num_blocks,
            blocks_used=manager.num_used_blocks,
            blocks_shared=manager.num_shared_blocks,
            blocks_cached=manager.num_cached_blocks,
            blocks_free=manager.num_free_blocks - manager.num_cached_blocks,
            slots_used_share=scheduler.slots_used_share,
            preemptions_recompute=scheduler.memory.preemptions_recompute,
            preemptions_swap=scheduler.memory.preemptions_swap,
            swapped_out_bytes=self.runner.swap_pool.swapped_out_bytes,
            copy_on_write_blocks=manager.copy_on_write_blocks,
            prefix_query_tokens=manager.prefix_query_tokens,
            prefix_cached_tokens=manager.prefix_hit_tokens,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            steps=scheduler.steps,
            num_buckets=len(self.runner.buckets),
            warmup_seconds=self._warmup_seconds,
            compilations_after_warmup=self._compilations.count,
            padded_tokens=self._loop.padded_tokens,
        )
