"""From trained weights to the policy file and its card: what a server loads, and what a person reads.

The decision: the file carries its whole provenance, so the card beside it is only a rendering and may be lost.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from faser.core import LOAD_FEATURES, REQUEST_FEATURES, Floats
from faser.policies.policy_file import PolicyFile, save, write_atomically
from faser.train.evaluation import Scores

PACKAGES = ("faser-serve", "torch", "numpy", "gymnasium", "stable-baselines3")


def package_versions() -> dict[str, str]:
    """Versions of what a training run rests on; "" for one that is not installed."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return ""

    return {package: of(package) for package in PACKAGES}


def git_commit() -> str:
    """The commit of the checkout that this code runs from, with "+" if it has changes; "" if it is not a checkout."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def rows(scores: dict[str, Scores]) -> list[dict[str, Any]]:
    """The evaluation as the policy file stores it, from policy name -> scores on the same arrivals."""
    keys = next(iter(scores.values()))
    return [
        {"model": model, "load": load, **{name: round(s[model, load], 4) for name, s in scores.items()}}
        for model, load in keys
    ]


def table(evaluation: Sequence[dict[str, Any]]) -> str:
    """The evaluation as a Markdown table with a last row of means."""
    if not evaluation:
        return "(not evaluated)"
    names = [k for k in evaluation[0] if k not in ("model", "load")]
    means = [sum(row[name] for row in evaluation) / len(evaluation) for name in names]
    lines = [
        f"| model | load | {' | '.join(names)} |",
        "|---|---" + "|---" * len(names) + "|",
        *(f"| {row['model']} | {row['load']:g} | {' | '.join(f'{row[n]:.3f}' for n in names)} |" for row in evaluation),
        f"| mean |  | {' | '.join(f'{m:.3f}' for m in means)} |",
    ]
    return "\n".join(lines)


def card(policy: PolicyFile, name: str) -> str:
    """The human-readable card of a policy file called `name`."""
    facts = {k: v for k, v in policy.training.items() if k != "command"}
    return f"""# {name}
A speculation policy of FASER, trained by PPO in `faser/Speculation-v0`. Serve with it: `faser serve --policy {name}`.

## Training
    {policy.training.get("command", "")}

{chr(10).join(f"- {key}: {value}" for key, value in facts.items())}
- versions: {", ".join(f"{k} {v}" for k, v in policy.versions.items())}
- commit: {policy.commit or "none"}

## Evaluation
Mean time in system over that without speculation (`none` = 1; lower is better), on arrivals and requests that training
did not see. `load` is offered load over the capacity without speculation.

{table(policy.evaluation)}

## Actions and observation
Verify 0..{policy.max_depth} drafted tokens of each request, draft 0..{policy.max_depth} for the next step,
frontier 0..{policy.max_frontier}.

Request features: {", ".join(REQUEST_FEATURES)}.

Load features: {", ".join(LOAD_FEATURES)}.
"""


def export(
    arrays: dict[str, Floats],
    path: Path,
    *,
    max_depth: int,
    max_frontier: int,
    training: dict[str, Any],
    evaluation: list[dict[str, Any]],
) -> None:
    """Write the policy file at `path` and its card beside it."""
    policy = PolicyFile(
        arrays=arrays,
        max_depth=max_depth,
        max_frontier=max_frontier,
        training=training,
        versions=package_versions(),
        commit=git_commit(),
        evaluation=evaluation,
    )
    save(policy, path)
    write_atomically(path.with_suffix(".md"), card(policy, path.name).encode())
