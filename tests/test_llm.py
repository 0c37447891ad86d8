"""`LLM` on the engine with a tiny random model: results, errors, and what is left behind."""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpaged.llm
from jpaged import LLM, EngineConfig, SamplingParams
from jpaged.compilation_cache import enable_compilation_cache
from jpaged.engine import Engine
from jpaged.llm import resolve_dtype

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# A random model's greedy text is one token over and over; this one says all sorts of things.
SAMPLED = SamplingParams(seed=1, max_tokens=30, ignore_eos=True)
MASCOT = "안녕하세요 반갑습니다"
USER = {"role": "user", "content": "Hi!"}


@pytest.fixture
def llm(tiny_llm):
    """The shared LLM; afterwards everything must be given back."""
    yield tiny_llm
    assert not tiny_llm.engine.has_unfinished_requests()
    assert tiny_llm.stats().blocks_used == 0
    assert not tiny_llm._latest


def token_ids(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_generate_takes_strings_and_token_ids_in_every_form(llm):
    ids = llm.engine.tokenizer.encode(MASCOT)
    (expected,) = llm.generate(MASCOT, SAMPLED)
    completion = expected.outputs[0]
    assert expected.finished
    assert (expected.prompt, expected.prompt_token_ids) == (MASCOT, ids)
    assert (completion.finish_reason, len(completion.token_ids)) == ("length", 30)
    assert len(set(completion.text)) > 15
    assert completion.text == llm.engine.tokenizer.decode(completion.token_ids)
    forms = [ids, tuple(ids), np.array(ids), np.array(ids, np.int32), [ids], [np.array(ids)]]
    for prompts in forms:
        (output,) = llm.generate(prompts, SAMPLED)
        assert output.outputs == expected.outputs
        assert output.prompt_token_ids == ids
        assert all(type(token) is int for token in output.prompt_token_ids)
        assert output.prompt is None
    assert llm.generate([MASCOT], SAMPLED)[0].prompt == MASCOT


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = ["a b c", [5, 6, 7], "x" * 60, np.array([9]), [np.int64(4)]]
    # The first runs longest, and more are waiting than run at once.
    lengths = [20, 1, 7, 3, 2]
    params = [dataclasses.replace(GREEDY, max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts * 3, params * 3)
    assert [len(ids) for ids in token_ids(outputs)] == lengths * 3
    assert [output.prompt for output in outputs[:5]] == ["a b c", None, "x" * 60, None, None]
    assert (
        token_ids(outputs)
        == [ids for i in range(5) for ids in token_ids(llm.generate([prompts[i]], params[i]))] * 3
    )


def test_no_prompts_no_outputs(llm):
    assert llm.generate([], GREEDY) == []
    assert llm.generate([]) == []
    assert llm.generate([], []) == []
    assert llm.chat([]) == []


def test_without_params_the_defaults_of_the_model_hold(llm, monkeypatch):
    assert len(llm.generate([[3]])[0].outputs[0].token_ids) <= 16
    monkeypatch.setattr(llm.engine, "get_default_sampling_params", lambda: GREEDY)
    assert len(llm.generate([[3]])[0].outputs[0].token_ids) == 6
    assert len(llm.generate([[3], [4]], None)[1].outputs[0].token_ids) == 6


def test_stop_strings_are_not_part_of_the_text(llm):
    text = llm.generate("Hello", SAMPLED)[0].outputs[0].text
    stop = text[20:26]
    assert text.index(stop) == 20
    params = dataclasses.replace(SAMPLED, stop=["never said", stop])
    (output,) = llm.generate("Hello", params)
    completion = output.outputs[0]
    assert completion.text == text[:20]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 30
    texts = [output.outputs[0].text for output in llm.stream("Hello", params)]
    assert all(text.startswith(shown) and len(shown) <= 20 for shown in texts)
    assert texts[-1] == completion.text


BAD_PROMPTS = [
    ("", ValueError, "must hold at least one token, got ''"),
    ([], ValueError, "must hold at least one token"),
    ([10**6], ValueError, r"must be an int in \[0, 49152\), got 1000000"),
    ([3, -1], ValueError, r"must be an int in \[0, 49152\), got -1"),
    ([1.0], TypeError, "must be an int"),
    ([True], TypeError, "must be an int"),
    ([3, "a"], TypeError, "must be an int"),
    (3, TypeError, "must be a string or a list of token ids, got 3 of type int"),
    (None, TypeError, "must be a string or a list of token ids"),
    (b"bytes", TypeError, "must be a string or a list of token ids"),
    ({"prompt": "a"}, TypeError, "must be a string or a list of token ids"),
    (np.array([[1, 2]]), TypeError, "must be an int"),
    (np.array([1.5]), TypeError, "must be an int"),
    ([1] * 256, ValueError, "must be shorter than max_model_len=256"),
    ("word " * 300, ValueError, "must be shorter than max_model_len=256"),
    ("lone \ud83d surrogate", ValueError, "must be valid Unicode, got a lone surrogate"),
]


@pytest.mark.parametrize("bad, kind, message", BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_a_bad_prompt_is_refused_with_its_index_and_nothing_is_queued(llm, bad, kind, message):
    steps = llm.stats().steps
    with pytest.raises(kind, match=message) as caught:
        llm.generate(["good", [1, 2], bad, "good"], GREEDY)
    assert str(caught.value).startswith("prompts[2]: ")
    assert "\n" not in str(caught.value)
    assert not llm.engine.has_unfinished_requests()
    with pytest.raises(kind, match=message):
        llm.stream(bad, GREEDY)
    assert llm.stats().steps == steps


@pytest.mark.parametrize("prompts", [3, None, {"a": 1}, b"x", {"x"}])
def test_prompts_must_be_a_prompt_or_a_list(llm, prompts):
    with pytest.raises(TypeError, match=r"^prompts must be a prompt or a list of them, got "):
        llm.generate(prompts, GREEDY)


def test_bad_params_are_refused(llm):
    with pytest.raises(ValueError, match=r"^sampling_params must be .*got 1 for 2 prompts$"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(TypeError, match=r"^sampling_params must be .*got 'greedy' of type str$"):
        llm.generate(["a", "b"], "greedy")
    with pytest.raises(TypeError, match=r"^prompts\[1\]: sampling_params must be .*got \{\}"):
        llm.generate(["a", "b"], [GREEDY, {}])
    bad = SamplingParams(stop_token_ids=[49152])
    with pytest.raises(ValueError, match=r"^prompts\[1\]: stop_token_ids must hold token ids in"):
        llm.generate(["a", "b"], [GREEDY, bad])
    with pytest.raises(ValueError, match=r"^prompts\[0\]: logit_bias must hold token ids in"):
        llm.generate(["a", "b"], SamplingParams(logit_bias={10**9: 1.0}))


def test_a_request_that_can_never_fit_in_the_pool_is_refused(tiny_checkpoint):
    engine = Engine(tiny_checkpoint, EngineConfig(num_blocks=4, max_model_len=256))
    small = LLM.from_engine(engine)  # 64 slots; never stepped, so not warmed up
    with pytest.raises(ValueError, match=r"^prompts\[1\]: .*4") as caught:
        small.generate([[1] * 20, [1] * 60], SamplingParams(max_tokens=40))
    assert "\n" not in str(caught.value)
    assert not engine.has_unfinished_requests()


def test_an_exception_while_generating_frees_all_blocks(llm, monkeypatch):
    step, calls = llm.engine.step, []

    def interrupted():
        calls.append(llm.stats().blocks_used)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1] * 40, "some", "more"] * 5, dataclasses.replace(GREEDY, max_tokens=50))
    assert max(calls) > 0
    assert llm.stats().blocks_used == 0
    monkeypatch.undo()
    assert len(llm.generate("again", GREEDY)) == 1


def test_an_exception_while_queueing_frees_all_blocks(llm, monkeypatch):
    add = llm.engine.add_request

    def failing(ids, *args, **kwargs):
        if ids == [13]:
            raise RuntimeError("out of luck")
        return add(ids, *args, **kwargs)

    monkeypatch.setattr(llm.engine, "add_request", failing)
    with pytest.raises(RuntimeError, match="out of luck"):
        llm.generate([[11], [12], [13]], GREEDY)


def test_the_progress_bar_goes_to_standard_error(llm, capsys):
    llm.generate(["a", "b", "c"], GREEDY, use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "3/3" in captured.err
    llm.generate(["a", "b", "c"], GREEDY)
    assert capsys.readouterr() == ("", "")


def test_requests_of_the_engine_run_along(llm):
    request_id = llm.engine.add_request([1, 2, 3], dataclasses.replace(GREEDY, max_tokens=40))
    assert token_ids(llm.generate([[4, 5]], GREEDY)) == token_ids(llm.generate([4, 5], GREEDY))
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert outputs[-1].request_id == request_id
    assert len(outputs[-1].outputs[0].token_ids) == 40


def test_stream_yields_growing_text_and_ends_as_generate(llm):
    params = dataclasses.replace(SAMPLED, max_tokens=24)
    outputs = list(llm.stream(MASCOT, params))
    for before, after in itertools.pairwise(outputs):
        assert after.outputs[0].text.startswith(before.outputs[0].text)
        length = len(before.outputs[0].token_ids)
        assert after.outputs[0].token_ids[:length] == before.outputs[0].token_ids
        assert length < len(after.outputs[0].token_ids)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) == 24
    (whole,) = llm.generate(MASCOT, params)
    assert outputs[-1].outputs == whole.outputs
    assert outputs[-1].prompt == MASCOT


def test_closing_a_stream_aborts_the_request(llm):
    stream = llm.stream([1] * 40, dataclasses.replace(GREEDY, max_tokens=50))
    next(stream)
    assert llm.stats().blocks_used > 0
    stream.close()
    assert llm.stats().blocks_used == 0
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_exception_in_the_loop_over_a_stream_aborts_the_request(llm, error):
    with pytest.raises(error):
        for number, _ in enumerate(llm.stream("Hello", dataclasses.replace(GREEDY, max_tokens=50))):
            if number == 3:
                assert llm.stats().blocks_used > 0
                raise error
    assert llm.stats().blocks_used == 0


def test_ctrl_c_inside_a_step_of_a_stream_aborts_the_request(llm, monkeypatch):
    stream = llm.stream("Hello", dataclasses.replace(GREEDY, max_tokens=50))
    next(stream)
    execute = llm.engine.runner.execute

    def interrupted(*args):
        execute(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert llm.stats().blocks_used == 0
    monkeypatch.undo()
    llm.engine.scheduler.block_manager.check_integrity()
    assert len(list(llm.stream("Hello", GREEDY))) == 6


def test_a_stream_that_was_never_begun_holds_nothing(llm):
    stream = llm.stream("Hello", GREEDY)
    assert not llm.engine.has_unfinished_requests()
    del stream


def test_streams_and_generate_may_be_interleaved(llm):
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (12, 9)]
    alone = token_ids(llm.generate(["One", "Two"], params))
    first, second = llm.stream("One", params[0]), llm.stream("Two", params[1])
    last = {}
    next(first)
    for last[1] in second:
        # Runs to its end inside, during which `first` may end too.
        assert len(token_ids(llm.generate("Three", GREEDY))[0]) == 6
        last[0] = next(first, last.get(0))
    for last[0] in first:
        pass
    assert token_ids([last[0], last[1]]) == alone


def test_a_stream_whose_request_is_aborted_ends(llm):
    stream = llm.stream("Hello", dataclasses.replace(GREEDY, max_tokens=50))
    first = next(stream)
    assert llm.engine.abort(first.request_id)
    (last,) = stream
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"


def test_chat_is_generate_after_the_template(llm):
    tokenizer = llm.engine.tokenizer
    conversation = [{"role": "system", "content": "Be brief."}, USER]
    (output,) = llm.chat(conversation, GREEDY)
    assert "Be brief." in output.prompt
    assert output.prompt.endswith("<|im_start|>assistant\n")
    expected = tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert output.prompt_token_ids == expected
    assert output.outputs == llm.generate(expected, GREEDY)[0].outputs
    assert conversation == [{"role": "system", "content": "Be brief."}, USER]


def test_chat_with_several_conversations(llm):
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (4, 2)]
    outputs = llm.chat([[USER], [{"role": "user", "content": MASCOT}]], params)
    assert [len(ids) for ids in token_ids(outputs)] == [4, 2]
    assert MASCOT in outputs[1].prompt


BAD_CONVERSATIONS = [
    ([], ValueError, "must hold at least one message"),
    ("Hi", TypeError, "must be a list of messages, got 'Hi'"),
    (3, TypeError, "must be a list of messages"),
    (["Hi"], TypeError, "must be a dictionary with the strings 'role' and 'content'"),
    ([USER, {"role": "user"}], TypeError, "at position 1"),
    ([{"content": "Hi"}], TypeError, "must be a dictionary with the strings"),
    ([{"role": "user", "content": None}], TypeError, "must be a dictionary with the strings"),
    ([{"role": "user", "content": [{"type": "text"}]}], TypeError, "must be a dictionary with"),
    ([{"role": 1, "content": "Hi"}], TypeError, "must be a dictionary with the strings"),
    ([{"role": "user", "content": "word " * 300}], ValueError, "shorter than max_model_len=256"),
    ([{"role": "user", "content": "\udc00"}], ValueError, "must be valid Unicode"),
]


@pytest.mark.parametrize("bad, kind, message", BAD_CONVERSATIONS, ids=range(len(BAD_CONVERSATIONS)))
def test_a_malformed_conversation_is_refused_with_its_index(llm, bad, kind, message):
    with pytest.raises(kind, match=message) as caught:
        llm.chat([[USER], bad], GREEDY)
    assert str(caught.value).startswith("messages[1]: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("messages", ["Hi", 3, None, USER])
def test_messages_must_be_a_conversation_or_a_list(llm, messages):
    with pytest.raises(TypeError, match=r"^messages(\[0\])?.* must be a .*, got "):
        llm.chat(messages, GREEDY)


def test_what_a_chat_template_raises_is_one_sentence(llm, monkeypatch):
    template = "{{ raise_exception('Roles must\nalternate') }}"
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match=r"^messages\[0\]: .*chat template: Roles must alternate$"):
        llm.chat([USER], GREEDY)


def test_chat_needs_a_template(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="need a tokenizer with a chat template"):
        llm.chat([USER], GREEDY)


def test_without_a_tokenizer_only_token_ids_will_do(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "tokenizer", None)
    for call in (
        lambda: llm.generate(["Hello"], GREEDY),
        lambda: llm.stream("Hello", GREEDY),
        lambda: llm.chat([USER], GREEDY),
    ):
        with pytest.raises(ValueError, match="needs a tokenizer, and the model was loaded without"):
            call()
    (output,) = llm.generate([1, 2], GREEDY)
    assert output.outputs[0].text == ""
    assert len(output.outputs[0].token_ids) == 6


def test_stats_are_the_engines(llm):
    before = llm.stats().generated_tokens
    llm.generate("Hello", GREEDY)
    assert llm.stats().generated_tokens == before + 6


# ---------------------------------------------------------------- making an LLM


@pytest.fixture
def no_loading(monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(jpaged.llm, "load_checkpoint", load)


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        ({"block_size": 0}, ValueError, "^block_size must be "),
        ({"dtype": "float16"}, ValueError, "^dtype must be 'auto', 'float32' or 'bfloat16', got"),
        ({"dtype": None}, ValueError, "^dtype must be 'auto', 'float32' or 'bfloat16', got None"),
        ({"model": None}, TypeError, "^model must be a string or a path, got None"),
        ({"model": ""}, ValueError, "^model must be a non-empty string or a path"),
        ({"tokenizer": 3}, TypeError, "^tokenizer must be a string or a path, got 3"),
        ({"nonsense": 3}, TypeError, "nonsense"),
    ],
    ids=str,
)
def test_a_bad_argument_is_refused_before_any_weight_is_read(no_loading, arguments, kind, message):
    with pytest.raises(kind, match=message):
        LLM(**{"model": "smollm2-135m", **arguments})


@pytest.mark.parametrize(("backend", "kept"), [("auto", True), ("llvm", True), ("xla", False)])
def test_weights_stay_quantised_where_the_backend_leaves_them_to_kernels(
    backend, kept, monkeypatch
):
    class Loaded(Exception):
        pass

    def load(model, **options):
        assert options["keep_quantised"] == kept
        raise Loaded

    monkeypatch.setattr("jpaged.llm.load_checkpoint", load)
    with pytest.raises(Loaded):
        LLM("smollm2-135m", attention_backend=backend)


def test_a_cache_folder_that_cannot_be_made_is_refused(no_loading, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ValueError, match=r"^compilation_cache_dir must be a folder that can be"):
        LLM("smollm2-135m", compilation_cache_dir=file / "below")


def test_a_missing_model_is_a_file_not_found_error():
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        LLM("no-such-model")


@pytest.mark.parametrize(
    "given, expected",
    [
        ("auto", jnp.float32),  # on a CPU
        ("float32", jnp.float32),
        ("bfloat16", jnp.bfloat16),
        (jnp.float32, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16),
        (np.float32, jnp.float32),
        (jnp.dtype("bfloat16"), jnp.bfloat16),
    ],
)
def test_dtypes(given, expected):
    if given == "auto" and jax.default_backend() != "cpu":
        pytest.skip("auto means bfloat16 here")
    assert jnp.dtype(resolve_dtype(given)) == jnp.dtype(expected)


@pytest.mark.parametrize("given", ["float16", "int8", jnp.int32, jnp.float16, "nonsense", 3, ""])
def test_other_dtypes_are_refused(given):
    with pytest.raises(ValueError, match=r"^dtype must be 'auto', 'float32' or 'bfloat16', got "):
        resolve_dtype(given)


@contextlib.contextmanager
def restored_jax_config():
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.experimental.compilation_cache.compilation_cache.reset_cache()


def test_the_compilation_cache_really_stores(tmp_path):
    jax.jit(lambda x: x - 3)(1.0)  # JAX has settled on having no cache
    folder = tmp_path / "a" / "cache"
    with restored_jax_config():
        enable_compilation_cache(str(folder))
        jax.jit(lambda x: x * 2 + 1)(1.0).block_until_ready()
        assert list(folder.iterdir())


def test_the_constructor_loads_builds_and_warms_up(monkeypatch, tmp_path):
    calls = []

    class RecordingEngine:
        def __init__(self, checkpoint, config):
            calls.append(("build", checkpoint, config))

        def get_default_sampling_params(self):
            calls.append(("check the defaults",))

        def warmup(self):
            calls.append(("warm up",))

    def load(model, *, tokenizer, dtype, check_config, keep_quantised):
        calls.append(("load", model, tokenizer, jnp.dtype(dtype).name))
        return "checkpoint"

    monkeypatch.setattr(jpaged.llm, "load_checkpoint", load)
    monkeypatch.setattr(jpaged.llm, "Engine", RecordingEngine)
    own = {  # each unlike its default
        "max_model_len": 32,
        "block_size": 8,
        "num_blocks": 4,
        "gpu_memory_utilization": 0.5,
        "max_num_seqs": 9,
        "max_num_batched_tokens": 17,
        "attention_backend": "xla",
        "compilation_cache_dir": str(tmp_path / "cache"),
        "seed": 5,
    }
    with restored_jax_config():
        llm = LLM(tmp_path, tokenizer="other", dtype="bfloat16", **own)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "cache")
    assert isinstance(llm.engine, RecordingEngine)
    assert calls == [
        ("load", str(tmp_path), "other", "bfloat16"),
        ("build", "checkpoint", EngineConfig(**own)),
        ("check the defaults",),
        ("warm up",),
    ]


def test_a_caller_may_use_names_of_the_form_that_llm_uses(llm):
    llm.engine.add_request([5], SamplingParams(max_tokens=2), request_id="llm-0")
    numbers = range(1, 50)
    for number in numbers:
        llm.engine.add_request([5], SamplingParams(max_tokens=2), request_id=f"llm-{number}")
    (output,) = llm.generate("One", SamplingParams(max_tokens=2, temperature=0))
    assert output.finished and output.request_id not in {f"llm-{n}" for n in range(50)}
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def test_an_output_that_somebody_else_took_is_an_error_and_no_endless_wait(llm):
    stream = llm.stream("One", SamplingParams(max_tokens=4, ignore_eos=True))
    next(stream)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    with pytest.raises(RuntimeError, match="ended outside this call"):
        next(stream)


def test_a_stream_that_is_aborted_from_outside_ends(llm):
    stream = llm.stream("One", SamplingParams(max_tokens=9, ignore_eos=True))
    first = next(stream)
    llm.engine.abort(first.request_id)
    outputs = list(stream)
    assert [o.outputs[0].finish_reason for o in outputs] == ["abort"]


def test_too_long_a_max_model_len_is_refused_before_any_weight_is_read(monkeypatch):
    from jpaged.checkpoints import gguf

    def read(*_):
        raise AssertionError("a weight was read")

    for name in ("read_tensor", "read_quantised"):
        monkeypatch.setattr(gguf.GGUFCheckpoint, name, read)
    with pytest.raises(ValueError, match="max_model_len must be at most the model's 8192"):
        LLM(model="smollm2-135m", max_model_len=8193)


def test_iterate_yields_in_order_as_soon_as_it_can(llm):
    short, long = (SamplingParams(max_tokens=n, ignore_eos=True, temperature=0) for n in (2, 9))
    requests = [llm.prepare("One", short), llm.prepare("Two", long), llm.prepare("Three", short)]
    outputs = llm.iterate(requests)
    assert len(next(outputs).outputs[0].token_ids) == 2
    assert llm.engine.has_unfinished_requests()
    outputs.close()
    assert not llm.engine.has_unfinished_requests() and llm.stats().blocks_used == 0
    assert [len(o.outputs[0].token_ids) for o in llm.iterate(requests)] == [2, 9, 2]


def test_jax_arrays_and_ranges_are_prompts_too(llm):
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    expected = llm.generate([5, 6, 7], params)[0].outputs[0].token_ids
    for prompt in (jnp.array([5, 6, 7]), [range(5, 8)], [jnp.array([5, 6, 7])]):
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == expected
