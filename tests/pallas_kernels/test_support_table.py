"""The table of what is supported: it says everything, promises the least we promised, and the copy
in BUILD_NOTES.md is what the code says."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.devices import Target
from pallas_kernels.support import Case, load
from pallas_kernels.support_table import exceptions, supported, table

newest_backends = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2),
    reason="the Mosaic backend needs jax 0.11.2; tested on Python 3.12",
)


def test_one_row_a_value_says_everything():
    assert not list(exceptions())


@newest_backends
def test_build_notes_hold_the_table():
    notes = Path(__file__).parents[2] / "BUILD_NOTES.md"
    assert "\n".join(table()) in notes.read_text()


def case(dtype, head_dim, block_size, group, *features):
    return Case(
        "paged_attention", jnp.dtype(dtype), head_dim, block_size, group, frozenset(features)
    )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_least_that_triton_supports(dtype, block_size, head_dim):
    features = ("window", "soft_cap", "alibi_slopes", "sinks", "return_lse")
    for group in (1, 2, 3, 5, 7, 8, 16, 71):
        assert supported("triton", case(dtype, head_dim, block_size, group, *features))


@newest_backends
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_least_that_mosaic_supports(dtype, block_size, head_dim):
    features = ("window", "soft_cap", "sinks", "return_lse")
    for group in range(1, 17):
        assert supported("mosaic", case(dtype, head_dim, block_size, group, *features))
    assert supported("mosaic", case(dtype, head_dim, block_size, 1)._replace(operator="write_kv"))


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11, 2), reason="for an older jax; tested on Python 3.11"
)
def test_mosaic_says_which_jax_it_needs():
    target = Target("gpu", "NVIDIA H200", 132, (9, 0))
    reason = load("mosaic").unsupported(case("bfloat16", 128, 16, 4), target)
    assert reason == f"JAX before 0.11.2 (this is {jax.__version__})"
