"""scripts/benchmark_preemption.py on the tiny model: what it times, what it refuses, its files."""

import importlib
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("benchmark_preemption")
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def bench(script, tiny_checkpoint):
    """24 tokens in three blocks of 8."""
    return script.Bench(tiny_checkpoint, 8, tokens=24, pool_tokens=128, backend="xla", seed=0)


def test_swapping_moves_the_blocks_to_others(bench):
    rng = np.random.default_rng(0)
    kv_pool, token_pool = (np.array(pool) for pool in bench.pools)
    assert kv_pool.shape[1] == 16
    kv_pool[:] = rng.standard_normal(kv_pool.shape)
    token_pool[:] = rng.integers(0, 1000, token_pool.shape)
    bench.pools = (jnp.array(kv_pool), jnp.array(token_pool))
    bench.swap_out()
    bench.swap_in()
    found_kv, found_tokens = (np.array(pool) for pool in bench.pools)
    changed = np.flatnonzero((found_tokens != token_pool).any(axis=1)).tolist()
    assert len(changed) == 3
    for block in changed:
        (source,) = np.flatnonzero((token_pool == found_tokens[block]).all(axis=1))
        assert source not in changed
        np.testing.assert_array_equal(found_kv[:, block], kv_pool[:, source])


def test_recompute_is_a_prefill_of_all_tokens(bench):
    before = bench._engine.stats()
    bench.recompute()
    after = bench._engine.stats()
    assert after.prompt_tokens - before.prompt_tokens == 24
    assert after.generated_tokens - before.generated_tokens == 1
    assert after.compilations_after_warmup == 0
    assert after.padded_tokens == 0


@pytest.mark.parametrize(
    ("recompute", "link", "auto"), [(1.0, 1e9, "swap"), (1e-6, 1e3, "recompute")]
)
def test_auto_is_decided_from_the_rates(
    script, bench, tiny_checkpoint, monkeypatch, recompute, link, auto
):
    monkeypatch.setattr(script, "Bench", lambda *arguments, **keywords: bench)
    monkeypatch.setattr(script, "measure", lambda bench, rounds: [recompute, 0.5, 0.25])
    monkeypatch.setattr("jpaged.runner.swap_pool.measure_link", lambda moves, pools: (pools, link))
    row = script.measure_row(
        tiny_checkpoint, 8, tokens=24, pool_tokens=128, backend="xla", rounds=1
    )
    assert row.auto == auto
    assert (row.recompute, row.swap_out, row.swap_in, row.swap) == (recompute, 0.5, 0.25, 0.75)


def test_medians_leave_the_first_round_out(script, monkeypatch):
    class Calls:
        recompute = swap_out = swap_in = staticmethod(lambda: None)

    seconds = iter([9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 5.0, 4.0, 1.0, 3.0, 3.0, 2.0])
    monkeypatch.setattr(script, "seconds_of", lambda call: next(seconds))
    assert script.measure(Calls(), 3) == [3.0, 3.0, 2.0]


@pytest.fixture
def run(script, tmp_path, monkeypatch, tiny_checkpoint, capsys):
    """Runs the script on the tiny model; returns exit code, outputs and what is in the JSON."""
    import jpaged.checkpoints

    monkeypatch.setattr(jpaged.checkpoints, "load_checkpoint", lambda *a, **k: tiny_checkpoint)

    def run(*arguments):
        file = tmp_path / "rows.json"
        code = script.main(["benchmark_preemption.py", "--json", str(file), *arguments])
        captured = capsys.readouterr()
        return code, captured, json.loads(file.read_text()) if file.exists() else {}

    return run


TINY = ("--tokens", "24", "--pool_tokens", "128", "--rounds", "1")


def test_the_script(run, script, bench, monkeypatch):
    monkeypatch.setattr(script, "_make_engine", lambda *arguments: bench._engine)  # compiled
    code, printed, result = run("--block_size", "1,8", *TINY)
    assert code == 0, printed.err
    assert (result["tokens"], result["rounds"], result["platform"]) == (24, 1, "cpu")
    assert [row["block_size"] for row in result["rows"]] == [1, 8]
    for row, line in zip(result["rows"], printed.out.splitlines()[2:], strict=True):
        assert min(row["recompute"], row["swap_in"], row["swap_out"], row["link"]) > 0
        assert row["auto"] in ("swap", "recompute")
        assert line.split()[0] == str(row["block_size"])
        assert line.split()[1] == f"{row['recompute'] * 1e3:.2f}"


@pytest.mark.parametrize(("recompute", "scale"), [(0.1, "linear"), (0.9, "log")])
def test_a_plot(script, tmp_path, monkeypatch, recompute, scale):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = []
    monkeypatch.setattr(pyplot, "close", drawn.append)
    rows = [
        script.Row(1, recompute, swap_in=0.02, swap_out=0.03, link=1e9, auto="swap"),
        script.Row(2, reason="no"),
        script.Row(16, recompute, swap_in=0.02, swap_out=0.03, link=1e9, auto="swap"),
    ]
    script.plot(rows, 256, "a title", tmp_path / "costs.png")
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = drawn[0].axes
    assert axes.get_yscale() == scale
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines["Swap in + out"] == [[1, pytest.approx(50)], [16, pytest.approx(50)]]
    assert lines["Recompute"][0] == [1, pytest.approx(recompute * 1e3)]
    monkeypatch.undo()
    pyplot.close(drawn[0])


def test_a_block_size_that_is_refused_is_a_row(run):
    code, printed, result = run("--block_size", "1", "--attention_backend", "mosaic", *TINY)
    assert code == 0
    (row,) = result["rows"]
    assert row["recompute"] is None
    assert "mosaic" in row["reason"]
    assert row["reason"] in printed.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("--block_size", "0"),
        ("--tokens", "0"),
        ("--tokens", "512"),
        ("--dtype", "float16"),
        ("--attention_backend", "cudnn"),
        ("--json", "no/such/folder/rows.json"),
        ("more",),
    ],
)
def test_bad_usage(run, arguments):
    code, printed, _ = run(*arguments)
    assert code == 2
    assert len(printed.err.splitlines()) == 1
