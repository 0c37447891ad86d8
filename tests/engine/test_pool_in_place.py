"""No bucket copies the KV pool: by what XLA says, and by the clock."""

import re
import time

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import SamplingParams
from jpaged.checkpoints import Checkpoint
from jpaged.engine import Engine
from jpaged.models import Llama

# What may yield an array of the token pool's size.
IN_PLACE = {"parameter", "get-tuple-element", "scatter", "fusion", "bitcast", "call"}


def pool_bytes(engine: Engine) -> int:
    return engine.runner.num_blocks * engine.runner.bytes_per_block


def check_memory(engine: Engine) -> None:
    programs = [*engine.runner.programs().items(), *engine.runner.decode_programs().items()]
    for bucket, program in programs:
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= pool_bytes(engine), bucket
        assert memory.temp_size_in_bytes < pool_bytes(engine) / 4, bucket
        # A select between two pools, say, is done in place and takes no memory, but time.
        written = re.findall(
            rf"= s32\[{engine.runner.num_blocks},\d+\]\S* ([\w-]+)\(", program.as_text()
        )
        assert set(written) <= IN_PLACE, bucket


def with_dtype(tiny_checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    model = Llama(tiny_checkpoint.config, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    return Checkpoint(**(vars(tiny_checkpoint) | {"graphdef": graphdef, "params": params}))


def best_step_seconds(engine: Engine) -> dict[str, float]:
    """The shortest of many steps of a kind: eight decodes, and a whole prompt of 16 tokens."""
    decode = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    for i in range(8):
        engine.add_request([i + 1] * 3, decode)
    engine.step()
    seconds: dict[str, list[float]] = {"decode": [], "prefill": []}
    while engine.has_unfinished_requests():
        began = time.perf_counter()
        engine.step()
        seconds["decode"].append(time.perf_counter() - began)
    for _ in range(20):
        engine.add_request([1] * 16, SamplingParams(temperature=0, max_tokens=1))
        began = time.perf_counter()
        engine.step()
        seconds["prefill"].append(time.perf_counter() - began)
    assert not engine.has_unfinished_requests()
    return {kind: float(np.min(values)) for kind, values in seconds.items()}


@pytest.mark.parametrize(
    "dtype, steps",
    [
        ("float32", 4),
        ("bfloat16", 1),
        pytest.param("float32", 1, marks=pytest.mark.slow),
        pytest.param("bfloat16", 4, marks=pytest.mark.slow),
    ],
)
def test_neither_memory_nor_time_of_a_step_follow_the_pool(
    make_engine, tiny_checkpoint, dtype, steps
):
    checkpoint = with_dtype(tiny_checkpoint, dtype)
    small, large = (
        # Without overlap a call of `step` takes as long as its own step.
        make_engine(
            checkpoint,
            num_blocks=count,
            max_num_batched_tokens=16,  # few buckets to compile
            overlap=False,
            max_decode_steps=steps,
        )
        for count in (4 * 1024, 64 * 1024)
    )
    assert pool_bytes(large) == 16 * pool_bytes(small) >= 2**28
    check_memory(large)
    temporaries = [
        [
            program.memory_analysis().temp_size_in_bytes
            for programs in (engine.runner.programs(), engine.runner.decode_programs())
            for program in programs.values()
        ]
        for engine in (small, large)
    ]
    assert sorted(temporaries[0]) == sorted(temporaries[1])
    # Copying a quarter of a gigabyte takes 50 ms and more, a step of this model a few: the bound
    # leaves room for a busy machine, none for a copy.
    fast, same = best_step_seconds(small), best_step_seconds(large)
    for kind in fast:
        assert same[kind] < 1.5 * fast[kind] + 0.010, kind
