"""fork and copy-on-write: sequences that share blocks until one of them writes."""

import numpy as np
import pytest

from jpaged.memory import BlockManager, NoFreeBlocksError


def make_manager(num_blocks=12, block_size=4, max_sequences=6, max_blocks_per_sequence=8, **kwargs):
    return BlockManager(num_blocks, block_size, max_sequences, max_blocks_per_sequence, **kwargs)


def rows(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


def tables(manager, slots):
    return [manager.block_table(slot).tolist() for slot in slots]


def copies(manager):
    sources, destinations = manager.take_copies()
    assert sources.dtype == destinations.dtype == np.int32
    return list(zip(sources.tolist(), destinations.tolist(), strict=True))


def test_forks_share_every_block():
    manager = make_manager()
    slot = manager.allocate(6)
    forks = manager.fork(slot, 2)
    assert len({slot, *forks}) == 3
    assert tables(manager, forks) == tables(manager, [slot]) * 2
    assert manager.num_tokens[forks].tolist() == [6, 6]
    assert (manager.num_used_blocks, manager.num_shared_blocks) == (2, 2)
    assert manager.num_table_blocks == 6
    assert manager.pool.ref_counts[manager.block_table(slot)].tolist() == [3, 3]
    assert copies(manager) == []
    manager.check_integrity()
    for each in (slot, *forks):
        manager.free(each)
        manager.check_integrity()
    assert manager.num_free_blocks == 12


def test_only_the_last_of_the_sharers_writes_in_place():
    """Of k sequences that all append, k - 1 copy."""
    manager = make_manager()
    slot = manager.allocate(6)
    shared = manager.block_table(slot)[-1]
    forks = manager.fork(slot, 2)
    found = []
    for each, needed in ((slot, 1), (forks[0], 1), (forks[1], 0)):
        assert manager.blocks_needed(each, 1) == needed
        free = manager.num_free_blocks
        manager.append(each, 1)
        assert manager.num_free_blocks == free - needed
        found.append(int(manager.block_table(each)[-1]))
        manager.check_integrity()
    assert found[2] == shared
    assert copies(manager) == [(shared, found[0]), (shared, found[1])]
    assert copies(manager) == []  # taken
    assert manager.copy_on_write_blocks == 2
    assert (manager.num_used_blocks, manager.num_shared_blocks) == (4, 1)


def test_append_one_copies_for_all_but_the_last():
    manager = make_manager()
    slot = manager.allocate(6)
    forks = manager.fork(slot, 2)
    other = manager.allocate(4)  # takes a block for its next token, and copies none
    shared = int(manager.block_table(slot)[-1])
    order = rows(forks[1], other, slot, forks[0])
    assert manager.blocks_needed_one(order) == 3
    free = manager.num_free_blocks
    manager.append_one(order)
    assert manager.num_free_blocks == free - 3
    last = {each: int(manager.block_table(each)[-1]) for each in order.tolist()}
    assert last[forks[0]] == shared
    assert copies(manager) == [(shared, last[forks[1]]), (shared, last[slot])]
    assert len(set(last.values())) == 4
    assert manager.blocks_needed_one(order) == 0
    manager.append_one(order)
    assert copies(manager) == []
    manager.check_integrity()


def test_whoever_does_not_append_keeps_the_block():
    manager = make_manager()
    slot = manager.allocate(6)
    first, second = manager.fork(slot, 2)
    shared = int(manager.block_table(slot)[-1])
    assert manager.blocks_needed_one(rows(first, second)) == 2
    manager.append_one(rows(first, second))
    assert int(manager.block_table(slot)[-1]) == shared
    assert [source for source, _ in copies(manager)] == [shared, shared]
    manager.append(slot, 1)  # alone by now
    assert int(manager.block_table(slot)[-1]) == shared
    assert copies(manager) == []


def test_append_one_is_append_for_each_of_the_sharers():
    together, apart = make_manager(num_blocks=30), make_manager(num_blocks=30)
    for manager in (together, apart):
        for n in (3, 4, 6):
            manager.allocate(n)
        manager.fork(2, 2)
        manager.fork(0)
    for slots in (rows(4, 0, 3, 1), rows(5, 4, 3, 2, 1, 0), rows(2, 5)):
        needed = together.blocks_needed_one(slots)
        free = together.num_free_blocks
        together.append_one(slots)
        assert free - together.num_free_blocks == needed
        for slot in slots.tolist():
            apart.append(slot, 1)
        assert copies(together) == copies(apart)
        assert tables(together, range(6)) == tables(apart, range(6))
        together.check_integrity()


def test_a_full_last_block_is_never_copied():
    manager = make_manager()
    slot = manager.allocate(8)
    (fork,) = manager.fork(slot)
    manager.append_one(rows(slot, fork))
    assert copies(manager) == []
    assert manager.block_table(slot)[:2].tolist() == manager.block_table(fork)[:2].tolist()
    assert manager.block_table(slot)[2] != manager.block_table(fork)[2]
    manager.check_integrity()


def test_an_append_over_several_blocks_copies_one():
    manager = make_manager()
    slot = manager.allocate(6)
    (fork,) = manager.fork(slot)
    before = manager.block_table(fork).tolist()
    assert manager.blocks_needed(fork, 7) == 3  # the copy, and two blocks behind it
    assert manager.blocks_needed(fork, 0) == 0
    manager.append(fork, 0)
    assert copies(manager) == []
    manager.append(fork, 7)
    table = manager.block_table(fork).tolist()
    assert (table[0], len(set(table)), len(table)) == (before[0], 4, 4)
    assert copies(manager) == [(before[1], table[1])]
    manager.check_integrity()


def test_a_branch_of_a_branch():
    manager = make_manager()
    slot = manager.allocate(5)
    (child,) = manager.fork(slot)
    manager.append(child, 1)
    manager.take_copies()
    (grandchild,) = manager.fork(child)
    assert tables(manager, [grandchild]) == tables(manager, [child])
    assert manager.blocks_needed_one(rows(slot, child, grandchild)) == 1
    manager.append_one(rows(slot, child, grandchild))
    assert manager.num_used_blocks == 4  # the first block, and a last one each
    manager.check_integrity()


def test_no_room_for_a_copy_changes_nothing():
    manager = make_manager(num_blocks=3)
    slot = manager.allocate(6)
    forks = manager.fork(slot, 2)
    before = tables(manager, [slot, *forks])
    with pytest.raises(NoFreeBlocksError):
        manager.append_one(rows(slot, *forks))
    with pytest.raises(NoFreeBlocksError):
        manager.append(slot, 3)
    assert tables(manager, [slot, *forks]) == before
    assert (manager.num_free_blocks, manager.copy_on_write_blocks) == (1, 0)
    assert copies(manager) == []
    manager.check_integrity()


def test_no_rows_for_forks_changes_nothing():
    manager = make_manager(max_sequences=3)
    slot = manager.allocate(6)
    with pytest.raises(NoFreeBlocksError, match="3 sequences do not fit in the 2 free rows"):
        manager.fork(slot, 3)
    assert (manager.num_free_slots, manager.num_shared_blocks) == (2, 0)
    assert manager.fork(slot, 0) == []
    assert len(manager.fork(slot, 2)) == 2
    with pytest.raises(NoFreeBlocksError, match="all 3 rows"):
        manager.fork(slot)
    manager.check_integrity()


def test_bad_arguments_are_refused():
    manager = make_manager()
    slot = manager.allocate(1)
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        manager.fork(slot, -1)
    with pytest.raises(ValueError, match="holds a sequence"):
        manager.fork(slot + 1)


def test_what_is_not_copied_yet_is_not_forked():
    """Its copy would be read before it is written."""
    manager = make_manager()
    slot = manager.allocate(6)
    (fork,) = manager.fork(slot)
    manager.append(fork, 1)
    with pytest.raises(ValueError, match=f"got {fork}"):
        manager.fork(fork)
    manager.take_copies()
    manager.fork(fork)
    manager.check_integrity()


def test_a_block_given_back_in_the_step_of_its_copy_is_not_written_twice():
    manager = make_manager(num_blocks=3)
    slot = manager.allocate(6)
    first, second = manager.fork(slot, 2)
    manager.append(first, 1)
    manager.free(first)  # an abort
    manager.append(second, 1)  # takes the same block
    taken = int(manager.block_table(second)[-1])
    assert copies(manager) == [(int(manager.block_table(slot)[-1]), taken)]
    (fork,) = manager.fork(slot)
    manager.free(second)
    manager.append(fork, 1)
    manager.free(fork)
    manager.allocate(1)  # takes it too
    assert copies(manager) == []


def test_token_slots_of_shared_blocks_count_once():
    manager = make_manager()
    slot = manager.allocate(6)
    forks = manager.fork(slot, 2)
    assert (manager.num_used_token_slots, manager.slots_used_share) == (6, 6 / 8)
    manager.append_one(rows(slot, *forks))
    assert (manager.num_used_token_slots, manager.slots_used_share) == (4 + 3 * 3, 13 / 16)
    manager.free(slot)
    assert manager.num_used_token_slots == 10


@pytest.mark.parametrize("damage", ["two writers", "forgotten sharer"])
def test_integrity_check_sees_two_writers_of_a_slot(damage):
    manager = make_manager()
    slot = manager.allocate(6)
    (fork,) = manager.fork(slot)
    manager.check_integrity()
    if damage == "two writers":
        manager.num_tokens[fork] += 1
    else:
        manager._sharers.discard(fork)
    with pytest.raises(AssertionError, match="can be written by slots"):
        manager.check_integrity()
