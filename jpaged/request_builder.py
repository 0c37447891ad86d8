"""What a request must be for an engine to take it, and how it is made."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sized
from functools import partial
from typing import Any

import numpy as np

from jpaged.detokenizer import Detokenizer
from jpaged.request_state import RequestState
from jpaged.runner.sampler import MAX_LOGPROBS
from jpaged.sampling_params import MAX_SEED, SamplingParams
from jpaged.scheduling import BeamSearch, Request, Scheduler
from jpaged.validation import as_int


def check_params(sampling_params: object) -> SamplingParams:
    """The same, if it is a SamplingParams (TypeError otherwise)."""
    if not isinstance(sampling_params, SamplingParams):
        raise TypeError(
            f"sampling_params must be a SamplingParams, got {sampling_params!r} of type "
            f"{type(sampling_params).__name__}"
        )
    return sampling_params


class RequestBuilder:
    """Checks and makes the requests of one engine; every error names the argument.

    vocab_size     token ids are 0 .. vocab_size - 1
    max_model_len  most tokens of a sequence
    eos_token_ids  end a sequence, unless a request ignores them
    tokenizer      None where there is no text: then stop strings cannot be looked for
    seed           the engine's, for requests that bring none
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        tokenizer: Any,
        seed: int,
    ) -> None:
        self._scheduler = scheduler
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._seed = seed

    def build(
        self,
        prompt_token_ids: Sized[int],
        params: SamplingParams,
        *,
        request_id: str,
        arrival_time: float,
        number: int,
        prompt: str | None,
        stream: bool,
        keep: bool = False,
        first_sample_index: int = 0,
    ) -> RequestState:
        """A checked request with its state, not yet known to the scheduler.

        Raises:
            TypeError, ValueError: as `check`.
        """
        token_ids = self.check(prompt_token_ids, params)
        beams = self._beams(len(token_ids), params)
        request = Request(
            request_id,
            number,
            token_ids,
            params,
            stop_token_ids=self._stop_token_ids(params),
            max_total_tokens=self._max_total_tokens(len(token_ids), params),
            arrival_time=arrival_time,
            num_sequences=1 if beams is not None else params.num_sequences,
            beams=beams,
            keep=keep,
        )
        seed = params.seed
        if seed is None:
            words = np.random.SeedSequence([self._seed, number]).generate_state(1, np.uint64)
            seed = int(words[0]) & MAX_SEED
        return RequestState(
            request, prompt, stream, seed, first_sample_index, partial(self._detokenizer, params)
        )

    def _beams(self, prompt_len: int, params: SamplingParams) -> BeamSearch | None:
        if params.beam_width is None:
            return None
        return BeamSearch(
            params.beam_width,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_ids=self._stop_token_ids(params),
            max_new_tokens=self._max_total_tokens(prompt_len, params) - prompt_len,
            min_new_tokens=params.min_tokens,
        )

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        return Detokenizer(self._tokenizer, params.stop or (), params.min_tokens)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        ids = frozenset(params.stop_token_ids or ())
        return ids if params.ignore_eos else ids | self._eos_token_ids

    def _max_total_tokens(self, prompt_len: int, params: SamplingParams) -> int:
        return min(prompt_len + params.max_tokens, self._max_model_len)

    def check(self, prompt_token_ids: Sized[int], sampling_params: SamplingParams) -> list[int]:
        """The prompt as plain ints, once it and the parameters were found good.

        Raises:
            TypeError, ValueError: they are not.
        """
        token_ids = self._checked_prompt(prompt_token_ids)
        sampling_params.check_against(self._vocab_size)
        if sampling_params.stop and self._tokenizer is None:
            raise ValueError(f"stop={sampling_params.stop!r} needs a tokenizer, there is none")
        width = sampling_params.beam_width
        num_stop_token_ids = len(self._stop_token_ids(sampling_params))
        most = min(MAX_LOGPROBS, self._vocab_size) - num_stop_token_ids
        if width is not None and width > most:
            raise ValueError(
                f"beam_width must be at most {most} with {num_stop_token_ids} tokens that end a "
                f"sequence, got {width}"
            )
        self._beams(len(token_ids), sampling_params)  # which has limits of its own
        self._scheduler.check_fits(
            len(token_ids),
            self._max_total_tokens(len(token_ids), sampling_params),
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
