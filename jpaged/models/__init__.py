"""Flax NNX model families over the paged KV pool."""

from jpaged.models.llama import Llama, LlamaConfig
from jpaged.models.registry import config_from_hf, model_class

__all__ = ["Llama", "LlamaConfig", "config_from_hf", "model_class"]
