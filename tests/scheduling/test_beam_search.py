"""Beam search on the host: by hand, against a naive implementation, and against transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.scheduling.beam_search import BeamSearch

EOS = 0
WIDTHS = (1, 2, 4, 6)
LENGTH_PENALTIES = (0.0, 0.6, 1.0, 1.5, -0.5)
EARLY_STOPPING = (False, True, "never")


def candidates_of(rows, count):
    """The `count` best columns of each row of log-probabilities, equals by column."""
    rows = np.asarray(rows, np.float32)
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :count]
    return ids.astype(np.int32), np.take_along_axis(rows, ids, 1)


def run(search, logprobs_of):
    """Drive `search` to its end; logprobs_of(generated tokens) is one row of the vocabulary."""
    while not search.done:
        before = [search.token_ids(beam).tolist() for beam in range(search.num_beams)]
        rows = [logprobs_of(tokens) for tokens in before]
        step = search.advance(*candidates_of(rows, search.num_candidates))
        assert (len(step.parents), step.done) == (search.num_beams, search.done)
        assert len(step.parents) == (0 if search.done else search.width)
        for beam, (parent, token) in enumerate(zip(step.parents, step.token_ids)):
            assert search.token_ids(beam).tolist() == [*before[parent], token]
    return search.best()


# By hand: vocabulary of 4, end-of-sequence token 0, two beams.
FIRST = [-1.5, -1.0, -2.0, -4.0]
# Totals of the second step: -2 (ends), -4, -5, -6 and -3 (ends), -8, -8, -2.5.
SECOND = [[-1.0, -3.0, -4.0, -5.0], [-1.0, -6.0, -6.0, -0.5]]


def two_steps(**arguments):
    search = BeamSearch(2, **({"eos_token_ids": [EOS], "max_new_tokens": 4} | arguments))
    assert (search.num_beams, search.num_candidates, search.num_generated) == (1, 3, 0)
    first = search.advance(*candidates_of([FIRST], 3))
    assert (first.parents.tolist(), first.token_ids.tolist(), first.done) == ([0, 0], [1, 2], False)
    assert search.scores.tolist() == [-1.0, -2.0]
    assert [h.token_ids.tolist() for h in search.best()] == [[EOS]]
    return search, search.advance(*candidates_of(SECOND, 3))


def results(search):
    return [(h.token_ids.tolist(), h.score, h.finish_reason) for h in search.best()]


@pytest.mark.parametrize(
    ("length_penalty", "early_stopping", "done"),
    [
        (1.0, True, True),  # two are finished
        (1.0, False, False),  # -2.5 / 2 is above -1.5
        (1.0, "never", False),  # -2.5 / 4 is
        (0.0, True, True),
        (0.0, False, True),  # -2.5 is not above -2
        (0.0, "never", True),
        (-1.0, False, True),  # -2.5 * 2 is not above -4
        (-1.0, "never", True),  # not -2.5 * 4 either: a negative penalty is taken as it is now
    ],
)
def test_two_steps_by_hand(length_penalty, early_stopping, done):
    search, second = two_steps(length_penalty=length_penalty, early_stopping=early_stopping)
    # The end in third place is dropped, and no beam goes on with it.
    both = {
        1.0: [([1, EOS], -1.0, "stop"), ([EOS], -1.5, "stop")],
        0.0: [([EOS], -1.5, "stop"), ([1, EOS], -2.0, "stop")],
        -1.0: [([EOS], -1.5, "stop"), ([1, EOS], -4.0, "stop")],
    }
    assert results(search) == both[length_penalty]
    assert [h.cumulative_logprob for h in search.best()] in ([-2.0, -1.5], [-1.5, -2.0])
    assert (second.done, search.done) == (done, done)
    if done:
        assert (second.parents.tolist(), second.token_ids.tolist()) == ([], [])
        assert search.num_beams == 0
    else:
        assert (second.parents.tolist(), second.token_ids.tolist()) == ([1, 0], [3, 1])
        assert search.scores.tolist() == [-2.5, -4.0]
        assert [search.token_ids(beam).tolist() for beam in range(2)] == [[2, 3], [1, 1]]


@pytest.mark.parametrize(
    ("max_new_tokens", "early_stopping", "done"),
    [(9, False, True), (4, "never", True), (5, "never", False)],
)
def test_never_hopes_for_the_full_length(max_new_tokens, early_stopping, done):
    search = BeamSearch(
        2, early_stopping=early_stopping, eos_token_ids=[EOS], max_new_tokens=max_new_tokens
    )
    search.advance(*candidates_of([FIRST], 3))
    second = [[-1.0, -5.0, -6.0, -7.0], [-9.0, -9.0, -9.0, -4.0]]
    # Finished: -2 / 2 and -1.5. Of the running -6, -6 / 2 and -6 / 4 are not above -1.5; -6 / 5 is.
    assert search.advance(*candidates_of(second, 3)).done is done


def test_never_hopes_for_nothing_from_a_negative_penalty():
    search = BeamSearch(
        2, length_penalty=-1.0, early_stopping="never", eos_token_ids=[EOS], max_new_tokens=4
    )
    search.advance(*candidates_of([FIRST], 3))
    second = [[-1.0, -0.25, -6.0, -7.0], [-9.0, -9.0, -9.0, -4.0]]
    # Finished: -1.5 and -2 * 2. Running: -1.25 * 2 now, which is above; * 4 would not be.
    assert not search.advance(*candidates_of(second, 3)).done
    assert results(search) == [([EOS], -1.5, "stop"), ([1, EOS], -4.0, "stop")]


def test_the_last_token_finishes_the_best_of_all():
    search, second = two_steps(max_new_tokens=2, length_penalty=0.0)
    # -1.5 of before, then -2 (which ends anyway); -2.5 comes too late.
    assert results(search) == [([EOS], -1.5, "stop"), ([1, EOS], -2.0, "stop")]
    assert second.done and not len(second.parents)
    search, _ = two_steps(max_new_tokens=2, length_penalty=1.0)
    assert results(search) == [([1, EOS], -1.0, "stop"), ([2, 3], -1.25, "length")]
    assert [h.token_ids.tolist() for h in search.best(1)] == [[1, EOS]]
    assert all(h.token_ids.dtype == np.int32 for h in search.best())


def test_of_equals_the_smaller_beam_and_the_earlier_column_go_first():
    search = BeamSearch(3, max_new_tokens=2, length_penalty=0.0)
    first = search.advance([[7, 9, 8, 5]], [[-1.0, -1.0, -1.0, -1.0]])
    assert first.token_ids.tolist() == [7, 9, 8]
    search.advance([[1, 2, 3]] * 3, [[-2.0, -2.0, -3.0], [-1.0, -2.0, -2.0], [-1.0, -2.0, -2.0]])
    assert [h.token_ids.tolist() for h in search.best()] == [[9, 1], [8, 1], [7, 1]]

    # An older hypothesis stays before a newer one of the same score.
    search = BeamSearch(2, max_new_tokens=3, length_penalty=0.0, eos_token_ids=[EOS])
    search.advance([[EOS, 1, 2]], [[-2.0, -1.0, -1.5]])
    search.advance([[EOS, 1, 2], [1, 2, 3]], [[-1.0, -2.0, -2.0], [-0.25, -3.0, -3.0]])
    assert [h.token_ids.tolist() for h in search.best()] == [[1, EOS]]
    search.advance([[EOS, 1, 2], [3, 4, 5]], [[-0.25, -3.0, -3.0], [-0.25, -9.0, -9.0]])
    assert results(search)[0] == ([1, EOS], -2.0, "stop")
    assert results(search)[1] == ([2, 1, EOS], -2.0, "stop")


def test_no_end_before_min_new_tokens():
    search = BeamSearch(1, eos_token_ids=[EOS], max_new_tokens=3, min_new_tokens=1)
    assert search.advance([[EOS, 1]], [[-0.5, -1.0]]).token_ids.tolist() == [1]
    assert search.advance([[EOS, 1]], [[-0.5, -1.0]]).done
    assert results(search) == [([1, EOS], -0.75, "stop")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width must be an int >= 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an int >= 1, got 0"),
        ({"min_new_tokens": -1}, "min_new_tokens must be an int >= 0, got -1"),
        ({"length_penalty": 30.0}, r"length_penalty .*max_new_tokens=20\), got 30.0"),
        ({"length_penalty": -30.0}, r"length_penalty .*max_new_tokens=20\), got -30.0"),
        ({"length_penalty": np.nan}, r"length_penalty .*max_new_tokens=20\), got nan"),
        ({"early_stopping": "always"}, "early_stopping must be True, False or 'never', got 'al"),
        ({"early_stopping": 1}, "early_stopping must be True, False or 'never', got 1"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        BeamSearch(**({"width": 2, "max_new_tokens": 20} | changes))


def test_bad_calls():
    search = BeamSearch(2, eos_token_ids=[EOS], max_new_tokens=1)
    for shape in [(2, 3), (1, 2), (3,)]:
        with pytest.raises(
            ValueError, match=r"token_ids must have shape \[1, c\], the same c >= 3"
        ):
            search.advance(np.zeros(shape, np.int32), np.zeros(shape, np.float32))
    with pytest.raises(ValueError, match="logprobs must have shape"):
        search.advance([[1, 2, 3]], [[-1.0, -2.0, -3.0, -4.0]])
    with pytest.raises(ValueError, match="logprobs must hold no NaN"):
        search.advance([[1, 2, 3]], [[-1.0, -2.0, np.nan]])
    assert search.num_generated == 0  # a refused call changes nothing
    with pytest.raises(IndexError, match=r"beam must be an int in \[0, 1\), got 1"):
        search.token_ids(1)
    assert search.advance([[1, 2, 3]], [[-1.0, -2.0, -3.0]]).done
    with pytest.raises(ValueError, match="done"):
        search.advance(np.zeros((0, 3), np.int32), np.zeros((0, 3), np.float32))
    for n in (0, 3):
        with pytest.raises(ValueError, match=rf"n must be an int in \[1, width\].*got {n}"):
            search.best(n)


def naive(
    logprobs_of,
    width,
    length_penalty,
    early_stopping,
    eos_token_ids,
    max_new_tokens,
    min_new_tokens,
):
    """Beam search over the whole vocabulary from `width` copies of the prompt: (tokens, score)."""
    beams = [(np.float32(0 if beam == 0 else -1e9), []) for beam in range(width)]
    finished: list = []
    for length in range(1, max_new_tokens + 1):
        every = [
            (total + np.float32(logprob), beam, token)
            for beam, (total, tokens) in enumerate(beams)
            for token, logprob in enumerate(logprobs_of(tokens))
            if not (token in eos_token_ids and length <= min_new_tokens)
        ]
        every.sort(key=lambda c: (-c[0], c[1], c[2]))
        ranked = [
            (total, [*beams[beam][1], token], token in eos_token_ids or length == max_new_tokens)
            for total, beam, token in every
        ]
        for total, tokens, ends in ranked[:width]:
            if ends:
                finished.append((tokens, total / np.float32(length**length_penalty)))
        finished = sorted(finished, key=lambda hypothesis: -hypothesis[1])[:width]
        beams = [(total, tokens) for total, tokens, ends in ranked if not ends][:width]
        if len(finished) == width and beams:
            best = beams[0][0] / np.float32(length**length_penalty)
            if early_stopping == "never" and length_penalty > 0:
                best = beams[0][0] / np.float32(max_new_tokens**length_penalty)
            if early_stopping is True or best <= finished[-1][1]:
                break
    return finished


@st.composite
def searches(draw):
    vocabulary = draw(st.integers(4, 9))
    eos = draw(st.lists(st.integers(0, vocabulary - 1), unique=True, max_size=2))
    count = draw(st.integers(1 + len(eos), vocabulary))  # candidates a beam
    arguments = {
        "width": draw(st.integers(1, count - len(eos))),
        "length_penalty": draw(st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0])),
        "early_stopping": draw(st.sampled_from(EARLY_STOPPING)),
        "eos_token_ids": eos,
        "max_new_tokens": draw(st.integers(1, 6)),
        "min_new_tokens": draw(st.sampled_from([0, 0, 2])),
    }
    # Sums of eighths are exact, so that equal scores are equal whatever was added first.
    seed = draw(st.integers(0, 2**32 - 1))
    coarseness = draw(st.sampled_from([4, 40]))
    rng = np.random.default_rng(seed)
    table = -rng.integers(0, coarseness, (7, vocabulary + 1, vocabulary)).astype(np.float32) / 8
    return arguments, count, table


@settings(max_examples=400, derandomize=True, deadline=None, database=None)
@given(searches())
def test_it_is_the_naive_search_for_any_number_of_candidates(drawn):
    arguments, count, table = drawn

    def logprobs_of(tokens):
        return table[len(tokens), tokens[-1] if tokens else -1]

    search = BeamSearch(**arguments)
    assert count >= search.num_candidates
    while not search.done:
        rows = [logprobs_of(search.token_ids(beam).tolist()) for beam in range(search.num_beams)]
        search.advance(*candidates_of(rows, count))
    found = [(h.token_ids.tolist(), np.float32(h.score)) for h in search.best()]
    assert found == naive(logprobs_of, **arguments)
    assert len(found) == search.width


@pytest.fixture(scope="module")
def tiny_llama():
    reason = "needs torch, which CI's leg on Python 3.11 installs"
    torch = pytest.importorskip("torch", reason=reason)
    from transformers import LlamaConfig, LlamaForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would only wait for each other
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    yield LlamaForCausalLM(config).eval(), torch.randint(2, 16, (8, 5))
    torch.set_num_threads(threads)


def transformers_search(model, prompts, **settings):
    """transformers' sequences [P, W, n] without the prompts and scores [P, W], and the
    log-probabilities that it saw, by the tokens before them."""
    import torch
    from transformers import GenerationConfig, GenerationMixin

    seen = {}

    def remember(input_ids, logprobs):
        seen.update(zip(map(tuple, input_ids.tolist()), logprobs.numpy().copy()))
        return logprobs

    model.generation_config = GenerationConfig(
        num_return_sequences=settings["num_beams"],
        do_sample=False,
        pad_token_id=1,
        output_scores=True,
        return_dict_in_generate=True,
        **settings,
    )
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        generation_config=model.generation_config,
        logits_processor=[remember],
        # Of one beam, generate() would make a greedy search.
        custom_generate=GenerationMixin._beam_search if settings["num_beams"] == 1 else None,
    )
    shape = (len(prompts), settings["num_beams"], -1)
    sequences = out.sequences[:, prompts.shape[1] :].numpy().reshape(shape)
    return sequences, out.sequences_scores.numpy().reshape(shape[:2]), seen


@pytest.mark.parametrize("eos_token_ids", [[EOS], [EOS, 3], []], ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_is_the_search_of_transformers(tiny_llama, width, eos_token_ids):
    model, prompts = tiny_llama
    lengths, min_new_tokens = set(), 0
    for length_penalty in LENGTH_PENALTIES:
        for early_stopping in EARLY_STOPPING:
            min_new_tokens = 3 - min_new_tokens
            rules = {
                "length_penalty": length_penalty,
                "early_stopping": early_stopping,
                "max_new_tokens": 10,
                "min_new_tokens": min_new_tokens,
            }
            sequences, scores, seen = transformers_search(
                model, prompts, num_beams=width, eos_token_id=eos_token_ids or None, **rules
            )
            for p, prompt in enumerate(prompts.tolist()):
                search = BeamSearch(width, eos_token_ids=eos_token_ids, **rules)
                found = run(search, lambda tokens, start=prompt, rows=seen: rows[(*start, *tokens)])
                assert [np.float32(h.score) for h in found] == scores[p].tolist()
                for hypothesis, expected in zip(found, sequences[p], strict=True):
                    n = len(hypothesis.token_ids)
                    assert hypothesis.token_ids.tolist() == expected[:n].tolist()
                    # What transformers pads with, where some hypothesis is longer.
                    assert set(expected[n:]) <= {1 if eos_token_ids else -1}
                    assert (hypothesis.finish_reason == "stop") == (
                        expected[n - 1] in eos_token_ids
                    )
                    lengths.add(n)
    assert len(lengths) > 1 if eos_token_ids else lengths == {10}


def test_the_goldens_are_what_their_maker_says():
    golden = np.load(Path(__file__).parent.parent / "goldens" / "smollm2_beams.npz")
    ids, scores, eos = golden["token_ids"], golden["scores"], golden["eos_token_id"]
    assert ids.shape == (20, 3, 3, 3, 6, 24) and scores.shape == ids.shape[:-1]
    assert golden["early_stopping"].tolist() == ["False", "True", "never"]
    lengths = (ids >= 0).sum(-1)
    for w, width in enumerate(golden["widths"]):
        assert (lengths[:, w, :, :, :width] > 0).all() and not lengths[:, w, :, :, width:].any()
        assert np.isnan(scores[:, w, :, :, width:]).all()
        ordered = scores[:, w, :, :, :width]
        assert (np.diff(ordered) < 0).all() and np.isfinite(ordered).all()
    ends = np.take_along_axis(ids, np.maximum(lengths - 1, 0)[..., None], -1)[..., 0] == eos
    assert ((ids == eos).sum(-1) == ends).all()
    assert (ends | (lengths == 24) | (lengths == 0)).all()
    # Not all alike: some prompts end early, and the rules make a difference.
    assert sum((lengths[p][ends[p]] < 16).any() for p in range(20)) >= 6
    differ = (ids != ids[:, :, :1, :1]).any(axis=(4, 5))
    assert differ[:, :, 1:].any() and differ[:, :, :, 1].any() and differ[:, :, :, 2].any()
    assert golden["gaps"].min() >= 4e-4
