"""scripts/_serving_metrics.py on times that are worked out by hand."""

import importlib
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture(scope="module")
def metrics():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("_serving_metrics")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def requests(metrics):
    """Five tokens one by one, four tokens in two deliveries, and a single token."""
    return [
        metrics.RequestTimes(1.0, [1.5, 1.6, 1.8, 2.0, 2.5], prompt_len=10, output_len=5),
        metrics.RequestTimes(2.0, [2.2, 2.6], prompt_len=20, output_len=4),
        metrics.RequestTimes(4.0, [5.0], prompt_len=30, output_len=1),
    ]


def test_times_of_one_request(requests):
    first, second, third = requests
    assert [r.ttft for r in requests] == pytest.approx([0.5, 0.2, 1.0])
    assert [r.e2el for r in requests] == pytest.approx([1.5, 0.6, 1.0])
    assert first.tpot == pytest.approx((1.5 - 0.5) / 4)
    assert second.tpot == pytest.approx((0.6 - 0.2) / 3)
    assert third.tpot is None
    assert first.itl == pytest.approx([0.1, 0.2, 0.2, 0.5])
    assert second.itl == pytest.approx([0.4])
    assert third.itl == []
    normalized = [r.normalized_latency for r in requests]
    assert normalized == pytest.approx([1.5 / 5, 0.6 / 4, 1.0])


def test_throughput_counts_from_the_first_start_to_the_last_token(metrics, requests):
    figures = metrics.throughput(requests)
    assert figures["completed"] == 3
    assert figures["duration"] == pytest.approx(4.0)
    assert figures["total_input_tokens"] == 60
    assert figures["total_output_tokens"] == 10
    assert figures["request_throughput"] == pytest.approx(3 / 4)
    assert figures["output_throughput"] == pytest.approx(10 / 4)
    assert figures["total_token_throughput"] == pytest.approx(70 / 4)


def test_mean_median_and_percentiles_in_ms(metrics, requests):
    figures = metrics.latencies(requests, percentiles=(50, 99, 99.9))
    assert figures["mean_ttft_ms"] == pytest.approx(1700 / 3)
    assert figures["median_ttft_ms"] == pytest.approx(500)
    assert figures["p50_ttft_ms"] == pytest.approx(500)
    assert figures["p99_ttft_ms"] == pytest.approx(500 + 0.98 * 500)
    assert figures["p99.9_ttft_ms"] == pytest.approx(500 + 0.998 * 500)
    assert figures["mean_tpot_ms"] == pytest.approx((250 + 400 / 3) / 2)
    assert figures["mean_itl_ms"] == pytest.approx((100 + 200 + 200 + 500 + 400) / 5)
    assert figures["median_itl_ms"] == pytest.approx(200)
    assert figures["mean_e2el_ms"] == pytest.approx(3100 / 3)
    assert figures["mean_normalized_latency_ms"] == pytest.approx((300 + 150 + 1000) / 3)


def test_single_tokens_have_no_time_per_token(metrics, requests):
    figures = metrics.latencies(requests[2:])
    assert figures["mean_tpot_ms"] is None
    assert figures["p99_itl_ms"] is None
    assert figures["mean_ttft_ms"] == pytest.approx(1000)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 600}, 2),
        ({"ttft": 300}, 1),
        ({"tpot": 200}, 2),
        ({"tpot": 100}, 1),
        ({"e2el": 1200, "tpot": 200}, 2),
        ({"e2el": 900, "ttft": 100}, 0),
        ({"ttft": 2000, "tpot": 300, "e2el": 2000}, 3),
    ],
)
def test_goodput_counts_requests_that_meet_all_objectives(metrics, requests, objectives, good):
    figures = metrics.goodput(requests, objectives)
    assert figures["request_goodput_share"] == pytest.approx(good / 3)
    assert figures["request_goodput"] == pytest.approx(good / 4)
