"""For the end-to-end benchmarks: a rival that is a small program, and a folder for it to load."""

import importlib
import json
import re
import stat
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
SMOLLM2_SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
# Stands for a Python with a rival in it: notes each job that it is given beside itself.
FAKE_PYTHON = """#!{python}
import json, os, sys

if sys.argv[1] == "-c":
    sys.exit({missing})
folder = os.path.dirname(os.path.abspath(__file__))
program, asked, answer = sys.argv[1:]
with open(asked) as file:
    job = json.load(file)
jobs = os.path.join(folder, "jobs.jsonl")
with open(jobs, "a") as file:
    facts = dict(program=os.path.basename(program), pythonpath=os.environ.get("PYTHONPATH"))
    print(json.dumps(job | facts), file=file)
with open(jobs) as file:
    turn = sum(os.path.basename(program) in line for line in file)  # from 1 on, of this rival
rival = "vllm" if "vllm" in program else "transformers"


def record(request):
    first, count = sum(request["prompt_token_ids"]), request["output_len"]
    return dict(
        start=request["arrival_time"],
        delivery_times=[request["arrival_time"] + 1.0 + i for i in range(count)],
        token_ids=[(first + i) % 1000 for i in range(count)],
    )


{more}
result = dict(
    load_seconds=7.0,
    warmup_seconds=0.5,
    runs=[[record(request) for request in run] for run in job["runs"]],
    facts={{}},
)
with open(answer, "w") as file:
    json.dump(result, file)
"""


@pytest.fixture(scope="session")
def scripts_on_path():
    """The scripts' folder is where they find each other."""
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture
def run_benchmark(scripts_on_path, capsys):
    """Runs a benchmark by name; returns exit code, standard output and standard error."""

    def run(name, *arguments):
        script = importlib.import_module(f"benchmark_{name}")
        code = script.main([f"benchmark_{name}.py", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def check_refusal(run_benchmark, monkeypatch):
    """Checks that a benchmark refuses its arguments, in one line, before anything loads."""
    import jpaged.llm

    monkeypatch.setattr(jpaged.llm, "LLM", None)

    def check(name, arguments, message):
        code, out, err = run_benchmark(name, *arguments)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert re.search(message, err)

    return check


@pytest.fixture
def tiny_in_place(monkeypatch, tiny_llm, tmp_path):
    """Puts the tiny LLM in the place of the one that would be loaded; returns the arguments."""
    import jpaged.llm

    arguments = {}

    def make(**given):
        arguments.update(given)
        return tiny_llm

    monkeypatch.setattr(jpaged.llm, "LLM", make)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    yield arguments
    assert not tiny_llm.engine.has_unfinished_requests()


class FakeRival:
    """Flags that run it, and the jobs that it was given."""

    def __init__(self, folder, python, model):
        self._folder = folder
        self.flags = ("--rival_python", str(python), "--rival_model", str(model))

    def jobs(self):
        return [json.loads(line) for line in (self._folder / "jobs.jsonl").read_text().splitlines()]


@pytest.fixture
def make_rival(tmp_path):
    """Makes a rival: `more` is Python that may change what it answers."""

    def make(more="", missing=0, shape=SMOLLM2_SHAPE):
        folder = tmp_path / "rival"
        model = folder / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(shape))
        python = folder / "python"
        python.write_text(FAKE_PYTHON.format(python=sys.executable, missing=missing, more=more))
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return FakeRival(folder, python, model)

    return make
