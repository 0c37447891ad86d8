"""scripts/benchmark_serving.py: when requests come, the figures, what it refuses."""

import itertools
import json
import re

import pytest

SMALL = ("--num_prompts", 6, "--input_len", 12, "--output_len", 5, "--num_warmups", 2)
RIVALS = ("--backend", "vllm", "--compare", "transformers")


@pytest.fixture
def run(run_benchmark):
    return lambda *arguments: run_benchmark("serving", *arguments)


def arrivals(job):
    return [request["arrival_time"] for request in job["runs"][0]]


def test_our_engine_serves_requests_as_they_come(run, tiny_in_place, tmp_path):
    file = tmp_path / "figures.json"
    code, out, _ = run(
        *(*SMALL, "--max_model_len", 256, "--request_rate", 50, "--goodput", "ttft:60000"),
        *("--json", file, "--save_detailed"),
    )
    assert code == 0
    result = json.loads(file.read_text())
    (one,) = result["runs"]
    (records,) = one["requests"]
    starts = [record["start"] for record in records]
    assert starts[0] == 0.0
    assert starts == sorted(starts)
    assert len(set(starts)) == 6
    for record in records:
        assert len(record["token_ids"]) == 5
        assert record["delivery_times"][0] > record["start"]
    ttft = sorted(1e3 * (record["delivery_times"][0] - record["start"]) for record in records)
    figures = one["figures"]
    assert figures["median_ttft_ms"] == pytest.approx((ttft[2] + ttft[3]) / 2)
    assert figures["request_goodput_share"] == 1.0
    assert figures["request_goodput"] == pytest.approx(figures["request_throughput"])
    assert result["by_request_rate"]["50"]["medians"]["jpaged"] == figures
    for label in ("TTFT, ms: mean", "TPOT, ms", "ITL, ms", "E2E, ms", "E2E / output", "goodput"):
        assert label in out


def test_concurrency_is_kept(run, tiny_in_place, tmp_path):
    file = tmp_path / "figures.json"
    arguments = (*SMALL, "--max_model_len", 256, "--max_concurrency", 1)
    assert run(*arguments, "--json", file, "--save_detailed")[0] == 0
    (one,) = json.loads(file.read_text())["runs"]
    (records,) = one["requests"]
    for before, after in itertools.pairwise(records):
        assert after["start"] == before["delivery_times"][-1]


def test_figures_of_hand_made_times(run, make_rival, tmp_path):
    """The fake rival's first token comes after 1 s and the others every second."""
    rival, file = make_rival(), tmp_path / "figures.json"
    arguments = ("--backend", "vllm", *rival.flags, "--request_rate", 2, "--json", file)
    assert run(*SMALL, *arguments, "--metric_percentiles", "90,99.9")[0] == 0
    figures = json.loads(file.read_text())["by_request_rate"]["2"]["medians"]["vllm"]
    for name, ms in {
        "mean_ttft_ms": 1000,
        "p90_ttft_ms": 1000,
        "median_tpot_ms": 1000,
        "p99.9_itl_ms": 1000,
        "mean_e2el_ms": 5000,
        "mean_normalized_latency_ms": 1000,
    }.items():
        assert figures[name] == pytest.approx(ms)
    (job,) = rival.jobs()
    assert job["online"]
    assert figures["duration"] == pytest.approx(arrivals(job)[-1] + 5)
    assert figures["output_throughput"] == pytest.approx(30 / figures["duration"])


def test_rates_and_burstiness_move_the_arrivals_alone(run, make_rival):
    rival = make_rival()
    arguments = (*SMALL, "--backend", "vllm", *rival.flags)
    run(*arguments, "--request_rate", "inf,2,4")
    run(*arguments, "--request_rate", "2", "--burstiness", "0.5")
    at_once, slow, fast, bursts = rival.jobs()
    assert arrivals(at_once) == [0.0] * 6
    assert arrivals(slow) == pytest.approx([2 * time for time in arrivals(fast)])
    assert arrivals(bursts) != arrivals(slow)
    prompts = [[r["prompt_token_ids"] for r in job["runs"][0]] for job in rival.jobs()]
    assert all(prompt == prompts[0] for prompt in prompts)


def test_a_trace_is_replayed_with_its_prefixes(run, make_rival, tmp_path):
    rival, trace = make_rival(), tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]},
        {"timestamp": 2000, "input_length": 700, "output_length": 3, "hash_ids": [0, 2]},
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset = ("--dataset_name", "mooncake", "--dataset_path", trace, "--request_rate", "trace")
    arguments = ("--backend", "vllm", *rival.flags, *dataset, "--trace_speed", 4)
    assert run(*arguments, "--input_scale", 0.25)[0] == 0
    (job,) = rival.jobs()
    assert arrivals(job) == [0.0, 0.5]
    first, second = (request["prompt_token_ids"] for request in job["runs"][0])
    assert (len(first), len(second)) == (150, 175)
    assert first[:128] == second[:128]
    assert first[128:150] != second[128:150]


def test_rates_are_compared_one_by_one(run, make_rival, tmp_path):
    rival, file = make_rival(), tmp_path / "figures.json"
    arguments = (*SMALL, *RIVALS, *rival.flags, "--request_rate", "1,2", "--repeat", 2)
    code, out, _ = run(*arguments, "--json", file)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("request rate")] == [
        "request rate 1:",
        "request rate 2:",
    ]
    assert len(re.findall(r"vllm +transformers +vllm / transformers", out)) == 2
    result = json.loads(file.read_text())
    assert [one["request_rate"] for one in result["runs"]] == ["1"] * 4 + ["2"] * 4


@pytest.mark.parametrize("rates", ["2", "1,2"])
def test_plot(run, make_rival, tmp_path, rates):
    pytest.importorskip("matplotlib")
    rival, file = make_rival(), tmp_path / "plot.png"
    arguments = (*SMALL, *RIVALS, *rival.flags, "--request_rate", rates, "--plot", file)
    assert run(*arguments)[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request_rate", "0"], "request_rate must be a number > 0, inf or trace, got '0'"),
        (["--request_rate", "2,fast"], "request_rate must be .*, got 'fast'"),
        (["--request_rate", "nan"], "request_rate must be .*, got 'nan'"),
        (["--request_rate", ""], "request_rate must hold at least one rate"),
        (["--request_rate", "trace"], r"request_rate must be a number or inf: random .* no times"),
        (["--request_rate", "2", "--trace_speed", "2"], "trace_speed must not be given with"),
        (["--burstiness", "0"], "burstiness must be a finite number > 0, got 0"),
        (["--max_concurrency", "0"], "max_concurrency must be an int >= 1, got 0"),
        (["--goodput", "ttft=5"], "goodput must be METRIC:MS, .* got 'ttft=5'"),
        (["--goodput", "itl:5"], "goodput must be .* got 'itl:5'"),
        (["--goodput", "ttft:0"], "goodput must be .* got 'ttft:0'"),
        (["--goodput", "ttft:5,ttft:6"], "goodput must be .* got 'ttft:6'"),
        (["--metric_percentiles", "101"], r"metric_percentiles must be in \[0, 100\], got '101'"),
        (["--metric_percentiles", "p99"], "metric_percentiles must be .* got 'p99'"),
    ],
)
def test_bad_usage_is_told_before_anything_loads(check_refusal, arguments, message):
    check_refusal("serving", arguments, message)


def test_a_shuffled_trace_has_no_times(run, make_rival, tmp_path):
    trace = tmp_path / "azure.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.680,374,44\n")
    dataset = ("--dataset_name", "azure", "--dataset_path", trace, "--request_rate", "trace")
    code, _, err = run(*dataset, "--shuffle")
    assert code == 2
    assert "shuffle must be false with request_rate=trace" in err
