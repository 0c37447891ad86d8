"""Compiling for GPUs that are not here. The process runs on a CPU, as all tests do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from pallas_kernels import aot, cases, ptx, write_kv

REASON = "compiling for a GPU needs JAX's CUDA plugin: the extra `aot`"
MIB = 2**20
PLUGIN_FOR_B200 = jax.__version_info__ >= (0, 12)
GPUS = [
    pytest.param(
        gpu,
        marks=pytest.mark.skipif(
            gpu == "B200" and not PLUGIN_FOR_B200, reason="B200 needs jax 0.12 or newer"
        ),
    )
    for gpu in aot.GPUS
]


@pytest.fixture
def plugin() -> None:
    pytest.importorskip("jax_plugins.xla_cuda12", reason=REASON)


def shape(*sizes: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def product(x, y):
    return jax.nn.relu(x @ y)


@pytest.mark.parametrize("gpu", GPUS)
def test_each_gpu_by_name(plugin, gpu):
    x = shape(256, 256, dtype=jnp.bfloat16)
    compiled = aot.compile_for(product, x, x, gpu=gpu)
    assert compiled.argument_bytes == 2 * 256 * 256 * 2
    assert compiled.output_bytes == 256 * 256 * 2
    assert compiled.alias_bytes == 0
    assert compiled.hlo.startswith("HloModule")
    architecture = {"A": "sm_80", "H": "sm_90a", "B": "sm_100a"}[gpu[0]]
    assert f".target {architecture}" in compiled.ptx
    assert compiled.instructions["mma.sync"] + compiled.instructions["wgmma"] > 0
    assert sum((k.instructions for k in compiled.kernels.values()), ptx.Counter()) == (
        compiled.instructions
    )
    for kernel in compiled.kernels.values():
        assert 0 < kernel.registers <= 255
        assert kernel.spill_bytes == 0
        assert 0 <= kernel.shared_bytes <= 232448
        assert kernel.threads % 32 == 0
        assert not kernel.pallas


def test_the_function_is_traced_for_the_gpu_and_the_process_stays_on_its_cpu(plugin):
    seen = []

    @jax.jit
    def inner(x):  # jitted, so that a trace for one GPU must not serve another
        seen.append(jax.sharding.get_abstract_mesh().abstract_device)
        return x + 1

    def spread(x):
        return jax.shard_map(inner, in_specs=P("tp"), out_specs=P("tp"))(inner(x))

    for gpu in ("A100-80GB", "H200"):
        aot.compile_for(spread, shape(8, 8), gpu=gpu)
    assert [device.platform for device in seen] == ["gpu"] * 4
    assert [device.device_kind for device in seen] == (
        ["NVIDIA A100-SXM4-80GB"] * 2 + ["NVIDIA H200"] * 2
    )
    assert [device.num_cores for device in seen] == [108, 108, 132, 132]
    assert [device.compute_capability for device in seen] == ["8.0", "8.0", "9.0", "9.0"]

    inner(jnp.zeros(8))
    assert seen[-1] is None
    assert jax.default_backend() == "cpu"


def test_a_donated_argument_is_updated_in_place(plugin):
    pool = shape(256, 256, 256)

    def update(pool, index, row):
        return pool.at[index].set(row)

    donated, copied = (
        aot.compile_for(update, pool, shape(dtype=jnp.int32), shape(256, 256), donate_argnums=d)
        for d in (0, ())
    )
    assert donated.alias_bytes == 64 * MIB == donated.output_bytes
    assert donated.temp_bytes < MIB
    assert copied.alias_bytes == 0


def test_the_kv_pool_is_written_in_place_by_the_loop_over_layers(plugin):
    layers, blocks, heads, size, width, tokens = 4, 1024, 2, 16, 64, 8
    pool = shape(layers, blocks, 2, heads, size, width, dtype=jnp.bfloat16)
    kv = shape(tokens, heads, width, dtype=jnp.bfloat16)

    def step(pool, k, v, slots):
        def body(pool, layer):
            return write_kv(pool, layer, k, v, slots, backend="xla"), None

        return lax.scan(body, pool, jnp.arange(layers))[0]

    compiled = aot.compile_for(step, pool, kv, kv, shape(tokens, dtype=jnp.int32), donate_argnums=0)
    assert compiled.alias_bytes == 32 * MIB
    assert compiled.temp_bytes < MIB


def test_arguments_may_be_arrays_and_trees(plugin):
    def f(weights, x):
        return jnp.tanh(x @ weights["w"] + weights["b"][0])

    weights = {"w": jnp.ones((64, 128)), "b": [shape(128)]}
    compiled = aot.compile_for(jax.jit(f), weights, shape(32, 64))
    assert compiled.argument_bytes == 4 * (64 * 128 + 128 + 32 * 64)


@pytest.mark.parametrize(("num_gpus", "num_hosts"), [(1, 1), (8, 1), (8, 2)])
def test_collectives(plugin, num_gpus, num_hosts):
    def total(x):
        return jax.shard_map(lambda x: lax.psum(x, "tp"), in_specs=P("tp"), out_specs=P())(x)

    compiled = aot.compile_for(
        total, shape(128, 64), num_gpus=num_gpus, num_hosts=num_hosts, in_specs=P("tp")
    )
    gpus = num_gpus * num_hosts
    assert compiled.argument_bytes == 128 * 64 * 4 // gpus
    assert ("all-reduce" in compiled.hlo) == (gpus > 1)
    assert f"num_partitions={gpus}" in compiled.hlo or gpus == 1


def test_in_specs_place_each_argument(plugin):
    def f(x, weights):
        return x @ weights["up"] @ weights["down"]

    weights = {"up": shape(256, 1024), "down": shape(1024, 256)}
    specs = (P(), {"up": P(None, "tp"), "down": P("tp", None)})
    compiled = aot.compile_for(f, shape(64, 256), weights, num_gpus=8, in_specs=specs)
    assert compiled.argument_bytes == 4 * (64 * 256 + 2 * 256 * 1024 // 8)
    assert "all-reduce" in compiled.hlo


def test_triton_kernels_are_known_from_those_of_xla(plugin):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = plgpu.dot(x_ref[...], y_ref[...]).astype(out_ref.dtype)

    def f(x, y):
        def body(x, _):  # in a loop: kernels are found inside one too
            z = pl.pallas_call(
                kernel, out_shape=x, name="square",
                compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            )(x, y)  # fmt: skip
            return jnp.tanh(z), None

        return lax.scan(body, x, length=3)[0]

    x = shape(64, 64, dtype=jnp.bfloat16)
    kernels = aot.compile_for(f, x, x, gpu="A100-80GB").kernels
    assert [name for name, kernel in kernels.items() if kernel.pallas] == ["square"]
    assert kernels["square"].threads == 128
    assert kernels["square"].shared_bytes >= 2 * 64 * 64  # the operands are staged there
    assert kernels["square"].instructions["mma.sync"] > 0
    assert len(kernels) > 1


def test_compiling_twice_reports_the_same(plugin):
    """The suite keeps a persistent compilation cache: what comes from there has no PTX."""
    x = shape(64, 64)
    first, second = (aot.compile_for(product, x, x) for _ in range(2))
    assert first.kernels == second.kernels != {}
    assert first.instructions == second.instructions


def test_a_process_on_no_particular_platform_can_compile_too(plugin):
    program = (
        "import jax, jax.numpy as jnp; from pallas_kernels import aot; x = jnp.ones((8, 8));"
        "print(aot.compile_for(lambda x: x + x, x).output_bytes, float((x + x).sum()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_PLATFORMS": ""},
        cwd=Path(aot.__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["256", "128.0"]


def test_the_command_prints_a_row_for_each_kernel(plugin, capsys, monkeypatch):
    def unsupported(x):
        raise NotImplementedError("window is not built yet")

    x = shape(64, 64)
    monkeypatch.setattr(
        aot,
        "kernel_cases",
        lambda: [
            cases.KernelCase("xla: product", product, (x, x)),
            cases.KernelCase("mosaic: window", unsupported, (x,)),
        ],
    )
    assert aot.main(["--gpu", "H100"]) == 0
    header, row, refused = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["case", "kernel", "threads", "registers"]
    assert row.startswith("xla: product") and "1 by XLA" in row and "ld.global" in row
    assert refused.split(maxsplit=2) == ["mosaic:", "window", "window is not built yet"]


def test_every_case_of_the_command_can_be_traced():
    names = []
    for case in cases.kernel_cases():
        names.append(case.name)
        if case.name.startswith("xla"):
            jax.eval_shape(case.fn, *case.avals)
    assert len(set(names)) == len(names)
    assert {"xla: paged_attention, decode", "xla: write_kv"} <= set(names)


def test_bad_arguments_are_refused():
    x = shape(8, 8)
    with pytest.raises(ValueError, match=r"gpu must be one of A100-40GB, .*B200, got 'V100'"):
        aot.compile_for(product, x, x, gpu="V100")
    with pytest.raises(ValueError, match="num_gpus must be at least 1, got 0"):
        aot.compile_for(product, x, x, num_gpus=0)
    with pytest.raises(TypeError, match="num_hosts must be an int, got bool"):
        aot.compile_for(product, x, x, num_hosts=True)


def test_an_argument_that_is_no_array_is_refused(plugin):
    with pytest.raises(TypeError, match=r"avals must be arrays .*, got float"):
        aot.compile_for(lambda x, y: x * y, shape(8), 2.0)


@pytest.mark.skipif(PLUGIN_FOR_B200, reason="jax 0.12 knows B200")
def test_b200_needs_a_newer_jax():
    with pytest.raises(NotImplementedError, match=r"gpu 'B200' needs jax 0\.12 or newer, got 0\.1"):
        aot.compile_for(product, shape(8, 8), shape(8, 8), gpu="B200")


def test_without_the_plugin_the_error_says_what_to_install(monkeypatch):
    def no_topology(**kwargs):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(aot.topologies, "get_topology_desc", no_topology)
    monkeypatch.setattr(aot, "_PLUGINS", ("jax_plugins.absent",))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax\[cuda12-local\]==0\.1"):
        aot.compile_for(product, shape(8, 8), shape(8, 8))


def test_without_ptxas_the_kernels_say_what_to_install(plugin, monkeypatch):
    compiled = aot.compile_for(product, shape(64, 64), shape(64, 64))
    monkeypatch.setattr(ptx.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(ptx.shutil, "which", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install nvidia-cuda-nvcc-cu12"):
        _ = compiled.kernels
    assert compiled.instructions  # the PTX needs no ptxas


def test_instructions_are_counted_by_family():
    text = """
    .entry a( .param .u64 p ) .reqntid 128, 2, 1 {
      // mma.sync in a comment
      wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, p, 1, 1, 0, 0;
      wgmma.commit_group.sync.aligned;
      @%p1 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
      cp.async.commit_group;
      cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd];
      cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd], 16, [%r3];
      cp.async.bulk.commit_group;
      cp.async.bulk.wait_group.read 0;
    }
    .entry b() { { mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 x; ld.global.v4.b32 x; } }
    """
    assert ptx.instruction_counts(text) == {
        "wgmma": 1,
        "cp.async": 1,
        "cp.async.bulk.tensor": 1,
        "cp.async.bulk": 1,
        "mma.sync": 1,
        "ld.global": 1,
    }
    found = ptx.entries(text)
    assert list(found) == ["a", "b"]
    assert ptx.threads(found["a"]) == 256
    assert ptx.threads(found["b"]) == 0
    assert ptx.instruction_counts(found["b"]) == {"mma.sync": 1, "ld.global": 1}


def test_the_log_of_ptxas_is_read():
    log = """ptxas info    : Compiling entry function 'decode' for 'sm_80'
ptxas info    : Function properties for decode
    16 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'copy' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, 368 bytes cmem[0]
"""
    assert ptx.ptxas_resources(log) == {"decode": (255, 16, 1024), "copy": (8, 0, 0)}
