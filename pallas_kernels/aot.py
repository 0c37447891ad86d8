"""Compiles any function for a named NVIDIA GPU, or for several, on a machine that has none.

    compiled = aot.compile_for(step, params, pool, gpu="H200", donate_argnums=1)
    compiled.temp_bytes, compiled.alias_bytes, compiled.hlo
    compiled.kernels["paged_attention"].registers

Needs JAX's CUDA plugin in jax's own version and, for registers, a ptxas; neither a GPU nor a driver
nor CUDA libraries: `pip install "jax[cuda12-local]" nvidia-cuda-nvcc-cu12`. The process's default
backend may be the CPU. Nothing is timed on a GPU, so XLA takes its own matrix products, with
default tiles, where on a GPU it may choose other tiles or cuBLAS.

`python -m pallas_kernels.aot --gpu H200` prints what every kernel of this package takes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.cases import kernel_cases
from pallas_kernels.ptx import (
    Kernel,
    entries,
    instruction_counts,
    ptxas_resources,
    run_ptxas,
    threads,
)

__all__ = ["GPUS", "Compiled", "Kernel", "compile_for"]

GPUS = ("A100-40GB", "A100-80GB", "H100", "H200", "B200")
AXIS = "tp"  # the mesh axis over all GPUs

_PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")


@dataclass(frozen=True)
class _Device(AbstractDevice):
    """An abstract device that also says its compute capability, which Mosaic asks for: without it
    Mosaic takes every GPU for a Hopper."""

    compute_capability: str


class _Module(NamedTuple):
    """A PTX module of a compiled program."""

    ptx: str
    dynamic_shared: dict[str, int]  # bytes, by kernel
    pallas: tuple[str, ...]  # names of the kernels that Pallas made; others are XLA's
    ptxas_log: str | None = None  # of a module whose compiler keeps one


@dataclass(frozen=True)
class Compiled:
    """A function compiled for a GPU. Sizes are for one GPU of those it was compiled for.

    temp_bytes      memory for intermediate values; a copy of a donated array shows here
    argument_bytes  the arguments
    output_bytes    the results, those in donated memory included
    alias_bytes     the results that live in the memory of donated arguments
    hlo             the optimised HLO, as text
    ptx             the PTX of all kernels, as text
    """

    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    hlo: str = field(repr=False)
    ptx: str = field(repr=False)
    _modules: tuple[_Module, ...] = field(repr=False)

    @functools.cached_property
    def instructions(self) -> Counter[str]:
        """Tensor-core and copy instructions in the PTX by family, such as "wgmma", "mma.sync",
        "ldmatrix", "cp.async", "cp.async.bulk.tensor" (places in the code, not executions)."""
        return instruction_counts(self.ptx)

    @functools.cached_property
    def kernels(self) -> dict[str, Kernel]:
        """What each kernel takes: registers, spills, shared memory, instructions.

        Raises FileNotFoundError, saying what to install, where there is no ptxas.
        """
        kernels: dict[str, Kernel] = {}
        for module in self._modules:
            log = module.ptxas_log or run_ptxas(module.ptx)
            texts = entries(module.ptx)
            for entry, (registers, spill, static) in ptxas_resources(log).items():
                name = unique = entry.removesuffix("_mosaic_gpu_kernel")
                number = 1
                while unique in kernels:  # Mosaic compiles each kernel as a module of its own
                    unique, number = f"{name}_{number}", number + 1
                kernels[unique] = Kernel(
                    registers=registers,
                    spill_bytes=spill,
                    # No compiler here uses both; Mosaic declares one static byte as a marker.
                    shared_bytes=module.dynamic_shared.get(entry, 0) or static,
                    threads=threads(texts[entry]),
                    # XLA numbers kernels of one name: name, name__1, ...
                    pallas=re.sub(r"__\d+$", "", entry) in module.pallas,
                    instructions=instruction_counts(texts[entry]),
                )
        return dict(sorted(kernels.items()))


def compile_for(
    fn: Callable,
    *avals: Any,
    gpu: str = "H200",
    num_gpus: int = 1,
    num_hosts: int = 1,
    donate_argnums: int | tuple[int, ...] = (),
    in_specs: Any = None,
) -> Compiled:
    """Compiles `fn(*avals)` for a GPU that need not be here.

    While `fn` is traced, `jax.sharding.get_abstract_mesh()` is a mesh of one axis "tp" over all the
    GPUs, whose `abstract_device` names the GPU's kind: code that chooses by platform takes the
    GPU's way, and `jax.shard_map` finds its mesh there. Not thread-safe: it sets environment
    variables for a moment.

    Args:
        fn: A function of arrays, jitted or not.
        avals: Its arguments: arrays or `jax.ShapeDtypeStruct`s, or pytrees of them. Their values
            and shardings do not count.
        gpu: One of `GPUS`.
        num_gpus: GPUs in each host.
        num_hosts: Hosts, one process each.
        donate_argnums: As of `jax.jit`.
        in_specs: `PartitionSpec`s over the axis "tp": a pytree that is a prefix of `avals`, such as
            one for all or a tuple with one for each. Default: every GPU has all of each argument.

    Raises:
        ValueError: An unknown GPU, or a number of GPUs or hosts below 1.
        TypeError: An argument is no array.
        NotImplementedError: B200 on a JAX before 0.12.
        ModuleNotFoundError: JAX's CUDA plugin is not installed.
    """
    for name, number in (("num_gpus", num_gpus), ("num_hosts", num_hosts)):
        if isinstance(number, bool) or not isinstance(number, int):
            raise TypeError(f"{name} must be an int, got {type(number).__name__}")
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    mesh, abstract_mesh = _mesh(gpu, num_gpus, num_hosts)

    def place(spec: PartitionSpec | None, tree: Any) -> Any:
        sharding = NamedSharding(mesh, spec if spec is not None else PartitionSpec())
        return jax.tree.map(lambda leaf: _shape_of(leaf, sharding), tree)

    def is_spec(tree: Any) -> bool:
        return tree is None or isinstance(tree, PartitionSpec)

    placed = jax.tree.map(place, in_specs, avals, is_leaf=is_spec)
    with jax.sharding.use_abstract_mesh(abstract_mesh):
        lowered = jax.jit(fn, donate_argnums=donate_argnums).lower(*placed)
    return _compile(lowered)


def _shape_of(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise TypeError(
            "avals must be arrays or ShapeDtypeStructs, or pytrees of them, got "
            f"{type(leaf).__name__}"
        )
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _mesh(gpu: str, num_gpus: int, num_hosts: int) -> tuple[Mesh, AbstractMesh]:
    """The mesh over a topology that is not here, to place arguments on, and the one to trace in."""
    if gpu not in GPUS:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}, got {gpu!r}")
    if gpu == "B200" and jax.__version_info__ < (0, 12):
        raise NotImplementedError(f"gpu 'B200' needs jax 0.12 or newer, got {jax.__version__}")
    target = (Path(__file__).parent / "targets" / f"{gpu.lower()}.txtpb").read_text()
    devices: Any = _topology(target, f"1x{num_hosts}x{num_gpus}").devices
    mesh = Mesh(np.array(devices), (AXIS,))
    capability = re.search(r"cuda_compute_capability \{\s*major: (\d+)", target)
    assert capability is not None, "each target says its compute capability"
    device = _Device(
        device_kind=devices[0].device_kind,
        num_cores=devices[0].core_count,
        platform="gpu",
        compute_capability=f"{capability[1]}.0",  # all of GPUS have minor version 0
    )
    return mesh, mesh.abstract_mesh.update(abstract_device=device)


def _topology(target: str, shape: str) -> topologies.TopologyDescription:
    """The devices of `shape` (slices x hosts x GPUs) of the GPU that a text proto describes."""

    def make() -> topologies.TopologyDescription:
        # JAX loads its plugins now if it has not yet; without CUDA's libraries the CUDA plugin
        # refuses to load unless told not to look for them.
        with _environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
            return topologies.get_topology_desc(
                topology_name="", platform="cuda", target_config=target, topology=shape
            )

    try:
        return make()
    except NotImplementedError:
        pass  # the plugin is missing, or it refused to load when JAX started
    for plugin in _PLUGINS:
        try:
            module = importlib.import_module(plugin)
        except ModuleNotFoundError:
            continue
        with _environment(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):
            module.initialize()
        return make()
    raise ModuleNotFoundError(
        f"compiling for a GPU needs JAX's CUDA plugin: pip install "
        f"'jax[cuda12-local]=={jax.__version__}' nvidia-cuda-nvcc-cu12"
    )


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets environment variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _compile(lowered: jax.stages.Lowered) -> Compiled:
    """Compiles, and reads the PTX from what the compilers dump on the way."""
    triton = _prepare_pallas(lowered)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {
            "xla_dump_to": f"{folder}/xla",
            # The second alternative matches nothing. It is there to miss JAX's persistent
            # compilation cache, whose key this option is part of: a hit would dump nothing.
            "xla_dump_emitter_re": f"ptx|{os.urandom(16).hex()}",
        }
        (Path(folder) / "mosaic").mkdir()
        with _environment(MOSAIC_GPU_DUMP_TO=f"{folder}/mosaic"):
            compiled = lowered.compile(compiler_options=options)
        modules = (
            *_xla_modules(Path(folder) / "xla", triton),
            *_mosaic_modules(Path(folder) / "mosaic"),
        )
    memory = compiled.memory_analysis()
    hlo = compiled.as_text()
    assert memory is not None and hlo is not None, "the CUDA plugin reports both"
    return Compiled(
        temp_bytes=memory.temp_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        hlo=hlo,
        ptx="\n".join(module.ptx for module in modules),
        _modules=modules,
    )


def _prepare_pallas(lowered: jax.stages.Lowered) -> tuple[str, ...]:
    """The names of the program's Pallas/Triton kernels. Gives its Mosaic kernels new hashes: since
    JAX 0.12 the plugin compiles, and dumps, a kernel once a process, and knows it by its hash."""
    triton = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and "mhlo.backend_config" in op.attributes:
            target = str(op.attributes["call_target_name"])
            config: Any = op.attributes["mhlo.backend_config"]
            if "xla.gpu.triton" in target:
                triton.append(config["name"].value)
            elif "mosaic_gpu" in target and "kernel_hash" in config:
                renewed = {item.name: item.attr for item in config}
                renewed["kernel_hash"] = ir.StringAttr.get(os.urandom(32))
                op.attributes["mhlo.backend_config"] = ir.DictAttr.get(renewed)
        return ir.WalkResult.ADVANCE

    module: Any = lowered.compiler_ir("stablehlo")
    with module.context:
        module.operation.walk(visit)
    return tuple(triton)


def _xla_modules(folder: Path, triton: tuple[str, ...]) -> Iterator[_Module]:
    """XLA's own kernels and those that Pallas makes with Triton."""
    launches = "".join(path.read_text() for path in folder.glob("*thunk_sequence.txt"))
    shared = {
        name: int(size)
        for name, size in re.findall(r"(\S+) grid: .* shared_memory: (\d+) bytes", launches)
    }
    for path in sorted(folder.glob("*.ptx")):
        if ptx := path.read_text():
            yield _Module(ptx, shared, triton)


def _mosaic_modules(folder: Path) -> Iterator[_Module]:
    """The kernels that Pallas makes with Mosaic. It compiles them itself and keeps ptxas's log."""
    launch = re.compile(r"launch_func .*@(\w+) blocks .*dynamic_shared_memory_size %c(\d+)_i32")
    for path in sorted(folder.glob("*.ptx")):
        passes = path.with_suffix(".mlir-passes.log").read_text()
        log = path.with_suffix(".ptxas")
        shared = {name: int(size) for name, size in launch.findall(passes)}
        yield _Module(
            path.read_text(),
            shared,
            tuple(shared),
            log.read_text() if log.exists() else None,
        )


def resource_table(gpu: str) -> Iterator[str]:
    """Lines of a table: what each Pallas kernel takes on a GPU, and the most that any of a case's
    kernels by XLA takes."""
    layout = "{:<32} {:<24} {:>7} {:>9} {:>5} {:>6} {:>9}  {}"
    yield layout.format(
        "case", "kernel", "threads", "registers", "spill", "shared", "temporary", "instructions"
    )
    for case in kernel_cases():
        try:
            compiled = compile_for(
                case.fn, *case.avals, gpu=gpu, donate_argnums=case.donate_argnums
            )
        except NotImplementedError as error:
            yield f"{case.name:<32} {error}"
            continue
        by_xla = [kernel for kernel in compiled.kernels.values() if not kernel.pallas]
        rows = [(name, [kernel]) for name, kernel in compiled.kernels.items() if kernel.pallas]
        for name, kernels in [*rows, (f"{len(by_xla)} by XLA, at most", by_xla)]:
            if kernels:
                counts = sum((kernel.instructions for kernel in kernels), Counter[str]())
                yield layout.format(
                    case.name,
                    name,
                    max(kernel.threads for kernel in kernels),
                    max(kernel.registers for kernel in kernels),
                    max(kernel.spill_bytes for kernel in kernels),
                    max(kernel.shared_bytes for kernel in kernels),
                    compiled.temp_bytes,
                    ", ".join(f"{number} {what}" for what, number in sorted(counts.items())),
                )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.aot",
        description="Print what every kernel of pallas_kernels takes on a GPU that need not be "
        "here: threads a block, registers a thread, spilled bytes a thread, bytes of shared memory "
        "a block, bytes of temporary memory of its case, and the tensor-core and copy instructions "
        "in its PTX.",
    )
    parser.add_argument("--gpu", default="H200", choices=GPUS)
    arguments = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # nothing runs: a GPU that is here is left alone
    for line in resource_table(arguments.gpu):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
