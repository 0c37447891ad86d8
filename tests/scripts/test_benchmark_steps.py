"""The steps' benchmark on the tiny model: which steps it times, and what it refuses."""

import importlib
import json

import numpy as np
import pytest

from jpaged.runner.batch import unpack
from jpaged.runner.buckets import Bucket


@pytest.fixture
def steps(scripts_on_path, tiny_checkpoint, monkeypatch):
    module = importlib.import_module("benchmark_steps")
    monkeypatch.setattr(module, "load_checkpoint", lambda *a, **k: tiny_checkpoint)
    monkeypatch.setattr(module, "DECODES", 8)  # fewer buckets to compile
    return module


def test_a_full_step_is_what_it_says(steps):
    bucket = Bucket(tokens=16, sequences=8, blocks=16)
    buffer = steps.full_step(bucket, [1, 1, 9], [40, 7, 9], num_blocks=5)
    batch = unpack(buffer, bucket)
    assert batch.query_starts.tolist() == [0, 1, 2, 11, 11, 11, 11, 11, 11]
    assert batch.context_lens.tolist() == [40, 7, 9, 0, 0, 0, 0, 0]
    assert int(batch.num_sampled) == 3
    assert batch.block_tables.min() >= 0 and batch.block_tables.max() < 5
    assert len(np.unique(batch.slots[:3])) == 3


def test_the_script(steps, run_benchmark, tmp_path):
    target = tmp_path / "steps.json"
    code, out, err = run_benchmark(
        "steps", "--contexts=32,48", "--max_num_batched_tokens=16", "--max_num_seqs=8",
        "--steps=1", f"--json={target}",
    )  # fmt: skip
    assert code == 0, err
    result = json.loads(target.read_text())
    buckets = [(row["tokens"], row["sequences"]) for row in result["buckets"]]
    assert buckets == [(8, 8), (16, 8)]
    assert ["chunk_in_next_ms" in row for row in result["buckets"]] == [True, False]
    cases = [(row["engine"], row["contexts"]) for row in result["contexts"]]
    assert len(cases) == len(set(cases)) == 9
    assert {contexts for _, contexts in cases} == {"32", "48", "48, others 32"}
    assert all(row["ms"] > 0 for row in result["contexts"])
    assert out.count("\n|") == 2 + 2 + 2 + 9


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--contexts=48,32", "contexts must ascend, got 48,32"),
        ("--contexts=x", "contexts must be a list of ints >= 1, got 'x'"),
        ("--contexts=600", "must be at most the model's 512, got 600"),
        ("--dtype=int8", "dtype must be 'auto', 'float32' or 'bfloat16', got 'int8'"),
    ],
)
def test_bad_flags_are_refused(steps, run_benchmark, flag, message):
    code, _, err = run_benchmark("steps", flag, "--max_num_batched_tokens=16")
    assert code == 2 and message in err
