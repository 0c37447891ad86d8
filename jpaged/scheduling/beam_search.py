"""Beam search on the host: which beams go on, which hypotheses are finished, when to stop.

The rules are those of transformers 5 (`generate(num_beams=...)` without sampling), to the float32
bit of the scores. With w = width:

1. A beam's score is the sum of its generated tokens' log-probabilities (log-softmax of the raw
   logits), accumulated one token at a time in float32.
2. All continuations of all beams are ranked by score. One that ends (an end-of-sequence token, or
   any token once `max_new_tokens` are generated) becomes a finished hypothesis if it ranks among
   the first w, else it is dropped. The best w of those that do not end are the next beams.
3. A finished hypothesis scores score / n ** length_penalty, n its generated tokens with the
   end-of-sequence token among them. The best w finished ones are kept; of equals, the older.
4. The search stops when `max_new_tokens` are generated, or when w hypotheses are finished and
   either early_stopping is True, or the best running beam has nothing to hope for: its score / l **
   length_penalty is not above the worst kept hypothesis, with l the tokens generated so far, or
   `max_new_tokens` if early_stopping is "never" and length_penalty > 0.

**Few candidates are enough.** Rule 2 asks for the first w of all continuations, and for the first w
of those that do not end. If c' continuations of one beam rank before one of its own, at least c'
rank before it overall, so the first w overall lie within the first w of each beam; and among the
first w + e of a beam at most e end (e = number of end-of-sequence tokens), so the first w that do
not end lie within them. Every beam thus hands in its `num_candidates` = w + e best tokens by
log-probability: adding the beam's score to all of them never reverses their order. (2 * w are as
good as long as e <= w. transformers ranks max(2, 1 + e) * w overall for the same reason, and reads
no more of them than this.)

**The first step needs one row.** transformers runs w copies of the prompt and starts all but the
first at score -1e9, so that none of their continuations can rank before any of the first's. Here
the search starts with one beam of score 0, and the first step's w beams are all its children: the
prompt is computed once and forked.

**Ties.** Of equal scores the smaller beam index goes first, then the earlier column of the
candidates (torch.topk, which transformers uses, leaves the order of equals open).

One difference: transformers marks empty places of its list of finished hypotheses with score -1e9
and compares scores with it, so that under a penalty of, say, -8 it may return nothing; here a
finished hypothesis is never worth less than none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int32

# Scores divided by it or multiplied with it stay within float32.
_LARGEST_DIVISOR = 1e30


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BeamHypothesis:
    """A finished sequence of a beam search.

    Attributes:
        token_ids: int32 [n], the generated tokens, an end-of-sequence token at the end included.
        score: cumulative_logprob / n ** length_penalty, by which hypotheses are ranked (float32).
        cumulative_logprob: sum of the tokens' log-probabilities (float32).
        finish_reason: "stop" (it ends with an end-of-sequence token) or "length".
    """

    token_ids: Int32[np.ndarray, " n"]
    score: float
    cumulative_logprob: float
    finish_reason: Literal["stop", "length"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BeamStep:
    """The beams after a step, best first: beam i is beam parents[i] of before plus token_ids[i].

    Attributes:
        parents: int32 [width], beams before the step (all 0 in the first one). A parent may occur
            several times or not at all. Empty when done.
        token_ids: int32 [width]. Empty when done.
        done: whether the search is over: no beam goes on.
    """

    parents: Int32[np.ndarray, " beams"]
    token_ids: Int32[np.ndarray, " beams"]
    done: bool


class BeamSearch:
    """The beam search of one prompt; the module's text states the rules.

    For each step, take the `num_candidates` best tokens of each of the `num_beams` running beams,
    call `advance`, and make the beams it names; once `done`, `best` has the results.

    Args:
        width: how many beams (>= 1). One beam is greedy decoding, unless early_stopping is "never".
        length_penalty: exponent on the length: above 0 favours long hypotheses, below 0 short ones.
        early_stopping: False, True or "never"; see rule 4.
        eos_token_ids: tokens that end a hypothesis; may be empty.
        max_new_tokens: a hypothesis of this many generated tokens is finished (>= 1).
        min_new_tokens: end-of-sequence tokens are no candidates before this many tokens are
            generated; the other tokens' log-probabilities are not changed.

    Attributes:
        width, num_generated: the width, and the tokens that each running beam has generated.

    Raises:
        ValueError: a value outside what is allowed; also a length_penalty whose powers of the
            lengths 1 .. max_new_tokens would carry scores out of float32.
    """

    def __init__(
        self,
        width: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        eos_token_ids: Iterable[int] = (),
        max_new_tokens: int,
        min_new_tokens: int = 0,
    ) -> None:
        for name, value, least in [
            ("width", width, 1),
            ("max_new_tokens", max_new_tokens, 1),
            ("min_new_tokens", min_new_tokens, 0),
        ]:
            if value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        if not abs(length_penalty) * math.log(max_new_tokens) <= math.log(_LARGEST_DIVISOR):
            raise ValueError(
                "length_penalty must be a number for which max_new_tokens ** length_penalty is in "
                f"[{1 / _LARGEST_DIVISOR:g}, {_LARGEST_DIVISOR:g}] "
                f"(max_new_tokens={max_new_tokens}), got {length_penalty!r}"
            )
        if not (isinstance(early_stopping, bool) or early_stopping == "never"):
            raise ValueError(
                f"early_stopping must be True, False or 'never', got {early_stopping!r}"
            )
        self.width = width
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._max_new = max_new_tokens
        self._min_new = min_new_tokens
        self._eos = np.array(sorted(set(eos_token_ids)), np.int64)
        self.num_generated = 0
        self._done = False
        self._scores = np.zeros(1, np.float32)
        # Parents and tokens of the beams after each step: a beam's text is traced back through
        # them when it is asked for, so that a step costs nothing that grows with the length.
        self._history: list[tuple[Int32[np.ndarray, " w"], Int32[np.ndarray, " w"]]] = []
        self._finished: list[BeamHypothesis] = []

    @property
    def num_candidates(self) -> int:
        """How many best tokens of each running beam a step needs, at least."""
        return self.width + len(self._eos)

    @property
    def num_beams(self) -> int:
        """Running beams: 1 before the first step, then `width`; 0 when done."""
        return len(self._scores)

    @property
    def done(self) -> bool:
        """Whether the search is over."""
        return self._done

    @property
    def scores(self) -> Float32[np.ndarray, " beams"]:
        """Score of each running beam (a copy), best first."""
        return self._scores.copy()

    def token_ids(self, beam: int) -> Int32[np.ndarray, " n"]:
        """The tokens that running beam `beam` has generated: int32 [num_generated].

        Raises:
            IndexError: there is no such running beam.
        """
        if not 0 <= beam < self.num_beams:
            raise IndexError(f"beam must be an int in [0, {self.num_beams}), got {beam!r}")
        return self._trace(beam)

    def advance(
        self,
        token_ids: Int32[np.ndarray, "beams candidates"],
        logprobs: Float32[np.ndarray, "beams candidates"],
    ) -> BeamStep:
        """Take one step.

        Args:
            token_ids: [num_beams, c >= num_candidates], for each running beam its c most likely
                next tokens, each once; best first, where equals should go in that order.
            logprobs: [num_beams, c], their log-probabilities: log-softmax of the raw logits.

        Returns:
            The beams to continue with.

        Raises:
            ValueError: shapes that do not fit, a NaN, or a search that is done.
        """
        if self._done:
            raise ValueError("advance must not be called when the search is done")
        token_ids = np.asarray(token_ids)
        logprobs = np.asarray(logprobs, np.float32)
        for name, array in [("token_ids", token_ids), ("logprobs", logprobs)]:
            if (
                array.ndim != 2
                or array.shape != token_ids.shape
                or array.shape[0] != self.num_beams
                or array.shape[1] < self.num_candidates
            ):
                raise ValueError(
                    f"{name} must have shape [{self.num_beams}, c], the same c >= "
                    f"{self.num_candidates} for both, got {array.shape}"
                )
        if np.isnan(logprobs).any():
            raise ValueError("logprobs must hold no NaN")

        ends = (token_ids[:, :, None] == self._eos).any(axis=2)
        if self.num_generated < self._min_new:
            logprobs = np.where(ends, np.float32(-np.inf), logprobs)
        self.num_generated += 1
        last = self.num_generated == self._max_new

        totals = (self._scores[:, None] + logprobs).ravel()
        order = np.argsort(-totals, kind="stable")
        totals, tokens, ends = totals[order], token_ids.ravel()[order], ends.ravel()[order]
        parents = order // logprobs.shape[1]
        for i in range(self.width):
            if ends[i] or last:
                reason: Literal["stop", "length"] = "stop" if ends[i] else "length"
                self._finish(int(parents[i]), int(tokens[i]), totals[i], reason)

        going = np.flatnonzero(~ends)[: 0 if last else self.width]
        best_running = totals[going[0]] if len(going) else np.float32(-np.inf)
        self._done = last or self._is_over(best_running)
        if self._done:
            going = going[:0]
        step = BeamStep(
            parents=parents[going].astype(np.int32),
            token_ids=tokens[going].astype(np.int32),
            done=self._done,
        )
        self._scores = totals[going]
        self._history.append((step.parents, step.token_ids))
        return step

    def best(self, n: int | None = None) -> list[BeamHypothesis]:
        """The n best finished hypotheses (all: None), best first.

        When `done` there are `width` of them; before that, those finished so far.

        Raises:
            ValueError: n is not in [1, width].
        """
        if n is None:
            n = self.width
        if not 1 <= n <= self.width:
            raise ValueError(
                f"n must be an int in [1, width], which is [1, {self.width}], got {n!r}"
            )
        return self._finished[:n]

    def _finish(
        self, parent: int, token: int, total: np.float32, reason: Literal["stop", "length"]
    ) -> None:
        """Keep beam `parent` plus `token` as a hypothesis if it is among the best `width`."""
        score = self._normalised(total, self.num_generated)
        place = len(self._finished)
        while place and self._finished[place - 1].score < score:
            place -= 1
        if place == self.width:
            return
        path = np.append(self._trace(parent), np.int32(token))
        self._finished.insert(place, BeamHypothesis(path, float(score), float(total), reason))
        del self._finished[self.width :]

    def _is_over(self, best_running: np.float32) -> bool:
        """Whether no running beam needs to go on (before max_new_tokens)."""
        if len(self._finished) < self.width:
            return False
        if self._early_stopping is True:
            return True
        hopes = self._early_stopping == "never" and self._length_penalty > 0
        length = self._max_new if hopes else self.num_generated
        return not self._normalised(best_running, length) > self._finished[-1].score

    def _normalised(self, total: np.float32, length: int) -> np.float32:
        return total / np.float32(length**self._length_penalty)

    def _trace(self, beam: int) -> Int32[np.ndarray, " n"]:
        """The tokens of beam `beam` of the last step."""
        path = np.empty(len(self._history), np.int32)
        for i in range(len(path) - 1, -1, -1):
            parents, tokens = self._history[i]
            path[i] = tokens[beam]
            beam = parents[beam]
        return path
