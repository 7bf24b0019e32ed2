"""Predictors in files: JSON that anyone can read, with the names of the features that the weights were fitted to.

One decision: a file is of one version of the features. Weights read against other columns would still give chances, and
wrong ones, so another name, order or hash is refused and never mapped.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from faser.acceptance.predictor import HISTORY_FEATURES, TOKEN_FEATURES, Predictor, PredictorError
from faser.tapes.mapped import write_whole

FORMAT, VERSION = "faser-acceptance", 1
SHIPPED = Path(__file__).parent
MAX_BYTES = 1 << 20
"""Largest file; a network of 16 units takes about 6 kB."""


def features_hash() -> str:
    """sha256 of this version's feature names, in order."""
    return hashlib.sha256("\n".join([*TOKEN_FEATURES, "|", *HISTORY_FEATURES]).encode()).hexdigest()


def save(predictor: Predictor, path: Path) -> None:
    """Write the file."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "features": {"token": TOKEN_FEATURES, "history": HISTORY_FEATURES, "sha256": features_hash()},
        "target": predictor.target,
        "draft": predictor.draft,
        "trained": predictor.trained,
        "arrays": {
            name: np.vectorize(lambda x: float(f"{x:.6g}"), otypes=[float])(array).tolist()
            for name, array in predictor.arrays.items()
        },
    }
    write_whole(path, f"{json.dumps(content, indent=1)}\n".encode())


def known_predictors() -> list[str]:
    """Names that `load_predictor` takes."""
    return sorted(p.stem for p in SHIPPED.glob("*.json"))


def shipped_for(tape: str | None) -> str | None:
    """The name of the shipped predictor that learned from the tape of this name; None if there is none."""
    return tape if tape in known_predictors() else None


@cache
def predictor_of(target: str, draft: str) -> Predictor | None:
    """The shipped predictor of these models, by their fingerprints; None if there is none."""
    for name in known_predictors():
        predictor = load_predictor(name)
        if target and (predictor.target, predictor.draft) == (target, draft):
            return predictor
    return None


def load_predictor(name: str | Path) -> Predictor:
    """The shipped predictor `name`, or that of a file. PredictorError says in one line what is wrong with it."""
    path = SHIPPED / f"{name}.json"
    if not path.is_file():
        path = Path(name)
    if not path.is_file():
        raise PredictorError(
            f"acceptance predictor {str(name)!r} is unknown; known: {', '.join(known_predictors())}, or a file"
        )
    try:
        if path.stat().st_size > MAX_BYTES:
            raise PredictorError(f"is {path.stat().st_size} bytes; allowed: {MAX_BYTES} at most")
        return _parse(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise PredictorError(f"acceptance predictor {path}: {error.strerror}") from None
    except (ValueError, OverflowError, RecursionError) as error:  # of JSON, of its encoding, and ours
        raise PredictorError(f"acceptance predictor {path}: {error}") from None


def _parse(data: Any) -> Predictor:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise PredictorError(f"not a predictor (no format {FORMAT!r} in it)")
    if data.get("version") != VERSION:
        raise PredictorError(f"version is {data.get('version')!r}; this FASER reads {VERSION}")
    features = _of(data, "features", dict)
    for kind, ours in (("token", TOKEN_FEATURES), ("history", HISTORY_FEATURES)):
        if features.get(kind) != list(ours):
            raise PredictorError(f"features: {kind} is {features.get(kind)!r}; this FASER's: {', '.join(ours)}")
    if features.get("sha256") != features_hash():
        raise PredictorError(f"features: sha256 is {features.get('sha256')!r}; this FASER's: {features_hash()!r}")
    return Predictor(
        _of(data, "arrays", dict),
        target=_of(data, "target", str),
        draft=_of(data, "draft", str),
        trained=_of(data, "trained", dict),
    )


def _of(data: dict[str, Any], key: str, kind: type) -> Any:
    value = data.get(key)
    if not isinstance(value, kind):
        raise PredictorError(f"{key} is {type(value).__name__}; {kind.__name__} expected")
    return value
