"""BlockManager: block tables that grow on demand."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jpaged.memory import BlockManager, NoFreeBlocksError


def make_manager(num_blocks=8, block_size=4, max_sequences=4, max_blocks_per_sequence=8):
    return BlockManager(num_blocks, block_size, max_sequences, max_blocks_per_sequence)


def rows(*slots: int) -> np.ndarray:
    return np.array(slots, np.int32)


def test_blocks_are_taken_on_demand():
    manager = make_manager()
    slot = manager.allocate(3)
    assert (manager.num_blocks_of(slot), manager.num_used_blocks) == (1, 1)
    assert manager.blocks_needed(slot, 1) == 0
    manager.append(slot, 1)
    assert (manager.num_blocks_of(slot), manager.num_tokens[slot]) == (1, 4)
    assert manager.blocks_needed(slot, 1) == 1
    before = manager.block_table(slot).tolist()
    manager.append(slot, 9)
    assert manager.num_tokens[slot] == 13
    assert manager.block_table(slot).tolist()[:1] == before
    assert len(set(manager.block_table(slot).tolist())) == 4
    assert manager.num_free_blocks == 4
    manager.check_integrity()


def test_free_gives_everything_back():
    manager = make_manager()
    slots = [manager.allocate(n) for n in (1, 4, 5)]
    assert manager.num_free_slots == 1
    for slot in slots:
        manager.free(slot)
    assert (manager.num_free_blocks, manager.num_free_slots) == (8, 4)
    assert not manager.num_tokens.any()
    manager.check_integrity()
    with pytest.raises(ValueError, match=f"holds a sequence, got {slots[0]}"):
        manager.free(slots[0])


def test_no_blocks_changes_nothing():
    manager = make_manager(num_blocks=3)
    slot = manager.allocate(8)
    tables = manager.tables.copy()
    for grow in (
        lambda: manager.allocate(5),
        lambda: manager.append(slot, 5),
        lambda: [manager.append_one(rows(slot)) for _ in range(5)],
    ):
        with pytest.raises(NoFreeBlocksError):
            grow()
        manager.check_integrity()
    assert manager.num_tokens[slot] == 12  # the last of these took four of its five tokens
    np.testing.assert_array_equal(manager.tables[slot, :2], tables[slot, :2])
    assert manager.num_free_slots == 3


def test_no_rows_changes_nothing():
    manager = make_manager(max_sequences=1)
    manager.allocate(1)
    with pytest.raises(NoFreeBlocksError, match="all 1 rows"):
        manager.allocate(1)
    assert manager.num_used_blocks == 1


def test_a_table_has_an_end():
    manager = make_manager(num_blocks=8, block_size=4, max_blocks_per_sequence=2)
    slot = manager.allocate(8)
    with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
        manager.append(slot, 1)
    with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
        manager.append_one(rows(slot))
    with pytest.raises(ValueError, match="at most 8 tokens, got 9"):
        manager.allocate(9)
    assert manager.num_used_blocks == 2
    manager.check_integrity()


def test_bad_arguments_are_refused():
    manager = make_manager()
    slot = manager.allocate(1)
    with pytest.raises(ValueError, match="num_tokens must be >= 1, got 0"):
        manager.allocate(0)
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        manager.append(slot, -1)
    for unused in (slot + 1, -1, 4):
        with pytest.raises(ValueError, match="holds a sequence"):
            manager.append(unused, 1)
    with pytest.raises(ValueError, match="hold sequences"):
        manager.append_one(rows(slot, slot + 1))
    for name in ("num_blocks", "block_size", "max_sequences", "max_blocks_per_sequence"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            make_manager(**{name: 0})


def test_append_one_is_append_for_each():
    together, apart = make_manager(num_blocks=40), make_manager(num_blocks=40)
    for manager in (together, apart):
        for n in (1, 3, 4, 8):
            manager.allocate(n)
    slots = rows(3, 0, 2, 1)
    for _ in range(10):
        assert together.blocks_needed_one(slots) == sum(
            apart.blocks_needed(slot, 1) for slot in slots
        )
        together.append_one(slots)
        for slot in slots:
            apart.append(slot, 1)
        assert together.num_free_blocks == apart.num_free_blocks
        together.check_integrity()
    np.testing.assert_array_equal(together.num_tokens, apart.num_tokens)
    for slot in slots:  # the same blocks too
        np.testing.assert_array_equal(together.block_table(slot), apart.block_table(slot))
    together.append_one(rows())


def test_a_block_table_is_a_read_only_view():
    manager = make_manager()
    table = manager.block_table(manager.allocate(5))
    assert table.base is not None
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 3


def test_shares_of_used_slots():
    manager = make_manager()
    assert manager.slots_used_share == 1.0
    manager.allocate(4)
    manager.allocate(5)
    assert manager.num_used_token_slots == 9
    assert manager.slots_used_share == 9 / 12


def test_block_size_1_wastes_nothing():
    manager = make_manager(num_blocks=5, block_size=1)
    slots = rows(manager.allocate(1), manager.allocate(2))
    manager.append_one(slots)
    assert manager.num_free_blocks == 0
    assert manager.slots_used_share == 1.0
    manager.check_integrity()


@pytest.mark.parametrize("damage", ["count", "shared", "twice", "row"])
def test_integrity_check_sees_damage(damage):
    manager = make_manager()
    first, second = manager.allocate(8), manager.allocate(8)
    manager.check_integrity()
    if damage == "count":
        manager.pool.ref_counts[manager.tables[first, 0]] += 1
    elif damage == "shared":
        manager.tables[first, 0] = manager.tables[second, 0]
    elif damage == "twice":
        manager.tables[first, 0] = manager.tables[first, 1]
    else:
        manager.num_tokens[first] = 0
    with pytest.raises(AssertionError):
        manager.check_integrity()


class ManagerAgainstLists(RuleBasedStateMachine):
    """Any order of operations in a tiny pool, against a list of tokens a sequence.

    Each token's value is unique and "written" to the token slot that the table names, so a block
    that two sequences hold, or one that moves, shows as a wrong value when read back.
    """

    NUM_BLOCKS, BLOCK_SIZE, ROWS, COLUMNS = 7, 3, 3, 4

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(self.NUM_BLOCKS, self.BLOCK_SIZE, self.ROWS, self.COLUMNS)
        self.memory = np.full(self.NUM_BLOCKS * self.BLOCK_SIZE, -1)
        self.tokens: dict[int, list[int]] = {}
        self.written = 0

    def blocks(self, num_tokens: int) -> int:
        return (num_tokens + self.BLOCK_SIZE - 1) // self.BLOCK_SIZE

    def free_blocks(self) -> int:
        return self.NUM_BLOCKS - sum(self.blocks(len(t)) for t in self.tokens.values())

    def write(self, slot: int, n: int) -> None:
        for _ in range(n):
            block, offset = divmod(len(self.tokens[slot]), self.BLOCK_SIZE)
            physical = self.manager.block_table(slot)[block] * self.BLOCK_SIZE + offset
            self.memory[physical] = self.written
            self.tokens[slot].append(self.written)
            self.written += 1

    @rule(n=st.integers(1, 13))
    def allocate(self, n):
        if n > self.COLUMNS * self.BLOCK_SIZE:
            with pytest.raises(ValueError, match="holds at most"):
                self.manager.allocate(n)
        elif self.blocks(n) > self.free_blocks() or len(self.tokens) == self.ROWS:
            with pytest.raises(NoFreeBlocksError):
                self.manager.allocate(n)
        else:
            slot = self.manager.allocate(n)
            assert slot not in self.tokens
            self.tokens[slot] = []
            self.write(slot, n)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), n=st.integers(0, 7))
    def append(self, data, n):
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        total = len(self.tokens[slot]) + n
        needed = self.blocks(total) - self.blocks(len(self.tokens[slot]))
        assert self.manager.blocks_needed(slot, n) == needed
        if total > self.COLUMNS * self.BLOCK_SIZE:
            with pytest.raises(ValueError, match="holds at most"):
                self.manager.append(slot, n)
        elif needed > self.free_blocks():
            with pytest.raises(NoFreeBlocksError):
                self.manager.append(slot, n)
        else:
            self.manager.append(slot, n)
            self.write(slot, n)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def append_one(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.tokens)), unique=True))
        needed = sum(len(self.tokens[slot]) % self.BLOCK_SIZE == 0 for slot in slots)
        assert self.manager.blocks_needed_one(rows(*slots)) == needed
        full = any(len(self.tokens[slot]) == self.COLUMNS * self.BLOCK_SIZE for slot in slots)
        if full:
            with pytest.raises(ValueError, match="holds at most"):
                self.manager.append_one(rows(*slots))
        elif needed > self.free_blocks():
            with pytest.raises(NoFreeBlocksError):
                self.manager.append_one(rows(*slots))
        else:
            self.manager.append_one(rows(*slots))
            for slot in slots:
                self.write(slot, 1)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data):
        slot = data.draw(st.sampled_from(sorted(self.tokens)))
        self.manager.free(slot)
        del self.tokens[slot]

    @invariant()
    def agrees(self):
        self.manager.check_integrity()
        assert self.manager.num_free_blocks == self.free_blocks()
        assert self.manager.num_free_slots == self.ROWS - len(self.tokens)
        for slot, tokens in self.tokens.items():
            table = self.manager.block_table(slot)
            assert self.manager.num_tokens[slot] == len(tokens)
            assert 0 <= len(table) * self.BLOCK_SIZE - len(tokens) <= self.BLOCK_SIZE - 1
            held = self.memory.reshape(-1, self.BLOCK_SIZE)[table].ravel()[: len(tokens)]
            assert held.tolist() == tokens


TestManagerAgainstLists = ManagerAgainstLists.TestCase
TestManagerAgainstLists.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, derandomize=True
)


def test_a_million_blocks():
    manager = BlockManager(1_000_000, 16, 1024, 8192)
    slots = rows(*(manager.allocate(16 * 100) for _ in range(1024)))
    manager.append_one(slots)
    assert manager.num_used_blocks == 1024 * 101
    for slot in slots.tolist():
        manager.free(slot)
    assert manager.num_free_blocks == 1_000_000
    manager.check_integrity()
