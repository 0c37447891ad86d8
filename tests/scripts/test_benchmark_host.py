"""The host's benchmark: the imitated GPU, the decodes it is fed, and the script's words."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def host():
    sys.path.insert(0, str(SCRIPTS))
    try:
        spec = importlib.util.spec_from_file_location(
            "benchmark_host", SCRIPTS / "benchmark_host.py"
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules["benchmark_host"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPTS))
    return module


def test_an_imitated_step_begins_when_the_one_before_it_ends(host, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(host.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(host.time, "sleep", lambda seconds: clock.append(seconds))
    runner = host.ImitationRunner(8, 100, 0.010)
    first, second = runner.execute(None, None), runner.execute(None, None)
    assert (first.ready, second.ready) == pytest.approx((100.010, 100.020))
    assert second.tokens(3).tolist() == [7, 7, 7] and clock[1] == pytest.approx(0.020)
    clock[0] = 100.5
    assert runner.execute(None, None).ready == pytest.approx(100.510)
    second.tokens(1)
    assert len(clock) == 2  # what is there is not waited for


@pytest.mark.parametrize("overlap", [False, True])
def test_every_measured_step_decodes_all(host, overlap):
    decodes = host.Decodes(12, 40, 200, 20, overlap=overlap)
    before = decodes.scheduler.generated_tokens, decodes.scheduler.steps
    assert len(decodes.run(20)) == 20
    after = decodes.scheduler.generated_tokens, decodes.scheduler.steps
    assert (after[0] - before[0], after[1] - before[1]) == (12 * 20, 20)
    assert decodes.scheduler.memory.preemptions_recompute == 0
    decodes.scheduler.check_integrity()


def test_several_steps_a_call(host):
    decodes = host.Decodes(12, 40, 300, 40, overlap=True, max_decode_steps=4)
    before = decodes.scheduler.generated_tokens, decodes.scheduler.steps
    decodes.run(10)
    after = decodes.scheduler.generated_tokens, decodes.scheduler.steps
    assert (after[0] - before[0], after[1] - before[1]) == (12 * 40, 40)
    decodes.scheduler.check_integrity()


def test_the_script(host, capsys, tmp_path):
    target = tmp_path / "host.json"
    argv = ["host", "--batch=4", "--context=40", "--num_blocks=100", "--device_ms=1", "--steps=5"]
    assert host.main([*argv, f"--json={target}"]) == 0
    result = json.loads(target.read_text())
    (row,) = result["host"]
    assert (row["batch"], row["context"], row["num_blocks"]) == (4, 40, 100)
    (row,) = result["overlap"]
    # Sleeping never wakes up early; how late it does is the machine's business.
    assert row["plain_ms"] >= 1 and row["overlap_ms"] >= 0.9 and row["several_steps_ms"] >= 0.9
    assert capsys.readouterr().out.count("\n| 4 |") == 2


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--batch=0", "batch must be a list of ints >= 1, got '0'"),
        ("--context=8", "context must be at least 32, got 8"),
        ("--num_blocks=10", "num_blocks must be at least"),
    ],
)
def test_bad_flags_are_refused(host, capsys, flag, message):
    assert host.main(["host", flag]) == 2
    assert message in capsys.readouterr().err
