"""Recorded traces: three formats are told apart and read; periods are apart; a tape stands in for what was asked."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from faser.envs.recorded import Recorded, read_recorded
from faser.tapes import Tape

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"  # no ending: the format is told from the content
    path.write_text(text, encoding="utf-8", newline="")
    return path


def lists(of: Recorded) -> tuple[list[float], list[int], list[int]]:
    return of.arrival.round(6).tolist(), of.prompt_tokens.tolist(), of.output_tokens.tolist()


def test_azures_dates_are_read_with_seven_digits_zones_and_none(tmp_path: Path) -> None:
    rows = (
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04,110,27",  # a whole second
        "2023-11-16 20:17:05.2500000+02:00,3180,8",
        "2023-11-16 18:17:04.7500001Z,0,9",
    )
    found = read_recorded(written(tmp_path, AZURE + "\r\n".join(rows) + "\r\n"))
    assert lists(found) == ([0.0, 0.02004, 0.77004, 1.27004], [4808, 110, 1, 3180], [10, 27, 9, 8])
    assert [found.arrival.dtype.name, found.prompt_tokens.dtype.name] == ["float64", "int64"]


def test_a_time_without_a_zone_means_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is put forward between two requests does not come between them."""
    path = written(tmp_path, AZURE + "2024-03-31 01:59:59,1,1\r\n2024-03-31 03:00:01,1,1\r\n")
    with monkeypatch.context() as there:
        there.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
        time.tzset()
        found = read_recorded(path)
    time.tzset()
    assert found.arrival.tolist() == [0.0, 3602.0]


def test_burstgpt_is_read_in_seconds_without_what_failed(tmp_path: Path) -> None:
    rows = "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,API log\n118.5,GPT-4,417,276,693,API log\n"
    assert lists(read_recorded(written(tmp_path, BURSTGPT + rows))) == ([0.0, 113.5], [472, 417], [18, 276])


def test_burstgpts_later_columns_may_stand_anywhere(tmp_path: Path) -> None:
    text = (
        "\ufeffTimestamp,Session ID, Response tokens,Log Type,Request tokens\n2,a,7.0,API log,9\n\n1,b,8,API log,10\n"
    )
    assert lists(read_recorded(written(tmp_path, text))) == ([0.0, 1.0], [10, 9], [8, 7])


def test_mooncake_is_read_in_milliseconds(tmp_path: Path) -> None:
    rows = [(27482, 2287, 316), (3052, 7234, 794), (3052, 6755, 500)]
    lines = [json.dumps({"timestamp": t, "input_length": i, "output_length": o, "hash_ids": [1]}) for t, i, o in rows]
    found = read_recorded(written(tmp_path, "\n".join(lines) + "\n\n"))
    assert lists(found) == ([0.0, 0.0, 24.43], [7234, 6755, 2287], [794, 500, 316])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 0: columns are ''; allowed: TIMESTAMP, ContextTokens, GeneratedTokens; or Timestamp, "),
        ("time,in,out\n1,2,3\n", "line 1: columns are 'time, in, out'; allowed: TIMESTAMP, "),
        (AZURE, "holds no request"),
        (AZURE + "2023-11-16 18:17:03,1,0\n", "holds no request"),
        (
            AZURE + "2023-11-16 18:17:03,1,1\nyesterday,1,1\n",
            "line 3: TIMESTAMP is 'yesterday'; allowed: a date and time",
        ),
        (AZURE + "2023-11-16 18:17:03,many,1\n", "line 2: ContextTokens is 'many'; allowed: a whole number from 0 on"),
        (AZURE + "2023-11-16 18:17:03,-4,1\n", "line 2: ContextTokens is '-4'; allowed: a whole number from 0 on"),
        (AZURE + "2023-11-16 18:17:03,4,1.5\n", "line 2: GeneratedTokens is '1.5'; allowed: a whole number from 0 on"),
        (AZURE + "\n2023-11-16 18:17:03,4\n", "line 3: GeneratedTokens is missing; allowed: a whole number from 0 on"),
        (BURSTGPT + "inf,GPT-4,4,1,5,API log\n", "line 2: Timestamp is 'inf'; allowed: seconds"),
        (BURSTGPT + "1,GPT-4,4,1e999,5,API log\n", "line 2: Response tokens is '1e999'; allowed: a whole number"),
        (
            '{"timestamp": 1, "input_length": 2}\n',
            "line 1: output_length is missing; allowed: a whole number from 0 on",
        ),
        (
            '{"timestamp": true, "input_length": 2, "output_length": 3}',
            "line 1: timestamp is True; allowed: milliseconds",
        ),
        ('{"timestamp": 1, "input_length": [2], "output_length": 3}', "line 1: input_length is [2]; allowed: a whole"),
        ('{"timestamp": 1, "input_length": 2, "output_length": 3}\n[4]\n', "line 2: is '[4]'; allowed: an object of"),
        ('{"timestamp": 1, "input_length": 2, "outp', 'line 1: is \'{"timestamp": 1'),
    ],
)
def test_a_fault_is_named_with_its_line_and_what_is_allowed(tmp_path: Path, text: str, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match="trace") as error:
        read_recorded(path)
    assert says in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone' cannot be read: No such file"):
        read_recorded(tmp_path / "gone")
    (tmp_path / "zip").write_bytes(b"PK\x03\x04\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"zip' is not a text in UTF-8"):
        read_recorded(tmp_path / "zip")


def recording(*arrival: float) -> Recorded:
    """Requests with these times, whose prompts number them from 1."""
    n = len(arrival)
    return Recorded(np.array(arrival), np.arange(1, n + 1), np.full(n, 5))


def test_rescaling_changes_the_rate_and_nothing_else() -> None:
    before = recording(0.0, 1.0, 5.0, 8.0)
    assert before.rate == 3 / 8
    after = before.rescaled(6.0)
    assert after.rate == pytest.approx(6.0)
    assert after.arrival == pytest.approx([0.0, 1 / 16, 5 / 16, 0.5])
    assert after.prompt_tokens.tolist() == [1, 2, 3, 4]


def test_periods_are_stretches_of_time_one_after_the_other() -> None:
    periods = recording(0.0, 1.0, 1.5, 5.9, 6.0, 7.0, 8.0, 9.0, 10.0).periods()
    assert {name: of.prompt_tokens.tolist() for name, of in periods.items()} == {
        "train": [1, 2, 3, 4],
        "validation": [5, 6],
        "test": [7, 8, 9],
    }
    assert periods["test"].arrival.tolist() == [0.0, 1.0, 2.0]
    halves = recording(0.0, 1.0, 2.0, 3.0, 4.0).periods(train=0.5, validation=0.25)
    assert [len(of) for of in halves.values()] == [2, 1, 2]


def test_a_window_is_requests_in_a_row_from_a_random_one_on() -> None:
    of, rng = recording(*range(10)), np.random.default_rng(0)
    firsts = set()
    for _ in range(100):
        window = of.window(rng, 4)
        first = int(window.prompt_tokens[0])
        firsts.add(first)
        assert window.prompt_tokens.tolist() == [first, first + 1, first + 2, first + 3]
        assert window.arrival.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert firsts == {1, 2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda of: of.rescaled(0.0), "rate is 0.0; allowed: over 0"),
        (lambda of: of.periods(train=0.9, validation=0.1), "train and validation are 0.9 and 0.1; allowed"),
        (lambda of: of.periods(), "period 'validation' holds none of the 3 requests"),
        (lambda of: of.window(np.random.default_rng(0), 4), "n is 4; allowed: 1 to 3"),
        (lambda of: of._part(slice(2, 3)).rate, "of 1 requests in 0 s has no rate"),
        (lambda of: of.trace(tape_of((1, 2)), np.random.default_rng(0), nearest=5), "nearest is 5; allowed: 1 to 1"),
        (lambda of: Recorded(of.arrival + 1.0, of.prompt_tokens, of.output_tokens), "must start at 0"),
        (lambda of: Recorded(of.arrival, of.prompt_tokens[:2], of.output_tokens), "allowed: alike, not empty"),
        (lambda of: Recorded(of.arrival, of.prompt_tokens - 1, of.output_tokens), "must be at least 1"),
    ],
)
def test_what_cannot_be_done_with_a_recording_is_said(call: Callable[[Recorded], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(recording(0.0, 1.0, 10.0))


def tape_of(*lengths: tuple[int, int]) -> Tape:
    """Requests of these (prompt, output) lengths."""
    prompts, outputs = np.array(lengths, np.int32).T
    return Tape(
        domains=("chat",),
        domain=np.zeros(len(lengths), np.uint8),
        prompt_tokens=prompts,
        output_tokens=outputs,
        max_tokens=outputs,
        match=np.zeros(outputs.sum(), np.bool_),
        confidence=np.zeros((outputs.sum(), 7), np.uint8),
        source="a test",
    )


TAPE = tape_of((10, 10), (10, 100), (100, 10), (100, 100))


def test_a_request_of_the_tape_that_is_as_long_stands_for_a_recorded_one() -> None:
    lengths = np.array([(9, 120), (100, 10), (4000, 31), (4000, 33), (1, 1)])  # 31.6 is halfway from 10 to 100
    of = Recorded(np.linspace(0.0, 4.0, 5), lengths[:, 0], lengths[:, 1])
    trace = of.trace(TAPE, np.random.default_rng(0), nearest=1)
    assert trace.arrival is of.arrival
    assert trace.row.tolist() == [1, 2, 2, 3, 0]


def test_a_prompt_that_is_longer_than_all_does_not_outweigh_the_output() -> None:
    of = Recorded(np.zeros(1), np.array([10_000]), np.array([10]))
    assert of.trace(tape_of((100, 20), (80, 10)), np.random.default_rng(0), nearest=1).row.tolist() == [1]


def test_any_of_the_nearest_is_taken_and_no_other() -> None:
    tape = tape_of((1000, 1000), *((10, 10 + i) for i in range(4)), (500, 500))
    n = 3000  # more than one block of distances
    of = Recorded(np.linspace(0.0, 1.0, n), np.full(n, 10), np.full(n, 11))
    counts = np.bincount(of.trace(tape, np.random.default_rng(0), nearest=4).row, minlength=6)
    assert counts[[0, 5]].tolist() == [0, 0]
    assert counts[1:5] / n == pytest.approx([0.25] * 4, abs=4 * (0.25 * 0.75 / n) ** 0.5)
