"""Checks of whole models with random weights on the device that JAX finds: through jpaged's engine,
without a checkpoint, a tokenizer or a network."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import time
from typing import Any, NamedTuple

import _repository  # noqa: F401 (makes the packages importable)
import jax
import jax.numpy as jnp
import numpy as np
from _device_batches import Mismatch

# SmolLM2-135M, Llama 3 8B, and one that an interpreter gets through.
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_layers": 30,
    "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32,
    "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2,
    "num_heads": 3, "num_kv_heads": 1, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip

_BLOCK_SIZE = 16
# The determinism contract's tie: two candidates so close that a product's rounding decides.
_TIE = 2e-4
# Differences of log-probabilities between two backends. float32: sums in another order, through
# all layers (SmolLM2's shape on a CPU: 4e-6). bfloat16: every layer rounds what it adds, and runs
# that differ in one bit early on round differently from there; so two of them lie about sqrt(2)
# times as far apart, in the root mean square, as one of them lies from float32.
_FLOAT32_ALLOWED = 1e-4
_BFLOAT16_SHARE = 1.5


class Sizes(NamedTuple):
    """How much a model is made to do."""

    config: dict[str, Any]
    prompt_lens: tuple[int, ...]
    max_tokens: int
    step_tokens: int  # most tokens in a step: the fewer, the fewer programs are compiled


_SIZES = {
    # Prompts that end on, before and after the edge of a block, and some of several chunks.
    "gpu": Sizes(SMOLLM2, (1, 15, 16, 17, 33, 64, 150, 250), 24, 32),
    "cpu": Sizes(TINY, (1, 16, 17, 29), 6, 8),
}


@dataclasses.dataclass(frozen=True)
class Answers:
    """What an engine said to all prompts.

    tokens    for each prompt, the generated token ids
    chosen    for each prompt, their log-probabilities
    gaps      for each prompt and generated token, how far the two best candidates lay apart
    prompts   log-probabilities of all prompt tokens and of the 20 best in their places
    """

    tokens: list[list[int]]
    chosen: list[list[float]]
    gaps: list[list[float]]
    prompts: list[dict[int, float]]


@functools.cache
def _jpaged() -> Any:
    """The parts of jpaged that are used; what it needs may be missing on a machine that was set up
    for kernels alone.

    Raises:
        Mismatch: A dependency is missing.
    """
    try:
        parts = {
            "Engine": importlib.import_module("jpaged.engine").Engine,
            "EngineConfig": importlib.import_module("jpaged.config").EngineConfig,
            "SamplingParams": importlib.import_module("jpaged.sampling_params").SamplingParams,
            "Checkpoint": importlib.import_module("jpaged.checkpoints").Checkpoint,
            "Llama": importlib.import_module("jpaged.models").Llama,
            "LlamaConfig": importlib.import_module("jpaged.models").LlamaConfig,
            "nnx": importlib.import_module("flax.nnx"),
        }
    except ImportError as error:
        raise Mismatch(
            f"{error}. next: install what pyproject.toml lists under `dependencies` "
            "(pip install -e . in the repository's root)"
        ) from error
    return type("Parts", (), parts)


def random_checkpoint(sizes: dict[str, Any], dtype: Any, *, rounded: bool = False) -> Any:
    """A Llama of random weights, made on the device.

    rounded  numbers that bfloat16 holds too, so that the same model can be run in both dtypes
    """
    parts = _jpaged()
    config = parts.LlamaConfig(**sizes, max_position_embeddings=8192)

    def make(key: jax.Array, made_in: Any = dtype) -> Any:
        return parts.Llama(config, dtype=made_in, rngs=parts.nnx.Rngs(key))

    def params(key: jax.Array) -> Any:
        state = parts.nnx.split(make(key, jnp.bfloat16 if rounded else dtype), parts.nnx.Param)[1]
        return jax.tree.map(lambda leaf: leaf.astype(dtype), state)

    key = jax.random.key(0)
    graphdef = parts.nnx.split(parts.nnx.eval_shape(make, key), parts.nnx.Param)[0]
    return parts.Checkpoint(
        name="random",
        config=config,
        graphdef=graphdef,
        params=jax.jit(params)(key),
        tokenizer=None,
        eos_token_ids=(),
        generation_config={},
    )


def make_engine(checkpoint: Any, backend: str, **settings: Any) -> Any:
    """A warmed-up engine."""
    parts = _jpaged()
    config = parts.EngineConfig(block_size=_BLOCK_SIZE, attention_backend=backend, **settings)
    engine = parts.Engine(checkpoint, config)
    engine.warmup(progress=False)
    return engine


def answer(checkpoint: Any, backend: str, sizes: Sizes) -> Answers:
    """Greedy answers to random prompts, all at once, with the prompts' log-probabilities."""
    parts = _jpaged()
    most = max(sizes.prompt_lens) + sizes.max_tokens
    engine = make_engine(
        checkpoint,
        backend,
        num_blocks=len(sizes.prompt_lens) * -(-most // _BLOCK_SIZE),
        max_model_len=most,
        max_num_seqs=8,
        max_num_batched_tokens=sizes.step_tokens,
    )
    rng = np.random.default_rng(1)
    sampling = parts.SamplingParams(
        temperature=0,
        max_tokens=sizes.max_tokens,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=20,
    )
    names = []
    for length in sizes.prompt_lens:
        prompt = rng.integers(0, engine.vocab_size, length).tolist()
        names.append(engine.add_request(prompt, sampling, stream=False))
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    first = [outputs[name].outputs[0] for name in names]
    return Answers(
        tokens=[list(o.token_ids) for o in first],
        chosen=[[p[token] for token, p in zip(o.token_ids, o.logprobs)] for o in first],
        gaps=[[_gap(p) for p in o.logprobs] for o in first],
        prompts=[p for name in names for p in outputs[name].prompt_logprobs if p is not None],
    )


def _gap(logprobs: dict[int, float]) -> float:
    best = sorted(logprobs.values(), reverse=True)
    return best[0] - best[1] if len(best) > 1 else float("inf")


def compare_tokens(got: Answers, expected: Answers) -> str:
    """Figures if two float32 runs agree token for token, up to ties.

    Raises:
        Mismatch: They do not.
    """
    ties = agreed = 0
    differences = list(_differences(got, expected))
    for prompt, tokens in enumerate(expected.tokens):
        for place, token in enumerate(tokens):
            if got.tokens[prompt][place] != token:
                if expected.gaps[prompt][place] > _TIE:
                    raise Mismatch(
                        f"generated token {place} of prompt {prompt} is "
                        f"{got.tokens[prompt][place]}, expected {token}, and no tie (the two best "
                        f"lie {expected.gaps[prompt][place]:.1e} apart). next: if the kernels' "
                        "own checks pass, look at how the engine calls them (plan, layer, slots)"
                    )
                ties += 1
                break  # from here on the two answer different texts
            agreed += 1
            differences.append(got.chosen[prompt][place] - expected.chosen[prompt][place])
    largest = float(np.abs(differences).max(initial=0))  # NaN if one of them is
    if not largest <= _FLOAT32_ALLOWED:
        raise Mismatch(
            f"log-probabilities differ by up to {largest:.1e} (allowed {_FLOAT32_ALLOWED:.0e}). "
            "next: are float32 products IEEE ones (no TF32) everywhere in this backend?"
        )
    return f"{agreed} tokens equal, {ties} ties, log-probabilities within {largest:.1e}"


def _differences(got: Answers, expected: Answers) -> np.ndarray:
    """Differences of the prompts' log-probabilities, of the tokens that both list."""
    pairs = zip(got.prompts, expected.prompts, strict=True)
    found = [a[token] - b[token] for a, b in pairs for token in a.keys() & b.keys()]
    return np.array(found, np.float64)


def compare_bfloat16(got: Answers, same: Answers, float32: Answers) -> str:
    """Figures if a bfloat16 run is as close to xla in bfloat16 as that is to xla in float32.

    Raises:
        Mismatch: It is not.
    """
    rms, own = (
        float(np.sqrt(np.mean(np.square(_differences(*pair)))))
        for pair in ((got, same), (same, float32))
    )
    allowed = _BFLOAT16_SHARE * own
    if not rms <= allowed:
        raise Mismatch(
            f"log-probabilities differ by {rms:.1e} (root mean square) from xla's, allowed are "
            f"{allowed:.1e} ({_BFLOAT16_SHARE} times what rounding to bfloat16 costs xla). next: "
            "if the kernels' own checks pass, look at how the engine calls them"
        )
    equal = sum(a == b for x, y in zip(got.tokens, same.tokens) for a, b in zip(x, y))
    total = sum(map(len, same.tokens))
    return (
        f"log-probabilities off xla's by {rms:.1e} (rms, allowed {allowed:.1e}), {equal} of "
        f"{total} tokens equal"
    )


class ModelRuns:
    """Runs of the checked model, each made when first asked for."""

    def __init__(self, platform: str) -> None:
        self.sizes = _SIZES[platform]
        self._checkpoints: dict[str, Any] = {}
        self._answers: dict[tuple[str, str], Answers] = {}

    def get(self, backend: str, dtype: str) -> Answers:
        """The answers of a backend."""
        if dtype not in self._checkpoints:
            self._checkpoints[dtype] = random_checkpoint(
                self.sizes.config, jnp.dtype(dtype), rounded=True
            )
        if (backend, dtype) not in self._answers:
            self._answers[backend, dtype] = answer(self._checkpoints[dtype], backend, self.sizes)
        return self._answers[backend, dtype]

    def check_float32(self, backend: str) -> str:
        """The backend against xla, token for token."""
        return compare_tokens(self.get(backend, "float32"), self.get("xla", "float32"))

    def check_bfloat16(self, backend: str) -> str:
        """The backend against xla, as closely as rounding allows."""
        return compare_bfloat16(
            self.get(backend, "bfloat16"), self.get("xla", "bfloat16"), self.get("xla", "float32")
        )


def throughput(platform: str, backend: str, copy_rate: float) -> str:
    """Figures: tokens a second of a large model that decodes a full batch.

    Raises:
        NotImplementedError: The device's memory is too small.
    """
    parts = _jpaged()
    on_cpu = platform == "cpu"
    config, batch, prompt_len, steps = (TINY, 4, 30, 8) if on_cpu else (LLAMA_8B, 64, 1000, 64)
    if not on_cpu:
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        if limit < 36 * 2**30:
            raise NotImplementedError(
                f"memory of {limit / 2**30:.0f} GiB: the model, its cache and the step take 36"
            )
    began = time.monotonic()
    dtype = jnp.dtype("float32" if on_cpu else "bfloat16")
    checkpoint = random_checkpoint(config, dtype)
    # The first to start go on decoding while the prompts of the others go in.
    max_tokens = 600 + steps
    length = prompt_len + max_tokens
    engine = make_engine(
        checkpoint,
        backend,
        num_blocks=batch * -(-length // _BLOCK_SIZE),
        max_model_len=length,
        max_num_seqs=batch,
        max_num_batched_tokens=4 * batch,
    )
    ready = time.monotonic() - began
    rng = np.random.default_rng(2)
    sampling = parts.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for _ in range(batch):
        prompt = rng.integers(0, engine.vocab_size, prompt_len).tolist()
        engine.add_request(prompt, sampling, stream=False)
    generated = before = -1
    while generated - before < batch:  # until all decode
        before = generated
        engine.step()
        generated = engine.stats().generated_tokens
        if not engine.has_unfinished_requests():
            raise Mismatch("requests ended before all were decoding. next: raise max_tokens here")
    began = time.monotonic()
    for _ in range(steps):
        engine.step()
    step = (time.monotonic() - began) / steps
    context = prompt_len + generated / batch + steps / 2
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(checkpoint.params))
    slot = 2 * config["num_layers"] * config["num_kv_heads"] * config["head_dim"] * dtype.itemsize
    cache = batch * context * slot
    floor = (weights + cache) / copy_rate
    return (
        f"{batch / step:.0f} tokens/s, {step * 1e3:.2f} ms a step of {batch} decodes at context "
        f"{context:.0f}; reading weights ({weights / 1e9:.1f} GB) and cache ({cache / 1e9:.1f} GB) "
        f"at the copy rate takes {floor * 1e3:.2f} ms ({floor / step:.0%}); ready after "
        f"{ready:.0f} s"
    )
