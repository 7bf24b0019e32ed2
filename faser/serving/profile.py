"""`faser profile`: measure what steps cost on this machine, through the real engine, and write a profile.

    faser profile --target smollm2 --out faser/costs/profiles/cpu-smollm2.json
    faser profile --target llama2-13b --out h200-llama2-13b.json

A ladder of batch sizes at three contexts, prompts alone and among others; the probe policy holds each length and depth
for some steps, whose median is one grid point. A third of the points is held out for the error that is printed and
recorded; the profile itself is fitted to all. Acceptance does not matter here, so weights may be dummies.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from faser.bench.arguments import (
    MOST_BATCH,
    add_engine,
    draft_of,
    engine_options,
    refuse_async_scheduling,
    refuse_place,
)
from faser.controller import ControllerConfig
from faser.costs import load_profile
from faser.costs.fit import Errors, fit, held_out, save
from faser.costs.plan import HOLD, TEMPERATURES, Visit, estimate_s, plan, prompts_of
from faser.costs.steps import Steps, grid_points
from faser.machine import gpus
from faser.models import prepare
from faser.serving.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from faser.serving.offline import OfflineEngine

POLICY = f"probe:{HOLD}:0"
PATIENT = ControllerConfig(deadline_ms=1000.0, bench_after=1_000_000)
"""A probe that was late would be a step of another length."""
CLOCKS = "clocks.sm,clocks.mem"
CLOCK_EVERY_S = 2.0
GRAPHS = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
PRIORS = "cpu-smollm2", "h200-llama2-13b"
WAIT = 500
"""Steps until all of a batch have begun, at most: a batch that does not fit never does."""


def main(argv: list[str]) -> int:
    """Returns the exit status; 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    try:
        return _profile(args, f"faser profile {' '.join(argv)}")
    except KeyboardInterrupt:
        print("faser profile: stopped; no profile was written", file=sys.stderr)
        return 130


def _profile(args: argparse.Namespace, command: str) -> int:
    try:
        _check(args)
        pair = prepare(args.target, progress=True)
        draft = draft_of(pair, args.draft)
    except (ValueError, OSError) as error:
        print(f"faser profile: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="faser-profile-") as scratch:
        log = args.log or Path(scratch) / "steps.jsonl"
        device, measured = _measure(str(pair.target), draft, log, args)
        try:
            points = grid_points(Steps.read(log))
            said = _write(points, device, {**measured, "command": command}, args)
        except ValueError as error:
            print(f"faser profile: {error}{_keep(log, args, scratch)}", file=sys.stderr)
            return 2
    print(f"{args.out}: {len(points)} grid points; held out: {said}")
    return 0


def _keep(log: Path, args: argparse.Namespace, scratch: str) -> str:
    """Move what took long to measure out of `scratch`, unless it is elsewhere; returns where it is, for people."""
    if not log.is_file():
        return ""
    return f"; the step log is kept: {log if args.log else log.rename(f'{scratch}.jsonl')}"


def run_visits(engine: OfflineEngine, visits: Sequence[Visit], tell: Callable[[Visit], None] = lambda _: None) -> None:
    """Give the engine each of `visits`, in order, of random tokens."""
    rng = np.random.default_rng(0)
    for visit in visits:
        tell(visit)
        for _, temperature in zip(range(visit.batch), cycle(TEMPERATURES), strict=False):
            engine.add(_tokens(rng, visit.context), engine.longest - visit.context, temperature=temperature)
        steps = 0
        for _ in range(WAIT + 3 * visit.steps):
            for prompt in prompts_of(visit, engine.longest) if visit.batch == 0 or steps else ():
                engine.add(_tokens(rng, prompt), 1)
            wrote = engine.step()
            steps += wrote > 0 and wrote >= visit.batch  # until all have begun, nothing counts
            if steps == visit.steps or (visit.batch and not engine.busy):
                break
        engine.drop_all()


def _measure(target: str, draft: str, log: Path, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Run the grid, writing every step to `log`; returns the device's name and what to record of it all."""
    from faser.serving.offline import OfflineEngine

    settings = Settings(policy=POLICY, profile=args.prior, log=str(log.resolve()), controller=PATIENT)
    options = {"cudagraph_mode": args.cudagraph_mode, **engine_options(args)}
    engine = OfflineEngine(target, draft, settings, max_batch=args.max_batch, **options)
    try:
        room = {"longest": engine.longest, "kv_tokens": engine.kv_tokens, "budget": engine.budget}
        visits = plan(max_batch=args.max_batch, quick=args.quick, **room)
        expected = estimate_s(visits, load_profile(args.prior))
        print(f"{len(visits)} visits; about {expected:.0f} s if steps are as in profile {args.prior}", file=sys.stderr)
        with _clocks(engine.cpu) as clocks:
            run_visits(engine, visits, _teller(len(visits)))
        return engine.device, {"date": f"{datetime.now(UTC):%Y-%m-%d}", **engine.describe(), "clocks": clocks}
    finally:
        engine.close()


def _write(points: Steps, device: str, measured: dict[str, Any], args: argparse.Namespace) -> Errors:
    """Fit, and write the profile; returns the errors on the held-out points. ValueError: too few, or no room."""
    found = held_out(points)
    dummy = "dummy weights, so times are real and acceptances are not; " if args.load_format == "dummy" else ""
    source = f"{dummy}{len(points)} grid points; held out: {found}"
    cost = fit(points, name=args.name or args.out.stem, device=device, source=source)
    rows = [[round(float(value), 3) for value in point] for point in points.table()]
    table = {"columns": list(Steps.__slots__), "rows": rows}
    held = {key: round(value, 4) for key, value in asdict(found).items()}
    try:
        save(replace(cost, measured={**measured, "held_out": held, "points": table}), args.out)
    except OSError as error:
        raise ValueError(f"--out is {str(args.out)!r}, which cannot be written: {error.strerror}") from None
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="faser profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine(parser)
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--name", help="the profile's name (default: that of the file)")
    parser.add_argument("--max-batch", type=int, default=256, help="largest batch of the ladder (default: %(default)s)")
    parser.add_argument("--cudagraph-mode", choices=GRAPHS, help="vLLM's, on a GPU (default: as faser serve)")
    parser.add_argument("--quick", action="store_true", help="a dozen points, to see that it works")
    parser.add_argument("--log", type=Path, help="keep the step log here")
    parser.add_argument(
        "--prior",
        help=f"profile from which the duration is estimated (default: {PRIORS[1]}, without a GPU {PRIORS[0]})",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    """ValueError: an option that cannot be used, before anything is started."""
    if not 1 <= args.max_batch <= MOST_BATCH:
        raise ValueError(f"--max-batch is {args.max_batch}; allowed: 1 to {MOST_BATCH}")
    refuse_async_scheduling(args)
    args.prior = args.prior or PRIORS[bool(gpus())]
    load_profile(args.prior)
    for flag, path in (("--out", args.out), ("--log", args.log)):
        if path is not None:
            refuse_place(flag, path)
    if args.log is not None and args.log.exists() and args.log.stat().st_size:
        raise ValueError(f"--log is {str(args.log)!r}, which holds something already")
    if args.log is not None and args.log.resolve() == args.out.resolve():
        raise ValueError(f"--log and --out are both {str(args.out)!r}; allowed: two files")


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    return [int(token) for token in rng.integers(10, 1000, count)]


def _teller(total: int) -> Callable[[Visit], None]:
    """Says which visit begins, on stderr; on a terminal in one line that is written over."""
    count = iter(range(1, total + 1))
    before, after = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")

    def tell(visit: Visit) -> None:
        what = f"batch {visit.batch}, context {visit.context}, prompt {visit.prompt}"
        print(f"{before}visit {next(count)} of {total}: {what}", end=after, file=sys.stderr, flush=True)

    return tell


@contextmanager
def _clocks(cpu: bool) -> Iterator[dict[str, Any]]:
    """A dictionary that holds the GPU's clocks, once left: MHz as [least, middle, most] of one look every 2 s."""
    clocks: dict[str, Any] = {}
    if cpu:
        yield clocks
        return
    seen: list[list[int]] = []
    done = Event()
    watcher = Thread(target=_watch, args=(seen, done), daemon=True)
    watcher.start()
    try:
        yield clocks
    finally:
        done.set()
        watcher.join()
        for name, values in zip(("sm_mhz", "memory_mhz"), zip(*seen, strict=True), strict=False):
            clocks[name] = [min(values), int(statistics.median(values)), max(values)]


def _watch(seen: list[list[int]], done: Event) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    query = ["nvidia-smi", f"--id={visible}", f"--query-gpu={CLOCKS}", "--format=csv,noheader,nounits"]
    while not done.wait(CLOCK_EVERY_S):
        try:
            found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split(",")
        except OSError:
            return  # no such tool: the profile has no clocks
        if len(found) == 2 and all(value.strip().isdecimal() for value in found):
            seen.append([int(value) for value in found])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
