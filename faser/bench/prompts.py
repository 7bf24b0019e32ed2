"""The prompts of this release, `prompts.jsonl`: written for it, in five domains. And a fixed choice of some of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message and its domain."""

    domain: str
    prompt: str


def load_prompts() -> list[Prompt]:
    """All prompts, in the file's order."""
    lines = (files("faser.bench") / "prompts.jsonl").read_text("utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]


def choose(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` of `prompts`: the domains in turn, and within each from its first on. ValueError: not so many."""
    domains: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        domains.setdefault(prompt.domain, []).append(prompt)
    longest = max(map(len, domains.values()), default=0)
    turns = [of[i] for i in range(longest) for of in domains.values() if i < len(of)]
    if not 1 <= count <= len(turns):
        raise ValueError(f"{count} prompts asked for; allowed: 1 to {len(turns)}")
    return turns[:count]
