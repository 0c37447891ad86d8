"""What the engine keeps of an unfinished request beside the scheduler's state."""

from __future__ import annotations

import dataclasses

from jpaged.detokenizer import Detokenizer
from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.scheduling import Request


@dataclasses.dataclass(eq=False)
class RequestState:
    """The way from a request's tokens to its output; filled by the engine after each step.

    Attributes:
        request: the scheduler's side of it.
        prompt: the prompt's text, or None.
        stream: whether `Engine.step` returns it before it is finished.
        seed: the seed of its samples, given or derived.
        detokenizer: None without a tokenizer.
        masks_stop_tokens: whether its row of the bias table holds back the stop tokens, as it
            does until it has min_tokens.
        logprobs: of the generated tokens so far, if asked for.
        cumulative_logprob: sum over the chosen tokens, if asked for.
        prompt_logprobs: of the prompt tokens so far, if asked for; the first has none.
    """

    request: Request
    prompt: str | None
    stream: bool
    seed: int
    detokenizer: Detokenizer | None
    masks_stop_tokens: bool = False
    logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    cumulative_logprob: float = 0.0
    prompt_logprobs: list[dict[int, float] | None] = dataclasses.field(
        default_factory=lambda: [None]
    )
    _detokenized: int = 0

    def detokenize(self) -> str | None:
        """Give the detokenizer the tokens that it has not seen; the stop string they complete."""
        if self.detokenizer is None:
            return None
        (sequence,) = self.request.sequences
        tokens = sequence.output_token_ids[self._detokenized :].tolist()
        self._detokenized += len(tokens)
        if tokens and sequence.finish_reason == "stop":
            tokens.pop()  # the stop token that ended it is no part of the text
        return self.detokenizer.add(tokens)

    def output(self) -> RequestOutput:
        """A snapshot for the caller."""
        request = self.request
        params = request.sampling_params
        (sequence,) = request.sequences
        text = ""
        if self.detokenizer is not None:
            if request.finished:
                self.detokenize()
                self.detokenizer.finish()
            text = self.detokenizer.text
        wants_logprobs = params.logprobs is not None
        wants_prompt_logprobs = params.prompt_logprobs is not None
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[
                CompletionOutput(
                    index=sequence.index,
                    text=text,
                    token_ids=sequence.output_token_ids.tolist(),
                    finish_reason=sequence.finish_reason,
                    stop_reason=sequence.stop_reason,
                    cumulative_logprob=self.cumulative_logprob if wants_logprobs else None,
                    logprobs=list(self.logprobs) if wants_logprobs else None,
                )
            ],
            prompt_logprobs=list(self.prompt_logprobs) if wants_prompt_logprobs else None,
            finished=request.finished,
        )
