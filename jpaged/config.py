"""The engine's settings."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from jpaged.sampling_params import MAX_SEED
from jpaged.validation import as_bool, as_choice, as_float, as_int, shown

# Token slots are numbered in int32 on the device, and padding uses the number after the last one.
MAX_SLOTS = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an `Engine`; checked when made, immutable afterwards.

    Attributes:
        max_model_len: most tokens a sequence may have, prompt and generated (>= 2); None takes
            the model's own limit.
        block_size: token slots in a block (>= 1).
        num_blocks: blocks in the KV pool (>= 1); None sizes the pool from the memory there is.
        gpu_memory_utilization: share of a GPU's memory for weights, temporaries and the pool
            together when num_blocks is None, in (0, 1].
        swap_space_gib: GiB of host memory for blocks of preempted requests (>= 0); reserved, and
            taken from the system as it is used.
        max_num_seqs: most sequences in a step (>= 1).
        max_num_batched_tokens: most tokens in a step, of decodes and prompt chunks together (>= 1).
        enable_prefix_caching: keep full blocks of tokens and share them among requests that begin
            with the same tokens (and the same cache_salt).
        preemption_mode: how a preempted request comes back: "recompute" (its tokens are computed
            again), "swap" (its blocks are saved to the swap space, where that has room) or "auto"
            (what is cheaper by measured rates).
        scheduling_policy: "fcfs" (in order of arrival) or "priority" (lower `priority` first; who
            waits grows more urgent).
        tensor_parallel_size: devices that share a model (>= 1; more than one is not built yet).
        attention_backend: "auto", "llvm", "xla", "triton", "mosaic" or "reference"
            (`pallas_kernels` says what each is). "auto" takes the fastest that the device and the
            model allow; one asked for by name that they do not allow is refused when the engine is
            made.
        overlap: plan and dispatch a step while the one before it runs (on a CPU not while requests
            keep coming, which would wait for it). Steps are cut differently then, which tokens do
            not depend on (but for ties, and in float32).
        max_decode_steps: most decode steps in one call of the device (>= 1), while nobody who could
            run waits: the host's share of a step shrinks, and a request that comes meanwhile waits
            for all of them. They end where a sequence reaches its length or a stop token (stop
            strings are found afterwards). Takes a program more for each bucket of decodes.
        batch_invariant: a request's log-probabilities are bitwise the same whatever else is in the
            batch, and however it was scheduled, preempted or cached. Slower.
        compilation_cache_dir: folder of JAX's persistent compilation cache, where the kernels for
            CPUs are kept too, or None for none.
        seed: seeds requests that bring no seed of their own, in [0, 2^63).

    Raises:
        TypeError, ValueError: as `SamplingParams`.
        NotImplementedError: an allowed value of a feature that is not built yet.
    """

    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space_gib: float = 4.0
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    preemption_mode: str = "auto"
    scheduling_policy: str = "fcfs"
    tensor_parallel_size: int = 1
    attention_backend: str = "auto"
    overlap: bool = True
    max_decode_steps: int = 1
    batch_invariant: bool = False
    compilation_cache_dir: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)
        if self.num_blocks is not None and self.num_blocks * self.block_size > MAX_SLOTS:
            raise ValueError(
                f"num_blocks must be at most {MAX_SLOTS // self.block_size} with block_size="
                f"{self.block_size} (slots are numbered in int32), got {self.num_blocks}"
            )
        if self.preemption_mode == "swap" and not self.swap_space_gib:
            raise ValueError("preemption_mode='swap' needs swap_space_gib > 0, got 0")
        if self.batch_invariant and self.max_decode_steps > 1:
            raise ValueError(
                "max_decode_steps must be 1 with batch_invariant=True (the program of several "
                f"steps may round differently), got {self.max_decode_steps}"
            )
        self._refuse_what_is_not_built()

    def _checked(self) -> dict[str, Any]:
        """Every field as a plain Python object, or the first error."""
        checked: dict[str, Any] = {}
        for name, low in (("max_model_len", 2), ("num_blocks", 1)):
            if getattr(self, name) is not None:
                allowed = f"None or an int >= {low}"
                checked[name] = as_int(name, getattr(self, name), allowed=allowed, low=low)
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "tensor_parallel_size",
            "max_decode_steps",
        ):
            checked[name] = as_int(name, getattr(self, name), allowed="an int >= 1", low=1)
        for name in ("enable_prefix_caching", "overlap", "batch_invariant"):
            checked[name] = as_bool(name, getattr(self, name))
        for name, choices in _CHOICES.items():
            checked[name] = as_choice(name, getattr(self, name), choices)
        checked["block_size"] = as_int(
            "block_size",
            self.block_size,
            allowed=f"an int in [1, {MAX_SLOTS}]",
            low=1,
            high=MAX_SLOTS,
        )
        checked["gpu_memory_utilization"] = as_float(
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            allowed="in (0, 1]",
            low=0.0,
            high=1.0,
            low_open=True,
        )
        checked["swap_space_gib"] = as_float(
            "swap_space_gib", self.swap_space_gib, allowed="a finite number >= 0", low=0.0
        )
        checked["compilation_cache_dir"] = _checked_folder(self.compilation_cache_dir)
        checked["seed"] = as_int(
            "seed", self.seed, allowed="an int in [0, 2**63)", low=0, high=MAX_SEED
        )
        return checked

    def _refuse_what_is_not_built(self) -> None:
        unbuilt = {
            "tensor_parallel_size": (self.tensor_parallel_size > 1, "tensor parallelism"),
        }
        for name, (asked, feature) in unbuilt.items():
            if asked:
                raise NotImplementedError(
                    f"{name}={getattr(self, name)!r} asks for {feature}, which is not built yet"
                )


_CHOICES = {
    "preemption_mode": ("recompute", "swap", "auto"),
    "scheduling_policy": ("fcfs", "priority"),
    "attention_backend": ("auto", "llvm", "xla", "reference", "triton", "mosaic"),
}


def _checked_folder(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"compilation_cache_dir must be None or the path of a folder, got {shown(value)}"
        )
    path = os.fspath(value)
    if not isinstance(path, str) or not path:
        raise ValueError(f"compilation_cache_dir must be None or a non-empty path, got {value!r}")
    return path
