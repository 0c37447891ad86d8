"""The engine's own step, compiled for a GPU that is not here: the kernels are in it, the KV pool
and the hidden states stay where they are, and the weights are read where they lie."""

from __future__ import annotations

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

from jpaged.models import Llama, LlamaConfig
from jpaged.runner.batch import buffer_size, unpack
from jpaged.runner.buckets import Bucket
from jpaged.runner.compilations import compiler_options
from jpaged.runner.step import decode_steps, forward, prompt_logprobs
from pallas_kernels import aot

pytest.importorskip(
    "jax_plugins.xla_cuda12",
    reason="compiling for a GPU needs JAX's CUDA plugin: the extra `aot`",
)

MIB = 2**20
BLOCK_SIZE = 16
POOL_BYTES = 16 * 2**30

TINY = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
)
LLAMA_3_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
)
LLAMA_2_13B = LlamaConfig(
    vocab_size=32000,
    hidden_size=5120,
    intermediate_size=13824,
    num_layers=40,
    num_heads=40,
    num_kv_heads=40,
    head_dim=128,
    max_position_embeddings=4096,
)
MODELS = {"8b": LLAMA_3_8B, "13b": LLAMA_2_13B}
# Of a context of 4k tokens: 64 decodes; 8 chunks of 256 tokens beside 56 decodes.
BUCKETS = {"decodes": Bucket(64, 64, 256), "chunks": Bucket(8 * 256 + 56, 64, 256)}


@pytest.fixture
def gpu_options(monkeypatch):
    """`aot` compiles with the options that ModelRunner compiles with on a GPU."""
    compile_, ours = jax.stages.Lowered.compile, compiler_options("gpu")

    def compile_with_options(self, compiler_options):
        return compile_(self, compiler_options | ours)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_with_options)


def compile_step(
    config: LlamaConfig, bucket: Bucket, num_blocks: int, backend: str, *, num_steps: int = 1
) -> aot.Compiled:
    """The forward program of a bucket, made as ModelRunner makes it, for an H200 in bfloat16; or
    the program of num_steps decode steps."""
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    leaves, treedef = jax.tree.flatten(params)

    def step(leaves, kv_pool, token_pool, all_hidden, bias_table, last_tokens, buffer):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        batch, rows = unpack(buffer, bucket), bucket.sequences
        if num_steps > 1:
            return decode_steps(
                model, kv_pool, token_pool, bias_table, last_tokens, batch,
                most_steps=num_steps, sampling_rows=rows, backend=backend, tile=rows,
            )  # fmt: skip
        *pools, sampling, hidden = forward(
            model, kv_pool, token_pool, last_tokens, batch, sampling_rows=rows, backend=backend
        )
        return pools, lax.dynamic_update_slice(all_hidden, hidden, (0, 0)), sampling

    return aot.compile_for(
        step,
        leaves,
        jax.ShapeDtypeStruct(pool_shape(config, num_blocks), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_blocks, BLOCK_SIZE), jnp.int32),
        jax.ShapeDtypeStruct(hidden_shape(config), jnp.bfloat16),
        jax.ShapeDtypeStruct((bucket.sequences, config.vocab_size), jnp.float32),
        jax.ShapeDtypeStruct((bucket.sequences,), jnp.int32),
        jax.ShapeDtypeStruct((buffer_size(bucket),), jnp.int32),
        gpu="H200",
        donate_argnums=(1, 2) if num_steps > 1 else (1, 2, 3),
    )


def hidden_shape(config: LlamaConfig) -> tuple[int, int]:
    return max(bucket.tokens for bucket in BUCKETS.values()), config.hidden_size


def pool_shape(config: LlamaConfig, num_blocks: int) -> tuple[int, ...]:
    return (
        config.num_layers, num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim
    )  # fmt: skip


def copies_of_pool(shape: tuple[int, ...], hlo: str) -> list[str]:
    return re.findall(rf"= bf16\[{_joined(shape)}\]\S* copy(?:-start)?\(.*", hlo)


def written(shape: tuple[int, ...], hlo: str) -> list[str]:
    """What writes a bfloat16 array of this shape, axes of 1 before it aside, or of its matrix with
    all outputs in one axis. What stands in a fused computation writes nothing by itself: the fusion
    does."""
    fused = set(re.findall(r"calls=%?([\w.\-]+)", hlo))
    reads = r"(?!parameter|get-tuple-element|bitcast)"
    shapes = rf"(?:{_joined(shape)}|{shape[0]},{math.prod(shape[1:])})"
    writes = re.compile(rf"= bf16\[(?:1,)*{shapes}\]\S* {reads}[\w\-]+\(.*")
    return [
        found
        for computation in re.split(r"\n(?=%|ENTRY)", hlo)
        if re.split(r"[ %(]+", computation, maxsplit=2)[1] not in fused
        for found in writes.findall(computation)
    ]


def _joined(shape: tuple[int, ...]) -> str:
    return ",".join(map(str, shape))


def layer_weights(config: LlamaConfig) -> set[tuple[int, ...]]:
    """The shapes of a layer's matrices, as the model stacks them."""
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    stacked = jax.tree.leaves(nnx.state(model.layers, nnx.Param))
    return {leaf.shape[1:] for leaf in stacked if leaf.ndim > 2}


def temporary_bytes(config: LlamaConfig, bucket: Bucket) -> int:
    """What a forward pass may use beside its arguments: the widest activations (gate and up,
    float32), 96 MiB for the rest (attention's splits, queries, keys and values)."""
    activations = 4 * bucket.tokens * 2 * config.intermediate_size
    copied = 0
    if jax.__version_info__ < (0, 11):  # the slice of a layer's weights is a copy
        copied = 2 * max(map(math.prod, layer_weights(config)))
    return activations + 96 * MIB + copied


def logits_bytes(config: LlamaConfig, bucket: Bucket) -> int:
    return 4 * bucket.sequences * config.vocab_size


@pytest.mark.usefixtures("gpu_options")
@pytest.mark.parametrize(
    ("model", "bucket", "backend"),
    [
        *(
            (model, bucket, backend)
            for model in MODELS
            for bucket in BUCKETS
            for backend in ("triton", "mosaic")
        ),
        ("8b", "chunks", "xla"),
    ],
)
def test_a_step_on_an_h200(model, bucket, backend):
    config = MODELS[model]
    num_blocks = POOL_BYTES // (2 * math.prod(pool_shape(config, 1)))
    pool = pool_shape(config, num_blocks)
    try:
        compiled = compile_step(config, BUCKETS[bucket], num_blocks, backend)
    except NotImplementedError as error:
        pytest.skip(str(error))
    assert compiled.temp_bytes < temporary_bytes(config, BUCKETS[bucket])
    assert compiled.alias_bytes >= 2 * (math.prod(pool) + math.prod(hidden_shape(config)))
    assert not copies_of_pool(pool, compiled.hlo)
    if jax.__version_info__ >= (0, 11):
        for shape in layer_weights(config):
            assert not written(shape, compiled.hlo)
            # Where a slice begins is known from the loop's count: the host need not ask the GPU.
            slices = re.findall(
                rf"dynamic_slice_sizes={{1,{_joined(shape)}}}.*", compiled.hlo, re.MULTILINE
            )
            assert slices and all("dynamic_slice_config" in line for line in slices)

    if backend == "xla":
        return
    for name in ("write_kv", "paged_attention_decode", "paged_attention_ragged"):
        assert name in compiled.ptx
    if bucket == "chunks":  # the other bucket has the same kernels, and assembling them takes long
        kernels = {name: kernel for name, kernel in compiled.kernels.items() if kernel.pallas}
        assert {"write_kv", "paged_attention_decode", "paged_attention_ragged"} <= kernels.keys()
        assert not any(kernel.spill_bytes for kernel in kernels.values())


@pytest.mark.usefixtures("gpu_options")
@pytest.mark.parametrize("backend", ["triton", "mosaic"])
def test_several_decode_steps_on_an_h200(backend):
    num_blocks = POOL_BYTES // (2 * math.prod(pool_shape(LLAMA_3_8B, 1)))
    pool, bucket = pool_shape(LLAMA_3_8B, num_blocks), BUCKETS["decodes"]
    try:
        compiled = compile_step(LLAMA_3_8B, bucket, num_blocks, backend, num_steps=8)
    except NotImplementedError as error:
        pytest.skip(str(error))
    # The sampler works on the logits of all rows, in float32 and several copies.
    sampler = 9 * logits_bytes(LLAMA_3_8B, bucket)
    assert compiled.temp_bytes < temporary_bytes(LLAMA_3_8B, bucket) + sampler
    assert compiled.alias_bytes >= 2 * math.prod(pool)
    assert not copies_of_pool(pool, compiled.hlo)
    if jax.__version_info__ >= (0, 11):
        assert not any(written(shape, compiled.hlo) for shape in layer_weights(LLAMA_3_8B))
    for name in ("write_kv", "paged_attention_decode"):
        assert name in compiled.ptx


@pytest.mark.usefixtures("gpu_options")
@pytest.mark.parametrize("model", MODELS)
def test_prompt_logprobs_on_an_h200(model):
    config, rows = MODELS[model], BUCKETS["chunks"].sequences
    abstract = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(abstract, nnx.Param)
    leaves, treedef = jax.tree.flatten(params)

    def run(leaves, hidden, targets):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        return prompt_logprobs(model, hidden, targets, tile=rows)

    hidden = jax.ShapeDtypeStruct(hidden_shape(config), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct(hidden.shape[:1], jnp.int32)
    compiled = aot.compile_for(run, leaves, hidden, targets, gpu="H200")
    # A tile's logits, and what the best of them are looked for in.
    assert compiled.temp_bytes < 4 * logits_bytes(config, BUCKETS["chunks"]) + 8 * MIB


def test_a_copy_of_the_weights_would_show():
    """XLA's default options make one, and the test above sees it."""
    compiled = compile_step(TINY, Bucket(64, 8, 16), 1024, "triton")
    assert all(written(shape, compiled.hlo) for shape in layer_weights(TINY))


def test_an_undonated_pool_would_show(monkeypatch):
    monkeypatch.setattr(aot, "compile_for", partial(_without_donation, aot.compile_for))
    compiled = compile_step(TINY, Bucket(16, 8, 16), 1024, "xla")
    assert compiled.alias_bytes == 0
    assert copies_of_pool(pool_shape(TINY, 1024), compiled.hlo)


def _without_donation(compile_for, *avals, donate_argnums, **options):
    return compile_for(*avals, **options)
