"""`python train/acceptance.py --tape smollm2 --out FILE`: learn from a tape how likely drafted tokens are accepted.

It fits on one half of the tape's prompts and reports on the other: how good the chances are, what each group of
features is worth, and what the predictor buys in tokens per ms at a profile's costs.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

import torch

from faser.acceptance import Predictor, PredictorError, load_predictor, save
from faser.costs import StepCost, load_profile
from faser.tapes import Tape, load_tape
from faser.train.acceptance_fit import Fit, fit
from faser.train.acceptance_report import BINNED, ablation_table, chances_of, scores_of, scores_table, value_tables
from faser.train.acceptance_samples import samples_of
from faser.train.acceptance_scores import Scores
from faser.train.arguments import positive

LOGISTIC, NETWORK = "logistic", "network"
SEEDS = 1 << 31


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(prog="train/acceptance.py", description=(__doc__ or "").split(": ", 1)[-1])
    p.add_argument("--tape", default="smollm2", help="name or file of a tape (default: %(default)s)")
    p.add_argument("--out", type=Path, help="predictor file to write (default: only report)")
    p.add_argument("--profile", default="h200-llama2-13b", help="whose costs the report takes (default: %(default)s)")
    p.add_argument("--hidden", type=positive, default=Fit().hidden, help="units of the network (default: %(default)s)")
    p.add_argument("--seed", type=int, default=0, help="of the replay and of the fit (default: %(default)s)")
    p.add_argument("--predictor", metavar="NAME", help="report on this one, shipped or a file, and fit no other")
    p.add_argument("--ablate", action="store_true", help="fit again without each group of features")
    return p


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What the command names, loaded; `given`: the predictor to report on, if one was named."""

    train: Tape
    test: Tape
    cost: StepCost
    given: Predictor | None


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 a mistake in the command."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    torch.set_num_threads(1)  # the network is too small to share
    try:
        inputs = _inputs(args)
        predictor, found = _report(inputs, Fit(hidden=args.hidden, seed=args.seed), ablate=args.ablate)
        if args.out:
            _write(args.out, argv, inputs, predictor, found)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        return 130
    return 0


def _write(out: Path, argv: list[str], inputs: _Inputs, predictor: Predictor, found: Scores) -> None:
    """The predictor to `out`, with how it was made and its scores."""
    trained = {
        "command": shlex.join(["python", "train/acceptance.py", *argv]),
        "tape": inputs.train.source,
        "versions": {name: metadata.version(name) for name in ("numpy", "torch")},
        "log_loss": round(found.log_loss, 5),
        "calibration_error": round(found.calibration_error, 5),
    }
    save(Predictor(predictor.arrays, target=predictor.target, draft=predictor.draft, trained=trained), out)
    print(f"\nwritten: {out}")


def _inputs(args: argparse.Namespace) -> _Inputs:
    """ValueError for what can be known to be wrong before anything is fitted."""
    if args.out and (args.out.is_dir() or not args.out.parent.is_dir()):
        raise ValueError(f"--out is {str(args.out)!r}; allowed: a file in a folder that exists")
    if args.out and args.predictor:
        raise ValueError("--predictor reports on one that is there and --out writes a new one; give one of the two")
    if args.out and args.out.exists():
        try:
            load_predictor(args.out)
        except PredictorError:
            raise ValueError(f"--out is {str(args.out)!r}, which is there and no predictor; give another") from None
    if not 0 <= args.seed < SEEDS:
        raise ValueError(f"--seed is {args.seed}; allowed: 0 to {SEEDS - 1}")
    tape = load_tape(args.tape)
    given = load_predictor(args.predictor) if args.predictor else None
    if given is not None and (given.target, given.draft) != (tape.target, tape.draft):
        print(f"warning: --predictor {args.predictor} learned from other models than those of --tape", file=sys.stderr)
    return _Inputs(train=tape.split("train"), test=tape.split("eval"), cost=load_profile(args.profile), given=given)


def _report(inputs: _Inputs, settings: Fit, *, ablate: bool) -> tuple[Predictor, Scores]:
    """Fit, print all tables; the network, and its scores on the other half."""
    train, test = inputs.train, inputs.test
    learn, check = samples_of(train, seed=settings.seed), samples_of(test, seed=settings.seed + 1)
    print(f"{len(learn)} drafts of {len(train)} requests; reported on {len(check)} drafts of {len(test)} others")
    network = inputs.given or fit(learn, settings, target=train.target, draft=train.draft)
    predictors = {LOGISTIC: fit(learn, replace(settings, hidden=0)), NETWORK: network}
    chances = chances_of(learn, check, predictors)
    print(f"\n{scores_table(check, chances, test.domains)}", flush=True)
    if ablate:
        print(f"\n{ablation_table(learn, check, settings, chances[NETWORK])}", flush=True)
    print(f"\n{value_tables(check, chances, inputs.cost)}")
    return network, scores_of(check, chances[NETWORK], chances[BINNED])


if __name__ == "__main__":
    raise SystemExit(main())
