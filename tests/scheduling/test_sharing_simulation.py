"""Random loads of everything at once, on pools of tokens: several samples, beams, forks, kept
requests, priorities, prefix caching, swap and recompute. Whatever happens, each sequence reads its
own tokens, and ends with those that it would have had alone."""

from __future__ import annotations

import types
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpaged.scheduling import (
    POLICIES,
    UNKNOWN_TOKEN,
    BeamSearch,
    Request,
    RequestStatus,
    Scheduler,
)

VOCAB = 40
EOS = 7


def next_token(context: np.ndarray, sample: int) -> int:
    """What a sequence of these tokens is followed by; a model that looks at everything."""
    return zlib.crc32(np.asarray(context, np.int32).tobytes(), sample) % VOCAB


def best_tokens(context: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` most likely tokens after these, and their log-probabilities."""
    seed = zlib.crc32(np.asarray(context, np.int32).tobytes())
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs, kind="stable")[:count]
    return best.astype(np.int32), logprobs[best].astype(np.float32)


def expected_sample(request: Request, index: int) -> list[int]:
    tokens = list(request.prompt_token_ids)
    while len(tokens) < request.max_total_tokens:
        tokens.append(next_token(np.array(tokens), index))
        if tokens[-1] in request.stop_token_ids:
            break
    return tokens


def expected_hypotheses(request: Request) -> list[list[int]]:
    search = make_search(request.beams.width, request.max_total_tokens, request.prompt_token_ids)
    beams = [list(request.prompt_token_ids)]
    while not search.done:
        found = [best_tokens(np.array(beam), search.num_candidates) for beam in beams]
        step = search.advance(np.stack([f[0] for f in found]), np.stack([f[1] for f in found]))
        beams = [
            [*beams[parent], token]
            for parent, token in zip(step.parents.tolist(), step.token_ids.tolist())
        ]
    return [hypothesis.token_ids.tolist() for hypothesis in search.best()]


def make_search(width: int, max_total_tokens: int, prompt: list[int]) -> BeamSearch:
    return BeamSearch(width, eos_token_ids=[EOS], max_new_tokens=max_total_tokens - len(prompt))


class World:
    """Drives a scheduler as the engine does; the device's and the host's memory hold tokens.

    ahead  plan each step before the tokens of the one before it are known, where that is possible
    """

    def __init__(self, rng: np.random.Generator, *, ahead: bool = False, **config) -> None:
        self.rng = rng
        config = {"max_model_len": 100, "watermark": 0.0, "num_swap_blocks": 0, **config}
        swaps = config.pop("swaps")
        config["prefers_swap"] = lambda num_blocks, num_tokens: bool(rng.random() < swaps)
        config["policy"] = POLICIES[config.pop("policy")]()
        self.scheduler = Scheduler(**config)
        self.manager = self.scheduler.block_manager
        size = config["block_size"]
        self.size = size
        self.device = np.full((config["num_blocks"], size), -1)
        self.host = np.full((config["num_swap_blocks"], size), -1)
        self.ahead = ahead
        self.under_way: list = []  # at most two plans, with their results
        self.last_tokens = np.full(config["max_num_seqs"], -2)  # by slot
        self.fed = 0  # tokens that the device gave itself
        self.requests: list[Request] = []
        self.aborted: set[Request] = set()
        self.number = 0

    def new_request(self, prompt, *, output, arrival_time, kind="one", **extra) -> Request:
        params = types.SimpleNamespace(
            min_tokens=0,
            stop_token_ids=None,
            priority=extra.pop("priority", 0),
            cache_salt=extra.pop("salt", None),
            prompt_logprobs=None,
        )
        total = len(prompt) + output
        beams = make_search(extra.pop("width"), total, prompt) if kind == "beams" else None
        request = Request(
            str(self.number),
            self.number,
            prompt,
            params,
            stop_token_ids=frozenset([EOS]),
            max_total_tokens=total,
            arrival_time=arrival_time,
            num_sequences=extra.pop("n", 1),
            beams=beams,
            **extra,
        )
        self.number += 1
        self.requests.append(request)
        return request

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.scheduler.check_integrity()
        moves = plan.moves
        self.host[moves.swapped_out[1]] = self.device[moves.swapped_out[0]]
        self.device[moves.copied[1]] = self.device[moves.copied[0]].copy()
        self.device[moves.swapped_in[1]] = self.host[moves.swapped_in[0]]
        assert len(np.unique(moves.copied[1])) == moves.copied.shape[1]
        assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
        assert plan.num_tokens == plan.lengths.sum()
        if plan.sequences:
            self.under_way.append((plan, self.compute(plan)))
        waits = bool(plan.sequences) and self.ahead and not plan.needs_tokens
        while len(self.under_way) > waits:
            done, (tokens, candidates) = self.under_way.pop(0)
            self.scheduler.update(done, tokens, candidates)
            self.scheduler.check_integrity()

    def compute(self, plan):
        """What the device does: it knows block tables and its own pool, and feeds itself."""
        slots = []
        for row, sequence in enumerate(plan.sequences):
            start, end = plan.starts[row], plan.starts[row] + plan.lengths[row]
            ahead = sequence.num_tokens + sequence.num_pending - (row < plan.num_sampled)
            if sequence.request.beams is not None:
                ahead = sequence.num_tokens
            assert end == sequence.num_computed_tokens
            assert (row < plan.num_sampled) == (end == ahead)
            positions = np.arange(end)
            table = self.manager.tables[plan.slots[row]]
            blocks, offsets = table[positions // self.size], positions % self.size
            given = sequence.token_ids[start:end].copy()
            self.fed += int(given[-1] == UNKNOWN_TOKEN)
            given[given == UNKNOWN_TOKEN] = self.last_tokens[plan.slots[row]]
            self.device[blocks[start:], offsets[start:]] = given
            slots.append((blocks, offsets))
        read = [self.device[blocks, offsets] for blocks, offsets in slots]
        for sequence, context in zip(plan.sequences, read, strict=True):
            known = min(len(context), sequence.num_tokens)
            np.testing.assert_array_equal(context[:known], sequence.token_ids[:known])
        sampled = list(zip(plan.sequences, read, plan.slots.tolist()))[: plan.num_sampled]
        tokens = [next_token(context, sequence.index) for sequence, context, _ in sampled]
        for (_, _, slot), token in zip(sampled, tokens):
            self.last_tokens[slot] = token

        def candidates(row: int):
            return best_tokens(read[row], plan.sequences[row].request.beams.num_candidates)

        return np.array(tokens, np.int64), candidates

    def check_results(self) -> None:
        for request in self.requests:
            assert request.finished
            if request in self.aborted:
                continue
            if request.beams is not None:
                found = [h.token_ids.tolist() for h in request.beams.best()]
                assert found == expected_hypotheses(request)
                continue
            for sequence in request.sequences:
                tokens = sequence.token_ids[: sequence.num_tokens].tolist()
                assert tokens == expected_sample(request, sequence.index)


def random_prompt(rng, prefixes) -> list[int]:
    prefix = prefixes[rng.integers(len(prefixes))][: rng.integers(0, 25)]
    own = rng.integers(8, VOCAB, rng.integers(1, 12)).tolist()
    return [*prefix, *own]


def simulate(seed: int, *, num_requests: int, **config) -> World:
    rng = np.random.default_rng(seed)
    world = World(rng, **config)
    scheduler = world.scheduler
    prefixes = [rng.integers(8, VOCAB, 24).tolist() for _ in range(2)]
    time = 0.0
    while world.number < num_requests or scheduler.has_unfinished:
        time += 1.0
        if world.number < num_requests and rng.random() < 0.5:
            kind = rng.choice(["one", "one", "samples", "beams", "keep"])
            extra = {"n": int(rng.integers(2, 5))} if kind == "samples" else {}
            if kind == "beams":
                extra["width"] = int(rng.integers(1, 4))
            scheduler.add(
                world.new_request(
                    random_prompt(rng, prefixes),
                    output=int(rng.integers(1, 12)),
                    arrival_time=time,
                    kind=kind,
                    keep=bool(kind == "keep"),
                    priority=int(rng.integers(-1, 2)),
                    salt=[None, "a"][rng.integers(2)],
                    **extra,
                )
            )
        live = [r for r in world.requests if r.status is not RequestStatus.FINISHED]
        if live and rng.random() < 0.1:
            victim = live[rng.integers(len(live))]
            if scheduler.abort(victim.request_id):
                world.aborted.add(victim)
            else:
                assert scheduler.release(victim.request_id)
            scheduler.check_integrity()
        parents = [r for r in live if len(r.sequences) == 1 and r.beams is None and r.keep]
        parents = [r for r in parents if r not in world.aborted and scheduler.get(r.request_id)]
        if parents and rng.random() < 0.15:
            parent = parents[rng.integers(len(parents))]
            source = parent.sequences[0]
            tokens = source.token_ids[: source.num_tokens].tolist()
            children = [
                world.new_request(
                    tokens, output=3, arrival_time=time, salt=parent.sampling_params.cache_salt
                )
                for _ in range(rng.integers(1, 3))
            ]
            scheduler.fork(parent.request_id, children)
            scheduler.check_integrity()
        if scheduler.has_unfinished:
            world.step()
    while world.under_way:
        world.step()
    for request in world.requests:
        scheduler.release(request.request_id)
    world.check_results()
    scheduler.check_integrity()
    assert world.manager.num_free_blocks == world.manager.num_blocks
    return world


CONFIGS = {
    "roomy": {"num_blocks": 300, "swaps": 0.0},
    "tight, recompute": {"num_blocks": 22, "swaps": 0.0},
    "tight, swap": {"num_blocks": 22, "swaps": 1.0, "num_swap_blocks": 40},
    "tight, both, priorities": {
        "num_blocks": 24, "swaps": 0.5, "num_swap_blocks": 15, "policy": "priority",
    },
    "tight, cached": {"num_blocks": 24, "swaps": 0.5, "num_swap_blocks": 20, "cache": True},
    "small chunks, cached, priorities": {
        "num_blocks": 30, "swaps": 0.3, "num_swap_blocks": 10, "cache": True,
        "max_num_batched_tokens": 8, "policy": "priority",
    },
    "big blocks": {"num_blocks": 16, "block_size": 8, "swaps": 0.5, "num_swap_blocks": 9},
}  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once(name, seed, ahead):
    config = {"block_size": 4, "max_num_seqs": 12, "max_num_batched_tokens": 40} | CONFIGS[name]
    cache = config.pop("cache", False)
    config.setdefault("policy", "fcfs")
    world = simulate(seed, num_requests=60, ahead=ahead, enable_prefix_caching=cache, **config)
    memory = world.scheduler.memory
    if "tight" in name:
        assert memory.preemptions_recompute + memory.preemptions_swap > 0
    if cache:
        assert 0 < world.manager.prefix_hit_tokens < world.manager.prefix_query_tokens
    if name == "tight, swap":
        assert memory.preemptions_swap > 0
    assert world.manager.copy_on_write_blocks > 0
    assert (world.fed > 50) == ahead


@pytest.mark.parametrize("swaps", [0.0, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_group_that_just_fits_comes_back(n, policy, swaps):
    """The pool is what `check_fits` asks for, the group is pushed out at any of its last steps, and
    its sequences share their last block when they come back."""
    prompt, output, size = list(range(8, 14)), 20, 4
    shared = (len(prompt) - 1) // size
    num_blocks = shared + n * (-(-(len(prompt) + output - 1) // size) - shared)
    for steps in range(8, 24):
        world = World(
            np.random.default_rng(0),
            num_blocks=num_blocks,
            block_size=size,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            num_swap_blocks=100,
            swaps=swaps,
            policy=policy,
        )
        group = world.new_request(prompt, output=output, arrival_time=1.0, n=n, priority=1)
        other = world.new_request([9, 10], output=2, arrival_time=0.0)
        for request in (group, other):
            request.stop_token_ids = frozenset()
        world.scheduler.add(group)
        for _ in range(steps):
            world.step()
        world.scheduler.add(other)
        for _ in range(60):
            if world.scheduler.has_unfinished:
                world.step()
        assert group.finished and other.finished
        world.check_results()


def test_kept_blocks_go_before_a_running_request_does():
    world = World(
        np.random.default_rng(0),
        num_blocks=12,
        block_size=4,
        max_num_seqs=4,
        max_num_batched_tokens=40,
        swaps=0.0,
        policy="priority",
    )
    scheduler = world.scheduler
    kept = world.new_request([8] * 15, output=2, arrival_time=0.0, keep=True)
    scheduler.add(kept)
    while scheduler.has_unfinished:
        world.step()
    assert kept.status is RequestStatus.KEPT and world.manager.num_used_blocks == 4
    running = world.new_request([9] * 10, output=8, arrival_time=1.0, priority=1)
    scheduler.add(running)
    world.step()
    scheduler.add(world.new_request([10] * 20, output=4, arrival_time=2.0, priority=0))
    while scheduler.has_unfinished:
        world.step()
    assert scheduler.memory.preemptions_recompute == 0
    assert world.manager.num_used_blocks == 0
    assert scheduler.release(kept.request_id)


def test_branches_of_finished_requests_do_not_pass_those_who_wait():
    world = World(
        np.random.default_rng(0),
        num_blocks=40,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=40,
        swaps=0.0,
        policy="fcfs",
    )
    scheduler = world.scheduler
    root = world.new_request([8] * 5, output=2, arrival_time=0.0, keep=True)
    root.stop_token_ids = frozenset()
    busy = world.new_request([9] * 5, output=10, arrival_time=0.0)
    busy.stop_token_ids = frozenset()
    scheduler.add(root)
    scheduler.add(busy)
    while not root.finished:
        world.step()
    scheduler.add(waiting := world.new_request([10] * 5, output=3, arrival_time=1.0))
    tokens = root.sequences[0].token_ids[: root.sequences[0].num_tokens].tolist()
    child = world.new_request(tokens, output=3, arrival_time=2.0)
    scheduler.fork(root.request_id, [child])
    assert child in scheduler.waiting
    world.step()
    assert waiting in scheduler.running and child in scheduler.waiting
    while scheduler.has_unfinished:
        world.step()
    assert scheduler.release(root.request_id)
    assert world.manager.num_used_blocks == 0
    world.check_results()


@pytest.mark.parametrize("steps_before", [0, 1])
@pytest.mark.parametrize("swaps", [0.0, 1.0])
def test_a_sample_that_ends_on_its_groups_way_out(swaps, steps_before):
    """The step under way when the group is preempted, or the one before it, samples the last token
    of one of it. In the second case it has a surplus row in the step under way."""

    def preempted(stop_token_ids=()):
        world = World(
            np.random.default_rng(0),
            num_blocks=19,
            block_size=4,
            max_num_seqs=6,
            max_num_batched_tokens=40,
            num_swap_blocks=20,
            swaps=swaps,
            policy="fcfs",
            ahead=True,
        )
        first = world.new_request([9] * 6, output=30, arrival_time=0.0)
        group = world.new_request([10] * 7, output=20, arrival_time=1.0, n=3)
        first.stop_token_ids = frozenset()
        group.stop_token_ids = frozenset(stop_token_ids)
        for request in (first, group):
            world.scheduler.add(request)
        while group.status in (RequestStatus.WAITING, RequestStatus.RUNNING):
            world.step()
        return world, group

    _, group = preempted()
    last = [int(s.token_ids[s.num_tokens - 1 - steps_before]) for s in group.sequences]
    ended = 0
    for token in last:
        world, group = preempted([token])
        if len(group.unfinished) != 2:  # others sample this token too, and earlier
            continue
        ended += 1
        assert group.status is (RequestStatus.SWAPPED if swaps else RequestStatus.PREEMPTED)
        for _ in range(200):
            if world.scheduler.has_unfinished or world.under_way:
                world.step()
        world.check_results()
        assert world.manager.num_free_blocks == world.manager.num_blocks
        assert world.manager.num_free_swap_blocks == 20
    assert ended


# Admission


def check_progress(scheduler: Scheduler) -> None:
    """Have plans checked: whoever is preempted has sampled since it was admitted."""
    schedule, sampled = scheduler.schedule, {}

    def checked():
        plan = schedule()
        for request in {s.request for s in plan.preempted}:
            assert sampled.pop(request), "preempted before it sampled"
        for sequence in plan.admitted:
            sampled.setdefault(sequence.request, False)
        sampled.update({s.request: True for s in plan.sequences[: plan.num_sampled]})
        return plan

    scheduler.schedule = checked


arrivals = st.fixed_dictionaries(
    {
        "steps": st.integers(0, 2),  # after the one before it
        "late": st.integers(-5, 5),  # it came that much after the step, or before
        "shared": st.integers(0, 30),
        "own": st.integers(1, 30),
        "output": st.integers(1, 30),
        "rows": st.integers(1, 4),
        "kind": st.sampled_from(["samples", "samples", "beams"]),
    }
)
tight = st.fixed_dictionaries(
    {
        "num_slots": st.integers(80, 200),  # token slots in the pool
        "block_size": st.integers(1, 8),
        "max_num_seqs": st.integers(4, 16),
        "max_num_batched_tokens": st.integers(6, 60),
        "num_swap_blocks": st.integers(0, 60),
        "swaps": st.sampled_from([0.0, 0.5, 1.0]),
        "watermark": st.sampled_from([0.0, 0.01, 0.1]),
        "enable_prefix_caching": st.booleans(),
        "ahead": st.booleans(),
    }
)


def serve(config: dict, load: list[dict]) -> World:
    """A load from beginning to end, with its progress checked."""
    config = dict(config)
    config["num_blocks"] = config.pop("num_slots") // config["block_size"]
    world = World(np.random.default_rng(0), policy="fcfs", **config)
    scheduler = world.scheduler
    check_progress(scheduler)
    for i, arrival in enumerate(load):
        for _ in range(arrival["steps"]):
            if scheduler.has_unfinished:
                world.step()
        prompt = [8 + j % 30 for j in range(arrival["shared"])]
        prompt += [8 + (i + 7 * j) % 31 for j in range(arrival["own"])]
        name = "width" if arrival["kind"] == "beams" else "n"
        request = world.new_request(
            prompt,
            output=arrival["output"],
            arrival_time=float(i + arrival["late"]),
            kind=arrival["kind"],
            **{name: arrival["rows"]},
        )
        try:
            scheduler.add(request)
        except ValueError:  # it could never fit
            world.requests.remove(request)
    for _ in range(10_000):
        if scheduler.has_unfinished or world.under_way:
            world.step()
    world.check_results()
    return world


@pytest.mark.parametrize("examples", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_whoever_is_admitted_samples_before_it_can_be_preempted(examples):
    """Groups and beams too, which have rows and tokens to compute that are still to come."""
    num_preemptions = 0

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(config=tight, load=st.lists(arrivals, min_size=15, max_size=30))
    def serve_any(config, load):
        nonlocal num_preemptions
        memory = serve(config, load).scheduler.memory
        num_preemptions += memory.preemptions_recompute + memory.preemptions_swap

    serve_any()
    assert num_preemptions > examples // 2
