"""Bugs planted in the work lists of the attention kernels, made on the host and on the device: the
suite's own test must fail."""

import pytest

TEST = "test_plan.test_plans_cover_each_row_once"
# What is wrong: a text that plan.py has once, and what stands in its place.
BUGS = {
    "a row with more tokens than a tile's is a decode row": (
        "(query_lens <= decode_tokens)",
        "(query_lens <= decode_tokens + 1)",
    ),
    "a row without a context is nobody's": (
        "lens = xp.concatenate([xp.where(decodes, 0, query_lens), padding])",
        "lens = xp.concatenate([xp.where(decodes | (context_lens < 1), 0, query_lens), padding])",
    ),
    "the last tile of a row is missing": (
        "counts = -(-lens // ragged_tokens)",
        "counts = lens // ragged_tokens",
    ),
    "tiles start one tile late": (
        "skipped = (tile - ends[owner] + counts[owner]) * ragged_tokens",
        "skipped = (tile - ends[owner] + counts[owner] + 1) * ragged_tokens",
    ),
    "a tile takes tokens of the next row": (
        "xp.minimum(lens[owner] - skipped, ragged_tokens)",
        "xp.minimum(lens[owner] - skipped + 1, ragged_tokens)",
    ),
    "a work item goes to the sequence before": (
        "owners = (ends[None, :] <= items[:, None]).sum(axis=1)",
        "owners = (ends[None, :] < items[:, None]).sum(axis=1)",
    ),
    "parts are counted from 1": (
        "item - first_items[owner],",
        "item - first_items[owner] + 1,",
    ),
    "more parts than there are items": (
        "part = xp.maximum(-(-units.sum() // budget), _MIN_UNITS)",
        "part = xp.maximum(units.sum() // budget // 2, _MIN_UNITS)",
    ),
    "all parts go to the longest": (
        "return (-(-units // part)).astype(np.int32)",
        "return xp.where(units == units.max(), -(-units // part), units > 0).astype(np.int32)",
    ),
    "padding is merged": (
        "used = token < query_starts[-1]",
        "used = token >= 0",
    ),
    "padding is merged, where few rows can be decode rows": (
        "used = within < query_lens[owner]",
        "used = within >= 0",
    ),
}


@pytest.mark.parametrize("num_heads", [12, 24])
def test_the_suite_passes_on_a_copy_without_a_bug(num_heads, plant, run_suite):
    package = plant("plan", "UNIT = 64", "UNIT = 64")
    run_suite(package, TEST, {"where": "host", "num_heads": num_heads})


@pytest.mark.parametrize("where", ["host", pytest.param("device", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught(name, where, plant, run_suite):
    package = plant("plan", *BUGS[name])
    num_heads = 24 if "few rows" in name else 12
    with pytest.raises(AssertionError):
        run_suite(package, TEST, {"where": where, "num_heads": num_heads})
