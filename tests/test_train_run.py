"""Training end to end through the command line: policy file, card, TensorBoard, Ctrl-C and resume, mistakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from faser.bench.decide import random_observation
from faser.costs.step_cost import PROFILES
from faser.policies import learned, policy_file
from faser.train import ppo, presets, resume, run
from faser.train.evaluation import REPORT, SELECTION, evaluate, mean, trace
from faser.train.export import table
from faser.train.network import Batch
from faser.train.presets import Preset, Settings
from faser.train.shaping import StepsSaved
from faser.train.worlds import make_worlds

SCRIPT = Path(__file__).parents[1] / "train" / "ppo.py"
SMALL = Preset(slots=8, load=(0.5, 1.0), evaluated_loads=(0.5, 1.0), least_requests=8)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny engine and evaluation, so that what takes minutes takes seconds."""
    monkeypatch.setitem(presets.PRESETS, "llama2-13b", SMALL)
    monkeypatch.setattr(run, "COMPARED", ("static:1",))
    monkeypatch.setattr(ppo, "Settings", lambda: Settings(envs=2, rollout_steps=64, evaluations=2, evaluation_seeds=1))
    trace.cache_clear()


def events(directory: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def test_training_leaves_a_policy_a_card_and_curves(small: None, tmp_path: Path) -> None:  # noqa: ARG001
    out = tmp_path / "ppo.pt"
    assert ppo.main(["--model", "llama2-13b", "--timesteps", "2000", "--out", str(out), "--seed", "3"]) == 0

    file = policy_file.load(out)
    assert file.training["command"] == "python train/ppo.py --model llama2-13b --timesteps 2000 --seed 3 --envs 2"
    assert file.training["seed"] == 3
    assert file.versions["torch"] == torch.__version__
    assert [row["load"] for row in file.evaluation] == [0.5, 1.0]
    assert all(0 < row[name] < 2 for row in file.evaluation for name in ("learned", "rule", "static:1"))
    policy = learned.load(out)
    assert policy.decide(random_observation(np.random.default_rng(0), 20)).lengths.shape == (20,)
    again = evaluate(lambda _: policy, ["llama2-13b"], first_seed=REPORT, seeds=run.REPORT_SEEDS)
    assert [round(v, 4) for v in again.values()] == [row["learned"] for row in file.evaluation]

    card = out.with_suffix(".md").read_text()
    assert file.training["command"] in card
    assert table(file.evaluation) in card

    curves = events(tmp_path / "tensorboard")
    tags = set(curves.Tags()["scalars"])
    assert {
        "rollout/reward_per_step",
        "train/approx_kl",
        "eval/time_in_system_to_none",
        "eval/time_in_system_to_none_start",
        "eval/time_in_system_to_none_load_0.5",
        "faser/mean_length",
        "faser/depth",
        "faser/step_ms",
        "faser/tokens_per_s",
        "faser/time_in_system_to_none_load_middle",
    } <= tags
    assert "faser/lengths" in curves.Tags()["histograms"]
    assert "_hparams_/session_start_info" in curves.summary_metadata
    scores = [e.value for e in curves.Scalars("eval/time_in_system_to_none")]
    assert len(scores) >= 3
    assert np.isfinite(scores).all()


def test_the_same_seed_trains_the_same_policy(small: None, tmp_path: Path) -> None:  # noqa: ARG001
    files = []
    for name in ("a", "b"):
        out = tmp_path / name / "ppo.pt"
        assert ppo.main(["--model", "llama2-13b", "--timesteps", "256", "--out", str(out)]) == 0
        files.append(policy_file.load(out).arrays)
    for name, array in files[0].items():
        np.testing.assert_array_equal(array, files[1][name])


def test_ctrl_c_saves_and_resuming_goes_on(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: ARG001
    """In this process: the signal comes from the run's own first evaluation after the start."""
    out = tmp_path / "ppo.pt"
    seen: list[int] = []
    original = run.Run.evaluate

    def interrupting(self: run.Run, arrays: dict[str, np.ndarray]) -> dict[tuple[str, float], float]:
        seen.append(1)
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.Run, "evaluate", interrupting)
        before = signal.getsignal(signal.SIGINT)
        assert ppo.main(["--model", "llama2-13b", "--timesteps", "1280", "--out", str(out)]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    printed = capsys.readouterr().out
    assert f"resume with: python train/ppo.py --resume {tmp_path}" in printed
    stopped = resume.load_state(tmp_path / "resume")["step"]
    assert 0 < stopped < 1280
    assert policy_file.load(out).evaluation == []

    assert ppo.main(["--resume", str(tmp_path)]) == 0
    assert f"{1280 - stopped} steps over llama2-13b" in capsys.readouterr().out
    file = policy_file.load(out)
    assert file.training["timesteps"] >= 1280
    assert file.evaluation
    steps = [e.step for e in events(tmp_path / "tensorboard").Scalars("faser/depth")]
    assert steps == sorted(set(steps))
    assert steps[0] < stopped < steps[-1]


def test_ctrl_c_in_the_terminal_ends_the_script_with_130(tmp_path: Path) -> None:
    out = tmp_path / "ppo.pt"
    command = [
        sys.executable,
        str(SCRIPT),
        "--model",
        "llama2-13b",
        "--timesteps",
        "1000000",
        "--envs",
        "1",
        "--out",
        str(out),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        try:
            while not out.exists():  # the first evaluation is through: training runs
                assert script.poll() is None, script.communicate()
                signal.sigtimedwait([], 0.1)
            script.send_signal(signal.SIGINT)
            printed, complaints = script.communicate(timeout=120)
        finally:
            script.kill()
    assert script.returncode == 130, complaints
    assert f"resume with: python train/ppo.py --resume {tmp_path}" in printed
    assert "Traceback" not in complaints
    assert "Ctrl-C again stops at once" in printed + complaints
    assert (tmp_path / "resume" / "state.pt").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "one of --model and --resume is needed"),
        (["--model", "llama2-13b", "--resume", "x"], "and not both"),
        (["--model", "llama2-13b", "--timesteps", "0"], "--timesteps: 0; allowed: a whole number, 1 or more"),
        (["--model", "llama2-13b", "--timesteps", "many"], "--timesteps: many; allowed: a whole number, 1 or more"),
    ],
)
def test_a_mistake_in_the_command_is_one_clear_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        ppo.main(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_pair_that_is_none_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert ppo.main(["--model", "gpt-5"]) == 2
    error = capsys.readouterr().err
    assert "pair is 'gpt-5'; allowed: llama2-13b, mistral-7b, smollm2, or PROFILE,TAPE" in error
    assert error.count("\n") == 1


def test_training_takes_a_profile_and_a_tape_of_ones_own(
    small: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    own = tmp_path / "own.v1.json"
    own.write_bytes((PROFILES / "h200-mistral-7b.json").read_bytes())
    pair = f"{own},smollm2"
    monkeypatch.setitem(presets.PRESETS, pair, SMALL)
    monkeypatch.chdir(tmp_path)
    assert ppo.main(["--model", pair, "--timesteps", "200"]) == 0
    assert policy_file.load(tmp_path / "runs" / "own+smollm2-0" / "ppo.pt").training["models"] == [pair]


def test_nothing_to_resume_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ppo.main(["--resume", str(tmp_path)]) == 2
    assert "holds no stopped run" in capsys.readouterr().err
    (tmp_path / "resume").mkdir()
    (tmp_path / "resume" / "state.pt").write_bytes(b"no")
    assert ppo.main(["--resume", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "is damaged" in error
    assert error.count("\n") == 1


def test_evaluation_arrivals_are_fixed_and_apart(small: None) -> None:  # noqa: ARG001
    a, b = trace("llama2-13b", 0.5, SELECTION), trace("llama2-13b", 0.5, REPORT)
    assert len(a) == SMALL.requests(0.5)
    assert (a.arrival != b.arrival).any()
    trace.cache_clear()
    np.testing.assert_array_equal(a.arrival, trace("llama2-13b", 0.5, SELECTION).arrival)


def test_not_speculating_scores_one(small: None) -> None:  # noqa: ARG001
    from faser.policies import make_policy

    scores = evaluate(lambda cost: make_policy("none", cost), ["llama2-13b"], first_seed=REPORT, seeds=1)
    assert mean(scores) == pytest.approx(1.0)


def test_engines_of_two_sizes_train_one_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(presets.PRESETS, "llama2-13b", SMALL)
    monkeypatch.setitem(presets.PRESETS, "smollm2", replace(SMALL, slots=3))
    worlds = make_worlds(["llama2-13b", "smollm2"], 2)
    seen = worlds.reset()
    assert isinstance(seen, np.ndarray)
    for _ in range(200):
        batch = Batch.of(torch.from_numpy(seen))
        assert batch.slots == 8
        assert not (batch.slot[batch.owner == 1] >= 3).any()
        seen, *_ = worlds.step(np.full((2, 8 + 2), 1))
    for vector in worlds.vectors:  # rewards look places up on a tape of their own
        reward = vector.episodes.reward
        assert isinstance(reward, StepsSaved)
        np.testing.assert_array_equal(reward.tape.match, vector.episodes.tape.match)
    worlds.close()
