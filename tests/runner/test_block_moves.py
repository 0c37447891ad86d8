"""Blocks that the device moves, against a NumPy model; bitwise, so NaN is a value like others."""

import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jpaged.runner import block_moves
from jpaged.runner.block_moves import BlockMoves, list_lengths
from jpaged.runner.compilations import CompilationCounter
from pallas_kernels import aot

NUM_BLOCKS = 24  # of a MovesCase
few_examples = settings(max_examples=40, deadline=None, derandomize=True, database=None)
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def pairs_of_blocks():
    """(sources, destinations): no block in both, sources more than once."""

    def of(order, count, stride):
        written, readable = order[:count], order[count:]
        return [readable[i * stride % len(readable)] for i in range(count)], written

    return st.builds(
        of, st.permutations(range(NUM_BLOCKS)), st.integers(0, NUM_BLOCKS - 1), st.integers(0, 9)
    )


@both_dtypes
def test_copies_change_their_destinations_and_nothing_else(make_moves_case, dtype):
    case = make_moves_case(dtype)

    @few_examples
    @given(pairs_of_blocks())
    def check(pairs):
        sources, destinations = pairs
        untouched = set(range(NUM_BLOCKS)) - set(sources)
        before = case.random_pools(poisoned=untouched)
        expected = tuple(array.copy() for array in before)
        for source, destination in zip(sources, destinations, strict=True):
            expected[0][:, destination] = before[0][:, source]
            expected[1][destination] = before[1][source]
        pools = case.moves.copy(case.on_device(before), sources, destinations)
        case.assert_same_bits(pools, expected)

    check()


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([1, 2], [2, 3], r"destinations must not be sources as well, got both: \[2\]"),
        ([4], [4], r"destinations must not be sources as well, got both: \[4\]"),
        ([1, 2], [3, 3], "destinations must be distinct"),
        ([1], [2, 3], r"sources must be as many as destinations \(2\), got 1"),
        ([NUM_BLOCKS], [2], r"sources must be in 0 \.\. 23, got \[24\]"),
        ([1], [-1], r"destinations must be in 0 \.\. 23, got \[-1\]"),
        ([[1]], [2], "sources must be a list of blocks"),
    ],
)
def test_copies_that_are_no_copy_on_write_are_refused(
    make_moves_case, sources, destinations, message
):
    case = make_moves_case()
    pools = case.on_device(case.random_pools())
    with pytest.raises(ValueError, match=message):
        case.moves.copy(pools, sources, destinations)
    assert not any(array.is_deleted() for array in pools)


@pytest.mark.parametrize(
    ("bytes_per_block", "num_blocks", "cpu", "gpu"),
    [
        (8 * 1024, 10_000, (8, 64, 512), (8, 64, 512)),
        (737_344, 10_000, (5,), (8, 22)),  # SmolLM2 in float32, blocks of 16
        (2 * 2**20, 10_000, (2,), (8,)),  # Llama 3 8B in bfloat16, blocks of 16
        (100 * 2**20, 10_000, (1,), (1,)),
        (8 * 1024, 3, (3,), (3,)),
    ],
)
def test_lists_are_padded_to_few_lengths(bytes_per_block, num_blocks, cpu, gpu):
    assert list_lengths(bytes_per_block, num_blocks, "cpu") == cpu
    assert list_lengths(bytes_per_block, num_blocks, "gpu") == gpu


@given(count=st.integers(0, 2000), bytes_per_block=st.integers(1, 2**25))
@settings(few_examples, max_examples=200)
def test_the_calls_of_a_list_cover_it(count, bytes_per_block):
    moves = BlockMoves(
        (1, 2000, 2, 1, 1, 1), "float32", device=jax.devices()[0], backend="xla", swapping=False,
        lengths=list_lengths(bytes_per_block, 2000, "cpu"),
    )  # fmt: skip
    calls = list(moves.split(count))
    assert [i for part, _ in calls for i in range(count)[part]] == list(range(count))
    assert all(length in moves.lengths for _, length in calls)
    assert len(calls) == math.ceil(count / moves.lengths[-1])


def test_without_swapping_only_copies_are_compiled(make_moves_case):
    case = make_moves_case(swapping=False)
    assert set(case.moves.programs) == {("copy", 2), ("copy", 5)}
    kinds = {kind for kind, _ in make_moves_case().moves.programs}
    assert kinds == {"copy", "gather", "scatter"}


def test_nothing_compiles_after_warmup(make_moves_case):
    case = make_moves_case()
    pools = case.on_device(case.random_pools())
    with CompilationCounter() as compilations:
        for count in range(12):
            pools = case.moves.copy(pools, list(range(count)), list(range(12, 12 + count)))
        pools = case.moves.copy(pools, np.arange(3), np.arange(5, 8))  # int64, as NumPy counts
    assert compilations.count == 0


def best_seconds(moves: BlockMoves, pools) -> dict[str, float]:
    """The shortest of many calls of the longest copy and scatter."""
    length = moves.lengths[-1]
    read, written = (np.arange(length, dtype=np.int32) + start for start in (0, length))
    data = moves.programs["gather", length](*pools, read)
    best = {"copy": math.inf, "scatter": math.inf}
    for _ in range(30):
        for kind, arguments in (("copy", (read, written)), ("scatter", (written, *data))):
            began = time.perf_counter()
            pools = moves.programs[kind, length](*pools, *arguments)
            jax.block_until_ready(pools)
            best[kind] = min(best[kind], time.perf_counter() - began)
    return best


@both_dtypes
def test_neither_memory_nor_time_of_a_move_follow_the_pool(make_moves_case, dtype):
    seconds = []
    for num_blocks in (1024, 16 * 1024):
        shape = (2, num_blocks, 2, 2, 16, 16)
        moves = make_moves_case(dtype, shape=shape, lengths=(32,)).moves
        pools = jnp.zeros(shape, moves.dtype), jnp.zeros((num_blocks, 16), jnp.int32)
        size = sum(array.nbytes for array in pools)
        call = 32 * moves.bytes_per_block
        for (kind, _), program in moves.programs.items():
            memory = program.memory_analysis()
            assert memory.alias_size_in_bytes == (0 if kind == "gather" else size), kind
            assert memory.temp_size_in_bytes < 1.5 * call, kind
        seconds.append(best_seconds(moves, pools))
    # Copying 64 MiB or more takes 20 ms and more, a call well under one: the bound
    # leaves room for a busy machine, none for a copy.
    for kind, small in seconds[0].items():
        assert seconds[1][kind] < 1.5 * small + 0.005, kind


@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_moves_on_an_h200_leave_the_pools_in_place(backend):
    pytest.importorskip(
        "jax_plugins.xla_cuda12",
        reason="compiling for a GPU needs JAX's CUDA plugin: the extra `aot`",
    )
    L, N, K, B, D = 4, 16 * 1024, 8, 16, 128  # four layers of Llama 3 8B
    pools = (
        jax.ShapeDtypeStruct((L, N, 2, K, B, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((N, B), jnp.int32),
    )
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    data = (
        jax.ShapeDtypeStruct((8, L, 2, K, B, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((8, B), jnp.int32),
    )
    size = sum(math.prod(pool.shape) * pool.dtype.itemsize for pool in pools)
    for function, arguments, donated in (
        (block_moves.copy, (ids, ids), (0, 1)),
        (block_moves.gather, (ids,), ()),
        (block_moves.scatter, (ids, *data), (0, 1)),
    ):

        def run(*args, function=function):
            return function(*args, backend=backend)

        compiled = aot.compile_for(run, *pools, *arguments, gpu="H200", donate_argnums=donated)
        assert compiled.alias_bytes == (size if donated else 0), function.__name__
        assert compiled.temp_bytes < 2**23, function.__name__
