"""Runs a benchmark's job on a backend: our engine, or a rival in a Python of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _repository  # noqa: F401 (makes the packages importable)
import psutil

from jpaged.simulation import Workload

_FOLDER = Path(__file__).resolve().parent
# Each has a program, and a module that must be importable.
BACKENDS = {
    "jpaged": ("_backend_jpaged.py", "jax"),
    "vllm": ("_rival_vllm.py", "vllm"),
    "transformers": ("_rival_transformers.py", "transformers"),
}
# Of a Hugging Face config.json: what must agree for two folders to hold the same model.
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_TAIL_LINES = 15
_BUSY = 0.15  # share of the machine's CPU time that others take, above which figures are doubtful
_BUSY_SECONDS = 0.2


class BackendError(Exception):
    """A backend failed; told on standard error, and the exit code is 1."""


class Contender(NamedTuple):
    """A backend as the flags describe it.

    name       what it is called
    backend    one of BACKENDS
    model      what it loads
    python     its Python
    arguments  of a rival: more arguments; of our engine: settings that differ from the flags'
    """

    name: str
    backend: str
    model: str
    python: str
    arguments: dict[str, Any]

    def check_installed(self) -> None:
        """Raise ValueError if its Python or its package is not there."""
        if self.backend == "jpaged":
            return
        module = BACKENDS[self.backend][1]
        probe = f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"
        try:
            done = subprocess.run(
                [self.python, "-c", probe], env=self._environment(), capture_output=True
            )
        except OSError as error:
            raise ValueError(
                f"rival_python must be a Python, got {self.python!r}: {error}"
            ) from None
        if done.returncode:
            raise ValueError(
                f"rival_python must have {module} installed for {self.name}, got {self.python!r}"
            )

    def _environment(self) -> dict[str, str]:
        hidden = () if self.backend == "jpaged" else ("PYTHONPATH", "PYTHONHOME")
        return {name: value for name, value in os.environ.items() if name not in hidden}

    def run(self, job: dict[str, Any], *, alone: bool) -> dict[str, Any]:
        """The job's result: see `_request_loop.run_job`.

        alone  whether nobody else runs: our engine then runs in this process

        Raises:
            BackendError: it failed; the message has its last words.
        """
        if self.backend == "jpaged":
            job = job | {"engine": job["engine"] | self.arguments}
        else:
            job = job | {"rival_model": self.model, "rival_args": self.arguments}
        if alone and self.backend == "jpaged":
            from _backend_jpaged import load
            from _request_loop import run_job

            try:
                return run_job(job, load)
            except (ValueError, TypeError, NotImplementedError, OSError) as error:  # bad input
                raise BackendError(f"{self.name}: {' '.join(str(error).split())}") from error
        with tempfile.TemporaryDirectory() as folder:
            asked, answer, output = (Path(folder, name) for name in ("job", "result", "output"))
            asked.write_text(json.dumps(job), encoding="utf-8")
            program = str(_FOLDER / BACKENDS[self.backend][0])
            with output.open("wb") as sink:
                process = subprocess.Popen(
                    [self.python, program, str(asked), str(answer)],
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=self._environment(),
                    start_new_session=True,  # so that all that it starts can be ended with it
                )
            try:
                code = process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if code or not answer.exists():
                lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
                tail = "\n".join(line for line in lines[-_TAIL_LINES:] if line.strip())
                raise BackendError(
                    f"{self.name} ended with exit code {code}. Its last words:\n{tail}"
                )
            return json.loads(answer.read_text(encoding="utf-8"))


class Limits(NamedTuple):
    """What the model and the settings allow."""

    vocab_size: int
    max_model_len: int


def limits(contenders: Sequence[Contender], max_model_len: int | None) -> Limits:
    """The limits of the model that all contenders run.

    Raises:
        ValueError, FileNotFoundError: a model cannot be read, or they are not the same.
    """
    found: dict[str, Any] = {}
    for contender in contenders:
        shape = _model_shape(contender)
        for name, value in shape.items():
            if found.setdefault(name, value) != value:
                raise ValueError(
                    f"rival_model must be the same model: {name} is {value} in "
                    f"{contender.model!r}, {found[name]} in {contenders[0].model!r}"
                )
    positions = found["max_position_embeddings"]
    if max_model_len is not None and max_model_len > positions:
        raise ValueError(
            f"max_model_len must be at most the model's {positions} positions, got {max_model_len}"
        )
    return Limits(found["vocab_size"], max_model_len or positions)


def _model_shape(contender: Contender) -> dict[str, int]:
    names = (*_SHAPE, "max_position_embeddings")
    if contender.backend != "jpaged":
        path = os.path.join(contender.model, "config.json")
        try:
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
        except (OSError, ValueError) as error:
            raise ValueError(f"rival_model must be a Hugging Face folder: {error}") from error
        return {name: config[name] for name in names if isinstance(config.get(name), int)}
    from jpaged.checkpoints import read_config  # imports jax, which starts no device yet

    ours = read_config(contender.model)
    renamed = {
        "num_hidden_layers": ours.num_layers,
        "num_attention_heads": ours.num_heads,
        "num_key_value_heads": ours.num_kv_heads,
    }
    return {name: renamed.get(name) or getattr(ours, name) for name in names}


def as_requests(workload: Workload) -> list[dict[str, Any]]:
    """The requests as the request loop takes them."""
    return [
        {
            "prompt_token_ids": list(request.prompt_token_ids or ()),
            "output_len": request.output_len,
            "arrival_time": request.arrival_time,
        }
        for request in workload.requests
    ]


class Run(NamedTuple):
    """One repetition of one backend; others_cpu_share is how busy the machine was just before."""

    backend: str
    repetition: int
    result: dict[str, Any]
    others_cpu_share: float


def repeated(
    contenders: Sequence[Contender], job: dict[str, Any], *, repeat: int, alone: bool
) -> Iterator[Run]:
    """Run a job `repeat` times on each contender, in turn, one process at a time.

    With more than one run every run has a process of its own: a second one would find the prompts
    of the first in its prefix cache.
    """
    for repetition in range(repeat):
        for contender in contenders:
            share = psutil.cpu_percent(interval=_BUSY_SECONDS) / 100
            if share > _BUSY:
                print(
                    f"others take {share:.0%} of the CPU time: the figures may not be repeatable",
                    file=sys.stderr,
                )
            print(
                f"{contender.name}, repetition {repetition + 1} of {repeat} "
                f"(since {time.strftime('%H:%M:%S')})",
                file=sys.stderr,
                flush=True,
            )
            result = contender.run(job, alone=alone)
            _check_answers(contender, job, result)
            yield Run(contender.name, repetition, result, share)


def _check_answers(contender: Contender, job: dict[str, Any], result: dict[str, Any]) -> None:
    """Raise BackendError unless every request got exactly the tokens that were asked for."""
    for run, requests in zip(result["runs"], job["runs"], strict=True):
        for place, (record, request) in enumerate(zip(run, requests, strict=True)):
            if len(record["token_ids"]) != request["output_len"]:
                raise BackendError(
                    f"{contender.name} gave request {place} {len(record['token_ids'])} tokens, "
                    f"{request['output_len']} were asked for"
                )
