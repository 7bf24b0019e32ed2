"""A target, a draft, a tape and a profile that do not belong together are found, and both sides are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.costs import load_profile
from faser.costs.step_cost import PROFILES
from faser.models import ModelError, Pair, match, measured, names, smollm2
from faser.models.fingerprint import FUNCTION_OF, fingerprint
from faser.models.weights import write_safetensors
from faser.tapes import Tape, TapeError, load_tape

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a model directory: one tensor drawn from `seed`, and what its files shall hold."""

    def made(name: str, *, seed: int = 0, tokens: dict[str, int] | None = None, **config: Any) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        weights = np.random.default_rng(seed).normal(size=(4, 4)).astype(np.float32)
        write_safetensors(directory / "model.safetensors", {"w": (4, 4)}, [("w", weights)], lambda _: None)
        if tokens is not None:
            (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}}))
        return directory

    return made


def signed(target: str, draft: str, vocabulary: int = 0) -> Tape:
    return replace(Tape.iid(0.5, requests=3), target=target, draft=draft, vocabulary=vocabulary)


def test_vocabularies_of_two_sizes_are_refused_with_both(make: Make) -> None:
    target, draft = make("t", vocab_size=32000), make("d", vocab_size=49152)
    with pytest.raises(ModelError) as error:
        match.refuse_vocabularies(target, draft)
    assert all(part in str(error.value) for part in (str(target), "32000", str(draft), "49152"))
    match.refuse_vocabularies(target, target)


def test_a_vocabulary_may_be_kept_with_the_text_part(make: Make) -> None:
    assert match.vocabulary(make("t", text_config={"vocab_size": 7})) == 7


def test_what_cannot_be_told_is_not_refused(make: Make) -> None:
    target = make("t", vocab_size=32000)
    for other in ("owner/model", make("silent")):
        match.refuse_vocabularies(target, other)
        match.refuse_vocabularies(other, target)
        assert match.renumbered(target, other) is None
    tape = signed("abc", "def")
    assert match.foreign_tape(tape, "owner/model", None) is None
    assert match.foreign_tape(signed("", ""), target, target) is None


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '{"a":' * 100_000])
def test_a_configuration_that_cannot_be_read_is_named(make: Make, text: str) -> None:
    directory = make("t")
    (directory / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"t/config\.json"):
        match.vocabulary(directory)


def test_tokens_with_other_numbers_are_counted(make: Make) -> None:
    target = make("t", tokens={"a": 0, "b": 1, "c": 2})
    same, other = make("same", tokens={"c": 2, "a": 0, "b": 1}), make("other", tokens={"a": 0, "b": 2, "x": 1})
    assert match.renumbered(target, same) is None
    assert str(match.renumbered(target, other)).startswith("2 of the 3 tokens")


def test_a_unigram_tokenizer_numbers_tokens_by_their_order(make: Make) -> None:
    target, draft = make("t", tokens={"a": 0, "b": 1}), make("d")
    for order, differs in ((["a", "b"], False), (["b", "a"], True)):
        vocab = [[token, -1.0] for token in order]
        (draft / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
        assert (match.renumbered(target, draft) is not None) is differs


def test_a_tape_of_another_target_or_draft_is_refused_with_both_fingerprints(make: Make) -> None:
    target, draft, other = make("t", seed=1), make("d", seed=2), make("o", seed=3)
    marks = {path: fingerprint(path) for path in (target, draft, other)}
    tape = signed(marks[target], marks[draft])
    match.refuse_tape(tape, "mine", target, draft)
    for pair, theirs, ours in (((other, draft), target, other), ((target, other), draft, other)):
        with pytest.raises(TapeError) as error:
            match.refuse_tape(tape, "mine", *pair)
        assert all(part in str(error.value) for part in ("'mine'", marks[theirs], str(ours), marks[ours]))
        assert "\n" not in str(error.value)


def test_a_tape_of_a_model_is_that_of_its_inflations(make: Make) -> None:
    target, draft = make("t", seed=1), make("d", seed=2)
    large = make("large", seed=3, **{FUNCTION_OF: fingerprint(target)})
    large_draft = make("large-draft", seed=4, **{FUNCTION_OF: fingerprint(draft)})
    tape = signed(fingerprint(target), fingerprint(draft))
    assert match.foreign_tape(tape, large, large_draft) is None
    assert match.foreign_tape(tape, large_draft, large) is not None


def test_a_tape_of_another_vocabulary_is_found_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 32000}')
    reason = str(match.foreign_tape(signed("abc", "def", 49152), tmp_path, None))
    assert "49152" in reason
    assert "32000" in reason


def test_the_shipped_tape_is_of_the_shipped_pair(models: Pair) -> None:
    assert models.tape is not None
    assert match.foreign_tape(load_tape(models.tape), models.target, models.draft) is None


def test_training_is_refused_on_a_tape_of_another_target(models: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = fingerprint(Path(str(models.draft)))
    monkeypatch.setattr(names, "load_tape", lambda _: signed(draft, draft))
    for model in ("smollm2", "llama2-13b"):
        with pytest.raises(TapeError, match="tape 'smollm2' is of another pair"):
            measured(model)


def test_a_pair_of_ones_own_is_a_profile_and_a_tape_of_one_vocabulary(tmp_path: Path) -> None:
    cost, tape = measured("h200-mistral-7b,smollm2")
    assert (cost.name, len(tape)) == ("h200-mistral-7b", len(load_tape("smollm2")))
    profile = json.loads((PROFILES / "h200-mistral-7b.json").read_text())
    profile["measured"]["target"]["vocabulary"] = 32_000
    (tmp_path / "other.json").write_text(json.dumps(profile))
    with pytest.raises(ModelError, match=r"vocabulary of 32000 tokens, the tape \(.*\) of one with 49152"):
        measured(f"{tmp_path / 'other.json'},smollm2")
    for pair, said in (("gpt-5", "allowed: .*PROFILE,TAPE"), ("gpt-5,smollm2", "profile"), ("cpu-smollm2,no", "tape")):
        with pytest.raises(ValueError, match=said):
            measured(pair)


def test_a_profile_of_another_machine_is_named_with_what_measures_this_one() -> None:
    cost = load_profile("h200-llama2-13b")
    assert match.foreign_profile(cost, cost.device) is None
    said = str(match.foreign_profile(cost, "NVIDIA RTX 9090"))
    assert all(part in said for part in (cost.name, cost.device, "NVIDIA RTX 9090", "faser profile"))


def test_a_profile_of_other_widths_is_named_with_both(models: Pair, tmp_path: Path) -> None:
    cost = load_profile("cpu-smollm2")
    assert match.foreign_shapes(cost, models.target, models.draft) is None
    assert match.foreign_shapes(cost, models.target, None) is None
    said = str(match.foreign_shapes(load_profile("h200-llama2-13b"), models.target, models.draft))
    assert "a target of hidden 5120, layers 40, heads 40, " in said
    assert f"{models.target} has hidden 576, layers 30, heads 9, " in said
    wider = json.loads((Path(models.draft or "") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(wider | {"intermediate_size": 2048}))
    said = str(match.foreign_shapes(cost, models.target, tmp_path))
    assert f"a draft of intermediate 768; {tmp_path} has intermediate 2048; measure" in said
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    assert match.foreign_shapes(cost, tmp_path, "a/hub-id") is None


def test_a_policy_says_what_it_was_trained_on(tmp_path: Path) -> None:
    small = smollm2.pair(tmp_path)
    assert match.untrained({"models": ["smollm2", "mistral-7b"]}, small) is None
    assert match.untrained({"models": ["mistral-7b"]}, small) == "was trained on mistral-7b, not on smollm2"
    nothing: list[dict[str, object]] = [{}, {"models": []}, {"models": 3}]
    for silent in nothing:
        assert match.untrained(silent, small) is None
    assert match.untrained({"models": ["mistral-7b"]}, Pair("/my/own", "/my/own")) is None
