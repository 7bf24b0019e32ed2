"""Which cost profile and which tape stand behind a pair's name. The one place that says so.

The targets `llama2-13b` and `mistral-7b` of this project are inflated: they have those models' shapes, and so their
cost, and compute SmolLM2's function. That is why all three share one tape.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """Names of a shipped profile (`faser.costs`) and of a shipped tape (`faser.tapes`)."""

    profile: str
    tape: str


PAIRS: dict[str, Pair] = {
    "smollm2": Pair("cpu-smollm2", "smollm2"),
    "llama2-13b": Pair("h200-llama2-13b", "smollm2"),
    "mistral-7b": Pair("h200-mistral-7b", "smollm2"),
}


def pair_named(name: str) -> Pair:
    """ValueError lists the known names."""
    if name not in PAIRS:
        raise ValueError(f"pair is {name!r}; allowed: {', '.join(PAIRS)}")
    return PAIRS[name]
