"""What bringing a preempted request back costs: by swap, or by recomputing it. Needs no jax."""

from __future__ import annotations

import math

# The rate is that of the last twenty or so observed steps.
_DECAY = 0.95


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")


class PreemptionCosts:
    """Decides between swap and recompute from measured rates (preemption_mode="auto").

    Attributes:
        link_bytes_per_second: rate at which blocks go to host memory or come back
            (swap_pool.measure_link).
    """

    def __init__(
        self, link_bytes_per_second: float, prefill_tokens_per_second: float | None = None
    ) -> None:
        """A prefill rate that is given here stays; without one it is what `observe_prefill` saw.

        Raises ValueError for a rate that is no finite number > 0.
        """
        _check_positive("link_bytes_per_second", link_bytes_per_second)
        if prefill_tokens_per_second is not None:
            _check_positive("prefill_tokens_per_second", prefill_tokens_per_second)
        self.link_bytes_per_second = link_bytes_per_second
        self._given_rate = prefill_tokens_per_second
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def prefill_tokens_per_second(self) -> float | None:
        """Tokens over seconds of the latest prefill steps; None before the first."""
        if self._given_rate is not None:
            return self._given_rate
        return self._tokens / self._seconds if self._seconds else None

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """Note a step that took `seconds` and computed num_tokens tokens, mostly of prompts.

        Old steps fade. A step counts by its length: one of few tokens, which the fixed cost of a
        step makes slow for each, hardly moves the rate.

        Raises ValueError unless num_tokens >= 1 and seconds is a finite number > 0.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be >= 1, got {num_tokens!r}")
        _check_positive("seconds", seconds)
        self._tokens = _DECAY * self._tokens + num_tokens
        self._seconds = _DECAY * self._seconds + seconds

    def swap_seconds(self, num_bytes: int) -> float:
        """What it costs to swap num_bytes out and in: they cross the link twice, out of the pool
        now and back into it later. (Recompute pays only once, on the way back.)"""
        return 2 * num_bytes / self.link_bytes_per_second

    def recompute_seconds(self, num_tokens: int) -> float:
        """What a prefill of num_tokens tokens costs; 0 while the rate is unknown."""
        rate = self.prefill_tokens_per_second
        return 0.0 if rate is None else num_tokens / rate

    def prefers_swap(self, num_bytes: int, num_tokens: int) -> bool:
        """Whether swapping is the cheaper way back for a request.

        When both cost the same, and before the prefill rate is known, it is recompute, which takes
        no host memory.

        num_bytes   of the distinct blocks that the request holds
        num_tokens  of its sequences that a recompute would have to compute
        """
        return self.swap_seconds(num_bytes) < self.recompute_seconds(num_tokens)
