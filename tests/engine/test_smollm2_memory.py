"""SmolLM2 in float32: the same 64 prompts give the same tokens however their memory is managed.

Greedy with n = 1, seeded sampling with n = 1, and n = 4 of both kinds, all in one queue. A pool in
which everything fits says what the tokens are; pools a tenth of it and less, which preempt by
recompute, by swap or by either, with and without prefix caching, in chunks of 32 and of 2,048
tokens and in another order of arrival, must agree.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jpaged.engine import Engine
from jpaged.runner.preemption_costs import PreemptionCosts
from jpaged.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent.parent / "goldens" / "smollm2_greedy.npz"
NUM_PROMPTS = 64
BLOCK_SIZE = 16
# Blocks. With chunks of 32 tokens so few requests run at once that a tenth would do for all.
BIG, TENTH, TIGHT = 800, 80, 36
MOST_TIES = 2  # that one run may claim; none was seen

Work = list[tuple[list[int], SamplingParams]]
Tokens = list[list[list[int]]]  # of each request, of each sample

SYSTEM = [
    "You are a helpful assistant who answers in short and friendly sentences, names sources where "
    "there are any and says so when the answer is not known. The user may write in any language. ",
    "Continue the text below in the same style and the same language. Do not explain what you do, "
    "do not repeat what was said, and stop when the paragraph is complete. Here it begins: ",
]
SEEDED = [
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.9, "top_k": 30, "repetition_penalty": 1.2},
    {"temperature": 1.2, "min_p": 0.05},
]


def make_work(tokenizer) -> Work:
    """Three requests for each of the 64 prompts, which are 5 to 300 tokens long; a third of them
    begin with one of two texts of about 40 tokens."""
    data = np.load(GOLDEN)
    parts = np.split(data["prompt_token_ids"], np.cumsum(data["prompt_lengths"])[:-1])
    system = [tokenizer.encode(text) for text in SYSTEM]
    work: Work = []
    for i, part in enumerate(parts):
        prompt = part.tolist()
        starts_alike = i % 3 == 1
        if starts_alike:
            prompt = system[i % 2] + prompt
        most = 300 if i % 16 == 15 else 64 if starts_alike else 20 + i * 13 % 40
        prompt = prompt[:most]
        greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        seeded = SamplingParams(seed=i, max_tokens=16, ignore_eos=True, **SEEDED[i % len(SEEDED)])
        base = greedy if i % 4 == 0 else seeded
        four = dataclasses.replace(base, n=4, max_tokens=8)
        work += [(prompt, greedy), (prompt, seeded), (prompt, four)]
    return work


def serve(engine: Engine, work: Work) -> Tokens:
    ids = [engine.add_request(prompt, params, stream=False) for prompt, params in work]
    done = {}
    while engine.has_unfinished_requests():
        done.update({output.request_id: output for output in engine.step()})
    stats = engine.stats()
    assert stats.compilations_after_warmup == 0
    assert stats.blocks_used == 0
    assert stats.blocks_cached + stats.blocks_free == stats.num_blocks
    engine.scheduler.check_integrity()
    return [[completion.token_ids for completion in done[i].outputs] for i in ids]


def check(found: Tokens, expected: Tokens, work: Work, excused) -> None:
    """Assert equality up to ties, which are printed; `excused` says whether it is one."""
    ties = []
    for number, (prompt, params) in enumerate(work):
        assert len(found[number]) == len(expected[number]) == params.n
        for index, (ours, wanted) in enumerate(zip(found[number], expected[number])):
            assert len(ours) == len(wanted) == params.max_tokens
            if ours == wanted:
                continue
            place = next(i for i, (a, b) in enumerate(zip(ours, wanted)) if a != b)
            where = f"prompt {number // 3}, sample {index} of {params.n}, token {place}: "
            where += f"{ours[place]} for {wanted[place]}"
            context = prompt + wanted[:place]
            assert excused(context, params, index, wanted=wanted[place], found=ours[place]), where
            ties.append(f"{where}; what follows it is not comparable")
    for tie in ties:
        print("tie:", tie)
    assert len(ties) <= MOST_TIES, ties


@pytest.fixture(scope="module")
def make(make_engine, smollm2):
    def make(**overrides) -> Engine:
        settings = {
            "block_size": BLOCK_SIZE,
            "max_model_len": 400,
            "max_num_seqs": 64,
            "max_num_batched_tokens": 2048,
            "swap_space_gib": 0.1,  # more than the smaller pools
        }
        engine = make_engine(smollm2, **(settings | overrides))
        if engine.config.preemption_mode == "auto":
            inject_costs(engine)
        return engine

    return make


def inject_costs(engine: Engine) -> None:
    """Rates by which swapping is cheaper for requests whose blocks are at least 3/4 full."""
    tokens_per_block = 0.75 * BLOCK_SIZE
    link = 2 * engine.runner.bytes_per_swapped_block / tokens_per_block
    engine._loop.costs = PreemptionCosts(link, prefill_tokens_per_second=1.0)


@pytest.fixture(scope="module")
def work(smollm2) -> Work:
    return make_work(smollm2.tokenizer)


@pytest.fixture(scope="module")
def big_pool(make) -> Engine:
    return make(num_blocks=BIG)


@pytest.fixture(scope="module")
def expected(big_pool, work) -> Tokens:
    tokens = serve(big_pool, work)
    stats = big_pool.stats()
    assert stats.preemptions_recompute == stats.preemptions_swap == 0
    assert stats.prefix_cached_tokens == 0
    assert stats.copy_on_write_blocks > 0
    lengths = [len(prompt) for prompt, _ in work]
    assert len(work) == 3 * NUM_PROMPTS
    assert min(lengths) == 5 and max(lengths) == 300
    # Samples differ where they are drawn (of certain tokens they do not), and only there.
    distinct = {True: [], False: []}
    for (_, params), samples in zip(work, tokens):
        if params.n == 4:
            distinct[params.temperature == 0].append(len({tuple(sample) for sample in samples}))
    assert distinct[True] == [1] * 16
    assert len(distinct[False]) == 48 and distinct[False].count(4) >= 40
    return tokens


CACHED = {"enable_prefix_caching": True}
SMALL_CHUNKS = {"max_num_batched_tokens": 32}


@pytest.mark.parametrize(
    "settings, is_shuffled",
    [
        ({"num_blocks": TENTH, "preemption_mode": "recompute", "overlap": False}, False),
        ({"num_blocks": TENTH, "preemption_mode": "swap", **CACHED}, True),
        ({"num_blocks": TENTH, "preemption_mode": "auto"}, True),
        ({"num_blocks": TIGHT, "preemption_mode": "auto", **CACHED, **SMALL_CHUNKS}, True),
        ({"num_blocks": BIG, **CACHED}, True),
    ],
    ids=["recompute", "swap, cached", "auto", "auto, cached, chunks of 32", "all fits, cached"],
)
def test_tokens_do_not_depend_on_the_memory(
    make, work, big_pool, expected, is_tie, settings, is_shuffled
):
    engine = make(**settings)
    order = np.arange(len(work))
    if is_shuffled:
        order = np.random.default_rng(7).permutation(order)
    found = serve(engine, [work[i] for i in order])
    check([found[place] for place in np.argsort(order)], expected, work, partial(is_tie, big_pool))

    stats, config = engine.stats(), engine.config
    recomputed, swapped = stats.preemptions_recompute, stats.preemptions_swap
    print(recomputed, "preempted by recompute,", swapped, "by swap in", stats.steps, "steps")
    if config.num_blocks == BIG:
        assert recomputed == swapped == 0
    elif config.preemption_mode == "auto":
        assert min(recomputed, swapped) >= (1 if config.num_blocks == TIGHT else 3)
    else:
        kinds = {"recompute": recomputed, "swap": swapped}
        assert kinds.pop(config.preemption_mode) >= 8
        assert not any(kinds.values())
    assert (stats.swapped_out_bytes > 0) == (stats.preemptions_swap > 0)
    if config.enable_prefix_caching:
        assert stats.prefix_cached_tokens > 500
    else:
        assert stats.prefix_cached_tokens == 0


def test_the_tie_rule_excuses_ties_alone(big_pool, work, is_tie):
    prompt, greedy = work[0]
    context = prompt[:20]
    best_two = dataclasses.replace(greedy, max_tokens=1, logprobs=2)
    request_id = big_pool.add_request(context, best_two, stream=False)
    outputs = []
    while not outputs:
        outputs = [o for o in big_pool.step() if o.request_id == request_id]
    [[logprobs]] = [completion.logprobs for completion in outputs[0].outputs]
    best, second = logprobs
    gap = logprobs[best] - logprobs[second]
    assert gap > 1e-2
    for closeness, excused in ((1e-4, True), (3e-4, False)):
        params = dataclasses.replace(greedy, logit_bias={second: gap - closeness})
        assert serve(big_pool, [(context, params)])[0][0][0] == best
        assert is_tie(big_pool, context, params, 0, wanted=best, found=second) == excused
