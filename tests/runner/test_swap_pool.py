"""Blocks swapped out to host memory and back in, against a NumPy model, bitwise."""

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.runner import swap_pool
from jpaged.runner.compilations import CompilationCounter
from jpaged.runner.swap_pool import SwapPool, measure_link, swap_blocks_in

GIB = 2**30
NUM_BLOCKS = 24  # of a MovesCase
NUM_ROWS = 30
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def swaps():
    """Swaps in either direction: ("out" or "in", device blocks, rows of the store)."""

    def of(kind, count, blocks, rows):
        return kind, blocks[:count], rows[:count]

    return st.builds(
        of,
        st.sampled_from(["out", "in"]),
        st.integers(0, NUM_BLOCKS),
        st.permutations(range(NUM_BLOCKS)),
        st.permutations(range(NUM_ROWS)),
    )


@both_dtypes
def test_swaps_move_the_blocks_they_name_and_no_others(make_moves_case, dtype):
    case = make_moves_case(dtype)

    @settings(max_examples=30, deadline=None, derandomize=True, database=None)
    @given(st.sets(st.integers(0, NUM_BLOCKS - 1)), st.lists(swaps(), max_size=6))
    def check(poisoned, steps):
        kv_pool, tokens = case.random_pools(poisoned=poisoned)
        pools = case.on_device((kv_pool, tokens))
        store = SwapPool(NUM_ROWS, case.moves)
        rows_kv, rows_tokens = {}, {}
        for kind, blocks, rows in steps:
            if kind == "in":
                pairs = [pair for pair in zip(blocks, rows, strict=True) if pair[1] in rows_kv]
                pools = store.swap_in(pools, [row for _, row in pairs], [b for b, _ in pairs])
                for block, row in pairs:
                    kv_pool[:, block], tokens[block] = rows_kv[row], rows_tokens[row]
            else:
                store.swap_out(pools, blocks, rows)
                for block, row in zip(blocks, rows, strict=True):
                    rows_kv[row], rows_tokens[row] = kv_pool[:, block].copy(), tokens[block].copy()
        case.assert_same_bits(pools, (kv_pool, tokens))

    check()


@pytest.mark.parametrize(
    ("blocks", "rows", "message"),
    [
        ([1], [2, 3], r"host_blocks must be as many as device_blocks \(1\), got 2"),
        ([NUM_BLOCKS], [0], r"device_blocks must be in 0 \.\. 23, got \[24\]"),
        ([0], [NUM_ROWS], r"host_blocks must be in 0 \.\. 29, got \[30\]"),
        ([0], [-1], r"host_blocks must be in 0 \.\. 29, got \[-1\]"),
    ],
)
def test_lists_that_do_not_name_blocks_are_refused(make_moves_case, blocks, rows, message):
    case = make_moves_case()
    pools = case.on_device(case.random_pools())
    store = SwapPool(NUM_ROWS, case.moves)
    with pytest.raises(ValueError, match=message):
        store.swap_out(pools, blocks, rows)
    with pytest.raises(ValueError, match=message):
        store.swap_in(pools, rows, blocks)
    assert not any(array.is_deleted() for array in pools)
    assert store.swapped_out_bytes == 0


def test_what_is_written_is_named_once(make_moves_case):
    case = make_moves_case()
    pools = case.on_device(case.random_pools())
    store = SwapPool(NUM_ROWS, case.moves)
    with pytest.raises(ValueError, match=r"host_blocks must be distinct, got \[3, 3\]"):
        store.swap_out(pools, [1, 2], [3, 3])
    with pytest.raises(ValueError, match=r"device_blocks must be distinct, got \[3, 3\]"):
        store.swap_in(pools, [1, 2], [3, 3])
    assert not any(array.is_deleted() for array in pools)
    assert store.swapped_out_bytes == 0


def test_what_is_read_may_go_to_several_places(make_moves_case):
    case = make_moves_case()
    kv_pool, tokens = case.random_pools()
    pools = case.on_device((kv_pool, tokens))
    store = SwapPool(NUM_ROWS, case.moves)
    store.swap_out(pools, [4, 4], [7, 8])
    pools = store.swap_in(pools, [7, 8, 7], [1, 2, 3])
    for block in (1, 2, 3):
        kv_pool[:, block], tokens[block] = kv_pool[:, 4], tokens[4]
    case.assert_same_bits(pools, (kv_pool, tokens))


def test_nothing_compiles_after_warmup_and_bytes_are_counted(make_moves_case):
    case = make_moves_case()
    pools = case.on_device(case.random_pools())
    store = SwapPool(NUM_ROWS, case.moves)
    with CompilationCounter() as compilations:
        for count in range(13):
            store.swap_out(pools, np.arange(count), np.arange(count) + 10)
            pools = store.swap_in(pools, np.arange(count) + 10, np.arange(count) + 5)
    assert compilations.count == 0
    assert store.swapped_out_bytes == sum(range(13)) * case.moves.bytes_per_block


def test_rows_take_memory_once_they_are_written_to(make_moves_case):
    case = make_moves_case()
    before = psutil.Process().memory_info().rss
    store = SwapPool(4 * GIB // case.moves.bytes_per_block, case.moves)
    assert psutil.Process().memory_info().rss - before < 2**26
    store.swap_out(case.on_device(case.random_pools()), [3], [store.num_blocks - 1])
    assert psutil.Process().memory_info().rss - before < 2**26


def test_a_store_that_cannot_be_reserved_is_refused(make_moves_case):
    with pytest.raises(ValueError, match=r"swap_space_gib asks for \d+ bytes"):
        SwapPool(2**48, make_moves_case().moves)


def test_swap_space_in_blocks(make_moves_case):
    moves = make_moves_case().moves
    assert moves.bytes_per_block == 4 * 2 * 2 * 2 * 4 * 8 + 4 * 4
    assert make_moves_case("bfloat16").moves.bytes_per_block == 2 * 2 * 2 * 2 * 4 * 8 + 4 * 4
    assert swap_blocks_in(0, 1000) == 0
    assert swap_blocks_in(1.5, 2**20) == 1536
    assert swap_blocks_in(4, 4 * GIB + 1) == 0


def test_the_links_rate_counts_both_directions_and_leaves_the_pools(make_moves_case, monkeypatch):
    case = make_moves_case()
    before = case.random_pools()
    ticks = iter([0.0, 0.1, 10.0, 10.5, 20.0, 21.0, 30.0, 32.0])
    monkeypatch.setattr(swap_pool.time, "perf_counter", lambda: next(ticks))
    pools, rate = measure_link(case.moves, case.on_device(before))
    case.assert_same_bits(pools, before)
    assert rate == 2 * NUM_BLOCKS * case.moves.bytes_per_block / 1.0  # the first does not count
