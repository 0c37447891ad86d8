"""Hugging Face folders: config.json, generation_config.json, and safetensors (one or several)."""

from __future__ import annotations

import json
import os
from collections.abc import Set
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.checkpoints.safetensors import SafetensorsFile
from jpaged.checkpoints.tokenizer import PreTrainedTokenizerFast, tokenizer_from_folder
from jpaged.models import LlamaConfig, config_from_hf

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class HuggingFaceFolder:
    """A folder in transformers' layout; a `TensorSource` for `load_parameters`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder)

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_json_object(self.folder / "config.json")

    @property
    def config(self) -> LlamaConfig:
        """The model's shape; raises ValueError for what is not understood."""
        return config_from_hf(self._config)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The contents of generation_config.json, or {} where there is none."""
        path = self.folder / "generation_config.json"
        return read_json_object(path) if path.exists() else {}

    def eos_token_ids(self) -> dict[str, Any]:
        """Return what each file calls the end of a text: an id, a list of ids or None."""
        return {
            "config.json": self._config.get("eos_token_id"),
            "generation_config.json": self.generation_config.get("eos_token_id"),
        }

    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """Return the folder's tokenizer, or None where it has none."""
        return tokenizer_from_folder(self.folder)

    def tensor_names(self) -> Set[str]:
        """Return the names of all tensors."""
        return self._files_by_tensor.keys()

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        return self._files_by_tensor[name].shape(name)

    def read_tensor(self, name: str) -> np.ndarray:
        """Read one tensor."""
        return self._files_by_tensor[name].read(name)

    @cached_property
    def _files_by_tensor(self) -> dict[str, SafetensorsFile]:
        if (self.folder / _WEIGHTS).is_file():
            file = SafetensorsFile(self.folder / _WEIGHTS)
            return dict.fromkeys(file.tensor_names(), file)
        if (self.folder / _INDEX).exists():
            return self._from_index()
        pickled = sorted(path.name for pattern in _PICKLED for path in self.folder.glob(pattern))
        if pickled:
            raise ValueError(
                f"{self.folder} must hold safetensors, got the pickled {pickled[0]}: nothing is "
                f"unpickled here, so convert it to safetensors (transformers' save_pretrained)"
            )
        raise FileNotFoundError(f"{self.folder} has neither {_WEIGHTS} nor {_INDEX}")

    def _from_index(self) -> dict[str, SafetensorsFile]:
        index = read_json_object(self.folder / _INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in weight_map.values()
        ):
            raise ValueError(
                f"weight_map in {self.folder / _INDEX} must map tensor names to names of files in "
                f"the same folder"
            )
        files = {}
        for name in dict.fromkeys(weight_map.values()):
            if not os.path.isfile(self.folder / name):
                raise FileNotFoundError(
                    f"{_INDEX} in {self.folder} names {name!r}, which is not there"
                )
            files[name] = SafetensorsFile(self.folder / name)
        for tensor, name in weight_map.items():
            if tensor not in files[name].tensor_names():
                raise ValueError(
                    f"{_INDEX} in {self.folder} says that {name!r} has tensor {tensor!r}, "
                    f"which it lacks"
                )
        # All that the files hold, so that a tensor the index forgot is not passed over in silence;
        # of two tensors of one name, the one that the index means.
        held = {tensor: file for file in files.values() for tensor in file.tensor_names()}
        return held | {tensor: files[name] for tensor, name in weight_map.items()}


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object; ValueError and FileNotFoundError name the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
        raise ValueError(f"{path} must be valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
