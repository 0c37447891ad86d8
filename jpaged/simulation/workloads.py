"""Workloads: requests with their arrival times and lengths, from traces or made up from a seed.

A workload is a list of lengths first; `with_arrivals` says when the requests come, `fitted` what
becomes of those that are too long, `with_prompts` fills in token ids. Each step draws from a random
stream of its own, so that (say) another request rate leaves the prompts as they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import numpy as np

from jpaged.simulation.traces import read_records

TRACE_FORMATS = ("sharegpt", "azure", "mooncake", "jsonl")
LONG_REQUESTS = ("error", "skip", "truncate")

# Random streams: the second word of a seed.
_LENGTHS, _ORDER, _ARRIVALS, _PROMPTS, _PREFIXES = range(5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkloadRequest:
    """One request.

    Attributes:
        prompt_len: tokens of the prompt (>= 1).
        output_len: tokens to generate (>= 1), no more and no fewer.
        arrival_time: seconds after the workload's begin; None if the trace does not say.
        prompt_token_ids: the prompt; None until it is filled in.
        prefix_blocks: ids of the blocks that the prompt begins with; requests share the tokens of
            blocks of equal ids.
        prefix_block_len: tokens of such a block.
        source: where the request stands in its trace, for messages.
    """

    prompt_len: int
    output_len: int
    arrival_time: float | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    prefix_blocks: tuple[int, ...] = ()
    prefix_block_len: int = 0
    source: str = ""

    @property
    def num_tokens(self) -> int:
        """Prompt and output together."""
        return self.prompt_len + self.output_len


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival. All methods return a new workload.

    Attributes:
        name: what it is, for people.
        requests: the requests.
        num_skipped, num_truncated: requests left out, or cut, by `fitted`.
    """

    name: str
    requests: tuple[WorkloadRequest, ...]
    num_skipped: int = 0
    num_truncated: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(request.prompt_len for request in self.requests)

    @property
    def num_output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)

    @property
    def has_arrival_times(self) -> bool:
        return all(request.arrival_time is not None for request in self.requests)

    def taken(self, num: int | None, *, shuffle: bool = False, seed: int = 0) -> Workload:
        """The first `num` requests (all if None), or with `shuffle` as many drawn at random without
        repetition, in random order.

        Raises:
            ValueError: there are fewer.
        """
        num = len(self.requests) if num is None else num
        if not 1 <= num <= len(self.requests):
            raise ValueError(
                f"num_prompts must be in [1, {len(self.requests)}], the requests of {self.name}, "
                f"got {num}"
            )
        if not shuffle:
            return self._with(self.requests[:num])
        order = _stream(seed, _ORDER).permutation(len(self.requests))[:num]
        return self._with(self.requests[i] for i in order)

    def scaled(self, *, prompt: float = 1.0, output: float = 1.0) -> Workload:
        """All lengths times these factors, rounded, at least 1; shared blocks too.

        Raises:
            ValueError: the prompts are given token by token and are to be scaled.
        """
        if prompt == 1.0 and output == 1.0:
            return self
        requests = []
        for request in self.requests:
            if prompt != 1.0 and request.prompt_token_ids is not None:
                raise ValueError(
                    f"input_scale must be 1 where the trace has the prompts' tokens, got {prompt}"
                )
            requests.append(
                dataclasses.replace(
                    request,
                    prompt_len=max(1, round(request.prompt_len * prompt)),
                    output_len=max(1, round(request.output_len * output)),
                    prefix_block_len=round(request.prefix_block_len * prompt),
                )
            )
        return self._with(requests)

    def with_arrivals(self, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> Workload:
        """The same requests, coming at random.

        Args:
            rate: requests a second (> 0); infinite for all at once.
            burstiness: shape of the gamma distribution of the time between two arrivals (> 0). 1 is
                a Poisson process, less comes in bursts, more comes evenly.
            seed: of the times.
        """
        if math.isinf(rate):
            times = np.zeros(len(self.requests))
        else:
            gaps = _stream(seed, _ARRIVALS).gamma(
                burstiness, 1 / (rate * burstiness), len(self.requests)
            )
            times = np.cumsum(gaps) - gaps[0]  # the first request opens the measurement
        return self._with(
            dataclasses.replace(request, arrival_time=float(time))
            for request, time in zip(self.requests, times, strict=True)
        )

    def with_trace_arrivals(self, speed: float = 1.0) -> Workload:
        """The same requests at the trace's own times, from the first one on, `speed` times as fast.

        Raises:
            ValueError: the trace has no times.
        """
        if not self.has_arrival_times:
            raise ValueError(f"request_rate must be a number or inf: {self.name} has no times")
        ordered = sorted(self.requests, key=_arrival)
        first = _arrival(ordered[0])
        return self._with(
            dataclasses.replace(request, arrival_time=(_arrival(request) - first) / speed)
            for request in ordered
        )

    def fitted(self, max_model_len: int, *, long_requests: str = "error") -> Workload:
        """The workload for a model that takes no more than max_model_len tokens a sequence.

        Args:
            max_model_len: most tokens of prompt and output together (>= 2).
            long_requests: what becomes of longer requests: "error" raises, "skip" leaves them out,
                "truncate" cuts the output to max_model_len - 1 and then the prompt's end to what is
                left.

        Raises:
            ValueError: a request is too long and long_requests is "error", or none is left.
        """
        kept: list[WorkloadRequest] = []
        num_long = 0
        for request in self.requests:
            if request.num_tokens <= max_model_len:
                kept.append(request)
                continue
            if long_requests == "error":
                raise ValueError(
                    f"{self.name}: {request.source or 'a request'} must have at most "
                    f"max_model_len={max_model_len} tokens (long_requests='error'), got "
                    f"{request.prompt_len} of the prompt and {request.output_len} of the output"
                )
            num_long += 1
            if long_requests == "truncate":
                kept.append(_truncated(request, max_model_len))
        if not kept:
            raise ValueError(f"{self.name}: no request fits into max_model_len={max_model_len}")
        fitted = self._with(kept)
        if long_requests == "skip":
            return dataclasses.replace(fitted, num_skipped=num_long)
        return dataclasses.replace(fitted, num_truncated=num_long)

    def with_prompts(self, vocab_size: int, *, seed: int = 0) -> Workload:
        """The same requests with random token ids where the trace gives lengths alone.

        A prompt begins with its shared blocks; the rest is its own. The tokens depend on the seed,
        the vocabulary and the request's place alone.

        Raises:
            ValueError: a token of the trace is not in the vocabulary.
        """
        blocks: dict[tuple[int, int], np.ndarray] = {}
        requests = []
        for place, request in enumerate(self.requests):
            token_ids = request.prompt_token_ids
            if token_ids is None:
                parts = []
                for block in request.prefix_blocks:
                    key = (block, request.prefix_block_len)
                    if key not in blocks:
                        blocks[key] = _tokens(vocab_size, key[1], seed, _PREFIXES, block)
                    parts.append(blocks[key])
                shared = sum(map(len, parts))
                own = max(0, request.prompt_len - shared)
                parts.append(_tokens(vocab_size, own, seed, _PROMPTS, place))
                token_ids = tuple(np.concatenate(parts)[: request.prompt_len].tolist())
            elif max(token_ids) >= vocab_size:
                raise ValueError(
                    f"{self.name}: {request.source}: prompt_token_ids must be below the "
                    f"vocabulary's {vocab_size}, got {max(token_ids)}"
                )
            requests.append(dataclasses.replace(request, prompt_token_ids=token_ids))
        return self._with(requests)

    def _with(self, requests: Iterable[WorkloadRequest]) -> Workload:
        return dataclasses.replace(self, requests=tuple(requests))


def read_trace(path: str, kind: str) -> Workload:
    """The requests of a trace file, in its order.

    Args:
        path: the file.
        kind: "sharegpt" (CSV with num_prefill_tokens and num_decode_tokens), "azure" (CSV with
            TIMESTAMP, ContextTokens and GeneratedTokens: Azure's public LLM inference traces),
            "mooncake" (JSON Lines with timestamp in ms, input_length, output_length and, if prompts
            share prefixes, hash_ids of 512 tokens each: the traces of Qin et al., FAST 2025) or
            "jsonl" (JSON Lines with prompt_token_ids or input_length, max_tokens and perhaps
            arrival_time in s).

    Raises:
        ValueError: an unknown kind, or a line that is not in the format; it is named.
        OSError: the file cannot be read.
    """
    if kind not in TRACE_FORMATS:
        raise ValueError(f"kind must be one of {', '.join(TRACE_FORMATS)}, got {kind!r}")
    records = read_records(path, kind)
    return Workload(path, tuple(WorkloadRequest(**record) for record in records))


def random_workload(
    num: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    seed: int = 0,
) -> Workload:
    """Requests of made-up lengths.

    Args:
        num: requests (>= 1).
        input_len, output_len: tokens of a prompt (without the prefix) and of an output (>= 1).
        range_ratio: lengths are drawn evenly from [len * (1 - r), len * (1 + r)], r in [0, 1).
        prefix_len: tokens that all prompts begin with (>= 0).
        seed: of the lengths.
    """
    stream = _stream(seed, _LENGTHS)

    def lengths(mean: int) -> list[int]:
        low, high = math.floor(mean * (1 - range_ratio)), math.ceil(mean * (1 + range_ratio))
        return stream.integers(max(1, low), high + 1, num).tolist()

    requests = [
        WorkloadRequest(
            prompt_len=prefix_len + own,
            output_len=out,
            prefix_blocks=(0,) if prefix_len else (),
            prefix_block_len=prefix_len,
            source=f"request {number}",
        )
        for number, (own, out) in enumerate(
            zip(lengths(input_len), lengths(output_len), strict=True)
        )
    ]
    prefix = f"{prefix_len} shared + " if prefix_len else ""
    return Workload(f"random ({prefix}{input_len} in, {output_len} out)", tuple(requests))


def _truncated(request: WorkloadRequest, max_model_len: int) -> WorkloadRequest:
    output_len = min(request.output_len, max_model_len - 1)
    prompt_len = min(request.prompt_len, max_model_len - output_len)
    token_ids = request.prompt_token_ids
    return dataclasses.replace(
        request,
        prompt_len=prompt_len,
        output_len=output_len,
        prompt_token_ids=None if token_ids is None else token_ids[:prompt_len],
    )


def _arrival(request: WorkloadRequest) -> float:
    assert request.arrival_time is not None
    return request.arrival_time


def _stream(*words: int) -> np.random.Generator:
    return np.random.default_rng(words)


def _tokens(vocab_size: int, num: int, *words: int) -> np.ndarray:
    return _stream(*words).integers(0, vocab_size, num)
