"""`python -m faser.bench.decide [--policy FILE]`: how long the learned policy takes to decide, on one core.

It runs on the serving path before every engine step, so what counts is the tail: garbage collection is off and BLAS has
one thread (set in the environment of a fresh interpreter, the only place where every BLAS reads it).

`step` is all that FASER's loop adds to an engine's step, that decision and its thread in it, while the GPU waits:
verdicts, drafts, the observation. `log` is what it does while the GPU works: metrics, history and a line of the log.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from faser.acceptance import load_predictor
from faser.bench.arguments import between
from faser.checkpoints import SHIPPED_POLICY
from faser.controller import Controller, ControllerConfig
from faser.core import LOAD_FEATURES, MAX_DEPTH, REQUEST_FEATURES, Capabilities, Observation, Policy
from faser.costs import load_profile
from faser.serving.loop import Newcomer, Rows, SpeculationLoop
from faser.serving.step_log import StepLog

SIZES = (1, 16, 64, 256)
DECISIONS, MOST_DECISIONS = 5_000, 1_000_000
PROFILE, PREDICTOR = "h200-llama2-13b", "smollm2"
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


def time_steps(policy: Policy, running: int, steps: int, log: Path, seed: int = 0) -> np.ndarray:
    """[2, steps] microseconds that a live loop takes for `running` requests: before a step's start, and after it."""
    rng = np.random.default_rng(seed)
    controller = Controller(policy, Capabilities(), ControllerConfig(deadline_ms=1000.0))
    predictor = load_predictor(PREDICTOR)
    loop = SpeculationLoop(controller, load_profile(PROFILE), capacity=running, log=StepLog(log), predictor=predictor)
    ids = [f"chatcmpl-{i:032x}-0" for i in range(running)]
    context, generated = rng.integers(100, 900, running).tolist(), rng.integers(1, 300, running).tolist()
    confidences = rng.random((16, running, MAX_DEPTH), np.float32)
    drafted, took = [0] * running, np.empty((2, steps))
    for i in range(-50, steps):
        start = time.perf_counter_ns()
        decision = loop.decide(_rows(ids, context, generated, drafted), waiting=3, kv_usage=0.4, prefill_tokens=0)
        decided = time.perf_counter_ns()
        loop.account()
        told = time.perf_counter_ns()
        lengths = np.minimum(decision.lengths, drafted).tolist()
        time.sleep(0.001)  # the GPU works, and the log's thread writes
        verdicts = {name: (n, int(n > 1)) for name, n in zip(ids, lengths, strict=True) if n}
        wrote = dict.fromkeys(ids, (1, True))
        drafted = [decision.draft_depth] * running
        confidence = confidences[i % 16, :, : decision.draft_depth]
        back = time.perf_counter_ns()
        loop.record(verdicts, prefill_tokens=0)
        loop.wrote(wrote)
        if decision.draft_depth:
            loop.draft(_rows(ids, context, generated, drafted), confidence)
        loop.end_of_drafting()
        if i >= 0:
            took[:, i] = (decided - start + time.perf_counter_ns() - back) / 1e3, (told - decided) / 1e3
    loop.close()
    return took


def _rows(ids: list[str], context: list[int], generated: list[int], drafted: list[int]) -> Rows:
    return Rows(ids, context, generated, drafted, lambda i: Newcomer(1000, 0.0, 0.0 if i % 2 else 0.8, excluded=False))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m faser.bench.decide", description=__doc__.split("\n")[0])
    parser.add_argument("--policy", type=Path, default=SHIPPED_POLICY, help="policy file (default: the shipped one)")
    parser.add_argument("--decisions", type=between(1, MOST_DECISIONS), default=DECISIONS, help="of each size")
    args = parser.parse_args(argv)
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        os.environ.update(ONE_THREAD)
        os.execv(sys.executable, [sys.executable, "-m", "faser.bench.decide", *(argv or sys.argv[1:])])
    from faser.policies import learned

    try:
        policy = learned.load(args.policy)
    except learned.PolicyFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.policy}, {args.decisions} decisions each, 1 thread; median and p99 in us")
    print("requests  decision         step            log")
    for running in SIZES:
        took = [time_decisions(policy, running, args.decisions)]
        with tempfile.TemporaryDirectory(prefix="faser-decide-") as scratch:
            took += [*time_steps(policy, running, max(args.decisions // 5, 1), Path(scratch) / "log.jsonl")]
        print(f"{running:8d}" + "".join(f"  {np.median(each):6.0f} {np.percentile(each, 99):6.0f}" for each in took))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
