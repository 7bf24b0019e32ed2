"""The benchmark of kernels says what it lacks; a GPU is needed for the rest."""

from pathlib import Path

import pytest
import torch

from faser.bench.kernels import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "python -m faser.bench.kernels: no CUDA GPU here, and it is GPU kernels that this times\n"


@pytest.mark.parametrize("csv", ["/gone/x.csv", "/usr", ""])
def test_a_table_that_cannot_be_written_is_refused_first(capsys: pytest.CaptureFixture[str], csv: str) -> None:
    assert main(["--csv", csv]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"python -m faser.bench.kernels: --csv is {str(Path(csv))!r}")
    assert said.err.count("\n") == 1
