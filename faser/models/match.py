"""Whether a target, a draft, a tape and a profile belong together; each check names both sides of what does not.

One decision: what cannot be told (a hub id, a model that is not built, a tape without fingerprints) is not held
against anyone: these checks return None. What they do find is sure.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from faser.costs import StepCost
from faser.models.fingerprint import function
from faser.models.json_file import read_json
from faser.models.pair import ModelError, Pair
from faser.models.shapes import Shape
from faser.tapes.tape import Tape, TapeError

Model = Path | str
"""A Hugging Face directory, or whatever else vLLM takes as a model."""


def vocabulary(model: Model) -> int | None:
    """Size of the vocabulary of a model directory; None if it does not say, or is none. ModelError: not readable."""
    config = _json(Path(model) / "config.json")
    if config is None:
        return None
    inner = config.get("text_config")  # where a model that also sees or hears keeps it
    size = config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
    return size if type(size) is int else None


def refuse_vocabularies(target: Model, draft: Model) -> None:
    """ModelError if the two have vocabularies of different sizes: a draft's token would not be a target's."""
    ours, theirs = vocabulary(target), vocabulary(draft)
    if None not in (ours, theirs) and ours != theirs:
        raise ModelError(
            f"vocabularies differ: target {target} has {ours} tokens, draft {draft} has {theirs}; "
            "a draft must have its target's vocabulary"
        )


def renumbered(target: Model, draft: Model) -> str | None:
    """How many tokens of the target have another number in the draft's tokenizer, for people; None: not any.

    Vocabularies of one size need not be one: Llama 2 and Mistral both have 32,000 tokens. Only speed suffers.
    """
    ours, theirs = _tokens(Path(target)), _tokens(Path(draft))
    if ours is None or theirs is None or ours == theirs:
        return None
    other = sum(theirs.get(token) != number for token, number in ours.items())
    if not other:
        return None
    return (
        f"{other} of the {len(ours)} tokens of target {target} have another number, or none, in draft {draft}; "
        "drafts with those are rejected"
    )


def has_weights(model: Model) -> bool:
    """Whether it is a directory that a fingerprint can be taken of. ModelError: its config.json is not readable."""
    return _json(Path(model) / "config.json") is not None and any(Path(model).glob("*.safetensors"))


def foreign_tape(tape: Tape, target: Model, draft: Model | None) -> str | None:
    """In what `tape` is not of this target and draft, naming both; None if nothing says so. ModelError: no model."""
    for what, recorded, model in (("target", tape.target, target), ("draft", tape.draft, draft)):
        if recorded and model is not None and has_weights(model) and recorded != (here := function(Path(model))):
            return f"was recorded with {what} {recorded} ({tape.source}); {model} is {here}"
    size = vocabulary(target)
    if tape.vocabulary and size is not None and tape.vocabulary != size:
        return f"has a vocabulary of {tape.vocabulary} tokens; target {target} has {size}"
    return None


def refuse_tape(tape: Tape, name: str | Path, target: Model, draft: Model | None) -> None:
    """TapeError if `tape`, called `name`, is of another target or draft."""
    if reason := foreign_tape(tape, target, draft):
        raise TapeError(f"tape {str(name)!r} is of another pair: it {reason}; make one with: faser record")


def foreign_to(cost: StepCost, tape: Tape) -> str | None:
    """In what a profile and a tape are not of one target, naming both; None if nothing says so."""
    size = cost.measured.get("target", {}).get("vocabulary")
    if size is None or not tape.vocabulary or size == tape.vocabulary:
        return None
    return (
        f"profile {cost.name!r} is of a target with a vocabulary of {size} tokens, "
        f"the tape ({tape.source}) of one with {tape.vocabulary}"
    )


def foreign_profile(cost: StepCost, device: str) -> str | None:
    """Whose step costs these are if not those of `device` (`faser.machine`), and what to do; None if they are."""
    if cost.device == device:
        return None
    return (
        f"profile {cost.name!r} was measured on {cost.device!r}, this machine is {device!r}; "
        "measure this one with: faser profile --target MODEL --out FILE"
    )


def foreign_shapes(cost: StepCost, target: Model, draft: Model | None) -> str | None:
    """Which model has other layers or widths than the one that these step costs were measured with; None: neither."""
    for what, model in (("target", target), ("draft", draft)):
        measured, config = cost.measured.get(what, {}), None if model is None else _json(Path(model) / "config.json")
        if "layers" not in measured or config is None:
            continue
        try:
            shape = asdict(Shape.of_config(config, str(model)))
        except ModelError:  # not a Llama-like one
            continue
        del shape["name"]
        if differ := [key for key, width in shape.items() if measured.get(key) != width]:
            there, here = (", ".join(f"{key} {one.get(key)}" for key in differ) for one in (measured, shape))
            return (
                f"profile {cost.name!r} was measured with a {what} of {there}; {model} has {here}; "
                "measure this pair with: faser profile --target MODEL --draft DIR --out FILE"
            )
    return None


def untrained(training: dict[str, Any], pair: Pair) -> str | None:
    """What a policy file's `training` was on, if not on `pair`; None if it was, or nothing tells.

    Training knows the pairs that have costs and a tape; of others a policy file cannot have anything recorded.
    """
    models = training.get("models")
    if not isinstance(models, list) or not models or pair.tape is None or pair.name in models:
        return None
    return f"was trained on {', '.join(map(str, models))}, not on {pair.name}"


def _tokens(directory: Path) -> dict[str, int] | None:
    """Token to number in a tokenizer.json, or None: there is none, or of a kind without such a table."""
    data = _json(directory / "tokenizer.json")
    model = data.get("model") if data else None
    tokens = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(tokens, list):  # Unigram: [token, score] in order of their numbers
        tokens = {entry[0]: i for i, entry in enumerate(tokens) if isinstance(entry, list) and entry}
    return tokens if isinstance(tokens, dict) else None


def _json(path: Path) -> dict[str, Any] | None:
    """`read_json`, but None if there is no file."""
    return read_json(path) if path.is_file() else None
