"""Request and Sequence."""

import numpy as np
import pytest

from jpaged.scheduling import RequestStatus


def test_a_new_request(make_request):
    request = make_request(3, prompt=4, output=6, arrival_time=1.5)
    (sequence,) = request.sequences
    assert (request.status, request.finished) == (RequestStatus.WAITING, False)
    assert request.arrival_order == (1.5, 3)
    assert request.prompt_token_ids == [30_000, 30_001, 30_002, 30_003]
    assert (sequence.request, sequence.index, sequence.slot) == (request, 0, -1)
    assert (sequence.num_tokens, sequence.num_prompt_tokens) == (4, 4)
    assert (sequence.num_computed_tokens, sequence.num_output_tokens) == (0, 0)
    assert (sequence.finish_reason, sequence.stop_reason) == (None, None)
    assert (sequence.token_ids.dtype, sequence.token_ids.shape) == (np.int32, (10,))
    assert sequence.token_ids[:4].tolist() == request.prompt_token_ids
    assert sequence.output_token_ids.tolist() == []


@pytest.mark.parametrize(("prompt", "output"), [(0, 5), (5, 0)])
def test_a_prompt_has_a_token_and_leaves_room_for_one(make_request, prompt, output):
    with pytest.raises(ValueError, match=r"prompt_token_ids must hold 1 to 4 tokens"):
        make_request(0, prompt, output)


def test_states_have_no_other_fields(make_request):
    request = make_request(0, 1, 1)
    for state in (request, request.sequences[0]):
        with pytest.raises(AttributeError):
            state.slots = 1
