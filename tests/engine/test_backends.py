"""The engine's tokens do not depend on the attention backend; Pallas kernels run interpreted."""

import collections
import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels.plan
from jpaged import LLM, SamplingParams
from jpaged.checkpoints import Checkpoint
from jpaged.config import EngineConfig
from jpaged.engine import Engine, check_model
from jpaged.models import Llama, LlamaConfig
from jpaged.runner.attention_backend import resolve_attention_backend
from jpaged.runner.compilations import CompilationCounter
from pallas_kernels import llvm_tiles

# Four query heads a KV head, so that a chunk of more than 4 tokens is no decode row.
CONFIG = LlamaConfig(
    vocab_size=500,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    max_position_embeddings=512,
)


def random_checkpoint(config: LlamaConfig, dtype) -> Checkpoint:
    """Random weights, large enough that the attention of a query is far from even."""
    model = Llama(config, dtype=dtype, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model, nnx.Param)
    params = jax.tree.map(lambda leaf: leaf * 8 if leaf.ndim == 3 else leaf, params)
    return Checkpoint("random", config, graphdef, params, None, (), {})


def make(checkpoint: Checkpoint, backend: str, **settings) -> Engine:
    """An engine with few buckets; skips the test where the backend does not exist for the case."""
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "max_model_len": 128}
    settings = small | {"enable_prefix_caching": False, "preemption_mode": "recompute"} | settings
    try:
        engine = Engine(checkpoint, EngineConfig(attention_backend=backend, **settings))
    except NotImplementedError as error:
        pytest.skip(str(error))
    engine.warmup(progress=False)
    return engine


def requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of one token, of a block, of many chunks; greedy and seeded in turn."""
    rng = np.random.default_rng(0)
    return [
        (
            rng.integers(0, CONFIG.vocab_size, length).tolist(),
            SamplingParams(temperature=number % 2, seed=number, max_tokens=24, ignore_eos=True),
        )
        for number, length in enumerate([1, 16, 5, 30, 47, 31])
    ]


def run_all(engine: Engine, work: list[tuple[list[int], SamplingParams]]) -> list:
    ids = [engine.add_request(tokens, params, stream=False) for tokens, params in work]
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.scheduler.check_integrity()
    assert engine.stats().blocks_used == 0
    return [outputs[request_id] for request_id in ids]


def tokens_of(engine: Engine) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in run_all(engine, requests())]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return random_checkpoint(CONFIG, jnp.float32)


@pytest.fixture(scope="module")
def expected_tokens(checkpoint) -> list[list[int]]:
    """By xla, in a pool that has room for all at once."""
    engine = make(checkpoint, "xla", block_size=16, num_blocks=64)
    tokens = tokens_of(engine)
    assert engine.stats().preemptions_recompute == 0
    # Not the same few over and over: in those a wrong attention would hardly show.
    assert len({token for row in tokens for token in row}) > 50
    return tokens


@pytest.mark.parametrize(
    "backend, block_size",
    [
        ("llvm", 8),
        ("llvm", 16),
        pytest.param("llvm", 32, marks=pytest.mark.slow),
        pytest.param("triton", 8, marks=pytest.mark.slow),
        ("triton", 16),
        pytest.param("triton", 32, marks=pytest.mark.slow),
    ],
)
def test_kernels_generate_the_tokens_of_xla(checkpoint, expected_tokens, block_size, backend):
    """In chunks of at most 8 tokens beside decodes, and with preemptions."""
    engine = make(checkpoint, backend, block_size=block_size, num_blocks=128 // block_size)
    assert tokens_of(engine) == expected_tokens
    stats = engine.stats()
    assert stats.preemptions_recompute > 0 and stats.compilations_after_warmup == 0


@pytest.mark.parametrize("backend", [pytest.param("triton", marks=pytest.mark.slow), "mosaic"])
def test_bfloat16_logits_are_close_to_those_of_xla(backend):
    """Logprobs of given tokens, since generated ones part ways at the first tie. Head dim and block
    size are some that Mosaic takes. (Its interpreter compiles at run time.)"""
    checkpoint = random_checkpoint(dataclasses.replace(CONFIG, head_dim=64), jnp.bfloat16)
    engine = make(checkpoint, backend, block_size=16, num_blocks=16)
    rng = np.random.default_rng(1)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=20, ignore_eos=True)
    work = [(rng.integers(0, CONFIG.vocab_size, length).tolist(), params) for length in (3, 39)]

    def logprobs(engine: Engine) -> list[dict[int, float]]:
        return [row for output in run_all(engine, work) for row in output.prompt_logprobs[1:]]

    xla = make(checkpoint, "xla", block_size=16, num_blocks=16)
    pairs = list(zip(logprobs(engine), logprobs(xla), strict=True))
    differences = [a[token] - b[token] for a, b in pairs for token in a.keys() & b.keys()]
    assert len(pairs) == 40 and len(differences) > 40 * 19
    # `reference`, which does not round the probabilities to bfloat16, is 8e-4 away (root mean
    # square; at most 4e-3), and xla with a scale 5 % too large 5e-3 (2e-2).
    assert np.sqrt(np.mean(np.square(differences))) < 2e-3
    assert np.abs(differences).max() < 1e-2


@pytest.mark.parametrize(("backend", "plans"), [("auto", 0), ("triton", 1)])
def test_a_plan_is_made_once_a_step_and_for_kernels_alone(monkeypatch, backend, plans):
    make_plan, made = pallas_kernels.plan.make_plan, []
    monkeypatch.setattr(
        "pallas_kernels.plan.make_plan", lambda *a, **k: made.append(1) or make_plan(*a, **k)
    )
    model = nnx.eval_shape(lambda: Llama(CONFIG, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model, nnx.Param)
    tokens, sequences = jnp.zeros(16, jnp.int32), jnp.zeros(8, jnp.int32)
    pool, tables = jnp.zeros((2, 4, 2, 2, 16, 16)), jnp.zeros((8, 4), jnp.int32)
    starts = jnp.zeros(9, jnp.int32)

    def step(params):
        model = nnx.merge(graphdef, params)
        arguments = (tokens, tokens, pool, tokens, tables, starts, sequences)
        return model(*arguments, backend=backend)

    jaxpr = jax.make_jaxpr(step)(params)
    assert len(made) == plans
    if plans:  # which is made of cumulative sums: there are none inside the loop over the layers
        (layers,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
        assert "cumsum" in str(jaxpr) and "cumsum" not in str(layers)


def test_what_a_backend_cannot_do_is_refused_before_anything_is_compiled():
    wide = random_checkpoint(dataclasses.replace(CONFIG, head_dim=320), jnp.float32)
    config = EngineConfig(attention_backend="triton", num_blocks=4, max_model_len=64)
    refusal = r"^attention_backend='triton' cannot serve this model here: .*head dims .*320"
    with CompilationCounter() as compiled:
        with pytest.raises(NotImplementedError, match=refusal):
            Engine(wide, config)
        with pytest.raises(NotImplementedError, match=refusal):
            check_model(config, wide.config, dtype=jnp.float32)
    assert compiled.count == 0
    check_model(EngineConfig(attention_backend="auto"), wide.config, dtype=jnp.float32)


def test_a_refused_backend_costs_no_reading_of_weights(monkeypatch):
    def refuse(config, model, dtype):
        raise NotImplementedError(f"attention_backend={config.attention_backend!r}: {dtype}")

    monkeypatch.setattr("jpaged.llm.check_model", refuse)
    monkeypatch.setattr("jpaged.checkpoints.checkpoint.load_parameters", None)
    with pytest.raises(NotImplementedError, match=r"^attention_backend='triton': .*bfloat16"):
        LLM(attention_backend="triton", dtype="bfloat16")


@pytest.mark.parametrize(
    ("backend", "said"), [("auto", "llvm"), ("xla", "xla"), ("triton", "triton (interpreted)")]
)
def test_the_log_says_which_backend_attention_takes(checkpoint, caplog, backend, said):
    with caplog.at_level(logging.INFO, logger="jpaged"):
        Engine(checkpoint, EngineConfig(attention_backend=backend, num_blocks=4, max_model_len=64))
    assert f"attention backend: {said}" in caplog.messages


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_auto_takes_llvm_on_a_cpu(batch_invariant):
    found = resolve_attention_backend(
        "auto", CONFIG, jnp.float32, 16, batch_invariant=batch_invariant
    )
    assert found == "llvm"


def custom_calls(program: jax.stages.Compiled | jax.stages.Lowered) -> collections.Counter:
    """How many calls of each kernel a program has."""
    text = program.as_text()
    return collections.Counter(re.findall(r'(?:custom_call @|target=")(\w+)_[0-9a-f]{16}', text))


@pytest.fixture
def lowered_steps(tiny_checkpoint, monkeypatch):
    """The forward programs of a backend, of 8 to 96 tokens, by tokens, as XLA gets them."""

    def lower(backend: str) -> dict[int, jax.stages.Lowered]:
        config = EngineConfig(attention_backend=backend, num_blocks=8, max_num_batched_tokens=96)
        runner = Engine(tiny_checkpoint, config).runner
        monkeypatch.setattr(jax.stages.Lowered, "compile", lambda lowered, *_: lowered)
        assert {8, 64, 96} <= {bucket.tokens for bucket in runner.buckets}
        return {b.tokens: runner._programs.compile_forward(b, num_blocks=8) for b in runner.buckets}

    return lower


@pytest.mark.parametrize(("backend", "most"), [("auto", 64), ("llvm", 64), ("xla", 0)])
def test_steps_of_few_rows_multiply_by_the_kernel(lowered_steps, backend, most, monkeypatch):
    monkeypatch.setattr(llvm_tiles, "has_tiles", lambda: False)
    for tokens, program in lowered_steps(backend).items():
        calls = custom_calls(program)
        assert calls["few_rows_product"] == (4 if tokens <= most else 0), tokens
        assert not calls["tiles_product"]


needs_tiles = pytest.mark.skipif(
    not llvm_tiles.has_tiles(),
    reason="needs a CPU with AMX, which only some machines of any leg have",
)


@needs_tiles
@pytest.mark.parametrize("backend", ["auto", "llvm", "xla"])
def test_all_steps_multiply_by_the_matrix_unit(lowered_steps, backend):
    used = backend != "xla"
    for program in lowered_steps(backend).values():
        calls = custom_calls(program)
        assert calls["tiles_product"] == calls["rows_as_tiles"] == 4 * used
        assert calls["few_rows_product"] == 0


@needs_tiles
@pytest.mark.parametrize("features", [{}, {"batch_invariant": True}, {"max_decode_steps": 4}])
def test_tokens_are_the_same_without_the_matrix_unit(features, monkeypatch):
    """float32: what the unit leaves out of a product is what a float32 product rounds away."""
    checkpoint = random_checkpoint(dataclasses.replace(CONFIG, vocab_size=512), jnp.float32)

    def run():
        engine = make(checkpoint, "auto", block_size=16, num_blocks=64, **features)
        return tokens_of(engine), custom_calls(
            next(iter(engine.runner._programs._sample.values()))
        )["head"]

    found, heads = run()
    assert heads == 1
    monkeypatch.setattr(llvm_tiles, "has_tiles", lambda: False)
    assert run() == (found, 0)
