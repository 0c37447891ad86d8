"""Every bad argument is refused with a sentence that names it."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.plan import Plan

POOL = np.zeros((2, 6, 2, 2, 4, 8), np.float32)
ATTENTION = {
    "q": np.zeros((5, 4, 8), np.float32),
    "kv_pool": POOL,
    "layer": 0,
    "block_tables": np.zeros((3, 2), np.int32),
    "query_starts": np.zeros(4, np.int32),
    "context_lens": np.zeros(3, np.int32),
    "scale": 1.0,
}
WRITE = {
    "kv_pool": POOL,
    "layer": 0,
    "k": np.zeros((5, 2, 8), np.float32),
    "v": np.zeros((5, 2, 8), np.float32),
    "slot_mapping": np.zeros(5, np.int32),
}
BLOCKS = np.zeros(3, np.int32)
DATA = np.zeros((2, 3, 2, 2, 4, 8), np.float32)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": [1.0]}, TypeError, "q must be an array"),
        ({"q": zeros(5, 32)}, ValueError, r"q must have shape \[T, H, D\], got \(5, 32\)"),
        ({"q": zeros(5, 4, 16)}, ValueError, "q must have shape .* with D = 8"),
        ({"q": zeros(5, 3, 8)}, ValueError, "q must have a multiple of kv_pool's 2 heads, got 3"),
        ({"q": zeros(5, 4, 8, dtype=jnp.bfloat16)}, TypeError, "q must be float32 .* bfloat16"),
        ({"q": zeros(5, 4, 8, dtype=np.int32)}, TypeError, "q must be .* got int32"),
        ({"kv_pool": POOL[0]}, ValueError, "kv_pool must have shape"),
        ({"kv_pool": POOL[:, :, :1]}, ValueError, "kv_pool must have shape .* with 2 = 2"),
        ({"kv_pool": POOL.astype(np.int8)}, TypeError, "kv_pool must be .* got int8"),
        ({"kv_pool": POOL.astype(np.uint16)}, TypeError, "q must be bfloat16 .* uint16"),
        ({"layer": 2}, ValueError, r"layer must be in \[0, 2\), got 2"),
        ({"layer": -1}, ValueError, "layer must be in .* got -1"),
        ({"layer": True}, TypeError, "layer must be an int, got True"),
        ({"layer": 1.0}, TypeError, "layer must be an int, got 1.0"),
        ({"layer": zeros(1, dtype=np.int32)}, ValueError, "layer must be a scalar"),
        ({"block_tables": zeros(3, dtype=np.int32)}, ValueError, "block_tables must have shape"),
        ({"block_tables": zeros(4, 2, dtype=np.int32)}, ValueError, "block_tables .* with S = 3"),
        ({"block_tables": zeros(3, 2, dtype=np.int64)}, TypeError, "block_tables must be int32"),
        ({"query_starts": zeros(3, dtype=np.int32)}, ValueError, r"query_starts .* S\+1 = 4"),
        ({"query_starts": zeros(4)}, TypeError, "query_starts must be int32"),
        ({"context_lens": zeros(3)}, TypeError, "context_lens must be int32"),
        ({"context_lens": 3}, TypeError, "context_lens must be an array"),
        ({"scale": None}, TypeError, "scale must be a number, got None"),
        ({"scale": zeros(2)}, ValueError, "scale must be a scalar"),
        ({"window": 2.5}, TypeError, "window must be an int, got 2.5"),
        ({"window": np.float32(2)}, TypeError, "window must be an int, got float32"),
        ({"soft_cap": 0.0}, ValueError, "soft_cap must be None or > 0, got 0.0"),
        ({"soft_cap": "5"}, TypeError, "soft_cap must be a number"),
        ({"alibi_slopes": zeros(2)}, ValueError, "alibi_slopes must have shape .* H = 4"),
        ({"sinks": zeros(4, dtype=np.int32)}, TypeError, "sinks must be float32"),
        ({"plan": {}}, TypeError, "plan must be a Plan of pallas_kernels.plan, got dict"),
        ({"plan": Plan(BLOCKS, BLOCKS, BLOCKS)}, ValueError, r"plan.tiles must .* \[4, W\]"),
        ({"plan": Plan(*[zeros(4, 3)] * 3)}, TypeError, "plan.tiles must be int32"),
        ({"backend": "cuda"}, ValueError, "backend must be one of auto, mosaic, .* got 'cuda'"),
        ({"backend": "mosaic"}, NotImplementedError, "'mosaic' does not support"),
    ],
)
def test_paged_attention(changes, error, message):
    with pytest.raises(error, match=message):
        pallas_kernels.paged_attention(**(ATTENTION | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_pool": POOL[0]}, ValueError, "kv_pool must have shape"),
        ({"layer": 7}, ValueError, "layer must be in"),
        ({"k": zeros(5, 3, 8)}, ValueError, "k must have shape .* with K = 2"),
        ({"v": zeros(4, 2, 8)}, ValueError, "v must have shape .* with T = 5"),
        ({"v": zeros(5, 2, 8, dtype=np.float16)}, TypeError, "v must be float32"),
        ({"slot_mapping": zeros(6, dtype=np.int32)}, ValueError, "slot_mapping .* T = 5"),
        ({"slot_mapping": zeros(5, dtype=np.int64)}, TypeError, "slot_mapping must be int32"),
        ({"backend": "mosaic"}, NotImplementedError, "'mosaic' does not support"),
    ],
)
def test_write_kv(changes, error, message):
    with pytest.raises(error, match=message):
        pallas_kernels.write_kv(**(WRITE | changes))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: pallas_kernels.copy_blocks(POOL, BLOCKS, BLOCKS[:2]), ValueError, "destinations"),
        (lambda: pallas_kernels.copy_blocks(POOL, DATA, BLOCKS), ValueError, "sources"),
        (lambda: pallas_kernels.copy_blocks(POOL, [0], BLOCKS), TypeError, "sources"),
        (lambda: pallas_kernels.gather_blocks(POOL[0], BLOCKS), ValueError, "kv_pool"),
        (lambda: pallas_kernels.gather_blocks(POOL, zeros(3)), TypeError, "blocks must be int32"),
        (
            lambda: pallas_kernels.scatter_blocks(POOL, BLOCKS[:2], DATA),
            ValueError,
            "data .* C = 2",
        ),
        (
            lambda: pallas_kernels.scatter_blocks(POOL, BLOCKS, DATA.astype(np.float16)),
            TypeError,
            "data must be float32, got float16",
        ),
        (lambda: pallas_kernels.merge_states(DATA, BLOCKS), ValueError, "outs must have shape"),
        (lambda: pallas_kernels.merge_states(DATA[0, 0], zeros(2, 2, 3)), ValueError, "lses"),
        (
            lambda: pallas_kernels.merge_states(
                zeros(2, 3, 4, 8), zeros(2, 3, 4, dtype=np.float16)
            ),
            TypeError,
            "lses must be float32",
        ),
        (
            lambda: pallas_kernels.merge_states(zeros(1, 1, 1, 1), zeros(1, 1, 1), backend="x"),
            ValueError,
            "backend must be one of",
        ),
    ],
)
def test_other_operators(call, error, message):
    with pytest.raises(error, match=message):
        call()
