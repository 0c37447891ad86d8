"""vLLM, as the benchmarks drive it. Runs in a Python that has vLLM; none of our packages is needed.

Offline jobs (throughput, latency) go through vLLM's synchronous engine, as its `LLM` class does;
online ones (serving) through the asynchronous one, as its server does: it takes requests while a
step runs.

`python _rival_vllm.py JOB.json RESULT.json`
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
from typing import Any

from _request_loop import Deliver, Engine, main

# Unless the caller's environment says otherwise.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
}
_SETTINGS = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "tensor_parallel_size",
    "seed",
)


class _Settings:
    """What both engines are made from."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        import vllm
        from vllm.sampling_params import RequestOutputKind

        dtype = job["engine"]["dtype"]
        if dtype == "auto":  # as ours
            dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        settings = {name: job["engine"][name] for name in _SETTINGS}
        self.engine_arguments = {
            "model": job["rival_model"],
            "dtype": dtype,
            "disable_log_stats": True,
            **{name: value for name, value in settings.items() if value is not None},
            **job["rival_args"],
        }
        self._make_params = vllm.SamplingParams
        self._kind = RequestOutputKind.DELTA if job["stream"] else RequestOutputKind.FINAL_ONLY
        self.facts = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "dtype": dtype,
            "arguments": self.engine_arguments,
            "environment": {k: v for k, v in os.environ.items() if k.startswith(("VLLM_", "OMP_"))},
        }

    def params(self, output_len: int) -> Any:
        return self._make_params(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, output_kind=self._kind
        )


class OfflineEngine:
    """vLLM's synchronous engine under the request loop."""

    def __init__(self, settings: _Settings) -> None:
        import vllm

        self._settings = settings
        arguments = vllm.EngineArgs(**settings.engine_arguments)
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        self._prompts: dict[str, list[int]] = {}

    def add(self, name: str, token_ids: list[int], output_len: int) -> None:
        params = self._settings.params(output_len)
        self._engine.add_request(name, {"prompt_token_ids": token_ids}, params)
        self._prompts[name] = token_ids

    def step(self, deliver: Deliver, patience: float | None) -> None:
        for output in self._engine.step():
            name = output.request_id
            deliver(name, _new_tokens(output, self._prompts[name]), output.finished)

    def facts(self) -> dict[str, Any]:
        return self._settings.facts


class OnlineEngine:
    """vLLM's asynchronous engine, on a thread of its own, under the request loop."""

    def __init__(self, settings: _Settings) -> None:
        import vllm
        from vllm.v1.engine.async_llm import AsyncLLM

        self._settings = settings
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        arguments = vllm.AsyncEngineArgs(**settings.engine_arguments)

        async def make() -> Any:  # inside the loop, which it looks for
            return AsyncLLM.from_engine_args(arguments)

        self._engine = asyncio.run_coroutine_threadsafe(make(), self._loop).result()
        # (name, new tokens, finished), or an exception
        self._outputs: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def add(self, name: str, token_ids: list[int], output_len: int) -> None:
        params = self._settings.params(output_len)
        asyncio.run_coroutine_threadsafe(self._serve(name, token_ids, params), self._loop)

    async def _serve(self, name: str, token_ids: list[int], params: Any) -> None:
        try:
            prompt = {"prompt_token_ids": token_ids}
            async for output in self._engine.generate(prompt, params, name):
                self._outputs.put((name, _new_tokens(output, token_ids), output.finished))
        except Exception as error:
            self._outputs.put(error)

    def step(self, deliver: Deliver, patience: float | None) -> None:
        with contextlib.suppress(queue.Empty):
            output = self._outputs.get(timeout=patience)
            if isinstance(output, Exception):
                raise output
            deliver(*output)

    def facts(self) -> dict[str, Any]:
        return self._settings.facts


def _new_tokens(output: Any, prompt: list[int]) -> list[int]:
    if output.finished and list(output.prompt_token_ids) != prompt:
        raise RuntimeError(f"request {output.request_id} was computed for another prompt")
    return list(output.outputs[0].token_ids)


def load(job: dict[str, Any]) -> Engine:
    """The engine that suits the job."""
    return (OnlineEngine if job["online"] else OfflineEngine)(_Settings(job))


if __name__ == "__main__":  # vLLM starts processes that import this file
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    main(sys.argv, load)
