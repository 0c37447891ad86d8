"""GGUF files: every quantisation that can be written here, rope factors, and what is refused."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpaged.checkpoints import load_checkpoint, read_config
from jpaged.models import LlamaConfig
from jpaged.models.rope import RopeConfig, inverse_frequencies

QUANTISED = ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]


def load(path, dtype=jnp.float32):
    return load_checkpoint(str(path), dtype=dtype)


def rounded(tensors, kind):
    """Return the tensors as the quantisation holds them; vectors stay as they are."""
    quantised = gguf.GGMLQuantizationType[kind]

    def through(tensor):
        if tensor.ndim == 1:
            return tensor
        return gguf.quants.dequantize(gguf.quants.quantize(tensor, quantised), quantised)

    return {name: through(tensor) for name, tensor in tensors.items()}


def test_a_float32_file_is_read_exactly(config, tensors, write_gguf, check_params):
    path = write_gguf(config, tensors, metadata={"tokenizer.ggml.eos_token_id": 2})
    checkpoint = load(path)
    check_params(checkpoint, tensors)
    assert checkpoint.config == LlamaConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=32,
        rms_norm_eps=float(np.float32(1e-5)),
        rope=RopeConfig(original_max_position_embeddings=128),
        max_position_embeddings=128,
    )
    assert (checkpoint.tokenizer, checkpoint.generation_config) == (None, {})
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.name == str(path)


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_files_are_dequantised(kind, config, tensors, write_gguf, check_params):
    checkpoint = load(write_gguf(config, tensors, kind))
    check_params(checkpoint, rounded(tensors, kind))


def test_a_file_and_a_folder_of_the_same_weights_load_alike(
    config, tensors, write_gguf, write_folder
):
    from_file = load(write_gguf(config, tensors), jnp.bfloat16)
    from_folder = load(write_folder(config, tensors), jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, from_file.params, from_folder.params)
    # GGUF holds the epsilon in float32.
    epsilon = from_folder.config.rms_norm_eps
    assert replace(from_file.config, rms_norm_eps=epsilon) == from_folder.config


def test_a_file_without_an_output_matrix_is_tied(config, tensors, write_gguf):
    del tensors["lm_head.weight"]
    checkpoint = load(write_gguf(config, tensors))
    assert checkpoint.config.tie_word_embeddings
    assert "head" not in checkpoint.params


def test_biases_are_read_and_put_in_order(config, tensors, write_gguf, write_folder):
    rng = np.random.default_rng(2)
    for layer in range(2):
        for name, size in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            key = f"model.layers.{layer}.self_attn.{name}_proj.bias"
            tensors[key] = rng.standard_normal(size).astype(np.float32)
    attention = load(write_gguf(config, tensors)).params["layers"]["attention"]
    qkv = attention["qkv_proj"]["bias"][...]  # [L, K, G + 2, D]
    parts = {"q": qkv[:, :, :-2], "k": qkv[:, :, -2], "v": qkv[:, :, -1]}
    for name, part in (parts | {"o": attention["o_proj"]["bias"][...]}).items():
        want = [tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] for i in range(2)]
        np.testing.assert_array_equal(part.reshape(2, -1), np.stack(want))


def test_defaults_of_missing_metadata(config, tensors, write_gguf):
    keys = ["attention.key_length", "attention.value_length", "rope.dimension_count"]
    dropped = {f"llama.{key}": None for key in [*keys, "rope.freq_base", "vocab_size"]}
    tokens = {"tokenizer.ggml.tokens": [f"t{i}" for i in range(40)]}
    read = read_config(write_gguf(config, tensors, metadata=dropped | tokens))
    assert (read.head_dim, read.rope.theta, read.vocab_size) == (32, 10000.0, 40)


def test_rope_factors_divide_the_frequencies(config, tensors, write_gguf):
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    read = read_config(write_gguf(config, tensors, extra={"rope_freqs.weight": factors}))
    plain, _ = inverse_frequencies(replace(read.rope, divisors=()), 32)
    found, scaling = inverse_frequencies(read.rope, 32)
    np.testing.assert_array_equal(found, plain / factors)
    assert scaling == 1.0
    hash(read)  # the config is a static attribute of a jitted module


@pytest.mark.parametrize(
    ("metadata", "rope"),
    [
        ({"llama.rope.scaling.type": "none"}, RopeConfig()),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, RopeConfig()),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            RopeConfig("linear", factor=4.0),
        ),
        ({"llama.rope.scale_linear": 2.0}, RopeConfig("linear", factor=2.0)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
            },
            RopeConfig("yarn", factor=4.0, original_max_position_embeddings=32),
        ),
    ],
)
def test_rope_scaling_is_read(metadata, rope, config, tensors, write_gguf):
    original = rope.original_max_position_embeddings or 128
    read = read_config(write_gguf(config, tensors, metadata=metadata)).rope
    assert read == replace(rope, original_max_position_embeddings=original)


def test_all_ids_that_end_a_text_or_a_turn_count(config, tensors, write_gguf):
    ids = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("eom", "eos", "eot"))}
    assert load(write_gguf(config, tensors, metadata=ids)).eos_token_ids == (1, 2, 0)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"split.count": 3}, "{} must be a whole model, got one of 3 parts"),
        ({"llama.expert_count": 8}, "llama.expert_count of {} must be 0, got 8"),
        ({"llama.logit_scale": 0.5}, "is not understood: llama.logit_scale=0.5"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window=64"),
        ({"llama.block_count": None}, "{} must have llama.block_count in its metadata"),
        ({"llama.vocab_size": None}, "{} must have llama.vocab_size or tokenizer.ggml.tokens"),
        ({"llama.rope.dimension_count": 16}, "must be the head dimension 32, got 16"),
        ({"llama.attention.value_length": 16}, "must be the head dimension 32, got 16"),
        ({"llama.rope.scaling.type": "longrope"}, "must be none, linear or yarn, got 'longrope'"),
        ({"llama.attention.head_count": [2, 2]}, "must be one int of at least 1 (the same for all"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count of {} must be one int"),
        ({"llama.attention.head_count_kv": 0}, "llama.attention.head_count_kv of {} must be one"),
        ({"llama.block_count": -2}, "llama.block_count of {} must be one int of at least 1"),
        ({"llama.embedding_length": "64"}, "for all layers), got '64'"),
        ({"llama.context_length": 0}, "llama.context_length of {} must be one int of at least 1"),
        (
            {"llama.attention.layer_norm_rms_epsilon": None},
            "{} must have llama.attention.layer_norm_rms_epsilon in its metadata",
        ),
        (
            {"llama.attention.layer_norm_rms_epsilon": math.nan},
            "llama.attention.layer_norm_rms_epsilon of {} must be a number of at least 0, got nan",
        ),
        ({"llama.rope.scaling.factor": [2.0]}, "must be a number of at least 0, got [2.0]"),
        ({"llama.block_count": 2**31}, "{} must have tensors for the 2147483648 layers"),
        ({"split.count": "3"}, "{} must be a whole model, got one of 3 parts"),
        ({"tokenizer.ggml.eos_token_id": 40}, "must be an id (or ids) in [0, 40), got 40"),
    ],
)
def test_metadata_that_changes_the_arithmetic_is_refused(
    metadata, message, config, tensors, write_gguf
):
    path = write_gguf(config, tensors, metadata=metadata)
    with pytest.raises(ValueError, match=re.escape(message.format(path))):
        load(path)


def test_rope_factors_with_a_scaling_are_refused(config, tensors, write_gguf):
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    factors = {"rope_freqs.weight": np.ones(16, np.float32)}
    path = write_gguf(config, tensors, metadata=scaling, extra=factors)
    with pytest.raises(ValueError, match=r"must have rope_freqs.weight or llama.rope.scaling.type"):
        load(path)


@pytest.mark.parametrize(
    "factors",
    [np.ones(8), np.zeros(16), np.full(16, np.nan), np.ones(0), np.ones((0, 16))],
)
def test_malformed_rope_factors_are_refused(factors, config, tensors, write_gguf):
    path = write_gguf(config, tensors, extra={"rope_freqs.weight": factors.astype(np.float32)})
    with pytest.raises(ValueError, match=r"must have shape \(16,\) and values above 0"):
        load(path)


def test_another_architecture_is_refused(config, tensors, write_gguf):
    path = write_gguf(config, tensors, architecture="mamba")
    message = f"general.architecture of {path} must be 'llama', got 'mamba'"
    with pytest.raises(ValueError, match=re.escape(message)):
        load(path)


def test_a_file_of_the_other_byte_order_is_refused(config, tensors, write_gguf):
    other = gguf.GGUFEndian.BIG if sys.byteorder == "little" else gguf.GGUFEndian.LITTLE
    path = write_gguf(config, tensors, endianess=other)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} must have this machine's byte"):
        load(path)


def test_a_missing_tensor_is_named(config, tensors, write_gguf):
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks tensor 'model.layers.1.mlp.up_proj.weight'$"):
        load(write_gguf(config, tensors))


def test_a_wrong_shape_is_named_with_both_shapes(config, tensors, write_gguf):
    name = "model.layers.0.self_attn.v_proj.weight"
    path = write_gguf(config, tensors | {name: tensors[name][:, :32]}, "Q8_0")
    message = f"tensor {name!r} of {path} must have shape (32, 64), got (32, 32)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(path)


def test_a_tensor_without_a_place_is_refused(config, tensors, write_gguf):
    path = write_gguf(config, tensors, extra={"blk.0.attn_q_norm.weight": np.ones(32)})
    with pytest.raises(ValueError, match=r"has tensor 'blk\.0\.attn_q_norm\.weight', for which"):
        load(path)


def test_a_type_that_cannot_be_dequantised_is_refused(config, tensors, write_gguf):
    path = write_gguf(config, tensors, "I8")
    with pytest.raises(ValueError, match=r"of a type that the gguf package dequantises, got I8"):
        load(path)


@pytest.fixture
def whole_file(config, tensors, write_gguf):
    path = write_gguf(config, tensors, "Q4_0", metadata={"general.name": "x" * 300})
    return path, path.read_bytes()


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(share=st.floats(0, 1, exclude_max=True), early=st.booleans())
def test_a_file_cut_anywhere_is_refused(share, early, whole_file):
    path, data = whole_file
    size = min(len(data), 4000) if early else len(data) - 32  # the last bytes may be padding
    path.write_bytes(data[: int(share * size)])
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} must be a complete GGUF file"):
        load(path)


def test_a_cut_tensor_is_named(whole_file):
    path, data = whole_file
    path.write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"tensor '[\w.]+' is truncated: it ends at byte \d+"):
        load(path)


@pytest.mark.parametrize("length", [2**40, 2**63])
def test_an_array_longer_than_the_file_is_refused(length, config, tensors, write_gguf):
    # The gguf package's reader would go on reading nothing, 2**40 times.
    path = write_gguf(config, tensors, metadata={"tokenizer.ggml.token_type": [77] * 3})
    old, new = (3).to_bytes(8, "little"), length.to_bytes(8, "little")
    head = b"tokenizer.ggml.token_type" + (9).to_bytes(4, "little") + (5).to_bytes(4, "little")
    data = path.read_bytes()
    assert head + old in data
    path.write_bytes(data.replace(head + old, head + new))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} must be a complete GGUF file"):
        load(path)


def test_rope_factors_without_an_axis_are_refused(config, tensors, write_gguf):
    path = write_gguf(config, tensors, extra={"rope_freqs.weight": np.ones(16, np.float32)})
    name, axis = b"rope_freqs.weight", (16).to_bytes(8, "little")
    old, new = name + (1).to_bytes(4, "little") + axis, name + (0).to_bytes(4, "little")
    data = path.read_bytes()
    assert old in data
    # As long as before: the header is padded by what the axis took.
    head, _ = data.split(old)
    place = len(head) + len(old) + 4 + 8  # past its type and its offset
    path.write_bytes(
        data[: len(head)] + new + data[len(head) + len(old) : place] + b"\0" * 8 + data[place:]
    )
    with pytest.raises(ValueError, match=re.escape(str(path))):
        load(path)


@pytest.mark.parametrize("length", [2**20, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("of", ["the array", "a string"])
def test_strings_longer_than_the_file_are_refused(length, of, config, tensors, write_gguf):
    path = write_gguf(config, tensors, metadata={"tokenizer.ggml.tokens": ["ab", "cde", "f"]})
    old = (3).to_bytes(8, "little") + (b"\2\0" if of == "the array" else b"cde")
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, length.to_bytes(8, "little") + old[8:]))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} must be a complete GGUF file"):
        load(path)


def test_a_vocabulary_that_is_no_list_of_strings_is_counted_all_the_same(
    config, tensors, write_gguf
):
    metadata = {
        "llama.vocab_size": None,
        "tokenizer.ggml.tokens": list(range(config["vocab_size"])),
    }
    path = write_gguf(config, tensors, metadata=metadata)
    assert read_config(path).vocab_size == config["vocab_size"]


def test_text_that_is_not_utf_8_is_named(config, tensors, write_gguf):
    path = write_gguf(config, tensors, metadata={"llama.rope.scaling.type": "linear"})
    path.write_bytes(path.read_bytes().replace(b"linear", b"l\xffnear"))
    with pytest.raises(ValueError, match=f"llama.rope.scaling.type of {re.escape(str(path))} must"):
        load(path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ValueError, match=r"must be a complete GGUF file.*magic"):
        load(path)
