"""Faults that other engines were reported to have, by the numbers of the public reports: what went
wrong there, and that here it does not, down to the tokens."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import zlib

import numpy as np
import pytest

from jpaged.scheduling import POLICIES, Request, RequestStatus, Scheduler, Sequence, StepPlan

VOCAB = 50


def value_after(before: int, token: int) -> int:
    """What stands for a token's keys and values: it depends on all tokens before it."""
    return zlib.crc32(int(token).to_bytes(4, "little"), before)


def values_of(token_ids) -> list[int]:
    values, before = [], 0
    for token in token_ids:
        before = value_after(before, token)
        values.append(before)
    return values


def sampled(value: int, index: int) -> int:
    return zlib.crc32(bytes([index]), value) % VOCAB


def continuation(prompt: list[int], output: int, index: int = 0) -> list[int]:
    """What a sample of a prompt is when it has the pool for itself."""
    tokens = list(prompt)
    for _ in range(output):
        tokens.append(sampled(values_of(tokens)[-1], index))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


class Server:
    """Drives a scheduler as the engine does. Each token slot of the pool holds one number, made of
    the token and the number before it as the pool had it when the step began: whoever reads a
    block that is not its own, or not there yet, says something else."""

    def __init__(self, **config) -> None:
        config = {
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 256,
            "watermark": 0.0,
            "num_swap_blocks": 0,
            "enable_prefix_caching": True,
            **config,
        }
        self.size = config["block_size"]
        self.scheduler = Scheduler(**config)
        self.manager = self.scheduler.block_manager
        self.device = np.full((config["num_blocks"], self.size), -1, np.int64)
        self.host = np.full((config["num_swap_blocks"], self.size), -1, np.int64)
        self.requests: list[Request] = []

    def add(
        self,
        prompt: list[int],
        output: int,
        *,
        n: int = 1,
        priority: int = 0,
        salt: str | None = None,
    ) -> Request:
        number = len(self.requests)
        params = types.SimpleNamespace(
            min_tokens=0,
            stop_token_ids=None,
            priority=priority,
            cache_salt=salt,
            prompt_logprobs=None,
        )
        request = Request(
            str(number),
            number,
            prompt,
            params,
            stop_token_ids=frozenset(),
            max_total_tokens=len(prompt) + output,
            arrival_time=float(number),
            num_sequences=n,
        )
        self.requests.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        moves = plan.moves
        self.host[moves.swapped_out[1]] = self.device[moves.swapped_out[0]]
        self.device[moves.copied[1]] = self.device[moves.copied[0]]
        self.device[moves.swapped_in[1]] = self.host[moves.swapped_in[0]]
        before, tokens = self.device.copy(), []
        assert plan.lengths.min() >= 1
        for row, sequence in enumerate(plan.sequences):
            start, end = int(plan.starts[row]), int(plan.starts[row] + plan.lengths[row])
            assert end <= sequence.num_tokens
            assert len(self.manager.block_table(sequence.slot)) == -(-end // self.size)
            positions = np.arange(end)
            at = self.manager.tables[plan.slots[row]][positions // self.size], positions % self.size
            value = int(before[at][start - 1]) if start else 0
            for i in range(start, end):
                value = value_after(value, sequence.token_ids[i])
                self.device[at[0][i], at[1][i]] = value
            assert self.device[at].tolist() == values_of(sequence.token_ids[:end])
            tokens.append(sampled(value, sequence.index))
        self.scheduler.update(plan, np.array(tokens[: plan.num_sampled], np.int64))
        self.scheduler.check_integrity()
        return plan

    def run(self) -> None:
        """Steps until all requests are finished, each with the tokens that it has alone."""
        for _ in range(1000):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        assert self.manager.num_used_blocks == 0
        for request in self.requests:
            assert request.finished
            prompt = request.prompt_token_ids
            output = request.max_total_tokens - len(prompt)
            for s in request.sequences:
                assert s.output_token_ids.tolist() == continuation(prompt, output, s.index)


def row_of(plan: StepPlan, sequence: Sequence) -> tuple[int, int]:
    """Start and length of a sequence's row."""
    row = plan.sequences.index(sequence)
    return int(plan.starts[row]), int(plan.lengths[row])


# Token counts that were taken before the match, and blocks of who does not run


@pytest.mark.parametrize("budget", [64, 5])
def test_nano_vllm_211_a_preempted_request_comes_back_onto_its_own_blocks(budget):
    """There its whole context was counted as still to compute, the match with the blocks that it
    had left came after that, and the row ran past the end of the context."""
    server = Server(num_blocks=11, max_num_batched_tokens=budget)
    server.add(prompt_of(6, 1), 20)
    (second,) = server.add(prompt_of(15, 2), 12).sequences
    plan = server.step()
    while second not in plan.preempted:
        plan = server.step()
    full_blocks = (second.num_tokens - 1) // 4
    assert full_blocks >= 4
    while second not in plan.admitted:
        known = second.num_tokens
        plan = server.step()
    start, length = row_of(plan, second)
    assert 0 < start <= full_blocks * 4
    assert start == server.manager.prefix_hit_tokens
    assert length == min(known - start, budget - (plan.num_tokens - length))
    server.run()


def test_nano_vllm_207_what_was_found_while_a_request_waited_may_be_gone_when_it_starts():
    """There a count of cached tokens was used that was no longer true. Here a prompt waits of which
    24 tokens are cached, and what runs takes some of those blocks, all, or none."""
    used = []
    for num_blocks in (9, 10, 11, 12):
        server = Server(num_blocks=num_blocks)
        server.add(prompt_of(26), 1)
        server.run()
        assert server.manager.num_cached_blocks == 6
        server.add(prompt_of(17, 1), 18)
        server.step()
        (late,) = server.add(prompt_of(26), 5).sequences
        found = []
        while late.slot < 0:
            found.append(4 * len(server.manager.match_prefix(late.token_ids[:26])))
            plan = server.step()
        assert found[0] > 0
        assert row_of(plan, late) == (found[-1], 26 - found[-1])
        assert server.manager.prefix_hit_tokens == found[-1]
        used.append((found[0], found[-1]))
        server.run()
    assert used == [(16, 0), (20, 4), (24, 8), (24, 24)]


def test_nano_vllm_207_who_is_not_scheduled_takes_nothing_of_the_cache():
    """There a cached prompt was given its blocks before it was found that the step had no tokens
    left for it, and kept them while it waited."""
    server = Server(max_num_batched_tokens=4)
    server.add(prompt_of(9), 1)
    server.run()
    manager = server.manager
    server.add(prompt_of(1, 1), 9)
    server.step()
    server.add(prompt_of(2, 2), 8)
    # All that its two samples share is cached, so that both start at once: two tokens.
    group = server.add(prompt_of(9), 3, n=2)
    plan = server.step()
    assert (plan.num_tokens, group.status) == (3, RequestStatus.WAITING)
    assert [s.slot for s in group.sequences] == [-1, -1]
    assert manager.num_used_blocks == 2  # of the two others
    assert manager.num_cached_blocks == 2
    assert manager.prefix_hit_tokens == 0
    plan = server.step()
    assert [row_of(plan, s) for s in group.sequences] == [(8, 1), (8, 1)]
    assert manager.prefix_hit_tokens == 8
    server.run()


def test_neuralmagic_vllm_92_who_drops_out_of_the_plan_leaves_no_blocks(serving_loop, make_request):
    """There blocks were taken for a request that the step then had no room for."""
    loop = serving_loop(num_blocks=6, block_size=4, max_num_seqs=4, max_num_batched_tokens=64)
    loop.add(*(make_request(i, 8, 12) for i in range(2)))
    loop.step()
    loop.step()
    assert loop.manager.num_free_blocks == 0  # 3 blocks each, with room for 3 more tokens
    for _ in range(3):
        assert not loop.step().preempted
    plan = loop.step()  # both want a block: only one can have it, and there is none
    assert [s.request.number for s in plan.sequences] == [0]
    assert [s.request.number for s in plan.preempted] == [1]
    assert loop.manager.num_used_blocks == 4
    loop.run()


# Edges of blocks


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [4, 5, 8, 9, 11, 12, 13])
def test_neuralmagic_vllm_92_a_prompt_cached_to_its_last_token_computes_one(length, n):
    """There nothing was left to compute, and nothing to sample the next token from."""
    server = Server()
    server.add(prompt_of(length), 6)
    server.run()
    request = server.add(prompt_of(length), 6, n=n)
    plan = server.step()
    found = (length - 1) // 4 * 4
    assert server.manager.prefix_hit_tokens == found
    rows = [row_of(plan, s) for s in request.sequences if s in plan.sequences]
    if n == 1:
        assert rows == [(found, length - found)]
    elif found < length - 1:
        assert rows == [(found, length - 1 - found)]  # the last token is each sample's own
    else:
        assert rows == [(found, 1)] * n
    server.run()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt", [8, 16, 17, 24, 32])
def test_vllm_7380_a_last_chunk_that_ends_on_a_block_edge(prompt, n, caching):
    """There the token after it had no block."""
    server = Server(
        num_blocks=14, block_size=8, max_num_batched_tokens=8, enable_prefix_caching=caching
    )
    requests = [server.add(prompt_of(prompt, i), 9, n=n) for i in range(2)]
    plans = [server.step()]
    while requests[0].sequences[0].num_output_tokens == 0:
        plans.append(server.step())
    assert max(int(plan.lengths.max()) for plan in plans) == min(prompt - (n > 1), 8)
    server.run()
    assert server.scheduler.generated_tokens == 2 * n * 9


@pytest.mark.parametrize("output", range(1, 7))
def test_vllm_5188_blocks_that_are_not_full_are_not_in_the_cache(output):
    """There they were found by the hash of their tokens so far."""
    server = Server()
    (first,) = server.add(prompt_of(10), output).sequences
    while not first.request.finished:
        server.step()
        computed = first.num_tokens - 1
        assert (
            len(server.manager.match_prefix(first.token_ids[: first.num_tokens])) == computed // 4
        )
    assert server.manager.num_cached_blocks == (9 + output) // 4
    whole = first.token_ids[: first.num_tokens].tolist()
    longer, branch = whole + prompt_of(7, 1), [*whole[:10], (whole[10] + 1) % VOCAB]
    for prompt, found in ((longer, (9 + output) // 4 * 4), (branch, 8)):
        before = server.manager.prefix_hit_tokens
        server.add(prompt, 3)
        server.run()
        assert server.manager.prefix_hit_tokens - before == found


# Requests that come and go


def test_vllm_21809_a_request_comes_back_only_when_its_whole_context_fits(
    serving_loop, make_request
):
    """There it was resumed because its next chunk fitted, and preempted again and again."""
    loop = serving_loop(num_blocks=12, block_size=4, max_num_seqs=4, max_num_batched_tokens=6)
    loop.add(make_request(0, 4, 40), make_request(1, 23, 20))
    while not loop.plans[-1:] or not loop.plans[-1].preempted:
        loop.step()
    second = loop.plans[-1].preempted[0]
    assert second.request.number == 1
    needed = loop.manager.blocks_for(second.num_tokens + 1)
    free_blocks = []
    while second.slot < 0:
        free_blocks.append(loop.manager.num_free_blocks)
        loop.step()
    assert any(2 <= free < needed for free in free_blocks)  # a chunk of 5 tokens would have fitted
    assert all(free < needed for free in free_blocks[:-1])
    assert free_blocks[-1] >= needed
    loop.run()
    assert loop.scheduler.memory.preemptions_recompute == 1


@pytest.mark.parametrize("num_swap_blocks", [8, 200])
def test_vllm_5578_no_prompt_is_admitted_while_others_wait_swapped_out(num_swap_blocks):
    """There, with n >= 2 and chunked prefill, new prompts were, drove out more of those that ran,
    and the swap space filled up until the engine gave up."""
    server = Server(
        num_blocks=45,
        max_num_seqs=24,
        max_num_batched_tokens=30,
        num_swap_blocks=num_swap_blocks,
        prefers_swap=lambda num_blocks, num_tokens: True,
        enable_prefix_caching=False,
    )
    scheduler = server.scheduler
    for i in range(20):
        server.add(prompt_of(10 + 3 * (i % 4), i), 16, n=3)
    saved = 0
    while scheduler.has_unfinished:
        new = [r for r in scheduler.waiting if r.status is RequestStatus.WAITING]
        server.step()
        back = [r for r in scheduler.waiting if r.status is not RequestStatus.WAITING]
        assert not (back and any(r.status is RequestStatus.RUNNING for r in new))
        saved = max(saved, num_swap_blocks - server.manager.num_free_swap_blocks)
    assert scheduler.memory.preemptions_swap > 3
    # Where the swap space is too small for all, some are computed again instead. However large it
    # is, no more is saved than the pool held.
    assert (scheduler.memory.preemptions_recompute > 0) == (num_swap_blocks == 8)
    assert 0 < saved <= min(num_swap_blocks, 45)
    server.run()


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_vllm_9272_an_urgent_request_pushes_out_several_others(swap, chunked, caching):
    """There it did, and the engine crashed on those that were pushed out."""
    server = Server(
        num_blocks=16,
        max_num_batched_tokens=12 if chunked else 64,
        num_swap_blocks=30,
        prefers_swap=lambda num_blocks, num_tokens: swap,
        enable_prefix_caching=caching,
        policy=POLICIES["priority"](),
    )
    low = [server.add(prompt_of(length, i), 12) for i, length in enumerate((6, 7, 7, 18))]
    for _ in range(2):
        server.step()
    (last,) = low[3].sequences
    assert low[3].status is RequestStatus.RUNNING
    assert (0 < last.num_computed_tokens < 18) == chunked
    urgent = server.add(prompt_of(43, 9), 6, n=2, priority=-10)
    preempted = {s.request for s in server.step().preempted}
    if urgent.status is RequestStatus.WAITING:  # what runs took a block of those that were to do
        preempted |= {s.request for s in server.step().preempted}
    assert urgent.status is RequestStatus.RUNNING
    pushed_out = [r for r in low if r.status is not RequestStatus.RUNNING]
    assert len(pushed_out) >= 2 and pushed_out == low[-len(pushed_out) :]
    assert preempted == set(pushed_out)
    status = RequestStatus.SWAPPED if swap else RequestStatus.PREEMPTED
    assert {r.status for r in pushed_out} == {status}
    # They come back in their order, and go on where they were.
    came_back = []
    while server.scheduler.has_unfinished:
        came_back += [s.request for s in server.step().admitted if s.request in pushed_out]
    assert list(dict.fromkeys(came_back)) == pushed_out
    server.run()


# Hashes


@pytest.mark.parametrize("salts", [(None, None), ("a", "b")])
def test_vllm_12621_openvino_genai_3722_colliding_hashes_serve_nobody_elses_blocks(salts):
    """There a block was known by its hash alone: another prompt that hashed alike was answered
    from it. Here all blocks hash alike."""
    server = Server()
    server.manager._cache._hash_block = lambda *_: 7
    one, other = prompt_of(14, 1), prompt_of(14, 2)
    mixed = [*one[:4], *other[4:]]
    for prompt, salt, found in (
        (one, salts[0], 0),
        (other, salts[1], 0),
        (one, salts[0], 12),
        (other, salts[1], 12),
        (one, salts[1], 0 if salts[0] != salts[1] else 12),
        (mixed, salts[0], 4),
        (other[4:], salts[0], 0),
    ):
        before = server.manager.prefix_hit_tokens
        server.add(prompt, 5, salt=salt)
        server.run()
        assert server.manager.prefix_hit_tokens - before == found


def test_vllm_12621_hashes_cannot_be_foretold():
    """There they could, since Python 3.12 hashes None alike in every process, so that a prompt
    could be made to collide with another tenant's."""
    program = (
        "from jpaged.memory.prefix_cache import hash_block; print(hash_block(0, b'abcd', None))"
    )
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": "random", "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(2)
    }
    assert len(hashes) == 2
