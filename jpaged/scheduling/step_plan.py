"""What the scheduler hands to the runner."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Int32

from jpaged.scheduling.request import Sequence


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class StepPlan:
    """What one step computes: for each row, `lengths` tokens of a sequence from token `starts` on.

    Made by `Scheduler.schedule`, which has already taken the memory for it; read by the runner;
    handed back to `Scheduler.update` with the sampled tokens. No sequence has two rows.

    Attributes:
        sequences: one a row. Those that sample a token in this step (their row ends at their last
            known token) come first, the chunks that end earlier after them.
        slots: int32 [rows], the row of each sequence in `BlockManager.tables`.
        starts: int32 [rows], tokens of each sequence that are in the KV pool before the step.
        lengths: int32 [rows], tokens to compute (>= 1): the query lengths.
        num_sampled: how many of the first rows sample a token.
        num_tokens: the sum of `lengths`.
        admitted: sequences that were given their slot for this step.
        preempted: sequences that lost slot and blocks to make room for this step.
    """

    sequences: list[Sequence]
    slots: Int32[np.ndarray, " rows"]
    starts: Int32[np.ndarray, " rows"]
    lengths: Int32[np.ndarray, " rows"]
    num_sampled: int
    num_tokens: int
    admitted: list[Sequence]
    preempted: list[Sequence]
