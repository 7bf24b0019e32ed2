"""The timeline adds up what steps say, in bounded memory, and is a picture as Gymnasium's tools expect it."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest

import faser.envs  # noqa: F401  # registers the environment
from faser.core import MAX_DEPTH
from faser.envs import timeline
from faser.envs.speculation import SpeculationEnv
from faser.envs.timeline import BINS, FIRST_BIN_S, HEIGHT, LENGTHS, RUNNING, SECONDS, TOKENS, WIDTH, Timeline

SMALL: dict[str, Any] = {"slots": 8, "requests": 12, "acceptance": 0.7, "load": (0.3, 1.5)}


def info(time: float, step_ms: float = 0.0, **changes: Any) -> dict[str, Any]:
    lengths = np.bincount([2, 2, 0], minlength=MAX_DEPTH + 1)
    rest = {"load": 0.5, "running": 3, "waiting": 1, "tokens": 6, "depth": 4, "lengths": lengths}
    return {"time": time, "step_ms": step_ms, **rest, **changes}


def test_a_step_is_spread_over_the_bins_that_it_lasted() -> None:
    line = Timeline()
    line.start(info(100.0, running=2, waiting=0))
    line.add(info(100.0 + 1.5 * FIRST_BIN_S, 1.5 * FIRST_BIN_S * 1e3))
    assert line.sums[TOKENS, :3].tolist() == pytest.approx([4.0, 2.0, 0.0])
    assert line.sums[SECONDS, :2].tolist() == pytest.approx([FIRST_BIN_S, FIRST_BIN_S / 2])
    means = line.means()
    assert means["edges"].tolist() == [0.0, FIRST_BIN_S, 2 * FIRST_BIN_S]
    assert means["running"].tolist() == pytest.approx([2.0, 2.0])  # what ran in the step, not after it
    assert means["waiting"].tolist() == [0.0, 0.0]
    assert means["depth"].tolist() == pytest.approx([4.0, 4.0])
    assert means["tokens_per_s"].tolist() == pytest.approx([4 / FIRST_BIN_S] * 2)
    assert means["shares"][:, 0].tolist() == pytest.approx([1 / 3, 0, 2 / 3, 0, 0, 0, 0, 0])


def test_idle_time_counts_as_no_load_and_as_no_speed() -> None:
    line = Timeline()
    line.start(info(0.0))
    line.add(info(4.0 * FIRST_BIN_S, FIRST_BIN_S * 500.0))  # half a bin of work, then nobody until bin 4
    means = line.means()
    assert means["running"].tolist() == pytest.approx([1.5, 0.0, 0.0, 0.0])
    assert means["tokens_per_s"][0] == pytest.approx(6 / (FIRST_BIN_S / 2))
    assert np.isnan(means["tokens_per_s"][1:]).all()


def test_a_long_episode_keeps_its_sums_and_its_memory() -> None:
    line = Timeline()
    line.start(info(0.0))
    rng, now, tokens, shape = np.random.default_rng(0), 0.0, 0, line.sums.shape
    for _ in range(3000):
        seconds = float(rng.uniform(0.005, 0.05))
        now += seconds
        tokens += 6
        line.add(info(now, seconds * 1e3))
    assert line.sums.shape == shape
    assert line.sums[TOKENS].sum() == pytest.approx(tokens)
    assert line.sums[SECONDS].sum() == pytest.approx(now)
    assert line.sums[RUNNING].sum() == pytest.approx(3 * now)
    assert line.sums[LENGTHS:].sum(axis=1)[:3].tolist() == pytest.approx([3000, 0, 6000])
    assert BINS * line.width / 2 < now <= BINS * line.width
    used = line.means()["edges"]
    assert BINS / 2 <= len(used) - 1 <= BINS
    assert line.means()["running"] == pytest.approx(np.full(len(used) - 1, 3.0))


def test_one_step_longer_than_all_bins_is_drawn_whole() -> None:
    line = Timeline()
    line.start(info(0.0))
    line.add(info(1000.0, 1e6))
    assert line.sums[TOKENS].sum() == pytest.approx(6.0)


def play(env: Any, steps: int, seed: int = 0) -> list[Any]:
    env.reset(seed=seed)
    env.action_space.seed(seed)
    return [env.step(env.action_space.sample()) for _ in range(steps)]


def test_the_sums_are_those_of_the_episodes_infos() -> None:
    env = SpeculationEnv(render_mode="rgb_array", **SMALL)
    infos = [step[4] for step in play(env, 40)]
    line = env._timeline
    assert line is not None
    assert line.sums[TOKENS].sum() == pytest.approx(sum(i["tokens"] for i in infos))
    assert line.sums[SECONDS].sum() == pytest.approx(sum(i["step_ms"] for i in infos) / 1e3)
    assert line.sums[LENGTHS:].sum(axis=1) == pytest.approx(sum(i["lengths"] for i in infos))
    env.reset()
    assert not line.sums.any()


def test_a_picture_is_rgb_of_one_size_and_follows_the_episode() -> None:
    env = gymnasium.make("faser/Speculation-v0", render_mode="rgb_array", **SMALL)
    env.reset(seed=0)
    pictures: list[Any] = [env.render()]
    for _ in range(2):
        for _ in range(10):
            env.step(env.action_space.sample())
        pictures += [env.render()]
    for picture in pictures:
        assert (picture.shape, picture.dtype) == ((HEIGHT, WIDTH, 3), np.uint8)
    assert not any(np.array_equal(a, b) for a, b in pairwise(pictures))
    again: Any = env.render()
    assert np.array_equal(pictures[-1], again)  # looking changes nothing
    assert not np.shares_memory(pictures[-1], again)
    env.close()


def test_gymnasium_collects_its_frames() -> None:
    env = gymnasium.make("faser/Speculation-v0", render_mode="rgb_array_list", **SMALL)
    play(env, 3)
    frames: Any = env.render()
    assert [f.shape for f in frames] == [(HEIGHT, WIDTH, 3)] * 4
    assert SpeculationEnv.metadata == {"render_modes": ["rgb_array"], "render_fps": 30}
    env.close()


def test_rendering_changes_nothing_of_an_episode() -> None:
    seen, plain = (play(SpeculationEnv(render_mode=mode, **SMALL), 25) for mode in ("rgb_array", None))
    for a, b in zip(seen, plain, strict=True):
        assert np.array_equal(a[0], b[0])
        assert a[1] == b[1]


def test_without_a_mode_there_is_no_timeline_and_render_says_so() -> None:
    env = SpeculationEnv(**SMALL)
    env.reset(seed=0)
    assert env._timeline is None
    with pytest.warns(UserWarning, match="render_mode='rgb_array'"):
        assert env.render() is None


def test_a_wrong_mode_is_named_with_what_is_allowed() -> None:
    with pytest.raises(ValueError, match=re.escape("render_mode is 'ansi'; allowed: None, 'rgb_array'")):
        SpeculationEnv(render_mode="ansi", **SMALL)
    with pytest.raises(ValueError, match="render_mode is 'rgb_array'; allowed: None in a vector"):
        gymnasium.make_vec("faser/Speculation-v0", render_mode="rgb_array", **SMALL)
    with pytest.raises(gymnasium.error.ResetNeeded):
        SpeculationEnv(render_mode="rgb_array", **SMALL).render()


def test_a_missing_matplotlib_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "find_spec", lambda _: None)
    SpeculationEnv(**SMALL)
    with pytest.raises(ImportError, match=re.escape("needs matplotlib; install faser-serve[bench]")):
        SpeculationEnv(render_mode="rgb_array", **SMALL)


def test_an_environment_without_a_mode_does_not_import_matplotlib() -> None:
    script = "import sys; from faser.envs.speculation import SpeculationEnv as E; E(slots=2, requests=2).reset(seed=0)"
    subprocess.run([sys.executable, "-c", f"{script}; assert 'matplotlib' not in sys.modules"], check=True)
