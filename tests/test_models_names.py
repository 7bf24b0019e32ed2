"""What a model name means, and what a wrong one gets."""

import subprocess
import sys
from pathlib import Path

import pytest

from faser.models import ModelError, default_cache, known_models, prepare, resolve


def test_known_names_have_the_profiles_of_their_pairs() -> None:
    assert known_models() == ["llama2-13b", "mistral-7b", "smollm2"]
    profiles = {name: resolve(name).profile for name in known_models()}
    assert profiles == {
        "llama2-13b": "h200-llama2-13b",
        "mistral-7b": "h200-mistral-7b",
        "smollm2": "cpu-smollm2",
    }


def test_resolve_builds_nothing(tmp_path: Path) -> None:
    pair = resolve("smollm2", cache=tmp_path / "cache")
    assert Path(pair.target).parent == Path(str(pair.draft)).parent == tmp_path / "cache"
    assert not (tmp_path / "cache").exists()


def test_ids_and_directories_pass_through(tmp_path: Path) -> None:
    for name in ("meta-llama/Llama-2-13b-chat-hf", str(tmp_path)):
        pair = prepare(name)
        assert (pair.name, pair.target, pair.draft, pair.profile) == (name, name, None, None)


@pytest.mark.parametrize("name", ["/no/such/directory", "./here", "../there", "~/models"])
def test_a_path_that_is_no_directory_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"^model directory .* does not exist$"):
        prepare(name)


def test_a_directory_of_the_working_directory_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("my-model").target == "my-model"


@pytest.mark.parametrize("name", ["smollm3", "", "SmolLM2"])
def test_an_unknown_name_gets_the_known_ones_in_one_line(name: str) -> None:
    with pytest.raises(ModelError) as error:
        resolve(name)
    text = str(error.value)
    assert repr(name) in text
    assert all(known in text for known in known_models())
    assert "\n" not in text


@pytest.mark.parametrize(
    ("name", "size", "real"),
    [("llama2-13b", 26, "meta-llama/Llama-2-13b-chat-hf"), ("mistral-7b", 15, "mistralai/Mistral-7B-Instruct-v0.3")],
)
def test_an_inflated_model_is_never_built_unasked(name: str, size: int, real: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        prepare(name, cache=tmp_path / "cache")
    said = str(error.value)
    assert said.startswith(f"model {name!r} is not built (missing): it is SmolLM2 at that shape, {size} GB; ")
    assert f"faser models prepare {name};" in said
    assert said.endswith(real)
    assert not (tmp_path / "cache").exists()


def test_inflated_models_share_the_draft_and_tape_of_smollm2(tmp_path: Path) -> None:
    small = resolve("smollm2", cache=tmp_path)
    for name in ("llama2-13b", "mistral-7b"):
        pair = resolve(name, cache=tmp_path)
        assert (pair.draft, pair.tape) == (small.draft, small.tape)
        assert Path(pair.target).parent == tmp_path
        assert f"-at-{name}-" in Path(pair.target).name


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("FASER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache() == tmp_path / ".cache" / "faser"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "faser"
    monkeypatch.setenv("FASER_CACHE", str(tmp_path / "own"))
    assert default_cache() == tmp_path / "own"


def test_importing_and_resolving_is_light() -> None:
    code = (
        "import sys, faser.models; faser.models.resolve('smollm2');"
        "print([m for m in ('torch', 'transformers', 'vllm', 'gguf', 'tokenizers') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
