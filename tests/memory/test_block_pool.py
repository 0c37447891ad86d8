"""BlockPool: the free list and the reference counts."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jpaged.memory import BlockPool, NoFreeBlocksError


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, np.int32)


def test_blocks_are_handed_out_once():
    pool = BlockPool(num_blocks=5, block_size=16)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first.dtype == np.int32
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 5)
    assert pool.ref_counts.tolist() == [1] * 5


def test_the_block_freed_last_is_handed_out_first():
    pool = BlockPool(4, 16)
    blocks = pool.allocate(4)
    pool.free(blocks[:1])
    pool.free(blocks[2:])
    assert pool.allocate(3).tolist() == [*blocks[2:], blocks[0]]


def test_too_many_blocks_takes_none():
    pool = BlockPool(4, 16)
    pool.allocate(2)
    with pytest.raises(NoFreeBlocksError, match=r"2 free blocks of 4, got 3"):
        pool.allocate(3)
    assert pool.num_free == 2
    pool.check_integrity()


def test_a_shared_block_is_free_when_nobody_names_it():
    pool = BlockPool(2, 16)
    blocks = pool.allocate(2)
    pool.share(blocks[:1])
    pool.free(blocks)
    assert (pool.num_free, pool.ref_counts[blocks].tolist()) == (1, [1, 0])
    pool.free(blocks[:1])
    assert pool.num_free == 2
    pool.check_integrity()


@pytest.mark.parametrize("operation", ["free", "share"])
@pytest.mark.parametrize(
    "wrong", [ids(1), ids(0, 1), ids(0, 0), ids(-1), ids(4)], ids=lambda blocks: str(blocks)
)
def test_blocks_that_are_free_repeated_or_unknown_are_refused(operation, wrong):
    pool = BlockPool(4, 16)
    assert pool.allocate(1).tolist() == [0]
    with pytest.raises(ValueError, match=r"blocks must be (in use|distinct ids in \[0, 4\))"):
        getattr(pool, operation)(wrong)
    assert (pool.num_free, pool.ref_counts.tolist()) == (3, [1, 0, 0, 0])
    pool.check_integrity()


def test_nothing_is_a_number_of_blocks_too():
    pool = BlockPool(1, 16)
    assert pool.allocate(0).shape == (0,)
    pool.free(ids())
    pool.share(ids())
    with pytest.raises(ValueError, match="n must be >= 0, got -1"):
        pool.allocate(-1)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_sizes_are_positive(num_blocks, block_size):
    with pytest.raises(ValueError, match=r"must be >= 1, got 0"):
        BlockPool(num_blocks, block_size)


def test_integrity_check_sees_damage():
    pool = BlockPool(3, 16)
    (block,) = pool.allocate(1)
    pool.ref_counts[block] = 0  # used, but nobody says so: leaked
    with pytest.raises(AssertionError, match="the free list"):
        pool.check_integrity()
    pool.ref_counts[block] = -1
    with pytest.raises(AssertionError, match="negative"):
        pool.check_integrity()


class PoolAgainstCounts(RuleBasedStateMachine):
    """Any order of operations, against a plain list of counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 4)
        self.counts = [0] * 6

    @property
    def in_use(self) -> list[int]:
        return [block for block, count in enumerate(self.counts) if count]

    @rule(n=st.integers(0, 7))
    def allocate(self, n):
        if n > self.counts.count(0):
            with pytest.raises(NoFreeBlocksError):
                self.pool.allocate(n)
            return
        blocks = self.pool.allocate(n).tolist()
        assert len(set(blocks)) == n
        for block in blocks:
            assert self.counts[block] == 0
            self.counts[block] = 1

    @precondition(lambda self: self.in_use)
    @rule(data=st.data(), change=st.sampled_from([1, -1]))
    def share_or_free(self, data, change):
        blocks = data.draw(st.lists(st.sampled_from(self.in_use), unique=True))
        (self.pool.share if change == 1 else self.pool.free)(ids(*blocks))
        for block in blocks:
            self.counts[block] += change

    @invariant()
    def agrees(self):
        assert self.pool.ref_counts.tolist() == self.counts
        assert self.pool.num_free == self.counts.count(0)
        assert self.pool.num_used == len(self.in_use)
        self.pool.check_integrity()


TestPoolAgainstCounts = PoolAgainstCounts.TestCase
TestPoolAgainstCounts.settings = settings(
    max_examples=50, stateful_step_count=30, deadline=None, derandomize=True
)
