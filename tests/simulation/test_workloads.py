"""Workloads: traces in their formats, lengths, arrival times, prompts that share prefixes."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.simulation import Workload, WorkloadRequest, random_workload, read_trace

VOCAB = 1000
SHAREGPT = """num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
74,918,992,0.0806100217864923
290,5,295,58.0
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9305900,396,109
"""
MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 7, "hash_ids": [0, 1, 2]},
    {"timestamp": 1000, "input_length": 900, "output_length": 3, "hash_ids": [0, 3]},
    {"timestamp": 4500, "input_length": 30, "output_length": 2, "hash_ids": [9]},
]
JSONL = [
    {"prompt_token_ids": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True},
    {"input_length": 20, "max_tokens": 2},
]


@pytest.fixture
def write(tmp_path):
    def write(content):
        """Text as it is, dictionaries as JSON Lines; returns the path."""
        path = tmp_path / "trace"
        if not isinstance(content, str):
            content = "".join(json.dumps(line) + "\n" for line in content)
        path.write_text(content)
        return str(path)

    return write


def lengths(workload):
    return [(request.prompt_len, request.output_len) for request in workload.requests]


def times(workload):
    return [request.arrival_time for request in workload.requests]


def shared_tokens(a, b):
    """How many tokens two prompts have in common at the beginning."""
    pairs = enumerate(zip(a.prompt_token_ids, b.prompt_token_ids))
    return next((i for i, (x, y) in pairs if x != y), min(a.prompt_len, b.prompt_len))


# ---------------------------------------------------------------- traces


def test_sharegpt_lengths(write):
    workload = read_trace(write(SHAREGPT), "sharegpt")
    assert lengths(workload) == [(74, 918), (290, 5)]
    assert not workload.has_arrival_times


def test_azure_times_count_from_the_first_request(write):
    workload = read_trace(write(AZURE), "azure")
    assert lengths(workload) == [(374, 44), (396, 109)]
    assert times(workload) == pytest.approx([0.0, 4.25])


def test_azure_of_2024_has_time_zones(write):
    text = AZURE.replace("46.6805900", "46.680590+00:00").replace("50.9305900", "50.930590+00:00")
    assert times(read_trace(write(text), "azure")) == pytest.approx([0.0, 4.25])


def test_mooncake_shares_the_blocks_of_equal_ids(write):
    workload = read_trace(write(MOONCAKE), "mooncake").with_prompts(VOCAB)
    assert lengths(workload) == [(1100, 7), (900, 3), (30, 2)]
    assert times(workload) == [0.0, 0.0, 3.5]
    first, second, third = workload.requests
    assert [len(request.prompt_token_ids) for request in workload.requests] == [1100, 900, 30]
    assert shared_tokens(first, second) == 512
    assert shared_tokens(first, third) == 0


def test_mooncake_without_ids_shares_nothing(write):
    lines = [{k: v for k, v in line.items() if k != "hash_ids"} for line in MOONCAKE]
    first, second, _ = read_trace(write(lines), "mooncake").with_prompts(VOCAB).requests
    assert shared_tokens(first, second) < 5


def test_jsonl_has_tokens_or_lengths(write):
    workload = read_trace(write(JSONL), "jsonl").with_prompts(VOCAB)
    assert lengths(workload) == [(3, 4), (20, 2)]
    assert workload.requests[0].prompt_token_ids == (5, 6, 7)
    assert len(workload.requests[1].prompt_token_ids) == 20


def test_jsonl_may_have_times(write):
    lines = [line | {"arrival_time": 2.5 * i + 1} for i, line in enumerate(JSONL)]
    assert times(read_trace(write(lines), "jsonl")) == [0.0, 2.5]


def test_blank_lines_and_a_byte_order_mark_are_passed_over(write):
    text = "\ufeff" + "\n".join(json.dumps(line) for line in JSONL) + "\n\n"
    assert len(read_trace(write(text), "jsonl").requests) == 2


def replaced(line, **changes):
    return [JSONL[0], {k: v for k, v in (line | changes).items() if v is not None}]


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("sharegpt", SHAREGPT.replace("290", "-3"), "line 3: .*int >= 1, got '-3'"),
        ("sharegpt", AZURE, "line 2: a column num_prefill_tokens is missing"),
        ("sharegpt", "num_prefill_tokens,num_decode_tokens\n", "at least one request"),
        ("azure", AZURE.replace("2023-11-16 18:15:50.9305900", "noon"), "line 3: .*noon"),
        ("azure", AZURE.replace(",109", ""), "line 3: a column GeneratedTokens is missing"),
        ("mooncake", [MOONCAKE[0] | {"hash_ids": [0, 1, 2, 3]}], "line 1: hash_ids must be at"),
        ("mooncake", [MOONCAKE[0] | {"hash_ids": [-1]}], "line 1: hash_ids must be a list"),
        ("mooncake", [MOONCAKE[0] | {"timestamp": math.nan}], "line 1: timestamp must be a"),
        ("mooncake", [MOONCAKE[0] | {"input_length": True}], "line 1: input_length must be an"),
        ("jsonl", replaced(JSONL[0], temperature=0.7), "line 2: temperature must be 0, got 0.7"),
        ("jsonl", replaced(JSONL[0], ignore_eos=False), "line 2: ignore_eos must be true"),
        ("jsonl", replaced(JSONL[0], top_k=5), "line 2: .*got 'top_k'"),
        ("jsonl", replaced(JSONL[0], prompt_token_ids=[]), "line 2: prompt_token_ids must be"),
        ("jsonl", replaced(JSONL[0], prompt_token_ids=None), "line 2: .*one of prompt_token_ids"),
        ("jsonl", replaced(JSONL[0], input_length=4), "line 2: .*one of prompt_token_ids"),
        ("jsonl", replaced(JSONL[0], max_tokens=None), "line 2: max_tokens must be an int >= 1"),
        (
            "jsonl",
            replaced(JSONL[0], arrival_time=1.0),
            "line 1: arrival_time must be in all lines",
        ),
        ("jsonl", '{"max_tokens": 1\n', "line 1: "),
        ("jsonl", "[]\n", "line 1: a line must be a JSON object"),
        ("alpaca", JSONL, "kind must be one of sharegpt, azure, mooncake, jsonl, got 'alpaca'"),
    ],
)
def test_a_bad_trace_is_refused_by_its_line(write, kind, content, message):
    with pytest.raises(ValueError, match=message):
        read_trace(write(content), kind)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("jsonl", "\n".join(map(json.dumps, JSONL)) + '\n{"prompt": "\udcff"}\n'),
        ("azure", AZURE + "\udcff,1,1\n"),
    ],
)
def test_a_line_that_is_not_utf_8_is_named(tmp_path, kind, text):
    path = tmp_path / "trace"
    path.write_bytes(text.encode(errors="surrogateescape"))
    number = text.count("\n")
    with pytest.raises(ValueError, match=f"line {number}: it must be UTF-8, got a bad byte at"):
        read_trace(str(path), kind)


# ---------------------------------------------------------------- lengths


def test_random_lengths_stay_in_their_range():
    workload = random_workload(500, input_len=100, output_len=10, range_ratio=0.5, seed=3)
    prompts, outputs = zip(*lengths(workload), strict=True)
    assert (min(prompts), max(prompts)) == (50, 150)
    assert (min(outputs), max(outputs)) == (5, 15)
    assert np.mean(prompts) == pytest.approx(100, abs=5)


def test_random_prompts_may_share_a_prefix():
    workload = random_workload(3, input_len=8, output_len=2, prefix_len=40).with_prompts(VOCAB)
    first, second, third = workload.requests
    assert first.prompt_len == 48
    assert shared_tokens(first, second) == 40
    assert shared_tokens(second, third) == 40


def test_the_first_are_taken_or_some_at_random():
    workload = random_workload(50, input_len=100, output_len=10, range_ratio=0.9)
    assert lengths(workload.taken(5)) == lengths(workload)[:5]
    assert workload.taken(None) == workload
    drawn = workload.taken(20, shuffle=True, seed=1)
    assert drawn == workload.taken(20, shuffle=True, seed=1)
    sources = [request.source for request in drawn.requests]
    assert len(set(sources)) == 20
    assert sources != sorted(sources)
    assert drawn != workload.taken(20, shuffle=True, seed=2)
    with pytest.raises(ValueError, match=r"num_prompts must be in \[1, 50\].*got 51"):
        workload.taken(51)


def test_lengths_scale_and_shared_blocks_with_them(write):
    workload = read_trace(write(MOONCAKE), "mooncake").scaled(prompt=0.125, output=0.1)
    assert lengths(workload) == [(138, 1), (112, 1), (4, 1)]
    first, second, _ = workload.with_prompts(VOCAB).requests
    assert shared_tokens(first, second) == 64


def test_prompts_that_are_given_do_not_scale(write):
    workload = read_trace(write(JSONL), "jsonl")
    assert lengths(workload.scaled(output=2.0)) == [(3, 8), (20, 4)]
    with pytest.raises(ValueError, match=r"input_scale must be 1 .*got 0\.5"):
        workload.scaled(prompt=0.5)


@pytest.fixture
def mixed():
    """Ten tokens, twelve of which ten are the output, and thirty of which six are."""
    ids = tuple(range(24))
    return Workload(
        "mixed",
        (
            WorkloadRequest(prompt_len=5, output_len=5),
            WorkloadRequest(prompt_len=2, output_len=10, source="line 2"),
            WorkloadRequest(prompt_len=24, output_len=6, prompt_token_ids=ids, source="line 3"),
        ),
    )


def test_what_fits_is_left_alone(mixed):
    assert mixed.fitted(30) == mixed


def test_a_long_request_is_an_error_that_names_it(mixed):
    with pytest.raises(ValueError, match=r"mixed: line 2 .*max_model_len=11 .*got 2 .* 10 of the"):
        mixed.fitted(11)


def test_long_requests_are_skipped_and_counted(mixed):
    fitted = mixed.fitted(11, long_requests="skip")
    assert (lengths(fitted), fitted.num_skipped, fitted.num_truncated) == ([(5, 5)], 2, 0)
    with pytest.raises(ValueError, match="no request fits into max_model_len=4"):
        mixed.fitted(4, long_requests="skip")


def test_long_requests_are_truncated_and_counted(mixed):
    fitted = mixed.fitted(9, long_requests="truncate")
    assert lengths(fitted) == [(4, 5), (1, 8), (3, 6)]
    assert (fitted.num_skipped, fitted.num_truncated) == (0, 3)
    assert fitted.requests[2].prompt_token_ids == (0, 1, 2)


# ---------------------------------------------------------------- arrivals


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness):
    workload = random_workload(20_000, input_len=1, output_len=1)
    arrivals = times(workload.with_arrivals(4.0, burstiness=burstiness, seed=1))
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.04)


def test_poisson_gaps_are_exponential():
    workload = random_workload(20_000, input_len=1, output_len=1)
    gaps = np.diff(times(workload.with_arrivals(2.0, seed=5)))
    for quantile in (0.1, 0.5, 0.9):
        expected = -math.log(1 - quantile) / 2
        assert np.quantile(gaps, quantile) == pytest.approx(expected, rel=0.05)


def test_an_infinite_rate_is_all_at_once():
    assert times(random_workload(3, input_len=1, output_len=1).with_arrivals(math.inf)) == [0.0] * 3


def test_a_trace_comes_at_its_own_times_and_faster(write):
    workload = read_trace(write(MOONCAKE), "mooncake")
    assert times(workload.with_trace_arrivals()) == [0.0, 0.0, 3.5]
    assert times(workload.with_trace_arrivals(speed=2)) == [0.0, 0.0, 1.75]
    late = Workload("late", tuple(reversed(workload.requests[1:])))
    assert lengths(late.with_trace_arrivals()) == [(900, 3), (30, 2)]


def test_a_trace_without_times_has_no_arrivals(write):
    with pytest.raises(ValueError, match=r"request_rate must be a number or inf: .* has no times"):
        read_trace(write(SHAREGPT), "sharegpt").with_trace_arrivals()


# ---------------------------------------------------------------- prompts


def test_the_rate_leaves_the_prompts_alone_and_the_seed_does_not():
    workload = random_workload(4, input_len=16, output_len=2)

    def prompts(rate, seed):
        filled = workload.with_arrivals(rate, seed=seed).with_prompts(VOCAB, seed=seed)
        return [request.prompt_token_ids for request in filled.requests]

    assert prompts(1.0, seed=0) == prompts(9.0, seed=0)
    assert not set(prompts(1.0, seed=0)) & set(prompts(1.0, seed=1))


def test_a_prompt_of_the_trace_must_be_in_the_vocabulary(write):
    workload = read_trace(write(JSONL), "jsonl")
    assert workload.with_prompts(8).requests[0].prompt_token_ids == (5, 6, 7)
    with pytest.raises(ValueError, match=r"line 1: prompt_token_ids must be below .* 7, got 7"):
        workload.with_prompts(7)


@settings(derandomize=True, deadline=None, database=None, max_examples=60)
@given(
    block_len=st.integers(1, 6),
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=4), st.integers(1, 30)), min_size=2
    ),
)
def test_prompts_share_as_many_tokens_as_their_blocks(block_len, prompts):
    workload = Workload(
        "drawn",
        tuple(
            WorkloadRequest(
                prompt_len=prompt_len,
                output_len=1,
                prefix_blocks=tuple(blocks),
                prefix_block_len=block_len,
            )
            for blocks, prompt_len in prompts
        ),
    ).with_prompts(2**31)  # so large that tokens drawn apart are never equal here
    for request in workload.requests:
        assert len(request.prompt_token_ids) == request.prompt_len
    first, second = workload.requests[:2]
    equal_blocks = 0
    for a, b in zip(first.prefix_blocks, second.prefix_blocks):
        if a != b:
            break
        equal_blocks += 1
    expected = min(equal_blocks * block_len, first.prompt_len, second.prompt_len)
    assert shared_tokens(first, second) == expected
