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
    names = config.get("architectures") or []
    if not names and config.get("model_type") in _MODEL_TYPES:
        names = [_MODEL_TYPES[config["model_type"]]]
    known = [name for name in names if name in _ARCHITECTURES] if isinstance(names, list) else []
    if not known:
        found = names or config.get("model_type")
        raise ValueError(f"architecture must be one of {sorted(_ARCHITECTURES)}, got {found!r}")
    model_type = config.get("model_type")
    if model_type is not None and _MODEL_TYPES.get(model_type) != known[0]:
        raise ValueError(f"model_type must fit architecture {known[0]!r}, got {model_type!r}")
    return _ARCHITECTURES[known[0]](config)


def model_class(config: LlamaConfig) -> type[Llama]:
    """Return the module class that a config describes."""
    if type(config) not in _CLASSES:
        raise TypeError(f"config must be a model config, got {type(config).__name__}")
    return _CLASSES[type(config)]
