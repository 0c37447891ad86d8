"""The result of a step, on its way from the device."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float, Int

from jpaged.runner.sampler import MAX_LOGPROBS


class StepResult:
    """The result of one step, or of several decode steps in one call.

    The others than `is_ready` wait for it. What they tell is of step `step` of those that ran.
    """

    def __init__(
        self, rows: Int[Array, "*steps R W"], prompt_rows: Int[Array, "T W"] | None = None
    ) -> None:
        """The packed rows that a program of `runner.step` returns."""
        self._rows = rows
        self._prompt_rows = prompt_rows

    def _of_step(self, step: int) -> Int[np.ndarray, "R W"]:
        rows = np.asarray(self._rows)
        return rows if rows.ndim == 2 else rows[step]

    def is_ready(self) -> bool:
        """Whether the step has run."""
        return self._rows.is_ready()  # type: ignore[attr-defined]

    def wait_for_prompt_logprobs(self) -> None:
        """Wait until `prompt_logprobs` can be read, if the step was asked for any."""
        if self._prompt_rows is not None:
            self._prompt_rows.block_until_ready()

    def num_steps(self) -> int:
        """How many steps ran."""
        rows = np.asarray(self._rows)
        return 1 if rows.ndim == 2 else int(np.count_nonzero(rows[:, 0, 0] >= 0))

    def tokens(self, count: int, step: int = 0) -> Int[np.ndarray, " count"]:
        """The sampled tokens of the first `count` rows."""
        return self._of_step(step)[:count, 0]

    def logprobs(self, row: int, best: int, step: int = 0) -> tuple[float, dict[int, float]]:
        """Of sampled row `row`: its token's logprob, and {token: logprob} of it and the best."""
        return _read_logprobs(self._of_step(step)[row], best)

    def candidates(self, row: int) -> tuple[Int[np.ndarray, " best"], Float[np.ndarray, " best"]]:
        """Of sampled row `row`: ids and logprobs of the best tokens, best first (asked for as
        logprobs are)."""
        values = self._of_step(0)[row, 2:]
        ids, logprobs = values[:MAX_LOGPROBS], values[MAX_LOGPROBS:].view(np.float32)
        return ids[ids >= 0], logprobs[ids >= 0]

    def prompt_logprobs(self, index: int, best: int) -> dict[int, float]:
        """{token: logprob} for the target of query token `index` of the step, as `logprobs`."""
        assert self._prompt_rows is not None, "the step was asked for none"
        return _read_logprobs(np.asarray(self._prompt_rows)[index], best)[1]


def _read_logprobs(row: Int[np.ndarray, " W"], best: int) -> tuple[float, dict[int, float]]:
    values = row.view(np.float32)
    ids = row[2 : 2 + best].tolist()
    logprobs = values[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + best].tolist()
    chosen = float(values[1])
    found = {token: value for token, value in zip(ids, logprobs) if token >= 0}
    return chosen, {int(row[0]): chosen} | found
