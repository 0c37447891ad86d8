"""Fixtures shared by all tests: a tiny random Llama, and the bundled SmolLM2."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import pytest
from flax import nnx

from jpaged.checkpoints import Checkpoint, load_checkpoint
from jpaged.compilation_cache import enable_compilation_cache
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.llm import LLM
from jpaged.models import Llama, LlamaConfig
from jpaged.runner.weights import reads_quantised_weights


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory) -> None:
    """Engines of equal shapes compile once a session, in whichever of pytest-xdist's workers:
    compiling is most of what the tests cost. Sessions share the folder $JPAGED_TEST_CACHE."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    enable_compilation_cache(os.environ.get("JPAGED_TEST_CACHE") or str(folder / "xla"))


@pytest.fixture(scope="session")
def smollm2() -> Checkpoint:
    """The bundled SmolLM2-135M-Instruct in float32, as `LLM` loads it."""
    kept = reads_quantised_weights("auto")
    return load_checkpoint("smollm2-135m", dtype=jnp.float32, keep_quantised=kept)


@pytest.fixture(scope="session")
def tiny_checkpoint(smollm2: Checkpoint) -> Checkpoint:
    """Two layers of random weights under SmolLM2's tokenizer and vocabulary: steps of milliseconds,
    with real text."""
    config = LlamaConfig(
        vocab_size=smollm2.config.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=512,
    )
    graphdef, params = nnx.split(Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), nnx.Param)
    return Checkpoint(
        name="tiny",
        config=config,
        graphdef=graphdef,
        params=params,
        tokenizer=smollm2.tokenizer,
        eos_token_ids=smollm2.eos_token_ids,
        generation_config={},
    )


@pytest.fixture(scope="session")
def make_engine(tiny_checkpoint: Checkpoint):
    """Makes a warmed-up engine on the tiny model; keyword arguments override its small config."""

    def make(checkpoint: Checkpoint = tiny_checkpoint, **overrides) -> Engine:
        settings = {
            "num_blocks": 64,
            "block_size": 16,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            # What a test computes should not depend on the tests before it, and how it is preempted
            # not on the clock; tests of caching and swapping ask for them.
            "enable_prefix_caching": False,
            "preemption_mode": "recompute",
        }
        engine = Engine(checkpoint, EngineConfig(**(settings | overrides)))
        engine.warmup(progress=False)
        # As on a GPU: steps are planned ahead from the first one on, whatever comes meanwhile.
        engine._loop.patience = 0
        return engine

    return make


@pytest.fixture(scope="session")
def tiny_llm(make_engine) -> LLM:
    """An LLM on the tiny model: 64 blocks of 16 slots, max_model_len 256, 8 sequences at once.

    Shared by the session: a test must leave no request unfinished.
    """
    return LLM.from_engine(make_engine())
