"""`python -m faser.bench.decide [--policy FILE]`: how long the learned policy takes to decide, on one core.

It runs on the serving path before every engine step, so what counts is the tail: garbage collection is off and BLAS has
one thread (set in the environment of a fresh interpreter, the only place where every BLAS reads it).
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path

import numpy as np

from faser.checkpoints import SHIPPED_POLICY
from faser.core import LOAD_FEATURES, MAX_DEPTH, REQUEST_FEATURES, Observation, Policy

SIZES = (1, 16, 64, 256)
DECISIONS = 5_000
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM", "BLIS")}


def random_observation(rng: np.random.Generator, running: int) -> Observation:
    """A valid observation of `running` requests with uniform confidences, acceptances and load."""
    requests = rng.random((running, len(REQUEST_FEATURES)), np.float32)
    drafted = rng.integers(0, MAX_DEPTH + 1, running)
    confidence = requests[:, :MAX_DEPTH]
    confidence[np.arange(MAX_DEPTH) >= drafted[:, None]] = 0.0
    requests[:, MAX_DEPTH : 2 * MAX_DEPTH] = np.cumprod(confidence, axis=1)
    requests[:, REQUEST_FEATURES.index("drafted")] = drafted / MAX_DEPTH
    return Observation(requests, rng.random(len(LOAD_FEATURES), np.float32))


def time_decisions(policy: Policy, running: int, decisions: int, seed: int = 0) -> np.ndarray:
    """[decisions] microseconds that `policy` takes to decide for `running` requests, over 32 observations in turn."""
    rng = np.random.default_rng(seed)
    observations = [random_observation(rng, running) for _ in range(32)]
    for observation in observations * 3:
        policy.decide(observation)
    took = np.empty(decisions)
    gc.collect()
    gc.disable()
    try:
        for i in range(decisions):
            observation = observations[i % 32]
            start = time.perf_counter_ns()
            policy.decide(observation)
            took[i] = (time.perf_counter_ns() - start) / 1e3
    finally:
        gc.enable()
    return took


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m faser.bench.decide", description=__doc__.split("\n")[0])
    parser.add_argument("--policy", type=Path, default=SHIPPED_POLICY, help="policy file (default: the shipped one)")
    parser.add_argument("--decisions", type=int, default=DECISIONS, help="decisions per size (default: %(default)s)")
    args = parser.parse_args(argv)
    if args.decisions < 1:
        parser.error(f"--decisions is {args.decisions}; allowed: 1 or more")
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        os.environ.update(ONE_THREAD)
        os.execv(sys.executable, [sys.executable, "-m", "faser.bench.decide", *(argv or sys.argv[1:])])
    from faser.policies import learned

    try:
        policy = learned.load(args.policy)
    except learned.PolicyFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.policy}, {args.decisions} decisions each, 1 thread\nrequests  median us  p99 us")
    for running in SIZES:
        took = time_decisions(policy, running, args.decisions)
        print(f"{running:8d}  {np.median(took):9.1f}  {np.percentile(took, 99):6.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
