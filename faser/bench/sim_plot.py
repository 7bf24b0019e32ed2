"""The plots of `faser bench sim`: mean time in system by load, a panel a suite, a line a policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from faser.bench.plot import INK, MUTED

if TYPE_CHECKING:
    from faser.bench.sim import Result

WIDE = 4
"""Panels in a row."""


def plot_loads(results: Sequence[Result], path: Path) -> None:
    """Write a PNG: time in system over that without speculation, mean over episodes; bars span the episodes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    suites, policies = (list(dict.fromkeys(getattr(r, key) for r in results)) for key in ("suite", "policy"))
    loads = list(dict.fromkeys(r.load for r in results))
    rows = -(-len(suites) // WIDE)
    columns = min(WIDE, len(suites))
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.2 * columns, 3.4 * rows), squeeze=False, sharex=True, sharey=True
    )
    colours = plt.get_cmap("tab20")
    for panel, suite in zip(axes.flat, suites, strict=False):
        for i, name in enumerate(policies):
            cells = [
                [r.ratio_to_none for r in results if (r.suite, r.policy, r.load) == (suite, name, x)] for x in loads
            ]
            middle = np.array([np.mean(cell) for cell in cells])
            ends = np.array([(np.min(cell), np.max(cell)) for cell in cells]).T
            first = i == 0
            panel.errorbar(
                loads,
                middle,
                yerr=np.abs(ends - middle),
                color=INK if first else colours(i),
                linewidth=2.4 if first else 1.1,
                elinewidth=0.6,
                label=Path(name).name,
            )
        panel.axhline(1.0, color=MUTED, linewidth=0.6)
        panel.set_title(suite, loc="left")
        panel.set_ylim(0.0, 1.6)
    for panel in axes.flat[len(suites) :]:
        panel.set_axis_off()
    figure.supxlabel("offered load over the capacity without speculation")
    figure.supylabel("mean time in system over that without speculation")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)
