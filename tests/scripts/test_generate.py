"""scripts/generate.py on the tiny model: what it prints where, what it refuses, how it exits."""

import contextlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jpaged import SamplingParams

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "generate.py"
MASCOT = "안녕하세요 반갑습니다"
GREEDY = ["--temperature", "0", "--max_tokens", "5", "--ignore_eos"]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("generate_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def loaded(monkeypatch, tiny_llm, tmp_path):
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


@pytest.fixture
def run(script, loaded, capsys):
    """Runs the script; returns exit code, standard output and standard error."""

    def run(*arguments):
        code = script.main(["generate.py", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def write_lines(tmp_path):
    def write(*lines):
        """Writes dictionaries as JSON, strings and bytes as they are; returns the path."""
        path = tmp_path / "prompts.jsonl"
        raw = [
            line
            if isinstance(line, bytes)
            else line.encode()
            if isinstance(line, str)
            else json.dumps(line).encode()
            for line in lines
        ]
        path.write_bytes(b"\n".join(raw) + b"\n")
        return path

    return write


def records(text):
    return [json.loads(line) for line in text.splitlines()]


def greedy(llm, prompt, **overrides):
    params = {"temperature": 0, "max_tokens": 5, "ignore_eos": True, **overrides}
    return llm.generate(prompt, SamplingParams(**params))[0]


# ---------------------------------------------------------------- prompts as flags


def test_a_prompt_prints_its_text_alone(run, tiny_llm):
    code, out, _ = run("--prompt", MASCOT, *GREEDY)
    assert (code, out) == (0, greedy(tiny_llm, MASCOT).outputs[0].text + "\n")


def test_several_prompts_print_in_order(run, tiny_llm):
    code, out, _ = run("--prompt", "One", "--prompt=Two", *GREEDY)
    texts = [greedy(tiny_llm, prompt).outputs[0].text for prompt in ("One", "Two")]
    assert (code, out) == (0, "".join(text + "\n" for text in texts))


def test_stream_prints_the_same(run, tiny_llm):
    arguments = ("--prompt", "One", "--prompt", MASCOT, "--max_tokens", "30", "--temperature", "0")
    assert run(*arguments, "--stream")[:2] == run(*arguments)[:2]


@pytest.mark.parametrize(
    "several",
    [{"n": 3}, {"n": 2, "best_of": 3}, {"n": 3, "beam_width": 3}],
    ids=["n", "best_of", "beams"],
)
def test_every_completion_prints_on_a_line(run, tiny_llm, several):
    flags = [f"--{name}={value}" for name, value in several.items()]
    params = dict(several)
    if "beam_width" in several:
        params["early_stopping"] = "never"
        flags.append("--early_stopping=never")
    code, out, _ = run("--prompt", "One", "--prompt", "Two", *GREEDY, *flags)
    outputs = [greedy(tiny_llm, prompt, **params).outputs for prompt in ("One", "Two")]
    assert [len(completions) for completions in outputs] == [several["n"]] * 2
    texts = [completion.text for completions in outputs for completion in completions]
    assert (code, out) == (0, "".join(text + "\n" for text in texts))


def test_every_completion_is_in_the_json(run, tiny_llm):
    _, out, _ = run("--prompt", "One", "--output", "-", "--n=3", "--beam_width=3", *GREEDY)
    (record,) = records(out)
    assert [c["index"] for c in record["outputs"]] == [0, 1, 2]
    expected = greedy(tiny_llm, "One", n=3, beam_width=3).outputs
    assert [c["token_ids"] for c in record["outputs"]] == [c.token_ids for c in expected]


@pytest.mark.parametrize(
    "argument, value",
    [
        ("--early_stopping", True),
        ("--noearly_stopping", False),
        ("--early_stopping=true", True),
        ("--early_stopping=false", False),
        ("--early_stopping=never", "never"),
    ],
)
def test_early_stopping_is_a_bool_or_never(script, argument, value):
    given = script.sampling_arguments(script.parse_flags(["generate.py", argument]))
    assert given == {"early_stopping": value}


def test_stream_prints_text_as_it_comes(script, tiny_llm, monkeypatch):
    shown = []
    monkeypatch.setattr("builtins.print", lambda *args, **kwargs: shown.append("".join(args)))
    params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    script.stream(tiny_llm, [tiny_llm.prepare("Hello", params)])
    assert len(shown) == 21  # a token each, and the end of the line
    assert "".join(shown) == tiny_llm.generate("Hello", params)[0].outputs[0].text


def test_output_writes_json_lines(run, tiny_llm, tmp_path):
    path = tmp_path / "out.jsonl"
    code, out, _ = run("--prompt", MASCOT, "--output", path, "--logprobs", "2", *GREEDY)
    assert (code, out) == (0, "")
    assert MASCOT in path.read_text(encoding="utf-8")
    (record,) = records(path.read_text(encoding="utf-8"))
    expected = greedy(tiny_llm, MASCOT, logprobs=2)
    assert list(record) == ["request_id", "prompt", "prompt_token_ids", "outputs"]
    assert (record["prompt"], record["prompt_token_ids"]) == (MASCOT, expected.prompt_token_ids)
    (completion,) = record["outputs"]
    assert list(completion) == [
        "index",
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "cumulative_logprob",
        "logprobs",
    ]
    assert completion["token_ids"] == expected.outputs[0].token_ids
    assert completion["finish_reason"] == "length"
    assert completion["cumulative_logprob"] == expected.outputs[0].cumulative_logprob
    assert [
        {int(token): value for token, value in best.items()} for best in completion["logprobs"]
    ] == (expected.outputs[0].logprobs)


def test_prompt_logprobs_are_written_when_asked_for(run):
    _, out, _ = run("--prompt", "a b c", "--output", "-", "--prompt_logprobs", "0", *GREEDY)
    (record,) = records(out)
    assert len(record["prompt_logprobs"]) == len(record["prompt_token_ids"])
    assert record["prompt_logprobs"][0] is None


def test_a_model_that_does_not_load_costs_no_earlier_results(script, monkeypatch, tmp_path, capsys):
    output = tmp_path / "results.jsonl"
    output.write_text("results of last night")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    arguments = ["--model", str(tmp_path / "no model"), "--prompt", "One", "--output", str(output)]
    assert script.main(["generate.py", *arguments]) == 2
    assert "model must be" in capsys.readouterr().err
    assert output.read_text() == "results of last night"


def test_results_that_are_finished_are_written_when_the_run_is_interrupted(
    script, loaded, monkeypatch, tiny_llm, write_lines, tmp_path, capsys
):
    step, steps = tiny_llm.engine.step, []

    def interrupted():
        steps.append(None)
        if len(steps) == 6:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(tiny_llm.engine, "step", interrupted)
    lines = [{"prompt": "One", "max_tokens": 2}, {"prompt": "Two", "max_tokens": 50}]
    output = tmp_path / "results.jsonl"
    arguments = ["--prompts_file", str(write_lines(*lines)), "--output", str(output), *GREEDY]
    assert script.main(["generate.py", *arguments, "--ignore_eos"]) == 130
    (record,) = map(json.loads, output.read_text().splitlines())
    assert record["prompt"] == "One" and len(record["outputs"][0]["token_ids"]) == 2


def test_what_is_wrong_with_a_line_is_told_before_the_model_loads(
    script, monkeypatch, write_lines, tmp_path, capsys
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = write_lines({"prompt": "One", "top_p": 7})
    assert script.main(["generate.py", "--model", "/no/model", "--prompts_file", str(path)]) == 1
    assert f"{path}: line 1: top_p must be" in capsys.readouterr().err


def test_output_to_standard_output(run):
    code, out, _ = run("--prompt", "One", "--prompt", "Two", "--output", "-", *GREEDY)
    assert code == 0
    assert [record["prompt"] for record in records(out)] == ["One", "Two"]


def test_chat(run, tiny_llm):
    _, out, _ = run("--chat", "--prompt", "Hi!", "--output", "-", *GREEDY)
    (record,) = records(out)
    (expected,) = tiny_llm.chat(
        [{"role": "user", "content": "Hi!"}],
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    )
    assert record["prompt"] == expected.prompt
    assert record["outputs"][0]["token_ids"] == expected.outputs[0].token_ids


def test_stats_go_to_standard_error(run):
    code, out, err = run("--prompt", "One", "--stats", *GREEDY)
    assert code == 0
    assert len(out.splitlines()) == 1
    stats = json.loads(err.splitlines()[-1])
    assert {"num_blocks", "blocks_used", "steps", "compilations_after_warmup"} <= set(stats)
    assert stats["internal_waste"] == 1 - stats["slots_used_share"]
    assert stats["prefix_hit_rate"] == stats["prefix_query_tokens"] == 0  # it does not cache
    assert stats["seconds"] > 0 and stats["generated_tokens_per_second"] > 0


@pytest.mark.parametrize("more", [[], ["--stream"]], ids=["all", "stream"])
def test_draw_blocks_draws_a_picture(run, tiny_llm, tmp_path, more):
    pytest.importorskip("matplotlib")
    path = tmp_path / "blocks.png"
    arguments = ["--prompt", "One", "--prompt", "Two", *GREEDY, *more]
    plain = run(*arguments)[:2]
    assert run(*arguments, "--draw_blocks", path)[:2] == plain
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not tiny_llm.engine.after_step


def test_a_picture_that_cannot_be_written_is_told_before_the_model_loads(run, loaded, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "no folder" / "blocks.png"
    code, out, err = run("--prompt", "One", "--draw_blocks", path)
    assert (code, out) == (2, "") and not loaded
    assert err.startswith("generate.py: draw_blocks must be a file that can be written, got ")


def test_drawing_without_matplotlib_names_the_extra_before_the_model_loads(
    run, loaded, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run("--prompt", "One", "--draw_blocks", tmp_path / "blocks.png")
    assert (code, out) == (2, "") and not loaded
    assert err == (
        "generate.py: drawing needs matplotlib: install the extra 'bench' (uv run --extra bench "
        "..., or pip install 'jpaged[bench]')\n"
    )
    assert not (tmp_path / "blocks.png").exists()


def test_progress_goes_to_standard_error(run):
    _, out, err = run("--prompt", "One", "--prompt", "Two", *GREEDY)
    assert "2/2" in err
    assert "2/2" not in out


# ---------------------------------------------------------------- prompts from a file


def test_a_prompts_file_gives_json_lines_in_its_order(run, tiny_llm, write_lines):
    path = write_lines(
        {"prompt": "One", "max_tokens": 9},
        "",
        {"prompt_token_ids": [5, 6, 7]},
        "   \r",
        {"messages": [{"role": "user", "content": MASCOT}], "temperature": 0},
    )
    code, out, err = run("--prompts_file", path, *GREEDY)
    assert code == 0
    first, second, third = records(out)
    assert (
        first["outputs"][0]["token_ids"]
        == greedy(tiny_llm, "One", max_tokens=9).outputs[0].token_ids
    )
    assert second["prompt"] is None
    assert second["prompt_token_ids"] == [5, 6, 7]
    assert MASCOT in third["prompt"]
    assert [len(r["outputs"][0]["token_ids"]) for r in (first, second, third)] == [9, 5, 5]
    assert "line" not in err


def test_chat_applies_to_the_texts_of_a_file(run, write_lines):
    path = write_lines({"prompt": "Hi!"}, {"prompt_token_ids": [5]})
    _, out, _ = run("--prompts_file", path, "--chat", *GREEDY)
    first, second = records(out)
    assert first["prompt"].endswith("<|im_start|>assistant\n")
    assert second["prompt_token_ids"] == [5]


def test_a_lines_own_parameters_come_first_then_flags_then_the_models(
    run, script, tiny_llm, write_lines, monkeypatch
):
    defaults = SamplingParams(temperature=0.5, top_k=7, min_p=0.25)
    monkeypatch.setattr(tiny_llm.engine, "get_default_sampling_params", lambda: defaults)
    seen = []
    real = tiny_llm.prepare
    monkeypatch.setattr(tiny_llm, "prepare", lambda p, s: seen.append(s) or real(p, s))
    path = write_lines({"prompt": "a", "top_p": 0.75, "seed": 11}, {"prompt": "b", "top_k": 3})
    code, _, _ = run(
        "--prompts_file", path, "--top_p", "0.5", "--top_k", "9", "--seed", "4",
        "--max_tokens", "2", "--stop", "x", "--stop", "yz", "--stop_token_ids", "8",
        "--logit_bias", '{"17": -3.5}', "--noignore_eos",
    )  # fmt: skip
    assert code == 0
    common = {
        "temperature": 0.5,
        "min_p": 0.25,
        "max_tokens": 2,
        "stop": ("x", "yz"),
        "stop_token_ids": (8,),
        "logit_bias": {17: -3.5},
    }
    assert seen == [
        SamplingParams(top_k=9, top_p=0.75, seed=11, **common),
        SamplingParams(top_k=3, top_p=0.5, seed=None, **common),
    ]


def test_a_logit_bias_of_a_line_has_the_keys_of_json(run, write_lines):
    path = write_lines({"prompt": "a", "logit_bias": {"40": 1000.0}})
    _, out, _ = run("--prompts_file", path, *GREEDY)
    assert records(out)[0]["outputs"][0]["token_ids"] == [40] * 5


BAD_LINES = [
    ("{", "a line must be a JSON object: "),
    ("not json", "a line must be a JSON object: "),
    ("[" * 100_000, "a line must be a JSON object: "),
    ("[1, 2]", "a line must be a JSON object, got a list"),
    ('"text"', "a line must be a JSON object, got a str"),
    (b'{"prompt": "\xff"}', "a line must be UTF-8, got a bad byte at 12"),
    ({}, "a line must have one of prompt, prompt_token_ids, messages, got none"),
    ({"temperature": 0}, "a line must have one of prompt, prompt_token_ids, messages, got none"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "got prompt and prompt_token_ids"),
    ({"prompt": "a", "messages": []}, "got prompt and messages"),
    ({"prompt": "a", "temprature": 0}, "unknown sampling parameter 'temprature'"),
    ({"prompt": "a", "prompts": []}, "unknown sampling parameter 'prompts'"),
    ({"prompt": 3}, "prompt must be a string, got 3"),
    ({"prompt": None}, "prompt must be a string, got None"),
    ({"prompt": [1]}, "prompt must be a string, got [1]"),
    ({"prompt_token_ids": "a"}, "prompt_token_ids must be a list, got 'a'"),
    ({"prompt_token_ids": 3}, "prompt_token_ids must be a list, got 3"),
    ({"prompt_token_ids": [1.5]}, "must be an int"),
    ({"prompt_token_ids": [True]}, "must be an int"),
    ({"prompt_token_ids": []}, "must hold at least one token"),
    ({"prompt_token_ids": [49152]}, "must be an int in [0, 49152), got 49152"),
    ({"messages": "a"}, "messages must be a list, got 'a'"),
    ({"messages": []}, "a conversation must hold at least one message"),
    ({"messages": [{"role": "user"}]}, "a message must be a dictionary with the strings"),
    ({"prompt": ""}, "must hold at least one token, got ''"),
    ('{"prompt": "\\ud800"}', "must be valid Unicode"),
    ({"prompt": "word " * 300}, "must be shorter than max_model_len=256"),
    ({"prompt": "a", "top_p": 2}, "top_p must be in (0, 1], got 2"),
    ('{"prompt": "a", "top_p": NaN}', "top_p must be in (0, 1], got nan"),
    ({"prompt": "a", "top_p": "x"}, "top_p must be in (0, 1], got 'x' of type str"),
    ({"prompt": "a", "max_tokens": None}, "max_tokens must be an int >= 1, got None"),
    ({"prompt": "a", "min_tokens": 6}, "min_tokens must be an int in [0, max_tokens]"),
    ({"prompt": "a", "n": 9}, "a request of 9 sequences needs as many rows"),
    ({"prompt": "a", "early_stopping": "maybe"}, "early_stopping must be"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "a token id in logit_bias must be an int"),
    ({"prompt": "a", "stop_token_ids": [10**6]}, "stop_token_ids must hold token ids in"),
]


@pytest.mark.parametrize("bad, why", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_reported_and_the_others_run(run, write_lines, bad, why):
    path = write_lines({"prompt": "One"}, "", bad, {"prompt": "Two"})
    code, out, err = run("--prompts_file", path, *GREEDY)
    assert code == 1
    assert [record["prompt"] for record in records(out)] == ["One", "Two"]
    (report,) = [line for line in err.splitlines() if line.startswith(f"{path}: line ")]
    assert report.startswith(f"{path}: line 3: ")
    assert why in report
    assert "Traceback" not in err


def test_a_request_too_large_for_the_pool_is_a_bad_line(run, tiny_llm, write_lines, monkeypatch):
    def refuse(ids, params):
        if len(ids) > 2:
            raise ValueError("the request needs 9 blocks, and the pool has 4")

    monkeypatch.setattr(tiny_llm.engine, "validate_request", refuse)
    monkeypatch.setattr(tiny_llm, "run", lambda requests, use_tqdm: [])
    path = write_lines({"prompt_token_ids": [1]}, {"prompt_token_ids": [1, 2, 3]})
    code, _, err = run("--prompts_file", path)
    assert code == 1
    assert f"{path}: line 2: the request needs 9 blocks, and the pool has 4" in err


def test_all_bad_lines_are_reported(run, write_lines, loaded):
    path = write_lines("{", {"prompt": 3})
    code, out, err = run("--prompts_file", path)
    assert (code, out) == (1, "")
    assert [line.split(": ")[1] for line in err.splitlines()] == ["line 1", "line 2"]
    assert not loaded, "no model is loaded for nothing"


def test_an_empty_prompts_file_is_no_error(run, write_lines, tmp_path):
    output = tmp_path / "out.jsonl"
    assert run("--prompts_file", write_lines("", " "), "--output", output) == (0, "", "")
    assert output.read_text() == ""


def test_a_byte_order_mark_is_no_part_of_the_first_line(run, write_lines):
    path = write_lines(b'\xef\xbb\xbf{"prompt": "One"}')
    assert run("--prompts_file", path, *GREEDY)[0] == 0


def test_prompts_from_standard_input(run, monkeypatch):
    class Stdin:
        buffer = io.BytesIO(b'{"prompt": "One"}\n{\n{"prompt": "Two"}')

    monkeypatch.setattr(sys, "stdin", Stdin)
    code, out, err = run("--prompts_file", "-", *GREEDY)
    assert code == 1
    assert [record["prompt"] for record in records(out)] == ["One", "Two"]
    assert "-: line 2: " in err


# ---------------------------------------------------------------- flags


def test_engine_flags_reach_the_llm(run, loaded, tmp_path):
    flags = {
        "model": "some/model",
        "tokenizer": "some/tokenizer",
        "dtype": "bfloat16",
        "max_model_len": 128,
        "block_size": 8,
        "num_blocks": 40,
        "gpu_memory_utilization": 0.5,
        "swap_space_gib": 1.5,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 64,
        "preemption_mode": "swap",
        "scheduling_policy": "priority",
        "tensor_parallel_size": 2,
        "max_decode_steps": 3,
        "attention_backend": "xla",
        "compilation_cache_dir": str(tmp_path / "cache"),
        "seed": 7,
    }
    bools = ["enable_prefix_caching", "overlap", "batch_invariant"]
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    assert run("--prompt", "a", *GREEDY, *arguments, *(f"--{name}" for name in bools))[0] == 0
    assert loaded == {**flags, **dict.fromkeys(bools, True)}


def test_unset_engine_flags_have_the_llms_defaults(run, loaded, tmp_path):
    import dataclasses

    from jpaged import EngineConfig

    run("--prompt", "a", *GREEDY)
    folder = str(tmp_path / "xdg" / "jpaged" / "xla")
    assert loaded == {
        "model": "smollm2-135m",
        "tokenizer": None,
        "dtype": "auto",
        **dataclasses.asdict(EngineConfig()),
        "compilation_cache_dir": folder,
    }
    assert os.path.isdir(folder)


def test_without_a_usable_cache_folder_there_is_no_cache(run, loaded, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run("--prompt", "a", *GREEDY)[0] == 0
    assert loaded["compilation_cache_dir"] is None


def test_the_cache_can_be_switched_off(run, loaded):
    assert run("--prompt", "a", "--compilation_cache_dir=", *GREEDY)[0] == 0
    assert loaded["compilation_cache_dir"] is None


def test_every_keyword_and_sampling_parameter_has_a_flag(script):
    import dataclasses
    import inspect

    from jpaged import LLM

    values = script.parse_flags(["generate.py"])
    sampling = {field.name for field in dataclasses.fields(SamplingParams)}
    own = {"prompt", "prompts_file", "output", "chat", "stream", "stats", "help", "draw_blocks"}
    assert set(values) == set(inspect.signature(LLM).parameters) | sampling | own


USAGE_ERRORS = [
    ([], "give --prompt or --prompts_file"),
    (["--chat"], "give --prompt or --prompts_file"),
    (["--prompt", "a", "--prompts_file", "b"], "give --prompt or --prompts_file, not both"),
    (["--stream", "--prompts_file", "b"], "--stream prints text"),
    (["--stream", "--prompt", "a", "--output", "-"], "--stream prints text"),
    (["--stream", "--prompt", "a", "--n", "2"], "--stream prints one sequence"),
    (["--stream", "--prompt", "a", "--best_of", "2"], "--stream prints one sequence"),
    (["--stream", "--prompt", "a", "--beam_width", "2"], "--stream prints one sequence"),
    (
        ["--prompt", "a", "--early_stopping=maybe"],
        "early_stopping=maybe: must be true, false or never, got 'maybe'",
    ),
    (["--prompt", "a", "--early_stopping", "never"], "unexpected argument 'never'"),
    (["--prompt", "a", "--draw_blocks", "a.jpg"], "must end in .png, .pdf or .svg, got 'a.jpg'"),
    (["--prompt", "a", "--nonsense"], "nonsense"),
    (["--prompt", "a", "stray"], "unexpected argument 'stray'"),
    (["--prompt", "a", "--max_tokens", "x"], "max_tokens"),
    (["--prompt", "a", "--max_tokens", "0"], "max_tokens must be an int >= 1, got 0"),
    (["--prompt", "a", "--top_p", "nan"], "top_p must be in (0, 1], got nan"),
    (["--prompt", "a", "--logit_bias", "x"], "logit_bias must be a JSON object, got 'x'"),
    (["--prompt", "a", "--logit_bias", "[1]"], "logit_bias must be None or a mapping"),
    (["--prompt", "a", "--stop", ""], "stop must be None, a non-empty string"),
    (["--prompts_file", "no/such/file"], "prompts_file must be a file that can be read"),
    (["--prompts_file", "."], "prompts_file must be a file that can be read"),
    (["--prompt", "a", "--output", "no/such/folder/x"], "output must be a file that can be"),
]


@pytest.mark.parametrize("arguments, message", USAGE_ERRORS, ids=range(len(USAGE_ERRORS)))
def test_bad_usage_is_one_sentence_before_a_model_is_loaded(run, loaded, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("generate.py: ")
    assert err.count("\n") == 1
    assert not loaded


@pytest.mark.parametrize("prompt", ["", "word " * 300])
def test_a_bad_prompt_flag_is_bad_usage(run, tiny_llm, prompt):
    code, out, err = run("--prompt", "good", "--prompt", prompt)
    assert (code, out) == (2, "")
    assert err.startswith("generate.py: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--block_size", "0"], "block_size must be an int in"),
        (["--dtype", "float16"], "dtype must be 'auto', 'float32' or 'bfloat16', got 'float16'"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", "no/such/folder/at/all"], "no/such/folder/at/all"),
    ],
)
def test_a_model_that_cannot_be_made_is_one_sentence(script, capsys, arguments, message):
    code = script.main(["generate.py", "--prompt", "a", "--compilation_cache_dir=", *arguments])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("generate.py: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_help(script, capsys):
    assert script.main(["generate.py", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--prompts_file" in out
    assert "--max_num_seqs" in out
    assert "Exit codes" in out


def test_importing_the_script_defines_no_flags_of_the_host(script):
    from absl import flags

    assert "prompts_file" not in flags.FLAGS
    assert "max_num_seqs" not in flags.FLAGS


def test_ctrl_c_exits_with_130(run, tiny_llm, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_llm.engine, "step", interrupted)
    code, out, err = run("--prompt", "a", *GREEDY)
    assert (code, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err


# ---------------------------------------------------------------- as a process

# A stand-in for jpaged.llm, so that the process need not import jax.
STUB = """
import runpy, sys, types
from jpaged.outputs import CompletionOutput, RequestOutput
from jpaged.sampling_params import SamplingParams

TEXT = "\\uc548\\ub155" * 100_000

class LLM:
    def __init__(self, **arguments):
        self.engine = self
    def get_default_sampling_params(self):
        return SamplingParams()
    def prepare(self, prompt, params):
        return prompt
    def iterate(self, requests, use_tqdm):
        for p in requests:
            yield RequestOutput("0", p, [1], [CompletionOutput(0, TEXT, [1])])

sys.modules["jpaged.llm"] = types.SimpleNamespace(LLM=LLM)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def process(*arguments, code=None, **variables):
    command = [sys.executable, *(["-c", code] if code else []), str(SCRIPT), *arguments]
    root = str(SCRIPT.parent.parent)
    return subprocess.Popen(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root, **variables},  # installed or not
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_reader_that_goes_away_is_no_traceback():
    child = process("--prompt", "a", "--compilation_cache_dir=", code=STUB)
    assert child.stdout.read(6) == "안녕".encode()
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 141
    assert err == b""


def test_korean_is_printed_whatever_the_locale():
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    child = process("--prompt", "a", "--compilation_cache_dir=", code=STUB, **locale)
    out, err = child.communicate()
    assert (child.returncode, err) == (0, b"")
    assert out.decode() == "안녕" * 100_000 + "\n"


def test_the_script_runs_as_a_file():
    child = process()
    out, err = child.communicate()
    assert (child.returncode, out) == (2, b"")
    assert err == b"generate.py: give --prompt or --prompts_file\n"


@pytest.mark.slow
def test_the_bundled_model_from_the_command_line(tmp_path):
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(
            process(
                "--prompt=Once upon a time",
                "--temperature=0",
                "--max_tokens=8",
                "--max_model_len=128",
                "--max_num_seqs=8",
                "--max_num_batched_tokens=32",
                f"--compilation_cache_dir={tmp_path}",
            )
        )
        out, err = child.communicate()
    assert child.returncode == 0, err.decode()
    assert len(out.decode().split()) >= 5
