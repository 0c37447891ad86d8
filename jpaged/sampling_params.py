"""How the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jpaged.validation import as_bool, as_float, as_int, shown

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request; checked when made, immutable afterwards.

    Attributes:
        n: how many sequences to return (>= 1).
        best_of: how many sequences to sample, of which the n of the highest cumulative
            log-probability are returned, best first (None or >= n; None samples n).
        temperature: divides the logits (>= 0 and finite); 0 is greedy.
        top_k: keep the k most likely tokens (>= -1); 0 and -1 keep all.
        top_p: keep the smallest set of most likely tokens whose probability reaches it, in (0, 1].
        min_p: keep tokens at least this share as likely as the most likely one, in [0, 1].
        presence_penalty: in [-2, 2], subtracted once from the logit of every generated token id
            (OpenAI's definition).
        frequency_penalty: in [-2, 2], subtracted as often as the token id was generated (OpenAI's
            definition).
        repetition_penalty: > 0; divides positive and multiplies negative logits of the token ids
            of prompt and generated tokens (transformers' definition); 1 is off.
        logit_bias: {token id: finite float added to its logit}, or None.
        seed: None (derived from the engine's seed and the request's number) or in [0, 2^63).
        max_tokens: most tokens to generate (>= 1).
        min_tokens: fewest tokens before a stop string, stop token or end-of-sequence token may
            end the sequence (0 <= min_tokens <= max_tokens).
        stop: one string or several, none empty, which end the sequence and are not part of its
            text. Kept as a tuple, or None.
        stop_token_ids: token ids that end the sequence. Kept as a tuple, or None.
        ignore_eos: go on after the model's end-of-sequence tokens.
        logprobs: None or 0 .. 20: return the chosen token's log-probability and this many best.
        prompt_logprobs: the same for the tokens of the prompt.
        beam_width: None or >= 1: beam search with so many beams instead of sampling; the n best
            hypotheses are returned when it is over. temperature, top_k, top_p, min_p and seed then
            mean nothing; penalties, logit_bias, stop and logprobs are refused.
        length_penalty: finite; hypotheses are ranked by log-probability / length ** length_penalty.
        early_stopping: when beam search ends, as transformers defines it: False, True or "never".
        priority: an int, lower runs first (under scheduling_policy="priority").
        cache_salt: None or a string: requests of different salts share no cached blocks.

    Raises:
        TypeError: a value of the wrong type (a bool is not an int).
        ValueError: a value outside what is allowed.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = dataclasses.field(default=None, hash=False)
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    priority: int = 0
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)
        self._check_beam_search()

    def _checked(self) -> dict[str, Any]:
        """Every field as a plain Python object, or the first error."""
        n = as_int("n", self.n, allowed="an int >= 1", low=1)
        max_tokens = as_int("max_tokens", self.max_tokens, allowed="an int >= 1", low=1)
        logprobs_allowed = f"None or an int in [0, {MAX_LOGPROBS}]"
        penalty: dict[str, Any] = {"allowed": "a number in [-2, 2]", "low": -2.0, "high": 2.0}
        return {
            "n": n,
            "best_of": self._int_or_none(
                "best_of", allowed=f"None or an int >= n, which is {n}", low=n
            ),
            "temperature": as_float(
                "temperature", self.temperature, allowed="a finite number >= 0", low=0.0
            ),
            "top_k": as_int("top_k", self.top_k, allowed="an int >= -1 (0 and -1 = off)", low=-1),
            "top_p": as_float(
                "top_p", self.top_p, allowed="in (0, 1]", low=0.0, high=1.0, low_open=True
            ),
            "min_p": as_float("min_p", self.min_p, allowed="in [0, 1]", low=0.0, high=1.0),
            "presence_penalty": as_float("presence_penalty", self.presence_penalty, **penalty),
            "frequency_penalty": as_float("frequency_penalty", self.frequency_penalty, **penalty),
            "repetition_penalty": as_float(
                "repetition_penalty",
                self.repetition_penalty,
                allowed="a finite number > 0",
                low=0.0,
                low_open=True,
            ),
            "logit_bias": _checked_logit_bias(self.logit_bias),
            "seed": self._int_or_none(
                "seed", allowed="None or an int in [0, 2**63)", low=0, high=MAX_SEED
            ),
            "max_tokens": max_tokens,
            "min_tokens": as_int(
                "min_tokens",
                self.min_tokens,
                allowed=f"an int in [0, max_tokens], which is [0, {max_tokens}]",
                low=0,
                high=max_tokens,
            ),
            "stop": _checked_stop(self.stop),
            "stop_token_ids": _checked_stop_token_ids(self.stop_token_ids),
            "ignore_eos": as_bool("ignore_eos", self.ignore_eos),
            "logprobs": self._int_or_none(
                "logprobs", allowed=logprobs_allowed, low=0, high=MAX_LOGPROBS
            ),
            "prompt_logprobs": self._int_or_none(
                "prompt_logprobs", allowed=logprobs_allowed, low=0, high=MAX_LOGPROBS
            ),
            "beam_width": self._int_or_none("beam_width", allowed="None or an int >= 1", low=1),
            "length_penalty": as_float(
                "length_penalty", self.length_penalty, allowed="a finite number"
            ),
            "early_stopping": (
                "never"
                if self.early_stopping == "never"
                else as_bool("early_stopping", self.early_stopping, or_else="'never'")
            ),
            "priority": as_int(
                "priority",
                self.priority,
                allowed="an int in [-2**63, 2**63)",
                low=-(2**63),
                high=2**63 - 1,
            ),
            "cache_salt": _checked_cache_salt(self.cache_salt),
        }

    def _int_or_none(
        self, name: str, *, allowed: str, low: int, high: int | None = None
    ) -> int | None:
        value = getattr(self, name)
        return None if value is None else as_int(name, value, allowed=allowed, low=low, high=high)

    @property
    def num_sequences(self) -> int:
        """How many sequences a request may have at once: samples or beams."""
        return self.beam_width or self.best_of or self.n

    def _check_beam_search(self) -> None:
        """Beam search replaces sampling: refuse what would have no meaning beside it."""
        if self.beam_width is None:
            return
        if self.n > self.beam_width:
            raise ValueError(f"n must be at most beam_width={self.beam_width}, got {self.n}")
        neutral = {
            "best_of": None,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logit_bias": None,
            "stop": None,
            "logprobs": None,
        }
        for name, value in neutral.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"{name} does not go with beam_width, got {name}={getattr(self, name)!r} and "
                    f"beam_width={self.beam_width}"
                )

    def check_against(self, vocab_size: int) -> None:
        """Raise `ValueError` for a token id in stop_token_ids or logit_bias that the vocabulary
        (ids 0 .. vocab_size - 1) lacks."""
        for name in ("stop_token_ids", "logit_bias"):
            for token_id in getattr(self, name) or ():
                if token_id >= vocab_size:
                    raise ValueError(
                        f"{name} must hold token ids in [0, {vocab_size}), got {token_id}"
                    )


def _checked_token_id(name: str, value: Any) -> int:
    return as_int(f"a token id in {name}", value, allowed="an int >= 0", low=0)


def _checked_logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise TypeError(
            f"logit_bias must be None or a mapping {{token id: finite float}}, got {shown(value)}"
        )
    return {
        _checked_token_id("logit_bias", token_id): as_float(
            f"logit_bias[{token_id!r}]", bias, allowed="a finite number"
        )
        for token_id, bias in value.items()
    }


def _checked_stop(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    strings = [value] if isinstance(value, str) else value
    allowed = "None, a non-empty string or a list of non-empty strings"
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise TypeError(f"stop must be {allowed}, got {shown(value)}")
    if not all(strings):
        raise ValueError(f"stop must be {allowed}, got {value!r}")
    return tuple(strings)


def _checked_stop_token_ids(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    # Anything that lists ints will do (a NumPy array too), but no text, mapping or set.
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__getitem__"):
        raise TypeError(f"stop_token_ids must be None or a list of token ids, got {shown(value)}")
    return tuple(_checked_token_id("stop_token_ids", token_id) for token_id in value)


def _checked_cache_salt(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"cache_salt must be None or a string, got {shown(value)}")
    return value
