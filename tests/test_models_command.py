"""`faser models` lists, builds where it should, and answers a mistake in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from faser import cli
from faser.models import ModelError, Pair, prepare, resolve, smollm2
from faser.models.cache import MANIFEST, build, building, fault
from faser.models.fingerprint import fingerprint, function
from faser.models.names import gigabytes, known_models
from faser.models.shapes import SHAPES, Shape

SMALL = Shape(name="small", hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, intermediate=24)


def write_llama(directory: Path) -> None:
    """A random Llama of shape SMALL with a vocabulary of 10 and a tied output matrix."""
    draw = torch.Generator().manual_seed(len(directory.name))
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (10, 16), "model.norm": (16,)}
    sizes |= {f"model.layers.0.{part}": size for part, size in SMALL.layer().items()}
    weights = {f"{name}.weight": torch.rand(size, generator=draw) for name, size in sizes.items()}
    save_file(weights, directory / "model.safetensors")
    config: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 10, "rms_norm_eps": 1e-5, "hidden_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24,
        "tie_word_embeddings": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache whose `smollm2` is a toy, and named shapes a little larger than it: the real ones take gigabytes."""
    cache = tmp_path / "cache"
    pair = Pair("smollm2", cache / "smollm2-135m-instruct-00", cache / "smollm2-draft-15m-00", "cpu-smollm2", "smollm2")

    def toy(where: Path, **_: bool) -> Pair:
        assert where == cache
        with building(Path(pair.target), Path(str(pair.draft))):
            for directory in (Path(pair.target), Path(str(pair.draft))):
                if fault(directory, verify=False):
                    build(directory, write_llama, lambda _: None)
        return pair

    monkeypatch.setenv("FASER_CACHE", str(cache))
    monkeypatch.setattr(smollm2, "pair", lambda _: pair)
    monkeypatch.setattr(smollm2, "prepare", toy)
    for name in list(SHAPES):
        monkeypatch.setitem(SHAPES, name, replace(SMALL, name=name, hidden=20, layers=2))
    return cache


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Path]:
    """What the command printed on stdout: lines of `what: directory`."""
    return {what: Path(path) for what, path in (line.split(": ") for line in capsys.readouterr().out.splitlines())}


def test_a_name_is_built_in_the_cache_and_then_served(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelError, match=r"'llama2-13b' is not built \(missing\).*faser models prepare llama2-13b;"):
        prepare("llama2-13b", progress=False)
    assert cli.main(["models", "prepare", "llama2-13b"]) == 0
    pair = prepare("llama2-13b", progress=False)
    assert said(capsys) == {"target": pair.target, "draft": pair.draft}
    target = Path(pair.target)
    assert pair == resolve("llama2-13b")
    assert (pair.profile, pair.tape) == ("h200-llama2-13b", "smollm2")
    assert target.parent == cache
    assert target.name.startswith("smollm2-135m-instruct-at-llama2-13b-")
    assert fault(target, verify=True) is None
    assert function(target) == fingerprint(Path(resolve("smollm2").target))
    with pytest.raises(ModelError, match=r"'mistral-7b' is not built"):
        prepare("mistral-7b", progress=False)


def test_an_altered_model_is_not_served_and_prepare_makes_it_again(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["models", "prepare", "mistral-7b"]) == 0
    target = Path(resolve("mistral-7b").target)
    (target / "model-00001-of-00004.safetensors").unlink()
    with pytest.raises(ModelError, match=r"'mistral-7b' is not built \(.*00001-of-00004.safetensors is missing"):
        prepare("mistral-7b", progress=False)
    assert cli.main(["models", "list"]) == 0
    assert "mistral-7b  broken" in capsys.readouterr().out
    assert cli.main(["models", "prepare", "mistral-7b"]) == 0
    assert prepare("mistral-7b", verify=True, progress=False).target == target
    assert target.parent == cache


@pytest.mark.usefixtures("cache")
def test_out_takes_the_model_and_its_inflated_draft_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "elsewhere" / "big"
    assert cli.main(["models", "prepare", "llama2-13b", "--out", str(out), "--draft"]) == 0
    draft = out.with_name("big-draft")
    small = resolve("smollm2")
    assert said(capsys) == {"target": out, "draft": small.draft, "inflated draft": draft}
    assert function(out) == fingerprint(Path(small.target))
    assert function(draft) == fingerprint(Path(str(small.draft))) != function(out)
    with pytest.raises(ModelError, match="is not built"):
        prepare("llama2-13b", progress=False)


@pytest.mark.usefixtures("cache")
def test_smollm2_is_copied_to_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine"
    for _ in range(2):  # the second finds it there
        assert cli.main(["models", "prepare", "smollm2", "--out", str(out)]) == 0
    assert said(capsys)["draft"] == out.with_name("mine-draft")
    target = Path(resolve("smollm2").target)
    assert (out / "model.safetensors").read_bytes() == (target / "model.safetensors").read_bytes()
    assert fault(out, verify=True) is None
    assert (out / MANIFEST).is_file()


def test_any_llama_goes_to_any_larger_shape(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "my-llama", tmp_path / "out"
    source.mkdir()
    write_llama(source)
    wide = json.loads((source / "config.json").read_text()) | {"hidden_size": 40, "num_hidden_layers": 3}
    (tmp_path / "wide.json").write_text(json.dumps(wide))
    arguments = [
        "models",
        "prepare",
        "--source",
        str(source),
        "--out",
        str(out),
        "--shape",
        str(tmp_path / "wide.json"),
    ]
    assert cli.main(arguments) == 0
    assert said(capsys) == {"model": out}
    config = json.loads((out / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (40, 3, 10)
    assert "# my-llama at the cost of wide" in (out / "README.md").read_text()
    assert not cache.exists()
    assert cli.main(["models", "prepare", "llama2-13b", "--source", str(source), "--out", str(tmp_path / "named")]) == 0
    assert json.loads((tmp_path / "named" / "config.json").read_text())["hidden_size"] == 20


def test_list_says_what_is_built_and_builds_nothing(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "list"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[:2] for line in text.splitlines()[2:]] == [
        *([name, "no"] for name in known_models()),
        ["(draft)", "no"],
    ]
    assert not cache.exists()
    assert cli.main(["models", "prepare", "llama2-13b", "--draft"]) == 0
    capsys.readouterr()
    assert cli.main(["models", "list"]) == 0
    built = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]}
    assert built == {"llama2-13b": "yes", "mistral-7b": "no", "smollm2": "yes", "(draft)": "yes"}


def test_sizes_are_those_of_the_real_models(models: Pair) -> None:
    config = json.loads((Path(models.target) / "config.json").read_text())
    assert config["vocab_size"] == 49152
    assert {name: round(gigabytes(name), 2) for name in SHAPES} == {
        "llama2-13b": 26.38,
        "mistral-7b": 14.76,
        "tinyllama-1.1b": 2.34,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama9"], "model is 'llama9'; allowed: llama2-13b, mistral-7b, smollm2"),
        ([], "one of NAME (llama2-13b, mistral-7b, smollm2) and --shape is needed"),
        (["llama2-13b", "--shape", "mistral-7b"], "and not both"),
        (["smollm2", "--draft"], "smollm2 is not inflated"),
        (["smollm2", "--source", "."], "smollm2 is not inflated"),
        (["--shape", "mistral-7b"], "--shape needs --source"),
        (["llama2-13b", "--source", "."], "--source needs --out"),
        (["llama2-13b", "--source", ".", "--draft", "--out", "x"], "--draft inflates smollm2's draft"),
        (["llama2-13b", "--source", "/no/such", "--out", "x"], "model directory '/no/such' does not exist"),
        (["--source", ".", "--shape", "huge", "--out", "x"], "shape is 'huge'; allowed: llama2-13b"),
        (["llama2-13b", "--device", "tpu"], "device is 'tpu'; allowed: cpu, cuda"),
        (["llama2-13b", "--out", "/dev/null"], "/dev/null exists and is not this model"),
        (["smollm2", "--out", "."], "--out is '.'; allowed: a directory to make, by its name"),
        (["smollm2", "--out", ""], "--out is ''; allowed: a directory to make"),
        (["smollm2", "--out", "/"], "--out is '/'; allowed: a directory to make"),
        (["smollm2", "--out", ".."], "--out is '..'; allowed: a directory to make"),
        (["smollm2", "--out", "~nouser/x"], "--out is '~nouser/x'; there is no such home"),
        (["smollm2", "--out", "o" * 4000], "File name too long"),
        (
            ["smollm2", "--out", "/dev/null/x"],
            "models in /dev/null: File exists: /dev/null; --out names another directory",
        ),
        (["--source", ".", "--shape", "s" * 4000, "--out", "x"], "allowed: llama2-13b, mistral-7b, tinyllama-1.1b, or"),
        (["llama2-13b", "--source", "s" * 4000, "--out", "x"], "does not exist"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_a_mistake_gets_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["models", "prepare", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("faser models: ")
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.usefixtures("cache")
def test_ctrl_c_says_that_nothing_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("faser.models.inflate.inflate", stop)
    assert cli.main(["models", "prepare", "llama2-13b"]) == 130
    assert capsys.readouterr().err == "faser models: stopped; nothing half-made was kept\n"


def test_every_command_of_the_usage_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    usage = capsys.readouterr().out
    listed = {line.split()[0] for line in usage.splitlines() if line.startswith("  ") and line[2] != " "}
    assert listed == {*cli.COMMANDS, "--version"}
    assert cli.main(["sing"]) == 2
    assert capsys.readouterr().err == f"faser: command 'sing' is unknown; known: {', '.join(cli.COMMANDS)}\n"
