"""What the ledger of an A/B test keeps of a log, and what it does with lines that are not as they should be."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.ab import records as module
from faser.ab.records import BUCKET_S, Records, rotated
from faser.ab.simulated import lines, split_of


def step(**changes: Any) -> dict[str, Any]:
    """Two rows in arm a's window 3, 100 ms: 7 drafted, 5 verified, 3 accepted, and one request waits."""
    return {
        "kind": "step",
        "t": 1000.0,
        "ms": 100.0,
        "policy": "static:4",
        "decided": True,
        "arm": "a",
        "window": 3,
        "washout": False,
        "running": 2,
        "waiting": 1,
        "drafted": [4, 3],
        "verified": [4, 1],
        "accepted": [2, 1],
    } | changes


def request(**changes: Any) -> dict[str, Any]:
    """Of arm a's window 3: ten tokens in a second, the first after 0.1 s."""
    return {
        "kind": "request",
        "t": 1001.0,
        "arm": "a",
        "window": 3,
        "washout": False,
        "arrival": 1000.0,
        "ttft": 0.1,
        "seconds": 1.0,
        "prompt": 5,
        "tokens": 10,
        "drafted": 8,
        "verified": 6,
        "accepted": 4,
        "status": "stop",
    } | changes


def of(told: Iterable[dict[str, Any]]) -> Records:
    records = Records()
    for line in told:
        records.add(line)
    return records


def log(path: Path, told: Iterable[dict[str, Any]], end: str = "") -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in told) + end)
    return path


def test_a_step_is_summed_in_its_window_and_arm() -> None:
    cell = of([step(), step(decided=False, fallback="deadline")]).cells[3, "a"]
    assert (cell.steps, cell.rows, cell.tokens) == (2, 4, 10)
    assert (cell.drafted, cell.verified, cell.accepted) == (14, 10, 6)
    assert cell.seconds == pytest.approx(0.2)
    assert cell.request_seconds == pytest.approx(0.6)
    assert (cell.decisions, cell.fallbacks) == (1, {"deadline": 1})


def test_a_request_is_summed_in_the_window_of_its_arrival() -> None:
    records = of([request(), request(tokens=1), request(ttft=None, tokens=0), request(status="abort", seconds=0.2)])
    cell = records.cells[3, "a"]
    assert (cell.requests, cell.cut) == (4, 1)
    assert cell.e2e_s == pytest.approx(3.0)
    assert (cell.first, cell.ttft_s) == (2, pytest.approx(0.2))
    assert (cell.paced, cell.tpot_s) == (1, pytest.approx(0.1))
    assert records.requests[0].tpot == pytest.approx(0.1)
    assert (records.since, records.until) == (1000.0, 1001.0)


def test_arms_that_share_a_step_get_their_own_rows() -> None:
    told = {"arm": None, "window": None, "arms": ["b", None, "a"], "fallbacks": {"b": "raised"}}
    records = of([step(**told, drafted=[4, 3, 2], verified=[3, 2, 1], accepted=[2, 1, 0])])
    assert set(records.cells) == {(1000 // BUCKET_S, "a"), (1000 // BUCKET_S, "b")}
    a, b = records.cells[1000 // BUCKET_S, "a"], records.cells[1000 // BUCKET_S, "b"]
    assert (a.rows, a.drafted, a.verified, a.accepted, a.tokens) == (1, 2, 1, 0, 1)
    assert (b.rows, b.drafted, b.verified, b.accepted, b.tokens) == (1, 4, 3, 2, 3)
    assert (a.decisions, b.decisions, b.fallbacks) == (1, 0, {"raised": 1})


def test_washout_and_lines_without_an_arm_are_counted_only() -> None:
    bare = {key: value for key, value in step().items() if key not in ("arm", "window", "washout")}
    records = of([step(washout=True), request(washout=True), bare, request(arm=None, window=None)])
    assert not records.cells
    assert not records.requests
    assert records.counts == {"lines": 4, "washout": 2, "armless": 2}


NONSENSE = [
    step(ms="fast"),
    step(ms=float("nan")),
    step(ms=-1),
    step(verified=None),
    step(verified=["x", "y"]),
    step(accepted=[float("inf"), 0]),
    step(window=-1),
    step(window=True),
    step(window="3"),
    step(arm="no such name!"),
    step(arm=7),
    step(arm=None, window=None, arms=["a", 5], fallbacks=3),
    {"kind": "step", "arm": "a"},
    request(seconds=None),
    request(arm="x" * 33),
    request(tokens=[1]),
    {"kind": "request"},
    ["step"],
    "step",
    None,
]


@pytest.mark.parametrize("line", NONSENSE, ids=str)
def test_nonsense_is_counted_and_changes_nothing_else(line: Any) -> None:
    records = of([step(), request()])
    before = records.to_json()
    records.add(line)
    assert records.counts.pop("unread") == 1
    records.counts["lines"] -= 1
    assert records.to_json() == before


def test_another_kind_of_line_is_let_pass() -> None:
    assert of([{"kind": "swap", "t": 1.0}, {"t": 1.0}]).counts == {"lines": 2, "unknown": 2}


def test_another_split_begins_another_test() -> None:
    first, second = split_of(salt="1"), split_of(salt="2")
    told = [*lines(first, 4, 0), *lines(first, 4, 1)]  # a restart of the same test: its line comes again
    records = of(told)
    assert "splits" not in records.counts
    records.add({"kind": "split", "t": 9.0, **second.to_json()})
    assert not records.cells
    assert not records.requests
    assert (records.split, records.counts["splits"]) == (second.to_json(), 1)


def test_a_test_whose_line_was_rotated_away_is_over_when_another_begins() -> None:
    first = split_of(salt="1")
    second = replace(first, salt="2", start=first.start + 600)
    tail, told = [line for line in lines(first, 9, 0) if line["kind"] != "split"], [*lines(second, 6, 1)]
    records = of([*tail, *told])
    assert records.counts["splits"] == 1
    assert records.cells == of(told).cells
    assert records.since >= second.start
    restarted = of([*told[1:], told[0]])  # the same test: what came before its line is its own
    assert "splits" not in restarted.counts
    assert restarted.cells == of(told).cells


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOWS", 10)
    records = Records(recent=5)
    for window in range(100):
        records.add(step(window=window))
        records.add(request(window=window))
    assert sorted(records.cells) == [(window, "a") for window in range(90, 100)]
    assert [r.window for r in records.requests] == [95, 96, 97, 98, 99]
    records.add(step(window=3))
    assert (3, "a") not in records.cells
    assert records.counts["evicted"] == 1


@pytest.mark.parametrize("unit", ["window", "request"])
def test_json_is_the_way_there_and_back(unit: str) -> None:
    records = of(lines(split_of(unit), 6, 0))
    there = json.loads(json.dumps(records.to_json(), allow_nan=False))
    back = Records.from_json(there)
    assert back.cells == records.cells
    assert back.requests == records.requests
    assert json.loads(json.dumps(back.to_json())) == there
    assert Records.from_json(Records().to_json()).to_json() == Records().to_json()


@pytest.mark.parametrize("data", [{}, {"sums": ["seconds"]}, None, []], ids=str)
def test_other_json_is_refused_in_one_line(data: Any) -> None:
    with pytest.raises(ValueError, match=r"^these are no records|^the records are of another version"):
        Records.from_json(data)


def test_engines_are_summed() -> None:
    one, two = of([step(), request()]), of([step(), step(arm="b", window=4), request(arrival=990.0)])
    whole = one.merged([two])
    assert whole.cells[3, "a"].steps == 2
    assert whole.cells[4, "b"].steps == 1
    assert [r.arrival for r in whole.requests] == [990.0, 1000.0]
    assert (whole.since, whole.until, whole.counts["lines"]) == (990.0, 1001.0, 5)
    assert one.cells[3, "a"].steps == 1


def test_an_engine_of_another_test_is_left_out() -> None:
    here = of(lines(split_of(salt="1"), 6, 0))
    stale, untold = of(lines(split_of(salt="2"), 6, 1)), of([step()])
    whole = here.merged([stale, untold, Records()])
    assert whole.counts == here.counts + Counter(strangers=2)
    assert (whole.cells, set(whole.requests), whole.split) == (here.cells, set(here.requests), here.split)
    assert Records().merged([here]).cells == here.cells


def test_a_log_whose_name_is_a_pattern(tmp_path: Path) -> None:
    path = log(tmp_path / "run[1].jsonl", [step()])
    log(tmp_path / "run[1].jsonl.1", [step()])
    log(tmp_path / "run1.jsonl.2", [step()])
    assert [p.name for p in rotated(path)] == ["run[1].jsonl.1", "run[1].jsonl"]


def test_a_rotated_log_is_read_oldest_first_and_says_what_the_ledger_says(tmp_path: Path) -> None:
    told = [*lines(split_of(), 12, 0)]
    third = len(told) // 3
    log(tmp_path / "log.jsonl.10", told[:third])
    log(tmp_path / "log.jsonl.2", told[third : 2 * third])
    path = log(tmp_path / "log.jsonl", told[2 * third :])
    for other in ("log.jsonl.dp1", "log.jsonl.dp1.1", "log.jsonl.bak"):
        log(tmp_path / other, told)
    assert [p.name for p in rotated(path)] == ["log.jsonl.10", "log.jsonl.2", "log.jsonl"]
    assert Records.from_log(path).to_json() == of(told).to_json()


def test_a_torn_last_line_and_nonsense_in_a_log_are_counted(tmp_path: Path) -> None:
    path = log(tmp_path / "log", [step()], end='\x00\xff\n\n[[1]\n"step"\n' + "[" * 100_000 + '\n{"kind": "step", "t"')
    path.write_bytes(path.read_bytes().replace(b"\xc3\xbf", b"\xff"))
    records = Records.from_log(path)
    assert records.cells[3, "a"].steps == 1
    assert records.counts == {"lines": 7, "unread": 5, "torn": 1}


def test_a_log_that_is_not_there_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Records.from_log(tmp_path / "none")
