"""Flags of the end-to-end benchmarks, and the workload and the contenders that they describe."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from _backends import BACKENDS, Contender
from _command_line import as_usage_error, define_output_flags
from absl import flags

from jpaged.config import EngineConfig
from jpaged.flags import define_engine_flags, engine_arguments
from jpaged.simulation import TRACE_FORMATS, Workload, random_workload, read_trace
from jpaged.simulation.workloads import LONG_REQUESTS
from jpaged.validation import as_choice, as_float, as_int

_DATASETS = ("random", *TRACE_FORMATS)
_NUM_RANDOM = 64
_WARMUP_OUTPUT_LEN = 32
_ONLY_RANDOM = ("input_len", "output_len", "random_range_ratio", "random_prefix_len")
_ONLY_TRACES = ("dataset_path", "input_scale", "output_scale", "shuffle")
_DTYPES = ("auto", "float32", "bfloat16")


def define_common_flags(values: flags.FlagValues, *, plot: str) -> None:
    """Define the engine's flags, those of rivals and those of the output.

    plot  what --plot shows
    """
    define_engine_flags(values)
    flags.DEFINE_string("backend", "jpaged", f"Who runs: {', '.join(BACKENDS)}.", values)
    flags.DEFINE_list(
        "compare", [], "Others to run on the very same requests, as --compare=vllm.", values
    )
    flags.DEFINE_multi_string(
        "variant",
        [],
        "NAME={...}: our engine once more, with settings that differ, as "
        'invariant={"batch_invariant": true} (repeatable).',
        flag_values=values,
    )
    flags.DEFINE_integer(
        "repeat",
        1,
        "Repetitions, each backend in turn and each time in a process of its own; medians are "
        "printed.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "rival_python",
        [],
        "Python that has the rival installed: PATH, or NAME=PATH for one of several (repeatable).",
        flag_values=values,
    )
    flags.DEFINE_string(
        "rival_model",
        None,
        "The model as a Hugging Face folder, for rivals; --model if that is a folder.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "rival_args",
        [],
        'NAME={...}, more arguments for a rival as JSON: vllm={"enforce_eager": true} for '
        'EngineArgs, transformers={"batch_size": 32} and others for generate (repeatable).',
        flag_values=values,
    )
    flags.DEFINE_bool(
        "check_tokens", False, "Print how many tokens agree with the first backend's.", values
    )
    define_output_flags(values, plot=plot)
    flags.DEFINE_bool("save_detailed", False, "Every request's times and tokens in --json.", values)


def define_length_flags(values: flags.FlagValues, input_len: int, output_len: int) -> None:
    """Define the lengths of made-up requests."""
    flags.DEFINE_integer("input_len", input_len, "Prompt tokens.", flag_values=values)
    flags.DEFINE_integer("output_len", output_len, "Output tokens.", flag_values=values)


def define_dataset_flags(values: flags.FlagValues) -> None:
    """Define the flags that choose a workload."""
    define_length_flags(values, 128, 128)
    flags.DEFINE_string("dataset_name", "random", f"One of {', '.join(_DATASETS)}.", values)
    flags.DEFINE_string("dataset_path", None, "The trace's file.", values)
    flags.DEFINE_integer(
        "num_prompts",
        None,
        f"Requests: by default all of the trace, or {_NUM_RANDOM} random ones.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "random_range_ratio",
        0.0,
        "Random lengths are even in [len * (1 - r), len * (1 + r)].",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "random_prefix_len", 0, "Tokens that all random prompts begin with.", flag_values=values
    )
    flags.DEFINE_float(
        "input_scale", 1.0, "Factor on a trace's prompt lengths.", flag_values=values
    )
    flags.DEFINE_float("output_scale", 1.0, "Factor on its output lengths.", flag_values=values)
    flags.DEFINE_bool(
        "shuffle",
        None,
        "Draw the trace's requests at random instead of taking the first; by default for sharegpt.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "long_requests",
        "error",
        f"Requests longer than max_model_len: {', '.join(LONG_REQUESTS)}.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_warmups",
        8,
        f"Requests before those that count: as long, at most {_WARMUP_OUTPUT_LEN} output tokens.",
        flag_values=values,
    )


def check_int(values: flags.FlagValues, name: str, low: int) -> int:
    """The flag's value, an int >= low."""
    return as_int(name, values[name].value, allowed=f"an int >= {low}", low=low)


def check_positive(values: flags.FlagValues, name: str) -> float:
    """The flag's value, a finite number > 0."""
    allowed = "a finite number > 0"
    return as_float(name, values[name].value, allowed=allowed, low=0.0, low_open=True)


def _check_engine(arguments: Mapping[str, Any]) -> None:
    """Raise what `LLM` would raise for these arguments before it looks at the model."""
    as_choice("dtype", arguments["dtype"], _DTYPES)
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    EngineConfig(**{name: value for name, value in arguments.items() if name in fields})


def contenders(values: flags.FlagValues) -> list[Contender]:
    """Who runs, the first one first.

    Raises:
        UsageError: a bad setting of the engine, an unknown name, a rival that is not installed, or
            arguments for nobody.
    """
    with as_usage_error():
        check_int(values, "repeat", 1)
        _check_engine(engine_arguments(values))
        names = [as_choice("backend", values.backend, tuple(BACKENDS))]
        names += [as_choice("compare", name, tuple(BACKENDS)) for name in values.compare]
        if len(set(names)) < len(names):
            raise ValueError(f"compare must name others than the backend, once, got {names}")
        found = [*_named(values, names), *_variants(values)]
        for contender in found:
            contender.check_installed()
        return found


def _named(values: flags.FlagValues, names: Sequence[str]) -> list[Contender]:
    """The contenders of --backend and --compare."""
    rivals = [name for name in names if name != "jpaged"]
    pythons = _by_name("rival_python", values.rival_python, rivals, for_all=True)
    arguments = _by_name("rival_args", values.rival_args, rivals)
    model = values.rival_model
    if rivals and model is None:
        if not os.path.isdir(values.model):
            raise ValueError(
                "rival_model must be the model as a Hugging Face folder, which rivals load; "
                f"--model {values.model!r} is none"
            )
        model = values.model
    return [
        Contender(
            name,
            name,
            model=values.model if name == "jpaged" else model,
            python=sys.executable if name == "jpaged" else pythons.get(name, sys.executable),
            arguments=_json_object("rival_args", arguments.get(name, "{}")),
        )
        for name in names
    ]


def _variants(values: flags.FlagValues) -> list[Contender]:
    """The contenders of --variant."""
    usual = engine_arguments(values)
    found: dict[str, Contender] = {}
    for text in values.variant:
        name, mark, settings = text.partition("=")
        if not mark or not name or name in found or name in BACKENDS:
            raise ValueError(f"variant must be NAME=..., NAME a new one, got {text!r}")
        changed = _json_object("variant", settings)
        for setting in changed:
            if setting not in usual:
                raise ValueError(f"variant must change settings of the engine, got {setting!r}")
        _check_engine(usual | changed)
        model = changed.get("model", values.model)
        found[name] = Contender(name, "jpaged", model, sys.executable, changed)
    return list(found.values())


def _by_name(
    flag: str, given: Sequence[str], names: Sequence[str], *, for_all: bool = False
) -> dict[str, str]:
    """ "NAME=VALUE" texts as a dictionary; with `for_all` a text without a name is for everyone."""
    found: dict[str, str] = {}
    for text in given:
        name, mark, value = text.partition("=")
        if mark and name in BACKENDS:
            if name not in names:
                raise ValueError(f"{flag} must be for one of {names}, got {text!r}")
            found[name] = value
        elif for_all and names:
            found = dict.fromkeys(names, text) | found
        else:
            raise ValueError(f"{flag} must be NAME=..., NAME one of {list(names)}, got {text!r}")
    return found


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{flag} must be NAME= and a JSON object, got {text!r}")
    return value


def make_workload(values: flags.FlagValues) -> Workload:
    """The requests' lengths that the flags ask for, with a trace's times where it has them.

    Raises:
        UsageError: bad flags or a bad trace.
    """
    with as_usage_error():
        name = as_choice("dataset_name", values.dataset_name, _DATASETS)
        as_choice("long_requests", values.long_requests, LONG_REQUESTS)
        for flag in _ONLY_TRACES if name == "random" else _ONLY_RANDOM:
            if values[flag].present:
                raise ValueError(f"{flag} must not be given with dataset_name={name}")
        if values.num_prompts is not None:
            check_int(values, "num_prompts", 1)
        if name == "random":
            allowed = "in [0, 1)"
            ratio = as_float(
                "random_range_ratio", values.random_range_ratio, allowed=allowed, low=0.0
            )
            if ratio >= 1:
                raise ValueError(f"random_range_ratio must be {allowed}, got {ratio}")
            return random_workload(
                values.num_prompts or _NUM_RANDOM,
                input_len=check_int(values, "input_len", 1),
                output_len=check_int(values, "output_len", 1),
                range_ratio=ratio,
                prefix_len=check_int(values, "random_prefix_len", 0),
                seed=values.seed,
            )
        if values.dataset_path is None:
            raise ValueError(f"dataset_path must be given with dataset_name={name}")
        workload = read_trace(values.dataset_path, name)
        shuffle = name == "sharegpt" if values.shuffle is None else values.shuffle
        return workload.taken(values.num_prompts, shuffle=shuffle, seed=values.seed).scaled(
            prompt=check_positive(values, "input_scale"),
            output=check_positive(values, "output_scale"),
        )


def warmup_requests(values: flags.FlagValues, workload: Workload, vocab_size: int) -> Workload:
    """The first --num_warmups requests' lengths with other prompts and short outputs, at once."""
    with as_usage_error():
        num = check_int(values, "num_warmups", 0)
    requests = [
        dataclasses.replace(
            request,
            output_len=min(request.output_len, _WARMUP_OUTPUT_LEN),
            prompt_token_ids=None,
            prefix_blocks=(),
        )
        for request in workload.requests[:num]
    ]
    warmup = dataclasses.replace(workload, requests=tuple(requests))
    return warmup.with_arrivals(math.inf).with_prompts(vocab_size, seed=values.seed + 1)
