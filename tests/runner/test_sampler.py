import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from scipy import stats

from jpaged.runner import sampler
from jpaged.runner.batch import PARAMETERS, pack_parameters

VOCAB = 1000  # not a multiple of the groups of 128, and more than the 256 candidates
DEFAULTS = dict.fromkeys(PARAMETERS, 0) | {
    "temperature": 1.0,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
    "prompt_len": 1,
}


def make_rows(rows: list[dict], context_lens=None, block_tables=None) -> sampler.SamplingRows:
    count = len(rows)
    if context_lens is None:
        context_lens = np.full(count, 5, np.int32)
    if block_tables is None:
        block_tables = np.zeros((count, 16), np.int32)
    return sampler.SamplingRows(
        context_lens=jnp.asarray(context_lens, jnp.int32),
        slots=jnp.arange(count),
        parameters=jnp.asarray(np.stack([pack_parameters(DEFAULTS | row) for row in rows])),
        block_tables=jnp.asarray(block_tables, jnp.int32),
    )


sample = jax.jit(sampler.sample_rows)
inverse_cdf = jax.jit(sampler.inverse_cdf)


@jax.jit
def filter_threshold(x, top_k, top_p, min_p):
    return sampler.filter_threshold(x, top_k, top_p, min_p)


def threshold_of(x, top_k=0, top_p=1.0, min_p=0.0):
    """The threshold of each row, with the same filters for all of them."""
    rows = len(x)
    return np.asarray(
        filter_threshold(
            jnp.asarray(x),
            jnp.full(rows, top_k, jnp.int32),
            jnp.full(rows, top_p, jnp.float32),
            jnp.full(rows, min_p, jnp.float32),
        )
    )


def run(logits, rows, *, token_pool=None, bias=None, **context):
    if token_pool is None:
        token_pool = jnp.zeros((4, 16), jnp.int32)
    if bias is None:
        bias = jnp.zeros(logits.shape, jnp.float32)
    out = sample(jnp.asarray(logits), make_rows(rows, **context), token_pool, jnp.asarray(bias))
    return {name: np.asarray(value) for name, value in out._asdict().items()}


def random_logits(rows, vocab=VOCAB, seed=0, scale=3.0):
    return np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32)


def softmax(x):
    x = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def filtered(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The distribution after the filters, by transformers' definitions, in float64."""
    x = logits.astype(np.float64) / temperature
    keep = np.ones(len(x), bool)
    if top_k > 0:
        keep &= x >= np.sort(x)[-min(top_k, len(x))]
    p = softmax(np.where(keep, x, -np.inf))
    if top_p < 1.0:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        keep[order[before >= top_p]] = False
    keep &= softmax(x) >= min_p * softmax(x).max()
    return softmax(np.where(keep, x, -np.inf))


FILTERS = [
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 256},
    {"top_k": 257},  # beyond the candidates: the exact search
    {"top_k": 900},
    {"top_k": 5000},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999},  # a nucleus of more than 256 tokens
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 500, "top_p": 0.95},
    {"top_k": 50, "top_p": 0.5, "min_p": 0.1},
    {"top_p": 0.999, "min_p": 0.001, "temperature": 2.0},
    {"top_k": 20, "temperature": 0.3},
]


OFF = [("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)]


@pytest.mark.parametrize("vocab", [7, 128, VOCAB])
def test_argmax_finds_the_first_largest(vocab):
    x = np.round(random_logits(16, vocab))  # rounded: many ties
    np.testing.assert_array_equal(sampler.argmax(jnp.asarray(x)), x.argmax(1))
    x[:] = -np.inf
    x[:, vocab - 1] = 0
    np.testing.assert_array_equal(sampler.argmax(jnp.asarray(x)), np.full(16, vocab - 1))


@pytest.mark.parametrize("vocab", [7, 128, VOCAB])
def test_inverse_cdf_looks_up_the_cumulative_distribution(vocab):
    # Powers of two add up exactly, so the answer does not depend on the order of summation.
    rng = np.random.default_rng(1)
    weights = (rng.integers(0, 3, (64, vocab)) / 2).astype(np.float32)
    weights[:, vocab // 2] = 1.0
    uniform = (rng.integers(0, 2**10, 64) / 2**10).astype(np.float32)
    uniform[:3] = 0.0, np.float32(1 - 2**-24), 0.5
    total = np.cumsum(weights.astype(np.float64), 1)
    expected = (total > (uniform * total[:, -1])[:, None]).argmax(1)
    found = np.asarray(inverse_cdf(jnp.asarray(weights), jnp.asarray(uniform)))
    np.testing.assert_array_equal(found, expected)


def test_inverse_cdf_never_returns_a_token_of_weight_zero():
    rng = np.random.default_rng(2)
    weights = rng.random((256, VOCAB)).astype(np.float32)
    weights[rng.random(weights.shape) < 0.9] = 0
    weights[:, 400] = 1e-6
    for uniform in (0.0, 0.5, float(np.float32(1 - 2**-24))):
        found = np.asarray(inverse_cdf(jnp.asarray(weights), jnp.full(256, uniform)))
        assert (weights[np.arange(256), found] > 0).all()


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_the_tokens_that_transformers_keeps(filters):
    logits = random_logits(8)
    temperature = np.float32(filters.get("temperature", 1.0))
    x = (logits - logits.max(1, keepdims=True)) / temperature
    kept = x >= threshold_of(x, *(filters.get(n, d) for n, d in OFF))[:, None]
    expected = np.stack([filtered(row, **filters) for row in logits])
    np.testing.assert_array_equal(kept, expected > 0)


def test_the_search_among_candidates_and_the_exact_one_agree():
    x = random_logits(8)[7:]
    x -= x.max()
    exact = jax.jit(sampler._exact_threshold)
    for top_k, top_p in [(10, 1.0), (200, 0.9), (VOCAB, 0.7), (256, 0.2)]:
        fast = threshold_of(np.repeat(x, 8, axis=0), top_k, top_p)
        assert fast[0] == float(exact(jnp.asarray(x[0]), jnp.int32(top_k), jnp.float32(top_p)))


def test_ties_with_the_kth_token_stay():
    x = np.full((8, VOCAB), -1.0, np.float32)
    x[:4, :10] = 0.0
    x[4:, 100:400] = 0.0  # 300 tokens tie with the 5th: more than the candidates hold
    kept = (x >= threshold_of(x, top_k=5)[:, None]).sum(1)
    assert kept.tolist() == [10] * 4 + [300] * 4


@pytest.mark.parametrize(
    "filters",
    [{}, {"temperature": 0.5}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_p": 0.99}],
    ids=str,
)
def test_ten_thousand_samples_of_one_position_fit_their_distribution(filters):
    logits = random_logits(1, seed=5, scale=1.5)
    count = 10_000
    tokens = []
    for first in range(0, count, 250):
        rows = [{"seed_low": seed} | filters for seed in range(first, first + 250)]
        tokens.append(run(np.repeat(logits, 250, axis=0), rows)["token"])
    observed = np.bincount(np.concatenate(tokens), minlength=VOCAB)
    expected = filtered(logits[0], **filters) * count
    assert observed[expected == 0].sum() == 0
    # Chi-square wants at least 5 expected in a cell: pool the rare tokens.
    common = expected >= 5
    if not common.all() and (rest := expected[~common].sum()) > 0:
        observed = np.append(observed[common], observed[~common].sum())
        expected = np.append(expected[common], rest)
    else:
        observed, expected = observed[common], expected[common]
    _, p_value = stats.chisquare(observed, expected * observed.sum() / expected.sum())
    assert p_value > 1e-3  # seeds are fixed: this is one draw, not a flaky test


def test_samples_under_penalties_fit_the_penalised_distribution():
    logits = random_logits(1, seed=6, scale=1.0)
    context = np.array([3, 3, 3, 8, 8, 11, 11, 11, 11, 40])  # the first two are the prompt
    token_pool = jnp.asarray(np.pad(context, (0, 6)).reshape(1, 16), jnp.int32)
    penalties = {
        "prompt_len": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
    }
    edited = logits[0].astype(np.float64)
    for token in set(context.tolist()):
        edited[token] *= 1.5 if edited[token] < 0 else 1 / 1.5
    for token in set(context[2:].tolist()):
        edited[token] -= 0.5 + 0.25 * (context[2:] == token).sum()
    tokens = []
    for first in range(0, 10_000, 250):
        rows = [{"seed_low": seed} | penalties for seed in range(first, first + 250)]
        lens = np.full(250, len(context))
        out = run(np.repeat(logits, 250, axis=0), rows, token_pool=token_pool, context_lens=lens)
        tokens.append(out["token"])
    observed = np.bincount(np.concatenate(tokens), minlength=VOCAB)
    expected = softmax(edited) * 10_000
    common = expected >= 5
    observed = np.append(observed[common], observed[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_samples_differ_by_seed_by_sample_and_by_position_and_by_nothing_else():
    logits = np.zeros((1, VOCAB), np.float32)
    base = {"seed_high": 3, "seed_low": 7, "sample_index": 1}

    def token(context_len=5, **changes):
        rows = [base | changes]
        return int(run(logits, rows, context_lens=[context_len])["token"][0])

    assert token() == token()
    others = [
        token(seed_low=8),
        token(seed_high=4),
        token(sample_index=2),
        token(context_len=6),
        token(seed_low=7 | 1 << 31),
    ]
    assert len({token(), *others}) == 6


def test_the_key_is_the_one_that_the_contract_names():
    logits = np.zeros((1, VOCAB), np.float32)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(42, impl="threefry2x32"), 2), 9)
    expected = int(jax.random.uniform(key) * VOCAB)
    found = run(logits, [{"seed_low": 42, "sample_index": 2}], context_lens=[9])
    assert int(found["token"][0]) == expected


def mixed_rows():
    return [
        {"temperature": 0.0},
        {"seed_low": 1},
        {"seed_low": 2, "top_k": 5},
        {"seed_low": 3, "top_p": 0.999},
        {"seed_low": 4, "min_p": 0.1, "temperature": 0.7},
        {"seed_low": 5, "repetition_penalty": 1.3},
        {"seed_low": 6, "presence_penalty": 0.5, "frequency_penalty": -1.0},
        {"temperature": 0.0, "has_bias": 1},
        {"seed_low": 8, "wants_logprobs": 1},
    ]


def test_a_row_gets_the_same_token_alone_and_beside_any_others():
    rng = np.random.default_rng(3)
    rows = mixed_rows()
    logits = random_logits(len(rows))
    token_pool = jnp.asarray(rng.integers(0, VOCAB, (64, 16)), jnp.int32)
    tables = rng.permutation(len(rows) * 3).reshape(-1, 3)
    tables = np.pad(tables, ((0, 0), (0, 13)), constant_values=-7)
    lens = rng.integers(1, 48, len(rows))
    bias = rng.normal(0, 5, logits.shape).astype(np.float32)
    together = run(
        logits, rows, token_pool=token_pool, bias=bias, context_lens=lens, block_tables=tables
    )
    for i, row in enumerate(rows):
        # Row numbers must not matter either, so the lone row is row 0 of a bias table of its own.
        alone = run(
            logits[i : i + 1],
            [row],
            token_pool=token_pool,
            bias=bias[i : i + 1],
            context_lens=lens[i : i + 1],
            block_tables=tables[i : i + 1],
        )
        assert alone["token"][0] == together["token"][i], row
        if "wants_logprobs" in row:
            np.testing.assert_array_equal(alone["top_ids"][0], together["top_ids"][i])


def test_temperatures_near_zero_are_greedy_and_finite():
    logits = random_logits(3)
    rows = [{"temperature": t, "seed_low": 1} for t in (1e-4, 1e-30, 1e-38)]
    np.testing.assert_array_equal(run(logits, rows)["token"], logits.argmax(1))


def test_penalties_count_tokens_of_the_context_through_the_block_table():
    vocab, block = 50, 4
    rng = np.random.default_rng(4)
    lens, prompt_lens = [1, 4, 5, 70], [1, 2, 5, 30]
    pool = np.full((40, block), 3, np.int32)
    tables = np.full((4, 32), 10**6, np.int32)  # garbage past each sequence's last block
    contexts, free = [], iter(rng.permutation(40))
    for row, length in enumerate(lens):
        context = rng.integers(0, vocab, length)
        contexts.append(context)
        for b in range(-(-length // block)):
            tables[row, b] = next(free)
            part = context[b * block : (b + 1) * block]
            pool[tables[row, b], : len(part)] = part
    logits = random_logits(4, vocab)
    everywhere, generated = sampler.count_tokens(
        jnp.asarray(pool), jnp.asarray(tables), jnp.array(lens), jnp.array(prompt_lens), vocab
    )
    repetition, presence, frequency = 1.5, 0.25, -0.5
    found = sampler.apply_penalties(
        jnp.asarray(logits),
        everywhere,
        generated,
        *(jnp.full(4, v) for v in (repetition, presence, frequency)),
    )
    for row, (context, prompt_len) in enumerate(zip(contexts, prompt_lens)):
        expected = logits[row].astype(np.float64)
        for token in set(context.tolist()):
            expected[token] *= repetition if expected[token] < 0 else 1 / repetition
        for token in set(context[prompt_len:].tolist()):
            count = (context[prompt_len:] == token).sum()
            expected[token] -= presence + frequency * count
        np.testing.assert_allclose(found[row], expected, rtol=1e-6, atol=1e-6)


def test_logprobs_are_those_of_the_model_whatever_is_done_to_the_logits():
    logits = random_logits(2)
    bias = np.zeros_like(logits)
    bias[0, 17] = 100.0
    rows = [
        {"temperature": 0.0, "has_bias": 1, "wants_logprobs": 1},
        {"temperature": 0.2, "top_k": 3, "wants_logprobs": 1, "seed_low": 9},
    ]
    out = run(logits, rows, bias=bias)
    assert out["token"][0] == 17
    logprobs = np.log(softmax(logits))
    for row in range(2):
        np.testing.assert_allclose(out["logprob"][row], logprobs[row, out["token"][row]], rtol=1e-5)
        best = np.argsort(-logits[row])[:20]
        np.testing.assert_array_equal(out["top_ids"][row], best)
        np.testing.assert_allclose(out["top_logprobs"][row], logprobs[row, best], rtol=1e-5)


def test_a_vocabulary_smaller_than_twenty():
    logits = random_logits(2, vocab=7)
    out = run(logits, [{"wants_logprobs": 1, "top_k": 3}, {"top_p": 0.5}], bias=np.zeros((2, 7)))
    assert (out["token"] < 7).all()
    assert sorted(out["top_ids"][0, :7]) == list(range(7))
    assert (out["top_ids"][0, 7:] == -1).all()


@pytest.mark.parametrize(
    "row",
    [
        {"top_p": 1e-40, "top_k": 300},  # smaller than any float32: a target of 0
        {"top_p": 1e-40},
        {"top_p": 1e-30, "top_k": 900},
        {"min_p": 1.0, "top_k": 1},
    ],
    ids=str,
)
def test_the_smallest_nucleus_is_the_best_token(row):
    logits = random_logits(2)
    assert run(logits, [row, row])["token"].tolist() == logits.argmax(1).tolist()


def test_a_row_of_nan_stays_in_the_vocabulary_and_harms_no_other():
    rows = [
        {"temperature": t, "seed_low": 3, **f} for t in (0.0, 1.0) for f in ({}, {"top_p": 0.5})
    ]
    logits = random_logits(len(rows) + 1)
    rows.append({"seed_low": 4, "top_k": 40, "wants_logprobs": 1})
    expected = run(logits, rows)["token"][-1]
    logits[:-1] = np.nan
    logits[0, 5] = 1.0
    found = run(logits, rows)["token"]
    assert ((found >= 0) & (found < VOCAB)).all()
    assert found[-1] == expected


def executed(jaxpr) -> set[str]:
    """Names of the primitives that run where no condition holds: inside nested calls too, but of a
    branch those of the one for False."""
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        if equation.primitive.name == "cond":
            names |= executed(equation.params["branches"][0].jaxpr)
        else:
            for sub in jaxprs_in_params(equation.params):
                names |= executed(sub)
    return names


def test_a_greedy_batch_runs_no_branch_but_argmax():
    logits, rows = jnp.zeros((8, VOCAB)), make_rows([{"temperature": 0.0}] * 8)
    jaxpr = jax.make_jaxpr(sampler.sample_rows)(
        logits, rows, jnp.zeros((4, 16), jnp.int32), jnp.zeros((8, VOCAB))
    )
    outside = executed(jaxpr.jaxpr)
    assert {"cond", "argmax"} <= outside
    expensive = {"exp", "log", "top_k", "sort", "cumsum", "while", "scan", "scatter-add"}
    expensive |= {"random_bits", "threefry2x32", "random_fold_in", "random_wrap"}
    assert not outside & expensive
    # The names are right: they are what a sampling function runs.
    for function, arguments, names in [
        (sampler.inverse_cdf, (logits, jnp.zeros(8)), {"cumsum"}),
        (sampler.log_probabilities, (logits, jnp.zeros(8, jnp.int32)), {"exp", "log", "top_k"}),
        (sampler.row_uniforms, [jnp.zeros(8, jnp.int32)] * 4, {"random_bits", "random_fold_in"}),
    ]:
        assert names <= executed(jax.make_jaxpr(function)(*arguments).jaxpr)


@pytest.mark.parametrize(
    "asked, entered",
    [
        ({"temperature": 0.0}, set()),
        ({"temperature": 1.0}, {"_sample"}),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, {"count_tokens"}),
        ({"temperature": 0.0, "presence_penalty": 0.1}, {"count_tokens"}),
        ({"temperature": 0.0, "frequency_penalty": -0.1}, {"count_tokens"}),
        ({"temperature": 0.0, "wants_logprobs": 1}, {"log_probabilities"}),
    ],
    ids=str,
)
def test_rows_of_padding_ask_for_nothing(monkeypatch, asked, entered):
    """A batch that is not full pays for what its requests ask for alone."""
    called = set()
    for name in ("_sample", "count_tokens", "log_probabilities"):
        function = getattr(sampler, name)

        def noted(*arguments, name=name, function=function):
            called.add(name)
            return function(*arguments)

        monkeypatch.setattr(sampler, name, noted)
    padded = make_rows([asked])._replace(
        context_lens=jnp.array([5, 0, 0], jnp.int32),
        slots=jnp.array([2, 0, 0]),
        block_tables=jnp.zeros((3, 16), jnp.int32),
    )
    zeros = jnp.zeros((2, len(PARAMETERS)), jnp.int32)  # as `build_batch` leaves them
    padded = padded._replace(parameters=jnp.concatenate([padded.parameters, zeros]))
    logits = jnp.asarray(random_logits(3))
    with jax.disable_jit():  # so that only the branch that is taken is run
        sampler.sample_rows(logits, padded, jnp.zeros((4, 16), jnp.int32), jnp.zeros((3, VOCAB)))
    assert called == entered
