"""Policies by name. `make_policy("static:4", cost)` or `make_policy("checkpoints/ppo.pt", cost)`.

A name is looked up here and nowhere else; each policy is one file that knows nothing of engines.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from faser.core import MAX_DEPTH, Policy
from faser.costs import StepCost

KNOWN = {
    "none": "never speculate",
    "static:K": f"always draft and verify K tokens, 0 to {MAX_DEPTH}",
    "schedule": "K from a batch-size table made from the step costs; or schedule:ACCEPTANCE, 0 to 1, of the draft's "
    "tokens; or the table, schedule:1-8=4,9-64=2 (K = 0 beyond)",
    "ema": "K tiers from acceptance averages, with hysteresis; or ema:RISE:FALL:K,K,...",
    "bandit": "K by discounted UCB for each size of batch; or bandit:EXPLORE:DISCOUNT:TRUST",
    "gp_lcb": "lengths by a Gaussian process and its lower confidence bound; or gp_lcb:BETA",
    "goodput": "most expected tokens per millisecond, from confidences and step costs",
    "random:SEED": "random lengths and depths, to test that outputs do not change",
    "probe:HOLD:SEED": "each length and depth for HOLD steps, to measure what steps cost",
    "FILE.pt": "a learned policy, as written by train/ppo.py",
}
"""What `make_policy` takes, with a line on each."""


class PolicyError(ValueError):
    """A policy that cannot be had: unknown name, bad argument, or a refused file. The message is one line."""


def make_policy(spec: str, cost: StepCost) -> Policy:
    """The policy that `spec` names (see KNOWN), for an engine whose steps cost `cost`. Raises PolicyError."""
    name, _, argument = spec.partition(":")
    if names_file(spec):
        return _learned(Path(spec))
    factory = _FACTORIES.get(name)
    if factory is None:
        known = ", ".join(KNOWN)
        raise PolicyError(f"policy {spec!r} is unknown; known: {known}")
    return factory(argument, cost)


def names_file(spec: str) -> bool:
    """Whether `spec` is meant as a policy file rather than a rule."""
    return Path(spec).suffix == ".pt" or "/" in spec


def _learned(path: Path) -> Policy:
    from faser.policies.learned import load
    from faser.policies.policy_file import PolicyFileError

    try:
        return load(path)
    except PolicyFileError as error:
        raise PolicyError(str(error)) from None


def _whole(name: str, argument: str, highest: int | None) -> int:
    allowed = f"0 to {highest}" if highest is not None else "a whole number"
    if not re.fullmatch(r"\d{1,9}", argument) or (highest is not None and int(argument) > highest):
        raise PolicyError(f"policy {name}:{argument}: {argument!r} is not allowed; allowed: {allowed}")
    return int(argument)


def _no_argument(name: str, argument: str) -> None:
    if argument:
        raise PolicyError(f"policy {name!r} takes no argument; {argument!r} was given")


def _none(argument: str, cost: StepCost) -> Policy:  # noqa: ARG001
    from faser.policies.static import Static

    _no_argument("none", argument)
    return Static(0)


def _static(argument: str, cost: StepCost) -> Policy:  # noqa: ARG001
    from faser.policies.static import Static

    return Static(_whole("static", argument, MAX_DEPTH))


def _numbers(name: str, argument: str, most: int) -> list[float]:
    """The numbers of "1:0.5", at most so many; none of ""."""
    parts = argument.split(":") if argument else []
    if len(parts) > most or not all(re.fullmatch(r"\d{0,9}\.?\d{1,9}", part) for part in parts):
        raise PolicyError(f"policy {name}:{argument}: {argument!r} is not allowed; allowed: up to {most} numbers, A:B")
    return [float(part) for part in parts]


def _schedule(argument: str, cost: StepCost) -> Policy:
    from faser.policies.schedule import Schedule, geometric

    if re.fullmatch(r"0?\.\d+|[01](\.0*)?", argument):
        return Schedule.from_cost(cost, geometric(float(argument)))
    try:
        return Schedule.parse(argument) if argument else Schedule.from_cost(cost)
    except ValueError as error:
        raise PolicyError(f"policy schedule:{argument}: {error}") from None


def _ema(argument: str, cost: StepCost) -> Policy:  # noqa: ARG001
    from faser.policies.ema import Ema

    try:
        return Ema.parse(argument) if argument else Ema()
    except ValueError as error:
        raise PolicyError(f"policy ema:{argument}: {error}") from None


def _bandit(argument: str, cost: StepCost) -> Policy:
    from faser.policies.bandit import Bandit

    names = ("explore", "discount", "trust")
    try:
        return Bandit(cost, **dict(zip(names, _numbers("bandit", argument, len(names)), strict=False)))
    except ValueError as error:
        raise error if isinstance(error, PolicyError) else PolicyError(f"policy bandit:{argument}: {error}") from None


def _gp_lcb(argument: str, cost: StepCost) -> Policy:
    from faser.policies.gp_lcb import GpLcb

    try:
        return GpLcb(cost, **dict(zip(("beta",), _numbers("gp_lcb", argument, 1), strict=False)))
    except ValueError as error:
        raise error if isinstance(error, PolicyError) else PolicyError(f"policy gp_lcb:{argument}: {error}") from None


def _oracle(argument: str, cost: StepCost) -> Policy:  # noqa: ARG001
    raise PolicyError("policy 'oracle' must know which tokens will be accepted: it runs in the simulator only")


def _goodput(argument: str, cost: StepCost) -> Policy:  # noqa: ARG001
    from faser.policies.goodput import Goodput

    _no_argument("goodput", argument)
    return Goodput()


def _random(argument: str, cost: StepCost) -> Policy:  # noqa: ARG001
    from faser.policies.random import Random

    return Random(_whole("random", argument or "0", None))


def _probe(argument: str, cost: StepCost) -> Policy:  # noqa: ARG001
    from faser.policies.probe import Probe

    hold, _, seed = argument.partition(":")
    try:
        return Probe(_whole("probe", hold or "5", None), _whole("probe", seed or "0", None))
    except ValueError as error:
        raise PolicyError(f"policy probe:{argument}: {error}") from None


_FACTORIES: dict[str, Callable[[str, StepCost], Policy]] = {
    "none": _none,
    "static": _static,
    "schedule": _schedule,
    "ema": _ema,
    "bandit": _bandit,
    "gp_lcb": _gp_lcb,
    "oracle": _oracle,
    "goodput": _goodput,
    "random": _random,
    "probe": _probe,
}
