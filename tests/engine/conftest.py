"""The tie rule of the determinism contract."""

from __future__ import annotations

import dataclasses

import pytest

from jpaged.engine import Engine
from jpaged.sampling_params import SamplingParams

# Two candidates closer than this may swap: float32 products round by the shape they are padded to.
TIE = 2e-4


def _is_tie(
    engine: Engine,
    context: list[int],
    params: SamplingParams,
    index: int,
    *,
    wanted: int,
    found: int,
) -> bool:
    """Whether sample `index` of a request would have taken `found` for `wanted` after these tokens
    if their logits were TIE closer to each other: so it is with greedy tokens, and where the noise
    of sampling or a filter decides. `engine` has nothing else to do."""
    # A bias is added before the logits are divided by the temperature. Half of it each.
    half = TIE / 2 * (params.temperature or 1.0)
    bias = dict(params.logit_bias or {})
    bias[wanted] = bias.get(wanted, 0.0) - half
    bias[found] = bias.get(found, 0.0) + half
    one = {"max_tokens": 1, "min_tokens": min(params.min_tokens, 1)}
    closer = dataclasses.replace(params, n=index + 1, logit_bias=bias, **one)
    engine.add_request(context, closer, stream=False)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1].outputs[index].token_ids == [found]


@pytest.fixture(scope="session")
def is_tie():
    """_is_tie(engine, context, params, index, wanted=..., found=...) -> bool"""
    return _is_tie
