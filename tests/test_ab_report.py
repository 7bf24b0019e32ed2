"""What the report of an A/B test says, as sentences, text, JSON and a page; from simulated traffic."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from faser import ab_command
from faser.ab.conclusion import span
from faser.ab.page import page
from faser.ab.records import Records
from faser.ab.report import summary
from faser.ab.simulated import lines, split_of
from faser.ab.split import Arm, Split
from faser.ab.text import text
from faser.bench.browser import Browser, installed
from faser.serving.page import Summaries

Said = dict[str, Any]


def of(told: Iterable[Said]) -> Records:
    records = Records()
    for line in told:
        records.add(line)
    return records


def said_of(
    unit: str = "window", windows: int = 80, slower: float = 1.0, policies: tuple[str, str] = ("none", "static:4")
) -> Said:
    return summary(of(lines(split_of(unit, policies=policies), windows, 2, slower={"b": slower})))


@pytest.fixture(scope="module")
def clear() -> Said:
    return said_of(slower=1.6)


def test_a_clear_difference_is_said_with_sign_size_and_certainty(clear: Said) -> None:
    first, second, *others = clear["conclusion"]
    assert first.startswith("b is worse than a: its mean time in system is higher, +")
    assert "95 % interval +" in first
    assert second == "That holds however often you have looked."
    assert any(sentence.startswith("Exploratory, b also differs in mean TTFT +") for sentence in others)
    assert any("Not told apart" in sentence and "tokens per request-step" in sentence for sentence in others)


def test_the_other_baseline_turns_the_sign() -> None:
    records = of(lines(split_of(policies=("none", "static:4")), 80, 2, slower={"b": 1.6}))
    compared = summary(records, baseline="b")
    assert compared["baseline"] == "b"
    assert compared["conclusion"][0].startswith("a is better than b: its mean time in system is lower, -")
    with pytest.raises(ValueError, match=r"^the arm 'c' is not in this test; its arms are a, b$"):
        summary(records, baseline="c")


def test_no_difference_says_what_is_possible_and_how_long_more_would_take() -> None:
    first, second, *_ = said_of(slower=1.001)["conclusion"]
    assert first.startswith("b and a cannot be told apart by mean time in system: ")
    assert second.startswith("At this load and noise, to see a difference of 10 % about ")
    assert "so far 80 min" in second


def test_only_the_fixed_interval_is_not_enough_for_those_who_look_often() -> None:
    said = said_of(windows=40, slower=1.14)
    metric, always = said["comparisons"][0]["metrics"][0], said["comparisons"][0]["sequence"]
    assert metric["differs"] == 1
    assert always["decided"] is None
    assert "does not say so yet" in said["conclusion"][1]


def test_a_policy_against_itself_is_said_to_be() -> None:
    said = said_of(policies=("static:4", "static:4"))
    assert said["comparisons"][0]["same_policy"]
    assert said["conclusion"][0] == "a and b have the same policy: this is an A/A test, and any difference is chance."
    assert "cannot be told apart" in said["conclusion"][1]


def test_an_arm_that_verifies_in_almost_no_block_has_a_report() -> None:
    """Of the ratio to its waste no upper end is known."""
    told = [*lines(split_of(), 80, 0)]
    for line in told:
        if line["kind"] == "step" and line["arm"] == "a" and line["window"] > 9:
            line["verified"] = line["accepted"] = [0] * line["running"]
    said = summary(of(told))
    wasted = next(m for m in said["comparisons"][0]["metrics"] if m["name"] == "wasted")
    assert wasted["relative"] > 0
    assert wasted["low"] > 0
    assert wasted["relative_low"] is wasted["relative_high"] is None
    assert text(said)
    assert page(said)


@pytest.mark.parametrize(("unit", "clients"), [("window", 0), ("request", 0), ("request", 60)])
def test_clients_that_hang_up_on_the_slow_arm_are_no_praise_of_it(unit: str, clients: int) -> None:
    told = [*lines(split_of(unit, policies=("none", "static:4")), 200, 0, clients=clients, per_window=24.0)]
    for line in told:
        if line["kind"] == "request" and line["arm"] == "b":
            line["seconds"] *= 3 if line["seconds"] > 1.5 else 0.85
    left = [
        line | {"seconds": 4.0, "status": "abort"} if line["kind"] == "request" and line["seconds"] > 4 else line
        for line in told
    ]
    said = summary(of(left))
    first = said["conclusion"][0]
    assert said["comparisons"][0]["metrics"][0]["differs"] == -1
    assert first.startswith("Do not rely on this: ")
    assert "were cut short, and that is not chance" in first
    assert not any("better" in sentence or "holds however" in sentence for sentence in said["conclusion"])
    assert "lower, better" not in text(said)
    assert '="between better' not in page(said)


def test_clients_that_hang_up_on_both_arms_alike_change_no_verdict() -> None:
    told = [*lines(split_of(policies=("none", "static:4")), 120, 0, slower={"b": 1.6})]
    for line in told[::7]:
        if line["kind"] == "request":
            line["status"] = "abort"
    said = summary(of(told))
    assert said["comparisons"][0]["cut"]["base"] > 0.05
    assert said["conclusion"][0].startswith("b is worse than a")


def test_requests_of_no_known_client_are_each_their_own() -> None:
    told = [*lines(split_of("request"), 40, 0, clients=60)]
    for i, line in enumerate(told):
        if line["kind"] == "request" and i % 2:
            line["key"] = None
    check = summary(of(told))["sample_ratio"]
    mine = [line for line in told if line["kind"] == "request" and line["key"] is None]
    assert check["of"] == "clients"
    assert sum(check["counts"].values()) > 0.9 * len(mine)
    assert check["ok"]
    assert not summary(of(line | {"key": None} if "key" in line else line for line in told))["sticky"]


def test_too_few_blocks_conclude_nothing() -> None:
    said = said_of(windows=8)
    assert said["comparisons"][0]["metrics"][0]["low"] is None
    assert said["conclusion"][0].startswith("Nothing can be concluded of b against a yet: ")
    assert "an interval takes 8" in said["conclusion"][0]


def test_by_request_it_says_that_arms_shared_batches() -> None:
    said = said_of("request")
    assert [arm["windows"] for arm in said["arms"]] == [None, None]
    assert said["conclusion"][-1].startswith("The arms shared batches")
    assert "tokens_per_s" not in [metric["name"] for metric in said["comparisons"][0]["metrics"]]
    assert said["sample_ratio"]["of"] == "requests"
    assert said["sample_ratio"]["ok"]


def test_clients_that_come_again_have_no_sequence() -> None:
    said = summary(of(lines(split_of("request"), 40, 0, clients=60)))
    assert said["sticky"]
    assert said["sample_ratio"]["of"] == "clients"
    assert not said["comparisons"][0]["sequence"]["t"]
    assert any("look once" in sentence for sentence in said["conclusion"])


def test_an_arm_that_loses_its_requests_is_noticed() -> None:
    told = [*lines(split_of("request"), 60, 0)]
    lost = [line for i, line in enumerate(told) if not (line["kind"] == "request" and line["arm"] == "b" and i % 3)]
    said = summary(of(lost))
    assert not said["sample_ratio"]["ok"]
    assert said["conclusion"][0].startswith("Do not use this test before you know why: requests are not split")


def test_windows_that_one_arm_leaves_empty_are_noticed_and_a_quiet_night_is_not() -> None:
    split = split_of()
    told = [*lines(split, 120, 0)]
    night = summary(of(line for line in told if not 30 <= (line.get("window") or 0) < 70))["sample_ratio"]
    assert night["ok"]
    assert sum(night["counts"].values()) == 40
    crashes = [line for line in told if not (line.get("arm") == "b" and (line.get("window") or 0) % 3)]
    said = summary(of(crashes))
    assert said["sample_ratio"]["counts"]["a"] == 0
    assert not said["sample_ratio"]["ok"]
    assert said["conclusion"][0].startswith("Do not use this test before you know why: windows without")


def test_a_window_under_the_wrong_arm_is_noticed() -> None:
    told = [*lines(split_of(), 60, 0)]
    wrong = next(line for line in told if line.get("window") == 7)
    said = summary(of([*told, {**wrong, "arm": "b" if wrong["arm"] == "a" else "a"}]))
    assert said["sample_ratio"]["astray"] == 1
    assert said["conclusion"][0].startswith(
        "Do not use this test: windows not, or not only, under the arm of the plan: 1."
    )


def test_windows_whose_requests_may_still_run_are_not_counted() -> None:
    """Of the newest windows only short requests have ended, which makes an arm there look fast."""
    whole = summary(of(lines(split_of(), 40, 0)))
    told = [line for line in lines(split_of(), 40, 0) if line["kind"] == "split" or line["t"] < split_of().start + 1900]
    partial = summary(of(told))  # in window 31
    kept = {window["window"]: window["value"] for window in partial["windows"]}
    assert 25 < max(kept) < 31
    assert kept == {window["window"]: window["value"] for window in whole["windows"] if window["window"] in kept}


def test_three_arms_are_each_held_against_the_first() -> None:
    arms = tuple(Arm(name, f"static:{i}") for i, name in enumerate("xyz"))
    split = Split(arms=arms, shares=(1 / 3,) * 3, block=3, salt="s", start=1.7e9)
    said = summary(of(lines(split, 90, 0, slower={"z": 2.0})))
    assert [(c["arm"], c["baseline"]) for c in said["comparisons"]] == [("y", "x"), ("z", "x")]
    assert [c["metrics"][0]["differs"] for c in said["comparisons"]] == [0, 1]
    assert text(said)
    assert page(said)


@pytest.mark.parametrize("split", [None, split_of(), split_of("request")], ids=["none", "window", "request"])
def test_nothing_seen_yet_is_a_report_too(split: Split | None) -> None:
    said = summary(Records(), split)
    assert said["conclusion"]
    json.dumps(said, allow_nan=False)
    assert text(said)
    assert page(said)


def test_the_text(clear: Said) -> None:
    told = text(clear).splitlines()
    assert told[0] == (
        "A/B test by window of 60 s, 5 s of each washed out: 80 min from 2023-11-14 22:13 UTC, 40 blocks of 2.0 min"
    )
    assert told[2].split()[:4] == ["arm", "policy", "requests", "tokens/s"]
    assert told[4].split()[:3] == ["a", "(baseline)", "none"]
    assert told[5].split()[:2] == ["b", "static:4"]
    assert "b against a, means over 39 pairs" in told
    (primary,) = [line for line in told if "(primary)" in line]
    assert primary.startswith("mean time in system, s (primary)")
    assert primary.endswith("higher, worse")
    assert "Split: as planned; windows without a step or request: a 0, b 0" in told
    assert all(len(line) <= 100 for line in told if line.startswith(("- ", "  ")))


def test_json_has_every_figure_of_the_text(clear: Said) -> None:
    said = json.loads(json.dumps(clear, allow_nan=False))
    for arm in said["arms"]:
        assert arm["requests"] > 0
        assert arm["wasted"] == arm["verified"] - arm["accepted"]
        assert arm["ttft_s"]["p50"] < arm["ttft_s"]["p95"] < arm["ttft_s"]["p99"]
    for metric in said["comparisons"][0]["metrics"]:
        assert metric["low"] <= metric["difference"] <= metric["high"]
        assert metric["relative_low"] <= metric["relative"] <= metric["relative_high"]
    always = said["comparisons"][0]["sequence"]
    assert len(always["t"]) == len(always["low"]) == len(always["high"]) == always["blocks"]


def test_names_from_a_log_cannot_write_html() -> None:
    records = of(lines(split_of(policies=("<script>alert(1)</script>", "b")), 30, 0))
    told = page(summary(records))
    assert "<script" not in told
    assert "&lt;script&gt;alert(1)" in told


@pytest.mark.skipif(installed() is None, reason="no Chromium on this machine")
@pytest.mark.parametrize(("width", "dark"), [(360, True), (1280, False)])
def test_the_page_in_a_browser(clear: Said, tmp_path: Path, width: int, dark: bool) -> None:
    file = tmp_path / "report.html"
    file.write_text(page(clear), encoding="utf-8")
    with Browser() as browser:
        browser.open(file.as_uri(), width=width, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run("document.querySelectorAll('svg').length") == 3
        assert browser.run("[...document.querySelectorAll('svg')].every(s => s.getAttribute('aria-label'))")
        assert browser.run("document.querySelectorAll('svg circle.arm0, svg circle.arm1').length") > 70
        assert browser.run("document.body.innerText").count("b is worse than a") == 1
        assert not browser.problems
        assert [url for url in browser.asked if not url.startswith(("file:", "data:"))] == []


def test_a_live_summary_that_fails_is_not_tried_again_at_once() -> None:
    split, asked = split_of(), []

    async def records() -> list[Said]:
        asked.append(1)
        raise OSError("an engine is down")

    async def look() -> Said:
        summaries = Summaries()
        with pytest.raises(OSError, match="an engine is down"):
            await summaries.get(split, records)
        return await summaries.get(split, records)

    said = asyncio.run(look())
    assert len(asked) == 1
    assert said == summary(Records(), split)


def log(path: Path, told: Iterable[Said]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in told))
    return str(path)


def test_the_command_reads_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = [*lines(split_of(policies=("none", "static:4")), 80, 2, slower={"b": 1.6})]
    path, out = log(tmp_path / "log", told), tmp_path / "report.html"
    assert ab_command.main(["report", "--log", path]) == 0
    assert "- b is worse than a" in capsys.readouterr().out
    assert ab_command.main(["report", "--log", path, "--format", "json", "--baseline", "b"]) == 0
    assert json.loads(capsys.readouterr().out)["baseline"] == "b"
    assert ab_command.main(["report", "--log", path, "--format", "html", "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_file_that_is_no_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04\n\xff\n")
    assert ab_command.main(["report", "--log", str(tmp_path / "x.pt")]) == 2
    assert "is no log of a server" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    assert ab_command.main(["report", "--log", str(tmp_path / "empty")]) == 0


def test_a_reader_who_has_seen_enough_is_no_mistake(tmp_path: Path) -> None:
    path = log(tmp_path / "log", lines(split_of(), 20, 2))
    shell = f"set -o pipefail; {sys.executable} -m faser.cli ab report --log {path} | true"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_steps_that_the_policy_did_not_decide_are_told() -> None:
    told = [
        {**line, "decided": False, "fallback": "benched"} if line.get("arm") == "b" and line["kind"] == "step" else line
        for line in lines(split_of(), 40, 2)
    ]
    (sentence,) = [said for said in summary(of(told))["conclusion"] if "not decided by its policy" in said]
    assert "steps b was not decided by its policy (benched " in sentence


def test_the_command_leaves_out_the_log_of_an_engine_of_an_older_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(tmp_path / "log[1]", lines(split_of(salt="new"), 40, 1))
    assert ab_command.main(["report", "--log", path, "--format", "json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    log(tmp_path / "log[1].dp1", lines(split_of(salt="old"), 40, 2, slower={"b": 3.0}))
    assert ab_command.main(["report", "--log", path, "--format", "json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["arms"] == alone["arms"]
    assert said["comparisons"] == alone["comparisons"]
    assert said["conclusion"][-1].startswith("Engines left out, as their records are of another test")


def test_the_command_adds_the_logs_of_other_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = [*lines(split_of(), 20, 2)]
    path = log(tmp_path / "log", told)
    for name in ("log.dp1", "log.dp1.1", "log.dpx"):
        log(tmp_path / name, told)
    assert ab_command.main(["report", "--log", path, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["lines"] == 3 * len(told)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--log", "/nowhere/log"], "faser ab: /nowhere/log: there is no such file"),
        (["--baseline", "c"], "faser ab: the arm 'c' is not in this test; its arms are a, b"),
        (["--out", "/nowhere/report"], "faser ab: /nowhere/report: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line(flags: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path / "log", lines(split_of(), 20, 2))
    assert ab_command.main(["report", "--log", path, *flags]) == 2
    assert capsys.readouterr().err == f"{says}\n"


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(5, "5 s"), (90, "90 s"), (150, "2.5 min"), (7000, "117 min"), (7300, "2.0 h"), (2e6, "23 days")],
)
def test_a_length_of_time_in_words(seconds: float, told: str) -> None:
    assert span(seconds) == told
