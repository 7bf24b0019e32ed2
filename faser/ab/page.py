"""The report of an A/B test as one HTML file: no script, no request to anywhere; for a phone and the dark, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from faser.ab.conclusion import percent
from faser.ab.text import against, arms_table, differences_table, heading, looking, moment, split_line

Said = dict[str, Any]

WIDE, HIGH = 440, 190
"""Of a plot over time, in its own units; it is as wide as the page."""

MARGIN = 8

STYLE = """
:root { --page: #fbfbfa; --ink: #1c1d1f; --muted: #5f6368; --line: #dcdee1; --better: #1a7f5a; --worse: #b3261e;
  --a0: #1d5fbf; --a1: #c2570c; --a2: #1a7f5a; --a3: #8a3fb0; }
@media (prefers-color-scheme: dark) { :root { --page: #141517; --ink: #e8e9eb; --muted: #a3a8ae; --line: #3a3d42;
  --better: #4fc795; --worse: #ff8a80; --a0: #6fa8ff; --a1: #f59a4c; --a2: #4fc795; --a3: #cf93ef; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 0.75rem; max-width: 64rem; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; } h2 { font-size: 1.05rem; margin: 1.4rem 0 0.3rem; }
p, figcaption { color: var(--muted); margin: 0.2rem 0; font-size: 0.9rem; }
li { margin: 0.25rem 0; } ul { padding-left: 1.2rem; } .bad { color: var(--worse); font-weight: 600; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.8rem 0.25rem 0; text-align: left; border-top: 1px solid var(--line); white-space: nowrap; }
thead th { border: 0; font-weight: 400; color: var(--muted); font-size: 0.85rem; }
figure { margin: 0.8rem 0; } svg { display: block; width: 100%; max-width: 40rem; height: auto; }
svg text { fill: var(--muted); font-size: 12px; paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
.zero { stroke: var(--muted); } .grid { stroke: var(--line); } .between { stroke: var(--muted); stroke-width: 3; }
.better { stroke: var(--better); } .worse { stroke: var(--worse); } .point { fill: var(--ink); }
.band { fill: var(--a0); opacity: 0.2; } .mean { fill: none; stroke: var(--a0); stroke-width: 2; }
.arm0 { fill: var(--a0); } .arm1 { fill: var(--a1); } .arm2 { fill: var(--a2); } .arm3 { fill: var(--a3); }
"""


def page(said: Said) -> str:
    """The HTML of a `summary`."""
    body = ["<h1>A/B test of speculation policies</h1>"]
    if said["arms"]:
        body.append(f"<p>{escape(heading(said))}</p>")
    body += ["<h2>Conclusion</h2>", _sentences(said["conclusion"])]
    if said["arms"]:
        mark = "" if said["sample_ratio"]["ok"] else " class=bad"
        body += [f"<p{mark}>Split: {escape(split_line(said))}</p>", "<h2>Arms</h2>", _table(arms_table(said))]
    for compared in said["comparisons"]:
        body += [f"<h2>{escape(against(compared))}</h2>", _table(differences_table(compared)), _effects(compared)]
        body.append(_sequence(compared))
    if said["arms"]:
        body.append(_windows(said))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A/B test</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>"
    )


def _sentences(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows[1:]
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _effects(compared: Said) -> str:
    """Relative differences with their intervals, one line a metric, on one axis."""
    known = [metric for metric in compared["metrics"] if metric["relative_low"] is not None]
    if not known:
        return ""
    ends = [metric[end] for metric in known for end in ("relative_low", "relative_high")] + [0.0]
    across = _Scale(ends, 12, WIDE - 12)
    parts = [f'<line class="zero" x1="{across(0):.1f}" x2="{across(0):.1f}" y1="0" y2="{40 * len(known)}"/>']
    for i, metric in enumerate(known):
        y = 40 * i + 28
        side = "between"
        if metric["differs"] and not compared["cut"]["differs"]:
            side += " better" if (metric["differs"] < 0) == (metric["better"] == "lower") else " worse"
        low, high, middle = (across(metric[end]) for end in ("relative_low", "relative_high", "relative"))
        parts.append(f'<text x="12" y="{y - 13}">{escape(metric["title"])} {percent(metric["relative"])}</text>')
        parts.append(f'<line class="{side}" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="point" cx="{middle:.1f}" cy="{y}" r="4"/>')
    title = (
        f"Differences of {compared['arm']} from {compared['baseline']} with 95 % intervals; the line is no difference"
    )
    return _figure(title, WIDE, 40 * len(known) + 4, parts)


def _sequence(compared: Said) -> str:
    """The interval that allows for looking at any time, over time."""
    always, unit = compared["sequence"], compared["metrics"][0]["unit"]
    points = [
        point
        for point in zip(always["t"], always["mean"], always["low"], always["high"], strict=True)
        if point[2] is not None
    ]
    if len(points) < 2:
        return ""
    late = points[len(points) // 3 :]  # the first intervals are so wide that they would leave the rest flat
    up = _Scale([value for point in late for value in point[1:]] + [0.0], HIGH - 24, 10)
    across = _Scale([point[0] for point in points], 60, WIDE - MARGIN)
    edge = [*((p[0], p[3]) for p in points), *((p[0], p[2]) for p in reversed(points))]
    band = " ".join(f"{across(t):.1f},{up(value):.1f}" for t, value in edge)
    mean = " ".join(f"{across(p[0]):.1f},{up(p[1]):.1f}" for p in points)
    parts = [
        *_axes(up, unit, points[0][0], points[-1][0]),
        f'<line class="zero" x1="60" x2="{WIDE}" y1="{up(0):.1f}" y2="{up(0):.1f}"/>',
        f'<polygon class="band" points="{band}"/><polyline class="mean" points="{mean}"/>',
    ]
    return _figure(f"Difference in {compared['metrics'][0]['title']}. {looking(compared)}", WIDE, HIGH, parts)


def _windows(said: Said) -> str:
    """Mean time in system of each window, by arm."""
    points = [window for window in said["windows"] if window["value"] is not None]
    if len(points) < 2:
        return ""
    names = [arm["name"] for arm in said["arms"]]
    up = _Scale([point["value"] for point in points] + [0.0], HIGH - 24, 10)
    across = _Scale([point["t"] for point in points], 60, WIDE - MARGIN)
    parts = _axes(up, "s", points[0]["t"], points[-1]["t"])
    for point in points:
        arm = names.index(point["arm"]) % 4
        parts.append(
            f'<circle class="arm{arm}" cx="{across(point["t"]):.1f}" cy="{up(point["value"]):.1f}" r="3">'
            f"<title>{escape(point['arm'])} {moment(point['t'])}: {point['value']:.3g} s</title></circle>"
        )
    keys = "".join(
        f'<circle class="arm{i % 4}" cx="{70 + 110 * i}" cy="{HIGH + 12}" r="5"/>'
        f'<text x="{80 + 110 * i}" y="{HIGH + 16}">{escape(name[:14])}</text>'
        for i, name in enumerate(names[:5])
    )
    return _figure("Mean time in system, window by window", WIDE, HIGH + 24, [*parts, keys])


def _axes(up: _Scale, unit: str, first: float, last: float) -> list[str]:
    parts = []
    for value in (up.least, (up.least + up.most) / 2, up.most):
        parts.append(f'<line class="grid" x1="60" x2="{WIDE}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>')
        parts.append(f'<text x="54" y="{up(value) + 4:.1f}" text-anchor="end">{value:.3g} {unit}</text>')
    parts.append(f'<text x="60" y="{HIGH - 4}">{moment(first)}</text>')
    parts.append(f'<text x="{WIDE}" y="{HIGH - 4}" text-anchor="end">{moment(last)}</text>')
    return parts


def _figure(caption: str, width: int, height: int, parts: Iterable[str]) -> str:
    label = escape(caption, quote=True)
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
        f"<figcaption>{label}</figcaption></figure>"
    )


class _Scale:
    """From values to a plot's units; what lies outside of `values` is drawn at the edge."""

    def __init__(self, values: Sequence[float], at_least: float, at_most: float) -> None:
        self.least, self.most = min(values), max(values)
        self._from, self._per = at_least, (at_most - at_least) / ((self.most - self.least) or 1.0)

    def __call__(self, value: float) -> float:
        return self._from + (min(max(value, self.least), self.most) - self.least) * self._per
