"""Who gets which arm when: in proportion, at random, the same everywhere; and what is no split."""

import json
import math
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.ab.split import Split, SplitError, parse
from faser.serving import split_flags
from faser.serving.serve import main
from faser.serving.settings import ADMIN_KEY, UsageError
from faser.serving.state import State, StateError, load, save

KEYS = [f"client {i}" for i in range(4000)]


def split(shares: str | None = None, **of: object) -> Split:
    made = parse(["a=static:1", "b=static:2", "c=none"][: 3 if shares and "c" in shares else 2], shares, **of)  # type: ignore[arg-type]
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("shares", "block", "windows"),
    [
        (None, 2, {"a": 1, "b": 1}),
        ("a=0.5,b=0.5", 2, {"a": 1, "b": 1}),
        ("a=0.9,b=0.1", 10, {"a": 9, "b": 1}),
        ("b=0.25,a=0.75", 4, {"a": 3, "b": 1}),
        ("a=0.33,b=0.33,c=0.33", 3, {"a": 1, "b": 1, "c": 1}),
        ("a=0.5,b=0.3,c=0.2", 10, {"a": 5, "b": 3, "c": 2}),
    ],
)
def test_every_block_of_windows_has_each_arm_as_its_share_says(
    shares: str | None, block: int, windows: dict[str, int]
) -> None:
    of = split(shares, window_s=10.0, washout_s=0.0, start=1000.0, salt="s")
    assert of.block == block
    orders = set()
    for b in range(-3, 60):
        order = [of.arm_at(1000 + 10 * (block * b + i) + 5).arm for i in range(block)]
        assert Counter(order) == windows
        orders.add(tuple(order))
    assert len(orders) > 1  # at random


def test_a_window_begins_with_its_washout_and_has_one_arm() -> None:
    of = split(window_s=60.0, washout_s=5.0, start=1000.0, salt="s")
    for window in range(50):
        turns = [of.arm_at(1000 + 60 * window + t) for t in (0.0, 4.99, 5.0, 59.99)]
        assert [turn.window for turn in turns] == [window] * 4
        assert len({turn.arm for turn in turns}) == 1
        assert [turn.washout for turn in turns] == [True, True, False, False]
    assert of.arm_at(999.0).window == -1  # a clock that was set back


def test_another_salt_is_another_order_and_the_same_one_the_same() -> None:
    def order(salt: str) -> str:
        of = split(salt=salt)
        return "".join(of.arm_at(60.0 * window).arm for window in range(64))

    assert order("one") == order("one")
    assert order("one") != order("two")
    assert order("two").startswith("ababbabaabbaabab")  # on every machine, in every version


@pytest.mark.parametrize("shares", ["a=0.5,b=0.5", "a=0.8,b=0.2", "a=0.2,b=0.5,c=0.3"])
def test_clients_keep_their_arm_and_arms_their_share(shares: str) -> None:
    of = split(shares, unit="request", salt="s")
    arms = [of.arm_of_key(key) for key in KEYS]
    assert arms == [of.arm_of_key(key) for key in KEYS]
    for name, share in zip(of.names, of.shares, strict=True):
        deviation = math.sqrt(share * (1 - share) / len(KEYS))
        assert arms.count(name) / len(KEYS) == pytest.approx(share, abs=4 * deviation)
    assert arms != [replace(of, salt="t").arm_of_key(key) for key in KEYS]
    names = {of.pseudonym(key) for key in KEYS}
    assert len(names) == len(KEYS)
    assert not any(key in name for key, name in zip(KEYS, names, strict=True))


def test_a_split_survives_json() -> None:
    of = split("a=0.7,b=0.3", salt="s", start=1.5)
    assert Split.from_json(json.loads(json.dumps(of.to_json()))) == of
    by_request = split("a=0.5,b=0.25,c=0.25", unit="request")
    assert Split.from_json(by_request.to_json()) == by_request
    for spoilt in ({}, {"arms": []}, {"unit": "day"}, {"window_s": 0.0}, {"shares": [1.0]}, {"block": 5}, {"more": 1}):
        data = of.to_json() | spoilt if spoilt else {}
        with pytest.raises(SplitError, match="not a split"):
            Split.from_json(data)


SPOILT: list[dict[str, Any]] = [
    {"shares": ["x", "y"]},
    {"shares": [1, 0]},
    {"shares": [1.5, -0.5]},
    {"shares": [0.5, 0.4]},
    {"shares": [float("nan"), 0.5]},
    {"block": 2.0},
    {"block": True},
    {"block": 10**9},
    {"salt": ["s"]},
    {"salt": "\ud800"},
    {"start": 10**400},
    {"arms": [{"name": "a\r\nx: y", "policy": "none"}, {"name": "b", "policy": "none"}]},
    {"arms": [{"name": "a=b", "policy": "none"}, {"name": "b", "policy": "none"}]},
    {"arms": [{"name": "a", "policy": "none"}, {"name": "a", "policy": "static:4"}]},
    {"arms": [{"name": "a", "policy": ""}, {"name": "b", "policy": "none"}]},
    {"arms": [{"name": 1, "policy": "none"}, {"name": "b", "policy": "none"}]},
]


@pytest.mark.parametrize("unit", ["window", "request"])
@pytest.mark.parametrize("spoilt", SPOILT, ids=lambda spoilt: str(spoilt)[:40])
def test_damaged_json_is_no_split(spoilt: dict[str, Any], unit: str) -> None:
    with pytest.raises(SplitError, match=r"^not a split"):
        Split.from_json(split("a=0.5,b=0.5", unit=unit, salt="s").to_json() | spoilt)


def test_one_policy_is_no_split_whatever_equals_signs_it_has() -> None:
    for policies in ([], ["static:4"], ["schedule:1-8=4,9-64=2"], ["./x=1.pt"], ["runs/a=b/ppo.pt"]):
        assert parse(policies, None) is None
    schedules = parse(["a=schedule:1-8=4", "b=runs/x=1/ppo.pt"], None)
    assert schedules is not None
    assert [(arm.name, arm.policy) for arm in schedules.arms] == [("a", "schedule:1-8=4"), ("b", "runs/x=1/ppo.pt")]


@pytest.mark.parametrize(
    ("policies", "shares", "options", "says"),
    [
        (["static:4", "none"], None, {}, ["static:4", "no name", "a=static:4"]),
        (["a=static:4", "none"], None, {}, ["'none' has no name"]),
        (["a=static:4"], None, {}, ["1 arms", "two or more"]),
        (["static:4"], "a=1", {}, ["static:4", "no name"]),
        (["a=static:4", "a=none"], None, {}, ["'a' twice"]),
        (["a=none", "b=none"], "a=0.5,c=0.5", {}, ["a, c", "a, b"]),
        (["a=none", "b=none"], "a=0.5", {}, ["--split", "a, b"]),
        (["a=none", "b=none"], "a=0.5,b=0.5,b=0.5", {}, ["'b=0.5'", "once an arm"]),
        (["a=none", "b=none"], "a=0.5,b=0.6", {}, ["sum to 1.1", "allowed: 1"]),
        (["a=none", "b=none"], "a=1,b=0", {}, ["'a=1'", "over 0"]),
        (["a=none", "b=none"], "a=x,b=0.5", {}, ["'a=x'"]),
        (["a=none", "b=none"], "a=nan,b=0.5", {}, ["'a=nan'"]),
        (["a=none", "b=none"], "a=0.9973,b=0.0027", {}, ["100 windows"]),
        (["a=none", "b=none"], None, {"window_s": 0.0}, ["--split-window-s", "0"]),
        (["a=none", "b=none"], None, {"window_s": math.inf}, ["--split-window-s", "inf"]),
        (["a=none", "b=none"], None, {"window_s": 5.0, "washout_s": 5.0}, ["--split-washout-s", "5"]),
        (["a=none", "b=none"], None, {"unit": "day"}, ["--split-by", "day", "window, request"]),
    ],
)
def test_what_is_no_split_is_named(
    policies: list[str], shares: str | None, options: dict[str, float], says: list[str]
) -> None:
    with pytest.raises(SplitError) as refused:
        parse(policies, shares, **options)  # type: ignore[arg-type]
    assert all(part in str(refused.value) for part in says), refused.value


def flags(*policies: str, split: str | None = None, by: str | None = None) -> Namespace:
    return Namespace(policy=[*policies], split=split, split_by=by, split_window_s=None, split_washout_s=None)


AB = flags("a=static:1", "b=none")


def test_a_test_that_runs_goes_on_as_it_was_or_not_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    begun, _ = split_flags.chosen(AB, State())
    assert begun is not None
    assert split_flags.chosen(AB, State(split=begun)) == (begun, None)
    assert "goes on" in capsys.readouterr().err
    for other in (flags("a=static:1", "b=static:2"), flags("static:1"), flags("a=static:1", "b=none", by="request")):
        with pytest.raises(UsageError, match=r"a=static:1 \(0\.5\), b=none \(0\.5\) runs in it"):
            split_flags.chosen(other, State(split=begun))


def test_a_stopped_test_stays_stopped_and_another_begins() -> None:
    begun, _ = split_flags.chosen(AB, State())
    stopped = State(split=begun, kept="a")
    assert split_flags.chosen(AB, stopped) == (None, "static:1")
    assert split_flags.chosen(flags("none"), stopped) == (None, "static:1")  # as a swap goes before --policy
    assert split_flags.chosen(AB, replace(stopped, policy="static:5")) == (None, "static:5")
    another, _ = split_flags.chosen(flags("a=static:1", "c=none"), stopped)
    assert another is not None
    assert (another.names, another.salt == begun.salt if begun else None) == (("a", "c"), False)


def test_a_policy_that_was_swapped_in_gives_way_to_a_test_only() -> None:
    assert split_flags.chosen(flags("static:1"), State(policy="static:3")) == (None, "static:3")
    begun, _ = split_flags.chosen(AB, State(policy="static:3"))
    assert begun is not None


def test_a_file_is_an_arm_by_its_whole_path() -> None:
    begun, _ = split_flags.chosen(flags("a=checkpoints/ppo.pt", "b=none"), State())
    assert begun is not None
    assert begun.arms[0].policy == str(Path("checkpoints/ppo.pt").resolve())


def test_a_state_keeps_a_test(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for state in (State(split=split(salt="s")), State(split=split(), kept="b", policy="none", benched=True)):
        save(path, state)
        assert load(path) == state
    data = json.loads(path.read_text())
    for spoilt in ({"kept": "z"}, {"kept": 1}, {"split": {}}, {"split": None}, {"more": 1}):
        path.write_text(json.dumps(data | spoilt))
        with pytest.raises(StateError, match="no state file"):
            load(path)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--policy", "a=static:1", "--policy", "b=lerned"], ["'lerned'", "unknown"]),
        (["--policy", "a=static:1", "--policy", "none"], ["'none' has no name"]),
        (["--policy", "none", "--split-by", "request"], ["--split-by", "several --policy"]),
        (["--policy", "a=none", "--policy", "b=none", "--split-by", "day"], ["--split-by is 'day'", "window, request"]),
        (["--policy", "a=none", "--policy", "b=none", "--split", "a=2,b=1"], ["--split", "'a=2'"]),
    ],
)
def test_the_server_names_what_it_cannot_start_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], says: list[str]
) -> None:
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    assert main(argv) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("faser serve: ")]
    assert all(part in said for part in says), said
