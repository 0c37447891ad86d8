"""Draws a `BlockHistory` with matplotlib (the extra "bench")."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, UInt8

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from jpaged.block_history import BlockHistory

SUFFIXES = (".png", ".pdf", ".svg")
_MAX_LEGEND = 12

# The picture in dots, whatever the format: every cell of the pool is drawn to the dot, so that a
# hatch shows however many steps and blocks there are.
_WIDTH, _HEIGHT, _DPI = 1920, 1080, 150
_LEFT, _RIGHT, _BOTTOM, _TOP = 136, 1560, 96, 930
_LANE_HEIGHT, _LANE_GAP = 16, 14
_SMOOTH = 2  # each dot is the mean of so many times so many
_HATCH_PERIOD, _HATCH_WIDTH = 14.0, 5.0  # dots, along an axis

# Twelve colours that are easily told apart, also beside each other.
_COLOURS = [
    "#3b78bd",
    "#f08a24",
    "#3f9e58",
    "#dc4650",
    "#9273d9",
    "#edca38",
    "#45b9c4",
    "#f09abb",
    "#8c5f45",
    "#29406e",
    "#9cc746",
    "#b23e94",
]
_INK, _FAINT_INK, _GRID = "#22262b", "#6a727c", "#c4cad1"
_FREE_COLOUR, _CACHED_COLOUR = "#ffffff", "#d5d9de"

_Rgb = Float32[np.ndarray, "... 3"]


def check_drawing(path: str | os.PathLike[str]) -> None:
    """Raise what `draw_history` would raise for the file's name, or for lack of matplotlib.

    ValueError or ImportError, whose one sentence says what to do about it.
    """
    if os.path.splitext(os.fspath(path))[1].lower() not in SUFFIXES:
        raise ValueError(
            f"the picture's file must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, "
            f"got {os.fspath(path)!r}"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "drawing needs matplotlib: install the extra 'bench' (uv run --extra bench ..., or "
            "pip install 'jpaged[bench]')"
        ) from error


def draw_history(history: BlockHistory, path: str | os.PathLike[str]) -> None:
    """Draw a history into a file: see `BlockHistory.draw`."""
    check_drawing(path)
    if not history.steps:
        raise ValueError("a history must hold at least one step to be drawn, got none")
    from matplotlib.figure import Figure  # without pyplot: no display, no state of the process

    figure = Figure(figsize=(_WIDTH / _DPI, _HEIGHT / _DPI), dpi=_DPI, facecolor="white")
    _Picture(history, figure).draw()
    figure.savefig(path, dpi=_DPI)


def hex_to_rgb(colour: str) -> _Rgb:
    """ "#ff0000" -> [1, 0, 0]."""
    return np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)], np.float32)


def request_colours(n: int) -> Float32[np.ndarray, "n 3"]:
    """A colour for each of n requests: twelve, then these darker, then lighter, and so on."""
    base = np.array([hex_to_rgb(colour) for colour in _COLOURS])
    rounds = [base, base * 0.68, base + (1 - base) * 0.42, base * 0.84]
    return np.concatenate(rounds)[np.arange(n) % (len(rounds) * len(base))]


def paint(
    base: Float32[np.ndarray, "rows columns 3"],
    hatch: Float32[np.ndarray, "rows columns 3"],
    hatched: Bool[np.ndarray, "rows columns"],
    height: int,
    width: int,
) -> UInt8[np.ndarray, "height width 3"]:
    """Cells as dots: row 0 at the bottom, `hatched` ones with stripes of their `hatch` colour.

    Rows of eight dots or more are set apart by a white line.
    """
    tall, wide = height * _SMOOTH, width * _SMOOTH
    y, x = np.arange(tall), np.arange(wide)
    row, column = y * base.shape[0] // tall, x * base.shape[1] // wide
    image = base[row][:, column]
    stripe = (x - y[:, None]) % (_HATCH_PERIOD * _SMOOTH) < _HATCH_WIDTH * _SMOOTH
    stripe &= hatched[row][:, column]
    image[stripe] = hatch[row][:, column][stripe]
    if height >= 8 * base.shape[0]:
        first = np.flatnonzero(np.diff(row, prepend=row[:1]))
        image[first] = image[first - 1] = 1.0
    image = image.reshape(height, _SMOOTH, width, _SMOOTH, 3).mean(axis=(1, 3))
    return np.rint(image[::-1] * 255).astype(np.uint8)


class _Picture:
    """The parts of one picture."""

    def __init__(self, history: BlockHistory, figure: Figure) -> None:
        self.history = history
        self.figure = figure
        self.lanes = history.lanes()
        num_lanes = int(np.flatnonzero(self.lanes.any(axis=0)).max(initial=-1)) + 1
        self.lanes = self.lanes[:, :num_lanes]
        self.top = _TOP - (num_lanes * _LANE_HEIGHT + _LANE_GAP if num_lanes else 0)
        # Of a pool that was hardly used, the part that was.
        shown, highest = history.num_blocks, history.highest_block() + 1
        if highest <= shown // 2:
            shown = min(shown, max(8, -(-highest * 9 // 8)))
        self.num_shown = shown
        rows = min(shown, self.top - _BOTTOM)
        self.blocks = (np.arange(rows) * 2 + 1) * shown // (2 * rows)
        states = history.states(self.blocks.astype(np.int32))
        self.first, self.last = states[:, 0].T, states[:, 1].T  # [rows, columns]
        marks = np.unique(np.concatenate([self.first.ravel(), np.abs(self.lanes).ravel()]))
        self.marks = marks[marks > 0]
        self.colours = request_colours(len(self.marks))

    def draw(self) -> None:
        self._draw_pool()
        if self.lanes.size:
            self._draw_lanes()
        self._draw_title()
        self._draw_legend()

    def _axes(self, left: int, bottom: int, right: int, top: int, **more: Any) -> Axes:
        """Axes at these dots."""
        box = (
            left / _WIDTH,
            bottom / _HEIGHT,
            (right - left) / _WIDTH,
            (top - bottom) / _HEIGHT,
        )
        return self.figure.add_axes(box, **more)

    def _rgb(self, marks: Int[np.ndarray, "rows columns"]) -> Float[np.ndarray, "rows columns 3"]:
        """The colours of marks, CACHED and FREE among them."""
        table = np.concatenate(
            [[hex_to_rgb(_CACHED_COLOUR), hex_to_rgb(_FREE_COLOUR)], self.colours]
        ).astype(np.float32)
        known = np.concatenate([[-1, 0], self.marks])
        return table[np.searchsorted(known, marks)]

    def _draw_pool(self) -> None:
        axes = self._axes(_LEFT, _BOTTOM, _RIGHT, self.top)
        base = self._rgb(self.first)
        # Stripes of the other request's colour, or, among sequences of one request, pale ones.
        other = np.where((self.last != self.first)[..., None], self._rgb(self.last), _pale(base))
        self._show(axes, base, other, self.last > 0, self.num_shown)
        history = self.history
        axes.set_xlabel(f"step{_sampled(history.stride)}", size=12, color=_INK, labelpad=7)
        every = self.num_shown / len(self.blocks)
        label = f"block{_sampled(every)}"
        if self.num_shown < history.num_blocks:
            label += f" (those above {self.num_shown - 1:,} were never used)"
        axes.set_ylabel(label, size=12, color=_INK, labelpad=8)
        axes.tick_params(colors=_FAINT_INK, labelsize=10.5, length=4, color=_GRID)
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
            axis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        self._mark_preemptions(axes)

    def _show(
        self, axes: Axes, base: _Rgb, other: _Rgb, hatched: np.ndarray, num_rows: float
    ) -> None:
        box = axes.get_position()
        image = paint(base, other, hatched, round(box.height * _HEIGHT), round(box.width * _WIDTH))
        axes.imshow(
            image,
            extent=(0, self.history.steps, 0, num_rows),
            aspect="auto",
            interpolation="nearest",
        )
        for spine in axes.spines.values():
            spine.set_color(_GRID)

    def _mark_preemptions(self, axes: Axes) -> None:
        counts = self.history.preemptions()
        steps = np.arange(len(counts)) * self.history.stride
        when = steps[counts.any(axis=1)]
        if len(when) <= 60:  # more would hide what is behind them
            axes.vlines(
                when, 0, self.num_shown, color=_INK, lw=0.7, alpha=0.45, linestyle=(0, (3, 3))
            )
        # In the gap below the lanes.
        y = self.num_shown * (1 + 0.5 * _LANE_GAP / (self.top - _BOTTOM))
        for kind, face in ((1, _INK), (0, "white")):
            axes.plot(
                steps[counts[:, kind] > 0],
                np.full(np.count_nonzero(counts[:, kind]), y),
                linestyle="none",
                marker="v",
                markersize=4.6,
                markerfacecolor=face,
                markeredgecolor=_INK,
                markeredgewidth=0.8,
                clip_on=False,
            )
        axes.set_xlim(0, self.history.steps)
        axes.set_ylim(0, self.num_shown)

    def _draw_lanes(self) -> None:
        axes = self._axes(_LEFT, self.top + _LANE_GAP, _RIGHT, _TOP)
        marks = self.lanes.T
        base = self._rgb(np.abs(marks))
        base = np.where((marks < 0)[..., None], _pale(base), base)
        self._show(axes, base, base, np.zeros(marks.shape, np.bool_), len(marks))
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_ylabel(
            "preempted", size=10, color=_INK, rotation=0, ha="right", va="center", labelpad=8
        )

    def _draw_title(self) -> None:
        history, stats = self.history, self.history.engine.stats()
        size = history.engine.scheduler.block_manager.block_size
        title = f"The KV pool over {_count(history.steps, 'step')}: "
        title += f"{_count(history.num_blocks, 'block')} of {_count(size, 'token slot')}"
        self._text(_LEFT, 1032, title, size=19, weight="bold", color=_INK)
        preemptions = [
            f"{count:,} by {kind}"
            for count, kind in (
                (stats.preemptions_swap, "swap"),
                (stats.preemptions_recompute, "recompute"),
            )
            if count
        ]
        facts = [
            f"{stats.slots_used_share:.1%} of the slots taken held a token",
            f"preemptions: {', '.join(preemptions) or 'none'}",
        ]
        if stats.copy_on_write_blocks:
            facts.append(f"{_count(stats.copy_on_write_blocks, 'block')} copied on write")
        if stats.prefix_cached_tokens:
            facts.append(f"{_count(stats.prefix_cached_tokens, 'token')} found in the cache")
        self._text(_LEFT, 978, "   ·   ".join(facts), size=12, color=_FAINT_INK)

    def _text(self, x: float, y: float, text: str, **more: Any) -> None:
        """Text at these dots, as it stands: a request's name may hold a $."""
        self.figure.text(x / _WIDTH, y / _HEIGHT, text, va="center", parse_math=False, **more)

    def _draw_legend(self) -> None:
        """On the right, from the top down."""
        self._legend_y = _TOP - 14
        names = self.history.names
        named = [i for i, mark in enumerate(self.marks.tolist()) if mark - 1 in names]
        for i in named[:_MAX_LEGEND]:
            self._entry(names[int(self.marks[i]) - 1], self.colours[i])
        more = len(self.marks) - len(named[:_MAX_LEGEND])
        if more:
            self._note(f"and {more:,} more" if named else _count(more, "request"))
        self._legend_y -= 16
        one, two = self.colours[[0, 1]] if len(self.marks) > 1 else request_colours(2)
        shared = self.last > 0
        if (shared & (self.last == self.first)).any():
            self._entry("shared in a request", one, _pale(one))
        if (shared & (self.last != self.first)).any():
            self._entry("shared by requests", one, two)
        if (self.first < 0).any():
            self._entry("cached, unused", hex_to_rgb(_CACHED_COLOUR))
        self._entry("free", hex_to_rgb(_FREE_COLOUR))
        counts = self.history.preemptions().sum(axis=0)
        if counts.any():
            self._legend_y -= 16
        if counts[1]:
            self._entry("swapped out", one, marker=_INK)
        if counts[0]:
            self._entry("to be recomputed", _pale(one), marker="white")

    def _entry(
        self, text: str, colour: _Rgb, stripes: _Rgb | None = None, marker: str | None = None
    ) -> None:
        left, y = _RIGHT + 40, self._legend_y
        axes = self._axes(left, y - 12, left + 48, y + 12, xlim=(0, 48), ylim=(0, 24))
        other = colour if stripes is None else stripes
        image = paint(
            colour[None, None], other[None, None], np.array([[stripes is not None]]), 24, 48
        )
        axes.imshow(image, extent=(0, 48, 0, 24), aspect="auto", interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_color(_GRID)
        if marker is not None:
            axes.plot(
                8, 12, marker="v", markersize=4.6, markerfacecolor=marker, markeredgecolor=_INK,
                markeredgewidth=0.8,
            )  # fmt: skip
        shown = text if len(text) <= 19 else text[:18] + "…"
        self._text(left + 62, y, shown, size=10.5, color=_INK)
        self._legend_y -= 37

    def _note(self, text: str) -> None:
        self._text(_RIGHT + 102, self._legend_y, text, size=10.5, color=_FAINT_INK)
        self._legend_y -= 37


def _pale(rgb: _Rgb) -> _Rgb:
    return rgb + (1 - rgb) * np.float32(0.62)


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _sampled(every: float) -> str:
    return "" if every <= 1 else f", one in {every:.3g} drawn"
