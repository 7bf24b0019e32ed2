"""The tables that `train/acceptance.py` prints: scores, what features are worth, what the predictor buys.

One decision: every table has the same columns for raw confidence, for its 20-bin calibration and for what was learned,
so that nothing is shown without what it has to beat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from faser.acceptance import Predictor
from faser.core import Floats
from faser.costs import StepCost
from faser.train.acceptance_fit import Fit, binned, fit
from faser.train.acceptance_samples import Samples
from faser.train.acceptance_scores import Scores, bin_of, scores
from faser.train.acceptance_value import clairvoyant, table

RAW, BINNED = "raw confidence", "20 bins"
GROUPS: dict[str, tuple[str, ...]] = {
    "place in the draft": ("position",),
    "request's acceptance": ("acceptance_fast", "acceptance_slow", "last_accepted"),
    "temperature": ("temperature",),
}
"""What the ablation leaves out in turn."""

HEAD = (
    f"{'':22} {'':14} verdicts  log-loss (95 %)          less than 20 bins (95 %) calibration error (95 %)  Brier   AUC"
)


def chances_of(learn: Samples, check: Samples, predictors: Mapping[str, Predictor]) -> dict[str, Floats]:
    """Name -> [M, K] chances of the tokens of `check`: raw, by 20 bins of `learn`, and by each predictor."""
    learned = {name: p.conditional(check.confidence, check.history) for name, p in predictors.items()}
    return {RAW: check.confidence, BINNED: binned(learn)[bin_of(check.confidence)], **learned}


def scores_of(samples: Samples, chance: Floats, reference: Floats) -> Scores:
    """Scores of `chance` [M, K] on the judged tokens; its gain is over `reference` [M, K]."""
    judged = samples.judged
    request = np.repeat(samples.request, judged.sum(axis=1))
    return scores(chance[judged], samples.accepted[judged], request, reference=reference[judged])


def scores_table(samples: Samples, chances: Mapping[str, Floats], domains: tuple[str, ...]) -> str:
    """A row for each of `chances` [M, K]: for all samples, for each temperature, and for each domain at each."""
    parts = _parts(samples)
    for name, at in parts[1:]:
        mine = {f"{domain}, {name}": at & (samples.domain == i) for i, domain in enumerate(domains)}
        parts += [(title, part) for title, part in mine.items() if samples.judged[part].any()]
    lines = [HEAD]
    for title, part in parts:
        chosen = samples.part(part)
        for name, chance in chances.items():
            s = scores_of(chosen, chance[part], chances[BINNED][part])
            lines.append(
                f"{title:22} {name:14} {s.verdicts:8d}  {_with(s.log_loss, s.log_loss_interval)}"
                f"  {_with(s.gain, s.gain_interval)}  {_with(s.calibration_error, s.calibration_interval)}"
                f"  {s.brier:.4f}  {s.auc:.4f}"
            )
    return "\n".join(lines)


def ablation_table(learn: Samples, check: Samples, settings: Fit, whole: Floats) -> str:
    """How much larger the network's log-loss is, fitted anew without each of GROUPS; `whole` [M, K]: with all."""
    lines = [f"{'network without':22} log-loss (95 %)          more than with it (95 %)"]
    for title, names in GROUPS.items():
        chance = fit(learn, replace(settings, without=names)).conditional(check.confidence, check.history)
        s = scores_of(check, chance, whole)
        low, high = s.gain_interval
        lines.append(f"{title:22} {_with(s.log_loss, s.log_loss_interval)}  {_with(-s.gain, (-high, -low))}")
    return "\n".join(lines)


def value_tables(samples: Samples, chances: Mapping[str, Floats], cost: StepCost) -> str:
    """Tokens per ms by each of `chances` and by the truth, for all samples and for each temperature."""
    survivals = {name: np.cumprod(chance, axis=1) for name, chance in chances.items()}
    survivals["clairvoyant"] = clairvoyant(samples)
    tables = []
    for name, part in _parts(samples):
        chosen = {key: survival[part] for key, survival in survivals.items()}
        title = f"lengths by goodput, {cost.name}, {name}; ratios to the first (95 %)"
        tables.append(f"{title}\n{table(samples.part(part), chosen, cost)}")
    return "\n\n".join(tables)


def _parts(samples: Samples) -> list[tuple[str, NDArray[np.bool_]]]:
    """All samples, and those of each temperature."""
    temperatures = [(f"T = {t:g}", samples.temperature == t) for t in np.unique(samples.temperature)]
    return [("all", np.ones(len(samples), np.bool_)), *temperatures]


def _with(value: float, interval: tuple[float, float]) -> str:
    return f"{value:7.4f} ({interval[0]:.4f} {interval[1]:.4f})"
