"""Our engine, as the benchmarks drive it: in their process, or as a program of its own."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import _repository  # noqa: F401 (makes the packages importable)
from _request_loop import Deliver, main

if TYPE_CHECKING:
    from jpaged.llm import LLM


class JpagedEngine:
    """An `LLM`'s engine under the request loop.

    Args:
        llm: the model, compiled.
        dtype: of its weights, for the report.
        stream: whether tokens are delivered one by one, or all at a request's end.
    """

    def __init__(self, llm: LLM, *, dtype: str, stream: bool) -> None:
        self._engine = llm.engine
        self._dtype = dtype
        self._stream = stream
        self._num_delivered: dict[str, int] = {}
        self._prompts: dict[str, list[int]] = {}

    def add(self, name: str, token_ids: list[int], output_len: int) -> None:
        from jpaged.sampling_params import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        self._engine.add_request(token_ids, params, request_id=name, stream=self._stream)
        self._num_delivered[name] = 0
        self._prompts[name] = token_ids

    def step(self, deliver: Deliver, patience: float | None) -> None:
        for output in self._engine.step():
            name, token_ids = output.request_id, output.outputs[0].token_ids
            deliver(name, token_ids[self._num_delivered[name] :], output.finished)
            self._num_delivered[name] = len(token_ids)
            if output.finished and output.prompt_token_ids != self._prompts[name]:
                raise RuntimeError(f"request {name} was computed for another prompt")

    def facts(self) -> dict[str, Any]:
        import jax

        return {
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "dtype": self._dtype,
            "stats": dataclasses.asdict(self._engine.stats()),
        }


def load(job: dict[str, Any]) -> JpagedEngine:
    """The model and engine that the job's engine arguments ask for, compiled."""
    from jpaged import llm  # not on import: it takes seconds, which count as loading

    dtype = llm.resolve_dtype(job["engine"]["dtype"]).__name__
    return JpagedEngine(llm.LLM(**job["engine"]), dtype=dtype, stream=job["stream"])


if __name__ == "__main__":
    main(sys.argv, load)
