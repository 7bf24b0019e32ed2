"""The doctor says one line for each check, finds what is planted, and never falls over."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save

from faser import cli, doctor, installed, kernels, machine
from faser.installed import ERROR, OK, WARNING
from faser.machine import Gpu
from faser.models import ModelError, Pair
from faser.models.checkpoint import check_weights
from faser.tapes import Tape

H200 = Gpu("NVIDIA H200", 143771, "580.1")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the doctor says of a GPU does not depend on the machine that tests it."""
    monkeypatch.setattr(doctor, "gpus", list)


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Examine:
    return Examine(capsys)


class Examine:
    """Runs the doctor; returns subject -> (status, text), and checks the exit status against them."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *argv: object) -> dict[str, tuple[str, str]]:
        status = doctor.main([str(a) for a in argv])
        *lines, counts = self.capsys.readouterr().out.splitlines()
        found = {line[8:33].strip(): (line[:8].strip(), line[33:]) for line in lines}
        errors = sum(status == ERROR for status, _ in found.values())
        assert {status for status, _ in found.values()} <= {OK, WARNING, ERROR}
        assert status == (1 if errors else 0)
        assert counts.startswith(f"error: {errors}, ")
        return found


def test_a_whole_installation_has_no_errors(examine: Examine, models: Pair) -> None:
    found = examine()
    assert not {subject: line for subject, line in found.items() if line[0] == ERROR}
    subjects = ("python", "numpy", "torch", "vllm", "gpu", "cache", "model smollm2", "pair smollm2", "policy ppo.pt")
    assert found.keys() >= {*subjects, "tape smollm2", "profile h200-llama2-13b"}
    assert str(models.target) in found["model smollm2"][1]
    assert "49152" in found["pair smollm2"][1]
    assert "llama2-13b" in found["policy ppo.pt"][1]


def test_the_command_reaches_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "--draft", "/tmp"])
    assert end.value.code == 2
    assert "--draft needs --target" in capsys.readouterr().err


def test_an_empty_cache_is_no_error_and_stays_empty(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "known_tapes", list)  # a packed one is expanded there
    found = examine()
    assert found["model smollm2"] == (OK, found["model smollm2"][1])
    assert "faser serve builds it" in found["model smollm2"][1]
    assert found["cache"][0] == OK
    assert not (tmp_path / "cache").exists()


def test_an_inflated_model_is_missed_only_where_it_is_asked_for(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASER_CACHE", str(tmp_path))
    found = examine("llama2-13b")
    assert found["model llama2-13b"][0] == ERROR
    assert "faser models prepare llama2-13b" in found["model llama2-13b"][1]
    assert found["model mistral-7b"][0] == OK


def test_a_cache_that_cannot_be_used_is_an_error(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "file" / "cache"))
    status, text = examine()["cache"]
    assert status == ERROR
    assert "FASER_CACHE" in text


def test_a_damaged_model_is_named(
    examine: Examine, models: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / Path(models.target).name
    target.mkdir()
    for path in Path(models.target).iterdir():
        (target / path.name).symlink_to(path)
    (target / "config.json").unlink()
    text = (Path(models.target) / "config.json").read_text()
    (target / "config.json").write_text(text.replace("1", "2", 1))
    (tmp_path / Path(str(models.draft)).name).symlink_to(str(models.draft))
    monkeypatch.setenv("FASER_CACHE", str(tmp_path))
    status, text = examine()["model smollm2"]
    assert status == ERROR
    assert "config.json is altered" in text


def test_a_pair_of_two_vocabularies_is_an_error(examine: Examine, models: Pair, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32000}))
    found = examine("--target", tmp_path, "--draft", models.draft)
    (said,) = [text for status, text in found.values() if status == ERROR]
    assert "32000" in said
    assert "49152" in said


def test_weights_that_are_none_are_an_error_of_their_pair(examine: Examine, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 32000}))
    (tmp_path / "model.safetensors").write_text("no")
    found = examine("--target", tmp_path, "--draft", tmp_path)
    assert [subject[:4] for subject, (status, _) in found.items() if status == ERROR] == ["pair"]


@pytest.fixture
def copy(models: Pair, tmp_path: Path) -> Path:
    """A copy of the draft's directory."""
    return Path(shutil.copytree(str(models.draft), tmp_path / "copy"))


def test_weights_that_are_cut_or_missing_are_an_error(examine: Examine, copy: Path) -> None:
    path = copy / "model.safetensors"
    tensors = load_file(path)
    check_weights(copy)
    assert not [line for line in examine("--target", copy, "--draft", copy).values() if line[0] == ERROR]
    cut, embedding = path.read_bytes()[:9_000_000], tensors.pop("model.embed_tokens.weight")
    for weights, said in (
        (cut, "its weights cannot be read: model.safetensors: "),
        (save(tensors), "tensor model.embed_tokens.weight is missing"),
        (save(tensors | {"model.embed_tokens.weight": embedding[:9]}), "tensor model.embed_tokens.weight is (9, "),
    ):
        path.write_bytes(weights)
        with pytest.raises(ModelError, match=re.escape(f"{copy}: {said}")) as error:
            check_weights(copy)
        for arguments in (["--target", copy], ["--target", copy, "--draft", copy]):
            assert [text for status, text in examine(*arguments).values() if status == ERROR] == [str(error.value)]
    path.unlink()
    assert "No such file" in examine("--target", copy)["pair copy"][1]
    (copy / "pytorch_model.bin").touch()  # vLLM reads it, we do not
    assert examine("--target", copy, "--draft", copy)["pair copy"][0] == OK


def test_the_weights_of_an_unknown_model_are_those_of_its_index(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "other", "num_hidden_layers": 99}))
    check_weights(copy)
    for weights, said in (
        ({"model.norm.weight": "model.safetensors", "b": "model.safetensors"}, "tensor b is missing"),
        ({"b": "gone.safetensors"}, "its weights cannot be read: gone.safetensors: "),
        ({"b": 5}, "is not an index"),
        ({"b": "../model.safetensors"}, "is not an index"),
        ({}, "is not an index"),
    ):
        (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
        with pytest.raises(ModelError, match=said):
            check_weights(copy)


def test_a_profile_of_other_widths_is_a_warning(
    examine: Examine, models: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "gpus", lambda: [H200])
    pair = ("--target", models.target, "--draft", models.draft)
    status, text = examine(*pair, "--profile", "h200-llama2-13b")["profile h200-llama2-13b"]
    assert status == WARNING
    assert "measured with a target of hidden 5120" in text
    assert examine(*pair)["profile h200-llama2-13b"][0] == OK  # not the one in use


def test_a_tape_of_another_target_and_a_cut_one_are_errors(examine: Examine, models: Pair, tmp_path: Path) -> None:
    path = tmp_path / "my.tape"
    replace(Tape.iid(0.5, requests=9), target="0123456789abcdef", draft="fedcba9876543210").save(path)
    status, text = examine("--tape", path)["tape my.tape"]
    assert status == ERROR
    assert "0123456789abcdef" in text
    assert str(models.target) in text
    path.write_bytes(path.read_bytes()[:-9])
    assert "cut short" in examine("--tape", path)["tape my.tape"][1]


def test_names_that_can_be_none_are_errors(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["/" + "m" * 4000], ["m" * 4000], ["--target", "m" * 4000]):
        assert examine(*arguments)["model"][0] == ERROR
    monkeypatch.setenv("FASER_CACHE", "~nouser/x")
    assert "no such home" in examine()["cache"][1]


def test_an_answer_of_the_driver_that_is_no_text_is_an_error(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf '\\377\\376, 10, 5\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "gpus", machine.gpus)
    found = examine()
    assert found["gpu"][0] == ERROR
    assert found["policy ppo.pt"][0] == OK


@pytest.mark.parametrize(("sink", "said"), [("/dev/full", "No space left on device"), (None, "Broken pipe")])
def test_lines_that_nobody_takes_end_it_in_one_line(sink: str | None, said: str) -> None:
    if sink is None:
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(sink, os.O_WRONLY)
    code = "import sys; from faser.doctor import main; sys.exit(main([]))"
    ran = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (2, f"faser doctor: stopped: {said}\n")


def test_names_that_mean_nothing_are_errors_and_the_rest_is_checked(examine: Examine, tmp_path: Path) -> None:
    found = examine("smolm2", "--tape", "t", "--profile", "p", "--policy", tmp_path / "gone.pt")
    assert {s for s, line in found.items() if line[0] == ERROR} == {"model", "tape t", "profile p", "policy gone.pt"}
    assert all(name in found["model"][1] for name in ("'smolm2'", "smollm2"))


def test_the_profile_in_use_must_be_of_this_machine(
    examine: Examine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASER_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "gpus", lambda: [H200])
    assert examine("llama2-13b")["profile h200-llama2-13b"][0] == OK
    found = examine("--profile", "cpu-smollm2")
    assert found["profile cpu-smollm2"][0] == WARNING
    assert "NVIDIA H200" in found["profile cpu-smollm2"][1]
    assert found["gpu"][1] == "NVIDIA H200, 140 GiB, driver 580.1"


def test_a_check_that_breaks_is_one_line(examine: Examine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("of\ntwo lines")

    monkeypatch.setattr(doctor, "load_tape", broken)
    found = examine()
    assert found["tape smollm2"] == (ERROR, "cannot be checked: RuntimeError: of two lines")
    assert found["policy ppo.pt"][0] == OK


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "version_of", lambda _: None)
    found = {finding.subject: finding for finding in installed.packages([])}
    assert (found["numpy"].status, found["stable-baselines3"].status) == (ERROR, WARNING)
    assert "faser-serve[train]" in found["tensorboard"].text
    assert "faser-serve[cpu]" in found["vllm"].text
    assert "faser-serve[cuda]" in {f.subject: f for f in installed.packages([H200])}["torch"].text


@pytest.mark.parametrize(
    ("gpu_build", "cpu_build", "gpus", "status"),
    [
        ("0.32.0", None, [H200], OK),
        (None, "0.32.0+cpu", [], OK),
        ("0.32.0", None, [], WARNING),
        (None, "0.32.0", [H200], WARNING),
        (None, None, [], WARNING),
        ("0.32.0", "0.32.0", [H200], ERROR),
        ("0.33.1", None, [H200], ERROR),
        (None, "0.3.2", [], ERROR),
    ],
)
def test_vllm_must_be_the_right_release_and_build(
    gpu_build: str | None, cpu_build: str | None, gpus: list[Gpu], status: str
) -> None:
    assert installed.vllm(gpu_build, cpu_build, gpus).status == status


def test_our_folders_must_not_hide_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = str(Path(kernels.__file__).parents[1])
    versions: dict[str, str] = {}
    monkeypatch.setattr(installed, "version_of", versions.get)
    (seen,) = installed.names([ours])
    assert seen.status == WARNING
    assert ours in seen.text
    versions["kernels"] = "0.9"  # what transformers imports is now hidden
    (seen,) = installed.names([ours])
    assert seen.status == ERROR
    assert "the packages kernels are hidden" in seen.text


def test_other_packages_of_our_folders_names_are_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"kernels": "0.9"}
    monkeypatch.setattr(installed, "version_of", versions.get)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "train").mkdir()  # anyone's folder, not a package
    (tmp_path / "kernels" / "__init__.py").touch()
    (seen,) = installed.names([str(tmp_path)])
    assert (seen.status, seen.text.split()[0]) == (OK, "kernels")
    versions["faser"] = "1.0"  # this one does take our place
    assert [f.status for f in installed.names([str(tmp_path)])] == [ERROR, OK]


def test_the_driver_is_asked_for_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for script, found in (
        ("echo 'NVIDIA H200, 143771, 580.1'; echo 'NVIDIA L4, [N/A], 580.1'", [H200, Gpu("NVIDIA L4", None, "580.1")]),
        ("echo 'NVIDIA-SMI has failed'; exit 9", []),
        ("echo something else", []),
    ):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)
        assert machine.gpus() == found
    tool.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.gpus() == []
    assert machine.device([]) == machine.cpu()
    assert machine.device([H200]) == "NVIDIA H200"
