"""What the demo prints: one table, and one sentence made from its numbers.

The decision here: speed is compared within a round, where two policies ran a minute apart at most, and only then over
rounds; on a shared machine two rounds of the same policy can differ by more than two policies do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from faser.bench.client import percentile
from faser.bench.measure import Run

LEVEL = 0.02
"""A median ratio nearer to 1 than this is called level, whatever the rounds say."""

TOLD = {"gains": "gains", "loses": "loses", "level": "is level", "unclear": "differs from round to round"}
"""A verdict in the sentence."""

BASELINE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy in one phase, over all rounds. Times in ms; NaN where nothing was measured.

    tokens_per_s: median over rounds. ratios: of tokens/s to the baseline's, by round; empty if it did not run.
    accepted_length, chosen_length: per request-step. same, compared: replies whose text is that of the baseline's first
    round, of how many.
    """

    policy: str
    phase: str
    concurrency: int
    tokens_per_s: float
    ratios: tuple[float, ...]
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    accepted_length: float
    chosen_length: float
    draft_depth: float
    fallbacks: float
    same: int
    compared: int

    @property
    def ratio(self) -> float:
        """Median of `ratios`; NaN without any."""
        return median(self.ratios) if self.ratios else float("nan")

    @property
    def verdict(self) -> str:
        """Against the baseline: "gains" or "loses" if every round says so, "level" if near to it, else "unclear"."""
        if not self.ratios or abs(self.ratio - 1.0) < LEVEL:
            return "level"
        if min(self.ratios) > 1.0:
            return "gains"
        return "loses" if max(self.ratios) < 1.0 else "unclear"


def short(policy: str) -> str:
    """How a policy is called in the table: a file by its name."""
    return Path(policy).name


def summarise(runs: Sequence[Run]) -> list[Row]:
    """A row for every policy and phase, in the order in which they first ran."""
    keys = dict.fromkeys((run.policy, run.phase.name) for run in sorted(runs, key=lambda r: r.round))
    policies = list(dict.fromkeys(policy for policy, _ in keys))
    phases = list(dict.fromkeys(phase for _, phase in keys))
    return [_row(policy, phase, runs) for policy in policies for phase in phases if (policy, phase) in keys]


def _row(policy: str, phase: str, runs: Sequence[Run]) -> Row:
    own = [run for run in runs if (run.policy, run.phase.name) == (policy, phase)]
    baseline = {run.round: run for run in runs if (run.policy, run.phase.name) == (BASELINE, phase)}
    replies = [reply for run in own for reply in run.replies]
    ttft = [1e3 * reply.first_s for reply in replies]
    tpot = [1e3 * reply.tpot_s for reply in replies]
    pairs = _texts(own, baseline.get(min(baseline, default=0)))
    return Row(
        policy=policy,
        phase=phase,
        concurrency=own[0].phase.concurrency,
        tokens_per_s=median(run.tokens_per_s for run in own),
        ratios=tuple(run.tokens_per_s / baseline[run.round].tokens_per_s for run in own if run.round in baseline),
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        tpot_p50=percentile(tpot, 50),
        tpot_p99=percentile(tpot, 99),
        accepted_length=median(run.steps.accepted_length for run in own),
        chosen_length=median(run.steps.chosen_length for run in own),
        draft_depth=median(run.steps.draft_depth for run in own),
        fallbacks=sum(run.fallbacks for run in own),
        same=sum(ours == theirs for ours, theirs in pairs),
        compared=len(pairs),
    )


def _texts(own: Sequence[Run], reference: Run | None) -> list[tuple[str, str]]:
    """(a reply's text, the reference's to the same prompt) over all rounds but the reference itself."""
    if reference is None:
        return []
    return [
        (ours.text, theirs.text)
        for run in own
        if run is not reference
        for ours, theirs in zip(run.replies, reference.replies, strict=True)
    ]


def table(rows: Sequence[Row]) -> str:
    """The table, as text."""
    head = ("policy", "requests", "tokens/s", "vs none", "TTFT ms", "TPOT ms", "accepted", "chosen", "same text")
    body = [
        (
            short(row.policy),
            f"{row.concurrency}",
            f"{row.tokens_per_s:.0f}",
            f"{100 * row.ratio:.0f} %" if row.ratios else "-",
            f"{row.ttft_p50:.0f} / {row.ttft_p99:.0f}",
            f"{row.tpot_p50:.1f} / {row.tpot_p99:.1f}",
            f"{row.accepted_length:.2f}",
            f"{row.chosen_length:.2f}",
            f"{row.same} of {row.compared}" if row.compared else "-",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in (head, *body)
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def fallbacks(rows: Sequence[Row]) -> str:
    """A line on the steps in which a policy was not followed, late or at fault; empty if there were none."""
    told = [f"{short(row.policy)} {row.fallbacks:.0f} at {row.concurrency}" for row in rows if row.fallbacks]
    return f"Steps with no decision in time, at the fallback length: {', '.join(told)}." if told else ""


def sentence(rows: Sequence[Row], machine: str) -> str:
    """What the table shows, from its numbers: who gains on the baseline and who loses, and where."""
    others: dict[str, list[Row]] = {}
    for row in rows:
        if row.policy != BASELINE and row.ratios:
            others.setdefault(row.policy, []).append(row)
    if not others:
        return f"On {machine} nothing was compared: that takes {BASELINE} and another policy."
    clauses = [_clause(policy, of) for policy, of in others.items()]
    return f"On {machine} {_lead(rows)}: {'; '.join(clauses)}."


def _lead(rows: Sequence[Row]) -> str:
    """At which loads some policy gains."""
    loads = sorted({row.concurrency for row in rows})
    pays = [n for n in loads if any(row.verdict == "gains" for row in rows if row.concurrency == n)]
    if not pays:
        unclear = any(row.verdict == "unclear" for row in rows)
        return f"speculation {'clearly ' if unclear else ''}pays at no load"
    not_at = [str(n) for n in loads if n not in pays]
    but = f" but not at {_and(not_at)}" if not_at else ""
    return f"speculation pays at concurrency {_and([str(n) for n in pays])}{but}"


def _clause(policy: str, rows: Sequence[Row]) -> str:
    units = [f" of {BASELINE}'s tokens/s at concurrency", *[" at"] * (len(rows) - 1)]
    figures = [f"{100 * row.ratio:.0f} %{unit} {row.concurrency}" for row, unit in zip(rows, units, strict=True)]
    verdicts = [TOLD[row.verdict] for row in rows]
    if len(set(verdicts)) == 1:
        told = verdicts[0] + (" at both" if len(rows) == 2 else "")
    else:
        told = _and([f"{verdict} at {row.concurrency}" for verdict, row in zip(verdicts, rows, strict=True)])
    return f"{short(policy)} reaches {_and(figures)}, so it {told}"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def record(rows: Sequence[Row], runs: Sequence[Run]) -> dict[str, Any]:
    """Every figure, as JSON types (None for NaN): rows; and runs with their steps, requests and samples. No texts."""
    return {
        "rows": [_plain(asdict(row) | {"ratio": row.ratio, "verdict": row.verdict}) for row in rows],
        "runs": [
            {
                "policy": run.policy,
                "phase": run.phase.name,
                "concurrency": run.phase.concurrency,
                "round": run.round,
                "seconds": run.seconds,
                "tokens_per_s": run.tokens_per_s,
                "steps": asdict(run.steps),
                "fallbacks": run.fallbacks,
                "requests": [
                    {key: value for key, value in asdict(reply).items() if key != "text"} for reply in run.replies
                ],
                "samples": [{"at_s": s.at_s, "running": s.steps.running, **asdict(s.steps)} for s in run.samples],
            }
            for run in runs
        ],
    }


def _plain(figures: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in figures.items()}
