"""Work lists of the attention kernels: each row of q once, and contexts split evenly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels
from pallas_kernels.devices import tracing_target
from pallas_kernels.plan import UNIT, Plan, decode_rows, make_plan, ragged_rows

PLAN_SHAPES = {"num_tokens": 60, "num_heads": 12, "num_kv_heads": 3, "dtype": jnp.bfloat16}


make_plan_on_device = jax.jit(make_plan, static_argnames=(*PLAN_SHAPES, "num_cores", "xp"))


@jax.jit
def device_plan(query_starts, context_lens):
    return pallas_kernels.plan_attention(
        query_starts, context_lens, **PLAN_SHAPES, backend="triton"
    )


LENS = (0, 1, 1, 1, 2, 3, 4, 5, 12)


# With 24 heads a decode tile has room for 2 tokens: fewer rows may be merged than q has.
@pytest.mark.parametrize("num_heads", [12, 24])
@pytest.mark.parametrize("where", ["host", "device"])
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.tuples(st.sampled_from(LENS), st.integers(0, 40_000)), min_size=20, max_size=20),
    st.sampled_from([1, 132]),
)
def test_plans_cover_each_row_once(where, num_heads, rows, num_cores):
    query_lens, context_lens = np.array(rows, np.int32).T
    query_lens = np.diff(np.minimum(np.cumsum(query_lens), 60), prepend=0)
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    make, xp = {"host": (make_plan, np), "device": (make_plan_on_device, jnp)}[where]
    shapes = PLAN_SHAPES | {"num_heads": num_heads}
    plan = Plan(*map(np.asarray, make(starts, context_lens, **shapes, num_cores=num_cores, xp=xp)))
    assert all(array.dtype == np.int32 for array in plan)
    group = num_heads // PLAN_SHAPES["num_kv_heads"]
    covered = np.zeros(60, int)
    for sequence, first, count, position in plan.tiles.T:
        assert 0 <= count <= ragged_rows(group, is_float32=False).tokens
        covered[first : first + count] += 1
        if first < starts[-1] and count:
            expected = context_lens[sequence] - starts[sequence + 1] + first
            assert position == expected and first + count <= starts[sequence + 1]
    for row, within, first_item, num_parts in plan.merged.T:
        if num_parts:
            covered[row] += 1
            parts = plan.items[:, first_item : first_item + num_parts]
            sequence = parts[0, 0]
            assert row == starts[sequence] + within
            assert within < query_lens[sequence] <= decode_rows(group).tokens
            head = [sequence, starts[sequence], query_lens[sequence]]
            head.append(context_lens[sequence] - query_lens[sequence])
            assert (head == parts[:4].T).all()
            np.testing.assert_array_equal(parts[4], np.arange(num_parts))
            assert (parts[5] == num_parts).all()
    np.testing.assert_array_equal(covered, 1)
    # Parts of different sequences are of about equal length.
    used = plan.items[:, plan.items[2] > 0]
    if used.size and used[5].max() > 1:
        units = -(-context_lens // UNIT)
        decodes = np.unique(used[0])
        part = -(-units[decodes].sum() // (plan.items.shape[1] - 20))
        assert (units[used[0]] / used[5]).max() <= max(2, part)


def test_host_and_device_make_the_same_plan():
    rng = np.random.default_rng(0)
    for _ in range(10):
        query_lens = rng.choice([0, 1, 1, 2, 5, 9], 12)
        starts = np.minimum(np.concatenate([[0], np.cumsum(query_lens)]), 60).astype(np.int32)
        context_lens = rng.integers(0, 5000, 12, dtype=np.int32)
        cores = tracing_target().num_cores
        expected = make_plan(starts, context_lens, **PLAN_SHAPES, num_cores=cores)
        for got, wanted in zip(device_plan(starts, context_lens), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_plans_follow_the_contexts_and_not_the_batch_alone():
    def parts(context_lens):
        num_tokens = len(context_lens)
        starts = np.arange(num_tokens + 1, dtype=np.int32)
        shapes = {"num_heads": 32, "num_kv_heads": 8, "dtype": jnp.bfloat16, "num_cores": 132}
        context_lens = np.array(context_lens, np.int32)
        return make_plan(starts, context_lens, num_tokens=num_tokens, **shapes).merged[3]

    assert parts([32768])[0] == 47  # 376 programs, of the 396 that are three a multiprocessor
    assert parts([100])[0] == 1
    assert parts([4096] * 128).max() == 1  # 1,024 programs without any split
    skewed = parts([65536] + [512] * 63)
    assert skewed[0] == 34 and skewed[1:].max() == 1
    with pytest.raises(ValueError, match="query_starts must have shape"):
        make_plan(np.zeros(3, np.int32), np.zeros(3, np.int32), **PLAN_SHAPES)
