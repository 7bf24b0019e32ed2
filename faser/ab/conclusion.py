"""The conclusion of an A/B test in plain sentences, made from its summary's numbers: what is so, and what is not known.

One decision: the sequence has the last word. The fixed interval is right for who looks once, at a time chosen before;
people look again and again, and stop when they like what they see.
"""

from __future__ import annotations

from typing import Any

from faser.ab.statistics import ALPHA, LEAST

PRECISIONS = (0.1, 0.05, 0.02, 0.01)
"""Relative half-widths for which the report says how long they would take."""

UNDECIDED = 0.01
"""Share of an arm's steps without its policy's decision of which the conclusion tells."""

Said = dict[str, Any]


def conclusion(said: Said) -> list[str]:
    """Sentences on a `summary`, the most important first."""
    sentences = [*_wrong(said["sample_ratio"])]
    for compared in said["comparisons"]:
        sentences += [*_cut(compared, said), *_primary(compared, said), *_others(compared)]
    return [*sentences, *_caveats(said)]


def percent(value: float) -> str:
    """0.123: "+12.3 %"."""
    return f"{100 * value:+.1f} %"


def span(seconds: float) -> str:
    """A length of time, to two digits or so."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}" if seconds >= 10 * size else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _wrong(check: Said) -> list[str]:
    if check["ok"]:
        return []
    if check["astray"]:
        return [f"Do not use this test: windows not, or not only, under the arm of the plan: {check['astray']}."]
    told = ", ".join(f"{name} {count}" for name, count in check["counts"].items())
    return [f"Do not use this test before you know why: {check['of']} are not split as planned ({told})."]


def _cut(compared: Said, said: Said) -> list[str]:
    if not compared["cut"]["differs"]:
        return []
    of = {arm["name"]: f"{arm['cut']} of {arm['requests']}" for arm in said["arms"]}
    base, arm = compared["baseline"], compared["arm"]
    return [
        f"Do not rely on this: {of[base]} requests of {base} and {of[arm]} of {arm} were cut short, and that is not "
        "chance. Times are of the others only, and those that last long are the first to be cut."
    ]


def _primary(compared: Said, said: Said) -> list[str]:
    arm, base, metric, blocks = compared["arm"], compared["baseline"], compared["metrics"][0], said["block_s"]
    sentences = []
    if compared["same_policy"]:
        sentences.append(f"{base} and {arm} have the same policy: this is an A/A test, and any difference is chance.")
    if metric["low"] is None:
        if said["sticky"]:
            what = f"each arm needs {LEAST} clients"
        else:
            what = f"{metric['blocks']} blocks of {span(blocks)}, and an interval takes {LEAST}"
        return [*sentences, f"Nothing can be concluded of {arm} against {base} yet: {what}."]
    between = f"95 % interval {_range(metric)}"
    if not metric["differs"]:
        apart = f"{arm} and {base} cannot be told apart by {metric['title']}: {_change(metric)} ({between})."
        return [*sentences, apart, *_longer(metric, said), *_sequence(compared, metric)]
    word = "lower" if metric["differs"] < 0 else "higher"
    if compared["cut"]["differs"]:
        rest = f"Of the others, {arm}'s {metric['title']} is {word} than {base}'s, {_change(metric)} ({between})."
        return [*sentences, rest]
    if compared["same_policy"]:
        chance = f"It finds one, {_change(metric)} ({between}), as {100 * ALPHA:.0f} of 100 such tests do."
        return [*sentences, chance, *_sequence(compared, metric)]
    verdict = "better" if (word == metric["better"]) else "worse"
    sentences.append(f"{arm} is {verdict} than {base}: its {metric['title']} is {word}, {_change(metric)} ({between}).")
    return [*sentences, *_sequence(compared, metric)]


def _sequence(compared: Said, metric: Said) -> list[str]:
    """What the sequence adds to the fixed interval."""
    always = compared["sequence"]
    if not always["blocks"]:
        return ["Clients come again, so there is no interval that allows for looking at any time: look once."]
    if always["decided"] is None:
        if not metric["differs"]:
            return []
        return [
            "The sequence that allows for looking at any time does not say so yet: rely on this only if now is "
            "when you had planned to stop."
        ]
    if always["sign"] == metric["differs"]:
        return ["That holds however often you have looked."]
    way = "lower" if always["sign"] < 0 else "higher"
    return [f"Earlier in this test it was {way} for certain, so the effect changes with time: compare like times."]


def _longer(metric: Said, said: Said) -> list[str]:
    """How long until smaller differences would show, since the width goes with the root of time."""
    if metric["relative_low"] is None:
        return []
    half = (metric["relative_high"] - metric["relative_low"]) / 2
    finer = [precision for precision in PRECISIONS if precision < half][:2]
    if not finer or not half:
        return []
    so_far = said["blocks"] * said["block_s"]
    told = " and ".join(f"{100 * p:.0f} % about {span(so_far * (half / p) ** 2)}" for p in finer)
    return [f"At this load and noise, to see a difference of {told} in all would be needed; so far {span(so_far)}."]


def _others(compared: Said) -> list[str]:
    """The exploratory metrics."""
    known = [metric for metric in compared["metrics"][1:] if metric["low"] is not None]
    if not known:
        return []
    differ = [f"{m['title']} {_change(m)} ({_range(m)})" for m in known if m["differs"]]
    same = [m["title"] for m in known if not m["differs"]]
    sentences = []
    if differ:
        chance = f"of {len(known)} looked at, each errs in {100 * ALPHA:.0f} of 100 tests"
        sentences.append(f"Exploratory, {compared['arm']} also differs in {'; '.join(differ)}: {chance}.")
    if same:
        sentences.append(f"Not told apart: {', '.join(same)}.")
    return sentences


def _caveats(said: Said) -> list[str]:
    sentences = []
    if said["unit"] == "request":
        sentences.append(
            "The arms shared batches, so each slowed or sped the other's requests: this is what a request gets in such "
            "a mixture, not what a server would do with one policy for all. For that, split by window."
        )
    else:
        lasting = max((arm["e2e_s"]["p95"] for arm in said["arms"] if arm["e2e_s"]), default=0.0)
        if lasting > said["window_s"] / 4:
            sentences.append(
                f"Requests last long (p95 {lasting:.3g} s) for windows of {said['window_s']:.3g} s: many end under "
                "another arm than they began with, which makes differences look smaller. Longer windows help."
            )
    for arm in said["arms"]:
        fallen = sum(arm["fallbacks"].values())
        if fallen > UNDECIDED * (fallen + arm["decisions"]):
            why = ", ".join(f"{reason} {count}" for reason, count in arm["fallbacks"].items())
            sentences.append(
                f"In {fallen} of its {fallen + arm['decisions']} steps {arm['name']} was not decided by its policy "
                f"({why}), and these are counted as its own."
            )
    counts = said["counts"]
    if unread := counts.get("unread", 0) + counts.get("torn", 0):
        sentences.append(f"{unread} of {counts['lines']} lines could not be read and are left out.")
    if strangers := counts.get("strangers"):
        sentences.append(f"Engines left out, as their records are of another test or of an unknown one: {strangers}.")
    if counts.get("splits"):
        sentences.append("Another test came before in these lines; only the last one is told here.")
    return sentences


def _change(metric: Said) -> str:
    if metric["relative"] is not None:
        return percent(metric["relative"])
    return f"{metric['difference']:+.3g} {metric['unit']}".strip()


def _range(metric: Said) -> str:
    if metric["relative_low"] is not None:
        return f"{percent(metric['relative_low'])} to {percent(metric['relative_high'])}"
    return f"{metric['low']:+.3g} to {metric['high']:+.3g} {metric['unit']}".strip()
