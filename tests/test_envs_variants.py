"""Every registered id is a whole environment: both checkers, make and make_vec, and documentation that is true."""

from __future__ import annotations

import inspect
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from faser.envs import VARIANTS
from faser.envs.episodes import Episodes
from faser.envs.speculation import SpeculationEnv
from faser.envs.vector import SpeculationVectorEnv
from faser.models import known_models
from faser.train.presets import PRESETS

DOC = SpeculationEnv.__doc__ or ""


def table(section: str) -> list[list[str]]:
    """Rows of the first table of a section of the docstring, without its head."""
    body = DOC.split(f"## {section}\n")[1].split("## ")[0]
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in body.splitlines() if "|" in line]
    return rows[2:]


def test_what_is_registered_is_what_the_module_lists() -> None:
    registered = {name for name in gymnasium.registry if name.startswith("faser/Speculation")}
    assert registered == VARIANTS.keys()
    for name, arguments in VARIANTS.items():
        assert gymnasium.spec(name).kwargs == arguments
    assert {arguments["pair"] for arguments in VARIANTS.values() if arguments} == set(known_models())


@pytest.mark.parametrize("pair", PRESETS)
def test_a_variant_is_what_training_uses(pair: str) -> None:
    arguments, preset = VARIANTS[f"faser/Speculation-{pair}-v0"], PRESETS[pair]
    assert (arguments["pair"], arguments["slots"], arguments["load"]) == (pair, preset.slots, preset.load)


@pytest.mark.parametrize("name", VARIANTS)
def test_gymnasiums_checker_has_nothing_to_say_rendering_included(name: str) -> None:
    check_env(gymnasium.make(name, render_mode="rgb_array").unwrapped, skip_render_check=False)


@pytest.mark.parametrize("name", VARIANTS)
def test_stable_baselines3s_checker_has_nothing_to_say(name: str) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    checker.check_env(gymnasium.make(name).unwrapped, skip_render_check=False)


@pytest.mark.parametrize("name", VARIANTS)
def test_make_and_make_vec_give_the_same_environment(name: str) -> None:
    single, vector = gymnasium.make(name), gymnasium.make_vec(name, num_envs=2)
    assert isinstance(vector.unwrapped, SpeculationVectorEnv)
    assert vector.single_observation_space == single.observation_space
    assert vector.single_action_space == single.action_space
    seen, _ = vector.reset(seed=1)
    alone, _ = single.reset(seed=1)
    assert np.array_equal(seen[0], alone)
    action = np.array([3] * (VARIANTS[name].get("slots", 64) + 1) + [0])
    for _ in range(30):
        alone, reward, *_ = single.step(action)
        seen, rewards, *_ = vector.step(np.stack([action, action]))
        np.testing.assert_allclose(seen[0], alone, rtol=0, atol=1e-6)  # BLAS rounds survivals by the number of rows
        assert rewards[0] == reward
    single.close()
    vector.close()


def test_arguments_given_to_make_come_before_the_variants() -> None:
    env: Any = gymnasium.make("faser/Speculation-smollm2-v0", slots=4, requests=5)
    assert (env.unwrapped.episodes.slots, env.unwrapped.episodes.requests) == (4, [5])
    assert env.unwrapped.episodes.cost.name == "cpu-smollm2"


def infos() -> dict[str, set[str]]:
    """The keys that a reset, a step in mid-episode, and a last step really give."""
    env = SpeculationEnv(slots=4, requests=3, acceptance=0.5)
    _, reset = env.reset(seed=0)
    steps, over = [], False
    while not over:
        _, _, over, _, info = env.step(np.array([2] * 5 + [0]))
        steps.append(set(info))
    assert all(keys == steps[0] for keys in steps[:-1])
    return {"reset": set(reset), "step": steps[0], "end": steps[-1]}


def test_the_documented_keys_of_info_are_the_real_ones() -> None:
    documented: dict[str, set[str]] = {"reset": set(), "step": set(), "end": set()}
    for key, where, _ in table("Info"):
        for when in where.split(", "):
            documented[when].add(key)
    documented["end"] |= documented["step"]
    assert documented == infos()


def test_the_documented_arguments_and_variants_are_the_real_ones() -> None:
    real = dict(inspect.signature(Episodes).parameters)
    real.pop("engines")
    defaults = {name: parameter.default for name, parameter in real.items()} | {"render_mode": None}
    shown = {name: default for name, default, _ in table("Arguments")}
    assert shown.keys() == defaults.keys()
    for name, default in defaults.items():
        assert shown[name].replace('"', "'") == repr(default), name
    plain = {name: defaults[name] for name in ("pair", "slots", "requests", "load")}
    for name, *cells in table("Variants"):
        assert cells == [str(value) for value in {**plain, **VARIANTS[name]}.values()]
    assert [row[0] for row in table("Variants")] == list(VARIANTS)


def test_the_docstring_has_the_sections_that_gymnasiums_own_have() -> None:
    sections = re.findall(r"## (.+)", DOC)
    wanted = ["Description", "Observation space", "Action space", "Rewards", "Starting state", "Episode end", "Info"]
    assert sections == [*wanted, "Rendering", "Arguments", "Variants", "Version history"]
    assert [row[0] for row in table("Version history")] == ["v0"]
