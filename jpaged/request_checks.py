"""What a request must be for an engine to take it."""

from __future__ import annotations

from collections.abc import Sequence as Sized

from jpaged.runner.sampler import MAX_LOGPROBS
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Scheduler
from jpaged.validation import as_int


def check_params(sampling_params: object) -> SamplingParams:
    """The same, if it is a SamplingParams (TypeError otherwise)."""
    if not isinstance(sampling_params, SamplingParams):
        raise TypeError(
            f"sampling_params must be a SamplingParams, got {sampling_params!r} of type "
            f"{type(sampling_params).__name__}"
        )
    return sampling_params


class RequestChecks:
    """The checks of one engine; every error names the argument.

    vocab_size     token ids are 0 .. vocab_size - 1
    max_model_len  most tokens of a sequence
    has_tokenizer  whether stop strings can be looked for
    """

    def __init__(
        self, scheduler: Scheduler, *, vocab_size: int, max_model_len: int, has_tokenizer: bool
    ) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._has_tokenizer = has_tokenizer

    def max_total_tokens(self, prompt_len: int, sampling_params: SamplingParams) -> int:
        """Tokens at which a sequence is finished, prompt included."""
        return min(prompt_len + sampling_params.max_tokens, self._max_model_len)

    def checked(
        self,
        prompt_token_ids: Sized[int],
        sampling_params: SamplingParams,
        num_stop_token_ids: int,
    ) -> list[int]:
        """The prompt as plain ints, once it and the parameters were found good.

        Raises:
            TypeError, ValueError: they are not.
        """
        token_ids = self._checked_prompt(prompt_token_ids)
        sampling_params.check_against(self._vocab_size)
        if sampling_params.stop and not self._has_tokenizer:
            raise ValueError(f"stop={sampling_params.stop!r} needs a tokenizer, there is none")
        width = sampling_params.beam_width
        most = min(MAX_LOGPROBS, self._vocab_size) - num_stop_token_ids
        if width is not None and width > most:
            raise ValueError(
                f"beam_width must be at most {most} with {num_stop_token_ids} tokens that end a "
                f"sequence, got {width}"
            )
        self._scheduler.check_fits(
            len(token_ids),
            self.max_total_tokens(len(token_ids), sampling_params),
            sampling_params.num_sequences,
        )
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
            min(token_ids) >= 0 and max(token_ids) < self._vocab_size
        ):
            token_ids = [self._checked_token(*item) for item in enumerate(token_ids)]
        if not token_ids:
            raise ValueError("prompt_token_ids must hold at least one token, got none")
        if len(token_ids) >= self._max_model_len:
            raise ValueError(
                f"prompt_token_ids must be shorter than max_model_len={self._max_model_len}, to "
                f"leave room for one token, got {len(token_ids)} tokens"
            )
        return token_ids

    def _checked_token(self, place: int, token: object) -> int:
        name = f"prompt_token_ids[{place}]"
        allowed = f"an int in [0, {self._vocab_size})"
        return as_int(name, token, allowed=allowed, low=0, high=self._vocab_size - 1)
