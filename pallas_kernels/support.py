"""Which backend runs a call: what each supports, and which one `auto` takes.

Every backend's module has `unsupported(case, target)`, which says in words what about a call it
cannot do, from static knowledge alone. `python -m pallas_kernels.support_table` prints the answers
as a table.
"""

import functools
import importlib
import logging
from types import ModuleType
from typing import NamedTuple

import numpy as np

from pallas_kernels.devices import Target, tracing_target

BACKENDS = ("mosaic", "triton", "llvm", "xla", "reference")
FEATURES = (
    "window",
    "soft_cap",
    "alibi_slopes",
    "sinks",
    "return_lse",
    "batch_invariant",
    "uint16 pool",
)


class Case(NamedTuple):
    """What decides whether a backend supports a call; sizes are None where an operator has none.

    dtype       of the numbers: bfloat16 for a pool of uint16
    head_dim    D
    block_size  B
    group       query heads for each KV head
    features    those of FEATURES that are in use
    """

    operator: str
    dtype: np.dtype
    head_dim: int | None = None
    block_size: int | None = None
    group: int | None = None
    features: frozenset[str] = frozenset()


def load(backend: str) -> ModuleType:
    """A backend's module; imported when first used, since xla should not wait for Pallas."""
    return importlib.import_module(f"pallas_kernels.{backend}")


def candidates(target: Target) -> tuple[str, ...]:
    """The backends that `auto` tries, best first; the last one supports everything."""
    if target.is_hopper:
        return ("mosaic", "triton", "xla")
    if target.is_nvidia:
        return ("triton", "xla")
    if target.platform == "cpu":
        return ("llvm", "xla")
    return ("xla",)


def choose(case: Case, backend: str) -> ModuleType:
    """The module that runs a call traced now.

    Raises:
        ValueError: There is no such backend.
        NotImplementedError: The backend that was asked for by name does not support the case.
    """
    target = tracing_target()
    if backend == "auto":
        return load(automatic(case, target))
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}")
    module = load(backend)
    reason = module.unsupported(case, target)
    if reason is not None:
        raise NotImplementedError(
            f"{case.operator} with backend {backend!r} does not support {reason}"
        )
    return module


def automatic(case: Case, target: Target) -> str:
    """The first candidate that supports the case; what is passed over is said once in the log."""
    *kernels, last = candidates(target)
    for backend in kernels:
        reason = load(backend).unsupported(case, target)
        if reason is None:
            return backend
        _warn_once(
            f"{case.operator}: backend {backend!r} is passed over on {target.kind}: {reason}"
        )
    return last


@functools.cache
def _warn_once(message: str) -> None:
    logging.getLogger("pallas_kernels").warning(message)
