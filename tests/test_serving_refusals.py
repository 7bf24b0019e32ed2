"""A user's mistake gets one line that names it, before anything is started."""

import socket
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from faser import cli
from faser.checkpoints import SHIPPED_POLICY
from faser.costs import load_profile
from faser.models import Pair
from faser.policies import policy_file
from faser.serving import serve
from faser.serving.serve import build_parser, configure, main
from faser.serving.settings import ADMIN_KEY
from faser.serving.state import State, save


def line(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    said = [text for text in capsys.readouterr().err.splitlines() if text.startswith("faser serve: ")]
    assert len(said) == 1
    return said[0]


def test_an_unknown_model_gets_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    said = line(capsys, "smolm2", "--policy", "none")
    assert "'smolm2'" in said
    assert "smollm2" in said


def test_a_name_for_training_only_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert "llama2-13b" in line(capsys, "llama2-13b", "--policy", "none")


def test_an_unknown_policy_gets_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    said = line(capsys, "--policy", "lerned")
    assert "'lerned'" in said
    assert "static:K" in said


def test_a_policy_file_that_is_not_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.pt").write_bytes(b"PK\x03\x04 not really")
    assert "p.pt" in line(capsys, "--policy", str(tmp_path / "p.pt"))
    assert "gone.pt" in line(capsys, "--policy", str(tmp_path / "gone.pt"))


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--speculative-config", '{"method": "ngram"}'], ["--policy", "--speculative-config"]),
        (["--spec-method", "ngram"], ["--spec-method", "ngram", "draft_model"]),
        (["--spec-tokens", "9"], ["--spec-tokens", "9", "1 to 7"]),
        (["--scheduler-cls", "a.B"], ["--scheduler-cls", "a.B"]),
        (["--async-scheduling"], ["--async-scheduling", "GPUs"]),
        (["--async-scheduling", "--pipeline-parallel-size", "2"], ["--async-scheduling", "--pipeline-parallel-size"]),
        (["--faser-deadline-ms", "0"], ["deadline_ms", "0"]),
        (["--faser-profile", "h300"], ["h300", "h200-llama2-13b"]),
        (["--faser-log", "/nowhere/at/all"], ["--faser-log", "/nowhere/at/all"]),
        (["--faser-log", "/dev/null", "--faser-log-max-mb", "0"], ["--faser-log-max-mb", "0", "0.01 to 1000000"]),
        (["--faser-log", "/dev/null", "--faser-log-max-mb", "nan"], ["--faser-log-max-mb", "nan"]),
        (["--faser-log", "/dev/null", "--faser-log-keep", "-1"], ["--faser-log-keep", "-1", "0 to 1000"]),
        (["--faser-log-prompts"], ["--faser-log-prompts", "--faser-log"]),
        (["/nowhere/at/all"], ["/nowhere/at/all"]),
        (["--model", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["--additional-config", "3"], ["--additional-config", "3", "object"]),
    ],
)
def test_conflicts_and_ranges_are_named(capsys: pytest.CaptureFixture[str], argv: list[str], names: list[str]) -> None:
    said = line(capsys, *argv, "--policy", "static:2")
    assert all(name in said for name in names), said


def test_a_draft_of_another_vocabulary_is_refused_with_both_sizes(
    capsys: pytest.CaptureFixture[str], models: Pair, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 32000}')
    said = line(capsys, "--policy", "static:2", "--spec-model", str(tmp_path))
    assert all(part in said for part in (str(models.target), "49152", str(tmp_path), "32000")), said


def configured(monkeypatch: pytest.MonkeyPatch, models: Pair, name: str, *argv: str) -> Namespace:
    """Arguments of a server of `name`, as if that were built."""
    monkeypatch.setattr(serve, "prepare", lambda *_, **__: replace(models, name=name))
    monkeypatch.setattr(serve, "_on_cpu", lambda: True)
    args: Namespace = build_parser().parse_args([name, *argv])
    configure(args)
    return args


def test_a_known_model_answers_to_its_short_name(monkeypatch: pytest.MonkeyPatch, models: Pair) -> None:
    for name in ("llama2-13b", "smollm2"):
        assert configured(monkeypatch, models, name, "--policy", "none").served_model_name == [name]
    own = configured(monkeypatch, models, "llama2-13b", "--policy", "none", "--served-model-name", "mine")
    assert own.served_model_name == ["mine"]
    assert own.kv_cache_memory_bytes is None  # what only the small one is served with


def test_none_that_was_swapped_in_keeps_the_draft_over_a_restart(
    monkeypatch: pytest.MonkeyPatch, models: Pair, tmp_path: Path
) -> None:
    monkeypatch.setenv(ADMIN_KEY, "a-key-of-a-test-it-is")
    save(tmp_path / "state.json", State(policy="none"))
    kept = configured(monkeypatch, models, "smollm2", "--faser-state", str(tmp_path / "state.json"))
    assert kept.additional_config["faser"]["policy"] == "none"
    assert kept.speculative_config is not None
    assert configured(monkeypatch, models, "smollm2", "--policy", "none").speculative_config is None


def test_step_costs_of_another_machine_or_of_other_models_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], models: Pair
) -> None:
    def warned(device: str, *flags: str) -> list[str]:
        monkeypatch.setattr(serve, "_device", lambda: device)
        configured(monkeypatch, models, "smollm2", *flags)
        return [text for text in capsys.readouterr().err.splitlines() if text.startswith("faser serve: warning: ")]

    assert not warned(load_profile("cpu-smollm2").device)
    (said,) = warned("NVIDIA H200")
    assert all(part in said for part in ("cpu-smollm2", "NVIDIA H200", "faser profile", "--faser-profile"))
    (said,) = warned("NVIDIA H200", "--faser-profile", "h200-llama2-13b")
    assert all(part in said for part in ("h200-llama2-13b", "layers 40", "layers 30", "--faser-profile"))


def test_a_policy_that_was_trained_on_other_pairs_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], models: Pair, tmp_path: Path
) -> None:
    policy = replace(policy_file.load(SHIPPED_POLICY), training={"models": ["mistral-7b"]})
    policy_file.save(policy, tmp_path / "p.pt")
    configured(monkeypatch, models, "smollm2", "--policy", str(tmp_path / "p.pt"))
    assert "warning: the policy was trained on mistral-7b, not on smollm2" in capsys.readouterr().err


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


def test_a_port_in_use_is_named(capsys: pytest.CaptureFixture[str], taken: int) -> None:
    said = line(capsys, "--policy", "none", "--host", "127.0.0.1", "--port", str(taken))
    assert str(taken) in said


def test_help_shows_the_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help=faser"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "--policy" in shown
    assert "--faser-deadline-ms" in shown
    assert "static:K" in shown


def test_the_command_lists_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "serve" in capsys.readouterr().out
    assert cli.main(["srve"]) == 2
    assert "'srve'" in capsys.readouterr().err
