"""One training run: PPO over the environments, evaluated as it goes, leaving a policy file and what resuming needs.

The decision: what a run leaves for a server (the policy file and its card, of the best weights so far) and what it
leaves for itself (`faser.train.resume`) are apart: DIR/ppo.pt and DIR/resume/.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import CallbackList
from stable_baselines3.common.logger import HParam, configure
from stable_baselines3.common.utils import LinearSchedule
from stable_baselines3.common.vec_env import VecEnv

from faser.core import Capabilities, Floats, Policy
from faser.costs import StepCost
from faser.policies import make_policy
from faser.policies.learned import LearnedPolicy
from faser.policies.policy_file import PolicyFile
from faser.train import resume
from faser.train.callbacks import Evaluations, Metrics, Progress, StopOnInterrupt
from faser.train.evaluation import REPORT, SELECTION, Scores, evaluate
from faser.train.export import export, rows
from faser.train.network import Actor
from faser.train.presets import Settings
from faser.train.slot_policy import SlotPolicy

COMPARED = ("static:1", "static:2", "static:3", "static:4", "static:5", "static:6", "static:7", "schedule", "goodput")
"""Policies beside the learned one and the rule in the final table; `none` is 1 by definition."""

REPORT_SEEDS = 4


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was asked for. directory: of `resume/`; out: the policy file; logdir: TensorBoard's."""

    models: list[str]
    seed: int
    directory: Path
    out: Path
    logdir: Path
    settings: Settings = field(default_factory=Settings)
    capabilities: Capabilities = field(default_factory=Capabilities)

    @property
    def command(self) -> str:
        """The command that repeats this run."""
        s = self.settings
        models = shlex.join(self.models)
        return f"python train/ppo.py --model {models} --timesteps {s.timesteps} --seed {self.seed} --envs {s.envs}"

    def plain(self) -> dict[str, Any]:
        """As plain values, for `restored`."""
        paths = {name: str(getattr(self, name)) for name in ("directory", "out", "logdir")}
        settings, capabilities = asdict(self.settings), asdict(self.capabilities)
        return {"models": self.models, "seed": self.seed, **paths, "settings": settings, "capabilities": capabilities}

    @classmethod
    def restored(cls, plain: dict[str, Any]) -> Run:
        """The inverse of `plain`."""
        paths = {name: Path(plain[name]) for name in ("directory", "out", "logdir")}
        settings, capabilities = Settings(**plain["settings"]), Capabilities(**plain["capabilities"])
        return cls(models=plain["models"], seed=plain["seed"], **paths, settings=settings, capabilities=capabilities)

    def network(self) -> dict[str, Any]:
        """Arguments of `Actor`."""
        s, c = self.settings, self.capabilities
        return {
            "hidden": s.hidden,
            "sharpness": s.sharpness,
            "depth_sharpness": s.depth_sharpness,
            "max_depth": c.max_depth,
            "max_frontier": c.max_frontier,
            "seed": self.seed,
        }

    def policy(self, arrays: dict[str, Floats]) -> LearnedPolicy:
        """The policy that a server would run."""
        c = self.capabilities
        return LearnedPolicy(PolicyFile(arrays=arrays, max_depth=c.max_depth, max_frontier=c.max_frontier))

    def evaluate(self, arrays: dict[str, Floats]) -> Scores:
        """Scores on the arrivals by which the best weights are chosen."""
        policy = self.policy(arrays)
        seeds = self.settings.evaluation_seeds
        return evaluate(lambda _: policy, self.models, first_seed=SELECTION, seeds=seeds)

    def report(self, arrays: dict[str, Floats]) -> dict[str, Scores]:
        """Scores of `arrays`, the untrained rule and COMPARED, on arrivals that chose nothing."""
        learned, rule = self.policy(arrays), self.policy(Actor(**self.network()).arrays())
        makers: dict[str, Callable[[StepCost], Policy]] = {"learned": lambda _: learned, "rule": lambda _: rule}
        makers |= {name: partial(make_policy, name) for name in COMPARED}
        return {
            name: evaluate(make, self.models, first_seed=REPORT, seeds=REPORT_SEEDS) for name, make in makers.items()
        }


def build(run: Run, env: VecEnv) -> PPO:
    """An untrained PPO over `env`, whose spaces are those of `faser/Speculation-v0`."""
    s = run.settings
    return PPO(
        SlotPolicy,
        env,
        n_steps=s.rollout_steps,
        batch_size=min(s.batch_size, s.rollout_steps * env.num_envs),
        n_epochs=s.epochs,
        learning_rate=LinearSchedule(s.learning_rate, s.learning_rate / 10, 1.0),
        gamma=s.gamma,
        gae_lambda=s.gae_lambda,
        clip_range=s.clip_range,
        ent_coef=s.entropy,
        target_kl=s.target_kl,
        seed=run.seed,
        device="cpu",
        policy_kwargs={"actor": run.network(), "slot_power": s.slot_power},
    )


def train(run: Run, model: PPO, state: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Train `model` to the end of `run`: its evaluation, or None after Ctrl-C. `state`: {}, or a resumed run's."""
    best: dict[str, Any] = state.get("best", {})

    def write(evaluation: list[dict[str, Any]]) -> None:
        c = run.capabilities
        training = {
            "command": run.command,
            "models": run.models,
            "seed": run.seed,
            "timesteps": model.num_timesteps,
            "best_at": best["step"],
            "settings": asdict(run.settings),
        }
        export(
            best["arrays"],
            run.out,
            max_depth=c.max_depth,
            max_frontier=c.max_frontier,
            training=training,
            evaluation=evaluation,
        )

    def on_best(arrays: dict[str, Floats], step: int) -> None:
        best.update(arrays=arrays, step=step)
        write([])

    total = run.settings.timesteps
    every = max(total // max(run.settings.evaluations, 1), 1)
    evaluations = Evaluations(run.evaluate, on_best, every=every, state=state.get("evaluations", {}))
    model.set_logger(configure(str(run.logdir), ["tensorboard"]))
    if not state:
        model.logger.record("hparams", _hparams(run))
    with StopOnInterrupt() as interrupt:
        callbacks = CallbackList([evaluations, Metrics(), Progress(evaluations, total), interrupt])
        model.learn(max(total - model.num_timesteps, 0), callback=callbacks, reset_num_timesteps=False)
        model.logger.dump(model.num_timesteps)
        kept = {"run": run.plain(), "best": best, "evaluations": evaluations.state}
        resume.save(run.directory / "resume", model, kept)
        if interrupt.stopped:
            return None
    evaluation = rows(run.report(best["arrays"]))
    write(evaluation)
    return evaluation


def _hparams(run: Run) -> HParam:
    """TensorBoard's one row for this run."""
    settings = {k: v for k, v in asdict(run.settings).items() if v is not None}
    metrics: dict[str, float] = {"eval/time_in_system_to_none": 0, "eval/time_in_system_to_none_best": 0}
    return HParam({"model": " ".join(run.models), "seed": run.seed, **settings}, metrics)
