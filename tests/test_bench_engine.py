"""`faser bench engine`: both engines, side by side, on the CPU."""

import csv
from pathlib import Path

import pytest

from faser.bench import arguments, clock, fidelity
from faser.bench.engine import Cell, main, summarise
from faser.serving import profile


@pytest.mark.server
def test_both_engines_are_timed_at_every_batch_and_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "engine.csv"
    asked = ["--batches", "1", "3", "--depths", "0", "2", "--pairs", "1", "--context", "16"]
    assert main(["--target", "smollm2", *asked, "--out", str(out)]) == 0
    with out.open(newline="") as file:
        cells = [Cell(*map(float, row.values())) for row in csv.DictReader(file)]  # type: ignore[arg-type]  # whole ones
    assert [(cell.batch, cell.depth) for cell in cells] == [(1, 0), (3, 0), (1, 2), (3, 2)]
    for cell in cells:
        assert cell.vllm_ms > 0
        assert cell.ratio == pytest.approx(cell.faser_ms / cell.vllm_ms)
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["batch", "depth", "vLLM,", "ms", "FASER,", "ms", "ratio"]
    assert [row.split()[:2] for row in rows] == [["1", "0"], ["3", "0"], ["1", "2"], ["3", "2"]]


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    assert summarise(4, 2, [(10.0, 9.0), (20.0, 22.0), (10.0, 10.0)]) == Cell(4, 2, 10.0, 10.0, 1.0)


def test_a_mistake_is_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "gpus", list)
    assert main(["--target", "smollm2", "--async-scheduling"]) == 2
    assert capsys.readouterr().err.startswith("faser bench engine: --async-scheduling: vLLM has it on GPUs only")
    assert clock.main(["--target", "smollm2", "--profile", "cpu-smollm2", "--async-scheduling"]) == 2
    assert capsys.readouterr().err.startswith("clock: --async-scheduling: vLLM has it on GPUs only")
    assert fidelity.main(["--async-scheduling"]) == 2
    assert capsys.readouterr().err.startswith("fidelity: --async-scheduling: vLLM has it on GPUs only")
    assert profile.main(["--target", "smollm2", "--out", "p.json", "--async-scheduling"]) == 2
    assert capsys.readouterr().err.startswith("faser profile: --async-scheduling: vLLM has it on GPUs only")
    assert main(["--target", "smollm2", "--out", "/nowhere/engine.csv"]) == 2
    assert capsys.readouterr().err.startswith("faser bench engine: --out is '/nowhere/engine.csv'; its directory does")
