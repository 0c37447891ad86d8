"""Which model class reads which checkpoint: Hugging Face's `config.json` to a config of ours."""

from __future__ import annotations

from typing import Any

from jpaged.models.hf_config import llama_config_from_hf
from jpaged.models.llama import Llama, LlamaConfig

_ARCHITECTURES = {"LlamaForCausalLM": llama_config_from_hf}
_MODEL_TYPES = {"llama": "LlamaForCausalLM"}
_CLASSES: dict[type, type[Llama]] = {LlamaConfig: Llama}


def config_from_hf(config: dict[str, Any]) -> LlamaConfig:
    """Translate the contents of a `config.json`.

    Raises ValueError for an unknown architecture, and for a key that changes the arithmetic and is
    not understood; it names the architecture or the key.
    """
    model_type = config.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise ValueError(f"model_type must be a string, got {model_type!r}")
    names = config.get("architectures") or [_MODEL_TYPES.get(model_type or "", model_type)]
    known = [name for name in _ARCHITECTURES if isinstance(names, list) and name in names]
    if not known:
        found = config.get("architectures") or model_type
        raise ValueError(f"architecture must be one of {sorted(_ARCHITECTURES)}, got {found!r}")
    if model_type is not None and _MODEL_TYPES.get(model_type) != known[0]:
        raise ValueError(f"model_type must fit architecture {known[0]!r}, got {model_type!r}")
    return _ARCHITECTURES[known[0]](config)


def model_class(config: LlamaConfig) -> type[Llama]:
    """Return the module class that a config describes."""
    if type(config) not in _CLASSES:
        raise TypeError(f"config must be a model config, got {type(config).__name__}")
    return _CLASSES[type(config)]
