"""A small paged decoder over one model, and the golden files, for the tests of the models."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

GOLDENS = Path(__file__).parent.parent / "goldens"


class PagedDecoder:
    """Feeds chunks of sequences to a model; the pool is poisoned with NaN, its blocks shuffled."""

    def __init__(
        self,
        graphdef,
        params,
        config,
        *,
        num_sequences=1,
        max_len=128,
        block_size=16,
        backend="reference",
    ):
        leaves, treedef = jax.tree.flatten(params)
        self.leaves, self.config, self.block_size = leaves, config, block_size
        blocks = -(-max_len // block_size)
        self.num_blocks = num_sequences * blocks + 3
        order = np.random.default_rng(0).permutation(self.num_blocks)[: num_sequences * blocks]
        self.tables = order.reshape(num_sequences, blocks).astype(np.int32)
        shape = (config.num_layers, self.num_blocks, 2, config.num_kv_heads, block_size)
        self.pool = jnp.full((*shape, config.head_dim), jnp.nan, leaves[0].dtype)
        self.lengths = np.zeros(num_sequences, np.int32)

        @partial(jax.jit, donate_argnums=1)
        def step(leaves, pool, tokens, positions, slots, tables, starts, context_lens):
            model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            hidden, pool = model(
                tokens, positions, pool, slots, tables, starts, context_lens, backend=backend
            )
            return model.logits(hidden), pool

        self.step = step

    def __call__(self, chunks: list[list[int]]) -> list[np.ndarray]:
        """Run one step on each sequence's next tokens; returns logits [len(chunk), V] of each."""
        total = sum(map(len, chunks))
        padded = max(8, 1 << (total - 1).bit_length()) + 8
        tokens, positions = np.zeros((2, padded), np.int32)
        slots = np.full(padded, self.num_blocks * self.block_size, np.int32)
        starts = np.zeros(len(chunks) + 1, np.int32)
        row = 0
        for s, chunk in enumerate(chunks):
            at = np.arange(self.lengths[s], self.lengths[s] + len(chunk))
            rows = slice(row, row + len(chunk))
            tokens[rows], positions[rows] = chunk, at
            slots[rows] = self.tables[s, at // self.block_size] * self.block_size
            slots[rows] += at % self.block_size
            row += len(chunk)
            starts[s + 1] = row
            self.lengths[s] += len(chunk)
        logits, self.pool = self.step(
            self.leaves,
            self.pool,
            tokens,
            positions,
            slots,
            self.tables,
            starts,
            self.lengths.copy(),
        )
        return np.split(np.asarray(logits)[:total], starts[1:-1])


@pytest.fixture(scope="session")
def paged_decoder() -> type[PagedDecoder]:
    return PagedDecoder


@pytest.fixture(scope="session")
def tiny_golden() -> Callable[[str], dict[str, Any]]:
    """Read one random Llama variant (see make_goldens.py): config, tensors, token_ids, logits."""
    file = np.load(GOLDENS / "tiny_llama.npz")

    def read(name: str) -> dict[str, Any]:
        prefix = f"{name}/tensors/"
        names = [key for key in file.files if key.startswith(prefix)]
        return {
            "config": json.loads(str(file[f"{name}/config"])),
            "tensors": {key.removeprefix(prefix): file[key] for key in names},
            "token_ids": file[f"{name}/token_ids"].tolist(),
            "logits": file[f"{name}/logits"],
        }

    return read


@pytest.fixture(scope="session")
def rope_goldens() -> dict[str, tuple[dict, np.ndarray, float]]:
    """Return name -> (config, inverse frequencies, attention scaling) from transformers."""
    file = np.load(GOLDENS / "tiny_llama.npz")
    names = [key.split("/")[1] for key in file.files if key.startswith("rope/")]
    return {
        name: (
            json.loads(str(file[f"rope/{name}/config"])),
            file[f"rope/{name}/inv_freq"],
            float(file[f"rope/{name}/attention_scaling"]),
        )
        for name in dict.fromkeys(names)
    }


@pytest.fixture(scope="session")
def greedy_golden() -> dict[str, np.ndarray]:
    """Return smollm2_greedy.npz (see make_goldens.py), with `prompts` as lists of ids."""
    file = np.load(GOLDENS / "smollm2_greedy.npz")
    ends = np.cumsum(file["prompt_lengths"])[:-1]
    prompts = [part.tolist() for part in np.split(file["prompt_token_ids"], ends)]
    return {
        "prompts": prompts,
        **{key: file[key] for key in ("token_ids", "runner_up_ids", "gaps")},
    }
