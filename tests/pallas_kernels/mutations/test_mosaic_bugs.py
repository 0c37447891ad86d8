"""Bugs planted in the Mosaic kernels: the suite's own tests must fail, each in a process of its own
with a time limit, since a lost arrival at a barrier makes a kernel wait for ever.

Not seen by JAX's interpreter, and so not in the list:

  commit_smem before wgmma      Memory that a kernel has written is seen at once, by all.
  writes past an array's end    They are dropped, where a GPU faults: slots and destinations that
                                are too large. Negative ones, and reads past the end, are seen.
"""

import time
from collections.abc import Callable

import jax
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need JAX 0.11.2"
    ),
]

WALK = "test_mosaic_walk.py::test_long_walks[1-plain]"
PARTS = "test_mosaic_walk.py::test_long_walks[2-window and sinks]"
WRITE = "test_mosaic_pool.py::test_write_kv[bfloat16-5]"
CYCLE = "test_mosaic_pool.py::test_copies_in_a_cycle"
COPY = "test_mosaic_pool.py::test_copy_blocks[bfloat16-True]"

# What is wrong: the module, a text that it has once, what stands in its place, and a test.
BUGS = {
    "decode does not wait for keys": (
        "mosaic_decode",
        'plgpu.barrier_wait(scratch["keys_ready"].at[slot])',
        "pass",
        WALK,
    ),
    "decode does not wait for values": (
        "mosaic_decode",
        'plgpu.barrier_wait(scratch["values_ready"].at[slot])',
        "pass",
        WALK,
    ),
    "ragged does not wait for keys": (
        "mosaic_ragged",
        'plgpu.barrier_wait(scratch["keys_ready"].at[slot])',
        "pass",
        WALK,
    ),
    "ragged does not wait for values": (
        "mosaic_ragged",
        'plgpu.barrier_wait(scratch["values_ready"].at[slot])',
        "pass",
        WALK,
    ),
    "decode does not wait for queries": (
        "mosaic_decode",
        'plgpu.barrier_wait(scratch["queries_ready"])',
        "pass",
        WALK,
    ),
    "ragged does not wait for queries": (
        "mosaic_ragged",
        'plgpu.barrier_wait(scratch["queries_ready"])',
        "pass",
        WALK,
    ),
    "a barrier waits for one copy too many": (
        "mosaic_tiles",
        "num_arrivals=config.copies,",
        "num_arrivals=config.copies + 1,",
        WALK,
    ),
    "a tile is copied over the one in use": (
        "mosaic_tiles",
        "        state = tile(walk.tile(step) * config.keys, rem(step, stages), state, masked)\n"
        "        ahead = step + stages\n"
        "        pl.when(ahead < steps)(partial(copy, ahead, blocks))\n",
        "        ahead = step + stages\n"
        "        pl.when(ahead < steps)(partial(copy, ahead, blocks))\n"
        "        state = tile(walk.tile(step) * config.keys, rem(step, stages), state, masked)\n",
        WALK,
    ),
    "V's tail is not zeroed": (
        "mosaic_tiles",
        "part[...] = jnp.where(seen, old, jnp.zeros_like(old))",
        "part[...] = old",
        WALK,
    ),
    "a page past the end is read": (
        "mosaic_tiles",
        "jnp.clip(first + i, first_block, last_block)",
        "first + i",
        WALK,
    ),
    "a key of the future is seen": (
        "mosaic_tiles",
        "seen = key <= position",
        "seen = key <= position + 1",
        WALK,
    ),
    "the query's own key is not seen": (
        "mosaic_tiles",
        "seen = key <= position",
        "seen = key < position",
        WALK,
    ),
    "a window one key too large": (
        "mosaic_tiles",
        "seen &= key > position - window",
        "seen &= key >= position - window",
        PARTS,
    ),
    "no mask on the last tile": (
        "mosaic_tiles",
        "outer = jnp.minimum(jnp.maximum(outer, inner), end)",
        "outer = end",
        WALK,
    ),
    "a part loses its last tile": (
        "mosaic_tiles",
        "end = jnp.minimum((part + 1) * tiles_a_part, num_tiles) + first_tile",
        "end = jnp.minimum((part + 1) * tiles_a_part - 1, num_tiles) + first_tile",
        PARTS,
    ),
    "a part repeats the tile before it": (
        "mosaic_tiles",
        "begin = jnp.minimum(part * tiles_a_part, num_tiles) + first_tile",
        "begin = jnp.maximum(jnp.minimum(part * tiles_a_part, num_tiles) - 1, 0) + first_tile",
        PARTS,
    ),
    "sinks are counted once a part": (
        "mosaic_decode",
        "sinks += jnp.where(is_whole, 0.0, HIDDEN)",
        "sinks += 0.0",
        PARTS,
    ),
    "no sinks in the ragged kernel": (
        "mosaic_ragged",
        "if refs.sinks is not None:",
        "if False:",
        PARTS,
    ),
    "merged with weights to the wrong base": (
        "mosaic_decode",
        "weight = jnp.exp2(lse - maximum)",
        "weight = jnp.exp(lse - maximum)",
        PARTS,
    ),
    "the merge repeats the last part": (
        "mosaic_decode",
        "lses.append(lse + jnp.where(part < num_parts, 0.0, HIDDEN))",
        "lses.append(lse)",
        PARTS,
    ),
    "a tile's rows past its tokens are written": (
        "mosaic_ragged",
        "    _copy_tokens(num_tokens, config, copy)\n    plgpu.wait_smem_to_gmem(0)",
        "    _copy_tokens(jnp.minimum(num_tokens + 1, config.tokens), config, copy)\n"
        "    plgpu.wait_smem_to_gmem(0)",
        WALK,
    ),
    "negative slots are written": (
        "mosaic_pool",
        "@pl.when((slot >= 0) & (slot < num_blocks * block_size))",
        "@pl.when(slot < num_blocks * block_size)",
        WRITE,
    ),
    "tokens are written before they are there": (
        "mosaic_pool",
        "        plgpu.barrier_wait(barrier)\n        for token, slot in enumerate(slot_of):",
        "        for token, slot in enumerate(slot_of):",
        WRITE,
    ),
    "pairs are copied before all are read": (
        "mosaic_pool",
        "        plgpu.barrier_wait(barrier)\n        plgpu.commit_smem()",
        "        plgpu.commit_smem()",
        CYCLE,
    ),
    "copies to blocks that do not exist": (
        "mosaic_pool",
        "return (destination >= 0) & (destination < num_blocks)",
        "return destination < num_blocks",
        COPY,
    ),
    "a kernel ends before its copies do": (
        "mosaic_pool",
        "lax.fori_loop(0, count, write, ())\n        plgpu.wait_smem_to_gmem(0)",
        "lax.fori_loop(0, count, write, ())",
        CYCLE,
    ),
    "reads and writes of blocks are not ordered": (
        "mosaic_pool",
        "plgpu.commit_smem()  # orders",
        "pass  # orders",
        CYCLE,
    ),
}
LIMIT = 300  # seconds; on an idle core a test takes about 8
# These wait for ever; that they do is known sooner, by so many times what the test takes otherwise.
WAITING = {"a barrier waits for one copy too many", "copies to blocks that do not exist"}
FOR_EVER = 3


@pytest.fixture(scope="session")
def seconds_without_a_bug() -> dict[str, float]:
    """Of each test that ran so far."""
    return {}


@pytest.fixture
def run_right(run_child, seconds_without_a_bug) -> Callable[[str], float]:
    """Runs a test on a copy without a bug, once; returns the seconds that it took."""

    def run_right(test: str) -> float:
        if test not in seconds_without_a_bug:
            began = time.monotonic()
            status, printed = run_child(test, LIMIT)
            assert status == 0, printed
            seconds_without_a_bug[test] = time.monotonic() - began
        return seconds_without_a_bug[test]

    return run_right


@pytest.mark.parametrize("test", sorted({bug[3] for bug in BUGS.values()}))
def test_the_suite_passes_on_a_copy_without_a_bug(test, run_right):
    run_right(test)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name, run_child, run_right):
    *bug, test = BUGS[name]
    limit = max(60, FOR_EVER * run_right(test)) if name in WAITING else LIMIT
    status, printed = run_child(test, limit, bug)
    assert status in (None, 1), printed
