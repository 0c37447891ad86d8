"""The engine's own step, compiled for a GPU that is not here: the KV pool stays where it is."""

from __future__ import annotations

import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jpaged.models import Llama, LlamaConfig
from jpaged.runner.batch import buffer_size
from jpaged.runner.buckets import Bucket
from jpaged.runner.model_runner import forward
from pallas_kernels import aot

pytest.importorskip(
    "jax_plugins.xla_cuda12",
    reason="compiling for a GPU needs JAX's CUDA plugin: the extra `aot`",
)

GIB = 2**30
BLOCK_SIZE = 16

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


def compile_step(config: LlamaConfig, bucket: Bucket, num_blocks: int) -> aot.Compiled:
    """The forward program of a bucket, made as ModelRunner makes it, for an H200 in bfloat16."""
    model = nnx.eval_shape(lambda: Llama(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    leaves, treedef = jax.tree.flatten(params)

    def step(leaves, kv_pool, token_pool, buffer):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        return forward(
            model, kv_pool, token_pool, buffer,
            bucket=bucket, sampling_rows=bucket.sequences, backend="xla", tile=bucket.sequences,
        )  # fmt: skip

    return aot.compile_for(
        step,
        leaves,
        jax.ShapeDtypeStruct(pool_shape(config, num_blocks), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_blocks, BLOCK_SIZE), jnp.int32),
        jax.ShapeDtypeStruct((buffer_size(bucket),), jnp.int32),
        gpu="H200",
        donate_argnums=(1, 2),
    )


def pool_shape(config: LlamaConfig, num_blocks: int) -> tuple[int, ...]:
    return (
        config.num_layers, num_blocks, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim
    )  # fmt: skip


@pytest.mark.parametrize(
    ("config", "bucket", "pool_gib"),
    [
        pytest.param(TINY, Bucket(16, 8, 16), 1, id="tiny"),
        pytest.param(LLAMA_3_8B, Bucket(64, 64, 256), 16, id="8b-64-decodes-at-4k"),
        pytest.param(LLAMA_3_8B, Bucket(2104, 64, 256), 16, id="8b-8-chunks-of-256-and-56-decodes"),
    ],
)
def test_a_step_on_an_h200_leaves_the_pool_in_place(config, bucket, pool_gib):
    pool_bytes = pool_gib * GIB
    shape = pool_shape(config, 1)
    num_blocks = pool_bytes // (2 * math.prod(shape))
    compiled = compile_step(config, bucket, num_blocks)
    assert compiled.alias_bytes >= pool_bytes
    assert compiled.temp_bytes < 600 * 2**20
    assert compiled.temp_bytes < pool_bytes / 20
    pool = ",".join(str(size) for size in pool_shape(config, num_blocks))
    copies = re.findall(rf"= bf16\[{pool}\]\S* copy(?:-start)?\(.*", compiled.hlo)
    assert not copies


def test_an_undonated_pool_would_show(monkeypatch):
    """The figures that the test above relies on do see a copy."""
    monkeypatch.setattr(aot, "compile_for", partial(_without_donation, aot.compile_for))
    compiled = compile_step(TINY, Bucket(16, 8, 16), 1024)
    pool = ",".join(str(size) for size in pool_shape(TINY, 1024))
    assert compiled.alias_bytes == 0
    assert re.search(rf"= bf16\[{pool}\]\S* copy(?:-start)?\(", compiled.hlo)


def _without_donation(compile_for, *avals, donate_argnums, **options):
    return compile_for(*avals, **options)
