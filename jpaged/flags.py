"""absl flags with the engine's and the sampling parameters' names, for scripts.

Nothing is defined on import: a script calls the functions below with its own `FlagValues`, and a
program that imports the script keeps its flags to itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from absl import flags

from jpaged.config import EngineConfig
from jpaged.sampling_params import SamplingParams

# What each flag's text is parsed as. Ranges are checked where the values are used, so that flags,
# prompts files and Python callers read the same errors.
_ENGINE_FLAGS = {
    "tokenizer": ("string", "Folder, .gguf file or hub id of another tokenizer."),
    "dtype": ("string", "auto (bfloat16 on a GPU, float32 on a CPU), float32 or bfloat16."),
    "max_model_len": ("integer", "Most tokens of a sequence; the model's own limit if not given."),
    "block_size": ("integer", "Token slots in a block."),
    "num_blocks": ("integer", "Blocks in the KV pool; what memory allows if not given."),
    "gpu_memory_utilization": ("float", "Share of a GPU's memory to use, in (0, 1]."),
    "swap_space_gib": ("float", "GiB of host memory for swapped-out blocks."),
    "max_num_seqs": ("integer", "Most sequences in a step."),
    "max_num_batched_tokens": ("integer", "Most tokens in a step."),
    "enable_prefix_caching": ("bool", "Share the blocks of equal prefixes."),
    "preemption_mode": ("string", "recompute, swap or auto."),
    "scheduling_policy": ("string", "fcfs or priority."),
    "tensor_parallel_size": ("integer", "Devices that share the model."),
    "attention_backend": ("string", "auto, llvm, xla, triton, mosaic or reference."),
    "overlap": ("bool", "Plan and dispatch a step while the one before it runs."),
    "max_decode_steps": ("integer", "Most decode steps in one call of the device."),
    "batch_invariant": ("bool", "Bitwise the same result in every batch."),
    "compilation_cache_dir": (
        "string",
        "Folder that keeps compiled programs, '' for none; $XDG_CACHE_HOME/jpaged/xla or "
        "~/.cache/jpaged/xla if not given.",
    ),
    "seed": ("integer", "The engine's seed; a request's own is set by its line."),
}
# `seed` is missing on purpose: the flag of that name is the engine's.
_SAMPLING_FLAGS = {
    "n": ("integer", "Sequences to return."),
    "best_of": ("integer", "Sequences to sample, of which the best n are returned."),
    "temperature": ("float", ">= 0; 0 is greedy."),
    "top_k": ("integer", ">= -1; 0 and -1 are off."),
    "top_p": ("float", "In (0, 1]."),
    "min_p": ("float", "In [0, 1]."),
    "presence_penalty": ("float", "In [-2, 2]."),
    "frequency_penalty": ("float", "In [-2, 2]."),
    "repetition_penalty": ("float", "> 0; 1 is off."),
    "logit_bias": ("string", 'JSON object {"token id": bias}.'),
    "max_tokens": ("integer", "Most tokens to generate."),
    "min_tokens": ("integer", "Fewest tokens to generate."),
    "stop": ("multi_string", "String that ends the text (repeatable)."),
    "stop_token_ids": ("multi_integer", "Token id that ends the text (repeatable)."),
    "ignore_eos": ("bool", "Go on after end-of-sequence tokens."),
    "logprobs": ("integer", "Log-probabilities of this many best tokens, 0 to 20."),
    "prompt_logprobs": ("integer", "The same for the prompt's tokens."),
    "beam_width": ("integer", "Beam search instead of sampling."),
    "length_penalty": ("float", "Beam search's exponent on the length."),
    "early_stopping": ("early_stopping", "Beam search's end rule: true, false or never."),
    "priority": ("integer", "Lower runs first."),
    "cache_salt": ("string", "Keeps cached blocks from requests with another salt."),
}


def define_engine_flags(values: flags.FlagValues) -> None:
    """Define --model and one flag for every keyword argument of `LLM`."""
    flags.DEFINE_string(
        "model",
        "smollm2-135m",
        "Folder, .gguf file, hub id, or smollm2-135m for the bundled model.",
        flag_values=values,
    )
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    _define(values, _ENGINE_FLAGS, {**defaults, "dtype": "auto"})


def define_sampling_flags(values: flags.FlagValues) -> None:
    """Define one flag for every sampling parameter but the seed; all are unset by default."""
    _define(values, _SAMPLING_FLAGS, {})


class _BoolOrNeverParser(flags.BooleanParser):
    """Reads what a bool flag reads, and "never"."""

    def parse(self, argument: Any) -> Any:
        if argument == "never":
            return argument
        try:
            return super().parse(argument)
        except (ValueError, TypeError):
            raise ValueError(f"must be true, false or never, got {argument!r}") from None


def _define_early_stopping(
    name: str, default: Any, help_text: str, *, flag_values: flags.FlagValues
) -> None:
    # As a bool flag it goes without a value, and as --noearly_stopping.
    flag: flags.Flag = flags.Flag(
        _BoolOrNeverParser(), None, name, default, help_text, boolean=True
    )
    flags.DEFINE_flag(flag, flag_values=flag_values)


def _define(
    values: flags.FlagValues, table: dict[str, tuple[str, str]], defaults: dict[str, Any]
) -> None:
    for name, (kind, help_text) in table.items():
        define = (
            _define_early_stopping if kind == "early_stopping" else getattr(flags, f"DEFINE_{kind}")
        )
        define(name, defaults.get(name), help_text, flag_values=values)


def engine_arguments(values: flags.FlagValues) -> dict[str, Any]:
    """Keyword arguments for `LLM` from the parsed engine flags."""
    arguments = {name: values[name].value for name in ("model", *_ENGINE_FLAGS)}
    if arguments["compilation_cache_dir"] is None:
        arguments["compilation_cache_dir"] = _usable_user_cache()
    arguments["compilation_cache_dir"] = arguments["compilation_cache_dir"] or None
    return arguments


def _usable_user_cache() -> str | None:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(cache, "jpaged", "xla")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:  # a read-only home, say: not asked for by name, so done without
        return None
    return folder if os.access(folder, os.W_OK) else None


def sampling_arguments(values: flags.FlagValues) -> dict[str, Any]:
    """The sampling parameters whose flags were given.

    Raises:
        ValueError: --logit_bias is no JSON object.
    """
    given: dict[str, Any] = {
        name: values[name].value for name in _SAMPLING_FLAGS if values[name].value is not None
    }
    if "logit_bias" in given:
        try:
            given["logit_bias"] = json.loads(given["logit_bias"])
        except ValueError:
            raise ValueError(
                f"logit_bias must be a JSON object, got {given['logit_bias']!r}"
            ) from None
    return sampling_arguments_from_json(given)


def sampling_arguments_from_json(given: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters as JSON writes them, as `SamplingParams` takes them: the keys of
    logit_bias, which are strings in JSON, become ints.

    Raises:
        ValueError: a name that is no sampling parameter.
    """
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    for name in given:
        if name not in names:
            raise ValueError(f"unknown sampling parameter {name!r}")
    arguments = dict(given)
    bias = arguments.get("logit_bias")
    if isinstance(bias, dict):
        arguments["logit_bias"] = {
            int(key) if isinstance(key, str) and re.fullmatch(r"-?[0-9]{1,18}", key) else key: value
            for key, value in bias.items()
        }
    return arguments
