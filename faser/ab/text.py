"""The report of an A/B test as text, from its summary."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from textwrap import wrap
from typing import Any

from faser.ab.conclusion import percent, span

Said = dict[str, Any]
WIDTH = 100


def text(said: Said) -> str:
    """What a `summary` says: arms, differences, whether the split is right, the conclusion."""
    if not said["arms"]:
        return "\n".join(said["conclusion"])
    parts = [heading(said), "", *_table(arms_table(said))]
    for compared in said["comparisons"]:
        parts += ["", against(compared), *_table(differences_table(compared))]
        parts += [line for line in (looking(compared),) if line]
    parts += ["", f"Split: {split_line(said)}", ""]
    for sentence in said["conclusion"]:
        parts += wrap(sentence, WIDTH, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(parts)


def heading(said: Said) -> str:
    """What was split, when, and how much was seen."""
    how = "request" if said["unit"] == "request" else f"window of {span(said['window_s'])}"
    if said["washout_s"]:
        how += f", {said['washout_s']:g} s of each washed out"
    if said["since"] is None:
        return f"A/B test by {how}: nothing seen yet"
    told = span(said["until"] - said["since"])
    return f"A/B test by {how}: {told} from {moment(said['since'])}, {said['blocks']} blocks of {span(said['block_s'])}"


def arms_table(said: Said) -> list[list[str]]:
    """Rows of cells, the heads first. Totals since the start; quantiles of the requests kept."""
    heads = ["arm", "policy", "requests", "tokens/s", "TTFT p50/p95/p99 ms", "TPOT p50/p95/p99 ms"]
    heads += ["E2E p50/p95/p99 s", "accepted", "wasted", "decisions", "fallbacks"]
    rows = [
        [
            arm["name"] + (" (baseline)" if arm["name"] == said["baseline"] else ""),
            arm["policy"] or "-",
            f"{arm['requests']}" + (f" ({arm['cut']} cut)" if arm["cut"] else ""),
            "-" if arm["tokens_per_s"] is None else f"{arm['tokens_per_s']:.0f}",
            _quantiles(arm["ttft_s"], 1e3),
            _quantiles(arm["tpot_s"], 1e3),
            _quantiles(arm["e2e_s"], 1.0),
            f"{arm['accepted']}",
            f"{arm['wasted']}",
            f"{arm['decisions']}",
            ", ".join(f"{reason} {count}" for reason, count in arm["fallbacks"].items()) or "0",
        ]
        for arm in said["arms"]
    ]
    return [heads, *rows]


def differences_table(compared: Said) -> list[list[str]]:
    """Rows of cells, the heads first; the primary metric says so."""
    heads = ["metric", compared["baseline"], compared["arm"], "difference", "95 % interval", ""]
    valued = not compared["cut"]["differs"]
    return [heads, *(_difference(metric, i == 0, valued) for i, metric in enumerate(compared["metrics"]))]


def against(compared: Said) -> str:
    """The title of a comparison."""
    return f"{compared['arm']} against {compared['baseline']}, means over {compared['metrics'][0]['blocks']} pairs"


def looking(compared: Said) -> str:
    """Where the sequence stands; empty if there is none."""
    always = compared["sequence"]
    if not always["t"]:
        return ""
    unit = compared["metrics"][0]["unit"]
    if always["low"][-1] is None:
        return "Looking at any time: too few blocks yet"
    now = f"{always['mean'][-1]:+.3g} {unit} ({always['low'][-1]:+.3g} to {always['high'][-1]:+.3g})"
    decided = "" if always["decided"] is None else f"; zero was first outside at {moment(always['decided'])}"
    return f"Looking at any time: {now}{decided}"


def split_line(said: Said) -> str:
    """Whether the arms got what was planned."""
    check = said["sample_ratio"]
    counts = ", ".join(f"{name} {count}" for name, count in check["counts"].items())
    p = "" if check["p"] is None else f", p = {check['p']:.2g}"
    told = f"{'as planned' if check['ok'] else 'NOT AS PLANNED'}; {check['of']}: {counts}{p}"
    if check["astray"]:
        told += f"; {check['astray']} windows under a wrong arm"
    return told


def moment(t: float) -> str:
    """`t`, in seconds since the epoch, to the minute."""
    return datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _difference(metric: Said, primary: bool, valued: bool) -> list[str]:
    title = metric["title"] + (f", {metric['unit']}" if metric["unit"] else "") + (" (primary)" if primary else "")
    if metric["difference"] is None:
        return [title, "-", "-", "-", "-", ""]
    change = f"{metric['difference']:+.3g}" if metric["relative"] is None else percent(metric["relative"])
    if metric["relative_low"] is not None:
        between = f"{percent(metric['relative_low'])} to {percent(metric['relative_high'])}"
    elif metric["low"] is not None:
        between = f"{metric['low']:+.3g} to {metric['high']:+.3g}"
    else:
        between = f"too few: {metric['blocks']}"
    word = {0: "", -1: "lower", 1: "higher"}[metric["differs"]]
    if word and valued:
        word += ", better" if word == metric["better"] else ", worse"
    return [title, f"{metric['base']:.4g}", f"{metric['other']:.4g}", change, between, word]


def _quantiles(values: dict[str, float] | None, scale: float) -> str:
    return "-" if values is None else " / ".join(_figure(scale * value) for value in values.values())


def _figure(value: float) -> str:
    """To three digits, without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need be; the first is set left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]
