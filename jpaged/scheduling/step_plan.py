"""What the scheduler hands to the runner."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int32

from jpaged.scheduling.request import Sequence


@dataclasses.dataclass(slots=True, eq=False)
class Moves:
    """Blocks to move before a step computes; executed in the order of the fields, so that no block
    is overwritten before it was read.

    Attributes:
        swapped_out: pairs (block of the KV pool, block of the swap space) to save.
        copied: pairs (source, destination) of the KV pool: copy-on-write. All sources are read
            before any destination is written.
        swapped_in: pairs (block of the swap space, block of the KV pool) to bring back.
    """

    swapped_out: Int32[np.ndarray, "2 m"]
    copied: Int32[np.ndarray, "2 c"]
    swapped_in: Int32[np.ndarray, "2 n"]

    def __bool__(self) -> bool:
        return bool(self.swapped_out.size or self.copied.size or self.swapped_in.size)


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class StepPlan:
    """What one step computes: for each row, `lengths` tokens of a sequence from token `starts` on.

    Made by `Scheduler.schedule`, which has already taken the memory for it; read by the runner;
    handed back to `Scheduler.update` with the sampled tokens. No sequence has two rows.

    Attributes:
        sequences: one a row. Those that sample a token in this step (their row ends at their last
            token, known or pending) come first, the chunks that end earlier after them.
        slots: int32 [rows], the row of each sequence in `BlockManager.tables`.
        starts: int32 [rows], tokens of each sequence that are in the KV pool before the step.
        lengths: int32 [rows], tokens to compute (>= 1): the query lengths.
        num_decodes: how many of the first rows are decodes: one token, the last one.
        num_sampled: how many of the first rows sample a token.
        num_tokens: the sum of `lengths`.
        num_steps: how often the rows are computed, each time with the token sampled the time
            before: more than 1 only of decodes alone. It may be fewer (`may_end_early`).
        admitted: sequences that were given a slot since the last plan.
        preempted: sequences that lost slot and blocks to make room for this step.
        moves: blocks to move first.

    The token that a row computes may be one that only the device knows yet: where a sequence's
    token_ids hold UNKNOWN_TOKEN, it is the last one that was sampled in the row's slot.
    """

    sequences: list[Sequence]
    slots: Int32[np.ndarray, " rows"]
    starts: Int32[np.ndarray, " rows"]
    lengths: Int32[np.ndarray, " rows"]
    num_decodes: int
    num_sampled: int
    num_tokens: int
    admitted: list[Sequence]
    preempted: list[Sequence]
    moves: Moves
    num_steps: int = 1

    @property
    def may_end_early(self) -> bool:
        """Whether a stop token may end it after fewer than num_steps steps."""
        return self.num_steps > 1 and any(s.request.stop_token_ids for s in self.sequences)

    @property
    def needs_tokens(self) -> bool:
        """Whether the next step cannot be planned before the tokens of this one are known."""
        if self.num_steps > 1:
            return self.may_end_early
        return any(s.request.beams is not None for s in self.sequences[: self.num_sampled])


def make_plan(
    decodes: list[Sequence],
    chunks: list[tuple[Sequence, int]],
    *,
    admitted: list[Sequence],
    preempted: list[Sequence],
    moves: Moves,
    num_steps: int = 1,
) -> StepPlan:
    """The plan that computes one token of each of `decodes`, num_steps times, and (sequence,
    tokens) of `chunks`."""
    sequences = list(decodes)
    lengths = [1] * len(decodes)
    unfinished = []  # chunks that end before the last token
    for sequence, length in chunks:
        if length == sequence.num_missing_tokens:
            sequences.append(sequence)
            lengths.append(length)
        else:
            unfinished.append((sequence, length))
    num_sampled = len(sequences)
    for sequence, length in unfinished:
        sequences.append(sequence)
        lengths.append(length)
    return StepPlan(
        sequences=sequences,
        slots=np.fromiter((s.slot for s in sequences), np.int32, len(sequences)),
        starts=np.fromiter((s.num_computed_tokens for s in sequences), np.int32, len(sequences)),
        lengths=np.array(lengths, np.int32),
        num_decodes=len(decodes),
        num_sampled=num_sampled,
        num_tokens=sum(lengths),
        admitted=admitted,
        preempted=preempted,
        moves=moves,
        num_steps=num_steps,
    )
