"""Which backend `auto` takes, and that a GPU kernel passed over is said in the log, once."""

import logging

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels import devices, support
from pallas_kernels.devices import Target, tracing_target
from pallas_kernels.support import Case, automatic, candidates, choose

H200 = Target("gpu", "NVIDIA H200", 132)
A100 = Target("gpu", "NVIDIA A100-SXM4-80GB", 108)
CASE = Case("paged_attention", jnp.dtype(jnp.bfloat16), 128, 16, 4)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (H200, ("mosaic", "triton", "xla")),
        (Target("gpu", "NVIDIA H20", 78, (9, 0)), ("mosaic", "triton", "xla")),
        (A100, ("triton", "xla")),
        (Target("gpu", "NVIDIA B200", 148, (10, 0)), ("triton", "xla")),
        (Target("gpu", "AMD Instinct MI300X", 304), ("xla",)),
        (Target("cpu", "cpu", None), ("llvm", "xla")),
        (Target("tpu", "TPU v5e", None), ("xla",)),
    ],
)
def test_candidates(target, expected):
    assert candidates(target) == expected


def test_auto_takes_the_first_that_supports_the_case_and_says_once_what_it_passes_over(caplog):
    support._warn_once.cache_clear()
    wide = CASE._replace(head_dim=300)
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        assert automatic(CASE, A100) == "triton"
        assert automatic(CASE, Target("cpu", "cpu", None)) == "llvm"
        assert not caplog.records
        for _ in range(2):
            assert automatic(wide, A100) == "xla"
    [record] = caplog.records
    assert "paged_attention: backend 'triton' is passed over on NVIDIA A100" in record.message
    assert "head dims above 256 (got 300)" in record.message


def test_gpus_before_ampere_get_xla():
    volta = Target("gpu", "Tesla V100-SXM2-16GB (NVIDIA)", 80, (7, 0))
    assert automatic(CASE, volta) == "xla"


def test_choice_by_name():
    assert choose(CASE, "reference").__name__ == "pallas_kernels.reference"
    with pytest.raises(ValueError, match=r"backend must be one of auto, mosaic, .* got 'cuda'"):
        choose(CASE, "cuda")
    message = "paged_attention with backend 'triton' does not support head dims above 256"
    with pytest.raises(NotImplementedError, match=message):
        choose(CASE._replace(head_dim=300), "triton")


def test_the_mesh_in_scope_decides():
    device = AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", platform="gpu", num_cores=108)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        assert tracing_target() == A100
        assert choose(CASE, "auto").__name__ == "pallas_kernels.triton"
    assert choose(CASE, "auto").__name__ == "pallas_kernels.llvm"


def test_compute_capability_of_a_device():
    class Device:
        platform, device_kind, core_count = "cuda", "NVIDIA GH200 480GB", 132

    for said, known in (("9.0", (9, 0)), ("10.3", (10, 3)), ("gfx942", None), (None, None)):
        Device.compute_capability = said
        assert devices._target(Device(), 132).capability == known
    assert Target("gpu", "NVIDIA GH200 480GB", 132, (9, 0)).is_hopper
