"""Swapping: sequences that give up their blocks and come back in others."""

import itertools

import numpy as np
import pytest

from jpaged.memory import BlockManager, NoFreeBlocksError


def make_manager(num_blocks=8, block_size=4, max_sequences=4, num_swap_blocks=6, **kwargs):
    return BlockManager(
        num_blocks, block_size, max_sequences, 8, num_swap_blocks=num_swap_blocks, **kwargs
    )


def rows(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


def test_out_and_in_again():
    manager = make_manager()
    slot = manager.allocate(6)
    before = manager.block_table(slot).tolist()
    assert (manager.num_swap_blocks, manager.num_free_swap_blocks) == (6, 6)
    assert manager.can_swap_out([slot])
    swapped = manager.swap_out([slot])
    assert (swapped.num_blocks, swapped.num_sequences, swapped.num_tokens) == (2, 1, (6,))
    assert swapped.device_blocks.tolist() == before
    assert swapped.device_blocks.dtype == swapped.host_blocks.dtype == np.int32
    assert len(set(swapped.host_blocks.tolist())) == 2
    assert (manager.num_free_blocks, manager.num_free_slots) == (8, 4)
    assert manager.num_free_swap_blocks == 4
    manager.check_integrity()
    manager.take_copies()

    other = manager.allocate(8)  # takes the old blocks
    host = swapped.host_blocks.tolist()
    (slot,) = manager.swap_in(swapped)
    assert manager.num_tokens[slot] == 6
    assert swapped.device_blocks.tolist() == manager.block_table(slot).tolist()
    assert not set(swapped.device_blocks.tolist()) & set(manager.block_table(other).tolist())
    assert swapped.host_blocks.tolist() == host
    assert manager.num_free_swap_blocks == 4  # this step reads the others
    manager.take_copies()
    assert manager.num_free_swap_blocks == 6
    manager.check_integrity()


def test_sharing_is_restored():
    manager = make_manager()
    slot = manager.allocate(6)
    first, second = manager.fork(slot, 2)
    manager.append(second, 1)
    manager.take_copies()
    before = [manager.block_table(s).tolist() for s in (second, slot, first)]
    swapped = manager.swap_out([second, slot, first])
    assert swapped.num_blocks == 3  # each distinct block once
    assert swapped.device_blocks.tolist() == [*before[0], before[1][1]]
    assert manager.num_used_blocks == 0
    manager.take_copies()
    slots = manager.swap_in(swapped)
    after = [manager.block_table(s).tolist() for s in slots]
    assert manager.num_tokens[slots].tolist() == [7, 6, 6]
    assert manager.num_used_blocks == 3
    renamed = dict(zip(itertools.chain(*before), itertools.chain(*after), strict=True))
    assert [[renamed[b] for b in table] for table in before] == after
    manager.check_integrity()


def test_a_block_that_others_use_stays_with_them():
    manager = make_manager()
    slot = manager.allocate(6)
    (fork,) = manager.fork(slot)
    blocks = manager.block_table(slot).tolist()
    swapped = manager.swap_out([fork])
    assert swapped.device_blocks.tolist() == blocks  # its contents are in host memory too
    assert manager.block_table(slot).tolist() == blocks
    assert manager.pool.ref_counts[blocks].tolist() == [1, 1]
    manager.append(slot, 1)  # nobody shares it now
    assert len(manager.take_copies()[0]) == 0
    (fork,) = manager.swap_in(swapped)
    assert not set(manager.block_table(fork).tolist()) & set(blocks)
    manager.check_integrity()


def test_what_arrives_in_this_step_is_sent_for_again_and_not_copied():
    """A step makes its copies before its swap ins: there is nothing to copy from."""
    manager = make_manager()
    slot = manager.allocate(6)
    manager.fork(slot, 2)
    swapped = manager.swap_out([0, 1, 2])
    manager.take_copies()
    slots = manager.swap_in(swapped)
    assert manager.blocks_needed_one(rows(*slots)) == 2
    manager.append_one(rows(*slots))
    sources, _ = manager.take_copies()
    assert len(sources) == 0
    assert manager.copy_on_write_blocks == 2
    last = [int(manager.block_table(s)[-1]) for s in slots]
    moves = dict(zip(swapped.device_blocks.tolist(), swapped.host_blocks.tolist()))
    assert len(moves) == 4
    assert len({moves[block] for block in last}) == 1
    manager.append_one(rows(*slots))
    assert len(swapped.device_blocks) == 4  # settled
    manager.check_integrity()


def test_a_block_given_back_before_it_arrives_is_not_written():
    manager = make_manager(num_blocks=2)
    swapped = manager.swap_out([manager.allocate(8)])
    manager.take_copies()
    (slot,) = manager.swap_in(swapped)
    manager.free(slot)
    other = manager.allocate(5)
    assert sorted(manager.block_table(other).tolist()) == [0, 1]
    assert (len(swapped.device_blocks), len(swapped.host_blocks)) == (0, 0)


def test_host_blocks_that_this_step_reads_are_not_filled_in_it():
    """A step fills host memory before it reads any."""
    manager = make_manager(num_swap_blocks=2)
    swapped = manager.swap_out([manager.allocate(8)])
    other = manager.allocate(8)
    manager.take_copies()
    manager.swap_in(swapped)
    assert not manager.can_swap_out([other])
    with pytest.raises(NoFreeBlocksError, match="2 blocks do not fit in the 0 free blocks"):
        manager.swap_out([other])
    manager.take_copies()
    assert manager.can_swap_out([other])
    manager.swap_out([other])
    manager.check_integrity()


def test_host_blocks_that_this_step_fills_are_not_filled_twice():
    manager = make_manager(num_swap_blocks=2)
    manager.drop_swapped(manager.swap_out([manager.allocate(8)]))
    assert manager.num_free_swap_blocks == 0
    manager.check_integrity()
    manager.take_copies()
    assert manager.num_free_swap_blocks == 2


def test_an_abort_while_swapped_out():
    manager = make_manager()
    swapped = manager.swap_out([manager.allocate(8), manager.allocate(3)])
    manager.take_copies()
    assert manager.num_free_swap_blocks == 3
    manager.drop_swapped(swapped)
    assert manager.num_free_swap_blocks == 6
    for use in (manager.drop_swapped, manager.swap_in):
        with pytest.raises(ValueError, match="swapped must be sequences that are swapped out"):
            use(swapped)
    manager.check_integrity()


@pytest.mark.parametrize("at_once", [False, True])
def test_one_of_several_is_given_up(at_once):
    """Three that share a block and have one or none of their own."""
    manager = make_manager(num_swap_blocks=4)
    slot = manager.allocate(4)
    slots = [slot, *manager.fork(slot, 2)]
    manager.append_one(rows(*slots[:2]))
    manager.take_copies()
    swapped = manager.swap_out(slots)
    shared, own = swapped.host_blocks[0], swapped.host_blocks[1:]
    assert (swapped.num_blocks, len(own)) == (3, 2)
    if not at_once:
        manager.take_copies()
    manager.drop_one_swapped(swapped, 0)
    assert (swapped.num_blocks, swapped.num_tokens) == (2, (5, 4))
    assert swapped.host_blocks.tolist() == [shared, own[1]]
    assert [table.tolist() for table in swapped.tables] == [[0, 1], [0]]
    manager.check_integrity()
    manager.take_copies()
    assert manager.num_free_swap_blocks == 2
    manager.drop_one_swapped(swapped, 1)  # has nothing of its own
    assert (swapped.num_blocks, swapped.num_tokens) == (2, (5,))
    for index in (0, 1, -1):
        with pytest.raises(ValueError, match=f"one of several sequences, got {index} of 1"):
            manager.drop_one_swapped(swapped, index)
    (slot,) = manager.swap_in(swapped)
    assert swapped.host_blocks.tolist() == [shared, own[1]]
    assert swapped.device_blocks.tolist() == manager.block_table(slot).tolist()
    manager.take_copies()
    assert manager.num_free_swap_blocks == 4
    manager.check_integrity()


def test_all_or_nothing():
    manager = make_manager(num_swap_blocks=3)
    slots = [manager.allocate(8), manager.allocate(5)]
    assert not manager.can_swap_out(slots)
    with pytest.raises(NoFreeBlocksError, match="4 blocks do not fit in the 3 free blocks"):
        manager.swap_out(slots)
    assert (manager.num_used_blocks, manager.num_free_swap_blocks) == (4, 3)
    swapped = manager.swap_out(slots[:1])
    manager.take_copies()
    for n in (16, 5):
        manager.allocate(n)
    assert manager.num_free_blocks == 0
    with pytest.raises(NoFreeBlocksError, match="at most the 0 free blocks"):
        manager.swap_in(swapped)
    manager.free(slots[1])
    manager.swap_in(swapped)
    manager.check_integrity()


def test_no_rows_to_come_back_to():
    manager = make_manager(max_sequences=2)
    slot = manager.allocate(1)
    swapped = manager.swap_out([slot, *manager.fork(slot)])
    manager.take_copies()
    manager.allocate(1)
    with pytest.raises(NoFreeBlocksError, match="2 sequences do not fit in the 1 free rows"):
        manager.swap_in(swapped)
    assert (manager.num_used_blocks, manager.num_free_slots) == (1, 1)
    manager.check_integrity()


def test_bad_arguments_are_refused():
    manager = make_manager()
    slot = manager.allocate(1)
    for slots in ([], [slot, slot]):
        with pytest.raises(ValueError, match="slots must be distinct and at least one"):
            manager.swap_out(slots)
    with pytest.raises(ValueError, match="holds a sequence"):
        manager.swap_out([slot, slot + 1])
    with pytest.raises(ValueError, match="num_swap_blocks must be >= 0, got -1"):
        make_manager(num_swap_blocks=-1)
    assert not make_manager(num_swap_blocks=0).num_free_swap_blocks


def test_contents_that_are_still_moving_are_not_swapped_out():
    manager = make_manager()
    slot = manager.allocate(6)
    (fork,) = manager.fork(slot)
    manager.append(fork, 1)
    assert not manager.can_swap_out([fork])
    with pytest.raises(ValueError, match="must hold their contents"):
        manager.swap_out([fork])
    manager.take_copies()
    swapped = manager.swap_out([fork])
    with pytest.raises(ValueError, match="after it, not in it"):
        manager.swap_in(swapped)
    manager.take_copies()
    (fork,) = manager.swap_in(swapped)
    assert not manager.can_swap_out([fork])
    with pytest.raises(ValueError, match="must hold their contents"):
        manager.swap_out([fork])
    manager.check_integrity()


@pytest.mark.parametrize("damage", ["leaked", "held twice"])
def test_integrity_check_sees_damage(damage):
    manager = make_manager()
    manager.swap_out([manager.allocate(8)])
    manager.check_integrity()
    if damage == "leaked":
        manager._swap_space._free.pop()
    else:
        (held,) = manager._swapped.values()
        held[0] = held[1]
    with pytest.raises(AssertionError, match="swap blocks"):
        manager.check_integrity()
