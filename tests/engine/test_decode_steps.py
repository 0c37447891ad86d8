"""Several decode steps in one call bring what single steps bring, and stop where one ends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jpaged import SamplingParams

NUM_REQUESTS = 60
# One token in sixteen, so that sequences end by themselves after some tokens.
STOP_TOKENS = list(range(0, 49152, 16))
SETTINGS = {"max_num_seqs": 16, "max_num_batched_tokens": 32, "num_blocks": 300}


def make_requests(rng: np.random.Generator) -> list[tuple[list[int], SamplingParams]]:
    prefix = rng.integers(0, 49152, 40).tolist()
    # top_k: of 49,152 tokens that are almost as likely as each other, rounding would choose.
    kinds = itertools.cycle(
        [
            {"temperature": 0.0, "logprobs": 2},
            {"temperature": 1.0, "top_k": 8, "seed": 3, "ignore_eos": True},
            {"temperature": 0.0, "stop_token_ids": STOP_TOKENS, "min_tokens": 3},
            {"temperature": 1.0, "top_k": 8, "stop_token_ids": STOP_TOKENS},
            {"temperature": 0.9, "top_k": 8, "repetition_penalty": 1.3, "presence_penalty": 0.5},
            {"temperature": 1.0, "top_k": 8, "stop": ["e", "a"], "seed": 5, "logprobs": 1},
            {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1},
            {"temperature": 1.0, "top_k": 8, "n": 3, "stop_token_ids": STOP_TOKENS},
            {"beam_width": 3, "max_tokens": 4},
        ]
    )
    requests = []
    for _ in range(NUM_REQUESTS):
        prompt = rng.integers(0, 49152, rng.integers(1, 60)).tolist()
        if rng.random() < 0.3:
            prompt = prefix + prompt
        params = {"max_tokens": int(rng.integers(1, 80)), "priority": int(rng.integers(5))}
        params |= next(kinds)
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        requests.append((prompt, SamplingParams(**params)))
    return requests


def serve(engine, requests) -> list:
    """The last output of every request. Requests come a few at a time."""
    outputs, left, calls = {}, list(enumerate(requests)), 0
    while left or engine.has_unfinished_requests():
        if calls % 20 == 0:
            for i, (prompt, params) in left[:8]:
                engine.add_request(prompt, params, request_id=str(i), arrival_time=float(i))
            left = left[8:]
        calls += 1
        for out in engine.step():
            outputs[out.request_id] = out
        engine.scheduler.check_integrity()
    assert engine.stats().compilations_after_warmup == 0
    assert engine.stats().blocks_used == 0
    return [outputs[str(i)] for i in range(len(requests))]


def tokens(out) -> list[list[int]]:
    return [completion.token_ids for completion in out.outputs]


def count_calls(engine) -> dict[str, int]:
    """Counts the runner's calls from now on."""
    counts = dict.fromkeys(("execute", "execute_decodes"), 0)
    for name in counts:
        method = getattr(engine.runner, name)

        def counted(*step, name=name, method=method):
            counts[name] += 1
            return method(*step)

        setattr(engine.runner, name, counted)
    return counts


@pytest.fixture(scope="module")
def expected(make_engine):
    requests = make_requests(np.random.default_rng(0))
    return requests, serve(make_engine(**SETTINGS), requests)


SMALL = {"num_blocks": 26, "scheduling_policy": "priority"}  # who comes may push others out
CONFIGS = {
    "overlap": {},
    "plain": {"overlap": False},
    "recompute": SMALL,
    "swap, cached": SMALL
    | {"preemption_mode": "swap", "swap_space_gib": 0.01, "enable_prefix_caching": True},
}


SLOW = {"plain", "recompute"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CONFIGS]
)
def test_the_outputs_are_those_of_single_steps(name, make_engine, expected, is_tie):
    requests, singles = expected
    engine = make_engine(**SETTINGS | CONFIGS[name], max_decode_steps=6)
    counts = count_calls(engine)
    outputs = serve(engine, requests)
    assert counts["execute_decodes"] > 20
    steps, calls = engine.stats().steps, sum(counts.values())
    assert steps > calls + 2 * counts["execute_decodes"], (steps, counts)
    differences = 0
    for (prompt, params), found, single in zip(requests, outputs, singles, strict=True):
        if tokens(found) == tokens(single):
            for a, b in zip(found.outputs, single.outputs, strict=True):
                assert (a.text, a.finish_reason, a.stop_reason) == (
                    b.text, b.finish_reason, b.stop_reason,
                )  # fmt: skip
                if params.logprobs is not None:
                    assert len(a.logprobs) == len(a.token_ids)
                    chosen = [[x.logprobs[i][t] for i, t in enumerate(x.token_ids)] for x in (a, b)]
                    # Sums of 32 products that are about 1, rounded otherwise by another program.
                    np.testing.assert_allclose(*chosen, atol=2e-5)
            continue
        assert params.beam_width is None, "beams are single steps"
        differences += 1
        for index, (ours, theirs) in enumerate(zip(tokens(found), tokens(single), strict=True)):
            same = next(i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1])
            assert is_tie(
                engine, prompt + ours[:same], params, index, wanted=theirs[same], found=ours[same]
            )
    assert differences <= 2
    reasons = [c.finish_reason for out in outputs for c in out.outputs]
    assert min(reasons.count("stop"), reasons.count("length")) > 10
    stats = engine.stats()
    preemptions = stats.preemptions_recompute + stats.preemptions_swap
    assert (preemptions > 0) == ("num_blocks" in CONFIGS[name])
    assert (stats.preemptions_swap > 0) == ("swap" in name)


def serve_one(engine, prompt, params):
    engine.add_request(prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.scheduler.check_integrity()
    return outputs[-1].outputs[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_call_stops_where_a_sequence_ends(make_engine, overlap):
    engine = make_engine(max_decode_steps=8, overlap=overlap)
    ask = {"temperature": 1, "seed": 1, "max_tokens": 30}
    long = serve_one(engine, [5, 6, 7], SamplingParams(**ask, ignore_eos=True)).token_ids
    assert len(long) == 30
    stop_at = next(i for i in range(12, 30) if long[i] not in long[:i] and i % 8 not in (0, 1))
    before = engine.stats()
    counts = count_calls(engine)
    stops = SamplingParams(**ask, stop_token_ids=[long[stop_at]])
    found = serve_one(engine, [5, 6, 7], stops)
    assert (found.token_ids, found.stop_reason) == (long[: stop_at + 1], long[stop_at])
    after = engine.stats()
    # No step runs after the one that samples the stop token: the prompt's and one a token.
    assert after.steps - before.steps == stop_at + 1
    assert counts == {"execute": 1, "execute_decodes": -(-stop_at // 8)}
    assert after.blocks_used == 0
    # What is left of the call that was cut short is nowhere counted.
    assert engine.scheduler.scheduled_tokens == engine.stats().steps + 2 * 2


def test_more_stop_tokens_than_the_device_knows_of(make_engine):
    engine = make_engine(max_decode_steps=8)
    ask = {"temperature": 1, "seed": 1, "max_tokens": 30}
    long = serve_one(engine, [5, 6, 7], SamplingParams(**ask, ignore_eos=True)).token_ids
    for last in range(1, 20):
        ids = [*[t for t in range(100) if t not in long][:40], long[last]]
        found = serve_one(engine, [5, 6, 7], SamplingParams(**ask, stop_token_ids=ids))
        assert found.token_ids == long[: long.index(long[last]) + 1]
        assert found.finish_reason == "stop"
    assert engine.stats().blocks_used == 0


def test_a_length_is_foreseen_and_never_passed(make_engine):
    engine = make_engine(max_decode_steps=8)
    counts = count_calls(engine)
    for max_tokens in range(1, 20):
        before = engine.stats().steps
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        assert len(serve_one(engine, [1, 2, 3], params).token_ids) == max_tokens
        assert engine.stats().steps - before == max_tokens
    assert counts["execute_decodes"] == sum(
        (n - 1) // 8 + ((n - 1) % 8 > 1) for n in range(1, 20)
    )  # what is left of one step is a single one


def test_who_comes_waits_for_one_call_at_most(make_engine):
    engine = make_engine(max_decode_steps=8, overlap=False)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine.add_request([1, 2, 3], params, request_id="first")
    engine.step()
    assert [len(out.outputs[0].token_ids) for out in engine.step()] == [9]
    engine.add_request([4, 5, 6], params, request_id="second")
    # The next step is its prefill beside one decode, the one after it has several steps again.
    assert {out.request_id: len(out.outputs[0].token_ids) for out in engine.step()} == {
        "first": 10, "second": 1,
    }  # fmt: skip
    assert {out.request_id: len(out.outputs[0].token_ids) for out in engine.step()} == {
        "first": 18, "second": 9,
    }  # fmt: skip
    for request_id in ("first", "second"):
        assert engine.abort(request_id, report=False)
    engine.step()
    assert engine.stats().blocks_used == 0


def test_a_call_that_fails_costs_its_own_tokens_alone(make_engine):
    engine = make_engine(max_decode_steps=8)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = serve_one(engine, [1, 2, 3], params).token_ids
    execute = engine.runner.execute_decodes
    for fails_at, place in itertools.product((1, 2), ("dispatch", "read")):
        calls = itertools.count(1)

        def failing(bucket, buffer, calls=calls, fails_at=fails_at, place=place):
            fails = next(calls) == fails_at
            if fails and place == "dispatch":
                raise FloatingPointError
            result = execute(bucket, buffer)
            if fails:

                def tokens(count, step=0):
                    raise FloatingPointError

                result.tokens = tokens
            return result

        engine.runner.execute_decodes = failing
        engine.add_request([1, 2, 3], params)
        outputs = []
        while engine.has_unfinished_requests():
            try:
                outputs += engine.step()
            except FloatingPointError:
                engine.scheduler.check_integrity()
        assert outputs[-1].outputs[0].token_ids == expected
        assert engine.stats().blocks_used == 0


def test_what_breaks_off_between_two_steps_of_a_call_loses_no_token(make_engine, monkeypatch):
    engine = make_engine(max_decode_steps=8)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    expected = serve_one(engine, [1, 2, 3], params).token_ids
    engine.add_request([1, 2, 3], params)
    advance, calls = engine._loop._advance, itertools.count(1)

    def failing(*arguments):
        if next(calls) == 6:
            raise FloatingPointError
        advance(*arguments)

    monkeypatch.setattr(engine._loop, "_advance", failing)
    outputs, failures = [], 0
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
        except FloatingPointError:
            failures += 1
            engine.scheduler.check_integrity()
    assert failures == 1 and outputs[-1].outputs[0].token_ids == expected
    assert engine.stats().blocks_used == 0


def test_blocks_run_out_before_the_steps_do(make_engine):
    """As many steps as there are blocks for, and nobody is preempted for more."""
    engine = make_engine(num_blocks=5, max_decode_steps=64, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    for prompt in ([1] * 10, [2] * 10):
        engine.add_request(prompt, params)
    last = {}
    while engine.has_unfinished_requests():
        for out in engine.step():
            last[out.request_id] = len(out.outputs[0].token_ids)
        engine.scheduler.check_integrity()
    assert sorted(last.values()) == [70, 70]
    # Both grow to 2 of the 5 blocks each, then one of them needs the fifth and more.
    assert engine.stats().preemptions_recompute == 1


def test_memory_that_nobody_may_read_holds_nan(make_engine):
    engine = make_engine(max_decode_steps=8)
    alone = [
        serve_one(engine, prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
        for prompt in ([3] * 20, [4] * 7, [5] * 33)
    ]
    runner = engine.runner
    runner._kv_pool = runner._kv_pool.at[:].set(np.nan)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=1)
    last = {}
    for prompt in ([3] * 20, [4] * 7, [5] * 33):
        engine.add_request(prompt, params)
    while engine.has_unfinished_requests():
        for out in engine.step():
            last[int(out.request_id)] = out.outputs[0]
    found = [last[key] for key in sorted(last)]
    assert [c.token_ids for c in found] == [c.token_ids for c in alone]
    for completion in found:
        values = [list(logprobs.values()) for logprobs in completion.logprobs]
        assert np.isfinite(values).all() and np.less(values, 0).all()
