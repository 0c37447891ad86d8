"""The Llama forward pass through the paged pool, against transformers' logits."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged.checkpoints.parameters import load_parameters
from jpaged.models import Llama, LlamaConfig, config_from_hf, model_class

VARIANTS = [
    "grouped",
    "multi_head",
    "multi_query_tied",
    "biases",
    "head_dim",
    "llama3_rope",
    "linear_rope",
    "yarn_rope",
]


class DictSource:
    """Tensors in memory, as `load_parameters` wants them."""

    name = "memory"

    def __init__(self, tensors):
        self.tensors = tensors

    def tensor_names(self):
        return self.tensors.keys()

    def tensor_shape(self, name):
        return self.tensors[name].shape

    def read_tensor(self, name):
        return self.tensors[name]


def load(golden, dtype=jnp.float32):
    config = config_from_hf(golden["config"] | {"architectures": ["LlamaForCausalLM"]})
    graphdef, params = load_parameters(config, DictSource(golden["tensors"]), dtype)
    return graphdef, params, config


@pytest.mark.parametrize(
    ("variant", "backend"), [*((name, "reference") for name in VARIANTS), ("grouped", "auto")]
)
def test_whole_prompt_equals_transformers(variant, backend, tiny_golden, paged_decoder):
    golden = tiny_golden(variant)
    decoder = paged_decoder(*load(golden), backend=backend)
    (logits,) = decoder([golden["token_ids"]])
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", ["biases", "llama3_rope"])
def test_chunks_and_single_tokens_equal_transformers(variant, tiny_golden, paged_decoder):
    golden = tiny_golden(variant)
    decoder = paged_decoder(*load(golden), block_size=8)
    ids, want = golden["token_ids"], golden["logits"]
    edges = [0, 7, 14, *range(15, 40), 47, 54, *range(55, 81), 88, 95, 96, 97, 98, 99, 100]
    parts = [decoder([ids[a:b]])[0] for a, b in itertools.pairwise(edges)]
    np.testing.assert_allclose(np.concatenate(parts), want, rtol=0, atol=2e-4)


def test_sequences_of_a_mixed_batch_do_not_touch_each_other(tiny_golden, paged_decoder):
    golden = tiny_golden("grouped")
    ids, want = golden["token_ids"], golden["logits"]
    decoder = paged_decoder(*load(golden), num_sequences=3)
    # Prefill, a chunk, and decode side by side; the second sequence starts a step later.
    first = decoder([ids[:40], [], ids[:1]])
    second = decoder([ids[40:41], ids[:25], ids[1:2]])
    third = decoder([ids[41:42], ids[25:60], ids[2:30]])
    got = [np.concatenate([part[s] for part in (first, second, third)]) for s in range(3)]
    for s, length in enumerate((42, 60, 30)):
        np.testing.assert_allclose(got[s], want[:length], rtol=0, atol=2e-4)


def test_bfloat16_stays_near_float32(tiny_golden, paged_decoder):
    golden = tiny_golden("grouped")
    (logits,) = paged_decoder(*load(golden, jnp.bfloat16))([golden["token_ids"]])
    assert logits.dtype == np.float32
    error = np.abs(logits - golden["logits"])
    assert error.mean() < 0.05 * np.abs(golden["logits"]).mean()


def test_padding_rows_do_not_matter(tiny_golden):
    golden = tiny_golden("grouped")
    graphdef, params, config = load(golden)
    model = nnx.merge(graphdef, params)
    shape = (config.num_layers, 4, 2, config.num_kv_heads, 8, config.head_dim)

    def hidden(padded, fill):
        pool = jnp.full(shape, jnp.nan)
        ids = jnp.asarray(golden["token_ids"][:10] + [fill] * (padded - 10))
        positions = jnp.arange(padded) % 10
        slots = jnp.where(jnp.arange(padded) < 10, jnp.arange(padded), 4 * 8)
        lens = jnp.array([10, 0])
        out, pool = model(
            ids, positions, pool, slots, jnp.array([[0, 1], [9, -7]]), jnp.array([0, 10, 10]), lens
        )
        return out[:10], pool

    small, large = hidden(16, 0), hidden(16, 77)
    np.testing.assert_array_equal(small[0], large[0])
    np.testing.assert_array_equal(small[1], large[1])
    assert np.isfinite(small[0]).all()
    assert np.isnan(small[1][:, 2:]).all(), "only the slots of real tokens are written"


def test_float32_products_ask_for_full_precision(tiny_golden):
    graphdef, params, config = load(tiny_golden("grouped"))
    pool = jnp.zeros((config.num_layers, 4, 2, config.num_kv_heads, 8, config.head_dim))

    def run(params, pool):
        model = nnx.merge(graphdef, params)
        ids = jnp.zeros(8, jnp.int32)
        tables = jnp.zeros((1, 2), jnp.int32)
        arguments = (ids, ids, pool, ids, tables, jnp.array([0, 8]), jnp.array([8]))
        hidden, pool = model(*arguments, backend="xla")  # which has no kernel for them
        return model.logits(hidden)

    text = jax.jit(run).lower(params, pool).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(dots) >= 8
    assert all("precision = [HIGHEST, HIGHEST]" in dot for dot in dots)


@pytest.fixture(scope="module")
def small_config():
    return LlamaConfig(24, 8, 12, 2, 2, 1, 6, attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="module")
def small_model(small_config):
    return Llama(small_config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


def test_parameters_are_stacked_and_carry_their_axis(small_model):
    found = {
        ".".join(map(str, path)): (variable[...].shape, variable.get_metadata("out_sharding"))
        for path, variable in nnx.to_flat_state(nnx.state(small_model, nnx.Param))
    }
    rows = (None, "tp", None)
    assert found == {
        "embedding.table": ((24, 8), ("tp", None)),
        "head.table": ((24, 8), ("tp", None)),
        "norm.scale": ((8,), (None,)),
        "layers.attention_norm.scale": ((2, 8), (None, None)),
        "layers.feed_forward_norm.scale": ((2, 8), (None, None)),
        "layers.attention.qkv_proj.kernel": ((2, 8, 1, 4, 6), (None, None, "tp", None, None)),
        "layers.attention.qkv_proj.bias": ((2, 1, 4, 6), (None, "tp", None, None)),
        "layers.attention.o_proj.kernel": ((2, 12, 8), rows),
        "layers.attention.o_proj.bias": ((2, 8), (None, None)),
        "layers.feed_forward.gate_up_proj.kernel": ((2, 8, 2, 12), (None, None, None, "tp")),
        "layers.feed_forward.gate_up_proj.bias": ((2, 2, 12), (None, None, "tp")),
        "layers.feed_forward.down_proj.kernel": ((2, 12, 8), rows),
        "layers.feed_forward.down_proj.bias": ((2, 8), (None, None)),
    }


def test_eval_shape_gives_the_same_graphdef(small_model, small_config):
    graphdef, params = nnx.split(small_model, nnx.Param)
    abstract_graphdef, abstract = nnx.split(
        nnx.eval_shape(lambda: Llama(small_config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))),
        nnx.Param,
    )
    assert graphdef == abstract_graphdef
    assert hash(graphdef) == hash(abstract_graphdef)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), abstract)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))


@pytest.mark.filterwarnings("error")
def test_a_tied_model_has_no_head():
    config = LlamaConfig(24, 8, 12, 2, 2, 1, 4, tie_word_embeddings=True)
    assert model_class(config) is Llama
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    assert "head" not in nnx.state(model, nnx.Param)


def test_layers_start_from_different_weights(small_model):
    kernel = small_model.layers.attention.qkv_proj.kernel[...]
    assert not np.array_equal(kernel[0], kernel[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers must be an int of at least 1, got 0"),
        ({"vocab_size": True}, "vocab_size must be an int of at least 1, got True"),
        (
            {"num_heads": 3, "num_kv_heads": 2},
            "num_heads must be a multiple of num_kv_heads=2, got 3",
        ),
        ({"head_dim": 5}, "head_dim must be even, got 5"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be at least 0, got -1.0"),
    ],
)
def test_impossible_shapes_are_refused(changes, message):
    shape = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 4,
    }
    with pytest.raises(ValueError, match=f"^{message}$"):
        LlamaConfig(**shape | changes)
