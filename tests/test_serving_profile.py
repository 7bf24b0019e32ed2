"""`faser profile`: mistakes get a line, visits make the steps that they ask for, and a real engine gets a profile."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser import cli
from faser.costs import load_profile
from faser.costs.plan import TEMPERATURES, Visit
from faser.costs.steps import Steps
from faser.models import Pair
from faser.serving import profile
from faser.serving.profile import main, run_visits


def line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    said = [text for text in capsys.readouterr().err.splitlines() if text.startswith("faser profile: ")]
    assert len(said) == 1
    return said[0]


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--target", "smolm2"], ["'smolm2'", "smollm2"]),
        (["--target", "smollm2", "--max-batch", "0"], ["--max-batch", "0", "1 to 1024"]),
        (["--target", "smollm2", "--prior", "b300"], ["'b300'", "h200-llama2-13b"]),
        (["--target", "owner/model"], ["'owner/model'", "--draft"]),
        (["--target", "smollm2", "--draft", "gone"], ["--draft", "'gone'"]),
        (["--target", "smollm2", "--draft", "/nowhere/draft"], ["--draft", "'/nowhere/draft'", "config.json"]),
        (["--target", "/usr", "--draft", "owner/model"], ["--target", "'/usr'", "config.json"]),
        (["--target", "smollm2", "--log", "/nowhere/steps.jsonl"], ["--log", "/nowhere/steps.jsonl"]),
        (["--target", "smollm2", "--log", "/usr"], ["--log", "'/usr'", "a file"]),
    ],
)
def test_a_mistake_is_named_before_anything_starts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], names: list[str]
) -> None:
    said = line(capsys, *argv, "--out", str(tmp_path / "p.json"))
    assert all(name in said for name in names)
    assert not list(tmp_path.iterdir())


def test_a_format_that_vllm_does_not_have_is_refused_with_those_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--target", "smollm2", "--out", "p.json", "--load-format", "zzz"])
    said = capsys.readouterr().err
    assert "--load-format: invalid choice: 'zzz'" in said
    assert "dummy" in said


def test_a_place_that_cannot_be_written_and_a_log_that_holds_something(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "--out" in line(capsys, "--target", "smollm2", "--out", str(tmp_path / "gone" / "p.json"))
    log = tmp_path / "steps.jsonl"
    log.write_text("{}\n")
    assert "--log" in line(capsys, "--target", "smollm2", "--out", str(tmp_path / "p.json"), "--log", str(log))
    assert log.read_text() == "{}\n"
    both = str(tmp_path / "both")
    assert "two files" in line(capsys, "--target", "smollm2", "--out", both, "--log", both)


@pytest.mark.parametrize("out", ["", ".", "/usr", "/dev/full", f"{'n' * 252}.json"])
def test_what_cannot_be_a_profiles_file_is_refused_before_measuring(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert repr(str(Path(out))) in line(capsys, "--target", "smollm2", "--out", out)
    assert not list(tmp_path.iterdir())


def test_a_file_that_may_not_be_written_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "p.json"
    out.write_text("mine")
    monkeypatch.setattr("os.access", lambda *_: False)  # tests may run as root, who may do anything
    assert "--out" in line(capsys, "--target", "smollm2", "--out", str(out))
    assert out.read_text() == "mine"


def test_a_draft_of_another_vocabulary_is_refused(
    capsys: pytest.CaptureFixture[str], models: Pair, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 7}')
    said = line(capsys, "--target", str(models.target), "--draft", str(tmp_path), "--out", str(tmp_path / "p.json"))
    assert "vocabularies differ" in said
    assert "7" in said


def measured(monkeypatch: pytest.MonkeyPatch, log_line: str) -> None:
    """Measuring takes no engine, and leaves `log_line` in the log."""

    def measure(*given: Any) -> tuple[str, dict[str, Any]]:
        given[2].write_text(log_line)
        return "cpu", {}

    monkeypatch.setattr(profile, "prepare", lambda *_, **__: Pair("p", "owner/target", "owner/draft"))
    monkeypatch.setattr(profile, "_measure", measure)


@pytest.mark.parametrize("named", [True, False])
def test_a_profile_that_cannot_be_written_after_all_leaves_the_step_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, named: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    measured(monkeypatch, "steps")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    points = load_profile("cpu-smollm2").measured["points"]
    monkeypatch.setattr(Steps, "read", lambda _: Steps.of(np.array(points["rows"])))
    monkeypatch.setattr(profile, "grid_points", lambda steps: steps)
    monkeypatch.setattr(profile, "save", full)
    log = ["--log", str(tmp_path / "own.jsonl")] if named else []
    said = line(capsys, "--target", "p", "--out", str(tmp_path / "p.json"), *log)
    (kept,) = tmp_path.iterdir()
    assert "--out" in said
    assert "No space left on device" in said
    assert said.endswith(f"the step log is kept: {kept}")
    assert kept.read_text() == "steps"


def test_a_log_that_says_too_little_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured(monkeypatch, "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert "has 0 steps" in line(capsys, "--target", "p", "--out", str(tmp_path / "p.json"))
    assert [path.suffix for path in tmp_path.iterdir()] == [".jsonl"]


def test_ctrl_c_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    measured(monkeypatch, "")
    monkeypatch.setattr(profile, "_measure", stopped)
    assert main(["--target", "p", "--out", str(tmp_path / "p.json")]) == 130
    assert capsys.readouterr().err == "faser profile: stopped; no profile was written\n"


def test_the_command_line_knows_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "--target", "smolm2", "--out", "p.json"]) == 2
    assert "faser profile: " in capsys.readouterr().err


class Engine:
    """What OfflineEngine does, of an engine that runs at most `slots` requests and prefills in one step."""

    longest = 1000

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.left: list[int] = []
        self.begun = 0
        self.steps: list[tuple[int, int]] = []  # decoding, prefilling
        self.dropped = 0

    @property
    def busy(self) -> bool:
        return bool(self.left)

    def add(self, prompt: Sequence[int], max_tokens: int, *, temperature: float = 0.0) -> str:
        assert temperature in TEMPERATURES
        assert len(prompt) + max_tokens <= self.longest
        self.left.append(max_tokens)
        return str(len(self.left))

    def step(self) -> int:
        running = min(len(self.left), self.slots)
        self.steps.append((self.begun, running - self.begun))
        self.left = [n - 1 if i < running else n for i, n in enumerate(self.left)]
        self.left = [n for n in self.left if n > 0]
        self.begun = min(len(self.left), running)
        return running

    def drop_all(self) -> None:
        self.left, self.begun = [], 0
        self.dropped += 1


def run(engine: Any, *visits: Visit) -> list[tuple[int, int]]:
    run_visits(engine, visits)
    return list(engine.steps)


def test_a_batch_decodes_for_as_many_steps_as_asked() -> None:
    engine = Engine(slots=8)
    steps = run(engine, Visit(batch=3, context=10, steps=6), Visit(batch=2, context=10, steps=4))
    assert steps == [(0, 3), *[(3, 0)] * 5, (0, 2), *[(2, 0)] * 3]
    assert engine.dropped == 2


def test_prompts_come_alone_or_with_every_step() -> None:
    assert run(Engine(8), Visit(batch=0, context=0, steps=4, prompt=64)) == [(0, 1)] * 4
    assert run(Engine(8), Visit(batch=3, context=10, steps=4, prompt=64)) == [(0, 3), *[(3, 1)] * 3]


def test_a_batch_that_never_runs_as_a_whole_ends() -> None:
    assert len(run(Engine(2), Visit(batch=3, context=990, steps=4))) < 600
    assert len(run(Engine(2), Visit(batch=3, context=10, steps=4))) < 600


@pytest.mark.server
def test_a_real_engine_gets_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, log = tmp_path / "quick.json", tmp_path / "steps.jsonl"
    argv = ["--target", "smollm2", "--quick", "--max-batch", "4", "--prior", "cpu-smollm2"]
    assert main([*argv, "--out", str(out), "--log", str(log)]) == 0
    said = capsys.readouterr().out
    cost = load_profile(out)
    measured = cost.measured
    assert cost.name == "quick"
    assert f"{len(measured['points']['rows'])} grid points" in said
    assert len(measured["points"]["rows"]) >= 9
    assert {row[1] for row in measured["points"]["rows"]} >= {1.0, 4.0}
    assert measured["target"]["hidden"] == 576
    assert measured["target"]["layers"] == 30
    assert measured["draft"]["layers"] < 30
    assert measured["versions"]["torch"]
    assert measured["held_out"]["steps"] >= 3
    assert str(out) in measured["command"]
    steps = [json.loads(text) for text in log.read_text().splitlines()]
    assert max(step["running"] for step in steps if step["kind"] == "step") == 4
    slow = cost.step_ms(rows=128, batch=1)
    assert slow > cost.step_ms(rows=1, batch=1) > 0
