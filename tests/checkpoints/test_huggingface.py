"""Hugging Face folders: every layout that loads, and every damage that is refused."""

from __future__ import annotations

import gc
import json
import math
import re
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from jpaged.checkpoints import load_checkpoint, read_config

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(path, dtype=jnp.float32, **arguments):
    return load_checkpoint(str(path), dtype=dtype, **arguments)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_a_folder_is_read_exactly(shards, stored, config, tensors, write_folder, check_params):
    folder = write_folder(config, tensors, dtype=stored, shards=shards)
    checkpoint = load(folder)
    want = {name: tensor.astype(stored).astype(np.float32) for name, tensor in tensors.items()}
    check_params(checkpoint, want)
    assert {leaf.dtype for leaf in jax.tree.leaves(checkpoint.params)} == {jnp.dtype("float32")}
    assert checkpoint.name == str(folder)
    assert checkpoint.config.head_dim == 32
    assert checkpoint.tokenizer is None
    assert checkpoint.generation_config == {}
    assert checkpoint.eos_token_ids == (2,)


def test_weights_are_rounded_to_the_wanted_dtype(config, tensors, write_folder, check_params):
    folder = write_folder(config, {k: v * 1.001 for k, v in tensors.items()})
    checkpoint = load(folder, jnp.bfloat16)
    want = {k: (v * 1.001).astype(ml_dtypes.bfloat16) for k, v in tensors.items()}
    check_params(checkpoint, {k: v.astype(np.float32) for k, v in want.items()})
    assert {leaf.dtype for leaf in jax.tree.leaves(checkpoint.params)} == {jnp.dtype("bfloat16")}


def test_biases_are_read(config, tensors, write_folder):
    config |= {"attention_bias": True}
    rng = np.random.default_rng(2)
    for layer in range(2):
        for name, size in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            key = f"model.layers.{layer}.self_attn.{name}_proj.bias"
            tensors[key] = rng.standard_normal(size).astype(np.float32)
    attention = load(write_folder(config, tensors)).params["layers"]["attention"]
    bias = attention["qkv_proj"]["bias"][...]  # [L, K, G + 2, D]
    for name, part in (("q", bias[:, :, :-2]), ("k", bias[:, :, -2]), ("v", bias[:, :, -1])):
        want = [tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] for i in range(2)]
        np.testing.assert_array_equal(part.reshape(2, -1), np.stack(want))


def test_a_tied_head_needs_no_tensor_and_minds_none(config, tensors, write_folder):
    head = tensors.pop("lm_head.weight")
    config["tie_word_embeddings"] = True
    assert "head" not in load(write_folder(config, tensors)).params
    stored_too = write_folder(config, tensors | {"lm_head.weight": head}, name="both")
    assert "head" not in load(stored_too).params


def test_inverse_frequencies_of_old_folders_are_ignored(config, tensors, write_folder):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}
    load(write_folder(config, tensors | extra))


def test_read_config_reads_no_weights(config, write_folder):
    folder = write_folder(config, {})
    (folder / WEIGHTS).unlink()
    assert read_config(folder).hidden_size == 64


def test_loading_holds_the_model_and_one_stacked_leaf(config, write_folder, tensors):
    config |= {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64}
    config["num_hidden_layers"] = 6
    shapes = {"q_proj": (128, 512), "k_proj": (64, 512), "v_proj": (64, 512), "o_proj": (512, 128)}
    shapes |= {"gate_proj": (1024, 512), "up_proj": (1024, 512), "down_proj": (512, 1024)}
    wide = {"model.embed_tokens.weight": (40, 512), "lm_head.weight": (40, 512)}
    wide["model.norm.weight"] = (512,)
    for i in range(6):
        for name in (key for key in tensors if key.startswith("model.layers.0.")):
            shape = shapes.get(name.split(".")[-2], (512,))
            wide[name.replace("layers.0", f"layers.{i}")] = shape
    folder = write_folder(config, {k: np.ones(v, np.float32) for k, v in wide.items()}, shards=2)
    load(folder)  # first-time caches of JAX

    tracemalloc.start()
    checkpoint = load(folder)
    held, peak = tracemalloc.get_traced_memory()
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(checkpoint.params)]
    del checkpoint
    gc.collect()  # JAX lets go of host memory here
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one_tensor = 1024 * 512 * 4
    assert sum(sizes) > 40e6
    # NumPy's memory is traced and JAX's is not, so what is held may or may not count the model.
    assert peak < held + max(sizes) + 3 * one_tensor
    assert held < sum(sizes) + one_tensor  # no second copy
    assert left < one_tensor


# Damage. Each is one sentence that names the file and the tensor or key.


@pytest.mark.parametrize("shards", [1, 2])
def test_a_missing_tensor_is_named(shards, config, tensors, write_folder):
    del tensors["model.layers.1.mlp.up_proj.weight"]
    folder = write_folder(config, tensors, shards=shards)
    message = f"{folder} lacks tensor 'model.layers.1.mlp.up_proj.weight'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(folder)


def test_an_untied_head_that_is_missing_is_named(config, tensors, write_folder):
    del tensors["lm_head.weight"]
    with pytest.raises(ValueError, match=r"lacks tensor 'lm_head\.weight'$"):
        load(write_folder(config, tensors))


def test_a_wrong_shape_is_named_with_both_shapes(config, tensors, write_folder):
    name = "model.layers.0.self_attn.k_proj.weight"
    folder = write_folder(config, tensors | {name: tensors[name].T})
    message = f"tensor {name!r} of {folder} must have shape (32, 64), got (64, 32)"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(folder)


@pytest.mark.parametrize("part", ["2.mlp.up_proj", "0.self_attn.q_norm"])
def test_a_tensor_without_a_place_is_refused(part, config, tensors, write_folder):
    name = f"model.layers.{part}.weight"
    folder = write_folder(config, tensors | {name: np.ones((96, 64), np.float32)})
    with pytest.raises(ValueError, match=re.escape(f"has tensor {name!r}, for which the model")):
        load(folder)


def test_a_bias_that_the_config_does_not_announce_is_refused(config, tensors, write_folder):
    name = "model.layers.0.self_attn.q_proj.bias"
    folder = write_folder(config, tensors | {name: np.ones(64, np.float32)})
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        load(folder)


def test_more_layers_than_tensors_are_refused(config, tensors, write_folder):
    folder = write_folder(config | {"num_hidden_layers": 2**40}, tensors)
    message = f"{folder} must have tensors for the {2**40} layers of its config, got 21 tensors"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load(folder)


def test_integer_weights_are_refused(config, tensors, write_folder):
    folder = write_folder(config, tensors, dtype=np.int8)
    with pytest.raises(ValueError, match=r"tensor '.*' of .* must be one of F64, .*, got I8$"):
        load(folder)


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere_is_refused(share, whole_folder):
    folder, data = whole_folder
    (folder / WEIGHTS).write_bytes(data[: int(share * len(data))])
    with pytest.raises(ValueError, match=re.escape(str(folder / WEIGHTS))):
        load(folder)


@pytest.fixture
def whole_folder(config, tensors, write_folder):
    folder = write_folder(config, tensors)
    return folder, (folder / WEIGHTS).read_bytes()


def test_a_cut_tensor_is_named(whole_folder):
    folder, data = whole_folder
    (folder / WEIGHTS).write_bytes(data[:-1])
    message = rf"tensor '\S+' of .* is truncated: it ends at byte {len(data)}, the file has"
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 12]},
            "must fill shape (2, 2)",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "must fill shape (2,) of F32"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "has a malformed header"),
        ({"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}, "has a malformed header"),
        ({"dtype": "F32", "shape": [2.5], "data_offsets": [0, 8]}, "has a malformed header"),
        ({"dtype": "F32", "shape": [math.inf], "data_offsets": [0, 8]}, "has a malformed header"),
        ({"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}, "has a malformed header"),
        ({"dtype": "F32", "shape": [2]}, "has a malformed header"),
        ({"dtype": "F32", "shape": ["x"], "data_offsets": [0, 8]}, "has a malformed header"),
        (7, "has a malformed header"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(entry, message, config, write_folder):
    folder = write_folder(config, {})
    header = json.dumps({"t": entry}).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    with pytest.raises(ValueError, match=re.escape(f"tensor 't' of {folder / WEIGHTS} {message}")):
        load(folder)


@pytest.mark.parametrize("header", [b"[1]", b"{", b"\xff\xfe", b"[" * 100_000], ids=len)
def test_a_header_that_is_no_object_is_refused(header, config, write_folder):
    folder = write_folder(config, {})
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=re.escape(f"{folder / WEIGHTS} must have")):
        load(folder)


def test_an_index_that_names_a_missing_file_is_refused(config, tensors, write_folder):
    folder = write_folder(config, tensors, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = f"{INDEX} in {folder} names 'model-00002-of-00002.safetensors', which is not there"
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(message)}$"):
        load(folder)


def test_an_index_that_promises_a_tensor_too_many_is_refused(config, tensors, write_folder):
    folder = write_folder(config, tensors, shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["x.weight"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"has tensor 'x\.weight', which it lacks$"):
        load(folder)


def test_a_tensor_that_the_index_forgot_is_not_passed_over(config, tensors, write_folder):
    name = "model.layers.0.self_attn.q_proj.bias"
    folder = write_folder(config, tensors | {name: np.ones(64, np.float32)}, shards=2)
    index = json.loads((folder / INDEX).read_text())
    del index["weight_map"][name]
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=re.escape(f"has tensor {name!r}, for which the model")):
        load(folder)


def test_of_two_shards_with_one_tensor_the_index_names_the_one(
    config, tensors, write_folder, check_params
):
    folder = write_folder(config, tensors, shards=2)
    index = json.loads((folder / INDEX).read_text())
    first, second = sorted(set(index["weight_map"].values()))
    held = {file: load_file(folder / file) for file in (first, second)}
    for mine, other in ((first, second), (second, first)):
        name = next(name for name, file in index["weight_map"].items() if file == mine)
        held[other][name] = np.zeros_like(tensors[name])
    for file, part in held.items():
        save_file(part, folder / file)
    check_params(load(folder), tensors)


@pytest.mark.parametrize("file", ["", "..", "x" * 300])
def test_an_index_that_names_no_file_is_refused(file, config, write_folder):
    folder = write_folder(config, {})
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": file}}))
    with pytest.raises(FileNotFoundError, match=re.escape(f"names {file!r}, which is not there")):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"x": 1}, {"x": "../elsewhere.safetensors"}])
def test_a_malformed_index_is_refused(weight_map, config, write_folder):
    folder = write_folder(config, {})
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"weight_map in .* must map tensor names to names"):
        load(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_pickled_checkpoint_is_refused_unread(name, config, write_folder):
    folder = write_folder(config, {})
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(ValueError, match=f"got the pickled {name}: .* convert it to safetensors"):
        load(folder)
    with pytest.raises(ValueError, match="convert anything else to safetensors"):
        load(folder / name)


def test_a_folder_without_weights_says_what_it_lacks(config, write_folder):
    folder = write_folder(config, {})
    (folder / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=f"has neither {WEIGHTS} nor {INDEX}"):
        load(folder)


def test_a_folder_without_a_config_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{re.escape(str(tmp_path))} has no config.json"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["{", "", "\x00", "[1, 2]", "[" * 100_000], ids=len)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_corrupt_json_is_named(file, text, config, tensors, write_folder):
    folder = write_folder(config, tensors)
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=f"{re.escape(str(folder / file))} must"):
        load(folder)


# Token ids that end a text, and the defaults of generation.


@pytest.mark.parametrize(
    ("in_config", "in_generation", "ids"),
    [
        (2, None, (2,)),
        ([7, 8], None, (7, 8)),
        (2, [8, 2, 9], (2, 8, 9)),
        (None, 5, (5,)),
        (None, None, ()),
    ],
)
def test_eos_ids_are_the_union(in_config, in_generation, ids, config, tensors, write_folder):
    folder = write_folder(config | {"eos_token_id": in_config}, tensors)
    generation = {"temperature": 0.6, "eos_token_id": in_generation}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    checkpoint = load(folder)
    assert checkpoint.eos_token_ids == ids
    assert checkpoint.generation_config == generation


@pytest.mark.parametrize("eos", [40, -1, "2", True, [1, 99]])
def test_eos_ids_outside_the_vocabulary_are_refused(eos, config, tensors, write_folder):
    folder = write_folder(config | {"eos_token_id": eos}, tensors)
    message = rf"eos_token_id in config\.json must be an id \(or ids\) in \[0, 40\), got {eos!r}"
    with pytest.raises(ValueError, match=message.replace("[1, 99]", r"\[1, 99\]")):
        load(folder)
