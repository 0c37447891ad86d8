"""scripts/check_device.py: what it makes of wrong kernels, and of children that hang or crash."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path():
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def children(scripts_on_path):
    return importlib.import_module("_child_process")


@pytest.fixture(scope="module")
def script(scripts_on_path):
    return importlib.import_module("check_device")


# Children that hang and crash. These have no JAX, so that they start at once.


@pytest.fixture
def run_group(children, tmp_path):
    """Runs a group whose child is this Python code, with `report(**event)` and `skip` in scope."""

    def run(code, *, idle_seconds=2.0, budget=60.0):
        file = tmp_path / "child.py"
        file.write_text(
            "import json, os, sys, time\n"
            "skip = json.loads(sys.argv[2])\n"
            "def report(**event):\n"
            "    with open(sys.argv[1], 'a') as file:\n"
            "        file.write(json.dumps(event) + '\\n')\n"
            "def check(name, run):\n"
            "    if name not in skip:\n"
            "        report(started=name)\n"
            "        report(name=name, status='pass', detail=str(run()))\n"
            f"{code}\n"
        )
        results = children.run_group(
            "group",
            lambda report, done: [sys.executable, str(file), report, json.dumps(done)],
            environment=os.environ,
            idle_seconds=idle_seconds,
            budget=children.Budget(budget),
            rerun=lambda name: f"RERUN {name}",
        )
        return {result.name: result for result in results}

    return run


PLAN = "report(planned=[name for name in ('a', 'b', 'c') if name not in skip])\n"


def test_results_of_a_child(run_group):
    results = run_group(PLAN + "for name in 'abc': check(name, lambda: 7)")
    assert [(r.name, r.status, r.detail) for r in results.values()] == [
        ("a", "pass", "7"),
        ("b", "pass", "7"),
        ("c", "pass", "7"),
    ]


def test_a_check_that_hangs_is_killed_and_the_others_are_run(run_group, tmp_path):
    pids = tmp_path / "pids"
    hang = (
        "import subprocess\n"
        "def hang():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"    open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{child.pid}} ')\n"
        "    time.sleep(600)\n"
    )
    began = time.monotonic()
    results = run_group(
        hang + PLAN + "check('a', int)\ncheck('b', hang)\ncheck('c', int)", idle_seconds=1.5
    )
    assert time.monotonic() - began < 60
    assert {name: r.status for name, r in results.items()} == {
        "a": "pass",
        "b": "hang",
        "c": "pass",
    }
    assert "next:" in results["b"].detail
    assert "RERUN b" in results["b"].detail
    for pid in pids.read_text().split():
        assert not is_running(int(pid))


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a zombie whose parent died waits for init


def test_a_check_that_kills_its_process_is_reported_and_the_others_are_run(run_group):
    crash = "def crash():\n    print('illegal address', flush=True)\n    os.abort()\n"
    results = run_group(crash + PLAN + "check('a', crash)\ncheck('b', int)\ncheck('c', int)")
    assert {name: r.status for name, r in results.items()} == {
        "a": "crash",
        "b": "pass",
        "c": "pass",
    }
    assert "by signal 6" in results["a"].detail
    assert "illegal address" in results["a"].detail
    assert "RERUN a" in results["a"].detail


def test_after_two_casualties_the_rest_of_a_group_is_not_tried(run_group):
    code = PLAN + "for name in 'abc': check(name, lambda: os._exit(3))"
    results = run_group(code)
    assert [r.status for r in results.values()] == ["crash", "crash", "not run"]
    assert "exit code 3" in results["a"].detail


def test_a_child_that_does_not_start_is_reported_with_its_last_words(run_group):
    (result,) = run_group("raise SystemExit('no module named x')").values()
    assert (result.name, result.status) == ("starting", "crash")
    assert "no module named x" in result.detail
    assert not result.is_good


def test_what_the_budget_does_not_reach_is_not_run(run_group):
    began = time.monotonic()
    results = run_group(PLAN + "check('a', int)\ncheck('b', lambda: time.sleep(600))", budget=2.0)
    assert time.monotonic() - began < 30
    assert [r.status for r in results.values()] == ["pass", "not run", "not run"]
    assert "budget" in results["c"].detail


def test_a_group_without_checks_is_no_failure(run_group):
    assert run_group("report(planned=[])") == {}


# Planted faults. The operators stand in for a backend: xla with something wrong about it, since an
# interpreter would take its time.


def operators(**faults):
    """The public operators by xla, whatever backend is asked for; `faults` replace some."""

    def by_xla(name):
        def operator(*arguments, backend, **keywords):
            return getattr(pallas_kernels, name)(*arguments, backend="xla", **keywords)

        return operator

    made = {name: by_xla(name) for name in pallas_kernels.__all__}
    wrapped = {
        name: lambda *a, _fault=fault, _right=made[name], **k: _fault(_right, *a, **k)
        for name, fault in faults.items()
    }
    return types.SimpleNamespace(**(made | wrapped))


@pytest.fixture
def run_checks(scripts_on_path, tmp_path):
    """Runs checks of a group in this process; {name: (status, detail)}."""
    groups = importlib.import_module("_device_groups")

    def run(group, only, operators):
        report = tmp_path / "report"
        report.write_text("")
        assert groups.run_child(groups.Task(group, only, [], str(report)), operators) == 0
        events = [json.loads(line) for line in report.read_text().splitlines()]
        return {e["name"]: (e["status"], e["detail"]) for e in events if "name" in e}

    return run


def test_the_cases_are_what_their_names_say(scripts_on_path):
    checks = importlib.import_module("_device_checks")
    shapes, features = checks.shape_cases(), checks.feature_cases()
    names = [case.name for case in shapes + features]
    assert len(set(names)) == len(names)
    for case in shapes + features:
        shape = case.shape
        words = case.name.replace("the same, ", "").split(", ")
        for word in words:
            if word.startswith(("float", "bfloat")):
                assert shape.dtype == word
            elif word.startswith("D "):
                assert shape.head_dim == int(word[2:])
            elif word.startswith("B "):
                assert shape.block_size == int(word[2:])
            elif word.startswith("H/K "):
                assert f"{shape.num_heads}/{shape.num_kv_heads}" == word[4:]
            elif word == "all features":
                assert case.features >= set(checks._FEATURES)
            elif not case.name.startswith("the same"):
                assert word in case.features
    alone = {feature for case in features if len(case.features) == 1 for feature in case.features}
    assert alone >= set(checks._FEATURES)


ATTENTION = "all features, H/K 9/3"


def attend_with(run_checks, fault):
    results = run_checks("triton features", ATTENTION, operators(paged_attention=fault))
    ((status, detail),) = results.values()
    return status, detail


def test_right_operators_pass(run_checks):
    results = run_checks("triton features", ATTENTION, operators())
    assert [status for status, _ in results.values()] == ["pass"]
    results = run_checks("triton pool", "float32", operators())
    assert [status for status, _ in results.values()] == ["pass"] * 4


def test_a_wrong_mask_is_reported_with_the_place(run_checks):
    def one_key_less(right, q, pool, layer, tables, starts, lens, **keywords):
        keywords["window"] = keywords["window"] - 1
        return right(q, pool, layer, tables, starts, lens, **keywords)

    status, detail = attend_with(run_checks, one_key_less)
    assert status == "FAIL"
    assert "relative error" in detail
    assert "of sequence" in detail
    assert "next:" in detail


def test_a_leak_of_unwritten_memory_is_reported(run_checks):
    def leak(right, q, pool, *arguments, **keywords):
        out, lse = right(q, pool, *arguments, **keywords)
        return out + pool.reshape(-1).sum().astype(out.dtype), lse

    status, detail = attend_with(run_checks, leak)
    assert status == "FAIL"
    assert "NaN" in detail


def test_a_result_that_changes_is_reported_as_a_race(run_checks):
    calls = iter(range(100))

    def racy(right, *arguments, **keywords):
        out, lse = right(*arguments, **keywords)
        step = jax.pure_callback(
            lambda: np.float32(next(calls)), jax.ShapeDtypeStruct((), jnp.float32)
        )
        return out + jnp.where(lse[..., None] > -jnp.inf, step * 2**-20, 0).astype(out.dtype), lse

    def float32_only(right, q, *arguments, **keywords):
        return racy(right, q, *arguments, **keywords)

    results = run_checks(
        "triton pool", "merge_states: float32", operators(merge_states=float32_only)
    )
    ((status, detail),) = results.values()
    assert status == "FAIL"
    assert "race" in detail


def test_an_exception_comes_back_as_text(run_checks):
    def broken(right, *arguments, **keywords):
        raise RuntimeError("ptxas:\nno such instruction")

    status, detail = attend_with(run_checks, broken)
    assert status == "FAIL"
    assert "RuntimeError: ptxas: no such instruction" in detail


def test_what_must_be_supported_fails_if_it_is_not(run_checks):
    def unsupported(right, *arguments, **keywords):
        raise NotImplementedError("not soft caps")

    status, detail = attend_with(run_checks, unsupported)
    assert status == "FAIL"
    assert "not soft caps" in detail
    faulty = operators(paged_attention=unsupported)
    results = run_checks("mosaic shapes", "float32", faulty)
    assert [status for status, _ in results.values()] == ["unsupported"]


@pytest.mark.parametrize(
    ("check", "name"),
    [
        ("write_kv", "write_kv"),
        ("copy_blocks", "copy_blocks"),
        ("gather", "gather_blocks"),
        ("scatter", "scatter_blocks"),
    ],
)
def test_a_wrong_number_in_the_pool_is_reported(run_checks, check, name):
    def off(right, *arguments, **keywords):
        result = right(*arguments, **keywords)
        return result.at[1, 2, 0, 1, 0, 3].set(5)

    results = run_checks("triton pool", f"{check}.*float32", operators(**{name: off}))
    ((status, detail),) = results.values()
    assert status == "FAIL"
    assert "(1, 2, 0, 1, 0, 3)" in detail


@pytest.fixture
def run_large_pool(scripts_on_path, monkeypatch):
    """The check of a pool beyond 2^31 numbers, on one a thousand times smaller."""
    checks = importlib.import_module("_device_pool_checks")
    batches = importlib.import_module("_device_batches")
    monkeypatch.setattr(checks, "_LARGE", 2**21)
    shape = batches.Shape(
        num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, dtype="float32", max_context=128
    )
    return lambda operators: checks._check_large_pool(shape, "triton", operators)


def test_a_large_pool(run_large_pool):
    assert "error" in run_large_pool(operators())


def test_offsets_that_overflow_in_a_large_pool_are_reported(run_large_pool):
    def overflow(right, pool, layer, k, v, slots, **keywords):
        return right(pool, layer, k, v, slots % 2**12, **keywords)

    checks = importlib.import_module("_device_pool_checks")
    with pytest.raises(checks.Mismatch, match="overflow 32 bits"):
        run_large_pool(operators(write_kv=overflow))


# What two models say to the same prompts.


@pytest.fixture(scope="module")
def models(scripts_on_path):
    return importlib.import_module("_device_models")


@pytest.fixture
def answers(models):
    return models.Answers(
        tokens=[[5, 6, 7], [1, 2, 3]],
        chosen=[[-1.0, -2.0, -1.5], [-1.0, -1.0, -1.0]],
        gaps=[[0.1, 1e-5, 0.1], [0.1, 0.1, 0.1]],
        prompts=[{1: -1.0, 2: -2.0}, {3: -1.25}],
    )


def test_equal_tokens(models, answers):
    assert models.compare_tokens(answers, answers).startswith("6 tokens equal, 0 ties")


def test_a_tie_ends_the_comparison_of_a_sequence(models, answers):
    other = dataclasses.replace(answers, tokens=[[5, 9, 9], [1, 2, 3]])
    assert models.compare_tokens(other, answers).startswith("4 tokens equal, 1 ties")


def test_other_tokens_are_no_tie(models, answers):
    other = dataclasses.replace(answers, tokens=[[5, 6, 7], [1, 9, 3]])
    with pytest.raises(models.Mismatch, match="token 1 of prompt 1 is 9, expected 2"):
        models.compare_tokens(other, answers)


def test_log_probabilities_that_are_off(models, answers):
    other = dataclasses.replace(answers, prompts=[{1: -1.0, 2: -2.01}, {3: -1.25}])
    with pytest.raises(models.Mismatch, match=r"differ by up to 1\.0e-02"):
        models.compare_tokens(other, answers)
    nan = dataclasses.replace(answers, prompts=[{1: float("nan")}, {}])
    with pytest.raises(models.Mismatch):
        models.compare_tokens(nan, answers)


def test_bfloat16_is_held_against_what_rounding_costs(models, answers):
    def off_by(x):
        return dataclasses.replace(answers, prompts=[{1: -1.0 + x, 2: -2.0 - x}, {3: -1.25}])

    assert "6 of 6 tokens equal" in models.compare_bfloat16(off_by(0.02), off_by(0.01), answers)
    with pytest.raises(models.Mismatch, match="root mean square"):
        models.compare_bfloat16(off_by(0.03), off_by(0.01), answers)


# The whole script.


def run_script(script, *arguments, timeout=600):
    return subprocess.run(
        [sys.executable, script, *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_a_fault_in_one_backend_is_the_exit_code(tmp_path):
    """Also that children are started by the program that the parent was started by."""
    program = tmp_path / "check_faulty.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(SCRIPTS)!r})\n"
        "import check_device, types\n"
        "def copy_blocks(pool, sources, destinations, *, backend):\n"
        "    import pallas_kernels\n"
        "    right = pallas_kernels.copy_blocks(pool, sources, destinations, backend='xla')\n"
        "    return right if backend == 'triton' else right * 2\n"
        "faulty = types.SimpleNamespace(copy_blocks=copy_blocks)\n"
        "program = [sys.executable, __file__]\n"
        "sys.exit(check_device.main(sys.argv, program=program, operators=faulty))\n"
    )
    file = tmp_path / "results.json"
    done = run_script(
        program,
        *("--groups", "triton pool,mosaic pool", "--only", "copy_blocks: float32"),
        *("--json", str(file)),
    )
    assert done.returncode == 1, done.stderr
    result = json.loads(file.read_text())
    status = {row["group"]: row["status"] for row in result["results"]}
    assert status == {"triton pool": "pass", "mosaic pool": "FAIL"}
    assert result["held"] is False
    assert "No GPU was found" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("NOT all held: 1 pass, 1 FAIL")


def test_all_held(script, capfd, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    only = ["--groups", "triton pool", "--only", "copy_blocks: float32"]
    assert script.main(["check_device.py", *only]) == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("all held: 1 pass")


def test_nothing_that_matches_is_no_success(script, capfd, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    only = ["--groups", "triton pool", "--only", "no such check"]
    assert script.main(["check_device.py", *only]) == 1
    assert "nothing was run" in capfd.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--budget_seconds", "0"],
        ["--only", "("],
        ["--groups", "kernels"],
        ["--child", "kernels"],
        ["--jobs", "-1"],
        ["--no_such_flag"],
        ["more"],
    ],
)
def test_bad_usage(script, arguments, capsys):
    assert script.main(["check_device.py", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1


def test_a_gpu_that_jax_does_not_use_is_pointed_out(script, monkeypatch):
    monkeypatch.setattr(script, "_nvidia_smi", lambda *arguments: "GPU 0: NVIDIA H200")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert "jax[cuda13]" in script._hidden_gpu()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # on purpose, then
    assert script._hidden_gpu() is None


@pytest.mark.slow
def test_everything_interpreted(tmp_path):
    done = run_script(SCRIPTS / "check_device.py", "--budget_seconds", "900", timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens/s" in done.stdout
