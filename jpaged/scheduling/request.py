"""Requests and their sequences: the state that the scheduler and the engine share."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

if TYPE_CHECKING:
    from jpaged.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is. WAITING and PREEMPTED ones are in the waiting queue, without memory."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sequence of tokens of a request: the prompt and what was generated after it.

    Attributes:
        request: the request it belongs to.
        index: its position in request.sequences.
        token_ids: int32 [request.max_total_tokens]; the first num_tokens entries are prompt and
            generated tokens, the others undefined. Filled by Request and `Scheduler.update`.
        num_tokens: tokens known so far. Advanced by `Scheduler.update`.
        num_prompt_tokens: tokens of the prompt.
        num_computed_tokens: tokens whose keys and values are in the KV pool, always the first
            ones. Advanced by `Scheduler.update`, set to 0 when the sequence is preempted.
        slot: row in `BlockManager.tables`; -1 while the sequence holds no memory. Set by the
            scheduler.
        finish_reason: None while unfinished, then "stop", "length" or "abort". Set by the
            scheduler.
        stop_reason: what ended a "stop": a token id of sampling_params.stop_token_ids, a stop
            string, or None for an end-of-sequence token. Set by the scheduler.
    """

    request: Request
    index: int
    token_ids: Int32[np.ndarray, " capacity"]
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    slot: int = -1
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def output_token_ids(self) -> Int32[np.ndarray, " n"]:
        """The generated tokens: a view of token_ids."""
        return self.token_ids[self.num_prompt_tokens : self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens


class Request:
    """A prompt and the sequences that grow from it; scheduled and preempted together.

    Attributes:
        request_id: the name under which the caller knows it.
        number: its position in the order of `add_request` calls; breaks ties of arrival_time.
        prompt_token_ids: the prompt, as given.
        sampling_params: how tokens are chosen; the scheduler reads min_tokens and stop_token_ids.
        stop_token_ids: every token id that ends a sequence: sampling_params.stop_token_ids and,
            unless ignored, the model's end-of-sequence tokens.
        max_total_tokens: a sequence that has this many tokens, prompt included, is finished.
        arrival_time: seconds on any clock; earlier requests run first.
        arrival_order: (arrival_time, number), the key by which all queues are ordered.
        sequences: one for now (several a request are not built yet).
        status: set by the scheduler.

    Raises:
        ValueError: the prompt is empty or leaves no room for one token.
    """

    __slots__ = (
        "arrival_order",
        "arrival_time",
        "max_total_tokens",
        "number",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "sequences",
        "status",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        number: int,
        prompt_token_ids: Iterable[int],
        sampling_params: SamplingParams,
        *,
        stop_token_ids: frozenset[int],
        max_total_tokens: int,
        arrival_time: float,
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.prompt_token_ids = list(prompt_token_ids)
        self.sampling_params = sampling_params
        self.stop_token_ids = stop_token_ids
        self.max_total_tokens = max_total_tokens
        self.arrival_time = arrival_time
        self.arrival_order = (arrival_time, number)
        self.status = RequestStatus.WAITING
        num_prompt_tokens = len(self.prompt_token_ids)
        if not 1 <= num_prompt_tokens < max_total_tokens:
            raise ValueError(
                f"prompt_token_ids must hold 1 to {max_total_tokens - 1} tokens "
                f"(max_total_tokens={max_total_tokens}), got {num_prompt_tokens}"
            )
        token_ids = np.empty(max_total_tokens, np.int32)
        token_ids[:num_prompt_tokens] = self.prompt_token_ids
        self.sequences = [
            Sequence(
                request=self,
                index=0,
                token_ids=token_ids,
                num_tokens=num_prompt_tokens,
                num_prompt_tokens=num_prompt_tokens,
            )
        ]

    @property
    def finished(self) -> bool:
        """Whether all sequences are finished; then the request holds no memory."""
        return self.status is RequestStatus.FINISHED
