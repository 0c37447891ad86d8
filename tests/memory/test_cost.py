"""What memory management costs: in proportion to the blocks named, never to the pool."""

import time

import numpy as np
import pytest

from jpaged.memory import BlockManager

NUM_SEQUENCES = 256


def best_seconds(function, repeats):
    """The shortest of many runs: what the work itself takes, however busy the machine is."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def make_manager(num_blocks):
    return BlockManager(
        num_blocks, 16, NUM_SEQUENCES, 128, num_swap_blocks=1000, enable_prefix_caching=True
    )


def decode_seconds(num_blocks, *, forked=False, repeats=1500):
    """One more token each, at most 112 blocks a sequence; and what is asked before and after."""
    manager = make_manager(num_blocks)
    slots = np.array(
        [manager.allocate(1 + i % 16) for i in range(NUM_SEQUENCES - forked)], np.int32
    )
    if forked:  # and never goes on, so that every append has to look
        manager.fork(2)
        slots = slots[slots != 2]

    def decode():
        assert manager.blocks_needed_one(slots) <= manager.num_free_blocks
        manager.append_one(slots)
        assert 0 < manager.slots_used_share <= 1
        manager.take_copies()

    return best_seconds(decode, repeats)


def test_decoding_does_not_depend_on_the_size_of_the_pool():
    small, large = decode_seconds(256 * 96), decode_seconds(4_000_000)
    assert large < 2 * small  # 1.0
    assert large < 1e-3  # 20 us


def test_decoding_beside_sharers_that_wait():
    """Looking at the reference counts adds what the append itself takes, not more."""
    assert decode_seconds(256 * 96, forked=True) < 5 * decode_seconds(256 * 96)


def cycle(manager):
    """Everything once, over some 100 blocks."""
    prompt = np.arange(1000, dtype=np.int32)

    def run():
        slot = manager.allocate(1000, manager.match_prefix(prompt))
        manager.append(slot, 100)
        manager.publish(slot, prompt, 1000)
        slots = [slot, *manager.fork(slot, 3)]
        manager.append_one(np.array(slots, np.int32))
        manager.take_copies()
        assert manager.can_swap_out(slots)
        swapped = manager.swap_out(slots)
        manager.take_copies()
        slots = manager.swap_in(swapped)
        manager.take_copies()
        for slot in slots:
            manager.free(slot)

    return run


@pytest.mark.parametrize("cached", [False, True])
def test_no_operation_depends_on_the_size_of_the_pool(cached):
    def seconds(num_blocks):
        manager = make_manager(num_blocks)
        if cached:  # all of the pool: every block taken has to be evicted
            for start in range(0, min(num_blocks, 50_000) // 100):
                tokens = np.arange(1600, dtype=np.int32) + 1 + start
                slot = manager.allocate(1600)
                manager.publish(slot, tokens, 1600)
                manager.free(slot)
        return best_seconds(cycle(manager), 40)

    sizes = (1_000, 50_000) if cached else (1_000, 4_000_000)
    small, large = map(seconds, sizes)
    assert large < 2 * small  # 1.0 to 1.2
