"""The table, the sentence and the plot, from made-up runs."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from faser.bench.client import Reply
from faser.bench.demo import show
from faser.bench.measure import Phase, Run, Sample, Steps
from faser.bench.plot import PlotError, plot_lengths
from faser.bench.report import Row, fallbacks, record, sentence, summarise, table

PHASES = {1: Phase(name="low", concurrency=1, prompts=("p",), max_tokens=9)}
PHASES[16] = Phase(name="high", concurrency=16, prompts=("p",), max_tokens=9)
LEARNED = "checkpoints/ppo.pt"


def run(policy: str, concurrency: int, speed: float, *, number: int = 1, text: str = "t", length: int = 0) -> Run:
    """Ten tokens at `speed` tokens/s; every request-step verifies `length` tokens, half of them accepted."""
    steps = Steps(4.0, {length: 8.0}, 4.0 * length, {length: 4.0})
    seconds = 10 / speed
    return Run(
        policy=policy,
        phase=PHASES[concurrency],
        round=number,
        seconds=seconds,
        replies=[Reply(text=text, prompt_tokens=5, tokens=10, first_s=0.1, last_s=seconds, end_s=seconds)],
        steps=steps,
        fallbacks=0.0,
        samples=[Sample(seconds / 2, steps), Sample(seconds, steps)],
    )


def runs_of(speeds: dict[str, tuple[float, float]], rounds: int = 3) -> list[Run]:
    """`rounds` rounds of every policy's tokens/s at low and at high concurrency."""
    return [
        run(policy, concurrency, speed, number=number, length=4 if policy == "static:4" else 0)
        for number in range(1, rounds + 1)
        for policy, pair in speeds.items()
        for concurrency, speed in zip((1, 16), pair, strict=True)
    ]


def row_of(rows: Sequence[Row], policy: str, concurrency: int) -> Row:
    (row,) = [row for row in rows if (row.policy, row.concurrency) == (policy, concurrency)]
    return row


def test_a_row_has_the_median_speed_and_the_median_of_ratios_within_rounds() -> None:
    none, fixed = (100.0, 50.0, 200.0), (80.0, 50.0, 100.0)  # ratios 0.8, 1.0, 0.5: the machine changed, so pair them
    runs = [run("none", 1, speed, number=n) for n, speed in enumerate(none)]
    runs += [run("static:4", 1, speed, number=n, length=4) for n, speed in enumerate(fixed)]
    row = row_of(summarise(runs), "static:4", 1)
    assert row.tokens_per_s == pytest.approx(80.0)
    assert row.ratios == pytest.approx((0.8, 1.0, 0.5))
    assert row.ratio == pytest.approx(0.8)
    assert (row.accepted_length, row.chosen_length, row.draft_depth) == (1 + 16 / 8, 4.0, 4.0)
    assert row.ttft_p50 == pytest.approx(100.0)
    assert row.tpot_p50 == pytest.approx(1e3 * (10 / 80 - 0.1) / 9)


def test_texts_are_counted_against_the_first_round_of_none_itself_included() -> None:
    runs = [run("none", 1, 10, number=1), run("none", 1, 10, number=2), run("none", 1, 10, number=3, text="other")]
    runs += [run("static:4", 1, 10, number=n, text="t" if n < 3 else "other") for n in (1, 2, 3)]
    rows = summarise(runs)
    assert [(row.same, row.compared) for row in rows] == [(1, 2), (2, 3)]
    assert [line.split("  ")[-1].strip() for line in table(rows).splitlines()[2:]] == ["1 of 2", "2 of 3"]


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((0.7, 0.8, 0.9), "loses"),
        ((1.1, 1.2, 1.3), "gains"),
        ((0.9, 1.1, 1.2), "unclear"),  # rounds disagree
        ((0.99, 0.985, 0.995), "level"),  # too near
        ((1.5,), "gains"),
        ((), "level"),
    ],
)
def test_a_verdict_needs_every_round(ratios: tuple[float, ...], verdict: str) -> None:
    runs = [run("none", 1, 100, number=n) for n in range(3)]
    runs += [run("static:4", 1, 100 * ratio, number=n) for n, ratio in enumerate(ratios)]
    runs += [run("static:4", 1, 100, number=9)] if not ratios else []  # a round in which none did not run
    assert row_of(summarise(runs), "static:4", 1).verdict == verdict


@pytest.mark.parametrize(
    ("speeds", "says"),
    [
        (
            {"none": (100, 200), "static:4": (80, 120), LEARNED: (99, 201)},
            "On two cores speculation pays at no load: "
            "static:4 reaches 80 % of none's tokens/s at concurrency 1 and 60 % at 16, so it loses at both; "
            "ppo.pt reaches 99 % of none's tokens/s at concurrency 1 and 100 % at 16, so it is level at both.",
        ),
        (
            {"none": (100, 200), "static:4": (150, 120), LEARNED: (160, 200)},
            "On two cores speculation pays at concurrency 1 but not at 16: "
            "static:4 reaches 150 % of none's tokens/s at concurrency 1 and 60 % at 16, "
            "so it gains at 1 and loses at 16; "
            "ppo.pt reaches 160 % of none's tokens/s at concurrency 1 and 100 % at 16, "
            "so it gains at 1 and is level at 16.",
        ),
        (
            {"none": (100, 200), LEARNED: (120, 250)},
            "On two cores speculation pays at concurrency 1 and 16: "
            "ppo.pt reaches 120 % of none's tokens/s at concurrency 1 and 125 % at 16, so it gains at both.",
        ),
        (
            {"none": (100, 200), "static:4": (110, 190), LEARNED: (80, 150)},
            "On two cores speculation pays at concurrency 1 but not at 16: "
            "static:4 reaches 110 % of none's tokens/s at concurrency 1 and 95 % at 16, "
            "so it gains at 1 and loses at 16; "
            "ppo.pt reaches 80 % of none's tokens/s at concurrency 1 and 75 % at 16, so it loses at both.",
        ),
        ({"static:4": (1, 2)}, "On two cores nothing was compared: that takes none and another policy."),
        ({"none": (1, 2)}, "On two cores nothing was compared: that takes none and another policy."),
    ],
)
def test_the_sentence_says_what_the_numbers_say(speeds: dict[str, tuple[float, float]], says: str) -> None:
    assert sentence(summarise(runs_of(speeds)), "two cores") == says


def test_rounds_that_disagree_are_said_to() -> None:
    runs = [run("none", 1, 100, number=n) for n in (1, 2)]
    runs += [run("static:4", 1, speed, number=n) for n, speed in ((1, 90), (2, 150))]
    assert sentence(summarise(runs), "two cores") == (
        "On two cores speculation clearly pays at no load: "
        "static:4 reaches 120 % of none's tokens/s at concurrency 1, so it differs from round to round."
    )


def test_steps_that_fell_back_are_told_and_only_they() -> None:
    rows = summarise(runs_of({"none": (1, 2), LEARNED: (1, 2)}))
    assert fallbacks(rows) == ""
    rows = summarise([replace(run(LEARNED, 16, 1), fallbacks=3.0), run("none", 16, 1)])
    assert fallbacks(rows) == "Steps with no decision in time, at the fallback length: ppo.pt 3 at 16."


def test_the_table_has_a_line_for_every_policy_and_load() -> None:
    lines = table(summarise(runs_of({"static:4": (80, 120), "none": (100, 200)}))).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[:4] for line in lines[2:]] == [
        ["static:4", "1", "80", "80"],
        ["static:4", "16", "120", "60"],
        ["none", "1", "100", "100"],
        ["none", "16", "200", "100"],
    ]


def test_the_record_is_json_without_nan_and_without_texts() -> None:
    runs = runs_of({"static:4": (80, 120)}, rounds=1)
    runs[0].replies[0] = Reply(text="secret", prompt_tokens=1, tokens=1, first_s=1, last_s=1, end_s=1)
    text = json.dumps(record(summarise(runs), runs), allow_nan=False)
    assert "secret" not in text
    back = json.loads(text)
    assert back["rows"][0]["tpot_p50"] is None
    assert back["rows"][0]["ratio"] is None
    assert back["runs"][0]["samples"][0]["lengths"] == {"4": 8.0}
    assert [r["tokens"] for r in back["runs"][1]["requests"]] == [10]


def test_show_prints_and_writes_every_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(runs_of({"none": (100, 200), "static:4": (80, 120), LEARNED: (99, 201)}), tmp_path)
    out = capsys.readouterr().out
    assert json.loads((tmp_path / "demo.json").read_text())["sentence"] in out
    assert str(tmp_path / "demo.json") in out
    assert str(tmp_path / "lengths.png") in out
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plot_needs_a_policy_that_drafts_matplotlib_and_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = runs_of({"none": (1, 2), "static:4": (1, 2)}, rounds=1)
    with pytest.raises(PlotError, match="only none ran"):
        plot_lengths(runs[:2], tmp_path / "a.png")
    (tmp_path / "file").touch()
    with pytest.raises(PlotError, match=r"^the plot cannot be written: .*file"):
        plot_lengths(runs, tmp_path / "file" / "a.png")
    monkeypatch.setattr("faser.bench.plot.find_spec", lambda _: None)
    with pytest.raises(PlotError, match="needs matplotlib"):
        plot_lengths(runs, tmp_path / "a.png")
