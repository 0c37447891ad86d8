"""The estimate's parts, against numbers worked out by hand."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "estimate_decode.py"


@pytest.fixture(scope="module")
def estimate_decode():
    spec = importlib.util.spec_from_file_location("estimate_decode", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["estimate_decode"] = module  # absl files its flags under the module's name
    spec.loader.exec_module(module)
    return module


PTX = """
.visible .entry kernel(
{
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %p1;
	mov.b32 	%r5, 32;
$L__outer:
	add.s32 %r1, %r1, 1;
$L__inner:
	cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %p1;
	@%p7 cp.async.ca.shared.global [ %r72 + 0 ], [ %rd78 + 0 ], 0x4, %p5;
	@%p9 bra 	$L__inner;
	cp.async.cg.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x10, %p1;
	@%p10 bra 	$L__inner;
	bra.uni 	$L__forward;
$L__forward:
$L__tma:
	mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r100], %r5;
	mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r100], 16;
	@%p2 bra 	$L__tma;
	@%p2 bra 	$L__outer;
$L__nothing:
	@%p2 bra 	$L__nothing;
}
"""


def test_loops_and_their_copies(estimate_decode):
    """A loop with two ways back counts once, one around others and one without copies not."""
    loops = estimate_decode.loops(PTX, threads=128)
    assert [loop.copied_bytes for loop in loops] == [2 * 16 * 128, (32 + 16) * 128]
    assert [loop.instructions for loop in loops] == [4, 2]


def test_simulation(estimate_decode):
    simulate = estimate_decode.simulate
    work = np.full(8, 100.0)
    # All at once: 800 bytes at 80 bytes/s after a second; held back by the cap: 100 bytes at 5.
    assert simulate(work, 8, 80.0, 1e9, 1.0) == pytest.approx(11)
    assert simulate(work, 8, 80.0, 5.0, 1.0) == pytest.approx(21)
    # Two waves of four, each with its start-up.
    assert simulate(work, 4, 80.0, 1e9, 1.0) == pytest.approx(12)
    # One is longer, and has the rate to itself at the end: 4 x 100 at 80, then 100 more at 80.
    assert simulate(np.array([200.0, 100, 100, 100]), 4, 80.0, 1e9, 0.0) == pytest.approx(6.25)
    assert simulate(np.array([]), 4, 80.0, 1e9, 1.0) == 0


def test_trips_cover_each_context_once(estimate_decode):
    for contexts in ((1024,), (5000,) * 3, (4096,) * 128, (30000, 100, 700)):
        shape = estimate_decode.Shape(contexts)
        taken = estimate_decode.trips(shape, 132, 64, 4)
        tiles = sum(-(-context // 64) for context in contexts)
        assert taken.sum() == shape.num_kv_heads * tiles


def test_blocks_of_a_multiprocessor(estimate_decode):
    gpu = estimate_decode.GPUS["H200"]
    loop = estimate_decode.Loop(16384, 200)

    def blocks(registers, shared, threads):
        resources = estimate_decode.Resources(registers, shared, threads, 0, loop, 16384)
        return resources.blocks(gpu)

    assert blocks(96, 21632, 128) == 5  # 65536 / (96 x 128)
    assert blocks(109, 73 * 1024, 128) == 3  # 228 KiB / 74 KiB
    assert blocks(32, 0, 1024) == 2
    assert blocks(168, 0, 384) == 1
