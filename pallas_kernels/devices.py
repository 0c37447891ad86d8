"""Which device a function is being traced for: it decides which kernel is taken, and its sizes."""

from typing import NamedTuple

import jax


class Target(NamedTuple):
    """The device that the code under trace will run on."""

    platform: str  # "cpu", "gpu", "tpu"
    kind: str  # such as "NVIDIA H200"
    num_cores: int | None  # streaming multiprocessors of a GPU, where known

    @property
    def is_nvidia(self) -> bool:
        return self.platform == "gpu" and "nvidia" in self.kind.lower()

    @property
    def is_hopper(self) -> bool:
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
        return Target(_platform(device.platform), device.device_kind, device.num_cores)
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is None:
        default = jax.local_devices()[0]
    elif isinstance(default, str):
        default = jax.local_devices(backend=default)[0]
    cores = getattr(default, "core_count", None)
    return Target(_platform(default.platform), default.device_kind, cores)


def _platform(name: str) -> str:
    return "gpu" if name in ("cuda", "rocm") else name
