"""config.json to LlamaConfig: defaults, both spellings of RoPE, and what is refused by name."""

from __future__ import annotations

import re

import numpy as np
import pytest
import transformers

from jpaged.models import LlamaConfig, config_from_hf, model_class
from jpaged.models.rope import RopeConfig, inverse_frequencies, rope_config_from_hf

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes):
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
    return config_from_hf(config | changes)


def test_missing_keys_take_transformers_defaults():
    assert config_from_hf({"model_type": "llama"}) == LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig("default", 10000.0, original_max_position_embeddings=2048),
        tie_word_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        max_position_embeddings=2048,
    )


def test_null_counts_as_missing():
    config = read(num_key_value_heads=None, head_dim=None, rope_scaling=None, sliding_window=None)
    assert (config.num_kv_heads, config.head_dim) == (32, 128)


@pytest.mark.parametrize("rope", [None, {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}])
def test_everything_that_transformers_writes_is_read(rope):
    written = transformers.LlamaConfig(rope_parameters=rope, num_key_value_heads=8).to_dict()
    config = config_from_hf(written | {"architectures": ["LlamaForCausalLM"]})
    assert (config.num_layers, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.rope.rope_type == ("llama3" if rope else "default")


def test_a_published_config_is_read():
    # SmolLM2-135M-Instruct's config.json, the keys as they stand there.
    config = config_from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "hidden_size": 576,
            "initializer_range": 0.041666666666666664,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pad_token_id": 2,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
            "transformers_version": "4.42.3",
            "use_cache": True,
            "vocab_size": 49152,
        }
    )
    assert config.head_dim == 64
    assert config.tie_word_embeddings
    assert config.rope.theta == 100000.0


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_both_spellings_of_rope_mean_the_same(spelling):
    assert read(max_position_embeddings=131072, **spelling).rope == RopeConfig(
        "llama3", 5e5, 8.0, 8192, 1.0, 4.0
    )


def test_theta_alone_may_stand_in_rope_parameters():
    rope = read(rope_parameters={"rope_type": "default", "rope_theta": 1234.0}).rope
    assert (rope.rope_type, rope.theta) == ("default", 1234.0)


def test_inverse_frequencies_equal_transformers(rope_goldens):
    assert len(rope_goldens) == 6
    for name, (config, expected, scaling) in rope_goldens.items():
        parsed = config_from_hf(config | {"model_type": "llama"})
        found, factor = inverse_frequencies(parsed.rope, parsed.head_dim)
        assert found.dtype == np.float32, name
        # One unit in the last place or two: powf differs between libraries.
        np.testing.assert_allclose(found, expected, rtol=3e-7, atol=0, err_msg=name)
        assert factor == pytest.approx(scaling, rel=1e-7), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act in config.json must be 'silu' or 'swish'"),
        ({"pretraining_tp": 2}, "pretraining_tp in config.json must be 1 for Llama, got 2"),
        (
            {"sliding_window": 4096},
            "sliding_window in config.json must be None for Llama, got 4096",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config in config.json must be None"),
        ({"rope_interleaved": True}, "rope_interleaved in config.json must be False"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "auto_map in config.json must be None"),
        ({"attention_multiplier": 2.0}, "not understood for Llama: attention_multiplier=2.0"),
        ({"logits_scaling": 8}, "not understood for Llama: logits_scaling=8"),
        (
            {"hidden_size": "576"},
            "hidden_size in config.json must be an int of at least 1, got '576'",
        ),
        (
            {"tie_word_embeddings": 1},
            "tie_word_embeddings in config.json must be true or false, got 1",
        ),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps in config.json must be a number, got '1e-5'"),
        ({"num_key_value_heads": 5}, "num_heads must be a multiple of num_kv_heads=5, got 32"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor in config must be 1.0, got 0.5"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor in rope_parameters must be 1.0, got 0.5",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_scaling rope_type must be one of default, linear, llama3, yarn, got 'dynamic'",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            "rope_type must be one of default, linear, llama3, yarn, got 'longrope'",
        ),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling of rope_type 'linear' must have factor",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
            "rope_type 'linear' has a key that is not understood: mrope_section=[1]",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": -1}},
            "factor in rope_scaling must be a number above 0, got -1",
        ),
        ({"rope_theta": "big"}, "rope_theta in rope_scaling must be a number above 0, got 'big'"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta must be the same in rope_parameters and beside it, got 500000.0 and",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "rope_parameters and rope_scaling must agree",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read(**changes)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "['MambaForCausalLM']"),
        ({"model_type": "mistral"}, "'mistral'"),
        ({}, "None"),
        ({"architectures": "LlamaForCausalLM"}, "'LlamaForCausalLM'"),
    ],
)
def test_unknown_architectures_are_refused(config, found):
    message = f"architecture must be one of ['LlamaForCausalLM'], got {found}"
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_hf(config)


def test_a_model_type_that_contradicts_the_architecture_is_refused():
    with pytest.raises(ValueError, match="model_type must fit architecture 'LlamaForCausalLM'"):
        config_from_hf({"architectures": ["LlamaForCausalLM"], "model_type": "mistral"})


def test_leftovers_of_a_default_rope_are_ignored():
    # transformers reads none of a variant's keys once the type says "default".
    rope = rope_config_from_hf({"rope_scaling": {"rope_type": "default", "factor": 8.0}}, 64)
    assert rope == RopeConfig(original_max_position_embeddings=64)


def test_only_configs_have_a_model_class():
    with pytest.raises(TypeError, match="config must be a model config, got dict"):
        model_class({})


@pytest.mark.parametrize(
    "wrong",
    [
        {"model_type": []},
        {"architectures": [[]]},
        {"rope_scaling": {"rope_type": [1], "factor": 2.0}},
    ],
    ids=str,
)
def test_values_of_a_wrong_type_are_refused_and_not_stumbled_over(wrong):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config_from_hf(config)
    with pytest.raises(ValueError, match="|".join([*wrong, "architecture", "rope_type"])):
        config_from_hf(config | wrong)
