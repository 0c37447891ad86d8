"""A tiny random Llama and functions that write it as a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def make_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return random tensors under Hugging Face's names, which bfloat16 too holds exactly."""
    rng = np.random.default_rng(1)
    size, feed, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens.weight": (vocab, size), "model.norm.weight": (size,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, size)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (size,),
            f"{layer}post_attention_layernorm.weight": (size,),
            f"{layer}self_attn.q_proj.weight": (width, size),
            f"{layer}self_attn.k_proj.weight": (kv_width, size),
            f"{layer}self_attn.v_proj.weight": (kv_width, size),
            f"{layer}self_attn.o_proj.weight": (size, width),
            f"{layer}mlp.gate_proj.weight": (feed, size),
            f"{layer}mlp.up_proj.weight": (feed, size),
            f"{layer}mlp.down_proj.weight": (size, feed),
        }
    return {
        name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16).astype(np.float32)
        for name, shape in shapes.items()
    }


@pytest.fixture
def config() -> dict[str, Any]:
    return dict(CONFIG)


@pytest.fixture
def tensors(config) -> dict[str, np.ndarray]:
    return make_tensors(config)


@pytest.fixture
def tensors_of() -> Callable[[dict[str, Any]], dict[str, np.ndarray]]:
    """Make the tensors of another config."""
    return make_tensors


@pytest.fixture
def write_folder(tmp_path) -> Callable[..., Path]:
    """Write config and tensors as a folder; `shards` > 1 splits them over files with an index."""

    def write(config, tensors, *, dtype=np.float32, shards=1, name="model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        cast = {key: np.ascontiguousarray(value.astype(dtype)) for key, value in tensors.items()}
        if shards == 1:
            save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})
            return folder
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
            part = {key: cast[key] for key in sorted(cast)[i::shards]}
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder

    return write


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Order the rows of q or k as llama.cpp does: pairs (i, i + D/2) become neighbours."""
    heads = np.split(rows, num_heads)
    half = len(heads[0]) // 2
    order = np.arange(2 * half).reshape(2, half).T.reshape(-1)
    return np.concatenate([head[order] for head in heads])


@pytest.fixture
def write_gguf(tmp_path) -> Callable[..., Path]:
    """Write config and tensors as a GGUF file of one quantisation type (norms in float32).

    `metadata` adds or replaces keys (None drops one); a str is written as a string, an int as
    uint32, a float as float32, a list as an array. `extra` are further tensors under GGUF names,
    `kinds` other types for some of these names, `options` go to GGUFWriter.
    """

    def write(
        config,
        tensors,
        kind="F32",
        *,
        metadata=None,
        extra=None,
        kinds=None,
        architecture="llama",
        **options,
    ) -> Path:
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture, **options)
        values = {
            "llama.vocab_size": config["vocab_size"],
            "llama.block_count": config["num_hidden_layers"],
            "llama.context_length": config["max_position_embeddings"],
            "llama.embedding_length": config["hidden_size"],
            "llama.feed_forward_length": config["intermediate_size"],
            "llama.attention.head_count": config["num_attention_heads"],
            "llama.attention.head_count_kv": config["num_key_value_heads"],
            "llama.attention.key_length": config["head_dim"],
            "llama.attention.value_length": config["head_dim"],
            "llama.rope.dimension_count": config["head_dim"],
            "llama.rope.freq_base": config["rope_theta"],
            "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        } | (metadata or {})
        for key, value in values.items():
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                (writer.add_int32 if value < 0 else writer.add_uint32)(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif value is not None:
                writer.add_array(key, value)
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        written = {}
        for hf_name, tensor in tensors.items():
            part = hf_name.split(".")[-2]
            written[gguf_name(hf_name)] = permute(tensor, heads[part]) if part in heads else tensor
        for key, tensor in (written | (extra or {})).items():
            own = (kinds or {}).get(key, kind)
            if tensor.ndim == 1 or own == "F32":
                writer.add_tensor(key, np.ascontiguousarray(tensor, np.float32))
            elif own == "I8":
                writer.add_tensor(key, tensor.astype(np.int8))
            else:
                quantised = gguf.GGMLQuantizationType[own]
                data = gguf.quants.quantize(np.ascontiguousarray(tensor), quantised)
                writer.add_tensor(key, data, raw_dtype=quantised)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def gguf_name(name: str) -> str:
    """Translate Hugging Face's name of a tensor."""
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, *middle, leaf = name.split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(middle)]}.{leaf}"


@pytest.fixture
def check_params() -> Callable[..., None]:
    """Compare a checkpoint's stacked parameters with tensors under Hugging Face's names."""

    def check(checkpoint, tensors, atol=0.0) -> None:
        state = checkpoint.params
        layers = checkpoint.config.num_layers

        def same(leaf, name, *, transposed):
            names = [name.format(i) for i in range(layers)] if "{}" in name else [name]
            want = [tensors[n].T if transposed else tensors[n] for n in names]
            want = np.stack(want) if "{}" in name else want[0]
            np.testing.assert_allclose(np.asarray(leaf, np.float32), want, rtol=0, atol=atol)

        same(state["embedding"]["table"][...], "model.embed_tokens.weight", transposed=False)
        same(state["norm"]["scale"][...], "model.norm.weight", transposed=False)
        assert ("head" in state) == ("lm_head.weight" in tensors)
        if "head" in state:
            same(state["head"]["table"][...], "lm_head.weight", transposed=False)
        stack, prefix = state["layers"], "model.layers.{}."
        norms = {"attention_norm": "input", "feed_forward_norm": "post_attention"}
        for ours, theirs in norms.items():
            name = f"{prefix}{theirs}_layernorm.weight"
            same(stack[ours]["scale"][...], name, transposed=False)
        attention, feed_forward = stack["attention"], stack["feed_forward"]
        # For each KV head its query heads, its keys and its values.
        qkv = np.asarray(attention["qkv_proj"]["kernel"][...])
        gate_up = np.asarray(feed_forward["gate_up_proj"]["kernel"][...])
        kernels = {
            "self_attn.q_proj": qkv[:, :, :, :-2],
            "self_attn.k_proj": qkv[:, :, :, -2],
            "self_attn.v_proj": qkv[:, :, :, -1],
            "self_attn.o_proj": attention["o_proj"]["kernel"][...],
            "mlp.gate_proj": gate_up[:, :, 0],
            "mlp.up_proj": gate_up[:, :, 1],
            "mlp.down_proj": feed_forward["down_proj"]["kernel"][...],
        }
        for theirs, kernel in kernels.items():
            matrix = kernel.reshape(*kernel.shape[:2], -1)
            same(matrix, f"{prefix}{theirs}.weight", transposed=True)

    return check
