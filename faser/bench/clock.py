"""Does a profile tell the time? Real-time replays of arrivals, and what the profile expects of their steps.

    python -m faser.bench.clock --target smollm2 --profile cpu-smollm2 --seconds 60
    python -m faser.bench.clock --target llama2-13b --profile h200-llama2-13b --trace azure.csv

Three processes of arrivals (or a recorded trace), each for the same time, over the requests of a tape: its prompts, its
output lengths. The engine that `faser serve` runs serves them under a policy. Every step that it took is then held
against the profile, which sees what was done in it and not how long it took.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from faser.bench.arguments import (
    MOST_BATCH,
    MOST_SEED,
    add_engine,
    between,
    draft_of,
    engine_options,
    positive,
    refuse_async_scheduling,
    refuse_place,
    stoppable,
)
from faser.costs import StepCost, load_profile
from faser.costs.fit import errors, predict
from faser.costs.plan import TEMPERATURES
from faser.costs.steps import Steps
from faser.envs.arrivals import ARRIVALS
from faser.envs.recorded import read_recorded
from faser.envs.simulator import capacity
from faser.envs.trace import sample_trace
from faser.models import Pair, prepare
from faser.policies import make_policy
from faser.serving.settings import Settings
from faser.tapes import Tape, load_tape

if TYPE_CHECKING:
    from faser.serving.offline import OfflineEngine

TRACES = ("poisson", "bursty", "spikes")
WARM_S = 10.0
"""Of the first trace, replayed before anything counts."""
LOAD = 0.7
"""Requests a second, over what the profile says that the slots can do without speculation."""
LONGEST_PAUSE_S = 0.05
MOST_REQUESTS = 100_000
"""Of one trace."""
RANDOM_TOKENS = 1000
"""Prompts without a text are of tokens up to here, which every vocabulary has."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: seconds since the start, prompt (token ids), tokens that it writes."""

    at: float
    prompt: Sequence[int]
    output: int


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status; 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    return stoppable("clock", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    try:
        if args.log is not None:
            refuse_place("--log", args.log)
        refuse_async_scheduling(args)
        cost, pair = load_profile(args.profile), prepare(args.target, progress=True)
        make_policy(args.policy, cost)
        draft = draft_of(pair, args.draft)
        traces = _traces(args, pair, cost)
    except (ValueError, OSError) as error:
        print(f"clock: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="faser-clock-") as scratch:
        log = args.log or Path(scratch) / "steps.jsonl"
        spans = _serve(str(pair.target), draft, traces, log.resolve(), args)
        print(f"profile {cost.name}, policy {args.policy}, {args.seconds:g} s of each trace")
        print("trace          steps  measured s  predicted s   error   MAPE of steps")
        for name, (since, until) in spans.items():
            steps = Steps.read(log, since=since, until=until, at_least=0)
            print(line(name, cost, steps) if len(steps) else f"{name:12s} no request came")
    return 0


def line(name: str, cost: StepCost, steps: Steps) -> str:
    """A row of the table: what the steps took, and what `cost` expects of them."""
    found, expected = errors(cost, steps), float(predict(cost, steps).sum()) / 1e3
    took = float(steps.ms.sum()) / 1e3
    return f"{name:12s} {len(steps):7d} {took:11.2f} {expected:12.2f} {found.total:+7.1%} {found.mape:15.1%}"


def replay(engine: OfflineEngine, arrivals: Sequence[Arrival], seconds: float) -> tuple[float, float]:
    """Send each request when it is due, for `seconds`, and drop what is left; returns start and end, since the epoch.

    A request that is longer than the model takes is cut.
    """
    began, start, due, temperature = time.time(), time.monotonic(), iter(arrivals), cycle(TEMPERATURES)
    coming = next(due, None)
    while (now := time.monotonic() - start) < seconds:
        while coming is not None and coming.at <= now:
            output = min(coming.output, engine.longest // 2)
            engine.add(coming.prompt[-(engine.longest - output) :], output, temperature=next(temperature))
            coming = next(due, None)
        if engine.busy:
            engine.step()
        else:
            until = seconds if coming is None else coming.at
            time.sleep(min(max(until - now, 0.0), LONGEST_PAUSE_S))
    ended = time.time()
    engine.drop_all()
    return began, ended


def read_trace(path: Path, seconds: float, vocabulary: int) -> list[Arrival]:
    """The first `seconds` of a recording (`faser.envs.recorded` has the formats); prompts are random tokens.

    ValueError: no such file, or not in such a format, or nothing in it.
    """
    try:
        recorded = read_recorded(path)
    except ValueError as error:
        raise ValueError(f"--trace {error}") from None
    rng = np.random.default_rng(0)
    lengths = zip(recorded.arrival.tolist(), recorded.prompt_tokens, recorded.output_tokens, strict=True)
    return [
        Arrival(at, rng.integers(10, vocabulary, prompt).tolist(), int(output))
        for at, prompt, output in lengths
        if at < seconds
    ]


def _traces(args: argparse.Namespace, pair: Pair, cost: StepCost) -> dict[str, list[Arrival]]:
    """By name, the requests of each trace."""
    if args.trace is not None:
        return {args.trace.stem[:12]: read_trace(args.trace, args.seconds, vocabulary=RANDOM_TOKENS)}
    tape = load_tape(args.tape or pair.tape or "smollm2")
    rate = args.rate or LOAD * capacity(tape, cost, args.max_batch)
    if rate * args.seconds > MOST_REQUESTS:
        sent = f"{rate:g} requests a second for {args.seconds:g} s are {rate * args.seconds:g}"
        raise ValueError(f"--rate: {sent}; allowed: {MOST_REQUESTS} at most")
    print(f"{rate:.2f} requests/s", file=sys.stderr)
    rng = np.random.default_rng(args.seed)
    return {name: _sampled(name, rng, rate, args.seconds, tape) for name in TRACES}


def _sampled(name: str, rng: np.random.Generator, rate: float, seconds: float, tape: Tape) -> list[Arrival]:
    """The requests of `seconds` of a process; random tokens where the tape holds none."""
    trace = sample_trace(ARRIVALS[name], rng, max(round(4 * rate * seconds), 8), rate, tape)
    return [
        Arrival(float(at), _prompt(tape, int(row), rng), int(tape.output_tokens[row]))
        for at, row in zip(trace.arrival, trace.row, strict=True)
        if at < seconds
    ]


def _prompt(tape: Tape, row: int, rng: np.random.Generator) -> list[int]:
    if tape.tokens.size:
        return tape.text(row)[0]
    return [int(token) for token in rng.integers(10, RANDOM_TOKENS, tape.prompt_tokens[row])]


def _serve(
    target: str, draft: str, traces: dict[str, list[Arrival]], log: Path, args: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Replay each trace, steps going to `log`; returns when each began and ended."""
    from faser.serving.offline import OfflineEngine

    settings = Settings(policy=args.policy, profile=str(args.profile), log=str(log))
    engine = OfflineEngine(target, draft, settings, max_batch=args.max_batch, **engine_options(args))
    try:
        replay(engine, next(iter(traces.values())), min(WARM_S, args.seconds))
        return {name: replay(engine, arrivals, args.seconds) for name, arrivals in traces.items()}
    finally:
        engine.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m faser.bench.clock", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine(parser)
    parser.add_argument("--profile", required=True, help="name or file of the profile that is checked")
    parser.add_argument("--policy", default="goodput", help="which policy serves (default: %(default)s)")
    parser.add_argument("--seconds", type=positive, default=60.0, help="of each trace (default: %(default)s)")
    parser.add_argument("--rate", type=positive, help=f"requests a second (default: {LOAD:g} of what should fit)")
    parser.add_argument("--trace", type=Path, help="replay this file instead: Azure's, BurstGPT's or Mooncake's format")
    parser.add_argument("--tape", help="whose requests arrive (default: the target's own, or smollm2)")
    parser.add_argument(
        "--max-batch", type=between(1, MOST_BATCH), default=64, help="requests at once (default: %(default)s)"
    )
    parser.add_argument("--log", type=Path, help="keep the step log here")
    parser.add_argument("--seed", type=between(0, MOST_SEED), default=0)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
