"""Which request held which block of the KV pool, step by step: recorded to be drawn."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from jpaged.scheduling import Request, RequestStatus, Scheduler

# Marks of blocks that no request holds. A request's mark is its number + 1.
FREE, CACHED = 0, -1
# Preempted requests of which the picture has a line each; there are rarely more.
NUM_LANES = 12
NUM_NAMES = 12

_AWAY = (RequestStatus.PREEMPTED, RequestStatus.SWAPPED)
_HIGHEST_MARK = np.iinfo(np.int32).max


class RecordedEngine(Protocol):
    """What a history wants of an `Engine`."""

    scheduler: Scheduler
    after_step: list[Callable[[], None]]

    def stats(self) -> Any:
        """The figures of the picture's title: `EngineStats`."""
        ...


class BlockHistory:
    """Records who holds the blocks of an engine after each step from now on, for a picture.

        history = BlockHistory(engine)
        ...
        history.draw("blocks.png")

    Memory is bounded: a column of the history holds the blocks that changed since the column
    before, and when there are too many columns or changes, every other column is dropped and from
    then on one step of twice as many is recorded. Preemptions are noted in every step. A step costs
    time in proportion to the pool (less than a millisecond for 10,000 blocks).

    Attributes:
        engine: the engine.
        num_blocks: blocks of its KV pool.
        steps: steps seen.
        stride: steps from one column to the next.
        names: {number: request id} of the first requests that held blocks.
    """

    def __init__(
        self, engine: RecordedEngine, *, max_columns: int = 2048, max_changes: int = 4_000_000
    ) -> None:
        """
        max_columns   most columns to keep (even, >= 2)
        max_changes   changes of blocks (12 bytes each) from which on columns are dropped (>= 1)

        Raises ValueError if they are not.
        """
        if max_columns < 2 or max_columns % 2:
            raise ValueError(f"max_columns must be even and >= 2, got {max_columns!r}")
        if max_changes < 1:
            raise ValueError(f"max_changes must be >= 1, got {max_changes!r}")
        self.engine = engine
        self.num_blocks = engine.scheduler.block_manager.num_blocks
        self.steps = 0
        self.stride = 1
        self.names: dict[int, str] = {}
        self._max_columns = max_columns
        self._max_changes = max_changes
        self._state = np.zeros((2, self.num_blocks), np.int32)  # of the last column
        self._changes: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_changes = 0
        self._lanes: list[np.ndarray] = []
        self._preemptions: list[np.ndarray] = []
        self._new_preemptions = np.zeros(2, np.int32)  # since the last column
        self._running: list[Request] = list(engine.scheduler.running)
        self._away: list[Request | None] = []  # the preempted ones, each in its lane
        engine.after_step.append(self._record)

    def close(self) -> None:
        """Record no more; what was recorded can still be drawn."""
        if self._record in self.engine.after_step:
            self.engine.after_step.remove(self._record)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the KV pool over time into a .png, .pdf or .svg file.

        One column a step and one row a block; every request has a colour, shared blocks are
        hatched, cached ones grey and free ones white. Above it, when and for how long requests were
        preempted. A pool of more rows or columns than the picture has dots is sampled evenly.

        Raises:
            ImportError: matplotlib (the extra "bench") is not installed.
            ValueError: no step was recorded, or the file's name ends in something else.
            OSError: the file cannot be written.
        """
        from jpaged.block_picture import draw_history  # matplotlib is an extra

        draw_history(self, path)

    def states(self, blocks: Int32[np.ndarray, " r"]) -> Int32[np.ndarray, "columns 2 r"]:
        """Who held these blocks after each recorded step (and after the last).

        [:, 0] is FREE, CACHED, or the mark of the first (by number) of the requests that held the
        block; [:, 1] is 0, or, if several tables named it, the mark of the last of them, which is
        the same where they were sequences of one request.
        """
        state = np.zeros_like(self._state)
        columns = []
        for changed, new in self._changes:
            state[:, changed] = new
            columns.append(state[:, blocks])
        if self._has_open_column:
            columns.append(self._current_state()[:, blocks])
        return np.array(columns, np.int32).reshape(-1, 2, len(blocks))

    def highest_block(self) -> int:
        """The highest block that was ever seen to be held or cached; -1 if none was."""
        highest = [int(changed[-1]) for changed, _ in self._changes if len(changed)]
        return max(highest, default=-1)

    def lanes(self) -> Int32[np.ndarray, "columns lanes"]:
        """The preempted requests at the time of each column, each in one lane from when it was
        preempted until it ran again: 0, its mark if it was swapped out, or minus its mark if it was
        to be computed again."""
        open_column = [self._lane_marks()] if self._has_open_column else []
        return np.array([*self._lanes, *open_column], np.int32).reshape(-1, NUM_LANES)

    def preemptions(self) -> Int32[np.ndarray, "columns 2"]:
        """Requests preempted in the steps of each column: to be computed again, and swapped out."""
        open_column = [self._new_preemptions] if self._has_open_column else []
        return np.array([*self._preemptions, *open_column], np.int32).reshape(-1, 2)

    @property
    def _has_open_column(self) -> bool:
        """Whether steps were seen after the last column."""
        return self.steps > len(self._changes) * self.stride

    def _record(self) -> None:
        """Take in a step that has ended."""
        self._note_preemptions()
        self.steps += 1
        if self.steps % self.stride:
            return
        state = self._current_state()
        changed = np.flatnonzero((state != self._state).any(axis=0)).astype(np.int32)
        self._changes.append((changed, state[:, changed]))
        self._num_changes += len(changed)
        self._lanes.append(self._lane_marks())
        self._preemptions.append(self._new_preemptions)
        self._new_preemptions = np.zeros(2, np.int32)
        self._state = state
        too_many = self._num_changes > self._max_changes
        if len(self._changes) == self._max_columns or (too_many and len(self._changes) % 2 == 0):
            self._thin_out()

    def _current_state(self) -> Int32[np.ndarray, "2 N"]:
        scheduler = self.engine.scheduler
        manager = scheduler.block_manager
        pool = manager.pool
        holders = []
        for request in (*scheduler.running, *scheduler.kept):
            holders += [(request.number + 1, s.slot) for s in request.sequences if s.slot >= 0]
            if len(self.names) < NUM_NAMES:
                self.names.setdefault(request.number, request.request_id)
        marks, slots = np.array(holders, np.int32).reshape(-1, 2).T
        tables = manager.tables[slots]
        in_use = np.arange(tables.shape[1]) < manager.blocks_for(manager.num_tokens[slots])[:, None]
        blocks, owners = tables[in_use], marks[np.nonzero(in_use)[0]]
        first = np.full(self.num_blocks, _HIGHEST_MARK, np.int32)
        last = np.zeros(self.num_blocks, np.int32)
        np.minimum.at(first, blocks, owners)
        np.maximum.at(last, blocks, owners)
        unused = np.where(pool.kept, CACHED, FREE)
        return np.stack(
            [
                np.where(last > 0, first, unused).astype(np.int32),
                np.where(pool.ref_counts > 1, last, 0).astype(np.int32),
            ]
        )

    def _note_preemptions(self) -> None:
        """Give each request that was preempted in this step a lane, until it runs again."""
        running = self.engine.scheduler.running
        self._away = [r if r is not None and r.status in _AWAY else None for r in self._away]
        for request in self._running:
            if request.status in _AWAY:
                self._new_preemptions[int(request.status is RequestStatus.SWAPPED)] += 1
                if None in self._away:
                    self._away[self._away.index(None)] = request
                else:
                    self._away.append(request)
        self._running = list(running)

    def _lane_marks(self) -> Int32[np.ndarray, " lanes"]:
        marks = np.zeros(NUM_LANES, np.int32)
        for lane, request in enumerate(self._away[:NUM_LANES]):
            if request is not None:
                swapped = request.status is RequestStatus.SWAPPED
                marks[lane] = (request.number + 1) * (1 if swapped else -1)
        return marks

    def _thin_out(self) -> None:
        """Keep every other column, with all preemptions."""
        merged = []
        for (blocks, new), (later_blocks, later_new) in zip(
            self._changes[::2], self._changes[1::2]
        ):
            stays = ~np.isin(blocks, later_blocks, assume_unique=True)
            blocks = np.concatenate([blocks[stays], later_blocks])
            order = np.argsort(blocks)
            new = np.concatenate([new[:, stays], later_new], axis=1)
            merged.append((blocks[order], new[:, order]))
        self._changes = merged
        self._num_changes = sum(len(blocks) for blocks, _ in merged)
        self._lanes = self._lanes[1::2]
        self._preemptions = [
            one + other for one, other in zip(self._preemptions[::2], self._preemptions[1::2])
        ]
        self.stride *= 2
