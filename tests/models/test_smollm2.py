"""The bundled SmolLM2 against transformers' greedy tokens, in float32 through the paged pool."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.checkpoints import load_checkpoint

TIE = 2e-4  # the two best logits so near each other may change places


@pytest.fixture(scope="module")
def checkpoint():
    return load_checkpoint("smollm2-135m", dtype=jnp.float32)


@pytest.fixture(scope="module")
def decoder(checkpoint, paged_decoder):
    return paged_decoder(
        checkpoint.graphdef,
        checkpoint.params,
        checkpoint.config,
        num_sequences=4,
        max_len=320,
        backend="auto",
    )


def check(logits, golden, prompt, position):
    """Hold one row of logits to the golden token at `position`, or to a named tie."""
    want, other = (golden[key][prompt, position] for key in ("token_ids", "runner_up_ids"))
    assert logits[want] - logits[other] == pytest.approx(golden["gaps"][prompt, position], abs=2e-3)
    found = int(np.argmax(logits))
    if found != want:
        gap = golden["gaps"][prompt, position]
        assert (found, gap < TIE) == (other, True), f"prompt {prompt}, position {position}: {gap}"


def test_greedy_tokens_equal_transformers(decoder, greedy_golden):
    # Teacher-forced, so that a tie does not end the comparison: steps are fed the golden tokens.
    chosen = [0, 5, 27, 44]  # 5, 11, 78 and 257 tokens
    prompts = [greedy_golden["prompts"][i] for i in chosen]
    answers = [greedy_golden["token_ids"][i].tolist() for i in chosen]
    # The long prompt comes in two chunks, the second beside the others' first decode step.
    first = decoder([*prompts[:3], prompts[3][:128]])
    for s in range(3):
        check(first[s][-1], greedy_golden, chosen[s], 0)
    second = decoder([*(answer[:1] for answer in answers[:3]), prompts[3][128:]])
    check(second[3][-1], greedy_golden, chosen[3], 0)
    for step in range(1, 32):
        if step > 1:
            fed = [answer[step - 1 : step] for answer in answers[:3]]
            second = decoder([*fed, answers[3][step - 2 : step - 1]])
            check(second[3][-1], greedy_golden, chosen[3], step - 1)
        for s in range(3):
            check(second[s][-1], greedy_golden, chosen[s], step)


def test_goldens_are_what_the_issue_asks_for(greedy_golden):
    lengths = [len(prompt) for prompt in greedy_golden["prompts"]]
    assert len(lengths) == 64
    assert (min(lengths), max(lengths)) == (5, 1500)
    assert greedy_golden["token_ids"].shape == (64, 64)
    assert (greedy_golden["gaps"] >= 0).all()
