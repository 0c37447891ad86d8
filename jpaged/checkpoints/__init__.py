"""Reads a model's weights, configuration and tokenizer from safetensors folders and GGUF files.

Nothing is unpickled, and no remote code runs.
"""

from jpaged.checkpoints.checkpoint import Checkpoint, load_checkpoint, read_config

__all__ = ["Checkpoint", "load_checkpoint", "read_config"]
