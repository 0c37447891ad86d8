"""Every row of the contract's table of sampling parameters: default, allowed, refused."""

import dataclasses
import math

import numpy as np
import pytest

from jpaged import SamplingParams

NAN, INF = math.nan, math.inf

DEFAULTS = {
    "n": 1,
    "best_of": None,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "seed": None,
    "max_tokens": 16,
    "min_tokens": 0,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "beam_width": None,
    "length_penalty": 1.0,
    "early_stopping": False,
    "priority": 0,
    "cache_salt": None,
}

# name: (given, kept)
ALLOWED = {
    "n": [(1, 1), (np.int64(3), 3)],
    "best_of": [(None, None), (1, 1), (8, 8)],
    "temperature": [(0, 0.0), (0.7, 0.7), (np.float32(0.5), 0.5), (1e6, 1e6)],
    "top_k": [(-1, -1), (0, 0), (1, 1), (10**9, 10**9), (np.int32(7), 7)],
    "top_p": [(1, 1.0), (1e-9, 1e-9), (0.5, 0.5)],
    "min_p": [(0, 0.0), (1, 1.0), (0.05, 0.05)],
    "presence_penalty": [(-2, -2.0), (2, 2.0), (0.5, 0.5)],
    "frequency_penalty": [(-2.0, -2.0), (2.0, 2.0)],
    "repetition_penalty": [(0.01, 0.01), (1, 1.0), (50, 50.0)],
    "logit_bias": [
        (None, None),
        ({}, {}),
        ({3: 1}, {3: 1.0}),
        ({np.int32(3): -100.0}, {3: -100.0}),
    ],
    "seed": [(None, None), (0, 0), (2**63 - 1, 2**63 - 1), (np.uint32(5), 5)],
    "max_tokens": [(1, 1), (10**9, 10**9)],
    "min_tokens": [(0, 0), (16, 16)],
    "stop": [(None, None), ("END", ("END",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())],
    "stop_token_ids": [(None, None), ([1, 2], (1, 2)), ((), ()), (np.array([4, 5]), (4, 5))],
    "ignore_eos": [(True, True), (False, False), (np.True_, True)],
    "logprobs": [(None, None), (0, 0), (20, 20)],
    "prompt_logprobs": [(None, None), (0, 0), (20, 20)],
    "beam_width": [(None, None), (1, 1), (np.int32(6), 6)],
    "length_penalty": [(1, 1.0), (-0.5, -0.5), (0, 0.0)],
    "early_stopping": [(False, False), (np.True_, True), ("never", "never")],
    "priority": [(0, 0), (-7, -7), (2**62, 2**62)],
    "cache_salt": [(None, None), ("", ""), ("tenant", "tenant")],
}

OUT_OF_RANGE = {
    "n": [0, -1],
    "best_of": [0, -3],
    "temperature": [-0.1, NAN, INF, -INF, 10**400, np.float32(NAN)],
    "top_k": [-2],
    "top_p": [0.0, -0.5, 1.0001, NAN, INF],
    "min_p": [-1e-9, 1.1, NAN],
    "presence_penalty": [-2.01, 2.01, NAN],
    "frequency_penalty": [-2.01, 2.01, INF],
    "repetition_penalty": [0.0, -1.0, NAN, INF],
    "logit_bias": [{-1: 0.0}, {1: NAN}, {1: INF}],
    "seed": [-1, 2**63],
    "max_tokens": [0, -5],
    "min_tokens": [-1, 17],
    "stop": ["", ["a", ""]],
    "stop_token_ids": [[-1]],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
    "beam_width": [0, -1],
    "length_penalty": [NAN, INF],
    "priority": [2**63],
}

WRONG_TYPE = {
    "n": [1.0, "1", None, True],
    "best_of": [1.5, "1", False],
    "temperature": ["1", None, True, 1j, [1.0]],
    "top_k": [1.0, None, True],
    "top_p": ["0.9", None, True],
    "min_p": ["0", None, False],
    "presence_penalty": ["0", None, True],
    "frequency_penalty": ["0", None, True],
    "repetition_penalty": ["1", None, True],
    "logit_bias": [[1, 2], "x", {"1": 0.0}, {True: 0.0}, {1.0: 0.0}, {1: "0"}, {1: None}],
    "seed": [1.0, "1", True],
    "max_tokens": [1.0, None, True],
    "min_tokens": [1.0, None, True],
    "stop": [3, b"a", ["a", 3], [None], {"a": 1}],
    "stop_token_ids": [3, "ab", b"ab", {1: 2}, [1.0], [True], [None]],
    "ignore_eos": [1, 0, None, "yes"],
    "logprobs": [1.0, True, "1"],
    "prompt_logprobs": [1.0, True, "1"],
    "beam_width": [1.0, True],
    "length_penalty": ["1", None, True],
    "early_stopping": [1, None, "always"],
    "priority": [1.0, None, True],
    "cache_salt": [3, b"x"],
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


def test_the_tables_above_cover_the_contract():
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert names == list(DEFAULTS) == list(ALLOWED) == list(WRONG_TYPE)
    assert set(names) - set(OUT_OF_RANGE) == {"ignore_eos", "early_stopping", "cache_salt"}


def test_defaults():
    assert dataclasses.asdict(SamplingParams()) == DEFAULTS


@pytest.mark.parametrize("name, case", cases(ALLOWED))
def test_allowed_values_are_kept_as_plain_python(name, case):
    given, kept = case
    found = getattr(SamplingParams(**{name: given}), name)
    assert found == kept
    assert type(found) is type(kept)


@pytest.mark.parametrize("name, value", cases(OUT_OF_RANGE))
def test_a_value_out_of_range_is_a_value_error_that_names_it(name, value):
    with pytest.raises(ValueError, match=rf"\b{name}\b.* must be .*, got ") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, value", cases(WRONG_TYPE))
def test_a_wrong_type_is_a_type_error_that_names_it(name, value):
    with pytest.raises(TypeError, match=rf"\b{name}\b.* must be .*, got .* of type ") as caught:
        SamplingParams(**{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, value",
    [
        ("best_of", 4),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("logit_bias", {1: 2.0}),
        ("stop", "END"),
        ("logprobs", 1),
    ],
)
def test_beam_search_replaces_sampling(name, value):
    with pytest.raises(ValueError, match=f"^{name} does not go with beam_width, got {name}="):
        SamplingParams(beam_width=4, **{name: value})


def test_a_beam_search_returns_at_most_its_beams():
    assert SamplingParams(beam_width=4, n=4).num_sequences == 4
    with pytest.raises(ValueError, match=r"^n must be at most beam_width=4, got 5$"):
        SamplingParams(beam_width=4, n=5)


def test_sequences_of_a_request():
    assert SamplingParams().num_sequences == 1
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    assert SamplingParams(beam_width=6).num_sequences == 6


def test_the_error_shows_value_and_range():
    with pytest.raises(ValueError, match=r"^top_p must be in \(0, 1\], got 1.5$"):
        SamplingParams(top_p=1.5)
    with pytest.raises(
        ValueError, match=r"^min_tokens must be an int in \[0, max_tokens\].*8.*got 9$"
    ):
        SamplingParams(max_tokens=8, min_tokens=9)
    with pytest.raises(
        ValueError, match=r"^best_of must be None or an int >= n, which is 3, got 2$"
    ):
        SamplingParams(n=3, best_of=2)


def test_a_long_value_is_cut_short_in_the_error():
    with pytest.raises(TypeError) as caught:
        SamplingParams(stop=["x" * 100_000, 3])
    assert len(str(caught.value)) < 300


def test_min_tokens_may_equal_max_tokens():
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3


def test_immutable_and_independent_of_what_was_given():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_p = 0.5
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))


def test_replace_checks_again():
    params = dataclasses.replace(SamplingParams(stop="x", max_tokens=4), temperature=0)
    assert (params.stop, params.max_tokens, params.temperature) == (("x",), 4, 0.0)
    with pytest.raises(ValueError, match="min_tokens"):
        dataclasses.replace(params, min_tokens=5)


@pytest.mark.parametrize("name, value", [("stop_token_ids", [3, 10]), ("logit_bias", {10: 1.0})])
def test_check_against_refuses_ids_outside_the_vocabulary(name, value):
    params = SamplingParams(**{name: value})
    params.check_against(11)
    with pytest.raises(ValueError, match=rf"^{name} must hold token ids in \[0, 10\), got 10$"):
        params.check_against(10)


def test_check_against_accepts_params_without_ids():
    SamplingParams().check_against(1)
