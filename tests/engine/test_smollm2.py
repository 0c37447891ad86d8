"""The bundled SmolLM2 against transformers: greedy and seeded tokens, through preemption."""

from pathlib import Path

import numpy as np
import pytest

from jpaged import SamplingParams
from jpaged.checkpoints import load_checkpoint
from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.llm import LLM

GOLDEN = Path(__file__).parent.parent / "goldens" / "smollm2_greedy.npz"
# Two candidates closer than this may swap: float32 products round by the shape they are padded to,
# and logits of different step shapes were seen to differ by up to 2.7e-4 (BUILD_NOTES.md).
TIE = 2e-4


# Admission looks ahead so well that few orders of arrival preempt 20 times: of twelve that were
# tried on the scheduler alone, this one does.
ORDER = np.random.default_rng(9).permutation(64)
# Some of them for everyday: the shortest, the longest, and lengths about multiples of a block. Of
# sixty orders this one preempts most.
SOME = (5, 6, 7, 8, 9, 11, 15, 16, 17, 31, 32, 33, 63, 64, 65, 78, 127, 128, 129, 155, 256, 257,
        310, 513, 1500)  # fmt: skip


class Golden:
    """Greedy tokens of transformers in float32 (made by tests/goldens/make_goldens.py)."""

    def __init__(self) -> None:
        data = np.load(GOLDEN)
        ends = np.cumsum(data["prompt_lengths"])[:-1]
        self.prompts = [ids.tolist() for ids in np.split(data["prompt_token_ids"], ends)]
        self.token_ids = data["token_ids"]
        self.runner_up_ids = data["runner_up_ids"]
        self.gaps = data["gaps"]

    def check(self, rows, outputs) -> list[str]:
        """Assert that each of these prompts' outputs is as it should be, up to ties; the ties, by
        name."""
        ties = []
        for row, output in zip(rows, outputs, strict=True):
            found = np.array(output.outputs[0].token_ids)
            assert len(found) == 64 and output.outputs[0].finish_reason == "length"
            wrong = np.flatnonzero(found != self.token_ids[row])
            if not len(wrong):
                continue
            first = wrong[0]
            where = f"prompt {row}, token {first}: {found[first]} for {self.token_ids[row, first]}"
            gap = self.gaps[row, first]
            assert gap < TIE and found[first] == self.runner_up_ids[row, first], (
                f"{where}, whose logit is {gap} ahead"
            )
            ties.append(f"{where} (gap {gap:.1e}); what follows it is not comparable")
        for tie in ties:
            print("tie:", tie)
        assert len(ties) <= 2, ties
        return ties


@pytest.fixture(scope="module")
def golden() -> Golden:
    return Golden()


@pytest.fixture(scope="module")
def make_llm(smollm2):
    def make(checkpoint=smollm2, **overrides) -> LLM:
        settings = {
            "max_model_len": 1600,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 256,
            "enable_prefix_caching": False,
            "preemption_mode": "recompute",
        }
        engine = Engine(checkpoint, EngineConfig(**(settings | overrides)))
        engine.warmup(progress=False)
        return LLM.from_engine(engine)

    return make


@pytest.fixture(scope="module")
def small_pool(make_llm) -> LLM:
    """99 blocks of 16: the longest golden request needs 98 of them."""
    return make_llm(num_blocks=99)


GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def some_rows(golden: Golden) -> np.ndarray:
    """Of the prompts of SOME, in an order of arrival."""
    some = [row for row, prompt in enumerate(golden.prompts) if len(prompt) in SOME]
    assert len(some) == len(SOME)
    return np.random.default_rng(55).permutation(some)


def check_against_golden(llm: LLM, golden: Golden, rows: np.ndarray, preemptions: int) -> None:
    before = llm.stats().preemptions_recompute
    outputs = llm.generate([golden.prompts[row] for row in rows], GREEDY)
    golden.check(rows, outputs)
    stats = llm.stats()
    assert stats.preemptions_recompute - before >= preemptions
    assert stats.compilations_after_warmup == 0
    assert stats.blocks_used == 0
    llm.engine.scheduler.check_integrity()


def test_greedy_tokens_are_transformers_through_a_pool_that_preempts(small_pool, golden):
    check_against_golden(small_pool, golden, some_rows(golden), preemptions=10)


def test_no_bucket_copies_the_pool(small_pool):
    runner = small_pool.engine.runner
    pool = runner.num_blocks * runner.bytes_per_block
    for bucket, program in runner.programs().items():
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes >= pool, bucket
        # Activations of the largest bucket, far from the pool's 73 MB.
        assert memory.temp_size_in_bytes < pool / 3, bucket


@pytest.mark.slow
def test_greedy_tokens_of_all_prompts_are_transformers(small_pool, golden):
    check_against_golden(small_pool, golden, ORDER, preemptions=20)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings, preemptions",
    [
        ({"block_size": 8, "num_blocks": 198}, 10),
        ({"block_size": 32, "num_blocks": 50}, 5),
        ({"block_size": 64, "num_blocks": 25}, 4),
        ({"num_blocks": 99, "max_num_batched_tokens": 64}, 5),
        ({"num_blocks": 99, "max_decode_steps": 8}, 4),
    ],
    ids=str,
)
def test_greedy_tokens_are_transformers_for_other_shapes(make_llm, golden, settings, preemptions):
    check_against_golden(make_llm(**settings), golden, some_rows(golden), preemptions)


VARIANTS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 30},
    "top_p": {"top_p": 0.9},
    "wide top_p": {"top_p": 0.995, "temperature": 1.3},  # nuclei of more than 256 tokens
    "min_p": {"min_p": 0.05},
    "repetition": {"repetition_penalty": 1.2},
    "presence and frequency": {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    "all": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
    },
}


@pytest.mark.parametrize("backend", ["auto", pytest.param("xla", marks=pytest.mark.slow)])
def test_greedy_tokens_of_weights_that_are_not_kept_quantised(make_llm, golden, backend):
    """Of the short prompts alone, which few programs serve."""
    plain = load_checkpoint("smollm2-135m", dtype="float32")
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "num_blocks": 30}
    llm = make_llm(plain, attention_backend=backend, max_model_len=256, **settings)
    short = [row for row in some_rows(golden) if len(golden.prompts[row]) < 160]
    check_against_golden(llm, golden, np.array(short), preemptions=2)


def test_seeded_samples_are_the_same_alone_in_a_batch_and_after_preemption(small_pool, golden):
    prompts = [golden.prompts[10 + i] for i in range(len(VARIANTS))]
    params = [
        SamplingParams(seed=2**40 + i, max_tokens=24, ignore_eos=True, **variant)
        for i, variant in enumerate(VARIANTS.values())
    ]
    alone = [small_pool.generate(p, q)[0].outputs[0].token_ids for p, q in zip(prompts, params)]
    assert len({tuple(tokens) for tokens in alone}) == len(alone)

    others = [golden.prompts[i] for i in range(32 - len(VARIANTS))]
    noise = [SamplingParams(seed=i, max_tokens=24, ignore_eos=True) for i in range(len(others))]
    batch = small_pool.generate(prompts + others, params + noise)
    assert len(batch) == 32
    assert [output.outputs[0].token_ids for output in batch[: len(VARIANTS)]] == alone

    # 40 requests that arrived before, each soon in need of a second block and a third: the
    # variants, which came last, are preempted while they generate.
    engine = small_pool.engine
    scheduler, preempted = engine.scheduler, set()
    schedule = scheduler.schedule

    def watching():
        plan = schedule()
        preempted.update(
            sequence.request.request_id
            for sequence in plan.preempted
            if sequence.num_output_tokens > 0
        )
        return plan

    growing = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    results = {}
    scheduler.schedule = watching
    try:
        for i in range(40):
            engine.add_request(golden.prompts[i % 8], growing, stream=False)
        for _ in range(3):
            engine.step()
        for name, p, q in zip(VARIANTS, prompts, params):
            engine.add_request(p, q, request_id=name)
        while engine.has_unfinished_requests():
            for output in engine.step():
                results[output.request_id] = output.outputs[0].token_ids
    finally:
        del scheduler.schedule
    assert preempted >= set(VARIANTS), set(VARIANTS) - preempted
    assert [results[name] for name in VARIANTS] == alone
