"""Which device a function is being traced for: it decides which kernel is taken, and its sizes."""

import re
from typing import Any, NamedTuple

import jax


class Target(NamedTuple):
    """The device that the code under trace will run on."""

    platform: str  # "cpu", "gpu", "tpu"
    kind: str  # such as "NVIDIA H200"
    num_cores: int | None  # streaming multiprocessors of a GPU, where known
    capability: tuple[int, int] | None = None  # compute capability of a GPU, where known

    @property
    def is_nvidia(self) -> bool:
        return self.platform == "gpu" and "nvidia" in self.kind.lower()

    @property
    def is_hopper(self) -> bool:
        if self.capability is not None:
            return self.is_nvidia and self.capability[0] == 9
        return self.is_nvidia and any(
            name in self.kind for name in ("H100", "H200", "H800", "GH200")
        )


def tracing_target() -> Target:
    """The abstract device of the mesh in scope, else JAX's default device.

    Compiling ahead of time for a GPU on a machine without one sets an abstract device (as
    `jax.sharding.use_abstract_mesh` does), so that the GPU's kernels are traced there too.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return _target(device, device.num_cores)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is None:
        default = jax.local_devices()[0]
    elif isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    return _target(default, getattr(default, "core_count", None))


def _target(device: Any, num_cores: int | None) -> Target:
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    # A CUDA device says "9.0"; JAX's own abstract devices say nothing, and AMD's a name.
    match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    capability = (int(match[1]), int(match[2])) if match else None
    return Target(platform, device.device_kind, num_cores, capability)
