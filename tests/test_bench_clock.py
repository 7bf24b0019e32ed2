"""The clock's check: traces are read, replayed when they are due, and held against a profile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.bench import clock
from faser.bench.clock import Arrival, line, main, read_trace, replay
from faser.costs import Curve, StepCost
from faser.costs.plan import TEMPERATURES
from faser.costs.steps import Steps
from faser.models import Pair

COST = StepCost(name="flat", device="", source="", verify=Curve((1.0,), (10.0,)))


def test_a_line_compares_what_steps_took_with_what_was_expected() -> None:
    steps = Steps.of(np.array([[1.0, 1.0, 0.0, 5.0, ms, 0.0] for ms in (10.0, 20.0, 20.0)]))
    assert line("poisson", COST, steps).split() == ["poisson", "3", "0.05", "0.03", "-40.0%", "33.3%"]


def written(tmp_path: Path, *rows: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    return path


def test_a_trace_in_azures_format_is_read_from_its_first_request(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600+00:00,0,8",
        "2023-11-16 18:18:03.9799600,3180,27",
    )
    found = read_trace(path, 60.0, vocabulary=50)
    assert [(round(a.at, 3), len(a.prompt), a.output) for a in found] == [(0.0, 4808, 10), (0.052, 1, 8)]
    assert max(found[0].prompt) < 50


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:17:03,1\n", "GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,many,1\n", "'many'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "yesterday"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    ],
)
def test_a_bad_trace_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="--trace") as error:
        read_trace(path, 60.0, vocabulary=50)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--target", "smolm2", "--profile", "cpu-smollm2"], ["'smolm2'", "smollm2"]),
        (["--target", "smollm2", "--profile", "b300"], ["'b300'"]),
        (["--target", "smollm2", "--profile", "cpu-smollm2", "--policy", "lerned"], ["'lerned'", "goodput"]),
        (["--target", "smollm2", "--profile", "cpu-smollm2", "--tape", "gone"], ["'gone'"]),
        (["--target", "smollm2", "--profile", "cpu-smollm2", "--trace", "gone.csv"], ["--trace", "gone.csv"]),
        (["--target", "smollm2", "--profile", "cpu-smollm2", "--log", "/gone/x"], ["--log", "'/gone/x'"]),
        (["--target", "smollm2", "--profile", "cpu-smollm2", "--log", "/usr"], ["--log", "'/usr'"]),
        (["--target", "smollm2", "--profile", "cpu-smollm2", "--draft", "/gone/x"], ["--draft", "'/gone/x'"]),
        (["--target", "smollm2", "--profile", "cpu-smollm2", "--rate", "1e15"], ["--rate", "1e+15", "100000"]),
    ],
)
def test_a_mistake_gets_a_line(capsys: pytest.CaptureFixture[str], argv: list[str], names: list[str]) -> None:
    assert main(argv) == 2
    said = [text for text in capsys.readouterr().err.splitlines() if text.startswith("clock: ")]
    assert len(said) == 1
    assert all(name in said[0] for name in names)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--seed", "-1"], "--seed: '-1'; allowed: 0 to 4294967295"),
        (["--max-batch", "1025"], "--max-batch: '1025'; allowed: 1 to 1024"),
        (["--load-format", "zzz"], "--load-format: invalid choice: 'zzz'"),
    ],
)
def test_a_value_out_of_bounds_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    with pytest.raises(SystemExit):
        main(["--target", "smollm2", "--profile", "cpu-smollm2", *argv])
    assert says in capsys.readouterr().err


def test_a_draft_of_another_vocabulary_is_refused(
    capsys: pytest.CaptureFixture[str], models: Pair, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    argv = ["--target", str(models.target), "--profile", "cpu-smollm2", "--draft", str(tmp_path)]
    assert main(argv) == 2
    assert "clock: vocabularies differ" in capsys.readouterr().err


@pytest.mark.usefixtures("models")
def test_ctrl_c_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(clock, "_serve", stopped)
    assert main(["--target", "smollm2", "--profile", "cpu-smollm2", "--seconds", "1"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "clock: stopped"


class Engine:
    """What a replay asks of OfflineEngine; a step takes 5 ms and writes a token for each request."""

    longest = 100

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.added: list[tuple[float, int, int]] = []
        self.left: list[int] = []
        self.dropped = False

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def add(self, prompt: Sequence[int], max_tokens: int, *, temperature: float) -> str:
        assert temperature in TEMPERATURES
        self.added.append((time.monotonic() - self.start, len(prompt), max_tokens))
        self.left.append(max_tokens)
        return ""

    def step(self) -> int:
        time.sleep(0.005)
        wrote = len(self.left)
        self.left = [n - 1 for n in self.left if n > 1]
        return wrote

    def drop_all(self) -> None:
        self.left, self.dropped = [], True


def test_requests_are_sent_when_due_and_the_rest_is_dropped() -> None:
    engine: Any = Engine()
    arrivals = [
        Arrival(0.0, [1] * 10, 3),
        Arrival(0.1, [1] * 95, 10),
        Arrival(0.1, [1] * 500, 1000),
        Arrival(9.0, [1], 1),
    ]
    began, ended = replay(engine, arrivals, 0.2)
    assert began < ended
    assert [size for _, *size in engine.added] == [[10, 3], [90, 10], [50, 50]]
    assert all(at >= due for (at, *_), due in zip(engine.added, (0.0, 0.1, 0.1), strict=True))
    assert engine.dropped
    assert not engine.busy
