"""The environment over a real engine: the same contract as the simulator's, the same texts whatever is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env

from faser.core import MAX_DEPTH, Capabilities, DecisionError
from faser.envs.live import LiveSpeculationEnv
from faser.envs.speculation import SpeculationEnv, unpack
from faser.models import Pair
from faser.policies import make_policy
from faser.serving.stepwise import EngineError
from faser.tapes import Tape, load_tape

SLOTS, REQUESTS, LONGEST = 4, 5, 24
Choose = Callable[[np.ndarray], np.ndarray]


def short() -> Tape:
    """Requests, greedy and sampled, that end by themselves after some steps."""
    tape = load_tape("smollm2")
    output = tape.output_tokens
    chosen = tape.take(np.flatnonzero((tape.prompt_tokens <= 100) & (output >= 6) & (output <= LONGEST)))
    return replace(chosen, max_tokens=np.full_like(chosen.max_tokens, LONGEST))


SMALL: dict[str, Any] = {"pair": "smollm2", "slots": SLOTS, "requests": REQUESTS, "load": 1.5, "part": "all"}


@pytest.fixture(scope="module")
def env(models: Pair) -> Iterator[LiveSpeculationEnv]:  # noqa: ARG001  # whole before the engine looks for them
    live = LiveSpeculationEnv(acceptance=short(), dtype="float32", greedy=True, **SMALL)
    live.spec = EnvSpec("faser/LiveSpeculation-v0", LiveSpeculationEnv, nondeterministic=True)
    yield live
    live.close()


def fixed(k: int) -> Choose:
    return lambda _: np.array([k] * (SLOTS + 1) + [0])


def by(name: str, env: LiveSpeculationEnv) -> Choose:
    """What a policy says."""
    policy = make_policy(name, env.episodes.cost)

    def choose(flat: np.ndarray) -> np.ndarray:
        observation, slots = unpack(flat)
        decision = policy.decide(observation)
        action = np.zeros(SLOTS + 2, np.int64)
        action[slots], action[SLOTS] = decision.lengths, decision.draft_depth
        return action

    return choose


def play(env: LiveSpeculationEnv, choose: Choose, seed: int) -> tuple[float, list[dict[str, Any]]]:
    """A whole episode: its return, and the infos of its steps."""
    flat, _ = env.reset(seed=seed)
    total, infos, over = 0.0, [], False
    while not over:
        flat, reward, over, truncated, info = env.step(choose(flat))
        assert not truncated
        assert env.observation_space.contains(flat)
        total += reward
        infos.append(info)
    return total, infos


def test_gymnasiums_checker_has_nothing_to_say(env: LiveSpeculationEnv) -> None:
    check_env(env, skip_render_check=True, skip_close_check=True)


def test_greedy_texts_are_the_same_whatever_the_actions_and_those_of_the_tape(env: LiveSpeculationEnv) -> None:
    rng = np.random.default_rng(0)
    nvec = env.action_space.nvec  # type: ignore[attr-defined]  # a MultiDiscrete
    texts = []
    for choose in (fixed(0), lambda _: rng.integers(0, nvec)):
        _, infos = play(env, choose, seed=3)
        texts.append(env.live.texts)
        assert sum(info["tokens"] for info in infos) == sum(map(len, env.live.texts))
    assert texts[0] == texts[1]
    trace, tape = env.episodes.traces[0], env.episodes.tape
    assert trace is not None
    greedy = np.flatnonzero(tape.temperature[trace.row] == 0)
    assert 0 < len(greedy) < REQUESTS  # the others were sampled for the tape
    for i in greedy:
        assert texts[0][i] == tape.text(int(trace.row[i]))[1]
    lengths = sum(info["lengths"] for info in infos)  # of the random actions
    assert np.count_nonzero(lengths) > 3
    assert sum(info["accepted"] for info in infos) > 0


def test_requests_are_sampled_as_the_tapes_are_and_with_a_seed_of_their_own(
    env: LiveSpeculationEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env.live, "greedy", False)
    texts = []
    for _ in range(2):
        play(env, fixed(0), seed=3)
        texts.append(env.live.texts)
    assert texts[0] == texts[1]
    trace, tape = env.episodes.traces[0], env.episodes.tape
    assert trace is not None
    heat = tape.temperature[trace.row]
    same = np.array([text == tape.text(int(row))[1] for text, row in zip(texts[0], trace.row, strict=True)])
    assert same[heat == 0].all()
    assert not same[heat > 0].all()


def test_spaces_and_infos_are_those_of_the_simulator(env: LiveSpeculationEnv) -> None:
    simulated = SpeculationEnv(acceptance=short(), **SMALL)
    assert simulated.observation_space == env.observation_space
    assert simulated.action_space == env.action_space
    seen, live = simulated.reset(seed=5)[1], env.reset(seed=5)[1]
    assert seen == live  # the same requests at the same times, before any time has passed
    infos = [e.step(fixed(0)(np.zeros(0)))[4] for e in (simulated, env)]
    assert {k: (type(v), np.shape(v)) for k, v in infos[0].items()} == {
        k: (type(v), np.shape(v)) for k, v in infos[1].items()
    }
    last = play(env, fixed(3), seed=5)[1][-1]
    over, info = False, {}
    while not over:
        *_, over, _, info = simulated.step(fixed(3)(np.zeros(0)))
    assert last.keys() == info.keys()
    assert last["episode_summary"].keys() == info["episode_summary"].keys()


def test_a_policy_plays_to_the_end_and_the_return_is_what_the_summary_says(env: LiveSpeculationEnv) -> None:
    total, infos = play(env, by("goodput", env), seed=7)
    summary = infos[-1]["episode_summary"]
    assert summary["finished"] == REQUESTS
    assert summary["steps"] == len(infos)
    assert total == pytest.approx(-summary["ratio_to_none"])
    assert summary["mean_accepted"] > 0
    assert infos[-1]["running"] == infos[-1]["waiting"] == 0
    times = [info["time"] for info in infos]
    assert times == sorted(times)
    in_system = REQUESTS * summary["mean_time_in_system_s"]  # the sum of steps is the sum over requests
    assert in_system == pytest.approx(sum(env.live.time_in_system_s[0]))
    trace = env.episodes.traces[0]
    assert trace is not None
    assert in_system == pytest.approx(env.episodes.ledger.sums[2, 0], rel=1e-6)


def test_a_request_keeps_its_slot_until_it_ends(env: LiveSpeculationEnv) -> None:
    env.reset(seed=11)
    over, slot_of, shared = False, {}, 0
    while not over:
        for name, slot in env.live._slot.items():
            assert slot_of.setdefault(name, slot) == slot
        shared = max(shared, len(env.live._slot))
        assert len({*env.live._slot.values()}) == len(env.live._slot)
        *_, over, _, _ = env.step(fixed(2)(np.zeros(0)))
    assert len(slot_of) == REQUESTS
    assert shared > 1


def test_a_wrong_action_is_one_line_and_the_next_one_is_carried_out(env: LiveSpeculationEnv) -> None:
    flat, _ = env.reset(seed=3)
    while not unpack(flat)[0].running:
        flat, *_ = env.step(fixed(2)(flat))
    for wrong, message in (
        (np.full(SLOTS + 2, MAX_DEPTH + 1), f"lengths span .* allowed: 0..{MAX_DEPTH}"),
        (np.zeros(3, np.int64), r"action has shape \(3,\); \(6,\) expected"),
        (np.array([0] * SLOTS + [-1, 0]), "-1"),
    ):
        with pytest.raises(DecisionError, match=message) as refused:
            env.step(wrong)
        assert "\n" not in str(refused.value)
    info = env.step(fixed(2)(flat))[4]
    assert info["tokens"] > 0


def test_a_reset_in_mid_episode_leaves_nothing_behind(env: LiveSpeculationEnv) -> None:
    flat, _ = env.reset(seed=3)
    while unpack(flat)[0].running < 2:
        flat, *_ = env.step(fixed(2)(flat))
    env.live.tracked = -1
    first, info = env.reset(seed=4)
    assert env.live.tracked == 0
    again, same = env.reset(seed=4)
    assert np.array_equal(first, again)  # nothing is left of steps, verdicts, queue or cache
    assert info == same
    assert play(env, fixed(2), seed=4)[1][-1]["episode_summary"]["finished"] == REQUESTS


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="acceptance is without tokens"):
        LiveSpeculationEnv(acceptance=0.6)
    with pytest.raises(ValueError, match="pair is 'cpu-smollm2,smollm2'; allowed with a live engine: llama2-13b"):
        LiveSpeculationEnv(pair="cpu-smollm2,smollm2")
    for able in (Capabilities(pruning=True), Capabilities(max_frontier=2)):
        with pytest.raises(ValueError, match="does neither yet"):
            LiveSpeculationEnv(acceptance=load_tape("smollm2"), capabilities=able)
    with pytest.raises(gymnasium.error.ResetNeeded, match="call reset"):
        LiveSpeculationEnv(acceptance=short(), **SMALL).step(fixed(0)(np.zeros(0)))


def test_an_engine_that_dies_is_one_line_and_close_ends_the_process(env: LiveSpeculationEnv) -> None:
    """The last test: it takes the engine away."""
    env.reset(seed=3)
    engine = env.live._engine
    assert engine is not None
    engine._process.kill()
    engine._process.wait()
    with pytest.raises(EngineError, match="the engine's process has ended"):
        env.step(fixed(0)(np.zeros(0)))
    env.close()
    env.close()
    assert engine._process.returncode is not None
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step(fixed(0)(np.zeros(0)))
