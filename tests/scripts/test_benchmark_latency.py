"""scripts/benchmark_latency.py: batches one after another, and what is made of their times."""

import json

import pytest

# The first token comes after 0.5 s times the batch's place, the others every 0.25 s, and the last
# one of a batch's second request half a second late.
GROWING = """
place = 0


def record(request):
    global place
    batch, second = place // 2 + 1, place % 2
    place += 1
    times = [0.5 * batch + 0.25 * i for i in range(request["output_len"])]
    times[-1] += 0.5 * second
    return dict(start=0.0, delivery_times=times, token_ids=[0] * len(times))
"""


@pytest.fixture
def run(run_benchmark):
    return lambda *arguments: run_benchmark("latency", *arguments)


def test_batches_follow_each_other(run, make_rival, tmp_path):
    rival, file = make_rival(GROWING), tmp_path / "figures.json"
    code, out, _ = run(
        *("--backend", "vllm", *rival.flags, "--batch_size", 2, "--num_iters", 3),
        *("--num_iters_warmup", 1, "--input_len", 6, "--output_len", 5, "--json", file),
    )
    assert code == 0
    (job,) = rival.jobs()
    assert (len(job["warmup"]), len(job["runs"])) == (1, 3)
    assert job["static_batch"] == 2
    assert job["stream"]
    prompts = [tuple(r["prompt_token_ids"]) for run in job["warmup"] + job["runs"] for r in run]
    assert len(set(prompts)) == 8  # none twice, for no prefix cache to find
    assert {len(prompt) for prompt in prompts} == {6}
    figures = json.loads(file.read_text())["medians"]["vllm"]
    assert figures["avg_latency_ms"] == pytest.approx(1000 * (1.0 + 1.0 + 0.5))
    assert figures["p50_latency_ms"] == pytest.approx(2500)
    assert figures["p99_latency_ms"] == pytest.approx(2500 + 0.98 * 500)
    assert figures["median_ttft_ms"] == pytest.approx(1000)
    assert figures["median_tpot_ms"] == pytest.approx((250 + 375) / 2)
    assert figures["decode_throughput"] == pytest.approx(2 / 0.3125)
    assert "batches of 2, the first 1 batches to warm up" in out


def test_our_engine_streams_every_token(run, tiny_in_place, tmp_path):
    file = tmp_path / "figures.json"
    code, _, _ = run(
        *("--batch_size", 1, "--num_iters", 2, "--num_iters_warmup", 1, "--input_len", 5),
        *("--output_len", 6, "--max_model_len", 256, "--json", file, "--save_detailed"),
    )
    assert code == 0
    result = json.loads(file.read_text())
    (one,) = result["runs"]
    for (record,) in one["requests"]:
        assert len(record["token_ids"]) == 6
        times = record["delivery_times"]
        assert times == sorted(times)
        assert 0 < times[0] < times[-1]
    assert one["figures"]["p50_latency_ms"] > one["figures"]["median_ttft_ms"] > 0


def test_a_single_token_has_no_decode_rate(run, make_rival, tmp_path):
    rival, file = make_rival(), tmp_path / "figures.json"
    arguments = ("--backend", "vllm", *rival.flags, "--output_len", 1, "--json", file)
    code, out, _ = run(*arguments)
    assert code == 0
    assert json.loads(file.read_text())["medians"]["vllm"]["decode_throughput"] is None
    (line,) = [line for line in out.splitlines() if line.startswith("decode tokens/s")]
    assert line.split()[-1] == "-"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch_size", "0"], "batch_size must be an int >= 1, got 0"),
        (["--batch_size", "9", "--max_num_seqs", "8"], "at most max_num_seqs=8, got 9"),
        (["--num_iters", "0"], "num_iters must be an int >= 1, got 0"),
        (["--num_iters_warmup", "-1"], "num_iters_warmup must be an int >= 0, got -1"),
        (["--input_len", "9000"], "must have at most max_model_len=8192"),
        (["--dataset_name", "jsonl"], "dataset_name"),
    ],
)
def test_bad_usage_is_told_before_anything_loads(check_refusal, arguments, message):
    check_refusal("latency", arguments, message)
