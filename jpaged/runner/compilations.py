"""Counts XLA compilations, so that "nothing recompiles while serving" is observed, not hoped."""

from __future__ import annotations

import jax

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


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
