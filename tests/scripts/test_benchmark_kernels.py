"""scripts/benchmark_kernels.py: its points, its rows (those that were refused too), its files."""

import importlib
import json
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import pallas_kernels

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
CONTENDERS = {
    "mosaic",
    "triton",
    "xla",
    "JAX paged_attention",
    "cuDNN paged",
    "contiguous cuDNN",
    "contiguous Pallas",
    "contiguous XLA",
}


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path():
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def script(scripts_on_path):
    return importlib.import_module("benchmark_kernels")


@pytest.fixture(scope="module")
def benchmark(scripts_on_path):
    return importlib.import_module("_kernel_benchmark")


@pytest.fixture(scope="module")
def rivals(scripts_on_path):
    return importlib.import_module("_attention_rivals")


@pytest.fixture
def small_passes(benchmark, monkeypatch):
    monkeypatch.setitem(benchmark._PASS_BYTES, "cpu", 2**18)
    monkeypatch.setitem(benchmark._COPY_BYTES, "cpu", 2**22)


@pytest.fixture
def tiny(benchmark):
    """Four queries of 2 KV heads over contexts of up to 40 tokens."""
    return benchmark.Point(
        2, 40, num_heads=4, num_kv_heads=2, head_dim=16, block_size=8, dtype="float32"
    )


def run(script, *arguments):
    return script.main(["benchmark_kernels.py", *map(str, arguments)])


TINY_SWEEP = (
    *("--batch", "2", "--context", "40", "--heads", "4/2", "--head_dim", "16"),
    *("--block_size", "8", "--dtype", "float32", "--seconds", "0.01"),
)


def test_bytes_of_a_batch(benchmark):
    point = benchmark.Point(
        3, 100, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32"
    )
    keys_and_values = 2 * 300 * 2 * 64 * 4
    queries_and_outputs = 2 * 3 * 4 * 64 * 4
    assert point.num_bytes == keys_and_values + queries_and_outputs
    assert point.num_blocks == 3 * 7
    assert point.pool_bytes == 2 * 3 * 112 * 2 * 64 * 4


def test_a_skewed_batch_has_one_long_sequence_in_eight(benchmark):
    point = benchmark.Point(16, 1600, skewed=True)
    assert sorted(point.context_lens.tolist()) == [100] * 14 + [1600] * 2


def test_work_of_chunks_beside_decodes(benchmark):
    point = benchmark.Point(4, 300, chunks=1, num_heads=2, num_kv_heads=1, head_dim=8)
    assert point.num_tokens == 256 + 3
    seen = sum(range(300 - 256 + 1, 301)) + 3 * 300
    assert point.num_flops == 4 * 2 * 8 * seen


def test_every_contender_has_a_row_with_a_time_or_a_reason(script, tmp_path, capsys, small_passes):
    file = tmp_path / "rows.json"
    assert run(script, *TINY_SWEEP, "--json", file) == 0
    printed = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["platform"] == "cpu"
    assert result["jax"] == jax.__version__
    assert result["copy_bytes_per_second"] > 0
    for skewed in (False, True):
        rows = {r["contender"]: r for r in result["rows"] if r["skewed"] is skewed}
        assert set(rows) == CONTENDERS
        for name, row in rows.items():
            assert name in printed
            assert (row["seconds"] is None) == bool(row["reason"]), row
            assert not row["failed"]
        for name in ("triton", "mosaic"):
            assert "interpreted" in rows[name]["reason"]
        for name in ("xla", "contiguous XLA"):
            row = rows[name]
            assert row["bytes"] == 2 * row_tokens(skewed) * 2 * 16 * 4 + 2 * 2 * 4 * 16 * 4
            assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
            share = row["bytes_per_second"] / result["copy_bytes_per_second"]
            assert row["copy_share"] == pytest.approx(share)
            assert row["relative_error"] < 1e-5
            assert row["pools"] >= 1
    assert any("price of paging" in line for line in result["comparisons"])


def row_tokens(skewed):
    return 40 + 2 if skewed else 2 * 40


def test_chunks_beside_decodes_are_timed_too(script, benchmark, rivals, small_passes):
    point = benchmark.Point(
        2, 256, chunks=1, num_heads=4, num_kv_heads=2, head_dim=16, dtype="float32"
    )
    chosen = rivals.contenders()
    chosen = {name: chosen[name] for name in ("xla", "JAX paged_attention")}
    ours, rival = benchmark.run_point(point, chosen, seconds=0.01)
    assert ours.seconds > 0
    assert ours.relative_error < 1e-5
    assert "decode only" in rival.reason
    assert "2+1c" in script.table_line(ours, copy_rate=1e9)


def test_the_sweep_has_chunks_unless_told_otherwise(script):
    def points(*more):
        values = script.parse_flags(["", "--batch", "2", "--context", "256", *more])
        return script.make_points(values, "cpu")

    assert [point.chunks for point in points() if point.chunks] == [1]
    assert not any(point.chunks for point in points("--noragged"))


def test_a_rival_that_is_missing_is_a_row(benchmark, rivals, tiny, monkeypatch, small_passes):
    module = "jax.experimental.pallas.ops.gpu.paged_attention"
    monkeypatch.setitem(sys.modules, module, None)
    chosen = {"JAX paged_attention": rivals.jax_paged}
    (row,) = benchmark.run_point(tiny, chosen, seconds=0.01)
    assert row.seconds is None
    assert f"has no {module}" in row.reason


def operators_with(**functions):
    fake = types.SimpleNamespace(
        paged_attention=pallas_kernels.paged_attention,
        plan_attention=pallas_kernels.plan_attention,
    )
    for name, function in functions.items():
        setattr(fake, name, function)
    return fake


def time_xla(benchmark, rivals, point, **functions):
    chosen = rivals.contenders(operators_with(**functions))
    (row,) = benchmark.run_point(point, {"xla": chosen["xla"]}, seconds=0.01)
    return row


def test_a_backend_of_ours_that_breaks_is_a_failed_row(benchmark, rivals, tiny, small_passes):
    def broken(*arguments, **keywords):
        raise RuntimeError("no such instruction")

    row = time_xla(benchmark, rivals, tiny, paged_attention=broken)
    assert row.failed
    assert row.seconds is None
    assert row.reason == "RuntimeError: no such instruction"


def test_a_backend_of_ours_that_is_wrong_is_a_failed_row(benchmark, rivals, tiny, small_passes):
    def wrong(q, *arguments, **keywords):
        return pallas_kernels.paged_attention(q * 2, *arguments, **keywords)

    row = time_xla(benchmark, rivals, tiny, paged_attention=wrong)
    assert row.failed
    assert "WRONG RESULT" in row.reason


def test_the_exit_code_tells_of_failed_rows(script, rivals, monkeypatch, small_passes):
    def broken(*arguments, **keywords):
        raise RuntimeError("no such instruction")

    fake = rivals.contenders(operators_with(paged_attention=broken))
    monkeypatch.setattr(rivals, "contenders", lambda: fake)
    assert run(script, *TINY_SWEEP, "--contenders", "xla") == 1


def test_what_does_not_fit_into_memory_is_a_row(benchmark, rivals, tiny, monkeypatch):
    monkeypatch.setattr(benchmark, "free_bytes", lambda: 2**10)
    rows = list(benchmark.run_point(tiny, rivals.contenders(), seconds=0.01))
    assert {row.contender for row in rows} == CONTENDERS
    assert all("GiB" in row.reason for row in rows)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--heads", "9/2"],
        ["--heads", "8"],
        ["--dtype", "float64"],
        ["--batch", "0"],
        ["--batch", ""],
        ["--contenders", "flash"],
        ["--json", "no/such/folder/rows.json"],
        ["--no_such_flag"],
        ["more"],
    ],
)
def test_bad_usage(script, arguments, capsys):
    assert run(script, *arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_a_plot_without_matplotlib_is_refused_before_the_sweep(script, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(script, "--plot", "times.png") == 2
    assert "bench" in capsys.readouterr().err


def test_plot(script, tmp_path, small_passes):
    pytest.importorskip("matplotlib")
    file = tmp_path / "times.png"
    assert run(script, *TINY_SWEEP, "--contenders", "xla,triton", "--plot", file) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def compile_for_h200(run, arguments):
    from pallas_kernels import aot

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), arguments)
    try:
        return aot.compile_for(run, *shapes, gpu="H200")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))  # without the CUDA plugin


@pytest.mark.parametrize("name", ["JAX paged_attention", "contiguous Pallas", "triton"])
def test_compiles_for_a_gpu(benchmark, rivals, monkeypatch, small_passes, name):
    """What runs on a GPU alone is at least compiled for one."""
    monkeypatch.setattr(rivals, "platform", lambda: "gpu")
    point = benchmark.Point(2, 200, num_heads=8, num_kv_heads=2, head_dim=64)
    inputs = benchmark.make_inputs(point)
    for prepared in rivals.contenders()[name](point, inputs):
        compiled = compile_for_h200(prepared.run, prepared.arguments)
        assert "paged_attention" in compiled.ptx or "mha_forward" in compiled.ptx
