"""Reads a Llama `config.json`, refusing by name what would change the arithmetic unnoticed."""

from __future__ import annotations

from typing import Any

from jpaged.models.llama import LlamaConfig
from jpaged.models.rope import rope_config_from_hf

# Keys that LlamaConfig is made from: (our name, transformers' default for a missing key).
_SIZES = {
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("hidden_size", 4096),
    "intermediate_size": ("intermediate_size", 11008),
    "num_hidden_layers": ("num_layers", 32),
    "num_attention_heads": ("num_heads", 32),
    "max_position_embeddings": ("max_position_embeddings", 2048),
}
_FLAGS = ("tie_word_embeddings", "attention_bias", "mlp_bias")
_READ = {
    *_SIZES,
    *_FLAGS,
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
}
# Keys that change the arithmetic: understood at these values alone (a missing key and null count as
# the first).
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "pretraining_tp": (1,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({},),
    "auto_map": (None, {}),
}
# Keys that change nothing that inference computes: names, training, token ids and defaults of
# generation (which the checkpoint reader handles), and what old transformers versions wrote for
# every model.
# fmt: off
_HARMLESS = {
    "_name_or_path", "_model_name_or_path", "name_or_path",
    "_commit_hash", "architectures", "model_type",
    "transformers_version", "transformers.js_config", "torch_dtype", "dtype", "use_cache",
    "initializer_range", "attention_dropout", "hidden_dropout", "is_llama_config", "is_decoder",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "cls_token_id", "decoder_start_token_id", "max_sequence_length", "unsloth_version",
    "unsloth_fixed", "tokenizer_class", "_flash_attn_2_enabled", "_attn_implementation",
    "_attn_implementation_autoset", "attn_implementation", "return_dict", "output_attentions",
    "output_hidden_states", "torchscript", "use_bfloat16", "chunk_size_feed_forward",
    "tf_legacy_loss", "finetuning_task", "task_specific_params", "problem_type", "id2label",
    "label2id", "num_labels", "prefix", "cross_attention_hidden_size", "max_length",
    "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens",
}
# fmt: on


def llama_config_from_hf(config: dict[str, Any]) -> LlamaConfig:
    """Translate a Llama `config.json`; raises ValueError naming the key that is not understood."""
    for name, value in config.items():
        if name in _ONLY:
            allowed = _ONLY[name]
            if value is not None and (
                value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool)
            ):
                choices = " or ".join(repr(choice) for choice in allowed)
                raise ValueError(
                    f"{name} in config.json must be {choices} for Llama, got {value!r}"
                )
        elif name not in _READ and name not in _HARMLESS:
            raise ValueError(
                f"config.json has a key that is not understood for Llama: {name}={value!r}"
            )

    def given(name: str, default: Any) -> Any:
        value = config.get(name)
        return default if value is None else value

    sizes = {ours: given(name, default) for name, (ours, default) in _SIZES.items()}
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} in config.json must be an int of at least 1, got {value!r}")
    flags = {name: given(name, False) for name in _FLAGS}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} in config.json must be true or false, got {value!r}")
    epsilon = given("rms_norm_eps", 1e-6)
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float):
        raise ValueError(f"rms_norm_eps in config.json must be a number, got {epsilon!r}")
    return LlamaConfig(
        **sizes,
        **flags,
        num_kv_heads=given("num_key_value_heads", sizes["num_heads"]),
        head_dim=given("head_dim", sizes["hidden_size"] // sizes["num_heads"]),
        rms_norm_eps=float(epsilon),
        rope=rope_config_from_hf(config, sizes["max_position_embeddings"]),
    )
