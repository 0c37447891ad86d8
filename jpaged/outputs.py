"""What a request gives back."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class CompletionOutput:
    """One generated sequence, so far or at its end.

    Attributes:
        index: which of the request's sequences.
        text: the generated text; without the stop string that ended it, never half a character.
        token_ids: the generated token ids, those of a stop string or stop token included.
        finish_reason: None while it runs, then "stop", "length" or "abort".
        stop_reason: the stop string or the token id from `stop_token_ids` that ended it; None if
            something else did (an end-of-sequence token, say).
        cumulative_logprob: sum of the chosen tokens' natural log-probabilities; None unless
            `SamplingParams.logprobs` was given.
        logprobs: for each token {token id: log-probability} of the chosen token and of the
            `logprobs` most likely ones; None unless `SamplingParams.logprobs` was given.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None


@dataclasses.dataclass
class RequestOutput:
    """A request and its sequences, so far or at their end.

    Attributes:
        request_id: the engine's name for the request.
        prompt: the prompt's text; None if it was given as token ids.
        prompt_token_ids: the prompt's token ids.
        outputs: the sequences.
        prompt_logprobs: for each prompt token {token id: log-probability} as in
            `CompletionOutput.logprobs`, None for the first; None unless
            `SamplingParams.prompt_logprobs` was given.
        finished: whether all sequences have ended.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, float] | None] | None = None
    finished: bool = False
