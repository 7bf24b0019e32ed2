"""What a server was asked and answered, out of its decision log (`--faser-log FILE --faser-log-prompts`), for a tape.

One decision: the outputs are the server's own. Nothing is written again, so what is recorded is what users got, at the
temperatures, cut-offs and stop conditions that they asked for; only the draft is run anew over it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from faser.ab.records import rotated
from faser.tapes.generation import Request
from faser.tapes.rollout import Texts, rollout
from faser.tapes.tape import TapeError

DOMAIN = "log"
CHECKED, AGREE = 16, 0.9
"""Greedy requests whose tokens are compared with the target's, and the share that must be equal: the server's number
format and batches may differ, and decide otherwise where two tokens are as likely."""


@dataclass(frozen=True, kw_only=True)
class Logged:
    """requests, outputs: one each, in the order of their ends. left_out: how many others, by reason."""

    requests: list[Request] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        others = [f"{count} {reason}" for reason, count in self.left_out.most_common()]
        return f"{len(self.requests)} requests" + (f"; left out: {', '.join(others)}" if others else "")


def read_log(paths: Iterable[Path], *, vocabulary: int, longest: int) -> Logged:
    """The requests in the logs at `paths` and in what was rotated out of them (FILE.1 and so on).

    vocabulary, longest: of the target. TapeError: none of use, or not this target's. OSError: no such file.
    """
    logged, paths = Logged(), list(paths)
    for line in _lines(paths):
        if reason := _reason(line, longest):
            logged.left_out[reason] += 1
            continue
        prompt, output = line["prompt_ids"], line["output_ids"]
        if max(*prompt, *output) >= vocabulary:
            raise TapeError(
                f"the log holds token {max(*prompt, *output)}; --target has {vocabulary}: it is not the server's model"
            )
        temperature = line["temperature"] if line["temperature"] > 1e-5 else 0.0  # what vLLM takes for greedy
        logged.requests.append(Request(DOMAIN, prompt, temperature, max(line["max_tokens"], len(output))))
        logged.outputs.append(output)
    if not logged.requests:
        names = ", ".join(map(str, paths))
        raise TapeError(f"{names}: no request with its tokens, as --faser-log-prompts keeps them ({logged})")
    return logged


def check_target(target: Any, logged: Logged) -> None:
    """TapeError if greedy outputs are not those of `target`, a Hugging Face causal model."""
    same = total = 0
    greedy = [i for i, request in enumerate(logged.requests) if not request.temperature][:CHECKED]
    for i in greedy:
        prompt, output = logged.requests[i].prompt, logged.outputs[i]
        own, _ = rollout(target, Texts.of([prompt + output], [len(prompt)], target.device), depth=1)
        same += int((own[:, 0] == torch.tensor(output, device=own.device)).sum())
        total += len(output)
    if same < AGREE * total:
        raise TapeError(f"{same} of {total} greedy tokens of the log are --target's own: it is not the server's model")


def _lines(paths: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """The lines of requests; one that a crash cut short is none."""
    for path in paths:
        for file in rotated(path):
            with file.open("rb") as lines:
                for raw in lines:
                    try:
                        line = json.loads(raw)
                    except (ValueError, RecursionError):
                        continue
                    if isinstance(line, dict) and line.get("kind") == "request":
                        yield line


def _reason(line: dict[str, Any], longest: int) -> str | None:
    """Why a request cannot be on a tape; None: it can."""
    if line.get("excluded"):
        return "under penalties, a grammar or the like"
    prompt, output = line.get("prompt_ids"), line.get("output_ids")
    if (
        not _tokens(prompt)
        or not _tokens(output)
        or not _number(line, "temperature")
        or not _number(line, "max_tokens")
    ):
        return "without tokens"
    if not prompt or not output:
        return "without output"
    if len(prompt) + len(output) > longest:
        return f"longer than the {longest} tokens that the target can read"
    return None


def _tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)


def _number(line: dict[str, Any], name: str) -> bool:
    return type(line.get(name)) in (int, float) and 0 <= line[name] < 2**31
