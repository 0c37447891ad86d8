"""The kernels compiled for GPUs that are not here: what they take, each feature alone, and
combinations of shapes, dtypes and features in which every pair occurs."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh

import pallas_kernels
from pallas_kernels import aot, support
from pallas_kernels import plan as plans
from pallas_kernels.devices import Target, tracing_target
from pallas_kernels.ptx import Kernel, find_ptxas
from pallas_kernels.support import Case

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

FEATURES: dict[str, tuple] = {
    "window": (None, "static", "traced"),
    "soft_cap": (False, True),
    "alibi_slopes": (False, True),
    "sinks": (False, True),
    "return_lse": (False, True),
}
PLAIN: dict[str, Any] = {name: values[0] for name, values in FEATURES.items()}
# What each backend must compile, whatever the combination. "uint16" is a pool of bfloat16 bits.
AXES: dict[str, dict[str, tuple]] = {
    "triton": {
        "dtype": ("bfloat16", "float16", "float32", "uint16"),
        "head_dim": (64, 80, 96, 128, 256),
        "block_size": (8, 16, 32, 64, 128),
        "group": (1, 3, 4, 8, 16),
        **FEATURES,
    },
    "mosaic": {
        "dtype": ("bfloat16", "float16", "uint16"),
        "head_dim": (64, 128),
        "block_size": (16, 32, 64, 128),
        "group": (1, 3, 4, 8, 16),
        **FEATURES,
    },
}
# H100 and H200 get the same code, as a test makes sure.
TARGETS = {"triton": ("A100-80GB", "H200", "B200"), "mosaic": ("H200",)}
SINCE = {"B200": (0, 12), "mosaic": (0, 11, 2)}  # versions of JAX
# What attention on 16-bit numbers must have: one of each of these.
INSTRUCTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "triton": (("mma.sync", "wgmma", "tcgen05.mma"), ("cp.async",)),
    "mosaic": (("wgmma",), ("cp.async.bulk.tensor",)),
}
# What must not spill registers; Blackwell is not asked for that.
REQUIRED: dict[str, tuple] = {
    "dtype": ("bfloat16",),
    "head_dim": (64, 128),
    "block_size": (16, 32, 64),
    "group": (1, 3, 4, 8),
}
POOLS = [("bfloat16", 128, 16), ("uint16", 64, 32), ("float32", 80, 8), ("float16", 256, 128)]
NUM_TOKENS, NUM_SEQUENCES, NUM_KV_HEADS, MAX_BLOCKS = 64, 8, 2, 64


def pairwise(axes: dict[str, tuple]) -> list[dict[str, Any]]:
    """Few choices of a value for each axis, in which every two values of two axes meet.

    Greedy: a choice starts from the first pair that is left, and takes on each other axis the value
    that meets the most pairs that are left.
    """

    def pairs(choice: dict[str, Any]):
        return itertools.combinations([(axis, choice[axis]) for axis in axes if axis in choice], 2)

    left = dict.fromkeys(
        ((first, x), (second, y))
        for first, second in itertools.combinations(axes, 2)
        for x, y in itertools.product(axes[first], axes[second])
    )
    choices = []
    while left:
        choice = dict(next(iter(left)))
        for axis in axes:
            if axis not in choice:
                gains = [
                    sum(pair in left for pair in pairs(choice | {axis: value}))
                    for value in axes[axis]
                ]
                choice[axis] = axes[axis][gains.index(max(gains))]
        for pair in pairs(choice):
            left.pop(pair, None)
        choices.append({axis: choice[axis] for axis in axes})
    return choices


@pytest.mark.parametrize("backend", AXES)
def test_every_pair_is_covered(backend):
    axes = AXES[backend]
    choices = pairwise(axes)
    for first, second in itertools.combinations(axes, 2):
        seen = {(choice[first], choice[second]) for choice in choices}
        assert seen == set(itertools.product(axes[first], axes[second]))
    largest = sorted(len(values) for values in axes.values())[-2:]
    assert len(choices) < 2 * np.prod(largest)


@pytest.fixture(scope="module")
def compiler() -> None:
    """Compiling for a GPU needs JAX's CUDA plugin and a ptxas, which not every machine has."""
    plugins = ("jax_cuda12_plugin", "jax_cuda13_plugin")
    if not any(importlib.util.find_spec(plugin) for plugin in plugins):
        pytest.skip("JAX's CUDA plugin is not installed")
    try:
        find_ptxas()
    except FileNotFoundError as error:
        pytest.skip(str(error))


def each_target(*, slow: bool = False, without: tuple[str, ...] = ()) -> Callable:
    """Parametrizes a test by the backends and the GPUs that they are for, `without` some backends,
    GPUs or "backend on GPU"."""
    parameters = []
    for backend, gpus in TARGETS.items():
        for gpu in gpus:
            if not {backend, gpu, f"{backend} on {gpu}"} & set(without):
                needed = max(SINCE.get(name, (0,)) for name in (backend, gpu))
                reason = f"needs jax {'.'.join(map(str, needed))} or newer"
                marks = [pytest.mark.skipif(jax.__version_info__ < needed, reason=reason)]
                marks += [pytest.mark.slow] * slow
                parameters.append(pytest.param(backend, gpu, marks=marks))
    return pytest.mark.parametrize(("backend", "gpu"), parameters)


def shape(*sizes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def attention_call(
    backend: str, choice: dict[str, Any], num_blocks: int = 256
) -> tuple[Callable, tuple]:
    """A function that calls paged_attention, and its arguments; with a plan, so that the kernels
    are all there is to compile."""
    num_heads = NUM_KV_HEADS * choice["group"]
    pool_dtype = jnp.dtype(choice["dtype"])
    dtype = jnp.dtype(jnp.bfloat16) if pool_dtype == jnp.uint16 else pool_dtype
    block = (NUM_KV_HEADS, choice["block_size"], choice["head_dim"])
    starts, lens = shape(NUM_SEQUENCES + 1), shape(NUM_SEQUENCES)
    plan = jax.eval_shape(
        partial(
            plans.make_plan,
            num_tokens=NUM_TOKENS,
            num_heads=num_heads,
            num_kv_heads=NUM_KV_HEADS,
            dtype=dtype,
            xp=jnp,
        ),
        starts,
        lens,
    )
    arrays = {
        name: shape(num_heads, dtype=jnp.float32)
        for name in ("alibi_slopes", "sinks")
        if choice[name]
    }
    if choice["window"] == "traced":
        arrays["window"] = shape()
    static = {
        "scale": 0.1,
        "window": 100 if choice["window"] == "static" else None,
        "soft_cap": 30.0 if choice["soft_cap"] else None,
        "return_lse": choice["return_lse"],
        "backend": backend,
    }

    def attend(arguments, plan, arrays):
        return pallas_kernels.paged_attention(*arguments, plan=plan, **static | arrays)

    arguments = (
        shape(NUM_TOKENS, num_heads, choice["head_dim"], dtype=dtype),
        shape(2, num_blocks, 2, *block, dtype=pool_dtype),
        shape(),
        shape(NUM_SEQUENCES, MAX_BLOCKS),
        starts,
        lens,
    )
    return attend, (arguments, plan, arrays)


def compile_attention(backend: str, gpu: str, choice: dict[str, Any], **sizes) -> aot.Compiled:
    attend, arguments = attention_call(backend, choice, **sizes)
    return aot.compile_for(attend, *arguments, gpu=gpu)


def case_of(choice: dict[str, Any]) -> Case:
    is_bits = choice["dtype"] == "uint16"
    features = {name for name in FEATURES if choice[name]} | ({"uint16 pool"} if is_bits else set())
    return Case(
        "paged_attention",
        jnp.dtype("bfloat16" if is_bits else choice["dtype"]),
        head_dim=choice["head_dim"],
        block_size=choice["block_size"],
        group=choice["group"],
        features=frozenset(features),
    )


KINDS = {"A100-80GB": "NVIDIA A100-SXM4-80GB", "H200": "NVIDIA H200", "B200": "NVIDIA B200"}


@each_target()
def test_every_combination_is_supported(backend, gpu):
    module, target = support.load(backend), Target("gpu", KINDS[gpu], 132)
    axes = AXES[backend]
    for values in itertools.product(*axes.values()):
        assert module.unsupported(case_of(dict(zip(axes, values))), target) is None


@pytest.mark.parametrize("kind", KINDS.values())
def test_what_a_backend_does_not_support_it_refuses(kind):
    """What Triton must do, asked of Mosaic too, which cannot do all of it and nothing elsewhere."""
    device = AbstractDevice(device_kind=kind, platform="gpu", num_cores=132)
    refused = 0
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        for choice in pairwise(AXES["triton"]):
            reason = support.load("mosaic").unsupported(case_of(choice), tracing_target())
            if reason is not None:
                refused += 1
                attend, arguments = attention_call("mosaic", choice)
                with pytest.raises(NotImplementedError, match=re.escape(reason)):
                    jax.eval_shape(attend, *arguments)
    assert refused


def problems(backend: str, choice: dict[str, Any], kernels: dict[str, Kernel]) -> list[str]:
    """What is wrong with the kernels of a call, in words."""
    found = []
    for phase in ("decode", "ragged"):
        of_phase = [kernel for name, kernel in kernels.items() if phase in name and kernel.pallas]
        if len(of_phase) != 1:
            found.append(f"{len(of_phase)} {phase} kernels among {sorted(kernels)}")
            continue
        counts = of_phase[0].instructions
        for families in INSTRUCTIONS[backend]:
            if choice["dtype"] != "float32" and not any(counts[family] for family in families):
                found.append(f"no {' or '.join(families)} in {phase}")
    spilled = {name: kernel.spill_bytes for name, kernel in kernels.items() if kernel.spill_bytes}
    if spilled and all(choice[axis] in values for axis, values in REQUIRED.items()):
        found.append(f"spilled bytes: {spilled}")
    return found


def check(backend: str, gpu: str, choices: list[dict[str, Any]]) -> None:
    """Compiles each choice alone, so that a failure has a name; ptxas runs beside the next one."""

    def look(choice, compiled):
        return problems(backend, choice, compiled.kernels)

    with ThreadPoolExecutor(2) as threads:
        looks = {
            str(choice): threads.submit(look, choice, compile_attention(backend, gpu, choice))
            for choice in choices
        }
        found = {name: look.result() for name, look in looks.items()}
    assert not {name: wrong for name, wrong in found.items() if wrong}


SMALL = PLAIN | {"dtype": "bfloat16", "head_dim": 64, "block_size": 16, "group": 1}
LARGE = PLAIN | {"dtype": "bfloat16", "head_dim": 128, "block_size": 64, "group": 8}
USUAL = PLAIN | {"dtype": "bfloat16", "head_dim": 128, "block_size": 16, "group": 4}
EVERYTHING = USUAL | {"window": "traced", "soft_cap": True, "sinks": True, "return_lse": True}


@each_target()
def test_a_few(compiler, backend, gpu):
    check(backend, gpu, [SMALL, LARGE, EVERYTHING])


@each_target(slow=True)
def test_each_feature_alone(compiler, backend, gpu):
    axes = AXES[backend]
    alone = [
        USUAL | {feature: value}
        for feature in FEATURES
        for value in axes[feature]
        if value != PLAIN[feature]
    ]
    check(backend, gpu, alone)


# Triton on A100 and Mosaic on H200 stand for all: B200, and Triton on H200, are compiled with each
# feature alone (above). All pairs for them too took ten minutes.
@each_target(slow=True, without=("B200", "triton on H200"))
def test_all_pairs(compiler, backend, gpu):
    check(backend, gpu, pairwise(AXES[backend]))


# The tests of the Mosaic kernels look at these shapes, and at more than spills.
@each_target(slow=True, without=("B200", "mosaic"))
def test_required_shapes_do_not_spill(compiler, backend, gpu):
    products = itertools.product(*REQUIRED.values())
    check(backend, gpu, [PLAIN | dict(zip(REQUIRED, values)) for values in products])


@each_target(slow=True, without=("A100-80GB", "B200"))
def test_h100_and_h200_get_the_same_code(compiler, backend, gpu):
    for choice in (SMALL, LARGE, EVERYTHING):
        codes = [compile_attention(backend, other, choice).ptx for other in ("H100", gpu)]
        # The kernels' order is not fixed.
        assert sorted(codes[0].splitlines()) == sorted(codes[1].splitlines())


@each_target(without=("B200",))
@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: "-".join(map(str, pool)))
def test_pool_operators_work_in_place(compiler, backend, gpu, pool):
    """In a loop over layers, and all in one program."""
    dtype, head_dim, block_size = pool
    case = case_of(USUAL | dict(zip(("dtype", "head_dim", "block_size"), pool)))
    target = Target("gpu", KINDS[gpu], 132)
    if reason := support.load(backend).unsupported(case._replace(operator="write_kv"), target):
        pytest.skip(f"{backend} does not support {reason}")
    kv_pool = shape(8, 16384 // block_size, 2, 8, block_size, head_dim, dtype=dtype)
    kv_dtype = jnp.bfloat16 if dtype == "uint16" else dtype
    row = shape(8, 64, 8, head_dim, dtype=kv_dtype)

    def step(pool, rows, slots):
        def layer(pool, xs):
            index, k = xs
            return pallas_kernels.write_kv(pool, index, k, k, slots, backend=backend), None

        pool, _ = lax.scan(layer, pool, (jnp.arange(8, dtype=jnp.int32), rows))
        pool = pallas_kernels.copy_blocks(pool, slots, slots[::-1], backend=backend)
        data = pallas_kernels.gather_blocks(pool, slots[:2], backend=backend)
        return pallas_kernels.scatter_blocks(pool, slots[2:4], data, backend=backend)

    compiled = aot.compile_for(step, kv_pool, row, shape(64), gpu=gpu, donate_argnums=0)
    pool_bytes = kv_pool.size * kv_pool.dtype.itemsize
    assert compiled.alias_bytes == pool_bytes
    assert compiled.temp_bytes < pool_bytes / 20
    ours = [kernel for kernel in compiled.kernels.values() if kernel.pallas]
    assert len(ours) == 4
    assert all(kernel.spill_bytes == 0 for kernel in ours)


def test_a_pool_of_more_than_2_to_the_32_elements_compiles(compiler):
    compile_attention("triton", "H200", USUAL, num_blocks=2**20)


def test_float32_products_do_not_use_tf32(compiler):
    compiled = compile_attention("triton", "H200", USUAL | {"dtype": "float32"})
    assert "tf32" not in compiled.ptx
