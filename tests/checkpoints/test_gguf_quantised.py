"""GGUF files whose weights stay quantised: the same weights, and only where kernels read them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints import load_checkpoint
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from pallas_kernels import llvm
from pallas_kernels.quantised import Quantised, unpack


def quantised_leaves(params) -> dict:
    """The Quantised of a checkpoint, by their paths; of tables, theirs."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        params, is_leaf=lambda x: isinstance(x, Quantised)
    )
    return {jax.tree_util.keystr(p): x for p, x in leaves if isinstance(x, Quantised)}


def values(params) -> dict:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_weights_may_stay_quantised(kind, dtype, config, tensors_of, write_gguf):
    """The same to the bit, in the order of fused projections; everything else as it was."""
    config |= {"vocab_size": 96}
    path = write_gguf(config, tensors_of(config), kind)
    plain = values(load_checkpoint(str(path), dtype=dtype).params)
    kept = load_checkpoint(str(path), dtype=dtype, keep_quantised=True).params
    found = quantised_leaves(kept)
    assert len(found) == 5  # four kernels and the head
    assert isinstance(kept["embedding"]["table"].get_value(), jax.Array)
    head = kept["head"]["table"].get_value()
    assert head.rows is None and (head.shape, head.dtype) == ((96, 64), dtype)
    for name, weights in found.items():
        assert weights.bits == (8 if kind == "Q8_0" else 4) and weights.dtype == dtype
        name = re.sub(r"\.value.*", ".value", name)
        got = np.stack([unpack(weights, i) for i in range(len(weights.groups))])
        got = got[0].T if "table" in name else got
        np.testing.assert_array_equal(jnp.asarray(got, dtype), plain[name])


def test_a_tied_table_is_both(config, tensors_of, write_gguf):
    config |= {"vocab_size": 96, "tie_word_embeddings": True}
    path = write_gguf(config, tensors_of(config), "Q8_0")
    table = (
        load_checkpoint(str(path), dtype="float32", keep_quantised=True)
        .params["embedding"]["table"]
        .get_value()
    )
    np.testing.assert_array_equal(unpack(table.quantised, 0).T, table.rows)


def test_what_kernels_do_not_read_is_dequantised(
    config, tensors, write_gguf, write_folder, monkeypatch
):
    """Sizes that are no multiples of 32 (the head's 40 tokens), other types, two types in one
    projection, offsets out of float16's range, a machine without kernels, other formats."""

    def kept(path):
        params = load_checkpoint(str(path), dtype="float32", keep_quantised=True).params
        return {re.sub(r"\.value.*", "", name) for name in quantised_leaves(params)}

    layers = {f"['layers']['attention']['{name}']['kernel']" for name in ("qkv_proj", "o_proj")} | {
        f"['layers']['feed_forward']['{name}']['kernel']" for name in ("gate_up_proj", "down_proj")
    }
    assert kept(write_gguf(config, tensors, "Q4_0")) == layers
    assert not kept(write_gguf(config, tensors, "Q5_1"))
    assert not kept(write_gguf(config, tensors))
    assert not kept(write_folder(config, tensors))
    both = write_gguf(config, tensors, "Q4_0", kinds={"blk.1.attn_k.weight": "Q4_1"})
    assert kept(both) == layers
    mixed = write_gguf(config, tensors, "Q4_0", kinds={"blk.1.attn_k.weight": "Q8_0"})
    assert kept(mixed) == layers - {"['layers']['attention']['qkv_proj']['kernel']"}
    large = tensors | {"model.layers.0.mlp.down_proj.weight": np.full((64, 96), 7.2e4, np.float32)}
    path = write_gguf(config, large, "Q4_0")
    assert kept(path) == layers - {"['layers']['feed_forward']['down_proj']['kernel']"}
    monkeypatch.setattr(llvm, "missing", lambda: "anything")
    assert not kept(write_gguf(config, tensors, "Q4_0"))


def test_two_types_of_4_bits_are_one_projection(config, tensors, write_gguf):
    path = write_gguf(config, tensors, "Q4_0", kinds={"blk.1.attn_k.weight": "Q4_1"})
    plain = load_checkpoint(str(path), dtype="float32").params
    kept = load_checkpoint(str(path), dtype="float32", keep_quantised=True).params
    kernels = [
        params["layers"]["attention"]["qkv_proj"]["kernel"].get_value() for params in (plain, kept)
    ]
    np.testing.assert_array_equal(np.stack([unpack(kernels[1], i) for i in range(2)]), kernels[0])


def test_an_engine_that_does_not_read_them_refuses_them(config, tensors, write_gguf):
    checkpoint = load_checkpoint(
        str(write_gguf(config, tensors, "Q4_1")), dtype="float32", keep_quantised=True
    )
    settings = EngineConfig(num_blocks=9, attention_backend="xla")
    with pytest.raises(ValueError, match=r"^the checkpoint must be loaded without keep_quantised"):
        Engine(checkpoint, settings)
