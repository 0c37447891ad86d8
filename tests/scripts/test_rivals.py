"""What runs rivals: vLLM's against a stand-in for it, transformers' where torch is installed."""

import importlib
import sys
import threading
import types

import pytest

ENGINE = {
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "enable_prefix_caching": False,
    "tensor_parallel_size": 1,
    "seed": 0,
}
REQUESTS = [
    {"prompt_token_ids": [5, 6], "output_len": 3, "arrival_time": 0.0},
    {"prompt_token_ids": [7], "output_len": 1, "arrival_time": 0.0},
    {"prompt_token_ids": [8, 9, 10], "output_len": 2, "arrival_time": 0.02},
]


def make_job(**changes):
    job = {
        "engine": ENGINE,
        "rival_model": "folder",
        "rival_args": {},
        "runs": [REQUESTS],
        "warmup": [REQUESTS[:1]],
        "stream": True,
        "online": False,
        "max_concurrency": None,
        "static_batch": 2,
    }
    return job | changes


def token(prompt, place):
    """What the stand-in generates."""
    return 100 * prompt[0] + place


class Output:
    def __init__(self, name, prompt, tokens, finished):
        self.request_id = name
        self.prompt_token_ids = prompt
        self.outputs = [types.SimpleNamespace(token_ids=tokens)]
        self.finished = finished


class Params(types.SimpleNamespace):
    """vLLM's SamplingParams, as far as they are used."""


class Offline:
    """LLMEngine: a token for each request a step, in the last added order."""

    spoil_prompts = False

    def __init__(self, arguments):
        self.arguments = arguments
        self._requests = {}

    @classmethod
    def from_engine_args(cls, arguments):
        return cls(arguments)

    def add_request(self, name, prompt, params):
        assert params.ignore_eos
        assert params.temperature == 0
        self._requests[name] = (prompt["prompt_token_ids"], params, [])

    def step(self):
        for name, (prompt, params, tokens) in list(self._requests.items()):
            tokens.append(token(prompt, len(tokens)))
            finished = len(tokens) == params.max_tokens
            if finished:
                del self._requests[name]
            seen = [0] if self.spoil_prompts else prompt
            if params.output_kind == "delta":
                yield Output(name, seen, tokens[-1:], finished)
            elif finished:
                yield Output(name, seen, tokens, True)


class Online:
    """AsyncLLM: generates on the event loop's thread."""

    threads: set = set()  # noqa: RUF012
    failure = None

    def __init__(self, arguments):
        self.arguments = arguments

    @classmethod
    def from_engine_args(cls, arguments):
        return cls(arguments)

    async def generate(self, prompt, params, name):
        self.threads.add(threading.get_ident())
        if self.failure:
            raise self.failure
        token_ids = prompt["prompt_token_ids"]
        for place in range(params.max_tokens):
            last = place == params.max_tokens - 1
            yield Output(name, token_ids, [token(token_ids, place)], last)


@pytest.fixture
def vllm(scripts_on_path, monkeypatch):
    """scripts/_rival_vllm.py over stand-ins for vLLM and torch."""
    kinds = types.SimpleNamespace(DELTA="delta", FINAL_ONLY="final")
    modules = {
        "torch": {"__version__": "0", "cuda": types.SimpleNamespace(is_available=lambda: False)},
        "vllm": {
            "__version__": "0",
            "EngineArgs": types.SimpleNamespace,
            "AsyncEngineArgs": types.SimpleNamespace,
            "LLMEngine": Offline,
            "SamplingParams": Params,
        },
        "vllm.sampling_params": {"RequestOutputKind": kinds},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": Online},
    }
    for name, contents in modules.items():
        module = types.ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return importlib.import_module("_rival_vllm")


@pytest.fixture
def run_job(scripts_on_path):
    return importlib.import_module("_request_loop").run_job


def expected():
    return [
        [token(request["prompt_token_ids"], i) for i in range(request["output_len"])]
        for request in REQUESTS
    ]


@pytest.mark.parametrize(
    ("online", "stream"), [(False, False), (False, True), (True, True)], ids=str
)
def test_vllm_serves_a_job(vllm, run_job, online, stream):
    result = run_job(make_job(online=online, stream=stream), vllm.load)
    (records,) = result["runs"]
    assert [record["token_ids"] for record in records] == expected()
    deliveries = [len(record["delivery_times"]) for record in records]
    assert deliveries == ([3, 1, 2] if stream else [1, 1, 1])
    assert records[2]["delivery_times"][0] >= 0.02
    if online:
        assert threading.get_ident() not in Online.threads


def test_settings_go_to_vllm_and_arguments_of_its_own_win(vllm, run_job):
    job = make_job(rival_args={"enforce_eager": True, "max_num_seqs": 9})
    arguments = run_job(job, vllm.load)["facts"]["arguments"]
    assert arguments["model"] == "folder"
    assert arguments["dtype"] == "float32"
    assert arguments["max_model_len"] == 64
    assert arguments["max_num_seqs"] == 9
    assert arguments["enforce_eager"] is True
    job["engine"] = ENGINE | {"dtype": "auto", "max_model_len": None}
    arguments = run_job(job, vllm.load)["facts"]["arguments"]
    assert arguments["dtype"] == "float32"  # as ours on a CPU
    assert "max_model_len" not in arguments


def test_an_error_of_vllm_ends_the_run(vllm, run_job, monkeypatch):
    monkeypatch.setattr(Online, "failure", ValueError("too long"))
    with pytest.raises(ValueError, match="too long"):
        run_job(make_job(online=True), vllm.load)


def test_a_prompt_that_vllm_changed_is_an_error(vllm, run_job, monkeypatch):
    monkeypatch.setattr(Offline, "spoil_prompts", True)
    with pytest.raises(RuntimeError, match="was computed for another prompt"):
        run_job(make_job(), vllm.load)


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    """A random Llama of one layer, written by transformers."""
    torch = pytest.importorskip("torch", reason="needs torch, as CI's leg with transformers has")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("stream", [False, True])
def test_transformers_serves_a_job_as_we_do(scripts_on_path, run_job, llama_folder, stream):
    transformers = importlib.import_module("_rival_transformers")
    ours = importlib.import_module("_backend_jpaged")
    job = make_job(stream=stream, rival_model=llama_folder)
    theirs = run_job(job, transformers.TransformersEngine)
    (records,) = theirs["runs"]
    lengths = [len(record["token_ids"]) for record in records]
    assert lengths == [request["output_len"] for request in REQUESTS]
    if stream:
        assert [len(record["delivery_times"]) for record in records] == lengths
    job["engine"] = {
        "model": llama_folder,
        "dtype": "float32",
        "num_blocks": 16,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "preemption_mode": "recompute",
    }
    (expected_records,) = run_job(job, ours.load)["runs"]
    assert [r["token_ids"] for r in records] == [r["token_ids"] for r in expected_records]
