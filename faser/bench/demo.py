"""`python -m faser.bench.demo`: several policies on one machine, real text, a low and a high load; a table and a plot.

The decision here: all servers run at once and take turns, phase by phase, over several rounds. An idle server uses next
to no CPU, and a machine's speed drifts by more than policies differ: measured one after the other, policies would be
compared by the weather.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import httpx
from tqdm import tqdm

from faser.bench.client import ReplayError, replay
from faser.bench.measure import Phase, Run, measure
from faser.bench.plot import PlotError, check_matplotlib, plot_lengths
from faser.bench.prompts import choose, load_prompts
from faser.bench.report import BASELINE, fallbacks, record, sentence, short, summarise, table
from faser.bench.server import Server, ServerError
from faser.costs import known_profiles, load_profile
from faser.models import ModelError, prepare
from faser.policies import PolicyError, make_policy

MODEL = "smollm2"
POLICIES = ("none", "static:4")
SHIPPED = str(files("faser.checkpoints") / "ppo.pt")
LOW, HIGH = (1, 10), (16, 32)
"""(concurrency, prompts) of the two phases."""

SERVER_GIB = 3.0
"""Memory for one server, which has 2.4 GiB of its own by measurement. With less, they run one after another."""

SERVE = (MODEL, "--no-enable-prefix-caching", "--kv-cache-memory-bytes", "512M")
"""No prefix caching: each round has the same work. The KV cache holds all of a phase's tokens several times over."""

WAIT_BAR = "{desc}: {n_fmt} of {total_fmt} ready, {elapsed}"
PHASE_BAR = "{desc} |{bar:20}| {n_fmt}/{total_fmt} {elapsed}{postfix}"
NOTES = """\
requests: at once. tokens/s: median of the rounds. vs none: median of the rounds' ratios. TTFT, TPOT: p50 / p99 of all
rounds' requests. accepted: tokens emitted, chosen: drafted tokens verified, each per request and step. same text:
replies equal to those of none's first round; in bfloat16 the rows of a step change the rounding, none's own too."""


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 if something failed, 2 for a user's mistake, 130 after Ctrl-C. No server outlives it."""
    args, serve_flags = _parser().parse_known_args(argv)
    try:
        check_matplotlib()
        _check(args)
        prepare(MODEL, progress=True)
        show(compare(args, serve_flags), args.out)
    except (ValueError, ModelError, PolicyError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except (ServerError, ReplayError, PlotError, httpx.HTTPError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: stopped; nothing is left running", file=sys.stderr)
        return 130
    return 0


def compare(args: argparse.Namespace, serve_flags: Sequence[str]) -> list[Run]:
    """Every policy through every phase, `args.rounds` times. Raises ServerError, ReplayError, httpx.HTTPError."""
    phases = _phases(args)
    together = available_gib() >= SERVER_GIB * len(args.policies)
    if not together:
        print("demo: too little free memory for all servers at once; they run one after another, so compare with care")
    runs: list[Run] = []
    for group in [args.policies] if together else [[policy] for policy in args.policies]:
        with servers(group, serve_flags, args.out) as urls:
            for number in range(1, args.rounds + 1):
                for i in range(len(group)):
                    policy = group[(i + number - 1) % len(group)]  # each starts a round in turn
                    runs += [_run(urls[policy], phase, policy, number, args.rounds) for phase in phases]
    return runs


@contextlib.contextmanager
def servers(policies: Sequence[str], flags: Sequence[str], out: Path) -> Iterator[dict[str, str]]:
    """Warm servers, one for each policy: policy -> url. Their logs are `out`/server-<n>.log."""
    started: dict[str, Server] = {}
    with contextlib.ExitStack() as stack:
        for n, policy in enumerate(policies):
            server = started[policy] = Server([*SERVE, "--policy", policy, *flags], log=out / f"server-{n}.log")
            stack.callback(server.stop)
            server.start()
        _wait(started)
        urls = {policy: server.url for policy, server in started.items()}
        for url in tqdm(urls.values(), desc="warming up", unit="server", leave=False):
            _warm_up(url)
        yield urls


def _warm_up(url: str) -> None:
    prompts = [p.prompt for p in choose(load_prompts(), 4)]
    asyncio.run(replay(url, prompts, concurrency=2, max_tokens=24))


def _wait(started: dict[str, Server]) -> None:
    waiting = dict(started)
    with _bar(len(waiting), "starting servers", WAIT_BAR) as bar:
        while waiting:
            ready = [policy for policy, server in waiting.items() if server.ready()]
            for policy in ready:
                del waiting[policy]
            bar.update(len(ready))
            time.sleep(0.25)


def _bar(total: int, name: str, form: str) -> tqdm:
    """A progress bar; in a log file, where each state is a line, one that moves rarely."""
    every_s = 0.5 if sys.stderr.isatty() else 15.0
    return tqdm(total=total, desc=name, bar_format=form, mininterval=every_s, maxinterval=every_s, miniters=0)


def _run(url: str, phase: Phase, policy: str, number: int, rounds: int) -> Run:
    name = f"round {number}/{rounds}  {short(policy):10s} {phase.concurrency:2d} at once"
    with _bar(len(phase.prompts), name, PHASE_BAR) as bar:
        run = asyncio.run(measure(url, phase, policy=policy, round=number, on_reply=lambda _: bar.update() and None))
        bar.set_postfix_str(f"{run.tokens_per_s:.0f} tokens/s", refresh=False)
    return run


def show(runs: Sequence[Run], out: Path) -> None:
    """Print the table and the sentence; write `out`/demo.json and `out`/lengths.png. Raises PlotError, OSError."""
    rows = summarise(runs)
    says = sentence(rows, machine())
    print("\n" + "\n\n".join(part for part in (table(rows), NOTES, fallbacks(rows), says) if part) + "\n")
    figures = {"machine": machine(), "sentence": says, **record(rows, runs)}
    (out / "demo.json").write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n")
    print(f"figures: {out / 'demo.json'}")
    if any(run.policy != BASELINE for run in runs):
        plot_lengths(runs, out / "lengths.png")
        print(f"plot:    {out / 'lengths.png'}")


def machine() -> str:
    """What this runs on, for the sentence."""
    return f"these {len(os.sched_getaffinity(0))} CPU cores"


def available_gib() -> float:
    """Memory that new processes can have without swapping, GiB."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return 0.0


def _phases(args: argparse.Namespace) -> list[Phase]:
    """The two loads. ValueError names the flag at fault."""
    prompts = load_prompts()
    phases = []
    for name, (concurrency, count) in (("low", args.low), ("high", args.high)):
        if concurrency < 1:
            raise ValueError(f"--{name} {concurrency} {count}: {concurrency} at once; allowed: from 1")
        try:
            texts = tuple(p.prompt for p in choose(prompts, count))
        except ValueError as error:
            raise ValueError(f"--{name} {concurrency} {count}: {error}") from None
        phases.append(Phase(name=name, concurrency=concurrency, prompts=texts, max_tokens=args.max_tokens))
    return phases


def _check(args: argparse.Namespace) -> None:
    """Refuse here, in a second, what the servers would refuse after half a minute. ValueError, PolicyError, OSError."""
    for flag, value, least in (("--rounds", args.rounds, 1), ("--max-tokens", args.max_tokens, 2)):
        if value < least:
            raise ValueError(f"{flag} is {value}; allowed: from {least}")
    if len(set(args.policies)) < len(args.policies):
        raise ValueError(f"--policies names one twice: {' '.join(args.policies)}")
    _phases(args)
    cost = load_profile(known_profiles()[0])  # any will do to see whether a policy can be made
    for policy in args.policies:
        make_policy(policy, cost)
    args.out.mkdir(parents=True, exist_ok=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m faser.bench.demo", description=__doc__, epilog="Any other flag goes to `faser serve`."
    )
    parser.add_argument("--policies", nargs="+", default=[*POLICIES, SHIPPED], help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="times that every policy takes its turn")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer")
    for name, load in (("low", LOW), ("high", HIGH)):
        parser.add_argument(
            f"--{name}", nargs=2, type=int, default=load, metavar=("AT_ONCE", "PROMPTS"), help="default: %(default)s"
        )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the plot, figures and logs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
