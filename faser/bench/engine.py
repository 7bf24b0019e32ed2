"""`faser bench engine`: what a step takes in vLLM as it is, and in FASER at the same fixed length.

    faser bench engine --target smollm2 --batches 1 8 --depths 0 4
    faser bench engine --target llama2-13b --load-format dummy --batches 1 16 64 256 --depths 0 2 4 7 --out engine.csv

Both engines run side by side on one device and are timed in turn, batch by batch, so a machine that drifts slows both.
vLLM has the model runner that FASER builds on (V1), its own CUDA graphs, asynchronous scheduling where it has that, and
one engine for every depth, since its length is fixed; depth 0 is without a draft. On a CPU both run eagerly.
With `--async-scheduling` FASER's has that, too. What is timed is the time from one step's tokens to the next one's, of
requests that decode; how many tokens are accepted plays no part in it.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from faser.bench.arguments import (
    MOST_BATCH,
    add_engine,
    between,
    draft_of,
    refuse_async_scheduling,
    refuse_place,
    stoppable,
)
from faser.controller import ControllerConfig
from faser.core import MAX_DEPTH
from faser.costs import known_profiles
from faser.models import prepare
from faser.serving.settings import Settings

if TYPE_CHECKING:
    from faser.serving.offline import OfflineEngine

WARM, STEPS = 8, 24
"""Steps of all requests before any counts, and that are timed each time."""
WAIT = 4
"""Steps for each request to begin in."""
PATIENT = ControllerConfig(deadline_ms=1000.0)
"""A step must have the length that is asked for, however busy the machine."""
MEMORY = 0.4
"""Of the device, for each of the two engines."""


@dataclass(frozen=True, slots=True)
class Cell:
    """ms of a step of `batch` requests: medians. ratio: FASER's over vLLM's, median of the pairs'."""

    batch: int
    depth: int
    vllm_ms: float
    faser_ms: float
    ratio: float


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status; 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    return stoppable("faser bench engine", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    try:
        if args.out is not None:
            refuse_place("--out", args.out)
        refuse_async_scheduling(args)
        pair = prepare(args.target, progress=True)
        draft = draft_of(pair, args.draft)
    except (ValueError, OSError) as error:
        print(f"faser bench engine: {error}", file=sys.stderr)
        return 2
    try:
        _report(_measure(str(pair.target), draft, args), args.out)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"faser bench engine: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def _report(cells: Iterable[Cell], out: Path | None) -> None:
    """Print each cell once it is known, and write it to `out`."""
    with out.open("w", encoding="utf-8", newline="") if out is not None else nullcontext() as file:
        table = csv.DictWriter(file, [field.name for field in fields(Cell)]) if file is not None else None
        if table is not None:
            table.writeheader()
        print(f"{'batch':>5} {'depth':>5} {'vLLM, ms':>9} {'FASER, ms':>10} {'ratio':>6}")
        for c in cells:
            print(f"{c.batch:5d} {c.depth:5d} {c.vllm_ms:9.2f} {c.faser_ms:10.2f} {c.ratio:6.3f}", flush=True)
            if table is not None and file is not None:
                table.writerow(asdict(c))
                file.flush()


def _measure(target: str, draft: str, args: argparse.Namespace) -> Iterator[Cell]:
    """Each batch at each depth."""
    from faser.serving.offline import OfflineEngine

    common = {"max_batch": max(args.batches), "load_format": args.load_format, "memory": MEMORY}
    settings = Settings(policy="static:0", profile=known_profiles()[0], controller=PATIENT)  # any: lengths are fixed
    with closing(OfflineEngine(target, draft, settings, asynchronous=args.async_scheduling, **common)) as ours:
        for depth in args.depths:
            with closing(OfflineEngine(target, draft, None, depth=depth, **common)) as theirs:
                ours.swap(f"static:{depth}")
                for batch in args.batches:
                    pairs = []
                    for i in range(args.pairs):  # each is first in turn
                        ms = {e: time_steps(e, batch, args.context) for e in ((theirs, ours), (ours, theirs))[i % 2]}
                        pairs.append((ms[theirs], ms[ours]))
                    yield summarise(batch, depth, pairs)


def summarise(batch: int, depth: int, pairs: Sequence[Sequence[float]]) -> Cell:
    """Of pairs of (vLLM's, FASER's) ms."""
    theirs, ours = zip(*pairs, strict=True)
    return Cell(batch, depth, median(theirs), median(ours), median(o / t for t, o in pairs))


def time_steps(engine: OfflineEngine, batch: int, context: int) -> float:
    """Median ms of a step of `batch` decoding requests of `context` prompt tokens. ValueError: they do not fit."""
    rng = np.random.default_rng(0)
    for _ in range(batch):
        engine.add([int(token) for token in rng.integers(10, 1000, context)], engine.longest - context)
    ends: list[float] = []  # of steps of all of them
    for _ in range(WAIT * batch + WARM + STEPS):
        if engine.step() == batch:
            ends.append(time.perf_counter())
        if len(ends) > WARM + STEPS:
            break
    else:
        raise ValueError(f"{batch} requests of {context} prompt tokens do not fit into the KV cache at once")
    engine.drop_all()
    return 1e3 * float(np.median(np.diff(ends[WARM:])))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="faser bench engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine(parser)
    parser.add_argument("--batches", nargs="+", type=between(1, MOST_BATCH), default=[1, 8, 32], help="%(default)s")
    parser.add_argument("--depths", nargs="+", type=between(0, MAX_DEPTH), default=[0, 2, 4], help="%(default)s")
    parser.add_argument("--context", type=between(1, 1024), default=64, help="prompt tokens (default: %(default)s)")
    parser.add_argument("--pairs", type=between(1, 100), default=3, help="timings of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="a CSV file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
