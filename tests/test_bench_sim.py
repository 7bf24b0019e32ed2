"""`faser bench sim`: paired differences with intervals, a line an episode, and the plain statement of losses."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faser.bench.sim import Result, abilities, difference, losses, main, suite_table
from faser.core import Capabilities
from faser.costs.step_cost import PROFILES

BASE = Result(
    pair="x", suite="steady", load=0.5, episode=0, policy="a", mean_s=1.0, p99_s=2.0, tokens_per_s=3.0, slo=1.0,
    ratio_to_none=0.5,
)  # fmt: skip


def results(times: dict[str, list[float]], loads: tuple[float, ...] = (0.5,)) -> list[Result]:
    return [
        replace(BASE, policy=policy, load=load, episode=i, mean_s=mean, ratio_to_none=mean / 2)
        for policy, means in times.items()
        for load in loads
        for i, mean in enumerate(means)
    ]


def test_a_constant_ratio_has_an_interval_of_no_width_whatever_the_episodes() -> None:
    theirs = np.array([[1.0, 5.0, 2.0], [10.0, 30.0, 90.0]])
    off, low, high = difference(0.9 * theirs, theirs)
    assert (off, low, high) == pytest.approx((-0.1, -0.1, -0.1))


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng, covered = np.random.default_rng(0), 0
    for seed in range(100):
        theirs = rng.lognormal(0.0, 0.3, (3, 12))
        ours = theirs * 0.95 * np.exp(rng.normal(0.0, 0.02, (3, 12)))
        _, low, high = difference(ours, theirs, seed)
        covered += low <= -0.05 <= high
    assert 85 <= covered <= 100


def test_losses_are_named_and_only_where_the_interval_excludes_zero() -> None:
    said = losses(results({"a": [1.0, 1.1, 1.2], "b": [0.9, 1.0, 1.1], "c": [0.9, 1.3, 1.1], "oracle": [0.1] * 3}), "a")
    assert "steady, load 0.5: b by 10.0%" in said
    assert "c by" not in said
    assert "oracle" not in said
    assert "nowhere" in losses(results({"a": [1.0, 1.0], "b": [1.1, 1.1]}), "a")


def test_the_table_tells_how_far_it_is_to_the_oracle() -> None:
    table = suite_table(
        results({"a": [0.8, 0.8], "b": [1.0, 1.0], "oracle": [0.64, 0.64]}), "steady", ("a", "b", "oracle")
    )
    assert "Best rival: b; of the way from it to the oracle, a goes 50%." in table
    assert "| b | 0.500 |" in table


def test_the_same_episodes_go_to_every_policy_and_into_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--pair", "smollm2", "--policies", "goodput", "none", "oracle", "--suites", "steady", "drift"]
    assert main([*asked, "--loads", "0.4", "--episodes", "2", "--out", str(tmp_path)]) == 0
    rows = list(csv.DictReader((tmp_path / "smollm2.csv").open(encoding="utf-8")))
    assert len(rows) == 3 * 2 * 2
    assert [float(r["ratio_to_none"]) for r in rows if r["policy"] == "none"] == pytest.approx([1.0] * 4)
    mean = {p: np.mean([float(r["mean_s"]) for r in rows if r["policy"] == p]) for p in ("goodput", "none", "oracle")}
    assert mean["oracle"] < mean["goodput"] < mean["none"]
    assert (tmp_path / "smollm2.png").stat().st_size > 10_000
    assert "### drift" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (["--policies", "fast"], "policy 'fast' is unknown"),
        (["--suites", "quiet"], "--suites is 'quiet'; allowed: steady"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(wrong: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--pair", "smollm2", *wrong]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_name_says_what_the_engine_can_do() -> None:
    assert abilities("goodput") == ("goodput", Capabilities())
    assert abilities("static:2+pruning+frontier:4") == ("static:2", Capabilities(pruning=True, max_frontier=4))
    assert abilities("oracle+frontier:1+pruning") == ("oracle", Capabilities(pruning=True, max_frontier=1))
    assert abilities("a+b/ppo.pt") == ("a+b/ppo.pt", Capabilities())
    with pytest.raises(ValueError, match=r"policy 'goodput' has \+frontier:5; allowed: \+frontier:1 to 4"):
        abilities("goodput+frontier:5")


def test_pruning_without_what_it_takes_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = json.loads((PROFILES / "cpu-smollm2.json").read_text())
    del profile["measured"]["target"]
    (tmp_path / "bare.json").write_text(json.dumps(profile))
    pair = f"{tmp_path / 'bare.json'},smollm2"
    assert main(["--pair", pair, "--policies", "none", "static:2+pruning", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("faser bench sim: profile cpu-smollm2 does not say its target's hidden")
    assert (told.err.count("\n"), told.out) == (1, "")


def test_policies_on_other_engines_are_no_rivals() -> None:
    said = losses(results({"a": [1.0, 1.1], "b+pruning": [0.5, 0.6], "oracle+pruning": [0.1, 0.1]}), "a")
    assert "nowhere" in said
