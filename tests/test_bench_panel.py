"""The panel: a policy a line, a load a column, and what is measured of it."""

import pytest

from faser.bench import panel


def test_the_table_has_every_policy_at_every_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert panel.main(["--pair", "smollm2", "--policies", "none", "static:7"]) == 0
    head, _, none, static, _, *says = capsys.readouterr().out.splitlines()
    assert head == "| smollm2 | load 0.1 | load 0.6 | load 1.2 |"
    assert none == "| none | 1.00 | 1.00 | 1.00 |"
    ratios = [float(cell) for cell in static.split("|")[2:-1]]
    assert static.startswith("| static:7 |")
    assert ratios[2] > 1.2  # seven tokens for every request of a busy CPU
    assert "simulated" in says[0]
    assert "cpu-smollm2" in says[1]


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert panel.main(["--policies", "statik:2"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("panel: policy 'statik:2' is unknown; known: none, static:K")
    assert told.count("\n") == 1
