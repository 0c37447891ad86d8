import math

import pytest

from jpaged.runner.preemption_costs import PreemptionCosts


def test_the_cheaper_way_back_is_taken():
    # 100 bytes out and 100 in at 10 bytes a second: 20 s. Prefill at 5 tokens a second.
    costs = PreemptionCosts(10.0, 5.0)
    assert costs.swap_seconds(100) == 20
    assert costs.recompute_seconds(100) == 20
    assert costs.prefers_swap(100, 101)
    assert not costs.prefers_swap(100, 99)
    assert not costs.prefers_swap(100, 100)  # a tie: recompute takes no host memory


def test_a_fast_link_swaps_and_a_slow_one_recomputes():
    request = {"num_bytes": 2**30, "num_tokens": 1000}
    assert PreemptionCosts(50e9, 10_000.0).prefers_swap(**request)
    assert not PreemptionCosts(1e9, 10_000.0).prefers_swap(**request)
    assert not PreemptionCosts(50e9, 1e6).prefers_swap(**request)


def test_the_prefill_rate_is_that_of_observed_steps():
    costs = PreemptionCosts(10.0)
    assert costs.prefill_tokens_per_second is None
    assert not costs.prefers_swap(1, 10**9)  # not known yet
    costs.observe_prefill(1000, 2.0)
    assert costs.prefill_tokens_per_second == 500
    assert costs.prefers_swap(10, 1001)
    assert not costs.prefers_swap(10, 1000)


def test_old_steps_fade_and_short_ones_hardly_count():
    costs = PreemptionCosts(10.0)
    for _ in range(50):
        costs.observe_prefill(1000, 2.0)
    costs.observe_prefill(8, 0.02)  # 400 tokens a second
    assert costs.prefill_tokens_per_second == pytest.approx(500, rel=1e-3)
    for _ in range(100):
        costs.observe_prefill(1000, 1.0)
    assert costs.prefill_tokens_per_second == pytest.approx(1000, rel=0.02)


def test_a_given_rate_stays():
    costs = PreemptionCosts(10.0, 5.0)
    costs.observe_prefill(1000, 1.0)
    assert costs.prefill_tokens_per_second == 5


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf])
def test_rates_are_positive_numbers(bad):
    with pytest.raises(ValueError, match="link_bytes_per_second must be a finite number > 0, got"):
        PreemptionCosts(bad)
    with pytest.raises(ValueError, match="prefill_tokens_per_second must be a finite number > 0"):
        PreemptionCosts(1.0, bad)
    with pytest.raises(ValueError, match="seconds must be a finite number > 0, got"):
        PreemptionCosts(1.0).observe_prefill(1, bad)
    with pytest.raises(ValueError, match="num_tokens must be >= 1, got 0"):
        PreemptionCosts(1.0).observe_prefill(0, 1.0)
