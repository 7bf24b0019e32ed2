"""The simulator's check against a server: mistakes and Ctrl-C get a line; the rest needs an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from faser.bench import fidelity


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--requests", "9999999999999999"], "--requests: '9999999999999999'; allowed: 1 to 10000"),
        (["--episodes", "99999999999"], "--episodes: '99999999999'; allowed: 1 to 1000"),
        (["--slots", "0"], "--slots: '0'; allowed: 1 to 1024"),
    ],
)
def test_a_size_out_of_bounds_is_refused(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    with pytest.raises(SystemExit):
        fidelity.main(argv)
    assert says in capsys.readouterr().err


def test_a_profile_that_is_none_gets_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text("[" * 100_000)
    assert fidelity.main(["--profile", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"fidelity: profile {path}: ")
    assert said.count("\n") == 1


def test_ctrl_c_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fidelity, "prepare", stopped)
    assert fidelity.main([]) == 130
    assert capsys.readouterr().err == "fidelity: stopped\n"
