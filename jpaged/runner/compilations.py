"""XLA compilations: the options that the engine's programs are compiled with, and a count, so that
"nothing recompiles while serving" is observed, not hoped."""

from __future__ import annotations

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"

# A layer's weights are a slice of the stacked ones, at the loop's index. XLA (since jax 0.11) hands
# cuBLAS the slice's address, but copies the slice for a matrix product by a kernel of its own, and
# for several projections joined into one product: a step would read all weights twice and write
# them once. So no product by XLA's own kernels, and none joined. (On a GPU it would choose between
# cuBLAS and its own by timing them, but the product alone, without the copy.)
_GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}

# LLVM's first level of optimisation: programs as fast as by its third, compiled in a tenth less
# time (measured, BUILD_NOTES.md). Without any a step takes twice as long.
_CPU_OPTIONS = {"xla_backend_optimization_level": 1}
_OPTIONS = {"gpu": _GPU_OPTIONS, "cpu": _CPU_OPTIONS}


def compiler_options(platform: str) -> dict[str, bool | int] | None:
    """Options for `jax.stages.Lowered.compile` of the programs that a step consists of."""
    return dict(_OPTIONS[platform]) if platform in _OPTIONS else None


class CompilationCounter:
    """Counts what XLA compiles (persistent cache hits too) inside `with counter:` blocks.

    The listener is registered for the length of the block alone, so compilations of the host
    program's own JAX code are not counted. One thread at a time.
    """

    def __init__(self) -> None:
        self.count = 0

    def _on_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1

    def __enter__(self) -> CompilationCounter:
        jax.monitoring.register_event_duration_secs_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
