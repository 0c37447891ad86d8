"""Every field of the engine's configuration: default, allowed, refused."""

import dataclasses
import inspect
import math
from pathlib import Path

import numpy as np
import pytest

from jpaged import EngineConfig

DEFAULTS = {
    "max_model_len": None,
    "block_size": 16,
    "num_blocks": None,
    "gpu_memory_utilization": 0.9,
    "swap_space_gib": 4.0,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": True,
    "preemption_mode": "auto",
    "scheduling_policy": "fcfs",
    "tensor_parallel_size": 1,
    "attention_backend": "auto",
    "overlap": True,
    "max_decode_steps": 1,
    "batch_invariant": False,
    "compilation_cache_dir": None,
    "seed": 0,
}

ALLOWED = [
    ("max_model_len", None, None),
    ("max_model_len", 2, 2),
    ("block_size", 1, 1),
    ("block_size", np.int64(64), 64),
    ("num_blocks", None, None),
    ("num_blocks", 1, 1),
    ("gpu_memory_utilization", 1, 1.0),
    ("gpu_memory_utilization", 0.01, 0.01),
    ("swap_space_gib", 0, 0.0),
    ("max_num_seqs", 1, 1),
    ("max_num_batched_tokens", 1, 1),
    ("attention_backend", "xla", "xla"),
    ("attention_backend", "reference", "reference"),
    ("attention_backend", "triton", "triton"),
    ("attention_backend", "mosaic", "mosaic"),
    ("compilation_cache_dir", "folder", "folder"),
    ("compilation_cache_dir", Path("folder"), "folder"),
    ("max_decode_steps", np.int32(8), 8),
    ("seed", 2**63 - 1, 2**63 - 1),
]

OUT_OF_RANGE = {
    "max_model_len": [1, 0, -1],
    "block_size": [0, -16, 2**31],
    "num_blocks": [0, -1, 2**31],
    "gpu_memory_utilization": [0, -0.1, 1.1, math.nan],
    "swap_space_gib": [-1, math.inf, math.nan],
    "max_num_seqs": [0],
    "max_num_batched_tokens": [0],
    "preemption_mode": ["", "drop"],
    "scheduling_policy": ["lifo"],
    "tensor_parallel_size": [0],
    "max_decode_steps": [0, -1],
    "attention_backend": ["cuda"],
    "compilation_cache_dir": [""],
    "seed": [-1, 2**63],
}

WRONG_TYPE = {
    "max_model_len": [2.0, "2", True],
    "block_size": [16.0, None, True],
    "num_blocks": [4.0, True],
    "gpu_memory_utilization": ["0.9", None, True],
    "swap_space_gib": ["4", None, False],
    "max_num_seqs": [None, 1.0],
    "max_num_batched_tokens": [None, 1.0],
    "enable_prefix_caching": [0, None, "no"],
    "preemption_mode": [None, 3],
    "scheduling_policy": [None],
    "tensor_parallel_size": [1.0, True],
    "attention_backend": [None],
    "overlap": [0],
    "max_decode_steps": [None, 2.0, True],
    "batch_invariant": ["yes"],
    "compilation_cache_dir": [3, True],
    "seed": [None, 0.0, True],
}

NOT_BUILT = {
    "tensor_parallel_size": [2],
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


def test_defaults():
    assert dataclasses.asdict(EngineConfig()) == DEFAULTS
    assert set(WRONG_TYPE) == set(DEFAULTS)


@pytest.mark.parametrize("name, given, kept", ALLOWED)
def test_allowed_values_are_kept_as_plain_python(name, given, kept):
    found = getattr(EngineConfig(**{name: given}), name)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize("name, value", cases(OUT_OF_RANGE))
def test_a_value_out_of_range_is_a_value_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must be .*, got "):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name, value", cases(WRONG_TYPE))
def test_a_wrong_type_is_a_type_error_that_names_it(name, value):
    with pytest.raises(TypeError, match=rf"^{name} must be .*, got .* of type "):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name, value", cases(NOT_BUILT))
def test_what_is_not_built_is_refused_by_name(name, value):
    with pytest.raises(NotImplementedError, match=rf"^{name}=.*which (is|are) not built yet$"):
        EngineConfig(**{name: value})


def test_slots_must_fit_int32():
    assert EngineConfig(num_blocks=2**27 - 1, block_size=16).num_blocks == 2**27 - 1
    with pytest.raises(
        ValueError, match=r"^num_blocks must be at most .*block_size=16.*got 134217728$"
    ):
        EngineConfig(num_blocks=2**27, block_size=16)


def test_several_steps_a_call_are_not_batch_invariant():
    with pytest.raises(
        ValueError, match=r"^max_decode_steps must be 1 with batch_invariant.*got 2$"
    ):
        EngineConfig(batch_invariant=True, max_decode_steps=2)


def test_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().block_size = 8


def test_llm_takes_every_field_as_a_keyword_with_the_same_default():
    from jpaged import LLM

    parameters = inspect.signature(LLM).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items()}
    own = {"model": "smollm2-135m", "tokenizer": None, "dtype": "auto"}
    assert defaults == {**own, **DEFAULTS}
