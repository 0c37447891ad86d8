"""scripts/benchmark_throughput.py: its figures, its comparisons with rivals, what it refuses."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from jpaged import SamplingParams

SMALL = (
    *("--num_prompts", "6", "--input_len", "12", "--output_len", "5"),
    *("--random_range_ratio", "0.5", "--max_model_len", "256", "--num_warmups", "2"),
)
RIVALS = ("--backend", "vllm", "--compare", "transformers")
TWO_SPEEDS = """
seconds = {"vllm": turn, "transformers": 4}[rival]  # 1, 2, 3 s and 4, 4, 4 s


def record(request):
    ids = [0] * request["output_len"]
    return dict(start=0.0, delivery_times=[seconds], token_ids=ids)
"""


@pytest.fixture
def run(run_benchmark):
    return lambda *arguments: run_benchmark("throughput", *arguments)


def prompts(job):
    return [request["prompt_token_ids"] for request in job["runs"][0]]


def test_figures_of_our_engine(run, tiny_in_place, tiny_llm, tmp_path):
    file = tmp_path / "figures.json"
    code, out, _ = run(*SMALL, "--max_num_seqs", 8, "--json", file, "--save_detailed")
    assert code == 0
    assert tiny_in_place["max_num_seqs"] == 8
    result = json.loads(file.read_text())
    (one,) = result["runs"]
    lengths = [len(record["token_ids"]) for record in one["requests"][0]]
    assert all(2 <= length <= 8 for length in lengths)
    assert one["figures"]["total_output_tokens"] == sum(lengths)
    duration = one["figures"]["duration"]
    assert one["figures"]["output_throughput"] == pytest.approx(sum(lengths) / duration)
    assert result["medians"]["jpaged"]["request_throughput"] == pytest.approx(6 / duration)
    assert f"6 requests, {one['figures']['total_input_tokens']} prompt" in out
    assert one["facts"]["stats"]["compilations_after_warmup"] == 0
    assert re.search(r"output tokens/s +\d", out)


def test_our_engine_gives_the_tokens_that_generate_gives(run, tiny_in_place, tiny_llm, tmp_path):
    trace, file = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    lines = [{"prompt_token_ids": [7 * i + 1, 5, 9], "max_tokens": 3 + i} for i in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ("--dataset_name", "jsonl", "--dataset_path", trace, "--max_model_len", 256)
    assert run(*arguments, "--json", file, "--save_detailed")[0] == 0
    (one,) = json.loads(file.read_text())["runs"]
    for line, record in zip(lines, one["requests"][0], strict=True):
        params = SamplingParams(temperature=0, max_tokens=line["max_tokens"], ignore_eos=True)
        (output,) = tiny_llm.generate(line["prompt_token_ids"], params)
        assert record["token_ids"] == output.outputs[0].token_ids


def test_what_our_engine_refuses_is_told_in_a_sentence(run, monkeypatch):
    import jpaged.llm

    def refuse(**given):
        raise ValueError("num_blocks must be enough, got 1")

    monkeypatch.setattr(jpaged.llm, "LLM", refuse)
    code, _, err = run(*SMALL)
    assert code == 1
    assert err.splitlines()[-1] == "jpaged: num_blocks must be enough, got 1"


def test_rivals_take_turns_on_the_same_requests(run, make_rival, tmp_path):
    rival, file = make_rival(TWO_SPEEDS), tmp_path / "figures.json"
    arguments = (*SMALL, *RIVALS, *rival.flags, "--repeat", 3, "--json", file)
    code, out, _ = run(*arguments, "--dtype", "bfloat16", "--max_num_seqs", 4)
    assert code == 0
    jobs = rival.jobs()
    turns = ["_rival_vllm.py", "_rival_transformers.py"] * 3
    assert [job["program"] for job in jobs] == turns
    assert all(prompts(job) == prompts(jobs[0]) for job in jobs)
    assert all(job["engine"]["dtype"] == "bfloat16" for job in jobs)
    assert all(job["engine"]["max_num_seqs"] == 4 for job in jobs)
    result = json.loads(file.read_text())
    tokens = sum(request["output_len"] for request in jobs[0]["runs"][0])
    medians = {name: found["output_throughput"] for name, found in result["medians"].items()}
    assert medians == {"vllm": tokens / 2, "transformers": tokens / 4}
    assert result["ratios"]["transformers"]["output_throughput"] == pytest.approx(2.0)
    (line,) = [line for line in out.splitlines() if line.startswith("seconds")]
    assert line.split() == ["seconds", "2", "[1,", "3]", "4", "[4,", "4]", "0.5"]
    assert len(result["runs"]) == 6
    assert "requests" not in result["runs"][0]


def test_warmup_requests_are_others(run, make_rival):
    rival = make_rival()
    run(*SMALL, "--backend", "vllm", *rival.flags)
    (job,) = rival.jobs()
    (warmup,) = job["warmup"]
    assert [len(r["prompt_token_ids"]) for r in warmup] == list(map(len, prompts(job)))[:2]
    assert not {tuple(r["prompt_token_ids"]) for r in warmup} & set(map(tuple, prompts(job)))


def test_the_seed_decides_about_the_requests(run, make_rival):
    rival = make_rival()
    for seed in (0, 0, 1):
        run(*SMALL, "--backend", "vllm", *rival.flags, "--seed", seed)
    jobs = rival.jobs()
    first, same, other = map(prompts, jobs)
    assert first == same
    assert not set(map(tuple, first)) & set(map(tuple, other))
    lengths = [[r["output_len"] for r in job["runs"][0]] for job in jobs]
    assert lengths[0] == lengths[1]
    assert lengths[0] != lengths[2]


def test_arguments_go_to_the_rival_that_they_name(run, make_rival):
    rival = make_rival()
    given = ("--rival_args", 'vllm={"enforce_eager": true}')
    assert run(*SMALL, *RIVALS, *rival.flags, *given)[0] == 0
    assert [job["rival_args"] for job in rival.jobs()] == [{"enforce_eager": True}, {}]


def test_a_rival_does_not_see_our_packages(run, make_rival, monkeypatch):
    rival = make_rival()
    monkeypatch.setenv("PYTHONPATH", "ours")
    assert run(*SMALL, "--backend", "vllm", *rival.flags)[0] == 0
    (job,) = rival.jobs()
    assert job["pythonpath"] is None


def test_agreement_of_tokens_is_told(run, make_rival, tmp_path):
    file = tmp_path / "figures.json"
    rival = make_rival(
        """
usual = record


def record(request):
    answer = usual(request)
    if rival == "transformers" and request["output_len"] == 5:
        answer["token_ids"][3] += 1
    return answer
"""
    )
    trace = tmp_path / "trace.jsonl"
    lines = [{"input_length": 4, "max_tokens": length} for length in (5, 6, 7)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset = ("--dataset_name", "jsonl", "--dataset_path", trace)
    _, out, _ = run(*dataset, *RIVALS, *rival.flags, "--check_tokens", "--json", file)
    text = (
        "transformers agrees in 16 of 18 tokens before a first difference, 2 of 3 requests wholly"
    )
    assert text in out
    found = json.loads(file.read_text())["token_agreement"]["transformers"]
    assert found == {"requests": 3, "requests_equal": 2, "tokens": 18, "tokens_equal": 16}


def test_a_rival_that_fails_is_told_with_its_last_words(run, make_rival, tmp_path):
    file = tmp_path / "figures.json"
    rival = make_rival('if rival == "transformers":\n    sys.exit("no such instruction")')
    code, _, err = run(*SMALL, *RIVALS, *rival.flags, "--json", file)
    assert code == 1
    assert "transformers ended with exit code 1" in err
    assert "no such instruction" in err
    assert [one["backend"] for one in json.loads(file.read_text())["runs"]] == ["vllm"]


def test_a_rival_that_stops_early_is_not_measured(run, make_rival):
    rival = make_rival(
        'if rival == "vllm":\n    job["runs"][0][2]["output_len"] -= 1  # as at an end of sequence'
    )
    code, _, err = run(*SMALL, "--backend", "vllm", *rival.flags)
    assert code == 1
    assert re.search(r"vllm gave request 2 \d+ tokens, \d+ were asked for", err)


def test_long_requests(run, make_rival, tmp_path):
    rival, trace = make_rival(), tmp_path / "lengths.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n90,20\n20,90\n9,1\n300,20\n")
    arguments = ("--backend", "vllm", *rival.flags, "--max_model_len", 100, "--noshuffle")
    dataset = ("--dataset_name", "sharegpt", "--dataset_path", trace)
    code, out, err = run(*arguments, *dataset)
    assert (code, out) == (2, "")
    assert "line 2" in err
    assert "max_model_len=100" in err
    assert run(*arguments, *dataset, "--long_requests", "skip")[0] == 0
    code, out, _ = run(*arguments, *dataset, "--long_requests", "truncate")
    assert "3 too long and truncated" in out
    lengths = [
        [(len(r["prompt_token_ids"]), r["output_len"]) for r in job["runs"][0]]
        for job in rival.jobs()
    ]
    assert lengths == [[(9, 1)], [(80, 20), (10, 90), (9, 1), (80, 20)]]


def test_a_plot_of_a_comparison(run, make_rival, tmp_path):
    pytest.importorskip("matplotlib")
    rival, file = make_rival(), tmp_path / "rates.png"
    assert run(*SMALL, *RIVALS, *rival.flags, "--repeat", 2, "--plot", file)[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "sglang"], "backend must be one of 'jpaged', 'vllm', 'transformers'"),
        (["--compare", "jpaged"], "compare must name others"),
        (["--compare", "vllm"], "rival_model must be .* 'smollm2-135m' is none"),
        (["--compare", "vllm", "--rival_model", "nowhere"], "rival_python must have vllm"),
        (["--rival_python", "vllm=python"], "rival_python must be for one of"),
        (["--rival_args", "{}"], "rival_args must be NAME="),
        (["--variant", "vllm={}"], "variant must be NAME=..., NAME a new one, got 'vllm={}'"),
        (["--variant", 'x={"top_k": 1}'], "variant must change settings .* got 'top_k'"),
        (["--variant", "x=5"], "variant must be NAME= and a JSON object, got '5'"),
        (["--variant", 'x={"block_size": 0}'], "block_size must be .*, got 0"),
        (["--repeat", "0"], "repeat must be an int >= 1, got 0"),
        (["--num_prompts", "0"], "num_prompts must be an int >= 1, got 0"),
        (["--num_warmups", "-1"], "num_warmups must be an int >= 0, got -1"),
        (["--input_len", "0"], "input_len must be an int >= 1, got 0"),
        (["--random_range_ratio", "1"], r"random_range_ratio must be in \[0, 1\), got 1"),
        (["--dataset_name", "alpaca"], "dataset_name must be one of .*, got 'alpaca'"),
        (["--dataset_name", "jsonl"], "dataset_path must be given with dataset_name=jsonl"),
        (["--dataset_path", "x"], "dataset_path must not be given with dataset_name=random"),
        (
            ["--dataset_name", "jsonl", "--dataset_path", "nowhere.jsonl"],
            "No such file .*nowhere.jsonl",
        ),
        (["--long_requests", "cut"], "long_requests must be one of .*, got 'cut'"),
        (["--dtype", "float64"], "dtype must be one of .*, got 'float64'"),
        (["--block_size", "0"], "block_size must be .*, got 0"),
        (["--max_model_len", "9000"], "max_model_len must be at most .* 8192 .*, got 9000"),
        (["--max_model_len", "200"], "request 0 must have at most max_model_len=200"),
        (["--model", "nowhere"], "model must be an existing path, .* got 'nowhere'"),
        (["--json", "no/such/folder/x.json"], "json must be in a folder that exists"),
        (["--no_such_flag"], "no_such_flag"),
        (["more"], "unexpected argument 'more'"),
    ],
)
def test_bad_usage_is_told_before_anything_loads(check_refusal, arguments, message):
    check_refusal("throughput", arguments, message)


def test_bad_rival_arguments(run, make_rival):
    rival = make_rival()
    code, _, err = run("--backend", "vllm", *rival.flags, "--rival_args", "vllm=[1]")
    assert code == 2
    assert "rival_args must be NAME= and a JSON object, got '[1]'" in err


def test_a_python_without_the_rival_is_refused(run, make_rival):
    rival = make_rival(missing=1)
    code, _, err = run(*SMALL, "--backend", "vllm", *rival.flags)
    assert code == 2
    assert "rival_python must have vllm installed" in err


def test_another_model_is_refused(run, make_rival):
    rival = make_rival(shape={"vocab_size": 32000, "max_position_embeddings": 8192})
    code, _, err = run(*SMALL, "--compare", "vllm", *rival.flags)
    assert code == 2
    assert "rival_model must be the same model: vocab_size is 32000" in err


def write_tiny_model(folder):
    """A Llama of one layer as a Hugging Face folder, without a tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "eos_token_id": list(range(64)),  # whatever comes would end it, and must not
    }
    rng = np.random.default_rng(0)
    layer = "model.layers.0."
    shapes = {
        "model.embed_tokens.weight": (64, 16),
        "model.norm.weight": (16,),
        f"{layer}input_layernorm.weight": (16,),
        f"{layer}post_attention_layernorm.weight": (16,),
        f"{layer}self_attn.q_proj.weight": (16, 16),
        f"{layer}self_attn.k_proj.weight": (8, 16),
        f"{layer}self_attn.v_proj.weight": (8, 16),
        f"{layer}self_attn.o_proj.weight": (16, 16),
        f"{layer}mlp.gate_proj.weight": (24, 16),
        f"{layer}mlp.up_proj.weight": (24, 16),
        f"{layer}mlp.down_proj.weight": (16, 24),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return {name: value for name, value in config.items() if isinstance(value, int)}


def test_our_engine_beside_others_has_a_process_of_its_own(run, make_rival, tmp_path):
    shape = write_tiny_model(tmp_path / "tiny")
    rival, file = make_rival(shape=shape), tmp_path / "figures.json"
    settings = (
        *("--model", tmp_path / "tiny", "--num_blocks", 32, "--max_num_seqs", 2),
        *("--max_num_batched_tokens", 8, "--num_prompts", 2, "--input_len", 4),
        *("--output_len", 3, "--num_warmups", 1, "--compilation_cache_dir", tmp_path / "xla"),
        *("--preemption_mode", "recompute", "--dtype", "float32"),
    )
    others = ("--backend", "vllm", *rival.flags, "--variant", 'few={"num_blocks": 16}')
    code, out, err = run(*settings, *others, "--json", file, "--save_detailed")
    assert code == 0, err
    assert re.search(r"vllm +few +vllm / few", out)
    theirs, ours = json.loads(file.read_text())["runs"]
    assert [one["backend"] for one in (theirs, ours)] == ["vllm", "few"]
    assert [len(record["token_ids"]) for record in ours["requests"][0]] == [3, 3]
    assert ours["facts"]["dtype"] == "float32"
    stats = ours["facts"]["stats"]
    assert stats["num_blocks"] == 16
    assert stats["generated_tokens"] == 2 * 3 + 3  # the warm-up's too
