"""GGUF files (llama.cpp's format) of the Llama architecture, dequantised by the gguf package."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Set
from dataclasses import replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFValueType,
    ReaderField,
    ReaderTensor,
    quants,
)

from jpaged.checkpoints.gguf_tokenizer import tokenizer_from_metadata
from jpaged.checkpoints.parameters import QuantisedRows
from jpaged.checkpoints.tokenizer import PreTrainedTokenizerFast
from jpaged.models import LlamaConfig, config_from_hf
from pallas_kernels.quantised import GROUP as QUANTISED_GROUP

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"  # divisors of the inverse frequencies (Llama 3.1 and later)

# llama.* keys that the config is made from: theirs to Hugging Face's.
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_REQUIRED_KEYS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
_NUMBERS = (
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.scaling.factor",
    "rope.scale_linear",
)
# llama.* keys that change the arithmetic and are handled below, or only allowed at a value that
# changes nothing.
_HANDLED_KEYS = {
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scale_linear",
    "expert_count",
    "expert_used_count",
}


# Types of groups of QUANTISED_GROUP numbers with a float16 scale, by the bits of a number.
_BITS = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q8_0: 8,
}

_LENGTH = struct.Struct("=Q")  # of a string
_JOINED_ROWS = 16  # that are dequantised as one


@cache
def _in_order(dtype: Any, order: Any) -> np.dtype:
    return np.dtype(dtype).newbyteorder(order)


class _Reader(GGUFReader):
    """The gguf package's reader, made faster and to name a tensor that is cut off."""

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, value: np.ndarray) -> None:
        # It is sliced for each string of a vocabulary, and a memmap is 4x slower to slice than the
        # plain array over the same memory.
        self._data = np.asarray(value)

    def _get(
        self, offset: int, dtype: Any, count: int = 1, override_order: Any = None
    ) -> np.ndarray:
        kind = _in_order(dtype, override_order or self.byte_order)
        end = int(offset) + kind.itemsize * int(count)
        # The reader takes what is past the end as empty, which leaves it in endless loops.
        if end > self.data.size:
            raise ValueError(f"it is truncated: byte {end} of {self.data.size} is wanted")
        return self.data[int(offset) : end].view(kind)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[GGUFValueType]]:
        # An array's items in one go: a vocabulary has 150,000, each of which takes the reader
        # several calls.
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        item = GGUFValueType(kind[0])
        begin = orig_offs + kind.nbytes + count.nbytes
        number = self.gguf_scalar_to_np.get(item)
        if number is not None:
            items = [self._get(begin, number, count[0])]
            end = begin + items[0].nbytes
        elif item == GGUFValueType.STRING:
            items, end = self._strings(begin, int(count[0]))
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        places = list(range(2, 2 + len(items)))
        return end - orig_offs, [kind, count, *items], places, [GGUFValueType.ARRAY, item]

    def _strings(self, begin: int, count: int) -> tuple[list[np.ndarray], int]:
        """The bytes of so many strings, each behind its length; and where they end."""
        data, memory, end = self.data, memoryview(self.data), int(begin)
        strings = []
        for _ in range(count):
            start = end + _LENGTH.size
            if start <= data.size:
                end = start + _LENGTH.unpack_from(memory, end)[0]
            if max(start, end) > data.size:
                raise ValueError(
                    f"it is truncated: byte {max(start, end)} of {data.size} is wanted"
                )
            strings.append(data[start:end])
        return strings, end

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for field in fields:
            dims, kind, offset = field.parts[3:6]
            block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
            size = math.prod(int(n) for n in dims) // block_size * block_bytes
            end = start_offs + int(offset[0]) + size
            if end > self.data.size:
                raise ValueError(
                    f"tensor {field.name!r} is truncated: it ends at byte {end}, "
                    f"the file has {self.data.size}"
                )
        super()._build_tensors(start_offs, fields)


class GGUFCheckpoint:
    """A .gguf file; a `TensorSource` under Hugging Face's names for `load_parameters`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        self.generation_config: dict[str, Any] = {}
        # The reader fails in many ways on a damaged file; they all mean the same.
        try:
            reader = _Reader(path)
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path} must be a complete GGUF file; reading it failed: {error}"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields
        architecture = self._value("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"general.architecture of {path} must be 'llama', got {architecture!r}"
            )
        if reader.byte_order != "I":
            raise ValueError(f"{path} must have this machine's byte order (gguf-convert-endian)")
        parts = self._value("split.count", 1)
        if parts not in (0, 1):
            raise ValueError(f"{path} must be a whole model, got one of {parts} parts: merge them")

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        try:
            return default if field is None else field.contents()
        except UnicodeDecodeError as error:
            raise ValueError(f"{key} of {self.path} must be UTF-8: {error}") from error

    @cached_property
    def config(self) -> LlamaConfig:
        """The model's shape; raises ValueError for what is not understood."""
        metadata = {
            key.removeprefix("llama."): self._value(key)
            for key in self._fields
            if key.startswith("llama.")
        }
        self._check_keys(metadata)
        config = {theirs: metadata[key] for key, theirs in _KEYS.items() if key in metadata}
        config["architectures"] = ["LlamaForCausalLM"]
        if "vocab_size" not in config:
            config["vocab_size"] = self._num_tokens()
        config["tie_word_embeddings"] = "output.weight" not in self._tensors
        config["attention_bias"] = "blk.0.attn_q.bias" in self._tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in self._tensors
        config["rope_scaling"] = self._rope_scaling(metadata)
        return self._with_rope_divisors(config_from_hf(config))

    def _check_keys(self, metadata: dict[str, Any]) -> None:
        for key in _REQUIRED_KEYS:
            if key not in metadata:
                raise ValueError(f"{self.path} must have llama.{key} in its metadata")
        for key, value in metadata.items():
            if key not in _KEYS and key not in _HANDLED_KEYS:
                raise ValueError(
                    f"{self.path} has a metadata key that is not understood: llama.{key}={value!r}"
                )
            if key in _NUMBERS:
                if not _is_number(value, int | float) or not 0 <= value < math.inf:
                    raise ValueError(
                        f"llama.{key} of {self.path} must be a number of at least 0, got {value!r}"
                    )
            elif key in _KEYS and (not _is_number(value, int) or value < 1):
                raise ValueError(
                    f"llama.{key} of {self.path} must be one int of at least 1 (the same for all "
                    f"layers), got {value!r}"
                )
        if metadata.get("expert_count", 0):
            raise ValueError(
                f"llama.expert_count of {self.path} must be 0, got {metadata['expert_count']}"
            )
        head_dim = metadata.get(
            "attention.key_length",
            metadata["embedding_length"] // metadata["attention.head_count"],
        )
        for key in ("attention.value_length", "rope.dimension_count"):
            if metadata.get(key, head_dim) != head_dim:
                raise ValueError(
                    f"llama.{key} of {self.path} must be the head dimension {head_dim}, "
                    f"got {metadata[key]}"
                )

    def _num_tokens(self) -> int:
        tokens = self._value("tokenizer.ggml.tokens")
        if not isinstance(tokens, list):
            raise ValueError(f"{self.path} must have llama.vocab_size or tokenizer.ggml.tokens")
        return len(tokens)

    def _rope_scaling(self, metadata: dict[str, Any]) -> dict[str, Any] | None:
        kind = metadata.get("rope.scaling.type", "none")
        factor = metadata.get("rope.scaling.factor", metadata.get("rope.scale_linear", 1.0))
        if kind not in ("none", "linear", "yarn"):
            raise ValueError(
                f"llama.rope.scaling.type of {self.path} must be none, linear or yarn, got {kind!r}"
            )
        if "rope.scale_linear" in metadata and kind == "none":
            kind = "linear"
        if kind == "none" or factor in (0.0, 1.0):
            return None
        scaling = {"rope_type": kind, "factor": float(factor)}
        if kind == "yarn" and "rope.scaling.original_context_length" in metadata:
            scaling["original_max_position_embeddings"] = metadata[
                "rope.scaling.original_context_length"
            ]
        return scaling

    def _with_rope_divisors(self, config: LlamaConfig) -> LlamaConfig:
        tensor = self._tensors.get(_ROPE_FACTORS)
        if tensor is None:
            return config
        values = self._dequantise(tensor, tensor.data).reshape(-1)
        if config.rope.rope_type != "default":
            raise ValueError(
                f"{self.path} must have {_ROPE_FACTORS} or llama.rope.scaling.type, "
                f"got both (the latter {config.rope.rope_type!r})"
            )
        if values.shape != (config.head_dim // 2,) or not (values > 0).all():
            raise ValueError(
                f"tensor {_ROPE_FACTORS!r} of {self.path} must have shape "
                f"({config.head_dim // 2},) and values above 0, got shape {values.shape}"
            )
        divisors = tuple(float(value) for value in values)
        return replace(config, rope=replace(config.rope, divisors=divisors))

    def eos_token_ids(self) -> dict[str, Any]:
        """Return the ids that end a text or a turn."""
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        return {key: self._value(key) for key in keys}

    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """Build the tokenizer that the metadata describes, or None where there is none."""
        if "tokenizer.ggml.model" not in self._fields:
            return None
        metadata = {
            key.removeprefix("tokenizer."): self._value(key)
            for key in self._fields
            if key.startswith("tokenizer.")
        }
        return tokenizer_from_metadata(metadata, self.name)

    @cached_property
    def _by_hf_name(self) -> dict[str, ReaderTensor]:
        return {
            _hf_name(name): tensor
            for name, tensor in self._tensors.items()
            if name != _ROPE_FACTORS
        }

    def tensor_names(self) -> Set[str]:
        """Return the names of all tensors."""
        return self._by_hf_name.keys()

    def tensor_shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, outermost axis first."""
        return tuple(int(n) for n in reversed(self._by_hf_name[name].shape))

    def read_tensor(self, name: str) -> np.ndarray:
        """Dequantise one tensor to float32."""
        return self._dequantise(self._by_hf_name[name], self._rows(name))

    def quantised_bits(self, name: str) -> int | None:
        """Return the bits of a number in a tensor that `read_quantised` reads, else None."""
        return _BITS.get(self._by_hf_name[name].tensor_type)

    def read_quantised(self, name: str) -> QuantisedRows:
        """Read one tensor as it is."""
        kind = self._by_hf_name[name].tensor_type
        rows = self._rows(name)
        groups = rows.reshape(rows.shape[0], -1, GGML_QUANT_SIZES[kind][1])

        def floats(begin: int) -> np.ndarray:
            return np.ascontiguousarray(groups[..., begin : begin + 2]).view(np.float16)[..., 0]

        scales = floats(0)
        if kind == GGMLQuantizationType.Q8_0:
            return QuantisedRows(groups[..., 2:].reshape(rows.shape[0], -1), scales, None)
        # Numbers of 0 to 15; those of Q4_0 mean 8 less.
        with np.errstate(over="ignore"):  # the caller looks at it
            offsets = floats(2) if kind == GGMLQuantizationType.Q4_1 else scales * np.float16(-8)
        halves = groups[..., -QUANTISED_GROUP // 2 :]
        numbers = np.empty((*groups.shape[:2], QUANTISED_GROUP), np.uint8)
        np.bitwise_and(halves, 15, out=numbers[..., : QUANTISED_GROUP // 2])
        np.right_shift(halves, 4, out=numbers[..., QUANTISED_GROUP // 2 :])
        return QuantisedRows(numbers.reshape(rows.shape[0], -1), scales, offsets)

    def _rows(self, name: str) -> np.ndarray:
        data = self._by_hf_name[name].data
        if ".q_proj." in name:
            return _unpermute(data, self.config.num_heads)
        if ".k_proj." in name:
            return _unpermute(data, self.config.num_kv_heads)
        return data

    def _dequantise(self, tensor: ReaderTensor, data: np.ndarray) -> np.ndarray:
        rows = data
        if data.ndim == 2 and data.size:
            # The package takes 16 rows at a time: longer ones are a tenth of the calls. Blocks lie
            # one after the other, so rows may be joined.
            rows = data.reshape(-1, math.gcd(data.shape[0], _JOINED_ROWS) * data.shape[1])
        try:
            values = quants.dequantize(rows, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                f"tensor {tensor.name!r} of {self.path} must be of a type that the gguf package "
                f"dequantises, got {tensor.tensor_type.name}"
            ) from error
        return values if rows is data else values.reshape(data.shape[0], -1)


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _hf_name(name: str) -> str:
    """Translate a tensor's name; an unknown one keeps its own, by which it is refused later."""
    match = _LAYER_TENSOR.fullmatch(name)
    if match and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    return _NAMES.get(name, name)


def _unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of q and k, which may still be quantised.

    llama.cpp rotates pairs (2i, 2i + 1) of a head, transformers and we pairs (i, i + D/2).
    """
    half = rows.shape[0] // num_heads // 2
    pairs = rows.reshape(num_heads, half, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
