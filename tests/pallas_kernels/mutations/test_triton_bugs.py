"""Bugs planted in the Triton kernels: the suite's own tests must fail.

Not seen by tests on a CPU, and so not in the list:

  copy_blocks without its barrier   Interpreted, a program reads all before it writes anyway.
  masks of block ids                A masked key's id is never used, whatever was read.
  reads and writes past the end     XLA clamps the first and drops the second, where a GPU faults:
                                    the clamp of gather's and of copy's sources, slots and
                                    destinations that are too large. Negative ones are seen.
"""

from typing import Any

import pytest


def feature(name: str) -> tuple[str, dict[str, Any]]:
    return "test_triton.test_each_feature_alone", {"name": name}


def pool(test: str, **parameters: Any) -> tuple[str, dict[str, Any]]:
    return f"test_pool_operators.{test}", {"backend": "triton", **parameters}


SOFT_CAP, STATIC_WINDOW, WINDOW = map(feature, ("soft_cap", "static_window", "window"))
ALIBI, SINKS = map(feature, ("alibi_slopes", "sinks"))
PLANS = ("test_triton.test_plans_give_the_same_result", {})

# What is wrong: the module, a text that it has once, what stands in its place, and a test.
BUGS = {
    "a key of the future is seen": (
        "triton_walk",
        "seen = key_position[None, :] <= position[:, None]",
        "seen = key_position[None, :] <= position[:, None] + 1",
        SOFT_CAP,
    ),
    "the query's own key is not seen": (
        "triton_walk",
        "seen = key_position[None, :] <= position[:, None]",
        "seen = key_position[None, :] < position[:, None]",
        SOFT_CAP,
    ),
    "a window one key too large": (
        "triton_walk",
        "jnp.maximum(position, 0) - window + 1, 0)",
        "jnp.maximum(position, 0) - window, 0)",
        WINDOW,
    ),
    "no mask at a window's edge": (
        "triton_walk",
        "if config.window:\n                seen &=",
        "if False:\n                seen &=",
        STATIC_WINDOW,
    ),
    "no mask on the last tile": (
        "triton_walk",
        "outer = _clip(div(jnp.maximum(span.position + 1, 0), keys), inner, end)",
        "outer = end",
        SOFT_CAP,
    ),
    "no mask on a window's first tile": (
        "triton_walk",
        "inner = _clip(ceil_div(_first_visible(last, window), keys), begin, end)",
        "inner = _clip(div(_first_visible(last, window), keys), begin, end)",
        STATIC_WINDOW,
    ),
    "keys past the end of the context are loaded": (
        "triton_walk",
        "visible = (key_position >= low) & (key_position <= last)",
        "visible = key_position >= low",
        SOFT_CAP,
    ),
    "V's tail is not zeroed": (
        "triton_walk",
        "loads = mask(visible)",
        "loads = is_dim if which else mask(visible)",
        SOFT_CAP,
    ),
    "a part loses its last tile": (
        "triton_walk",
        "end = jnp.minimum((part + 1) * tiles_a_part, num_tiles) + first_tile",
        "end = jnp.minimum((part + 1) * tiles_a_part - 1, num_tiles) + first_tile",
        PLANS,
    ),
    "a part repeats the tile before it": (
        "triton_walk",
        "begin = jnp.minimum(part * tiles_a_part, num_tiles) + first_tile",
        "begin = jnp.maximum(jnp.minimum(part * tiles_a_part, num_tiles) - 1, 0) + first_tile",
        PLANS,
    ),
    "the remainder of the tiles is nobody's": (
        "triton_walk",
        "tiles_a_part = lax.div(num_tiles + parts - 1, parts)",
        "tiles_a_part = lax.div(num_tiles, parts)",
        PLANS,
    ),
    "the running output is not rescaled": (
        "triton_walk",
        "output = output * keep[:, None] + _dot(",
        "output = output + _dot(",
        SOFT_CAP,
    ),
    "query tokens of a tile share a position": (
        "triton_walk",
        "position = span.position + rows.token",
        "position = span.position + 0 * rows.token",
        SOFT_CAP,
    ),
    "KV heads mixed up": (
        "triton_walk",
        "return Rows(token, kv_head * config.group +",
        "return Rows(token, (1 - kv_head) * config.group +",
        SOFT_CAP,
    ),
    "a natural logarithm among logarithms to base 2": (
        "triton_walk",
        "return maximum + jnp.log(total) * LOG2_E",
        "return maximum + jnp.log(total)",
        PLANS,
    ),
    "merged with weights to the wrong base": (
        "triton_merge",
        "weights = jnp.exp2(lse - new_maximum)",
        "weights = jnp.exp(lse - new_maximum)",
        PLANS,
    ),
    "the merge takes the parts of the row before": (
        "triton_merge",
        "item = first + part",
        "item = jnp.maximum(first + part - 1, 0)",
        PLANS,
    ),
    "no sinks in the merge": (
        "triton_merge",
        "if config.sinks:",
        "if False:",
        SINKS,
    ),
    "no sinks in the ragged kernel": (
        "triton_attention",
        "if config.sinks:",
        "if False:",
        SINKS,
    ),
    "sinks to the wrong base": (
        "triton_attention",
        "sinks=base_2(call.sinks)",
        "sinks=call.sinks",
        SINKS,
    ),
    "ALiBi's slopes to the wrong base": (
        "triton_attention",
        "slopes=base_2(call.alibi_slopes)",
        "slopes=call.alibi_slopes",
        ALIBI,
    ),
    "a soft cap's score to the wrong base": (
        "triton_attention",
        "jnp.asarray(cap, jnp.float32) * np.float32(LOG2_E)",
        "jnp.asarray(cap, jnp.float32)",
        SOFT_CAP,
    ),
    "negative slots are written": (
        "triton_pool",
        "@pl.when((slot >= 0) & (slot < num_blocks * block_size))",
        "@pl.when(slot < num_blocks * block_size)",
        pool("test_write_kv", dtype="float32", count=7),
    ),
    "K is written for V": (
        "triton_pool",
        "enumerate((k, v))",
        "enumerate((k, k))",
        pool("test_write_kv", dtype="float32", count=7),
    ),
    "a pair is copied before the next one is read": (
        "triton_pool",
        "    values = plt.load(pool.at[layer, source, element], mask=mask)\n    if not interpret:",
        "    for i in range(count):\n"
        "        one = mask & (pair == i)[:, None]\n"
        "        values = plt.load(pool.at[layer, source, element], mask=one, other=0)\n"
        "        plt.store(pool.at[layer, destination, element], values, mask=one)\n"
        "    values = plt.load(pool.at[layer, source, element], mask=mask)\n    if not interpret:",
        pool("test_copies_are_simultaneous"),
    ),
    "copies to blocks that do not exist": (
        "triton_pool",
        "exists = (destination >= 0) & (destination < num_blocks)",
        "exists = destination < num_blocks",
        pool("test_copy_blocks", dtype="float32", count=4),
    ),
    "scatters to blocks that do not exist": (
        "triton_pool",
        "@pl.when((block >= 0) & (block < pool.shape[1]))",
        "@pl.when(block < pool.shape[1])",
        pool("test_gather_and_scatter_blocks", dtype="float32", count=4),
    ),
}


@pytest.mark.slow
def test_the_suite_passes_on_a_copy_without_a_bug(plant, run_suite):
    package = plant("plan", "UNIT = 64", "UNIT = 64")
    for test, parameters in {suite[0]: suite for *_, suite in BUGS.values()}.values():
        run_suite(package, test, parameters)


FAST = ("a key of the future is seen", "V's tail is not zeroed", "negative slots are written")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in BUGS]
)
def test_a_bug_is_caught(name, plant, run_suite):
    module, old, new, suite = BUGS[name]
    package = plant(module, old, new)
    with pytest.raises(AssertionError):
        run_suite(package, *suite)
