"""Planning a step while the one before it runs changes no output: 64 sequences at once, with stop
tokens and strings, min_tokens, several samples, beams, aborts, forks, preemption of both kinds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jpaged import SamplingParams

NUM_REQUESTS = 150
# Steps are cut differently with overlap, and the tiny model's distributions are so flat that the
# last bits of a product decide about samples: batch invariance leaves no ties to excuse.
SETTINGS = {"max_num_seqs": 64, "max_num_batched_tokens": 128, "batch_invariant": True}
# One token in sixteen, so that sequences end by themselves after some tokens.
STOP_TOKENS = list(range(0, 49152, 16))


def make_requests(rng: np.random.Generator) -> list[tuple[list[int], SamplingParams]]:
    prefix = rng.integers(0, 49152, 40).tolist()
    kinds = itertools.cycle(
        [
            {"temperature": 0.0},
            {"temperature": 1.0, "seed": 3},
            {"temperature": 0.0, "stop_token_ids": STOP_TOKENS},
            {"temperature": 1.0, "stop_token_ids": STOP_TOKENS, "min_tokens": 4},
            {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5},
            {"temperature": 1.0, "stop": ["e", "a"], "seed": 5, "logprobs": 2},
            {"temperature": 1.0, "n": 3, "stop_token_ids": STOP_TOKENS},
            {"temperature": 0.0, "prompt_logprobs": 1, "logprobs": 1},
            {"beam_width": 3},
        ]
    )
    requests = []
    for _ in range(NUM_REQUESTS):
        prompt = rng.integers(0, 49152, rng.integers(1, 60)).tolist()
        if rng.random() < 0.3:
            prompt = prefix + prompt
        params = {"max_tokens": int(rng.integers(1, 60))} | next(kinds)
        params["min_tokens"] = min(params.get("min_tokens", 0), params["max_tokens"])
        requests.append((prompt, SamplingParams(**params)))
    return requests


def serve(engine, requests, *, aborted: dict[int, int]) -> dict[str, object]:
    """All outputs, by request id; request i is aborted once it has aborted[i] tokens, and its name
    given to another request at once."""
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(prompt, params, request_id=str(i), arrival_time=float(i))
    outputs, most_running = {}, 0
    while engine.has_unfinished_requests():
        for out in engine.step():
            limit = aborted.get(int(out.request_id))
            if limit is not None and not out.finished and len(out.outputs[0].token_ids) >= limit:
                assert engine.abort(out.request_id, report=False)
                del aborted[int(out.request_id)]
                engine.add_request(*requests[0], request_id=out.request_id, arrival_time=1e3)
            elif out.finished:
                outputs[out.request_id] = out
        engine.scheduler.check_integrity()
        running = engine.scheduler.running
        most_running = max(most_running, sum(len(r.sequences) for r in running))
    assert most_running >= 60 or engine.scheduler.block_manager.num_blocks < 200
    return outputs


def as_plain(out) -> list:
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs, out.prompt_logprobs)
        for c in out.outputs
    ]


CONFIGS = {
    "roomy": {"num_blocks": 700},
    "recompute": {"num_blocks": 70},
    "swap, cached": {
        "num_blocks": 70, "preemption_mode": "swap", "swap_space_gib": 0.01,
        "enable_prefix_caching": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(make_engine):
    """What the plain loop brings, in a big pool."""
    engine = make_engine(**SETTINGS, overlap=False, **CONFIGS["roomy"])
    requests = make_requests(np.random.default_rng(0))
    return requests, serve(engine, requests, aborted={})


SLOW = {"recompute"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CONFIGS]
)
def test_the_outputs_are_those_of_the_plain_loop(name, make_engine, expected):
    requests, plain = expected
    engine = make_engine(**SETTINGS, overlap=True, **CONFIGS[name])
    aborts = {i: 1 + i % 5 for i in range(1, NUM_REQUESTS, 7) if requests[i][1].max_tokens > 6}
    aborts = {i: limit for i, limit in aborts.items() if requests[i][1].beam_width is None}
    left = dict(aborts)
    outputs = serve(engine, requests, aborted=left)
    assert len(left) < len(aborts) and outputs.keys() == plain.keys()
    for i in range(NUM_REQUESTS):
        of = 0 if i in aborts and i not in left else i
        assert as_plain(outputs[str(i)]) == as_plain(plain[str(of)]), i
    reasons = [c.finish_reason for out in outputs.values() for c in out.outputs]
    assert reasons.count("stop") > 30 and reasons.count("length") > 30
    stats = engine.stats()
    assert stats.compilations_after_warmup == 0
    preemptions = stats.preemptions_recompute + stats.preemptions_swap
    assert (preemptions > 5) == (name != "roomy")
    assert ("swap" in name) == (stats.preemptions_swap > 0)
    assert stats.blocks_used == 0


def test_a_step_is_dispatched_before_the_tokens_of_the_one_before_are_read(make_engine):
    for overlap in (True, False):
        engine = make_engine(overlap=overlap)
        log = []
        execute = engine.runner.execute

        def logged(*step, execute=execute, log=log):
            result = execute(*step)
            number = sum(kind == "dispatch" for kind, _ in log)
            log.append(("dispatch", number))
            tokens = result.tokens
            result.tokens = lambda count: (log.append(("read", number)), tokens(count))[1]
            return result

        engine.runner.execute = logged
        engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert len(outputs[-1].outputs[0].token_ids) == 4
        dispatched = [("dispatch", i) for i in range(4)]
        read = [("read", i) for i in range(4)]
        if overlap:
            # An end by length is foreseen: there is no fifth step.
            assert log == [
                dispatched[0], dispatched[1], read[0], dispatched[2], read[1], dispatched[3],
                read[2], read[3],
            ]  # fmt: skip
        else:
            assert log == [step for pair in zip(dispatched, read) for step in pair]


def test_who_comes_waits_for_one_step_alone_while_others_keep_coming(make_engine):
    """The steps until each of some requests has its first token, the one in which it came out of
    the engine included."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    for patience, waits in ((0, 2), (4, 1)):
        engine = make_engine()
        engine._loop.patience = patience
        engine.add_request([1, 2, 3], params, request_id="0")
        for _ in range(8):
            engine.step()
        found = []
        for number in range(1, 4):
            engine.add_request([1, 2, 3], params, request_id=str(number))
            steps = 0
            while str(number) not in {out.request_id for out in engine.step()}:
                steps += 1
            found.append(steps + 1)
        # The first of them finds a step that was planned ahead when nobody had come for long.
        assert found[1:] == [waits, waits], patience
        # Later all is planned ahead again, and nothing is lost.
        for _ in range(6):
            engine.step()
        assert engine._loop._under_way is not None
        last = {}
        while engine.has_unfinished_requests():
            last |= {out.request_id: out.outputs[0].token_ids for out in engine.step()}
        assert all(len(tokens) == 30 for tokens in last.values()) and len(last) == 4


def test_an_end_that_is_found_out_late_costs_one_row_and_no_token(make_engine):
    engine = make_engine()
    ask = SamplingParams(temperature=1, seed=1, max_tokens=12, ignore_eos=True)
    engine.add_request([5, 6, 7], ask)
    tokens = []
    while engine.has_unfinished_requests():
        for out in engine.step():
            tokens = out.outputs[0].token_ids
    stop_at = next(i for i, token in enumerate(tokens) if i > 2 and token not in tokens[:i])
    before = engine.stats()
    stopping = SamplingParams(
        temperature=1, seed=1, max_tokens=12, stop_token_ids=[tokens[stop_at]]
    )
    engine.add_request([5, 6, 7], stopping)
    finished = []
    while engine.has_unfinished_requests():
        finished += [out for out in engine.step() if out.finished]
    assert finished[0].outputs[0].token_ids == tokens[: stop_at + 1]
    after = engine.stats()
    assert after.steps - before.steps == stop_at + 2
    assert after.generated_tokens - before.generated_tokens == stop_at + 1
    assert after.blocks_used == 0
    assert engine.step() == [] and engine.stats().steps == after.steps


@pytest.mark.parametrize("caching", [False, True])
def test_branches_of_a_request_under_way_share_its_full_blocks(make_engine, caching):
    engine = make_engine(enable_prefix_caching=caching)
    prompt = np.random.default_rng(1).integers(0, 49152, 37).tolist()
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add_request(prompt, params, request_id="parent")
    seen = []
    while len(seen) < 5:
        for out in engine.step():
            seen = out.outputs[0].token_ids
    (branch,) = engine.fork("parent", 1, SamplingParams(temperature=0, max_tokens=6))
    engine.scheduler.check_integrity()
    manager = engine.scheduler.block_manager
    assert manager.num_shared_blocks == (len(prompt) + len(seen) - 1) // 16
    outputs = {}
    while engine.has_unfinished_requests():
        for out in engine.step():
            outputs[out.request_id] = out
        engine.scheduler.check_integrity()
    assert outputs[branch].prompt_token_ids == prompt + seen
    # Greedy: the branch goes where its parent goes.
    whole = outputs["parent"].outputs[0].token_ids
    assert outputs[branch].outputs[0].token_ids == whole[len(seen) : len(seen) + 6]
    assert manager.num_used_blocks == 0


def test_a_step_that_fails_costs_the_tokens_under_way_alone(make_engine):
    engine = make_engine()
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)

    def serve_all():
        last = {}
        while engine.has_unfinished_requests():
            try:
                for out in engine.step():
                    last[out.request_id] = out.outputs[0].token_ids
            except FloatingPointError:
                engine.scheduler.check_integrity()
        return list(last.values())

    for prompt in prompts:
        engine.add_request(prompt, params)
    expected = serve_all()
    for fails_at in range(1, 9):
        for place in ("dispatch", "read"):
            execute, calls = engine.runner.execute, itertools.count(1)

            def failing(*step, execute=execute, calls=calls, at=fails_at, place=place):
                fails = next(calls) == at
                if fails and place == "dispatch":
                    raise FloatingPointError
                result = execute(*step)
                if fails:

                    def tokens(count):
                        raise FloatingPointError

                    result.tokens = tokens
                return result

            engine.runner.execute = failing
            for prompt in prompts:
                engine.add_request(prompt, params)
            assert sorted(serve_all()) == sorted(expected), (fails_at, place)
            engine.runner.execute = execute
            assert engine.stats().blocks_used == 0


def test_what_a_step_has_brought_is_told_though_the_next_one_fails(make_engine):
    """The last token of a request is in before the step of some beams, which fails, is read."""
    engine = make_engine()
    engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=1), request_id="a")
    assert engine.step() == []
    engine.add_request([4, 5, 6], SamplingParams(beam_width=2, max_tokens=3), request_id="b")
    execute = engine.runner.execute

    def failing(*step):
        result = execute(*step)

        def tokens(count):
            raise FloatingPointError

        result.tokens = tokens
        return result

    engine.runner.execute = failing
    with pytest.raises(FloatingPointError):
        engine.step()
    engine.runner.execute = execute
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert sorted(out.request_id for out in outputs if out.finished) == ["a", "b"]
    assert not engine.has_request("a") and engine.stats().blocks_used == 0


def test_a_failing_surplus_step_is_nobodys(make_engine):
    engine = make_engine()
    params = SamplingParams(temperature=1, seed=1, max_tokens=9, ignore_eos=True)
    engine.add_request([5, 6, 7], params)
    tokens = []
    while engine.has_unfinished_requests():
        tokens = [out.outputs[0].token_ids for out in engine.step()] or tokens
    stopping = SamplingParams(temperature=1, seed=1, max_tokens=9, stop_token_ids=[tokens[-1][2]])
    engine.add_request([5, 6, 7], stopping)
    execute, results = engine.runner.execute, []
    engine.runner.execute = lambda *step: results.append(execute(*step)) or results[-1]
    while engine.has_unfinished_requests():
        engine.step()
    assert len(results) == 4  # the third token was the last

    def tokens_of_the_surplus_row(count):
        raise FloatingPointError

    results[-1].tokens = tokens_of_the_surplus_row
    engine.add_request([5, 6, 7], params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert outputs[0].outputs[0].token_ids == tokens[-1]


def test_a_branch_is_not_named_after_one_whose_end_is_still_to_be_told(make_engine):
    engine = make_engine()
    engine.add_request([1, 2, 3], SamplingParams(temperature=0, max_tokens=9), request_id="a")
    while not engine.step():
        pass
    (first,) = engine.fork("a")
    engine.abort(first)
    (second,) = engine.fork("a")
    assert (first, second) == ("a.1", "a.2")
    while engine.has_unfinished_requests():
        engine.step()
