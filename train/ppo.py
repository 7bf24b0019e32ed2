"""`python train/ppo.py --model llama2-13b`: train a speculation policy by PPO and write its policy file."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from faser.models import short_name
from faser.train import resume
from faser.train.arguments import positive
from faser.train.evaluation import world
from faser.train.export import table
from faser.train.presets import PRESETS, Settings
from faser.train.run import Run, build, train
from faser.train.worlds import make_worlds

THREADS = 1
"""Of torch. The network is too small to share: 1,460 steps a second with one, 940 with two."""

STEPS_PER_MINUTE, REPORT_MINUTES = 90_000, 0.8
"""About what two cores do in training, evaluations included, and how long the last evaluation takes per model."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    defaults = Settings()
    p = argparse.ArgumentParser(prog="train/ppo.py", description=(__doc__ or "").split(": ", 1)[-1])
    names = ", ".join(PRESETS)
    p.add_argument(
        "--model", nargs="+", metavar="MODEL", help=f"one or more of {names}, or PROFILE,TAPE, each a name or a file"
    )
    p.add_argument(
        "--timesteps", type=positive, default=None, help=f"environment steps (default: {defaults.timesteps})"
    )
    p.add_argument("--seed", type=int, default=0, help="of everything random (default: 0)")
    p.add_argument("--out", type=Path, help="policy file (default: runs/MODEL-SEED/ppo.pt)")
    p.add_argument(
        "--envs", type=positive, default=defaults.envs, help="environments side by side (default: %(default)s)"
    )
    p.add_argument("--resume", type=Path, metavar="DIR", help="go on with the run that was stopped in this directory")
    p.add_argument("--logdir", type=Path, help="TensorBoard directory (default: beside the policy file, tensorboard/)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 trained, 130 stopped by Ctrl-C, 2 a mistake in the command."""
    p = parser()
    args = p.parse_args(argv)
    if bool(args.model) == bool(args.resume):
        p.error("one of --model and --resume is needed, and not both")
    torch.set_num_threads(THREADS)
    try:
        run, state = _resumed(args) if args.resume else (_new(args), {})
        for name in run.models:
            world(name)  # fail now if a profile or a tape is missing
        _check_writable(run.out)
        env = make_worlds(run.models, run.settings.envs)
        model = resume.load_model(run.directory / "resume", env, state) if state else build(run, env)
    except (resume.ResumeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    left = max(run.settings.timesteps - model.num_timesteps, 0)
    minutes = left / STEPS_PER_MINUTE + REPORT_MINUTES * len(run.models)
    print(f"{left} steps over {', '.join(run.models)}: about {minutes:.0f} minutes on 2 cores")
    print(f"policy file: {run.out}\ncurves: tensorboard --logdir {run.logdir}", flush=True)
    evaluation = train(run, model, state)
    env.close()
    if evaluation is None:
        print(f"stopped at step {model.num_timesteps}; best policy so far: {run.out}")
        print(f"resume with: python train/ppo.py --resume {shlex.quote(str(run.directory))}")
        return 130
    print(
        f"mean time in system over that without speculation, unseen arrivals:\n{table(evaluation)}\nwritten: {run.out}"
    )
    return 0


def _check_writable(out: Path) -> None:
    """ValueError or OSError now rather than at the end of a training."""
    if out.is_dir() or not out.name:
        raise ValueError(f"--out is {str(out)!r}, a folder; allowed: a file to write")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out.parent):
        pass


def _new(args: argparse.Namespace) -> Run:
    models = list(dict.fromkeys(args.model))
    name = f"{'+'.join(map(short_name, models))}-{args.seed}"
    directory = args.out.parent if args.out else Path("runs") / name
    settings = replace(Settings(), envs=max(args.envs, len(models)))
    return Run(
        models=models,
        seed=args.seed,
        directory=directory,
        out=args.out or directory / "ppo.pt",
        logdir=args.logdir or directory / "tensorboard",
        settings=replace(settings, timesteps=args.timesteps or settings.timesteps),
    )


def _resumed(args: argparse.Namespace) -> tuple[Run, dict[str, Any]]:
    state = resume.load_state(args.resume / "resume")
    run = replace(Run.restored(state["run"]), directory=args.resume)
    if args.timesteps:
        run = replace(run, settings=replace(run.settings, timesteps=args.timesteps))
    return run, state


if __name__ == "__main__":
    raise SystemExit(main())
