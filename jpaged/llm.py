"""`LLM`: offline generation, the entry point for scripts and notebooks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jpaged.checkpoints import load_checkpoint
from jpaged.compilation_cache import enable_compilation_cache
from jpaged.config import EngineConfig
from jpaged.engine import Engine, check_model
from jpaged.outputs import RequestOutput
from jpaged.runner.weights import reads_quantised_weights
from jpaged.sampling_params import SamplingParams
from jpaged.validation import shown

if TYPE_CHECKING:
    from jpaged.stats import EngineStats

Prompt = str | Sequence[int] | np.ndarray | jax.Array
Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class PreparedRequest:
    """A request that was checked and can be run.

    Attributes:
        prompt: the prompt's text (a conversation's after the chat template); None if it was given
            as token ids.
        prompt_token_ids: the prompt's token ids.
        sampling_params: how to go on.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    sampling_params: SamplingParams


class LLM:
    """A model, its tokenizer and an engine, ready to generate: everything is compiled when made.

    Single-threaded, as the engine is. Requests that were added through `llm.engine` run along when
    `generate` or `stream` step the engine, but outputs of theirs that come up meanwhile are
    dropped: step the engine yourself or use these methods, not both at once. Streams and
    `generate` calls of one LLM may be interleaved.

    Args:
        model: a folder, a .gguf file, a hub id or an alias; by default the bundled SmolLM2.
        tokenizer: where to take the tokenizer from instead: a folder, a .gguf file or a hub id.
        dtype: "auto" (bfloat16 on a GPU, float32 on a CPU), "float32" or "bfloat16".
        others: see `EngineConfig`.

    Raises:
        ValueError, TypeError, NotImplementedError: a bad argument, before any weight is read.
        FileNotFoundError: no such model.
    """

    engine: Engine

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        dtype: Any = "auto",
        max_model_len: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        gpu_memory_utilization: float = 0.9,
        swap_space_gib: float = 4,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        enable_prefix_caching: bool = True,
        preemption_mode: str = "auto",
        scheduling_policy: str = "fcfs",
        tensor_parallel_size: int = 1,
        attention_backend: str = "auto",
        overlap: bool = True,
        max_decode_steps: int = 1,
        batch_invariant: bool = False,
        compilation_cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        model = _as_path("model", model)
        tokenizer = None if tokenizer is None else _as_path("tokenizer", tokenizer)
        config = EngineConfig(
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            gpu_memory_utilization=gpu_memory_utilization,
            swap_space_gib=swap_space_gib,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            preemption_mode=preemption_mode,
            scheduling_policy=scheduling_policy,
            tensor_parallel_size=tensor_parallel_size,
            attention_backend=attention_backend,
            overlap=overlap,
            max_decode_steps=max_decode_steps,
            batch_invariant=batch_invariant,
            compilation_cache_dir=compilation_cache_dir,
            seed=seed,
        )
        resolved_dtype = resolve_dtype(dtype)
        if config.compilation_cache_dir is not None:
            enable_compilation_cache(config.compilation_cache_dir)
        checkpoint = load_checkpoint(
            model,
            tokenizer=tokenizer,
            dtype=resolved_dtype,
            check_config=functools.partial(check_model, config, dtype=resolved_dtype),
            keep_quantised=reads_quantised_weights(attention_backend),
        )
        self._serve(Engine(checkpoint, config))
        self.engine.get_default_sampling_params()  # a bad generation_config.json shows now
        self.engine.warmup()

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """An LLM over an engine made by hand (with random weights, say) and warmed up."""
        llm = cls.__new__(cls)
        llm._serve(engine)
        return llm

    def _serve(self, engine: Engine) -> None:
        self.engine = engine
        self._request_numbers = itertools.count()
        # The latest output of every request of ours in flight. Whoever steps the engine files the
        # outputs of all, so that a stream misses nothing when another call steps in between.
        self._latest: dict[str, RequestOutput | None] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts; returns one output a prompt, in their order.

        Args:
            prompts: a string, a list of token ids (or a 1-d int array), or a list of either.
            sampling_params: one for all, or one a prompt; None takes the model's defaults.
            use_tqdm: show a progress bar on standard error.

        Raises:
            ValueError, TypeError, NotImplementedError: a bad prompt or parameter; the message names
                its index, and no request was queued.

        Whatever is raised, KeyboardInterrupt included, frees all blocks of this call's requests.
        """
        return self._prepare_and_run("prompts", self.prepare, prompts, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer conversations; as `generate`, after the tokenizer's chat template.

        Args:
            messages: a conversation, which is a list of {"role": ..., "content": ...}, or a list
                of conversations.
            sampling_params, use_tqdm: as for `generate`.
        """
        return self._prepare_and_run(
            "messages", self.prepare_chat, messages, sampling_params, use_tqdm
        )

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt; yields an output with the text and token ids so far as they come.

        The arguments are checked here, the request is queued at the first `next()`. Closing the
        iterator aborts the request and frees its blocks; leaving a `for` loop over it does so too,
        unless the iterator has another name (then `contextlib.closing` is the way).
        """
        return self.run_stream(self.prepare(prompt, sampling_params))

    def stats(self) -> EngineStats:
        """The engine's counters."""
        return self.engine.stats()

    def prepare(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> PreparedRequest:
        """Check one prompt (a string or token ids) and its parameters, for `run`.

        Raises:
            ValueError, TypeError, NotImplementedError: a bad prompt or parameter.
        """
        if isinstance(prompt, str):
            return self._prepared(prompt, self._encode(prompt), sampling_params)
        return self._prepared(None, _as_token_ids(prompt), sampling_params)

    def prepare_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None
    ) -> PreparedRequest:
        """Check one conversation and its parameters, for `run`.

        Raises:
            ValueError, TypeError, NotImplementedError: a bad conversation or parameter, or a
                tokenizer without a chat template.
        """
        conversation = _as_conversation(messages)
        tokenizer = self._tokenizer_for("a conversation")
        if not tokenizer.chat_template:
            raise ValueError(
                "messages need a tokenizer with a chat template, and this one has none"
            )
        try:
            prompt = tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # whatever the template, a program of the model's, raises
            why = " ".join(str(error).split())
            raise ValueError(f"messages must suit the model's chat template: {why}") from error
        # The template writes the special tokens itself.
        token_ids = self._encode(prompt, add_special_tokens=False)
        return self._prepared(prompt, token_ids, sampling_params)

    def run(
        self, requests: Sequence[PreparedRequest], *, use_tqdm: bool = False
    ) -> list[RequestOutput]:
        """Run prepared requests to their end; returns their outputs in order."""
        return list(self.iterate(requests, use_tqdm=use_tqdm))

    def iterate(
        self, requests: Sequence[PreparedRequest], *, use_tqdm: bool = False
    ) -> Iterator[RequestOutput]:
        """Run prepared requests together; yields their outputs in order, each as soon as it and
        those before it are finished. Closing the iterator aborts those that are not."""
        with contextlib.ExitStack() as stack:
            progress = None
            if use_tqdm:
                from tqdm import tqdm

                progress = stack.enter_context(tqdm(total=len(requests), unit="request"))
            request_ids = [stack.enter_context(self._in_flight()) for _ in requests]
            for request_id, request in zip(request_ids, requests, strict=True):
                self._add(request_id, request, stream=False)
            ours = set(request_ids)
            for request_id in request_ids:
                while not _is_finished(output := self._latest[request_id]):
                    finished = self._step()
                    self._check_known(request_id)
                    if progress is not None:
                        progress.update(len(ours & finished))
                assert output is not None
                yield output

    def run_stream(self, request: PreparedRequest) -> Iterator[RequestOutput]:
        """Run a prepared request as `stream` does."""
        with self._in_flight() as request_id:
            self._add(request_id, request, stream=True)
            seen = None
            while not _is_finished(seen):
                while self._latest[request_id] is seen:
                    self._step()
                    self._check_known(request_id)
                seen = self._latest[request_id]
                assert seen is not None
                yield seen

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[str]:
        """A new request id of ours; on leaving, the request is aborted unless it has finished."""
        request_id = next(
            name
            for number in self._request_numbers
            if self.engine.scheduler.get(name := f"llm-{number}") is None
        )
        self._latest[request_id] = None
        try:
            yield request_id
        finally:
            if not _is_finished(self._latest.pop(request_id)):
                self.engine.abort(request_id, report=False)

    def _add(self, request_id: str, request: PreparedRequest, *, stream: bool) -> None:
        self.engine.add_request(
            request.prompt_token_ids,
            request.sampling_params,
            request_id=request_id,
            prompt=request.prompt,
            stream=stream,
        )

    def _step(self) -> set[str]:
        """Step the engine and file the outputs of all our requests; the ids that finished."""
        outputs = self.engine.step()
        for output in outputs:
            if output.request_id in self._latest:
                self._latest[output.request_id] = output
        return {output.request_id for output in outputs if output.finished}

    def _check_known(self, request_id: str) -> None:
        """Rather an error than to wait for ever for an output that somebody else was given."""
        if not (_is_finished(self._latest[request_id]) or self.engine.has_request(request_id)):
            raise RuntimeError(
                f"request {request_id!r} ended outside this call: while LLM's methods run, "
                "nobody else may step the engine or abort their requests"
            )

    def _prepare_and_run(
        self,
        name: str,
        prepare: Callable[[Any, SamplingParams | None], PreparedRequest],
        prompts: Any,
        sampling_params: Any,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        prompts = _as_list(name, prompts)
        all_params = _params_for_each(sampling_params, len(prompts))
        requests = []
        for index, (prompt, params) in enumerate(zip(prompts, all_params, strict=True)):
            try:
                requests.append(prepare(prompt, params))
            except (ValueError, TypeError, NotImplementedError) as error:
                kinds = (ValueError, TypeError, NotImplementedError)
                kind = next(kind for kind in kinds if isinstance(error, kind))
                raise kind(f"{name}[{index}]: {error}") from error
        return self.run(requests, use_tqdm=use_tqdm)

    def _prepared(
        self, prompt: str | None, token_ids: list[Any], sampling_params: SamplingParams | None
    ) -> PreparedRequest:
        if sampling_params is None:
            sampling_params = self.engine.get_default_sampling_params()
        elif not isinstance(sampling_params, SamplingParams):
            raise TypeError(
                f"sampling_params must be None or a SamplingParams, got {shown(sampling_params)}"
            )
        self.engine.validate_request(token_ids, sampling_params)
        return PreparedRequest(prompt, [int(token) for token in token_ids], sampling_params)

    def _tokenizer_for(self, what: str) -> Any:
        if self.engine.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and the model was loaded without one")
        return self.engine.tokenizer

    def _encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self._tokenizer_for("a prompt given as a string")
        if not text:
            raise ValueError("a prompt must hold at least one token, got ''")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"a prompt must be valid Unicode, got a lone surrogate at character {error.start}"
            ) from error
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)


def resolve_dtype(dtype: Any) -> Any:
    """The dtype of weights and activations for `LLM`'s argument `dtype`."""
    if isinstance(dtype, str) and dtype == "auto":
        return jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32
    names = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
    try:
        return names[jnp.dtype(dtype).name if dtype is not None else ""]
    except (KeyError, TypeError):
        raise ValueError(f"dtype must be 'auto', 'float32' or 'bfloat16', got {dtype!r}") from None


def _as_path(name: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a string or a path, got {shown(value)}")
    path = os.fspath(value)
    if not path:
        raise ValueError(f"{name} must be a non-empty string or a path, got {path!r}")
    return path


def _is_finished(output: RequestOutput | None) -> bool:
    return output is not None and output.finished


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _as_list(name: str, value: Any) -> list[Any]:
    """A list of prompts or conversations; one alone becomes a list of one."""
    if isinstance(value, str) or (isinstance(value, np.ndarray | jax.Array) and value.ndim == 1):
        return [value]
    if not isinstance(value, list | tuple):
        what = "a prompt" if name == "prompts" else "a conversation"
        raise TypeError(f"{name} must be {what} or a list of them, got {shown(value)}")
    if value and (all(map(_is_int, value)) or all(isinstance(m, Mapping) for m in value)):
        return [value]
    return list(value)


def _params_for_each(sampling_params: Any, num_prompts: int) -> list[SamplingParams | None]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params] * num_prompts
    if not isinstance(sampling_params, list | tuple):
        raise TypeError(
            "sampling_params must be None, a SamplingParams or a list of them, "
            f"got {shown(sampling_params)}"
        )
    if len(sampling_params) != num_prompts:
        raise ValueError(
            "sampling_params must be one SamplingParams or one a prompt, "
            f"got {len(sampling_params)} for {num_prompts} prompts"
        )
    return list(sampling_params)


def _as_token_ids(prompt: Any) -> list[Any]:
    """Whatever the list or array holds; the engine checks the elements."""
    if isinstance(prompt, np.ndarray | jax.Array):
        return prompt.tolist()
    if not isinstance(prompt, list | tuple | range):
        raise TypeError(f"a prompt must be a string or a list of token ids, got {shown(prompt)}")
    return list(prompt)


def _as_conversation(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise TypeError(f"a conversation must be a list of messages, got {shown(messages)}")
    if not messages:
        raise ValueError("a conversation must hold at least one message, got []")
    for position, message in enumerate(messages):
        good = isinstance(message, Mapping) and all(
            isinstance(message.get(key), str) for key in ("role", "content")
        )
        if not good:
            raise TypeError(
                "a message must be a dictionary with the strings 'role' and 'content', "
                f"got {shown(message)} at position {position}"
            )
    return [dict(message) for message in messages]
