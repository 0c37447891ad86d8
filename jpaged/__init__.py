"""jpaged: a PagedAttention serving engine in JAX.

The names below are imported when first used, so that `jpaged.memory`, `jpaged.scheduling` and
`jpaged.simulation` import on a machine without jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jpaged.config import EngineConfig
    from jpaged.llm import LLM
    from jpaged.outputs import RequestOutput
    from jpaged.sampling_params import SamplingParams

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams"]

_MODULES = {
    "LLM": "jpaged.llm",
    "EngineConfig": "jpaged.config",
    "RequestOutput": "jpaged.outputs",
    "SamplingParams": "jpaged.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jpaged' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
