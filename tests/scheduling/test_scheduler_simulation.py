"""Random serving loads: whatever comes in whatever order, every request ends as it should."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@dataclasses.dataclass(frozen=True)
class Arrival:
    step: int  # added before this step
    time_offset: int  # its arrival_time is that much before (or after) the step
    prompt: int
    output: int
    stop_after: int | None  # a stop token stands here, counted in generated tokens
    abort_after: int | None  # steps after it was added
    abort_in_flight: bool  # between schedule and update


def arrivals(max_step: int) -> st.SearchStrategy[Arrival]:
    return st.builds(
        Arrival,
        step=st.integers(0, max_step),
        time_offset=st.integers(-5, 5),
        prompt=st.integers(1, 40),
        output=st.integers(1, 25),
        stop_after=st.none() | st.integers(1, 30),
        abort_after=st.none() | st.none() | st.integers(0, 30),
        abort_in_flight=st.booleans(),
    )


configs = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(1, 40),
        "block_size": st.integers(1, 8),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(1, 40),
        "watermark": st.sampled_from([0.0, 0.01, 0.3, 0.9]),
        "max_decode_steps": st.sampled_from([1, 1, 2, 5, 16]),
    }
)


def serve(serving_loop, make_request, config, load):
    """Run a load to its end; returns the loop and [(arrival, request)] of what was accepted."""
    loop = serving_loop(**config)
    pending = sorted(enumerate(load), key=lambda pair: pair[1].step)
    accepted = []
    step = 0
    while pending or loop.scheduler.has_unfinished:
        while pending and pending[0][1].step <= step:
            number, arrival = pending.pop(0)
            request = make_request(
                number,
                arrival.prompt,
                arrival.output,
                arrival_time=float(step + arrival.time_offset),
                stop_token_ids=(number * 10_000 + arrival.prompt + arrival.stop_after - 1,)
                if arrival.stop_after
                else (),
            )
            slots = arrival.prompt + arrival.output - 1
            if -(-slots // config["block_size"]) > config["num_blocks"]:
                with pytest.raises(ValueError, match="blocks"):
                    loop.add(request)
            else:
                loop.add(request)
                accepted.append((arrival, request))
        due = [
            (arrival.abort_in_flight, request.request_id)
            for arrival, request in accepted
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step
        ]
        now = [request_id for in_flight, request_id in due if not in_flight]
        later = [request_id for in_flight, request_id in due if in_flight]

        def abort(_plan, request_ids=later):
            for request_id in request_ids:
                loop.scheduler.abort(request_id)

        abort(None, now)
        loop.scheduler.check_integrity()
        if loop.scheduler.has_unfinished:
            loop.step(between=abort)
        step += 1
        assert step < 20_000
    return loop, accepted


def check_ends(loop, accepted):
    for arrival, request in accepted:
        (sequence,) = request.sequences
        assert request.finished
        stops = arrival.stop_after is not None and arrival.stop_after <= arrival.output
        output = arrival.stop_after if stops else arrival.output
        if sequence.finish_reason == "abort":
            assert arrival.abort_after is not None
            assert sequence.num_output_tokens < output
            output = sequence.num_output_tokens
        else:
            assert sequence.finish_reason == ("stop" if stops else "length")
        total = arrival.prompt + output
        expected = [request.number * 10_000 + position for position in range(total)]
        assert sequence.token_ids[: sequence.num_tokens].tolist() == expected
    manager, scheduler = loop.manager, loop.scheduler
    assert (manager.num_used_blocks, manager.num_free_slots) == (0, len(manager.tables))
    assert scheduler.steps == sum(plan.num_steps for plan in loop.plans)
    computed = sum(plan.num_tokens * plan.num_steps for plan in loop.plans)
    assert scheduler.scheduled_tokens == computed
    assert 0 <= scheduler.slots_used_share <= 1
    assert scheduler.memory.preemptions_recompute == sum(len(plan.preempted) for plan in loop.plans)
    generated = sum(request.sequences[0].num_output_tokens for _, request in accepted)
    assert scheduler.generated_tokens == generated


@given(config=configs, load=st.lists(arrivals(max_step=30), min_size=1, max_size=12))
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
def test_any_load_in_any_pool(serving_loop, make_request, config, load):
    loop, accepted = serve(serving_loop, make_request, config, load)
    check_ends(loop, accepted)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_a_pool_far_too_small(serving_loop, make_request, block_size, budget):
    """60 requests at once, some aborted, in a pool for a few of them: much preemption."""
    rng = np.random.default_rng(0)
    load = [
        Arrival(
            step=int(rng.integers(0, 60)),
            time_offset=0,
            prompt=int(rng.integers(1, 40)),
            output=int(rng.integers(1, 40)),
            stop_after=None,
            abort_after=int(rng.integers(0, 80)) if rng.random() < 0.1 else None,
            abort_in_flight=bool(rng.random() < 0.5),
        )
        for _ in range(60)
    ]
    config = {
        "num_blocks": -(-120 // block_size),
        "block_size": block_size,
        "max_num_seqs": 16,
        "max_num_batched_tokens": budget,
    }
    loop, accepted = serve(serving_loop, make_request, config, load)
    check_ends(loop, accepted)
    assert len(accepted) == 60
    if budget > 1:  # else nothing runs beside another
        assert loop.scheduler.memory.preemptions_recompute > 5
