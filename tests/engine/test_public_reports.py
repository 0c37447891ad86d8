"""Faults that other engines were reported to have and that show in what an engine says, by the
numbers of the public reports."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
BLOCK = 16


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 40000, length).tolist()


def answers(engine, prompts, params=GREEDY, but=None):
    """For each prompt, of each of its samples the tokens and their log-probabilities.

    but: a request that is running already, to be aborted when these are finished.
    """
    names = [engine.add_request(prompt, params) for prompt in prompts]
    done = {}
    while engine.has_unfinished_requests():
        if but is not None and all(name in done and done[name].finished for name in names):
            engine.abort(but)
        for output in engine.step():
            done[output.request_id] = output
        engine.scheduler.check_integrity()
    assert engine.stats().blocks_used == 0
    return [said(done[name]) for name in names]


def said(output):
    """The tokens of each sample of a request, and their log-probabilities."""
    return [
        (c.token_ids, [step[token] for step, token in zip(c.logprobs, c.token_ids)])
        for c in output.outputs
    ]


def assert_same(found, expected) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(
            ours, theirs, strict=True
        ):
            assert tokens == expected_tokens
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-4)


@pytest.fixture(scope="module")
def uncached(make_engine):
    return make_engine()


@pytest.fixture
def cached(make_engine):
    return make_engine(enable_prefix_caching=True)


def hits_of(engine, prompts, params=GREEDY):
    before = engine.stats().prefix_cached_tokens
    found = answers(engine, prompts, params)
    return found, engine.stats().prefix_cached_tokens - before


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=12, ignore_eos=True, logprobs=0),
    ],
    ids=["greedy", "3 samples"],
)
def test_tenstorrent_vllm_415_a_cache_hit_says_what_a_miss_does(cached, uncached, params):
    """There a prefill that went on from cached blocks gave other, degenerate text: for a prompt
    that was asked again, and for one that shares its beginning with another."""
    whole = prompt_of(75)
    others = [whole[:48] + prompt_of(20, 1), whole[:40] + prompt_of(30, 2)]
    expected = [answers(uncached, [prompt], params)[0] for prompt in (whole, *others)]
    found, hits = hits_of(cached, [whole], params)
    assert_same(found, expected[:1])
    assert hits == 0
    for _ in range(2):
        found, hits = hits_of(cached, [whole], params)
        assert_same(found, expected[:1])
        assert hits == 64
    # One after the other and at once.
    for prompt, theirs, shared in zip(others, expected[1:], (48, 32)):
        found, hits = hits_of(cached, [prompt], params)
        assert_same(found, [theirs])
        assert hits == shared
    found, hits = hits_of(cached, [whole, *others], params)
    assert_same(found, expected)
    assert hits == 64 + 64 + 64
    # What was said is cached too, and a second question goes on from it.
    answer, _ = expected[0][0]
    longer = [*whole, *answer, *prompt_of(9, 3)]
    found, hits = hits_of(cached, [longer], params)
    assert_same(found, answers(uncached, [longer], params))
    assert hits == (75 + 11) // BLOCK * BLOCK


def test_neuralmagic_vllm_92_a_prompt_cached_to_its_last_token(cached, uncached):
    """There no token was left to compute, and so nothing to sample from."""
    for length in range(1, 3 * BLOCK + 2, 5):
        prompt = prompt_of(length, length)
        expected = answers(uncached, [prompt])
        for found in (answers(cached, [prompt]) for _ in range(2)):
            assert_same(found, expected)
    for length in (BLOCK, 2 * BLOCK, 3 * BLOCK):
        prompt = prompt_of(length, 99)
        expected = answers(uncached, [prompt])
        answers(cached, [prompt_of(3 * BLOCK, 99)])
        found, hits = hits_of(cached, [prompt])
        assert_same(found, expected)
        assert hits == length - BLOCK  # all of it was there, and its last block is computed again


@pytest.mark.parametrize("caching", [False, True])
def test_vllm_7380_a_last_chunk_that_ends_on_a_block_edge(cached, uncached, caching):
    """There the token after the prompt had no block. Chunks of 32 tokens and blocks of 16; beside a
    request that decodes, chunks of 31, which end elsewhere."""
    assert (uncached.config.max_num_batched_tokens, uncached.config.block_size) == (32, 16)
    prompts = [prompt_of(length, length) for length in (32, 64, 80)]
    companion = dataclasses.replace(GREEDY, max_tokens=100)
    expected = []
    for prompt in prompts:
        name = uncached.add_request(prompt_of(5, 4), companion)
        for _ in range(3):
            uncached.step()
        expected += answers(uncached, [prompt], but=name)
    engine = cached if caching else uncached
    for _ in range(2):
        assert_same([answers(engine, [prompt])[0] for prompt in prompts], expected)


def test_nano_vllm_211_a_request_resumed_onto_its_own_blocks(make_engine, uncached):
    """There its tokens were counted before they were found in the cache, and too many computed."""
    engine = make_engine(num_blocks=9, enable_prefix_caching=True)
    # The second gives way when it has filled five blocks, and the first ends before it needs more.
    work = [(prompt_of(40, 1), 24), (prompt_of(60, 2), 50)]
    expected, names, found = [], [], {}
    for prompt, max_tokens in work:
        params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
        expected += answers(uncached, [prompt], params)
        names.append(engine.add_request(prompt, params))
    while engine.has_unfinished_requests():
        found.update({output.request_id: output for output in engine.step()})
        engine.scheduler.check_integrity()
    assert_same([said(found[name]) for name in names], expected)
    stats = engine.stats()
    assert (stats.preemptions_recompute, stats.prefix_cached_tokens) == (1, 80)
