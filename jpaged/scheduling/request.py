"""Requests and their sequences: the state that the scheduler and the engine share."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

if TYPE_CHECKING:
    from jpaged.memory import Swapped
    from jpaged.sampling_params import SamplingParams
    from jpaged.scheduling.beam_search import BeamSearch


# Stands in `Sequence.token_ids` for a token that only the device knows yet.
UNKNOWN_TOKEN = -1


class RequestStatus(enum.Enum):
    """Where a request is. WAITING, PREEMPTED and SWAPPED ones are in the waiting queue, without
    blocks of the KV pool; SWAPPED ones have their blocks in the swap space. A KEPT one is finished,
    and holds its blocks for forks until it is released or the room is needed."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    KEPT = "kept"
    FINISHED = "finished"


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sequence of tokens of a request: the prompt and what was generated after it.

    Attributes:
        request: the request it belongs to.
        index: which of the request's samples it is.
        token_ids: int32 [request.max_total_tokens]; the first num_tokens entries are prompt and
            generated tokens, the next num_pending ones UNKNOWN_TOKEN, the others undefined. Filled
            by Request and the scheduler.
        num_tokens: tokens known so far. Advanced by `Scheduler.update`.
        num_pending: tokens after those that steps under way are sampling. The device knows them
            before the host does, so the next step can be planned with them.
        num_prompt_tokens: tokens of the prompt.
        num_computed_tokens: tokens whose keys and values are in the KV pool (or, of a SWAPPED
            request, in the swap space) once the steps under way have run, always the first ones.
            Advanced by `Scheduler.schedule`, set to 0 when the sequence is preempted to be
            computed again.
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
    num_pending: int = 0
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

    @property
    def num_missing_tokens(self) -> int:
        """Tokens, pending ones included, that are not computed yet."""
        return self.num_tokens + self.num_pending - self.num_computed_tokens

    @property
    def awaits_last_token(self) -> bool:
        """Whether the token that a step under way samples will be its last: its keys are never
        needed."""
        ahead = self.num_tokens + self.num_pending
        return self.num_pending > 0 and ahead == self.request.max_total_tokens

    def copy(self) -> Sequence:
        """The same tokens again, without memory: another beam."""
        return dataclasses.replace(self, token_ids=self.token_ids.copy(), slot=-1)


class Request:
    """A prompt and the sequences that grow from it; scheduled and preempted together.

    Several sequences share the blocks of their prompt: one of them, the leader, computes it up to
    the token before its last, then the others are forked from it, and each computes its own last
    token of the prompt and what comes after. So it is again after a preemption that lost the
    blocks.

    Attributes:
        request_id: the name under which the caller knows it.
        number: its position in the order of `add_request` calls; breaks ties of arrival_time.
        prompt_token_ids: the prompt, as given.
        sampling_params: how tokens are chosen.
        stop_token_ids: every token id that ends a sequence: sampling_params.stop_token_ids and,
            unless ignored, the model's end-of-sequence tokens.
        max_total_tokens: a sequence that has this many tokens, prompt included, is finished.
        arrival_time: seconds on any clock; earlier requests run first.
        arrival_order: (arrival_time, number).
        order: the key by which queues are ordered; set by `Scheduler.add`.
        beams: the state of its beam search, or None. Then `sequences` are the beams of now.
        keep: whether it keeps its blocks when it is finished, so that it can be forked.
        sequences: those that are to be sampled, finished ones included.
        is_forked: whether each unfinished sequence has its own row (false: only the leader has).
            Set by the scheduler.
        swapped: its blocks in the swap space, or None. Set by the scheduler.
        status: set by the scheduler.

    Raises:
        ValueError: the prompt is empty or leaves no room for one token.
    """

    __slots__ = (
        "arrival_order",
        "arrival_time",
        "beams",
        "is_forked",
        "keep",
        "max_total_tokens",
        "number",
        "order",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "sequences",
        "status",
        "stop_token_ids",
        "swapped",
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
        num_sequences: int = 1,
        beams: BeamSearch | None = None,
        keep: bool = False,
    ) -> None:
        self.request_id = request_id
        self.number = number
        self.prompt_token_ids = list(prompt_token_ids)
        self.sampling_params = sampling_params
        self.stop_token_ids = stop_token_ids
        self.max_total_tokens = max_total_tokens
        self.arrival_time = arrival_time
        self.arrival_order = (arrival_time, number)
        self.order = self.arrival_order
        self.beams = beams
        self.keep = keep
        self.swapped: Swapped | None = None
        self.status = RequestStatus.WAITING
        num_prompt_tokens = len(self.prompt_token_ids)
        if not 1 <= num_prompt_tokens < max_total_tokens:
            raise ValueError(
                f"prompt_token_ids must hold 1 to {max_total_tokens - 1} tokens "
                f"(max_total_tokens={max_total_tokens}), got {num_prompt_tokens}"
            )
        self.sequences = []
        for index in range(num_sequences):
            token_ids = np.empty(max_total_tokens, np.int32)
            token_ids[:num_prompt_tokens] = self.prompt_token_ids
            self.sequences.append(
                Sequence(
                    request=self,
                    index=index,
                    token_ids=token_ids,
                    num_tokens=num_prompt_tokens,
                    num_prompt_tokens=num_prompt_tokens,
                )
            )
        self.is_forked = num_sequences == 1

    @property
    def finished(self) -> bool:
        """Whether all sequences are finished."""
        return self.status in (RequestStatus.FINISHED, RequestStatus.KEPT)

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that go on."""
        return [s for s in self.sequences if s.finish_reason is None]

    @property
    def leader(self) -> Sequence:
        """The one that computes the prompt for all."""
        return next(s for s in self.sequences if s.finish_reason is None)

    @property
    def fork_point(self) -> int:
        """Tokens that the leader computes before the others are forked from it."""
        return len(self.prompt_token_ids) - 1

    @property
    def num_rows(self) -> int:
        """Rows of the block tables that it may need while it runs."""
        if self.beams is not None:
            return self.beams.width
        return 1 if len(self.sequences) == 1 else len(self.unfinished)
