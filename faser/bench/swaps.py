"""Does a swap of policies slow the requests that it meets? The same streams with swaps and without, in turn.

    python -m faser.bench.swaps                       12 pairs of rounds, 32 streams: some five minutes on two cores
    python -m faser.bench.swaps --pairs 4 --streams 8 --tokens 32

In a round every prompt is asked once, `--streams` at a time; in every other one a policy is swapped in every
`--every` seconds, so that each request spans swaps. The policy is always the same rule, so a swap changes nothing but
the policy's object and thread. In the rounds between, as often, the server is only asked which policy is in force: what
a request over HTTP takes from two cores is in both. Which round of a pair comes first is drawn.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from faser.bench.arguments import positive, whole
from faser.bench.client import Reply, replay
from faser.bench.prompts import choose, load_prompts
from faser.bench.server import Server
from faser.policy_command import ask

Times = NDArray[np.float64]
RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Ratio:
    """With swaps over without, and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def ratio(swapped: Times, quiet: Times, q: float, seed: int = 0) -> Ratio:
    """Of the q-th percentiles of times [pairs, requests], NaNs left out; a bootstrap over the pairs."""
    drawn = np.random.default_rng(seed).integers(0, len(quiet), (RESAMPLES, len(quiet)))

    def of(pairs: NDArray[np.int64]) -> float:
        return float(np.nanpercentile(swapped[pairs], q) / np.nanpercentile(quiet[pairs], q))

    low, high = np.percentile([of(pairs) for pairs in drawn], [2.5, 97.5])
    return Ratio(of(np.arange(len(quiet))), float(low), float(high))


@contextmanager
def asking(url: str, key: str, policy: str | None, every_s: float) -> Iterator[list[float]]:
    """While open, swap `policy` in every `every_s`, or with None ask which it is; yields how long each took, s."""
    took: list[float] = []
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(every_s):
            started = time.perf_counter()
            if policy is None:
                ask(url, key, "GET", "policy")
            else:
                ask(url, key, "POST", "policy", {"policy": policy})
            took.append(time.perf_counter() - started)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield took
    finally:
        done.set()
        thread.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; 1 if an interval says that swaps slow requests."""
    args = _parser().parse_args(argv)
    prompts = [prompt.prompt for prompt in choose(load_prompts(), args.streams)]
    key = secrets.token_hex(16)
    rng = np.random.default_rng(args.seed)
    times: dict[bool, list[list[Reply]]] = {True: [], False: []}
    swaps: list[float] = []

    def one_round(url: str) -> list[Reply]:
        return asyncio.run(replay(url, prompts, concurrency=args.streams, max_tokens=args.tokens))

    with Server(["--policy", args.policy], env={"FASER_ADMIN_KEY": key}) as server:
        one_round(server.url)  # prompts are in the prefix cache from here on
        for pair in range(args.pairs):
            for swapped in rng.permutation([True, False]).tolist():
                with asking(server.url, key, args.policy if swapped else None, args.every) as took:
                    times[swapped].append(one_round(server.url))
                swaps += took if swapped else []
            print(f"pair {pair + 1} of {args.pairs}: {len(swaps)} swaps so far", file=sys.stderr, flush=True)
    return _report(times, swaps, args)


def _report(times: dict[bool, list[list[Reply]]], swaps: Sequence[float], args: argparse.Namespace) -> int:
    requests = args.pairs * args.streams
    print(f"{len(swaps)} swaps of {args.policy}, median {1e3 * np.median(swaps):.1f} ms; {requests} requests each")
    print("time of requests that span swaps over that of others, with 95 % intervals (bootstrap over pairs of rounds)")
    slower = False
    for name in ("end_s", "first_s", "tpot_s"):
        swapped, quiet = (np.array([[getattr(r, name) for r in row] for row in times[kind]]) for kind in (True, False))
        for q in (50, 99):
            found = ratio(swapped, quiet, q)
            slower |= found.low > 1.0 and q == 99
            print(f"  {name:<8} p{q}: {found}   {1e3 * np.nanpercentile(quiet, q):.1f} ms without")
    return int(slower)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="static:2", help="rule that is swapped for itself (default: %(default)s)")
    parser.add_argument("--pairs", type=whole, default=12, help="pairs of rounds (default: %(default)s)")
    parser.add_argument("--streams", type=whole, default=32, help="requests at once (default: %(default)s)")
    parser.add_argument("--tokens", type=whole, default=48, help="of each answer (default: %(default)s)")
    parser.add_argument("--every", type=positive, default=0.25, help="seconds between two (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of rounds (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
