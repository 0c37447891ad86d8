"""The second half of a chat re-uses the first: how many of its tokens are found, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from jpaged.sampling_params import SamplingParams

BLOCK_SIZE = 16  # of the tiny engine
USER = np.random.default_rng(0).integers(1000, 40000, (3, 60)).tolist()


def answer(engine, prompt: list[int], num_tokens: int, **params) -> tuple[list[int], int]:
    """The greedy continuation of a prompt, and the tokens that were found for it."""
    before = engine.stats().prefix_cached_tokens
    engine.add_request(
        prompt, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, **params)
    )
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.scheduler.check_integrity()
    assert engine.stats().compilations_after_warmup == 0
    return outputs[-1].outputs[0].token_ids, engine.stats().prefix_cached_tokens - before


@pytest.fixture(scope="module")
def cached(make_engine):
    return make_engine(enable_prefix_caching=True)


@pytest.fixture(scope="module")
def uncached(make_engine):
    return make_engine(enable_prefix_caching=False)


# Of a turn all tokens are computed but the last one of the answer, so it leaves
# (prompt + answer - 1) // 16 full blocks.
@pytest.mark.parametrize(
    ("first", "answer_len", "second", "found"),
    [
        (37, 20, 10, 48),  # 56 tokens computed: three blocks and a half
        (37, 27, 10, 48),  # 63: one short of four blocks
        (37, 28, 10, 64),  # 64: the answer ends with a block, its last token outside
        (16, 1, 5, 16),  # the prompt is one block, and the answer its only token
        (15, 1, 5, 0),  # 15 computed, and the 16th is the answer
        (40, 30, 1, 64),
    ],
)
def test_the_second_turn_finds_the_first(cached, uncached, first, answer_len, second, found):
    cached.scheduler.block_manager.reset_prefix_cache()
    opening = USER[0][:first]
    reply, hits = answer(cached, opening, answer_len)
    assert hits == 0
    assert (reply, 0) == answer(uncached, opening, answer_len)
    follow_up = opening + reply + USER[1][:second]
    assert found == (first + answer_len - 1) // BLOCK_SIZE * BLOCK_SIZE
    second_reply, hits = answer(cached, follow_up, 12)
    assert hits == found
    assert (second_reply, 0) == answer(uncached, follow_up, 12)
    # And the third finds both.
    third = follow_up + second_reply + USER[2][:7]
    last_reply, hits = answer(cached, third, 5)
    assert hits == (len(follow_up) + 11) // BLOCK_SIZE * BLOCK_SIZE
    assert (last_reply, 0) == answer(uncached, third, 5)


def test_a_turn_that_says_nothing_new_computes_one_token(cached, uncached):
    cached.scheduler.block_manager.reset_prefix_cache()
    opening = USER[0][:33]
    reply, _ = answer(cached, opening, 16)
    history = (opening + reply)[:48]  # three full blocks, all of them cached
    again, hits = answer(cached, history, 8)
    assert hits == 32
    assert (again, 0) == answer(uncached, history, 8)


def test_another_tenants_chat_is_not_found(cached):
    cached.scheduler.block_manager.reset_prefix_cache()
    reply, _ = answer(cached, USER[0], 10, cache_salt="a")
    follow_up = USER[0] + reply + USER[1]
    other, hits = answer(cached, follow_up, 8, cache_salt="b")
    assert hits == 0
    same, hits = answer(cached, follow_up, 8, cache_salt="a")
    assert hits == 64
    assert same == other
