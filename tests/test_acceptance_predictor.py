"""The runtime predictor: its formula, what it may look at, and which files it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faser.acceptance import HISTORY_FEATURES, Predictor, PredictorError, known_predictors, load_predictor, save
from faser.acceptance.predictor import EDGE, array_shapes
from faser.core import MAX_DEPTH, Floats

K = MAX_DEPTH


def random_predictor(hidden: int = 5, seed: int = 0) -> Predictor:
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in array_shapes(hidden).items()}
    arrays["history_low"], arrays["history_high"] = np.zeros(4, np.float32), np.ones(4, np.float32)
    return Predictor(arrays)


def random_drafts(n: int, seed: int = 0) -> tuple[Floats, Floats]:
    """Confidences [n, K], some drafts cut short, and histories [n, H]."""
    rng = np.random.default_rng(seed)
    confidence = rng.random((n, K), np.float32)
    confidence[np.arange(K) >= rng.integers(0, K + 1, n)[:, None]] = 0.0
    return confidence, rng.random((n, len(HISTORY_FEATURES)), np.float32)


def by_the_formula(predictor: Predictor, confidence: Floats, history: Floats) -> list[float]:
    """Chances of one draft, token by token, as the module writes it."""
    a = {name: array.astype(np.float64) for name, array in predictor.arrays.items()}
    h = np.clip(history.astype(np.float64), a["history_low"], a["history_high"])
    c = np.clip(confidence.astype(np.float64), EDGE, 1 - EDGE)
    odds = np.log(c / (1 - c))
    chances = []
    for j in range(K):
        t = np.array([odds[j], np.log(c[j])])
        units = np.maximum(a["unit_bias"][j] + a["token_unit"] @ t + a["history_unit"] @ h, 0.0)
        logit = a["bias"][j] + a["token_skip"][j] @ t + a["history_skip"] @ h + a["out"] @ units
        chances.append(0.0 if confidence[j] == 0 else 1 / (1 + np.exp(-logit)))
    return chances


def named(history: Floats) -> dict[str, Floats]:
    """As `survival` takes it."""
    return dict(zip(HISTORY_FEATURES, history.T, strict=True))


@pytest.mark.parametrize("n", [0, 1, 13])
def test_chances_are_what_the_formula_says(n: int) -> None:
    predictor, (confidence, history) = random_predictor(), random_drafts(n)
    expected = np.array([by_the_formula(predictor, *draft) for draft in zip(confidence, history, strict=True)])
    found = predictor.conditional(confidence, history)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected.reshape(n, K), atol=2e-5)


def test_survival_is_the_running_product_and_zero_where_nothing_is_drafted() -> None:
    predictor, (confidence, history) = random_predictor(), random_drafts(40)
    survival = predictor.survival(confidence, **named(history))
    np.testing.assert_allclose(survival, np.cumprod(predictor.conditional(confidence, history), axis=1), rtol=1e-5)
    assert (survival[confidence == 0] == 0).all()
    assert (survival[confidence > 0] > 0).all()


def test_a_token_does_not_depend_on_what_is_drafted_after_it() -> None:
    predictor, (confidence, history) = random_predictor(), random_drafts(40)
    whole = predictor.conditional(confidence, history)
    for depth in range(K):
        cut = np.where(np.arange(K) < depth, confidence, 0.0).astype(np.float32)
        np.testing.assert_allclose(predictor.conditional(cut, history)[:, :depth], whole[:, :depth], atol=1e-6)


def test_a_result_outlives_later_calls_of_any_size() -> None:
    predictor = random_predictor()
    kept = predictor.conditional(*random_drafts(20))
    before = kept.copy()
    for n in (3, 300, 20):
        predictor.conditional(*random_drafts(n, seed=n))
    assert (kept == before).all()
    assert (predictor.conditional(*random_drafts(20)) == before).all()


def test_history_outside_of_what_was_seen_is_read_as_its_edge() -> None:
    predictor, (confidence, history) = random_predictor(), random_drafts(10)
    hot, edge = history.copy(), history.copy()
    at = HISTORY_FEATURES.index("temperature")
    hot[:, at], edge[:, at] = 5.0, 1.0
    assert (predictor.conditional(confidence, hot) == predictor.conditional(confidence, edge)).all()


def test_a_file_gives_the_same_predictor(tmp_path: Path) -> None:
    drafts = random_drafts(30)
    predictor = random_predictor()
    made = Predictor(predictor.arrays, target="t", draft="d", trained={"command": "x"})
    save(made, tmp_path / "p.json")
    loaded = load_predictor(tmp_path / "p.json")
    assert (loaded.target, loaded.draft, loaded.trained) == ("t", "d", {"command": "x"})
    np.testing.assert_allclose(loaded.conditional(*drafts), made.conditional(*drafts), atol=1e-4)


def spoil(data: dict[str, Any], key: str) -> None:
    """Make one thing wrong."""
    match key:
        case "format":
            data["format"] = "faser-policy"
        case "version":
            data["version"] = 2
        case "order":
            data["features"]["history"].reverse()
        case "hash":
            data["features"]["sha256"] = "0"
        case "missing":
            del data["arrays"]["token_skip"]
        case "shape":
            data["arrays"]["bias"].append(0.0)
        case "ragged":
            data["arrays"]["token_unit"][0].append(0.0)
        case "nan":
            data["arrays"]["bias"][0] = float("nan")
        case "out":
            data["arrays"]["out"] = "many"
        case "draft":
            data["draft"] = None


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("format", "not a predictor"),
        ("version", "version is 2; this FASER reads 1"),
        ("order", "features: history is"),
        ("hash", "features: sha256 is '0'"),
        ("missing", "token_skip"),
        ("shape", r"bias has shape \(8,\); \(7,\) expected"),
        ("ragged", "token_unit is no array of numbers"),
        ("nan", "bias holds NaN"),
        ("out", "out has 0 units"),
        ("draft", "draft is NoneType; str expected"),
    ],
)
def test_a_file_that_is_not_ours_is_refused_in_one_line(key: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    save(random_predictor(), path)
    data = json.loads(path.read_text())
    spoil(data, key)
    path.write_text(json.dumps(data))
    with pytest.raises(PredictorError, match=says) as refused:
        load_predictor(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xfe", b" " * (1 << 21)])
def test_what_is_no_json_object_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_bytes(content)
    with pytest.raises(PredictorError, match=r"p\.json"):
        load_predictor(tmp_path / "p.json")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(PredictorError, match=r"'nothing' is unknown; known: .*smollm2"):
        load_predictor("nothing")


def test_every_shipped_predictor_loads_and_without_torch() -> None:
    assert "smollm2" in known_predictors()
    code = (
        "import sys; from faser.acceptance import known_predictors, load_predictor;"
        "[load_predictor(name) for name in known_predictors()]; assert not {'torch', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
