"""The plot of the demo: the lengths that a policy chose, over time, above the load that it chose them under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from faser.bench.measure import Run
from faser.bench.report import BASELINE, short
from faser.core import MAX_DEPTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, LOAD = "#222222", "#8a8a8a", "#c46a16"
SHARES = "Blues"
"""The colour map of how often a length was chosen, from never to always."""


class PlotError(RuntimeError):
    """A plot that cannot be drawn; the message is one line."""


def check_matplotlib() -> None:
    """PlotError unless it is there: said before the work, not after it."""
    if find_spec("matplotlib") is None:
        raise PlotError("the plot needs matplotlib; install faser-serve[bench]")


def plot_lengths(runs: Sequence[Run], path: Path) -> None:
    """Write a PNG with a column for every policy of `runs` that drafts: each of its phases, one after the other.

    PlotError: matplotlib is missing, there is nothing to draw, or the file cannot be written.
    """
    check_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    policies = [p for p in dict.fromkeys(run.policy for run in runs) if p != BASELINE]
    if not policies:
        raise PlotError(f"no plot: only {BASELINE} ran, and it chooses nothing")
    with plt.rc_context({"font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK}):
        figure, axes = plt.subplots(
            2,
            len(policies),
            figsize=(1.5 + 5.5 * len(policies), 5.2),
            sharex="col",
            sharey="row",
            squeeze=False,
            height_ratios=(2.2, 1),
            layout="constrained",
        )
        for column, policy in enumerate(policies):
            own = sorted((r for r in runs if r.policy == policy), key=lambda r: r.round)
            _draw(axes[0, column], axes[1, column], own)
        axes[0, 0].set_ylabel("drafted tokens verified\nper request and step")
        axes[1, 0].set_ylabel("requests\nper step")
        axes[0, 0].legend(loc="upper left", frameon=False)
        shares = ScalarMappable(Normalize(0, 100), SHARES)
        figure.colorbar(shares, ax=axes[0, :].tolist(), label="% of requests", pad=0.01, aspect=30)
        figure.suptitle("Speculation lengths chosen over time, and the load they were chosen under")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=130)
        except OSError as error:
            raise PlotError(f"the plot cannot be written: {path}: {error.strerror}") from None
        finally:
            plt.close(figure)


@dataclass(frozen=True, slots=True)
class _Series:
    """A policy's B samples end to end. edges: [B + 1] s. shares: [MAX_DEPTH + 1, B] by length. mean, load: [B].

    rounds: a round's number -> where it starts, s.
    """

    edges: NDArray[np.float64]
    shares: NDArray[np.float64]
    mean: NDArray[np.float64]
    load: NDArray[np.float64]
    rounds: dict[int, float]


def _series(runs: Sequence[Run]) -> _Series:
    edges, shares, mean, load = [0.0], [], [], []
    rounds: dict[int, float] = {}
    for run in runs:
        start = edges[-1]
        rounds.setdefault(run.round, start)
        for sample in run.samples:
            edges.append(start + sample.at_s)
            steps = sample.steps
            total = sum(steps.lengths.values())
            shares.append([steps.lengths.get(k, 0.0) / total for k in range(MAX_DEPTH + 1)])
            mean.append(steps.chosen_length)
            load.append(steps.running)
    by_length = np.array(shares).reshape(-1, MAX_DEPTH + 1).T
    return _Series(np.array(edges), by_length, np.array(mean), np.array(load), rounds)


def _draw(lengths: Axes, load: Axes, runs: Sequence[Run]) -> None:
    from matplotlib.patheffects import withStroke

    series = _series(runs)
    rows = np.arange(MAX_DEPTH + 2) - 0.5
    lengths.pcolormesh(series.edges, rows, series.shares, cmap=SHARES, vmin=0, vmax=1, rasterized=True)
    halo = [withStroke(linewidth=3.5, foreground="white")]  # readable on the darkest blue
    lengths.stairs(
        series.mean, series.edges, baseline=None, color=INK, linewidth=1.4, label="mean length", path_effects=halo
    )
    lengths.set_ylim(-0.5, MAX_DEPTH + 0.5)
    lengths.set_yticks(range(MAX_DEPTH + 1))
    lengths.set_title(short(runs[0].policy))
    load.stairs(series.load, series.edges, fill=True, color=LOAD, alpha=0.75)
    load.set_ylim(bottom=0)
    load.set_xlabel("seconds under load (pauses left out)")
    load.set_xlim(0, max(series.edges[-1], 1.0))
    for number, start in series.rounds.items():
        for axes in (lengths, load):
            axes.axvline(start, color=MUTED, linewidth=0.8, linestyle=":")
        load.annotate(
            f" round {number}", (start, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8, color=MUTED
        )
    for axes in (lengths, load):
        axes.spines[["top", "right"]].set_visible(False)
