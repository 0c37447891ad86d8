"""The same requests give the same tokens however their memory is managed: pools that preempt by
recompute, swap or either, prefix caching, chunks of any size, several samples, shuffled arrival."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams

NUM_REQUESTS = 12
ROOMY = {"num_blocks": 400, "enable_prefix_caching": False, "preemption_mode": "recompute"}
TIGHT = {**ROOMY, "num_blocks": 34}
SWAP = {**TIGHT, "preemption_mode": "swap", "swap_space_gib": 0.01}
CONFIGS = {
    "recompute": TIGHT,
    "swap": SWAP,
    "recompute, cached": {**TIGHT, "enable_prefix_caching": True},
    "swap, cached": {**SWAP, "enable_prefix_caching": True},
    "auto, cached": {**SWAP, "enable_prefix_caching": True, "preemption_mode": "auto"},
    "chunks of 16": {**SWAP, "max_num_batched_tokens": 16, "enable_prefix_caching": True},
    "chunks of 128": {**TIGHT, "max_num_batched_tokens": 128},
    "priorities": {**SWAP, "scheduling_policy": "priority"},
}
SHARED = np.random.default_rng(1).integers(1000, 40000, 40).tolist()


def requests(params: SamplingParams) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 90 tokens, a third of which begin alike."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(NUM_REQUESTS):
        prompt = rng.integers(1000, 40000, rng.integers(1, 50)).tolist()
        if i % 3 == 0:
            prompt = SHARED + prompt
        seed = i if params.temperature else None
        made.append((prompt, dataclasses.replace(params, seed=seed, priority=i % 3)))
    return made


def run(engine, work) -> list[list[list[int]]]:
    ids = [engine.add_request(prompt, params) for prompt, params in work]
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            done[output.request_id] = output
        engine.scheduler.check_integrity()
    assert engine.stats().compilations_after_warmup == 0
    assert engine.stats().blocks_used == 0
    return [[completion.token_ids for completion in done[i].outputs] for i in ids]


VARIANTS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "seeded, 4 samples": SamplingParams(
        n=4, temperature=0.8, top_k=50, max_tokens=24, ignore_eos=True, repetition_penalty=1.2
    ),
    "beams": SamplingParams(beam_width=3, n=2, max_tokens=20),
}


@pytest.fixture(scope="module")
def expected(make_engine):
    engine = make_engine(**ROOMY)
    results = {name: run(engine, requests(params)) for name, params in VARIANTS.items()}
    stats = engine.stats()
    assert stats.preemptions_recompute == stats.preemptions_swap == 0
    assert stats.copy_on_write_blocks > 0
    return results


FAST = ("recompute", "swap, cached", "auto, cached")  # the others run with the slow tests


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CONFIGS]
)
def test_tokens_do_not_depend_on_the_memory(name, make_engine, expected):
    engine = make_engine(**CONFIGS[name])
    order = np.random.default_rng(5).permutation(NUM_REQUESTS)
    for variant, params in VARIANTS.items():
        work = requests(params)
        found = run(engine, [work[i] for i in order])
        assert [found[place] for place in np.argsort(order)] == expected[variant], variant
    stats = engine.stats()
    if CONFIGS[name]["preemption_mode"] == "swap":
        assert stats.preemptions_swap > 0 and stats.swapped_out_bytes > 0
    elif CONFIGS[name]["preemption_mode"] == "recompute":
        assert stats.preemptions_recompute > 0 and stats.preemptions_swap == 0
    else:
        assert stats.preemptions_recompute + stats.preemptions_swap > 0
    cached = CONFIGS[name]["enable_prefix_caching"]
    assert (stats.prefix_cached_tokens > 0) == cached
    assert (stats.blocks_cached > 0) == cached
    assert stats.blocks_used + stats.blocks_cached + stats.blocks_free == stats.num_blocks


def test_samples_are_those_of_the_same_seed_and_index(make_engine):
    """The first of several samples is the one sample of a request of that seed."""
    engine = make_engine()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
    prompt = SHARED[:20]
    [[alone]] = run(engine, [(prompt, params)])
    [four] = run(engine, [(prompt, dataclasses.replace(params, n=4))])
    assert four[0] == alone
    assert len({tuple(tokens) for tokens in four}) == 4


def test_the_best_of_several_samples(make_engine):
    engine = make_engine()
    params = SamplingParams(
        n=4, temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=0
    )
    ids = [
        engine.add_request(SHARED[:20], params),
        engine.add_request(SHARED[:20], dataclasses.replace(params, n=2, best_of=4)),
    ]
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == ids[1]:
                assert output.finished  # which ones are the best is known at the end
            outputs[output.request_id] = output
    every, best = outputs[ids[0]].outputs, outputs[ids[1]].outputs
    ranked = sorted(every, key=lambda completion: -completion.cumulative_logprob)
    assert [c.token_ids for c in best] == [c.token_ids for c in ranked[:2]]
    assert [c.index for c in best] == [0, 1]


def test_salts_share_nothing_and_equal_ones_do(make_engine):
    engine = make_engine(num_blocks=64, enable_prefix_caching=True)

    def hits(salt) -> int:
        before = engine.stats().prefix_cached_tokens
        params = SamplingParams(temperature=0, max_tokens=2, cache_salt=salt)
        run(engine, [(SHARED, params)])
        return engine.stats().prefix_cached_tokens - before

    assert [hits("a"), hits("b"), hits(None)] == [0, 0, 0]
    assert [hits("a"), hits("b"), hits(None)] == [32, 32, 32]


def test_hits_are_counted_once_and_give_a_rate(make_engine):
    engine = make_engine(num_blocks=64, enable_prefix_caching=True)
    params = SamplingParams(temperature=0, max_tokens=1)

    def counted(prompt, **changes) -> tuple[int, int]:
        """Tokens looked for and found."""
        before = engine.stats()
        run(engine, [(prompt, dataclasses.replace(params, **changes))])
        after = engine.stats()
        return (
            after.prefix_query_tokens - before.prefix_query_tokens,
            after.prefix_cached_tokens - before.prefix_cached_tokens,
        )

    assert engine.stats().prefix_hit_rate == 0.0
    assert counted(SHARED) == (40, 0)
    assert counted(SHARED) == (40, 32)
    assert counted(SHARED[:33], n=4, temperature=1.0) == (33, 32)  # four rows of one look-up
    assert counted(SHARED[:36], n=4, temperature=1.0) == (36, 32)
    assert counted(SHARED, beam_width=3) == (40, 32)
    # The log-probabilities of a prompt are not in the cache, so it is not looked for.
    assert counted(SHARED, prompt_logprobs=0) == (0, 0)
    stats = engine.stats()
    assert (stats.prefix_query_tokens, stats.prefix_cached_tokens) == (189, 128)
    assert stats.prefix_hit_rate == 128 / 189


def test_branches_share_the_parents_blocks(make_engine):
    engine = make_engine(num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    parent = engine.add_request(SHARED[:35], params, keep=True)
    [[whole]] = run_kept(engine, parent)
    held = {b for b, owners in engine.block_map().items() if owners == [parent]}
    assert len(held) == 3  # 42 computed tokens
    branches = engine.fork(parent, n=2)
    shared = [b for b, owners in engine.block_map().items() if len(owners) == 3]
    assert set(shared) == held
    assert engine.stats().blocks_shared == 3
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
    # Greedy branches go on as the parent would have.
    assert outputs[branches[0]].outputs[0].token_ids == outputs[branches[1]].outputs[0].token_ids
    assert outputs[branches[0]].prompt_token_ids == SHARED[:35] + whole
    longer = dataclasses.replace(params, max_tokens=16)
    [[expected]] = run(make_engine(num_blocks=64), [(SHARED[:35], longer)])
    assert whole + outputs[branches[0]].outputs[0].token_ids == expected
    assert engine.release(parent) and not engine.release(parent)
    assert engine.stats().blocks_used == 0
    with pytest.raises(ValueError, match="request_id must name an unfinished or kept request"):
        engine.fork(parent, n=1)


def run_kept(engine, request_id):
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    output = outputs[-1]
    assert output.request_id == request_id and output.finished
    return [[completion.token_ids for completion in output.outputs]]


def test_a_running_request_can_be_forked_and_aborted(make_engine):
    engine = make_engine(num_blocks=64)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    parent = engine.add_request(SHARED[:10], params)
    for _ in range(5):
        engine.step()
    branches = engine.fork(parent, n=3)
    assert len({parent, *branches}) == 4
    for _ in range(3):
        engine.step()
    assert engine.abort(branches[0])
    assert engine.abort(parent)
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check_integrity()
    tokens = [outputs[name].outputs[0].token_ids for name in branches[1:]]
    assert len(tokens[0]) == len(tokens[1]) == 20 and tokens[0] != tokens[1]
    assert engine.stats().blocks_used == 0


def test_branches_of_a_seed_draw_different_samples_however_they_are_made(make_engine):
    engine = make_engine(num_blocks=64)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
    parent = engine.add_request(SHARED[:10], params, prompt="said", stream=False)
    for _ in range(3):
        engine.step()
    first, second = engine.fork(parent) + engine.fork(parent)
    [third] = engine.fork(first)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs.update({output.request_id: output for output in engine.step()})
    drawn = [outputs[name].outputs[0].token_ids for name in (first, second, third)]
    assert drawn[0] != drawn[1] and drawn[2][:5] != drawn[0][1:] and drawn[2] != drawn[1]
    text = engine.tokenizer.decode(outputs[first].prompt_token_ids[10:])
    assert outputs[first].prompt == "said" + text


def test_what_add_request_refuses_validate_request_does_too(make_engine):
    engine = make_engine()
    params = SamplingParams(beam_width=2, length_penalty=50, max_tokens=40)
    for check in (engine.validate_request, engine.add_request):
        with pytest.raises(ValueError, match="length_penalty must be"):
            check(SHARED[:5], params)
    with pytest.raises(ValueError, match="keep=True is for requests of one sequence"):
        engine.add_request(SHARED[:5], SamplingParams(beam_width=1), keep=True)


def test_requests_that_cannot_be_forked(make_engine):
    engine = make_engine()
    several = engine.add_request(SHARED[:5], SamplingParams(n=2, temperature=1.0))
    with pytest.raises(ValueError, match="has several sequences and cannot be forked"):
        engine.fork(several, n=1)
    with pytest.raises(ValueError, match="keep=True is for requests of one sequence"):
        engine.add_request(SHARED[:5], SamplingParams(n=2), keep=True)
    single = engine.add_request(SHARED[:5], SamplingParams())
    for bad in (0, True, 1.5):
        with pytest.raises((ValueError, TypeError), match="n must be"):
            engine.fork(single, n=bad)
    with pytest.raises(ValueError, match="prompt_logprobs must be None"):
        engine.fork(single, n=1, sampling_params=SamplingParams(prompt_logprobs=1))
    with pytest.raises(ValueError, match="cache_salt must be the parent's None"):
        engine.fork(single, n=1, sampling_params=SamplingParams(cache_salt="other"))
    for request_id in (several, single):
        engine.abort(request_id)
    engine.step()


def test_more_sequences_than_rows_are_refused(make_engine):
    engine = make_engine()
    with pytest.raises(ValueError, match="9 sequences needs as many rows"):
        engine.add_request(SHARED[:5], SamplingParams(n=9))
    with pytest.raises(ValueError, match="beam_width must be at most 19 with 1 tokens"):
        engine.add_request(SHARED[:5], SamplingParams(beam_width=20))


def test_requests_that_share_blocks_are_swapped_out_together(make_engine):
    """Each keeps a copy of its own of what they share."""
    engine = make_engine(
        num_blocks=16,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        preemption_mode="swap",
        swap_space_gib=0.01,
        scheduling_policy="priority",
    )

    def run(prompts):
        for prompt in prompts:
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, priority=1)
            engine.add_request(prompt, params, arrival_time=0.0)
            for _ in range(3):
                engine.step()
        shared = engine.stats().blocks_shared
        if len(prompts) > 1:  # one that needs nearly the whole pool
            urgent = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            engine.add_request(list(range(300, 500)), urgent, arrival_time=0.0)
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {out.request_id: out for out in engine.step() if out.finished}
        return [
            out.outputs[0].token_ids for out in outputs.values() if len(out.prompt_token_ids) == 65
        ], shared

    prompts = [[*range(1, 65), last] for last in (100, 200)]
    alone = [run([prompt])[0][0] for prompt in prompts]
    together, shared = run(prompts)
    assert shared == 4 and engine.stats().preemptions_swap == 2
    assert sorted(together) == sorted(alone)
