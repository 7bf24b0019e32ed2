"""`faser bench sim`: policies against each other in the simulator, on arrivals and requests that none was made with.

    faser bench sim --pair llama2-13b --policies checkpoints/ppo.pt goodput schedule static:2 none oracle

Every policy gets the same episodes of the test period (`faser.envs.periods`), so differences are paired: intervals are
95 % of a bootstrap over episodes, within each suite and load. `oracle` knows which drafted tokens are right and is no
rival but a ceiling. `goodput+pruning` and `goodput+frontier:4` are a policy on an engine that prunes, or drafts so many
tokens while it verifies, as far as that is known (`faser.envs.effects`). Results go to a CSV file, a line an episode,
and to plots.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faser.bench.arguments import positive, stoppable
from faser.bench.plot import PlotError, check_matplotlib
from faser.bench.sim_plot import plot_loads
from faser.checkpoints import SHIPPED_POLICY
from faser.core import MAX_FRONTIER, Capabilities, Decision, Observation, Policy
from faser.costs import StepCost
from faser.envs.effects import Pruner, Pruning
from faser.envs.periods import Period, period
from faser.envs.simulator import capacity, replay
from faser.models import known_models, measured, short_name
from faser.policies import PolicyError, make_policy
from faser.policies.oracle import OraclePolicy
from faser.train.presets import Preset, preset

ORACLE = "oracle"
ABILITY = re.compile(r"\+(?:pruning|frontier:(\d+))$")
POLICIES = ("none", "static:1", "static:2", "static:3", "static:4", "schedule", "ema", "bandit", "gp_lcb", "goodput")
SUITES = ("steady", "bursty", "spikes", "diurnal", "swing", "mixed", "drift")
RESAMPLES = 2000
PAIRS = f"{', '.join(known_models())}, or PROFILE,TAPE, each a name or a file (default: %(default)s)"


@dataclass(frozen=True, slots=True)
class Result:
    """An episode under a policy; see `faser.envs.summary.Summary`. slo: share of requests within the latency target."""

    pair: str
    suite: str
    load: float
    episode: int
    policy: str
    mean_s: float
    p99_s: float
    tokens_per_s: float
    slo: float
    ratio_to_none: float


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status; 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    return stoppable("faser bench sim", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    try:
        check_matplotlib()
        cost, tape = measured(args.pair)
        for name in args.policies:
            policy, engine = abilities(name)
            if policy != ORACLE:
                make_policy(policy, cost)
            if engine.pruning:
                Pruner(Pruning(), tape, cost)
        test = period("test", tape)
        unknown = [suite for suite in args.suites if suite not in test.arrivals]
        if unknown:
            raise ValueError(f"--suites is {unknown[0]!r}; allowed: {', '.join(test.arrivals)}")
        args.out.mkdir(parents=True, exist_ok=True)
        args.policies, args.suites, args.loads = (
            list(dict.fromkeys(given)) for given in (args.policies, args.suites, args.loads)
        )
    except (PlotError, PolicyError, ValueError, OSError) as error:
        print(f"faser bench sim: {error}", file=sys.stderr)
        return 2
    results: list[Result] = []
    place = args.out / short_name(args.pair)
    for suite in args.suites:
        for load in args.loads:
            for name in args.policies:
                results += run_cell(args.pair, cost, test, suite, load, name, args.episodes)
        print(suite_table(results, suite, args.policies), flush=True)
        _write(results, Path(f"{place}.csv"))
    print(losses(results, args.policies[0]))
    plot_loads(results, Path(f"{place}.png"))
    print(f"{place}.csv, {place}.png")
    return 0


def run_cell(
    pair: str, cost: StepCost, test: Period, suite: str, load: float, name: str, episodes: int
) -> list[Result]:
    """The episodes of one suite and load under one policy, side by side."""
    own = preset(pair)
    slots = own.slots
    rate = load * capacity(test.tape, cost, slots)
    traces = [test.trace(suite, episode, own.requests(load), rate) for episode in range(episodes)]

    base, capabilities = abilities(name)

    def make(truth: Any) -> Policy:
        policy = OraclePolicy(cost, truth) if base == ORACLE else make_policy(base, cost)
        return Ahead(policy, capabilities.max_frontier) if capabilities.max_frontier else policy

    return [
        Result(
            pair=pair,
            suite=suite,
            load=load,
            episode=episode,
            policy=name,
            mean_s=summary.mean_time_in_system_s,
            p99_s=summary.p99_time_in_system_s,
            tokens_per_s=summary.tokens_per_s,
            slo=summary.within_target,
            ratio_to_none=summary.ratio_to_none,
        )
        for episode, summary in enumerate(replay(make, traces, test.tape, cost, slots=slots, capabilities=capabilities))
    ]


def abilities(name: str) -> tuple[str, Capabilities]:
    """A policy's own name, and what the engine can do that runs it. ValueError: there is no such frontier."""
    pruning, frontier = False, 0
    while found := ABILITY.search(name):
        name, tokens = name[: found.start()], found[1]
        pruning |= tokens is None
        if tokens is not None:
            frontier = int(tokens)
            if not 1 <= frontier <= MAX_FRONTIER:
                raise ValueError(f"policy {name!r} has +frontier:{tokens}; allowed: +frontier:1 to {MAX_FRONTIER}")
    return name, Capabilities(pruning=pruning, max_frontier=frontier)


class Ahead:
    """A policy's decisions, always with the largest frontier."""

    def __init__(self, policy: Policy, frontier: int) -> None:
        self.policy, self.frontier = policy, frontier

    def decide(self, observation: Observation) -> Decision:
        return replace(self.policy.decide(observation), frontier=self.frontier)


def difference(ours: NDArray[np.float64], theirs: NDArray[np.float64], seed: int = 0) -> tuple[float, float, float]:
    """Mean over loads of ln(ours / theirs), of the means over episodes, both [loads, episodes]; and its 95 % interval.

    As relative differences: exp - 1. Episodes are resampled in pairs, within each load.
    """
    rng = np.random.default_rng(seed)
    loads, episodes = ours.shape
    pick = rng.integers(0, episodes, (RESAMPLES, loads, episodes))
    at = np.arange(loads)[:, None]
    drawn = np.log(ours[at, pick].mean(axis=2) / theirs[at, pick].mean(axis=2)).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    middle = np.log(ours.mean(axis=1) / theirs.mean(axis=1)).mean()
    return float(np.expm1(middle)), float(np.expm1(low)), float(np.expm1(high))


def grid(results: Sequence[Result], suite: str, policy: str, field: str = "mean_s") -> NDArray[np.float64]:
    """[loads, episodes] of one figure."""
    mine = [r for r in results if (r.suite, r.policy) == (suite, policy)]
    loads = list(dict.fromkeys(r.load for r in mine))
    return np.array([[getattr(r, field) for r in mine if r.load == load] for load in loads])


def suite_table(results: Sequence[Result], suite: str, policies: Sequence[str]) -> str:
    """Markdown: each policy over all loads of a suite, against the first one."""
    first = policies[0]
    lines = [
        f"\n### {suite}",
        f"| policy | mean time over none's | p99, s | tokens/s | in time | mean time of {first} against it, 95 % |",
        "|---|---|---|---|---|---|",
    ]
    for name in policies:
        figures = [grid(results, suite, name, field) for field in ("ratio_to_none", "p99_s", "tokens_per_s", "slo")]
        ratio, p99, tokens, slo = (float(figure.mean()) for figure in figures)
        off, low, high = difference(grid(results, suite, first), grid(results, suite, name))
        against = "" if name == first else f"{off:+.1%} ({low:+.1%} to {high:+.1%})"
        lines.append(f"| {name} | {ratio:.3f} | {p99:.2f} | {tokens:.0f} | {slo:.1%} | {against} |")
    ceilings = [name for name in policies[1:] if abilities(name) == (ORACLE, abilities(first)[1])]
    if ceilings:
        lines.append(_gap(results, suite, policies, ceilings[0]))
    return "\n".join(lines)


def _gap(results: Sequence[Result], suite: str, policies: Sequence[str], ceiling: str) -> str:
    """How much of the way from the best rival to the oracle, called `ceiling`, the first policy goes."""
    rivals = [name for name in policies if _rivals(policies[0], name)]
    if not rivals:
        return ""
    means = {name: float(np.log(grid(results, suite, name, "ratio_to_none").mean(axis=1)).mean()) for name in policies}
    best = min(rivals, key=means.__getitem__)
    way = (means[best] - means[policies[0]]) / max(means[best] - means[ceiling], 1e-9)
    return f"\nBest rival: {best}; of the way from it to the oracle, {policies[0]} goes {way:.0%}."


def _rivals(first: str, name: str) -> bool:
    """Whether `name` is another honest policy on an engine like that of `first`."""
    (own, engine), (theirs, other) = abilities(first), abilities(name)
    return theirs not in (own, ORACLE) and engine == other


def losses(results: Sequence[Result], first: str) -> str:
    """Where another honest policy's mean time is lower than that of `first`, an interval that excludes zero."""
    lines = []
    for suite in dict.fromkeys(r.suite for r in results):
        for load in dict.fromkeys(r.load for r in results):
            cell = [r for r in results if (r.suite, r.load) == (suite, load)]
            for name in dict.fromkeys(r.policy for r in cell):
                if not _rivals(first, name):
                    continue
                off, low, high = difference(grid(cell, suite, first), grid(cell, suite, name))
                if low > 0:
                    lines.append(f"- {suite}, load {load}: {name} by {off:.1%} ({low:.1%} to {high:.1%})")
    return f"\nWhere {first} loses:\n" + ("\n".join(lines) or "nowhere, by an interval that excludes zero")


def _write(results: Sequence[Result], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, [field.name for field in fields(Result)])
        table.writeheader()
        table.writerows(asdict(result) for result in results)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="faser bench sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", default="llama2-13b", help=PAIRS)
    parser.add_argument(
        "--policies",
        nargs="+",
        default=[str(SHIPPED_POLICY), *POLICIES, ORACLE],
        help="the first one is held against the others (default: the shipped one and every rival); NAME+pruning and "
        f"NAME+frontier:1 to {MAX_FRONTIER}: on an engine that can do that",
    )
    parser.add_argument("--suites", nargs="+", default=list(SUITES), help="of the test period (default: all)")
    parser.add_argument(
        "--loads", nargs="+", type=positive, default=list(Preset().evaluated_loads), help="over the capacity without it"
    )
    parser.add_argument("--episodes", type=_several, default=5, help="of each suite and load (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/sim"), help="folder of CSV and plot (default: %(default)s)"
    )
    return parser


def _several(text: str) -> int:
    if (value := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 2 or more, for an interval")
    return value


if __name__ == "__main__":
    raise SystemExit(main())
