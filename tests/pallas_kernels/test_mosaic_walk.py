"""The Mosaic kernels walk over more tiles of keys than there are slots for, interpreted with
a watch for races. The other tests' contexts are mostly split into parts of a few tiles."""

from functools import partial

import jax
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.plan import make_plan

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="the Mosaic kernels need JAX 0.11.2"
)
# A decode row and a chunk of queries; both contexts end within a block and a tile.
ROWS = [(2, 460), (9, 333)]
SHAPES = {
    "num_tokens": 12,
    "num_sequences": 2,
    "max_blocks": 30,
    "block_size": 16,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 64,
    "num_blocks": 64,
    "dtype": "bfloat16",
}
FEATURES = {
    "plain": {},
    "window and sinks": {"window": np.int32(270), "sinks": np.float32([1.5, -0.5])},
}


@pytest.fixture
def no_races(capsys):
    """JAX 0.12 raises where it sees a race, 0.11 prints. So many threads for the bulk copies that
    no two of them share one: what waits for one copy would else seem to wait for others too."""
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
    params = plgpu.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=256)
    with plgpu.force_gpu_interpret_mode(params):
        yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("parts", "features"),
    [
        (1, "plain"),
        (2, "window and sinks"),
        pytest.param(1, "window and sinks", marks=pytest.mark.slow),
        pytest.param(2, "plain", marks=pytest.mark.slow),
    ],
)
def test_long_walks(parts, features, no_races, bucket_type, make_batch, assert_close):
    batch = make_batch(bucket_type(**SHAPES), ROWS, seed=1)
    plan = make_plan(
        batch.query_starts,
        batch.context_lens,
        num_tokens=12,
        num_heads=2,
        num_kv_heads=2,
        dtype=batch.q.dtype,
        num_cores=1,
        programs_a_core=2 * parts,
    )
    assert plan.merged[3].max() == parts
    features = FEATURES[features]
    attend = partial(pallas_kernels.paged_attention, scale=0.1, return_lse=True, **features)
    expected = attend(*batch.arguments, backend="reference")
    got = attend(*batch.arguments, plan=plan, backend="mosaic")
    assert_close(got, expected, "bfloat16")
