"""A picture of an episode: load, lengths and tokens per second over simulated time.

One decision: steps are added up in at most BINS equal bins of time, and when an episode outgrows them, bins are merged
in pairs. So memory and the cost of a picture do not grow with the episode, and sums stay exact. matplotlib is imported
when a picture is drawn, not before: most who import the environment never look at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from faser.core import MAX_DEPTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D

Doubles = NDArray[np.float64]
Picture = NDArray[np.uint8]

BINS = 240
FIRST_BIN_S = 1 / 64
"""Width of a bin until the first merge, s: a power of two, which doubling keeps exact."""

WIDTH, HEIGHT, DPI = 960, 720, 120
INK, MUTED, QUEUE = "#222222", "#8a8a8a", "#c46a16"

RUNNING, WAITING, DEPTH, SECONDS, TOKENS, LENGTHS = 0, 1, 2, 3, 4, 5
"""Rows of `Timeline.sums`: the first three times seconds; seconds of work; tokens; then requests by length, K + 1."""


class Timeline:
    """The steps of one episode, binned: `start` with the info of a reset, `add` that of each step, `draw` at any time.

    sums: [5 + K + 1, BINS], see RUNNING to LENGTHS. width: s of a bin.
    """

    def __init__(self) -> None:
        """ImportError: matplotlib is missing (one line that says what to install)."""
        if find_spec("matplotlib") is None:
            raise ImportError('render_mode "rgb_array" needs matplotlib; install faser-serve[bench]')
        self.sums = np.zeros((LENGTHS + MAX_DEPTH + 1, BINS))
        self.started = False
        self._canvas: _Canvas | None = None

    def start(self, info: Mapping[str, Any]) -> None:
        """A new episode: times count from its first arrival, which a reset ends at."""
        self.started = True
        self.sums[:] = 0.0
        self.width = FIRST_BIN_S
        self._origin = float(info["time"])
        self._load = float(info["load"])
        self._begin(info)

    def add(self, info: Mapping[str, Any]) -> None:
        """One step. It ran from where the last info left off, with the requests that ran and waited then."""
        start, seconds = self._now, info["step_ms"] / 1e3
        while start + seconds > BINS * self.width:
            self._merge()
        first, last = int(start / self.width), min(int((start + seconds) / self.width), BINS - 1)
        edges = np.arange(first, last + 2) * self.width
        overlap = np.minimum(edges[1:], start + seconds) - np.maximum(edges[:-1], start)
        if seconds > 0.0:
            of_time = [self._running * seconds, self._waiting * seconds, info["depth"] * seconds, seconds]
            values = np.array([*of_time, info["tokens"], *info["lengths"]], np.float64)
            self.sums[:, first : last + 1] += np.outer(values, overlap / seconds)
        self._begin(info)

    def draw(self) -> Picture:
        """[HEIGHT, WIDTH, 3] uint8, RGB: the episode so far. What is drawn is averaged over each bin."""
        if self._canvas is None:
            self._canvas = _Canvas()
        return self._canvas.draw(self.means(), self._now, self._load)

    def means(self) -> dict[str, Doubles]:
        """By name, over the bins so far [B]: edges [B + 1] s, running and waiting over all time (idle included), tokens
        per second of work, draft depth, and shares [K + 1, B] of the lengths; NaN where nothing was done.
        """
        bins = max(1, min(BINS, int(np.ceil(self._now / self.width))))
        edges = np.arange(bins + 1) * self.width
        past = np.clip(self._now - edges[:-1], 1e-9, self.width)
        sums = self.sums[:, :bins]
        with np.errstate(divide="ignore", invalid="ignore"):
            return {
                "edges": edges,
                "running": sums[RUNNING] / past,
                "waiting": sums[WAITING] / past,
                "depth": sums[DEPTH] / sums[SECONDS],
                "tokens_per_s": sums[TOKENS] / sums[SECONDS],
                "shares": sums[LENGTHS:] / sums[LENGTHS:].sum(axis=0),
            }

    def _begin(self, info: Mapping[str, Any]) -> None:
        self._now = float(info["time"]) - self._origin
        self._running, self._waiting = int(info["running"]), int(info["waiting"])

    def _merge(self) -> None:
        """Twice as long bins, half as many of them in use."""
        self.sums[:, : BINS // 2] = self.sums[:, ::2] + self.sums[:, 1::2]
        self.sums[:, BINS // 2 :] = 0.0
        self.width *= 2.0


class _Canvas:
    """The figure, made once: a picture only changes its data. No pyplot, so no global state and no window."""

    def __init__(self) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH / DPI, HEIGHT / DPI), dpi=DPI)
        figure.subplots_adjust(left=0.09, right=0.91, bottom=0.08, top=0.95, hspace=0.14)  # no layout per picture
        self.canvas = FigureCanvasAgg(figure)
        self.axes: list[Axes] = list(figure.subplots(3, 1, sharex=True))
        load, lengths, speed = self.axes
        self.lines: dict[str, Line2D] = {
            "running": _line(load, INK, "running"),
            "waiting": _line(load, QUEUE, "waiting"),
            "depth": _line(lengths, QUEUE, "tokens drafted"),
            "tokens_per_s": _line(speed, INK, "while it works"),
        }
        self.shares: AxesImage = lengths.imshow(
            np.zeros((MAX_DEPTH + 1, 1)),
            origin="lower",
            aspect="auto",
            cmap="Blues",
            norm=PowerNorm(0.5, 0.0, 1.0),  # small shares stay visible
            interpolation="nearest",
        )
        beside = lengths.inset_axes((1.01, 0.0, 0.015, 1.0))
        figure.colorbar(self.shares, cax=beside, label="share")
        lengths.set_ylim(-0.5, MAX_DEPTH + 0.5)
        for panel, label in zip(self.axes, ("requests", "tokens verified", "tokens / s"), strict=True):
            panel.set_ylabel(label)
            panel.legend(loc="lower right", bbox_to_anchor=(1.0, 0.97), frameon=False, fontsize=7, ncols=2)
        speed.set_xlabel("simulated seconds since the first arrival")

    def draw(self, means: Mapping[str, Doubles], now: float, load: float) -> Picture:
        edges = means["edges"]
        for name, line in self.lines.items():
            line.set_data(edges, np.concatenate([means[name], means[name][-1:]]))
        self.shares.set_data(np.nan_to_num(means["shares"]))
        self.shares.set_extent((0.0, float(edges[-1]), -0.5, MAX_DEPTH + 0.5))
        for panel, names in ((self.axes[0], ("running", "waiting")), (self.axes[2], ("tokens_per_s",))):
            top = max(float(np.nan_to_num(means[name]).max()) for name in names)
            panel.set_ylim(0.0, 1.15 * max(top, 1.0))
        self.axes[0].set_xlim(0.0, float(edges[-1]))
        self.axes[0].set_title(f"offered load {load:.2f}, {now:.1f} s", loc="left", color=MUTED, fontsize=9)
        self.canvas.draw()  # type: ignore[no-untyped-call]  # matplotlib's Agg has no types
        rgba = np.asarray(self.canvas.buffer_rgba())  # type: ignore[no-untyped-call]  # as above
        return rgba[..., :3].copy()


def _line(panel: Axes, colour: str, label: str) -> Line2D:
    (line,) = panel.plot([], [], color=colour, linewidth=1.2, drawstyle="steps-post", label=label)
    return line
