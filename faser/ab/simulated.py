"""An A/B test without an engine: the log lines of a server whose load drifts, and how often the report errs on them.

    python -m faser.ab.simulated      # false-positive rates of 200 A/A tests each, by length and unit

One decision: the load is what is hard. It has a daily wave and a memory of many windows, time in system grows with it
as in a queue, and requests differ by a lognormal; the arms differ by a factor on their times, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from faser.ab.records import Records
from faser.ab.report import summary
from faser.ab.split import Arm, Split

STEPS = 2
"""Step lines a window."""


def lines(
    split: Split,
    windows: int,
    seed: int,
    *,
    slower: Mapping[str, float] | None = None,
    per_window: float = 12.0,
    clients: int = 0,
) -> Iterator[dict[str, Any]]:
    """The lines of a log over `windows` windows of `split`, the split's own first, in order of time.

    slower: factor on an arm's times. per_window: requests, on average. clients: those who come again; 0: nobody does.
    """
    rng = np.random.default_rng(seed)
    yield {"kind": "split", "t": split.start, **split.to_json()}
    patience = np.exp(0.5 * rng.standard_normal(max(clients, 1)))
    memory = rng.standard_normal()
    for window in range(windows):
        memory = 0.9 * memory + np.sqrt(1 - 0.9**2) * rng.standard_normal()
        load = float(np.clip(0.55 + 0.15 * np.sin(window / 40) + 0.15 * memory, 0.05, 0.95))
        began = split.start + window * split.window_s
        for place in range(STEPS):
            yield _step(split, began + (place + 0.5) * split.window_s / STEPS, load, rng, slower or {})
        for arrival in np.sort(began + split.window_s * rng.random(rng.poisson(per_window * load / 0.55))):
            client = int(rng.integers(clients)) if clients else int(rng.integers(2**40))
            base = 0.8 / (1 - load) * np.exp(0.5 * rng.standard_normal()) * (patience[client] if clients else 1.0)
            yield _request(split, float(arrival), f"client {client}", float(base), rng, slower or {})


def _step(
    split: Split, at: float, load: float, rng: np.random.Generator, slower: Mapping[str, float]
) -> dict[str, Any]:
    rows = 1 + round(30 * load)
    told: dict[str, Any] = {"arm": None, "window": None, "washout": False}
    if split.unit == "window":
        told = split.arm_at(at)._asdict()
    else:
        told["arms"] = [split.arm_of_key(str(rng.integers(2**40))) for _ in range(rows)]
    policy = next((arm.policy for arm in split.arms if arm.name == told["arm"]), "mixed")
    accepted = rng.integers(0, 5, rows).tolist()
    return {
        "kind": "step",
        "t": at,
        "ms": 20.0 * (1 + load) * slower.get(told["arm"], 1.0),
        "policy": policy,
        "decided": True,
        **told,
        "running": rows,
        "waiting": 0,
        "prefill": 0,
        "context": 100 * rows,
        "depth": 4,
        "drafted": [4] * rows,
        "verified": [4] * rows,
        "accepted": accepted,
        "request": [str(row) for row in range(rows)],
        "generated": [1] * rows,
    }


def _request(
    split: Split, arrival: float, client: str, base: float, rng: np.random.Generator, slower: Mapping[str, float]
) -> dict[str, Any]:
    if split.unit == "window":
        told: dict[str, Any] = split.arm_at(arrival)._asdict()
    else:
        arm, key = split.arm_of_key(client), split.pseudonym(client)
        told = {"arm": arm, "window": None, "washout": False, "key": key}
    seconds = base * slower.get(told["arm"], 1.0)
    tokens = int(rng.integers(2, 200))
    return {
        "kind": "request",
        "t": arrival + seconds,
        "request": f"{arrival:.6f}",
        **told,
        "arrival": arrival,
        "ttft": 0.1 * seconds,
        "seconds": seconds,
        "prompt": 100,
        "tokens": tokens,
        "drafted": 2 * tokens,
        "verified": tokens,
        "accepted": tokens // 2,
        "status": "stop",
    }


def split_of(unit: str = "window", *, salt: str = "", policies: tuple[str, str] = ("static:4", "static:4")) -> Split:
    """Two equal arms, a and b, in windows of a minute."""
    arms = (Arm("a", policies[0]), Arm("b", policies[1]))
    return Split(arms=arms, shares=(0.5, 0.5), unit=unit, salt=salt, start=1.7e9)


def found(unit: str, windows: int, seed: int, *, clients: int = 0, per_window: float = 12.0) -> tuple[bool, bool]:
    """Whether the fixed interval, and the sequence at any time, find a difference between arms that are the same."""
    records = Records()
    split = split_of(unit, salt=str(seed))
    for line in lines(split, windows, seed, clients=clients, per_window=per_window):
        records.add(line)
    said = summary(records, split)["comparisons"][0]
    primary = said["metrics"][0]
    return primary["differs"] != 0, said["sequence"]["decided"] is not None


def main() -> None:
    tests = 200
    print(f"{tests} A/A tests each        the interval errs   the sequence errs, looked at after every block")
    for unit, windows, clients in (
        ("window", 20, 0),
        ("window", 60, 0),
        ("window", 200, 0),
        ("request", 30, 0),
        ("request", 30, 60),
    ):
        both = np.array([found(unit, windows, seed, clients=clients) for seed in range(tests)])
        what = f"by {unit}, {clients} clients" if clients else f"by {unit}"
        fixed, always = 100 * both.mean(axis=0)
        print(f"{what:<24} {windows:>4} min {fixed:>8.1f} % {'-' if clients else f'{always:.1f} %':>14}")


if __name__ == "__main__":
    main()
