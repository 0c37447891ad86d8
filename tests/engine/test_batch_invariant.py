"""batch_invariant=True: a request's log-probabilities are the same to the bit whatever else runs,
and however it was cut, preempted or cached."""

from __future__ import annotations

import numpy as np
import pytest

from jpaged import SamplingParams

SETTINGS = {"batch_invariant": True, "max_num_seqs": 32, "max_num_batched_tokens": 96}


def make_requests(count: int, longest: int) -> list[tuple[list[int], SamplingParams]]:
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 49152, 48).tolist()
    requests = []
    for i in range(count):
        prompt = rng.integers(0, 49152, rng.integers(1, longest)).tolist()
        if i % 3 == 0:
            prompt = prefix + prompt
        requests.append(
            (
                prompt,
                SamplingParams(
                    max_tokens=int(rng.integers(2, 24)),
                    ignore_eos=True,
                    logprobs=3,
                    temperature=[0.0, 1.0][i % 2],
                    repetition_penalty=[1.0, 1.2][i % 4 == 3],
                    seed=i,
                ),
            )
        )
    return requests


def serve(engine, requests, order=None) -> list[list]:
    """Tokens and the bits of the log-probabilities of each request."""
    order = range(len(requests)) if order is None else order
    for place, i in enumerate(order):
        prompt, params = requests[i]
        engine.add_request(
            prompt, params, request_id=str(i), arrival_time=float(place), stream=False
        )
    outputs: dict[str, list] = {}
    while engine.has_unfinished_requests():
        for out in engine.step():
            (sample,) = out.outputs
            outputs[out.request_id] = [
                (token, {other: float(value).hex() for other, value in logprobs.items()})
                for token, logprobs in zip(sample.token_ids, sample.logprobs, strict=True)
            ]
    assert engine.stats().compilations_after_warmup == 0
    return [outputs[str(i)] for i in range(len(requests))]


def check_all(make, requests, few: int, budget: int) -> None:
    """`make(**settings)` gives an engine. The first `few` requests are run alone too, all of them
    in steps of 32, of 96 and of `budget` tokens."""
    rng = np.random.default_rng(1)
    roomy = make(num_blocks=800)
    expected = serve(roomy, requests)
    assert all(serve(roomy, [requests[i]])[0] == expected[i] for i in range(few))
    assert serve(roomy, requests, rng.permutation(len(requests)).tolist()) == expected
    assert roomy.stats().preemptions_recompute == 0
    for tokens in (32, budget):
        assert serve(make(num_blocks=800, max_num_batched_tokens=tokens), requests) == expected
    for mode in ("recompute", "swap"):
        engine = make(num_blocks=60, preemption_mode=mode, swap_space_gib=0.2)
        assert serve(engine, requests, rng.permutation(len(requests)).tolist()) == expected
        stats = engine.stats()
        assert (stats.preemptions_recompute if mode == "recompute" else stats.preemptions_swap) > 0
    engine = make(num_blocks=800, enable_prefix_caching=True)
    for _ in range(2):
        assert serve(engine, requests) == expected
    assert engine.stats().prefix_cached_tokens > 48


def test_log_probabilities_are_the_same_to_the_bit(make_engine):
    def make(**settings):
        return make_engine(**SETTINGS | settings)

    check_all(make, make_requests(64, longest=120), few=16, budget=192)


def test_without_it_they_are_not(make_engine):
    """So the check above can fail."""
    requests = make_requests(64, longest=120)
    # Attention of up to 128 queries (SHORT_QUERY) goes row by row without it too.
    settings = {"batch_invariant": False, "max_num_batched_tokens": 192, "num_blocks": 800}
    engine = make_engine(**SETTINGS | settings)
    expected = serve(engine, requests)
    assert any(serve(engine, [requests[i]])[0] != expected[i] for i in range(16))


@pytest.mark.slow
def test_smollm2_log_probabilities_are_the_same_to_the_bit(make_engine, smollm2):
    def make(**settings):
        return make_engine(smollm2, **SETTINGS | settings)

    check_all(make, make_requests(64, longest=150), few=8, budget=2048)
