"""scripts/benchmark_sharing.py: the lengths, the averages, what sharing saves, its files."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
BLOCK_SIZE = 16
NUM_BLOCKS = 15_700 // BLOCK_SIZE


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path():
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def script(scripts_on_path):
    return importlib.import_module("benchmark_sharing")


@pytest.fixture(scope="module")
def lengths(scripts_on_path):
    return importlib.import_module("_paper_lengths")


@pytest.fixture(scope="module")
def sharing(scripts_on_path):
    return importlib.import_module("_sharing")


@pytest.fixture(scope="module")
def simulate(lengths, sharing):
    """Simulates parallel sampling as the script does; returns the lengths and the result."""

    def simulate(data_set, n, num_requests):
        drawn = lengths.draw_lengths(data_set, np.random.default_rng(0), num_requests)
        result = sharing.simulate_parallel(
            *drawn, n, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=2048
        )
        return drawn, result

    return simulate


def expected_saving(prompt_lens, output_lens, n):
    """What sharing saves of all blocks and steps, from the lengths alone: n samples share the full
    blocks before the prompt's last token, and in the step that computes these, all of them."""
    saved = without = 0
    for prompt, output in zip(prompt_lens.tolist(), output_lens.tolist(), strict=True):
        in_prompt = -(-(prompt - 1) // BLOCK_SIZE)
        contexts = np.arange(prompt, prompt + output)
        without += n * (in_prompt + int((-(-contexts // BLOCK_SIZE)).sum()))
        saved += (n - 1) * (in_prompt + output * ((prompt - 1) // BLOCK_SIZE))
    return saved / without


@pytest.mark.parametrize("data_set", ["alpaca", "sharegpt"])
def test_lengths_have_the_means_that_the_paper_prints(lengths, data_set):
    for histogram in lengths.FIGURE_11[data_set]:
        assert len(histogram.counts) == 128
        probabilities = histogram.probabilities()
        values = np.arange(histogram.shortest, histogram.longest + 1)
        assert probabilities.sum() == pytest.approx(1)
        assert probabilities @ values == pytest.approx(histogram.printed_mean, rel=1e-3)
        width = (histogram.longest - histogram.shortest) / 128
        in_first = probabilities[values < histogram.shortest + width].sum()
        assert in_first == pytest.approx(histogram.counts[0] / sum(histogram.counts))


def test_one_length_is_drawn_from_each_part_of_the_distribution(lengths):
    histogram = lengths.Histogram(11, 18, 14.5, (30, 0, 10, 0))  # 11, 12: 3/8 each; 15, 16: 1/8
    drawn = histogram.draw(np.random.default_rng(0), 8).tolist()
    assert sorted(drawn) == [11, 11, 11, 12, 12, 12, 15, 16]
    assert drawn != sorted(drawn)
    assert drawn != histogram.draw(np.random.default_rng(1), 8).tolist()


def test_drawn_lengths_fit_in_the_model(lengths, monkeypatch):
    around_half = lengths.Histogram(1014, 1033, 1023.5, (1, 1))
    monkeypatch.setitem(lengths.FIGURE_11, "halves", (around_half, around_half))
    prompts, outputs = lengths.draw_lengths("halves", np.random.default_rng(0), 5000)
    assert len(prompts) == len(outputs) == 5000
    assert (prompts + outputs).max() == 2047
    assert prompts.min() == outputs.min() == 1014
    assert prompts.max() == outputs.max() == 1033


def test_averages(sharing):
    run = sharing.Sharing(
        without=[4, 20], held=[4, 10], least=[4, 8], apart=[1, 4], slots_used=[1.0, 0.5]
    )
    assert run.saving == pytest.approx(1 - 1 / 1.5)
    assert run.mean_saving == pytest.approx(0.25)
    assert run.total_saving == pytest.approx(10 / 24)
    assert run.largest_total_saving == pytest.approx(12 / 24)
    assert run.mean_apart == 2.5
    assert run.slots_used_share == 0.75


@pytest.mark.parametrize("n", [2, 4, 6])
def test_parallel_sampling_saves_what_the_paper_says(simulate, lengths, n):
    drawn, result = simulate("alpaca", n, 2000)
    paper = lengths.FIGURE_15["alpaca", "parallel"][n] / 100
    assert result.saving == pytest.approx(paper, abs=0.015)
    assert result.total_saving == pytest.approx(expected_saving(*drawn, n), abs=0.005)
    assert result.saving == pytest.approx(result.mean_saving, abs=0.005)
    assert result.preemptions > 0


def test_slots_hold_tokens_while_samples_share(simulate):
    drawn, result = simulate("sharegpt", 4, 500)
    assert result.slots_used_share >= 0.96
    assert result.total_saving == pytest.approx(expected_saving(*drawn, 4), abs=0.03)
    assert result.saving > 0.15


def test_a_queue_that_runs_dry_at_once_is_refused(simulate):
    with pytest.raises(ValueError, match=r"requests must be many more .* got 20"):
        simulate("alpaca", 2, 20)


def test_beams_of_a_model(sharing, tiny_llm):
    prompts = [
        sharing.make_prompt(tiny_llm, length, np.random.default_rng(0)) for length in (33, 20)
    ]
    assert [len(prompt) for prompt in prompts] == [33, 20]
    requests = sharing.beam_requests(tiny_llm, prompts, np.array([40, 8]), 5)
    run = sharing.run_beams(tiny_llm, requests)
    # 33 tokens in a chunk of 32 and one of one, then 39 tokens of five beams. Of eight rows too few
    # are left for the second search, which comes after.
    assert run.without[:3] == [5 * 2, 5 * 3, 5 * 3]
    assert run.held[:3] == [2, 3, 2 + 5]
    assert run.least[:3] == [2, 3, 2 + 5]
    assert len(run.held) == 2 + 39 + 1 + 7
    assert all(
        least <= held <= without
        for least, held, without in zip(run.least, run.held, run.without, strict=True)
    )
    assert 0 < run.total_saving <= run.largest_total_saving
    assert 1 <= run.mean_apart < 40
    assert run.preemptions == 0
    assert tiny_llm.stats().blocks_used == 0
    assert "schedule" not in vars(tiny_llm.engine.scheduler)  # recorded no longer


@pytest.fixture
def run(script, tmp_path, monkeypatch, tiny_llm, capsys):
    """Runs the script on the tiny model; returns exit code, outputs and what is in the JSON."""
    import jpaged.llm

    given = {}
    monkeypatch.setattr(jpaged.llm, "LLM", lambda **arguments: given.update(arguments) or tiny_llm)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def run(*arguments):
        file = tmp_path / "rows.json"
        code = script.main(["benchmark_sharing.py", "--json", str(file), *arguments])
        captured = capsys.readouterr()
        result = json.loads(file.read_text()) if file.exists() else {}
        return code, captured, result | {"arguments": given}

    return run


def test_the_script(run):
    code, printed, result = run(
        *("--n", "2", "--requests", "600", "--data_set", "alpaca", "--beam_requests", "2")
    )
    assert code == 0, printed.err
    parallel, beam = result["rows"]
    assert (parallel["kind"], parallel["n"]) == ("parallel", 2)
    assert (beam["kind"], beam["n"]) == ("beam", 2)
    assert (parallel["paper"], beam["paper"]) == pytest.approx((0.0609, 0.3756))
    assert 0.03 < parallel["saved"] < 0.09
    assert 0 < beam["total_saved"] <= beam["largest_total_saved"]
    assert result["arguments"]["num_blocks"] == NUM_BLOCKS
    assert result["arguments"]["enable_prefix_caching"] is False
    lines = printed.out.splitlines()
    assert len(lines) == 3
    assert f"{parallel['saved']:.2%}" in lines[1] and "6.09%" in lines[1]
    assert f"{beam['largest_total_saved']:.2%}" in lines[2]


def test_a_plot(run, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "sharing.png"
    code, _, _ = run(
        *("--nobeams", "--data_set", "alpaca", "--n", "2,3", "--requests", "600"),
        *("--plot", str(file)),
    )
    assert code == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--n", "0"),
        ("--n", ""),
        ("--data_set", "gsm8k"),
        ("--requests", "1"),
        ("--nobeams", "--requests", "100"),
        ("--nobeams", "--num_blocks", "2"),
        ("--data_set", "alpaca", "--requests", "600", "--n", "9"),  # rows for eight beams
        ("--plot", "no/such/folder/rows.png"),
        ("more",),
    ],
)
def test_bad_usage(run, arguments):
    code, printed, _ = run(*arguments)
    assert code == 2
    assert len(printed.err.splitlines()) == 1


def test_a_plot_without_matplotlib_is_refused_before_the_run(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, printed, _ = run("--plot", "sharing.png")
    assert (code, printed.out) == (2, "")
    assert "bench" in printed.err


def test_a_reader_who_goes_away():
    command = [sys.executable, str(SCRIPTS / "benchmark_sharing.py"), "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    _, printed = process.communicate(timeout=60)
    assert (process.returncode, printed) == (141, b"")
