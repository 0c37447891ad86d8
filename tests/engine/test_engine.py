"""The engine on a tiny random model: bookkeeping, sampling parameters, errors."""

import dataclasses
import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpaged import SamplingParams
from jpaged.engine import Engine
from jpaged.models import Llama
from jpaged.runner import model_runner

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
# A random model repeats itself when it is greedy; these tokens are all different.
VARIED = SamplingParams(seed=1, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(make_engine) -> Engine:
    return make_engine()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 40000, length).tolist()


def run_all(engine: Engine) -> dict:
    """Step until nothing is left; the last output of each request."""
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
        engine.scheduler.check_integrity()
    assert engine.stats().blocks_used == 0
    return outputs


def generate(engine: Engine, token_ids: list[int], params: SamplingParams):
    request_id = engine.add_request(token_ids, params)
    return run_all(engine)[request_id]


def test_step_returns_each_new_token_and_the_finished_request(engine):
    request_id = engine.add_request(prompt(40), GREEDY, prompt="as given")
    lengths = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert output.request_id == request_id and output.prompt == "as given"
            assert output.prompt_token_ids == prompt(40)
            lengths.append(len(output.outputs[0].token_ids))
            assert output.finished == (lengths[-1] == 8)
    assert lengths == list(range(1, 9))  # the 40 tokens take two steps, one without a token
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None
    assert engine.step() == []


def test_a_request_that_does_not_stream_is_returned_once(engine):
    engine.add_request(prompt(5), GREEDY, stream=False)
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    assert len(seen) == 1 and seen[0].finished


def test_results_do_not_depend_on_chunks_or_neighbours(engine, make_engine):
    prompts = [prompt(length, seed) for seed, length in enumerate([1, 5, 31, 32, 33, 64, 100])]
    alone = [generate(engine, p, GREEDY).outputs[0].token_ids for p in prompts]
    ids = [engine.add_request(p, GREEDY) for p in prompts]
    together = run_all(engine)
    assert [together[i].outputs[0].token_ids for i in ids] == alone
    other = make_engine(max_num_batched_tokens=8, block_size=8, num_blocks=128)
    ids = [other.add_request(p, GREEDY) for p in prompts]
    chunked = run_all(other)
    assert [chunked[i].outputs[0].token_ids for i in ids] == alone


def test_stop_tokens_end_the_sequence_and_are_no_text(engine):
    whole = generate(engine, prompt(9), VARIED).outputs[0]
    third = whole.token_ids[2]
    assert third not in whole.token_ids[:2]
    params = dataclasses.replace(VARIED, stop_token_ids=[third])
    out = generate(engine, prompt(9), params).outputs[0]
    assert out.token_ids == whole.token_ids[:3]
    assert (out.finish_reason, out.stop_reason) == ("stop", third)
    assert out.text == engine.tokenizer.decode(whole.token_ids[:2], skip_special_tokens=True)


def test_the_models_end_tokens_stop_unless_ignored(make_engine, tiny_checkpoint):
    whole = generate(make_engine(), prompt(9), VARIED).outputs[0]
    ends = dataclasses.replace(tiny_checkpoint, eos_token_ids=(0, whole.token_ids[3]))
    engine = make_engine(ends)
    out = generate(engine, prompt(9), dataclasses.replace(VARIED, ignore_eos=False)).outputs[0]
    assert out.token_ids == whole.token_ids[:4]
    assert (out.finish_reason, out.stop_reason) == ("stop", None)
    assert generate(engine, prompt(9), VARIED).outputs[0].token_ids == whole.token_ids


def test_min_tokens_holds_back_stop_tokens_until_they_are_allowed(engine):
    whole = generate(engine, prompt(9), GREEDY).outputs[0].token_ids
    params = dataclasses.replace(GREEDY, stop_token_ids=[whole[0]], min_tokens=5)
    out = generate(engine, prompt(9), params).outputs[0]
    assert whole[0] not in out.token_ids[:5] and len(out.token_ids) >= 5
    # The end of the ban is per request: a neighbour with the same slot later is not banned.
    assert generate(engine, prompt(9), GREEDY).outputs[0].token_ids == whole


def test_logit_bias_moves_the_choice_and_leaves_the_logprobs(engine):
    whole = generate(engine, prompt(9), GREEDY).outputs[0].token_ids
    params = dataclasses.replace(GREEDY, logit_bias={123: 1000.0}, logprobs=3)
    out = generate(engine, prompt(9), params).outputs[0]
    assert out.token_ids == [123] * 8
    plain = generate(engine, prompt(9), dataclasses.replace(GREEDY, logprobs=3)).outputs[0]
    assert plain.token_ids == whole
    best = {t: v for t, v in out.logprobs[0].items() if t != 123}
    assert best == plain.logprobs[0]  # the model's own, before the bias
    banned = dataclasses.replace(GREEDY, logit_bias={whole[0]: -1e300, 5: 1e-3})
    assert whole[0] not in generate(engine, prompt(9), banned).outputs[0].token_ids


def test_a_bias_of_every_token_of_the_vocabulary(engine):
    bias = dict.fromkeys(range(engine.vocab_size), -50.0) | {77: 50.0}
    params = dataclasses.replace(GREEDY, logit_bias=bias)
    assert generate(engine, prompt(4), params).outputs[0].token_ids == [77] * 8


def test_logprobs_agree_with_the_prompt_logprobs_of_the_same_text(engine):
    params = dataclasses.replace(GREEDY, logprobs=4, prompt_logprobs=4)
    first = generate(engine, prompt(50), params)
    out = first.outputs[0]
    assert first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == 50
    assert len(out.logprobs) == 8
    for token, entry in zip(out.token_ids, out.logprobs):
        # Greedy: the chosen token is the best one.
        assert len(entry) == 4 and entry[token] == max(entry.values())
    total = sum(entry[token] for token, entry in zip(out.token_ids, out.logprobs))
    assert out.cumulative_logprob == pytest.approx(total)
    replay = generate(engine, prompt(50) + out.token_ids, params)
    for generated, replayed in zip(out.logprobs, replay.prompt_logprobs[50:]):
        assert generated.keys() == replayed.keys()
        for token in generated:
            # float32 rounding differs between a decode and a prefill of other shapes.
            assert generated[token] == pytest.approx(replayed[token], abs=2e-5)


def test_logprobs_zero_gives_the_chosen_token_alone(engine):
    params = SamplingParams(seed=3, max_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    output = generate(engine, prompt(3), params)
    assert [list(entry) for entry in output.outputs[0].logprobs] == [
        [token] for token in output.outputs[0].token_ids
    ]
    assert [list(entry) for entry in output.prompt_logprobs[1:]] == [[t] for t in prompt(3)[1:]]


def test_prompt_logprobs_survive_preemption(make_engine):
    roomy, tight = make_engine(num_blocks=64), make_engine(num_blocks=9)
    params = dataclasses.replace(GREEDY, max_tokens=40, prompt_logprobs=2, logprobs=1)
    outputs = []
    for engine in (roomy, tight):
        ids = [engine.add_request(prompt(40, seed), params) for seed in range(4)]
        results = run_all(engine)
        outputs.append([results[i] for i in ids])
    assert roomy.stats().preemptions_recompute == 0
    assert tight.stats().preemptions_recompute > 0
    for a, b in zip(*outputs):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert len(b.prompt_logprobs) == 40 and len(b.outputs[0].logprobs) == 40
        for x, y in zip(a.prompt_logprobs[1:], b.prompt_logprobs[1:]):
            assert x.keys() == y.keys()
            assert list(x.values()) == pytest.approx(list(y.values()), abs=2e-5)


def test_a_seedless_request_is_seeded_by_the_engines_seed_and_its_number(make_engine):
    params = SamplingParams(max_tokens=6, ignore_eos=True)

    def tokens(seed):
        engine = make_engine(seed=seed)
        ids = [engine.add_request(prompt(4), params) for _ in range(2)]
        results = run_all(engine)
        return [results[i].outputs[0].token_ids for i in ids]

    first, second = tokens(0)
    assert first != second
    assert tokens(0) == [first, second]
    assert tokens(1) != [first, second]


def test_max_model_len_ends_a_sequence(engine):
    params = dataclasses.replace(GREEDY, max_tokens=1000)
    out = generate(engine, prompt(250), params).outputs[0]
    assert len(out.token_ids) == 6 and out.finish_reason == "length"
    out = generate(engine, prompt(255), params).outputs[0]
    assert len(out.token_ids) == 1 and out.finish_reason == "length"


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_abort_at_any_point_gives_back_every_block(engine, steps):
    # 80 tokens in chunks of 32: steps 1 and 2 are mid-prompt, later ones decode. The token of the
    # last step is still under way.
    victim = engine.add_request(prompt(80), GREEDY)
    for _ in range(steps):
        engine.step()
    assert engine.abort(victim)
    assert engine.stats().blocks_used == 0 and not engine.has_unfinished_requests()
    (output,) = engine.step()
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == max(0, steps - 3)
    assert not engine.abort(victim)
    assert not engine.abort("no such request")


def test_an_abort_can_go_unreported(engine):
    request_id = engine.add_request(prompt(4), GREEDY)
    assert engine.has_request(request_id)
    assert engine.abort(request_id, report=False)
    assert not engine.has_request(request_id) and engine.step() == []


def test_one_sequence_of_nan_leaves_its_neighbours_alone(make_engine, tiny_checkpoint):
    # A model with one broken embedding: whoever holds the token is lost, and nobody else.
    expected = generate(make_engine(), prompt(30, 1), VARIED).outputs[0].token_ids
    # Untied, so that the head does not hold the NaN too.
    config = dataclasses.replace(tiny_checkpoint.config, tie_word_embeddings=False)
    graphdef, state = nnx.split(Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), nnx.Param)
    clean = dict(nnx.to_flat_state(tiny_checkpoint.params))
    flat = nnx.to_flat_state(state)
    filled = []
    for path, variable in flat:
        source = clean.get(path, clean[("embedding", *path[1:])] if path[0] == "head" else None)
        value = source.get_value()
        if path[0] == "embedding":
            value = value.at[77].set(jnp.nan)
        filled.append((path, variable.replace(value)))
    broken = dataclasses.replace(
        tiny_checkpoint, config=config, graphdef=graphdef, params=nnx.from_flat_state(filled)
    )
    engine = make_engine(broken)
    healthy = engine.add_request(prompt(30, 1), VARIED)
    for length in (1, 1, 40):
        engine.add_request([77] * length, VARIED)
    assert run_all(engine)[healthy].outputs[0].token_ids == expected


def test_abort_leaves_the_others_alone(engine):
    expected = generate(engine, prompt(20, 1), GREEDY).outputs[0].token_ids
    other = engine.add_request(prompt(20, 1), GREEDY)
    victim = engine.add_request(prompt(20, 2), GREEDY)
    engine.step()
    engine.step()
    engine.abort(victim)
    results = run_all(engine)
    assert results[other].outputs[0].token_ids == expected
    assert results[victim].outputs[0].finish_reason == "abort"


def test_an_interrupted_step_harms_no_request(engine, monkeypatch):
    expected = [generate(engine, prompt(20, i), GREEDY).outputs[0].token_ids for i in range(3)]
    ids = [engine.add_request(prompt(20, i), GREEDY) for i in range(3)]
    for _ in range(3):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            engine.scheduler.check_integrity()
    results = run_all(engine)
    assert [results[i].outputs[0].token_ids for i in ids] == expected


@pytest.fixture
def sigint_interrupts():
    """As in a terminal: a shell starts what it puts in the background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_interrupts")
def test_ctrl_c_takes_effect_when_the_step_is_over(engine, monkeypatch):
    """A real signal in the middle of each part of a step; nothing is lost, not even its tokens."""
    expected = [generate(engine, prompt(20, i), GREEDY).outputs[0].token_ids for i in range(3)]
    ids = [engine.add_request(prompt(20, i), GREEDY) for i in range(3)]
    results, interrupts = {}, 0
    places = [
        (engine.scheduler, "schedule"),
        (engine.runner, "execute"),
        (engine.scheduler, "update"),
    ]
    while engine.has_unfinished_requests():
        where, name = places[interrupts % 3]
        with monkeypatch.context() as patch:
            real = getattr(where, name)

            def interrupted(*arguments, real=real):
                value = real(*arguments)
                os.kill(os.getpid(), signal.SIGINT)
                return value

            patch.setattr(where, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        interrupts += 1
        engine.scheduler.check_integrity()
        if interrupts % 4 == 0:
            results |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    results |= {o.request_id: o.outputs[0].token_ids for o in engine.step()}
    assert interrupts >= 6
    assert [results[i] for i in ids] == expected
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("when", ["at once", "late"])
def test_a_step_that_fails_on_the_device_costs_no_request(engine, monkeypatch, when):
    """The pools are donated to a step, so one that raises takes them along; one that fails late
    has already put its own, which fail whoever reads them, in their place."""
    expected = [generate(engine, prompt(20, i), GREEDY).outputs[0].token_ids for i in range(3)]
    ids = [engine.add_request(prompt(20, i), GREEDY) for i in range(3)]
    for _ in range(3):
        engine.step()
    execute = engine.runner.execute

    def fail(*arguments):
        result = execute(*arguments)
        if when == "at once":
            engine.runner._kv_pool.delete()
            engine.runner._hidden.delete()
            raise RuntimeError("the device is out of memory")
        broken = jax.jit(lambda x: jax.pure_callback(raising, x, x))
        engine.runner._kv_pool = broken(engine.runner._kv_pool)
        engine.runner._hidden = broken(engine.runner._hidden)
        result._rows = engine.runner._kv_pool
        return result

    def raising(_):
        raise RuntimeError("the device is out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", fail)
        with pytest.raises(Exception, match="out of memory"):
            engine.step()
    engine.scheduler.check_integrity()
    results = run_all(engine)
    assert [results[i].outputs[0].token_ids for i in ids] == expected


def test_block_map_names_the_owner_of_every_block_in_use(engine):
    a = engine.add_request(prompt(20, 1), GREEDY)
    b = engine.add_request(prompt(5, 2), GREEDY)
    assert engine.block_map() == {}
    engine.step()
    owners = engine.block_map()
    assert sorted(owner for (owner,) in owners.values()) == sorted([a, a, b])
    assert len(owners) == engine.stats().blocks_used == 3
    run_all(engine)
    assert engine.block_map() == {}


def test_requests_run_in_order_of_arrival_time(make_engine):
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=8)
    late = engine.add_request(prompt(4), GREEDY, arrival_time=2.0)
    early = engine.add_request(prompt(4), GREEDY, arrival_time=1.0)
    order = []
    while engine.has_unfinished_requests():
        order += [o.request_id for o in engine.step() if o.finished]
    assert order == [early, late]


BAD_REQUESTS = [
    ([], {}, ValueError, "prompt_token_ids must hold at least one token"),
    (
        [1, 49152],
        {},
        ValueError,
        r"prompt_token_ids\[1\] must be an int in \[0, 49152\), got 49152",
    ),
    ([-1], {}, ValueError, r"prompt_token_ids\[0\] must be an int in"),
    ([1.5], {}, TypeError, r"prompt_token_ids\[0\] must be an int"),
    ([True], {}, TypeError, r"prompt_token_ids\[0\] must be an int"),
    ("text", {}, TypeError, "prompt_token_ids must be a list of token ids"),
    (None, {}, TypeError, "prompt_token_ids must be a list of token ids"),
    ([1] * 256, {}, ValueError, "shorter than max_model_len=256.*got 256"),
    ([1, True, 3], {}, TypeError, r"prompt_token_ids\[1\] must be an int"),
    ([2**70], {}, ValueError, r"prompt_token_ids\[0\] must be an int in"),
    ([1], {"request_id": 5}, TypeError, "request_id must be"),
    ([1], {"request_id": "taken"}, ValueError, "request_id must be new, 'taken'"),
    ([1], {"arrival_time": "now"}, TypeError, "arrival_time must be"),
    ([1], {"arrival_time": float("nan")}, ValueError, "arrival_time must be finite"),
]


@pytest.mark.parametrize(
    ("token_ids", "arguments", "error", "message"), BAD_REQUESTS, ids=[b[3] for b in BAD_REQUESTS]
)
def test_a_bad_request_is_refused_and_harms_nothing(engine, token_ids, arguments, error, message):
    good = engine.add_request(prompt(4), GREEDY, request_id="taken")
    with pytest.raises(error, match=message) as raised:
        engine.add_request(token_ids, GREEDY, **arguments)
    assert "\n" not in str(raised.value)
    assert list(run_all(engine)) == [good]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(stop_token_ids=[49152]), "stop_token_ids .*49152"),
        (SamplingParams(logit_bias={60000: 1.0}), "logit_bias .*60000"),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(engine, params, message):
    with pytest.raises(ValueError, match=message):
        engine.add_request([1], params)
    with pytest.raises(TypeError, match="sampling_params must be"):
        engine.add_request([1], {"temperature": 0})
    assert not engine.has_unfinished_requests()


def test_a_request_too_large_for_the_pool_is_refused_when_added(make_engine):
    engine = make_engine(num_blocks=4, max_num_batched_tokens=8)
    with pytest.raises(ValueError, match=r"needs 5 blocks.* has 4"):
        engine.add_request(prompt(60), dataclasses.replace(GREEDY, max_tokens=6))
    assert not engine.has_unfinished_requests()
    # The last token is never fed back, so it needs no slot: exactly the whole pool.
    out = generate(engine, prompt(60), dataclasses.replace(GREEDY, max_tokens=5))
    assert len(out.outputs[0].token_ids) == 5


def test_more_positions_than_the_model_has_are_refused(make_engine):
    with pytest.raises(ValueError, match="max_model_len must be at most the model's 512"):
        make_engine(max_model_len=513)


def test_generation_config_gives_the_default_parameters(make_engine, tiny_checkpoint):
    given = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "max_new_tokens": 9,
        "do_sample": True,
        "transformers_version": "5.0",
    }
    engine = Engine(
        dataclasses.replace(tiny_checkpoint, generation_config=given),
        make_engine().config,
    )
    assert engine.get_default_sampling_params() == SamplingParams(
        temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1, max_tokens=9
    )
    assert make_engine().get_default_sampling_params() == SamplingParams()
    greedy = dataclasses.replace(tiny_checkpoint, generation_config={"do_sample": False})
    engine = Engine(greedy, make_engine().config)
    assert engine.get_default_sampling_params().temperature == 0


def random_params(rng) -> SamplingParams:
    choose = rng.choice
    return SamplingParams(
        temperature=float(choose([0, 0, 0.7, 1.5])),
        top_k=int(choose([0, 5, 300])),
        top_p=float(choose([1.0, 0.9, 0.999])),
        min_p=float(choose([0, 0.05])),
        presence_penalty=float(choose([0, 0.5])),
        repetition_penalty=float(choose([1, 1.2])),
        logit_bias={int(rng.integers(49152)): 2.0} if rng.random() < 0.2 else None,
        seed=int(rng.integers(2**62)) if rng.random() < 0.5 else None,
        max_tokens=int(rng.integers(1, 30)),
        min_tokens=int(choose([0, 1])),
        stop=["ab", " the"] if rng.random() < 0.3 else None,
        stop_token_ids=[int(rng.integers(49152))] if rng.random() < 0.2 else None,
        ignore_eos=bool(rng.random() < 0.5),
        logprobs=choose([None, 0, 5, 20]),
        prompt_logprobs=choose([None, None, 2]),
    )


def test_nothing_compiles_after_warmup_over_a_mixed_load(make_engine):
    engine = make_engine(num_blocks=24)
    rng = np.random.default_rng(0)
    waiting = [(prompt(int(rng.integers(1, 200)), seed), random_params(rng)) for seed in range(200)]
    finished, in_flight = [], []
    while waiting or engine.has_unfinished_requests():
        for _ in range(rng.integers(0, 4)):
            if waiting:
                in_flight.append(engine.add_request(*waiting.pop()))
        if in_flight and rng.random() < 0.05:
            engine.abort(in_flight[int(rng.integers(len(in_flight)))])
        for output in engine.step():
            if output.finished:
                finished.append(output)
                in_flight.remove(output.request_id)
    engine.scheduler.check_integrity()
    stats = engine.stats()
    assert len(finished) == 200 and not in_flight
    reasons = {output.outputs[0].finish_reason for output in finished}
    assert reasons == {"stop", "length", "abort"}
    assert stats.preemptions_recompute > 0
    assert stats.compilations_after_warmup == 0
    assert stats.blocks_used == 0 and stats.blocks_free == stats.num_blocks == 24
    assert stats.padded_tokens > 0 and stats.warmup_seconds > 0
    assert stats.num_buckets == len(engine.runner.buckets)


def test_a_compilation_in_a_step_would_be_counted(make_engine, monkeypatch):
    """The counter can fail: a fresh jit inside a step shows up."""
    engine = make_engine()
    execute = engine.runner.execute

    def compiling(*step):
        jax.jit(lambda x: x * 3 + 1)(np.arange(11))
        return execute(*step)

    monkeypatch.setattr(engine.runner, "execute", compiling)
    engine.add_request(prompt(3), GREEDY)
    engine.step()
    assert engine.stats().compilations_after_warmup == 1
    engine.abort("0")


def test_a_second_thread_is_refused_and_spoils_nothing(engine, monkeypatch):
    expected = generate(engine, prompt(20, 1), GREEDY).outputs[0].token_ids
    request_id = engine.add_request(prompt(20, 1), GREEDY)
    errors, execute = [], engine.runner.execute

    def meddle():
        for call in (
            engine.step,
            lambda: engine.add_request([1], GREEDY),
            lambda: engine.abort(request_id),
        ):
            try:
                call()
            except RuntimeError as error:
                errors.append(str(error))

    def slow(*arguments):
        thread = threading.Thread(target=meddle)
        thread.start()
        thread.join()
        return execute(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "execute", slow)
        engine.step()
    assert errors == ["an engine serves one thread: another is inside it now"] * 3
    assert run_all(engine)[request_id].outputs[0].token_ids == expected


def test_logprobs_of_a_vocabulary_of_fewer_than_twenty(tiny_checkpoint, make_engine):
    config = dataclasses.replace(tiny_checkpoint.config, vocab_size=10)
    graphdef, params = nnx.split(Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(0)), nnx.Param)
    small = dataclasses.replace(
        tiny_checkpoint,
        config=config,
        graphdef=graphdef,
        params=params,
        tokenizer=None,
        eos_token_ids=(),
    )
    output = generate(make_engine(small), [1, 2], SamplingParams(logprobs=20, max_tokens=2))
    for entry in output.outputs[0].logprobs:
        assert sorted(entry) == list(range(10))
        assert sum(np.exp(list(entry.values()))) == pytest.approx(1.0, abs=1e-5)


def test_a_pool_that_cannot_be_allocated_is_refused(make_engine):
    with pytest.raises(ValueError, match="num_blocks=100000000 asks for a KV pool of"):
        make_engine(num_blocks=10**8)


def test_a_pool_that_is_larger_than_the_memory_left_is_refused(make_engine, monkeypatch):
    """It would take the memory later on, as it fills."""
    size = 20 * make_engine(num_blocks=20).runner.bytes_per_block
    monkeypatch.setattr(model_runner, "host_bytes_left", lambda: size - 1)
    make_engine(num_blocks=19)
    with pytest.raises(ValueError, match=f"of {size} bytes, but only {size - 1} bytes of memory"):
        make_engine(num_blocks=20)


def test_nothing_depends_on_what_memory_held_before(make_engine):
    """The pool is memory that nobody has written: it may hold anything, NaN too."""
    rng = np.random.default_rng(5)
    work = [(prompt(int(rng.integers(1, 60)), seed), random_params(rng)) for seed in range(20)]
    found = []
    for value in (0.0, np.nan):
        engine = make_engine(num_blocks=10, swap_space_gib=0.01, preemption_mode="swap", seed=3)
        runner = engine.runner
        runner._kv_pool = jnp.full_like(runner._kv_pool, value)
        runner._hidden = jnp.full_like(runner._hidden, value)
        ids = [engine.add_request(*item) for item in work]
        results = run_all(engine)
        assert engine.stats().preemptions_swap > 0
        found.append(
            [
                (c.token_ids, c.logprobs, results[i].prompt_logprobs)
                for i in ids
                for c in results[i].outputs
            ]
        )
    assert found[0] == found[1]
