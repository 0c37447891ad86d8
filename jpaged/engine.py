"""The engine: joins the scheduler (host) and the runner (device), one step at a time."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator
from collections.abc import Sequence as Sized
from typing import Any

import jax
import numpy as np

from jpaged.checkpoints import Checkpoint
from jpaged.config import EngineConfig
from jpaged.detokenizer import Detokenizer
from jpaged.interrupts import deferred_interrupt
from jpaged.models import LlamaConfig
from jpaged.outputs import RequestOutput
from jpaged.request_state import RequestState
from jpaged.runner.attention_backend import log_attention_backend, resolve_attention_backend
from jpaged.runner.batch import PARAMETERS, build_batch, pack_parameters
from jpaged.runner.buckets import choose_bucket, make_buckets, table_width
from jpaged.runner.compilations import CompilationCounter
from jpaged.runner.kv_pool import log_pool
from jpaged.runner.model_runner import ModelRunner, StepResult
from jpaged.runner.sampler import MASKED_LOGIT
from jpaged.sampling_params import MAX_SEED, SamplingParams
from jpaged.scheduling import Request, Scheduler, Sequence, StepPlan
from jpaged.stats import EngineStats
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
    resolve_attention_backend(config.attention_backend, model, dtype, config.block_size)


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
    """

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig) -> None:
        """Allocates the KV pool.

        Raises ValueError if config.max_model_len exceeds what the model was made for, or memory
        leaves no room for a pool, and NotImplementedError if config.attention_backend cannot serve
        the model on this device.
        """
        model = checkpoint.config
        dtype = jax.tree.leaves(checkpoint.params)[0].dtype
        self.config = config
        self.tokenizer = checkpoint.tokenizer
        self.vocab_size = model.vocab_size
        check_model(config, model, dtype)
        log_attention_backend(config.attention_backend, model, dtype, config.block_size)
        self.max_model_len = config.max_model_len or model.max_position_embeddings
        self._eos_token_ids = checkpoint.eos_token_ids
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
            ),
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            num_slots=min(config.max_num_seqs, config.max_num_batched_tokens),
            gpu_memory_utilization=config.gpu_memory_utilization,
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
        )
        # int32 [slots, P]: sampling parameters of the request in each slot.
        slots = len(self.scheduler.block_manager.tables)
        self._parameters = np.zeros((slots, len(PARAMETERS)), np.int32)
        self._lock = threading.RLock()
        self._tracked: dict[str, RequestState] = {}
        self._pending_outputs: list[RequestOutput] = []  # for the next `step` to return
        self._requests_added = 0
        self._padded_tokens = 0
        self._warmup_seconds = 0.0
        self._compilations = CompilationCounter()

    def warmup(self, *, progress: bool = True) -> float:
        """Compiles every bucket, with a progress bar on standard error; returns the seconds."""
        self._warmup_seconds = self.runner.compile(progress=progress)
        logger.info("compiled %d buckets in %.1f s", len(self.runner.buckets), self._warmup_seconds)
        return self._warmup_seconds

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
        self._validated(prompt_token_ids, sampling_params)

    def _validated(
        self, prompt_token_ids: Sized[int], sampling_params: SamplingParams
    ) -> list[int]:
        """The prompt as plain ints, once it and the parameters were found good."""
        if not isinstance(sampling_params, SamplingParams):
            raise TypeError(
                f"sampling_params must be a SamplingParams, got {sampling_params!r} of type "
                f"{type(sampling_params).__name__}"
            )
        token_ids = self._checked_prompt(prompt_token_ids)
        sampling_params.check_against(self.vocab_size)
        if sampling_params.stop and self.tokenizer is None:
            raise ValueError(f"stop={sampling_params.stop!r} needs a tokenizer, there is none")
        self.scheduler.check_fits(self._max_total_tokens(len(token_ids), sampling_params))
        return token_ids

    def _checked_prompt(self, prompt_token_ids: Sized[int]) -> list[int]:
        if isinstance(prompt_token_ids, str | bytes) or not hasattr(prompt_token_ids, "__iter__"):
            raise TypeError(
                "prompt_token_ids must be a list of token ids, got "
                f"{prompt_token_ids!r} of type {type(prompt_token_ids).__name__}"
            )
        token_ids = list(prompt_token_ids)
        # The loop below names the culprit; this spares good prompts of plain ints from it.
        if set(map(type, token_ids)) != {int} or not (
            min(token_ids) >= 0 and max(token_ids) < self.vocab_size
        ):
            token_ids = [self._checked_token(*item) for item in enumerate(token_ids)]
        if not token_ids:
            raise ValueError("prompt_token_ids must hold at least one token, got none")
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"prompt_token_ids must be shorter than max_model_len={self.max_model_len}, to "
                f"leave room for one token, got {len(token_ids)} tokens"
            )
        return token_ids

    def _checked_token(self, place: int, token: object) -> int:
        name = f"prompt_token_ids[{place}]"
        allowed = f"an int in [0, {self.vocab_size})"
        return as_int(name, token, allowed=allowed, low=0, high=self.vocab_size - 1)

    def _max_total_tokens(self, prompt_length: int, sampling_params: SamplingParams) -> int:
        return min(prompt_length + sampling_params.max_tokens, self.max_model_len)

    def add_request(
        self,
        prompt_token_ids: Sized[int],
        sampling_params: SamplingParams,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
        prompt: str | None = None,
        stream: bool = True,
    ) -> str:
        """Queue a request; returns its id.

        request_id    a name that no unfinished request has; made up if None
        arrival_time  seconds, on any one clock: earlier requests run first; now if None
        prompt        the text of the prompt, to be handed back in the outputs
        stream        whether `step` returns the request whenever it has a new token, or only once
                      it is finished

        Raises ValueError or TypeError, naming the argument, if the request is malformed or could
        never fit in the pool; then nothing is queued.
        """
        token_ids = self._validated(prompt_token_ids, sampling_params)
        number = self._requests_added
        if request_id is None:
            # A caller may have used a name of the same form.
            request_id = next(
                name
                for name in map(str, range(number, number + len(self._tracked) + 1))
                if name not in self._tracked
            )
        elif not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string or None, got {request_id!r}")
        if request_id in self._tracked:
            raise ValueError(f"request_id must be new, {request_id!r} is unfinished")
        if arrival_time is None:
            arrival_time = time.monotonic()
        elif isinstance(arrival_time, bool) or not isinstance(arrival_time, int | float):
            raise TypeError(f"arrival_time must be a number or None, got {arrival_time!r}")
        elif not math.isfinite(arrival_time):
            raise ValueError(f"arrival_time must be finite, got {arrival_time!r}")
        stop_token_ids = set(sampling_params.stop_token_ids or ())
        if not sampling_params.ignore_eos:
            stop_token_ids.update(self._eos_token_ids)
        request = Request(
            request_id,
            number,
            token_ids,
            sampling_params,
            stop_token_ids=frozenset(stop_token_ids),
            max_total_tokens=self._max_total_tokens(len(token_ids), sampling_params),
            arrival_time=arrival_time,
        )
        seed = sampling_params.seed
        if seed is None:
            words = np.random.SeedSequence([self.config.seed, number]).generate_state(1, np.uint64)
            seed = int(words[0]) & MAX_SEED
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(
                self.tokenizer, sampling_params.stop or (), sampling_params.min_tokens
            )
        with self._alone(), deferred_interrupt():
            self.scheduler.add(request)
            self._tracked[request_id] = RequestState(request, prompt, stream, seed, detokenizer)
            self._requests_added += 1
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
        self, request_id: str, n: int, sampling_params: SamplingParams | None = None
    ) -> list[str]:
        """Branch a request, sharing its blocks. Not built yet."""
        raise NotImplementedError("fork (sharing of blocks between requests) is not built yet")

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to compute."""
        return self.scheduler.has_unfinished

    def block_map(self) -> dict[int, list[str]]:
        """Block id -> ids of the requests that hold it, for every block in use."""
        owners: dict[int, list[str]] = {}
        for request in self.scheduler.running:
            for sequence in request.sequences:
                for block in self.scheduler.block_manager.block_table(sequence.slot).tolist():
                    owners.setdefault(block, []).append(request.request_id)
        return owners

    def step(self) -> list[RequestOutput]:
        """Compute one step; returns the requests that changed (those added with stream=False only
        once they are finished), in no particular order. Without unfinished requests it computes
        nothing."""
        with self._alone():
            if self.scheduler.has_unfinished:
                # Ctrl-C waits for the end of the step: memory is taken, the pool donated and
                # tokens noted down in it, and a half of that would be worse than a late answer.
                with deferred_interrupt(), self._compilations:
                    self._compute_step()
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
        try:
            plan = self.scheduler.schedule()
            result = self._execute(plan)
            tokens = result.tokens(plan.num_sampled)
        except BaseException:
            # A failing device: what was planned was not computed for certain. The running requests
            # lose their memory but no token, and go on with the next step.
            self.scheduler.abandon()
            self.runner.restore_pools()
            raise
        updated = self.scheduler.update(plan, tokens)
        self._collect_prompt_logprobs(plan, result)
        # The rows that sample come first, and `updated` keeps their order.
        row_of = {id(sequence): row for row, sequence in enumerate(plan.sequences)}
        for sequence in updated:
            self._advance(sequence, result, row_of[id(sequence)])

    def _execute(self, plan: StepPlan) -> StepResult:
        for sequence in plan.admitted:
            self._bind(self._tracked[sequence.request.request_id], sequence)
        context_lens = plan.starts + plan.lengths
        manager = self.scheduler.block_manager
        bucket = choose_bucket(
            self.runner.buckets,
            plan.num_tokens,
            len(plan.sequences),
            int(manager.blocks_for(context_lens.max())),
        )
        self._padded_tokens += bucket.tokens - plan.num_tokens
        buffer = build_batch(
            bucket,
            token_ids=[
                sequence.token_ids[start:end]
                for sequence, start, end in zip(
                    plan.sequences, plan.starts.tolist(), context_lens.tolist()
                )
            ],
            context_lens=context_lens,
            slots=plan.slots,
            num_sampled=plan.num_sampled,
            tables=manager.tables,
            parameters=self._parameters,
            logprob_targets=self._logprob_targets(plan),
        )
        return self.runner.execute(bucket, buffer)

    def _bind(self, tracked: RequestState, sequence: Sequence) -> None:
        """Write a request's sampling parameters into the rows of the slot that it was given."""
        params = tracked.request.sampling_params
        tracked.masks_stop_tokens = bool(
            tracked.request.stop_token_ids and sequence.num_output_tokens < params.min_tokens
        )
        has_bias = bool(params.logit_bias) or tracked.masks_stop_tokens
        self._parameters[sequence.slot] = pack_parameters(
            {
                "prompt_len": sequence.num_prompt_tokens,
                "temperature": min(params.temperature, 1e30),
                "top_k": min(params.top_k, self.vocab_size),
                "top_p": params.top_p,
                "min_p": params.min_p,
                "presence_penalty": params.presence_penalty,
                "frequency_penalty": params.frequency_penalty,
                # Beyond float32's range a penalty would turn logits into infinities and NaN.
                "repetition_penalty": min(max(params.repetition_penalty, 1e-30), 1e30),
                "seed_high": tracked.seed >> 32,
                "seed_low": tracked.seed,
                "sample_index": sequence.index,
                "has_bias": has_bias,
                "wants_logprobs": params.logprobs is not None,
            }
        )
        if has_bias:
            row = np.zeros(self.vocab_size, np.float32)
            for token, bias in (params.logit_bias or {}).items():
                row[token] = min(max(bias, MASKED_LOGIT), -MASKED_LOGIT)
            if tracked.masks_stop_tokens:
                row[list(tracked.request.stop_token_ids)] = MASKED_LOGIT
            self.runner.set_bias(sequence.slot, row)

    def _logprob_targets(self, plan: StepPlan) -> list[tuple[int, np.ndarray]]:
        """For rows that want prompt logprobs: each query token's next prompt token, or -1."""
        targets = []
        for row, sequence in enumerate(plan.sequences):
            if sequence.request.sampling_params.prompt_logprobs is None:
                continue
            start, length = int(plan.starts[row]), int(plan.lengths[row])
            known = len(self._tracked[sequence.request.request_id].prompt_logprobs)
            places = np.arange(start + 1, start + length + 1)
            wanted = (places >= known) & (places < sequence.num_prompt_tokens)
            if wanted.any():
                places = np.minimum(places, sequence.num_prompt_tokens - 1)
                targets.append((row, np.where(wanted, sequence.token_ids[places], -1)))
        return targets

    def _collect_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        ends = np.cumsum(plan.lengths)
        for row, sequence in enumerate(plan.sequences):
            best = sequence.request.sampling_params.prompt_logprobs
            tracked = self._tracked.get(sequence.request.request_id)
            if best is None or tracked is None:
                continue
            known = tracked.prompt_logprobs
            offset = int(ends[row] - plan.lengths[row] - plan.starts[row])
            end = min(int(plan.starts[row] + plan.lengths[row]), sequence.num_prompt_tokens - 1)
            for place in range(len(known), end + 1):
                known.append(result.prompt_logprobs(offset + place - 1, best))

    def _advance(self, sequence: Sequence, result: StepResult, row: int) -> None:
        """Take in a sequence's new token: logprobs, stop strings, and the output if it is due."""
        request = sequence.request
        tracked = self._tracked[request.request_id]
        params = request.sampling_params
        if params.logprobs is not None:
            chosen, logprobs = result.logprobs(row, params.logprobs)
            tracked.logprobs.append(logprobs)
            tracked.cumulative_logprob += chosen
        # The ban on stop tokens is over: write the row without it, unless the slot is gone.
        enough = sequence.num_output_tokens >= params.min_tokens
        if tracked.masks_stop_tokens and enough and sequence.slot >= 0:
            self._bind(tracked, sequence)
        if params.stop or tracked.stream:
            stop_string = tracked.detokenize()
            if stop_string is not None:
                self.scheduler.finish(sequence, "stop", stop_string)
        if request.finished:
            del self._tracked[request.request_id]
        if request.finished or tracked.stream:
            self._pending_outputs.append(tracked.output())

    def stats(self) -> EngineStats:
        """A snapshot of the engine's counters."""
        scheduler, manager = self.scheduler, self.scheduler.block_manager
        return EngineStats(
            num_blocks=manager.num_blocks,
            blocks_used=manager.num_used_blocks,
            blocks_shared=0,
            blocks_cached=0,
            blocks_free=manager.num_free_blocks,
            slots_used_share=scheduler.slots_used_share,
            preemptions_recompute=scheduler.preemptions_recompute,
            preemptions_swap=0,
            swapped_out_bytes=0,
            copy_on_write_blocks=0,
            prefix_cached_tokens=0,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            steps=scheduler.steps,
            num_buckets=len(self.runner.buckets),
            warmup_seconds=self._warmup_seconds,
            compilations_after_warmup=self._compilations.count,
            padded_tokens=self._padded_tokens,
        )
