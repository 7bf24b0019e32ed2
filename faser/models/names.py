"""From a name to a pair. A short name is ours; a directory or an `owner/model` id goes to vLLM untouched."""

from __future__ import annotations

from pathlib import Path

from faser.costs import StepCost, load_profile
from faser.models import smollm2
from faser.models.cache import default_cache
from faser.models.pair import ModelError, Pair
from faser.tapes import Tape, load_tape

TRAINING_ONLY = {
    pair.name: pair
    for pair in (
        Pair("llama2-13b", "meta-llama/Llama-2-13b-chat-hf", None, "h200-llama2-13b", smollm2.TAPE),
        Pair("mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3", None, "h200-mistral-7b", smollm2.TAPE),
    )
}
"""Pairs whose step costs were measured, so that policies can be trained for them, but whose weights are not in the
release. They share SmolLM2's tape: their text and acceptances stand in for those of the real models."""


def known_models() -> list[str]:
    """Short names that `resolve` takes."""
    return sorted([smollm2.NAME, *TRAINING_ONLY])


def resolve(name_or_path: str, *, cache: Path | None = None) -> Pair:
    """The pair behind a name. Builds nothing: the directories of `smollm2` in `cache` need not exist yet.

    An existing directory, and anything with a "/", is taken as vLLM takes it. ModelError: an unknown short name.
    """
    if name_or_path == smollm2.NAME:
        return smollm2.pair(cache or default_cache())
    if name_or_path in TRAINING_ONLY:
        return TRAINING_ONLY[name_or_path]
    if name_or_path.startswith(("/", "./", "../", "~")) and not Path(name_or_path).is_dir():
        raise ModelError(f"model directory {name_or_path!r} does not exist")
    if "/" in name_or_path or (name_or_path and Path(name_or_path).is_dir()):
        return Pair(name_or_path, name_or_path)
    known = ", ".join(known_models())
    raise ModelError(f"model {name_or_path!r} is unknown; known: {known}, a directory, or an owner/model id")


def measured(name: str) -> tuple[StepCost, Tape]:
    """Step costs and recorded acceptances of a pair: what a policy is trained on. ModelError: unknown name."""
    if name not in known_models():
        raise ModelError(f"pair is {name!r}; allowed: {', '.join(known_models())}")
    pair = resolve(name)
    assert pair.profile is not None
    assert pair.tape is not None
    return load_profile(pair.profile), load_tape(pair.tape)


def prepare(
    name_or_path: str = smollm2.NAME,
    *,
    cache: Path | None = None,
    progress: bool = True,
    verify: bool = False,
) -> Pair:
    """The pair behind a name, ready to be served: `smollm2` is built in `cache` if it is not there whole.

    cache: None is `default_cache()`. progress: a bar on stderr while building. verify: check every cached file by its
    hash (a second), not by its size only, and build again what is altered.
    ModelError: unknown name, a pair without weights here, no disk space, a cache that cannot be written, a missing or
    altered source.
    """
    if name_or_path == smollm2.NAME:
        return smollm2.prepare(cache or default_cache(), progress=progress, verify=verify)
    if name_or_path in TRAINING_ONLY:
        weights = TRAINING_ONLY[name_or_path].target
        raise ModelError(
            f"model {name_or_path!r} is known for training only, its weights are not in this release; "
            f"to serve it, pass their directory or hub id, such as {weights}"
        )
    return resolve(name_or_path)
