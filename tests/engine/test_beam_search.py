"""Beam search on SmolLM2 against transformers' `num_beams` (made by make_beam_goldens.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jpaged.config import EngineConfig
from jpaged.engine import Engine
from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams

GOLDEN = Path(__file__).parent.parent / "goldens" / "smollm2_beams.npz"
# Two hypotheses at a cut closer than this may swap: see test_smollm2.py.
TIE = 2e-4
RULES = {"False": False, "True": True, "never": "never"}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(GOLDEN))


@pytest.fixture(scope="module")
def llm(smollm2) -> LLM:
    """A pool in which the beams of a few requests fit, so that some are preempted."""
    config = EngineConfig(
        max_model_len=512,
        max_num_seqs=32,
        max_num_batched_tokens=32,
        num_blocks=40,
        preemption_mode="swap",
        swap_space_gib=0.1,
    )
    engine = Engine(smollm2, config)
    engine.warmup(progress=False)
    return LLM.from_engine(engine)


def check(llm: LLM, golden: dict[str, np.ndarray], width: int, every: int = 1) -> int:
    """Run every so many-th prompt of a width under all rules; returns the number of ties."""
    w = golden["widths"].tolist().index(width)
    ends = np.cumsum(golden["prompt_lengths"])[:-1]
    prompts = [ids.tolist() for ids in np.split(golden["prompt_token_ids"], ends)]
    cases = [
        (p, length, rule)
        for p in range(0, len(prompts), every)
        for length in range(len(golden["length_penalties"]))
        for rule in range(len(golden["early_stopping"]))
    ]
    params = [
        SamplingParams(
            beam_width=width,
            n=width,
            length_penalty=float(golden["length_penalties"][length]),
            early_stopping=RULES[str(golden["early_stopping"][rule])],
            max_tokens=int(golden["max_new_tokens"]),
        )
        for _, length, rule in cases
    ]
    outputs = llm.generate([prompts[p] for p, _, _ in cases], params)
    ties = 0
    for (p, length, rule), output in zip(cases, outputs, strict=True):
        assert len(output.outputs) == width
        expected = golden["token_ids"][p, w, length, rule, :width]
        found = [completion.token_ids for completion in output.outputs]
        wanted = [row[row >= 0].tolist() for row in expected]
        if found != wanted:
            gap = golden["gaps"][p, w, length, rule]
            assert gap < TIE, f"prompt {p}, {length}, {rule}: decided by {gap}: {found} {wanted}"
            ties += 1
    return ties


def check_llm(llm: LLM) -> None:
    stats = llm.stats()
    assert stats.compilations_after_warmup == 0 and stats.blocks_used == 0
    assert stats.copy_on_write_blocks > 0


def test_some_hypotheses_are_transformers(llm, golden):
    assert check(llm, golden, width=4, every=5) == 0  # no gap in the goldens is below a tie's
    check_llm(llm)


@pytest.mark.slow
@pytest.mark.parametrize("width", [2, 4, 6])
def test_all_hypotheses_are_transformers(llm, golden, width):
    assert check(llm, golden, width) == 0
    check_llm(llm)
    if width == 6:
        assert llm.stats().preemptions_swap > 0
