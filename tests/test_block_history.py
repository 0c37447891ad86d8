"""The history of the KV pool's blocks and its picture, on a scheduler without a model."""

import builtins
import struct
import types

import numpy as np
import pytest

from jpaged import block_picture
from jpaged.block_history import CACHED, FREE, NUM_LANES, NUM_NAMES, BlockHistory
from jpaged.block_picture import paint, request_colours
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request, RequestStatus, Scheduler

BLOCK_SIZE = 4


class Engine:
    """What a history sees of an engine; "samples" random tokens."""

    def __init__(self, **settings):
        defaults = {
            "num_blocks": 24,
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": 64,
            "watermark": 0.0,
        }
        self.scheduler = Scheduler(**defaults | settings)
        self.after_step = []
        self._rng = np.random.default_rng(0)
        self._added = 0

    def add(self, prompt, output, *, n=1, name=None):
        """A request of a prompt (its token ids, or how many) and `output` tokens to generate."""
        if isinstance(prompt, int):
            prompt = self._rng.integers(0, 10**6, prompt).tolist()
        number, self._added = self._added, self._added + 1
        request = Request(
            str(number) if name is None else name,
            number,
            prompt,
            SamplingParams(n=n),
            stop_token_ids=frozenset(),
            max_total_tokens=len(prompt) + output,
            arrival_time=0.0,
            num_sequences=n,
        )
        self.scheduler.add(request)
        return request

    def step(self):
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, self._rng.integers(0, 10**6, plan.num_sampled))
        for call in self.after_step:
            call()

    def run(self):
        while self.scheduler.has_unfinished:
            self.step()

    def owners(self):
        """Block -> numbers of the requests whose sequences hold it, one for each sequence."""
        owners = {}
        for request in self.scheduler.running:
            for sequence in request.sequences:
                if sequence.slot >= 0:
                    for block in self.scheduler.block_manager.block_table(sequence.slot).tolist():
                        owners.setdefault(block, []).append(request.number)
        return owners

    def state(self):
        """int32 [2, num_blocks]: what the history should say now."""
        pool = self.scheduler.block_manager.pool
        state = np.zeros((2, pool.num_blocks), np.int32)
        state[0, pool.cached] = CACHED
        for block, numbers in self.owners().items():
            state[0, block] = min(numbers) + 1
            state[1, block] = max(numbers) + 1 if len(numbers) > 1 else 0
        return state

    def stats(self):
        return types.SimpleNamespace(
            slots_used_share=self.scheduler.slots_used_share,
            preemptions_swap=self.scheduler.memory.preemptions_swap,
            preemptions_recompute=self.scheduler.memory.preemptions_recompute,
            copy_on_write_blocks=self.scheduler.block_manager.copy_on_write_blocks,
            prefix_cached_tokens=self.scheduler.block_manager.prefix_hit_tokens,
        )


def busy_engine(**settings):
    """An engine that will share, copy, cache and preempt."""
    engine = Engine(enable_prefix_caching=True, num_swap_blocks=40, **settings)
    prefix = list(range(12))
    for i in range(12):
        prompt = (prefix if i % 3 == 0 else []) + [100 * i + j for j in range(3 + i % 7)]
        engine.add(prompt, 12 + i % 9, n=1 + 2 * (i % 4 == 1))
    return engine


def recorded(engine, history):
    """Runs the engine; returns its state after each step."""
    expected = []
    engine.after_step.append(lambda: expected.append(engine.state()))
    engine.run()
    assert history.steps == len(expected)
    return np.array(expected)


def all_blocks(history):
    return np.arange(history.num_blocks, dtype=np.int32)


def test_every_step_is_recorded_as_the_block_tables_were():
    engine = busy_engine(prefers_swap=lambda blocks, tokens: tokens % 2 == 0)
    history = BlockHistory(engine)
    expected = recorded(engine, history)
    np.testing.assert_array_equal(history.states(all_blocks(history)), expected)
    first, last = expected[:, 0], expected[:, 1]
    assert ((last > 0) & (last == first)).any(), "no request shared blocks between its sequences"
    assert (last > first).any(), "no two requests shared a block"
    assert (first == CACHED).any() and (first == FREE).any()
    stats = engine.stats()
    assert stats.preemptions_recompute and stats.preemptions_swap
    assert history.preemptions().sum(axis=0).tolist() == [
        stats.preemptions_recompute,
        stats.preemptions_swap,
    ]
    assert history.highest_block() == np.flatnonzero(first.any(axis=0)).max()
    some = np.array([3, 17], np.int32)
    np.testing.assert_array_equal(history.states(some), expected[:, :, some])


@pytest.mark.parametrize("limits", [{"max_columns": 16}, {"max_changes": 60}], ids=str)
def test_a_long_history_keeps_every_other_step(limits):
    engine = busy_engine()
    history = BlockHistory(engine, **limits)
    expected = recorded(engine, history)
    assert history.stride > 1
    states = history.states(all_blocks(history))
    assert len(states) <= 16 or "max_columns" not in limits
    assert len(states) == -(-len(expected) // history.stride)
    ends = np.minimum((np.arange(len(states)) + 1) * history.stride, len(expected)) - 1
    np.testing.assert_array_equal(states, expected[ends])
    stats = engine.stats()
    assert history.preemptions().sum(axis=0).tolist() == [
        stats.preemptions_recompute,
        stats.preemptions_swap,
    ]
    assert len(history.lanes()) == len(history.preemptions()) == len(states)


def test_memory_is_bounded():
    engine = Engine()
    history = BlockHistory(engine, max_columns=8, max_changes=50)
    for _ in range(40):
        engine.add(10, 16)
    engine.run()
    assert history.steps > 100
    assert len(history._changes) < 8
    assert sum(len(blocks) for blocks, _ in history._changes) <= 50 + 24
    assert len(history.names) == NUM_NAMES


@pytest.mark.parametrize("swaps", [True, False])
def test_a_preempted_request_has_a_lane_until_it_runs_again(swaps):
    engine = Engine(num_blocks=6, num_swap_blocks=6, prefers_swap=lambda blocks, tokens: swaps)
    history = BlockHistory(engine)
    engine.add(8, 14)
    late = engine.add(8, 14)
    away = []
    status = RequestStatus.SWAPPED if swaps else RequestStatus.PREEMPTED
    engine.after_step.append(lambda: away.append(late.status is status))
    engine.run()
    away = np.array(away)
    assert away.any() and not away.all()
    lanes = history.lanes()
    assert lanes.shape == (history.steps, NUM_LANES)
    mark = (late.number + 1) * (1 if swaps else -1)
    np.testing.assert_array_equal(lanes[:, 0], away * mark)
    assert not lanes[:, 1:].any()
    begins = np.flatnonzero(np.diff(away, prepend=False) & away)
    np.testing.assert_array_equal(np.flatnonzero(history.preemptions()[:, int(swaps)]), begins)


def test_a_closed_history_records_no_more():
    engine = Engine()
    engine.add(8, 8)
    with_end = BlockHistory(engine)
    engine.step()
    with_end.close()
    with_end.close()
    engine.run()
    assert with_end.steps == 1
    assert engine.after_step == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_columns": 3}, "max_columns must be even and >= 2, got 3"),
        ({"max_columns": 0}, "max_columns must be even and >= 2, got 0"),
        ({"max_changes": 0}, "max_changes must be >= 1, got 0"),
    ],
)
def test_bad_limits_are_refused(arguments, message):
    engine = Engine()
    with pytest.raises(ValueError, match=message):
        BlockHistory(engine, **arguments)
    assert engine.after_step == []


def test_an_engine_calls_after_every_step_that_computes_or_brings_something(make_engine):
    engine = make_engine(enable_prefix_caching=True)
    steps = engine.stats().steps
    history = BlockHistory(engine)
    maps = []
    engine.after_step.append(lambda: maps.append(engine.block_map()))
    params = SamplingParams(n=2, max_tokens=6, ignore_eos=True)
    engine.add_request([5, 6, 7] * 10, params, request_id="a")
    engine.add_request([8, 9], params, request_id="b")
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()  # nothing to compute
    engine.after_step.pop()
    history.close()
    # The last call brings the tokens of the last step, and computes nothing.
    assert history.steps == len(maps) == engine.stats().steps - steps + 1
    first = history.states(all_blocks(history))[:, 0]
    numbers = {name: number for number, name in history.names.items()}
    assert sorted(numbers) == ["a", "b"]
    for column, owners in zip(first, maps, strict=True):
        held = {block: numbers[names[0]] + 1 for block, names in owners.items()}
        assert held == {b: m for b, m in enumerate(column.tolist()) if m > 0}
    assert (first[-1] == CACHED).sum() == engine.stats().blocks_cached > 0


# ---------------------------------------------------------------- the picture

RED, BLUE = np.float32([1, 0, 0]), np.float32([0, 0, 1])


def test_cells_are_painted_from_the_bottom():
    base = np.array([[RED, BLUE], [BLUE, BLUE]])
    image = paint(base, base, np.zeros((2, 2), np.bool_), 6, 10)
    assert image.shape == (6, 10, 3)
    assert (image[3:, :5] == [255, 0, 0]).all()
    assert (image[:3] == [0, 0, 255]).all() and (image[:, 5:] == [0, 0, 255]).all()


@pytest.mark.parametrize("rows, columns", [(1, 1), (40, 300), (800, 1400), (20, 3000)])
def test_a_hatch_shows_whatever_the_size_of_the_cells(rows, columns):
    base = np.broadcast_to(RED, (rows, columns, 3))
    hatch = np.broadcast_to(BLUE, (rows, columns, 3))
    image = paint(base, hatch, np.ones((rows, columns), np.bool_), 800, 1400).astype(int)
    blue = image[..., 2] > image[..., 0]
    assert 0.3 < blue.mean() < 0.45
    assert blue[:, :100].any(axis=1).mean() > 0.9, "every row of dots has some"


def test_many_cells_are_sampled_evenly():
    base = np.where(np.arange(900)[:, None, None] < 300, RED, BLUE) * np.ones((900, 7, 1))
    image = paint(base.astype(np.float32), base, np.zeros((900, 7), np.bool_), 90, 35)
    assert (image[60:, :, 0] == 255).all() and (image[:60, :, 2] == 255).all()


def test_requests_have_their_own_colours():
    colours = request_colours(48)
    assert colours.min() >= 0 and colours.max() <= 1
    assert len(np.unique(np.rint(colours * 255), axis=0)) == 48
    distances = np.linalg.norm(colours[:12, None] - colours[None, :12], axis=-1)
    assert distances[~np.eye(12, dtype=bool)].min() > 0.25


def png_size(path):
    raw = path.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">2I", raw[16:24])


def drawn(history, path):
    """The figure that was drawn."""
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig

    def saved(figure, *args, **kwargs):
        figures.append(figure)
        save(figure, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", saved)
        history.draw(path)
    assert png_size(path) == (1920, 1080)
    return figures[0]


def texts(figure):
    return [text.get_text() for text in figure.texts]


def test_a_picture_tells_what_is_in_it(tmp_path):
    pytest.importorskip("matplotlib")
    engine = busy_engine(prefers_swap=lambda blocks, tokens: tokens % 2 == 0)
    history = BlockHistory(engine)
    engine.run()
    figure = drawn(history, tmp_path / "blocks.png")
    stats = engine.stats()
    told = texts(figure)
    assert told[0] == f"The KV pool over {history.steps} steps: 24 blocks of 4 token slots"
    assert f"{stats.slots_used_share:.1%} of the slots taken held a token" in told[1]
    assert (
        f"preemptions: {stats.preemptions_swap} by swap, {stats.preemptions_recompute} by recompute"
        in told[1]
    )
    assert f"{stats.copy_on_write_blocks} blocks copied on write" in told[1]
    assert f"{stats.prefix_cached_tokens} tokens found in the cache" in told[1]
    assert told[2:] == [
        *map(str, range(12)),
        "shared in a request",
        "shared by requests",
        "cached, unused",
        "free",
        "swapped out",
        "to be recomputed",
    ]
    pool = figure.axes[0]
    assert (pool.get_xlabel(), pool.get_ylabel()) == ("step", "block")
    assert pool.get_xlim() == (0, history.steps) and pool.get_ylim() == (0, 24)


def test_a_picture_of_one_request_and_no_more(tmp_path):
    pytest.importorskip("matplotlib")
    engine = Engine(num_blocks=100)
    history = BlockHistory(engine)
    engine.add(8, 6, name="_$x^{$ is a long name of a request")
    engine.step()
    told = texts(drawn(history, tmp_path / "blocks.png"))
    assert told == [
        "The KV pool over 1 step: 100 blocks of 4 token slots",
        "100.0% of the slots taken held a token   ·   preemptions: none",
        "_$x^{$ is a long n…",
        "free",
    ]


def test_the_unused_part_of_a_pool_is_not_drawn_and_many_blocks_and_steps_are_sampled(tmp_path):
    pytest.importorskip("matplotlib")
    engine = Engine(num_blocks=40_000, max_num_seqs=400, max_num_batched_tokens=8000)
    history = BlockHistory(engine, max_columns=8)
    for i in range(200):
        engine.add(40, 5 + i % 10)
    engine.run()
    figure = drawn(history, tmp_path / "blocks.png")
    pool = figure.axes[0]
    assert pool.get_xlabel() == "step, one in 2 drawn"
    shown = -(-(history.highest_block() + 1) * 9 // 8)
    assert pool.get_ylabel().startswith("block, one in ")
    assert pool.get_ylabel().endswith(f"(those above {shown - 1:,} were never used)")
    assert "and 188 more" in texts(figure)


def test_other_formats(tmp_path):
    pytest.importorskip("matplotlib")
    engine = Engine()
    history = BlockHistory(engine)
    engine.add(8, 6)
    engine.run()
    history.draw(tmp_path / "blocks.PDF")
    assert (tmp_path / "blocks.PDF").read_bytes().startswith(b"%PDF")
    history.draw(str(tmp_path / "blocks.svg"))
    assert b"<svg" in (tmp_path / "blocks.svg").read_bytes()


def test_a_picture_that_cannot_be_drawn_is_refused(tmp_path, monkeypatch):
    history = BlockHistory(Engine())
    with pytest.raises(ValueError, match=r"must end in \.png, \.pdf or \.svg, got '.*blocks\.jpg'"):
        history.draw(tmp_path / "blocks.jpg")
    monkeypatch.setattr(block_picture, "check_drawing", lambda path: None)
    with pytest.raises(ValueError, match="must hold at least one step to be drawn, got none"):
        history.draw(tmp_path / "blocks.png")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match="install the extra 'bench'"):
        block_picture.check_drawing("blocks.png")
