"""The safetensors format (huggingface/safetensors on GitHub): a JSON header, then raw tensors.

Read here directly rather than through the safetensors package, whose NumPy half lacks bfloat16 and
maps the whole file: a tensor is read into its own buffer and gone when the next one is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One file's header, checked against the file's size; tensors are read on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = self._read_header()

    def tensor_names(self) -> Set[str]:
        """Return the names of the tensors in this file."""
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """Read one tensor into memory of its own."""
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise ValueError(
                f"tensor {name!r} of {self.path} must be one of {', '.join(_DTYPES)}, "
                f"got {entry.dtype}"
            )
        data = np.empty(entry.shape, _DTYPES[entry.dtype])
        with open(self.path, "rb") as file:
            file.seek(entry.begin)
            # The header was checked against the size: short only if the file shrank since.
            if file.readinto(data.reshape(-1).view(np.uint8).data) != data.nbytes:
                raise ValueError(f"tensor {name!r} of {self.path} is truncated")
        return data

    def _read_header(self) -> dict[str, _Entry]:
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError(
                    f"{self.path} must be a complete safetensors file, got {size} bytes "
                    f"with a header of {length}"
                )
            text = file.read(length)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
            raise ValueError(f"{self.path} must have a header of valid JSON: {error}") from error
        if not isinstance(header, dict):
            raise ValueError(f"{self.path} must have a JSON object as its header")
        start = 8 + length
        return {
            name: self._entry(name, value, start, size)
            for name, value in header.items()
            if name != "__metadata__"
        }

    def _entry(self, name: str, value: Any, start: int, size: int) -> _Entry:
        match value:
            case {"dtype": str(dtype), "shape": [*sizes], "data_offsets": [first, last]} if all(
                type(n) is int and n >= 0 for n in [*sizes, first, last]
            ):
                shape, begin, end = tuple(sizes), start + first, start + last
            case _:
                raise ValueError(f"tensor {name!r} of {self.path} has a malformed header")
        if end > size:
            raise ValueError(
                f"tensor {name!r} of {self.path} is truncated: it ends at byte {end}, "
                f"the file has {size}"
            )
        itemsize = _DTYPES[dtype].itemsize if dtype in _DTYPES else None
        if not begin <= end or (itemsize and end - begin != math.prod(shape) * itemsize):
            raise ValueError(
                f"tensor {name!r} of {self.path} must fill shape {shape} of {dtype}, "
                f"got {end - begin} bytes"
            )
        return _Entry(dtype, shape, begin, end)
