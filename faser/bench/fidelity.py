"""Does the simulator tell what a server does? The same requests at the same times under the same policy, in both.

    python -m faser.bench.fidelity --pair smollm2
    python -m faser.bench.fidelity --pair llama2-13b --profile FILE --load 0.8 --requests 96

The engine that `faser serve` runs serves them in real time, and `faser.envs.simulator` on the pair's profile and tape.
All are greedy, since only their text can be asked for again: a sampled one would be another, and go on past its end.
Compared are the mean time in system, output tokens over the seconds in which the engine worked, and tokens emitted per
request and step, in which the texts differ if they do. `profile` is what the profile expects of the engine's own steps,
over what they took: its share of a difference, and a machine's that is slower than when it was measured. `rest` is the
mean time in system again, simulated on a profile that is right in that total: what is left is the simulator's.
The simulator schedules synchronously: with `--async-scheduling` a difference is also what that saves and costs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from faser.acceptance import shipped_for
from faser.bench.arguments import (
    MOST_BATCH,
    add_async_scheduling,
    between,
    positive,
    refuse_async_scheduling,
    stoppable,
)
from faser.costs import StepCost, load_profile
from faser.costs.fit import predict
from faser.costs.steps import Steps
from faser.envs.periods import period
from faser.envs.simulator import capacity, replay
from faser.envs.trace import Trace
from faser.models import known_models, measured, prepare
from faser.policies import make_policy
from faser.serving.settings import Settings
from faser.tapes import Tape

if TYPE_CHECKING:
    from faser.serving.offline import OfflineEngine

POLICIES, SUITES = ("none", "static:3", "goodput"), ("steady", "bursty")
WARM = 8
"""Requests that are served before anything counts."""
LONGEST_PAUSE_S = 0.05
HEADER = "suite    episode  policy      mean s  simulated  ratio  tokens/s  simulated  ratio  emitted  profile  rest"


@dataclass(frozen=True, slots=True)
class Outcome:
    """mean_s: time in system. tokens_per_s: over the seconds in which the engine worked. visits: requests that decoded,
    in all steps.
    """

    mean_s: float
    tokens_per_s: float
    visits: int


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status; 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    return stoppable("fidelity", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    try:
        refuse_async_scheduling(args)
        cost, tape = measured(args.pair)
        if args.profile is not None:
            cost = load_profile(args.profile)
        for name in args.policies:
            make_policy(name, cost)
        test = period("test", tape.take(np.flatnonzero(tape.temperature == 0)))
        rate = args.load * capacity(test.tape, cost, args.slots)
        traces = {(s, e): test.trace(s, e, args.requests, rate) for s in args.suites for e in range(args.episodes)}
        pair = prepare(args.pair, progress=True)
    except (ValueError, OSError) as error:
        print(f"fidelity: {error}", file=sys.stderr)
        return 2
    from faser.serving.offline import OfflineEngine

    with tempfile.TemporaryDirectory(prefix="faser-fidelity-") as scratch:
        log = Path(scratch) / "steps.jsonl"
        settings = Settings(
            policy=args.policies[0],
            profile=str(args.profile or pair.profile),
            predictor=shipped_for(pair.tape),
            log=str(log),
        )
        engine = OfflineEngine(
            str(pair.target), str(pair.draft), settings, max_batch=args.slots, asynchronous=args.async_scheduling
        )
        room = {"slots": args.slots, "max_batched_tokens": engine.budget, "kv_tokens": engine.kv_tokens}
        print(f"pair {args.pair}, profile {cost.name}; {args.requests} requests at load {args.load:g}, {rate:.2f}/s")
        print(HEADER)
        ratios = []
        try:
            serve(engine, test.tape, Trace(np.zeros(WARM), np.arange(WARM)), log)
            for (suite, episode), trace in traces.items():
                for name in args.policies:
                    engine.swap(name)
                    live, clock = serve(engine, test.tape, trace, log, cost)
                    simulated = simulate(name, test.tape, trace, cost, room)
                    rest = simulate(name, test.tape, trace, cost.scaled(1.0 / clock), room).mean_s / live.mean_s
                    told = f"{line(live, simulated)} {clock:8.3f} {rest:5.3f}"
                    print(f"{suite:8s} {episode:7d}  {name:10.10s} {told}", flush=True)
                    ratios.append((simulated.mean_s / live.mean_s, simulated.tokens_per_s / live.tokens_per_s))
        finally:
            engine.close()
    worst = np.abs(np.array(ratios) - 1.0).max(axis=0)
    print(f"largest error: mean time in system {worst[0]:.1%}, tokens/s {worst[1]:.1%}")
    return 0


def line(live: Outcome, simulated: Outcome) -> str:
    """The middle of a row of the table; ratios are simulated over live."""
    return (
        f"{live.mean_s:7.2f} {simulated.mean_s:10.2f} {simulated.mean_s / live.mean_s:6.3f} "
        f"{live.tokens_per_s:9.1f} {simulated.tokens_per_s:10.1f} {simulated.tokens_per_s / live.tokens_per_s:6.3f} "
        f"{live.visits / simulated.visits:8.3f}"
    )


def serve(
    engine: OfflineEngine, tape: Tape, trace: Trace, log: Path, cost: StepCost | None = None
) -> tuple[Outcome, float]:
    """What came of `trace` on the engine, every request sent when it is due; and what `cost` expects of its steps, over
    what they took.

    Requests are as long as on the tape, whatever is written in them.
    """
    sent, busy, since = 0, 0.0, time.time()
    start, ended = time.monotonic() - float(trace.arrival[0]), np.full(len(trace), np.nan)
    while sent < len(trace) or engine.busy:
        now = time.monotonic() - start
        while sent < len(trace) and trace.arrival[sent] <= now:
            _send(engine, tape, trace, sent, time.time() - now + float(trace.arrival[sent]))
            sent += 1
        if not engine.busy:
            time.sleep(min(float(trace.arrival[sent]) - now, LONGEST_PAUSE_S))
            continue
        wrote = engine.outputs()
        after = time.monotonic() - start
        busy += after - now
        ended[[int(out.request_id) for out in wrote if out.finished]] = after
    tokens = int(tape.output_tokens[trace.row].sum())
    steps = Steps.read(log, since=since, at_least=0)
    clock = float(predict(cost, steps).sum() / steps.ms.sum()) if cost is not None else np.nan
    return Outcome(float((ended - trace.arrival).mean()), tokens / busy, int(steps.batch.sum())), clock


def simulate(policy: str, tape: Tape, trace: Trace, cost: StepCost, room: dict[str, Any]) -> Outcome:
    """The same in the simulator. room: slots, rows of a step and KV cache, as the engine has them."""
    found = replay(lambda _: make_policy(policy, cost), [trace], tape, cost, **room)[0]
    return Outcome(found.mean_time_in_system_s, found.tokens_per_s, found.visits)


def _send(engine: OfflineEngine, tape: Tape, trace: Trace, i: int, arrival: float) -> None:
    row = int(trace.row[i])
    engine.add(
        tape.text(row)[0],
        int(tape.output_tokens[row]),
        name=str(i),
        temperature=float(tape.temperature[row]),
        arrival=arrival,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m faser.bench.fidelity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", default="smollm2", help=f"{', '.join(known_models())} (default: %(default)s)")
    parser.add_argument("--profile", help="name or file of another profile than the pair's, as of this very machine")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="default: %(default)s")
    parser.add_argument("--suites", nargs="+", default=SUITES, help="of the test period (default: %(default)s)")
    parser.add_argument("--episodes", type=between(1, 1000), default=2, help="of each suite (default: %(default)s)")
    parser.add_argument("--requests", type=between(1, 10_000), default=48, help="in an episode (default: %(default)s)")
    add_async_scheduling(parser)
    parser.add_argument("--load", type=positive, default=0.8, help="over what fits without speculation")
    parser.add_argument(
        "--slots", type=between(1, MOST_BATCH), default=16, help="requests at once (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
