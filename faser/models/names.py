"""From a name to a pair. A short name is ours; a directory or an `owner/model` id goes to vLLM untouched.

`llama2-13b` and `mistral-7b` stand for SmolLM2 inflated to those shapes, with SmolLM2's draft: step costs measured on
the shape, text and acceptances of SmolLM2. They take many gigabytes, so nothing builds them unasked.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple, dataclass
from pathlib import Path

from faser.costs import StepCost, load_profile
from faser.models import smollm2
from faser.models.cache import default_cache, fault
from faser.models.match import foreign_to, refuse_tape
from faser.models.pair import ModelError, Pair, is_directory
from faser.models.shapes import RECIPE, SHAPES, Shape
from faser.tapes import Tape, load_tape

VOCABULARY = 49152
"""Of SmolLM2 and its draft; a test holds it against the model."""

DRAFT_SHAPE = "tinyllama-1.1b"
"""What the shipped draft can be inflated to; a key of SHAPES."""


@dataclass(frozen=True, slots=True)
class Inflated:
    """A name for SmolLM2 at a shape of the same name. real: a hub id of the model whose shape it is."""

    profile: str
    real: str


INFLATED = {
    "llama2-13b": Inflated("h200-llama2-13b", "meta-llama/Llama-2-13b-chat-hf"),
    "mistral-7b": Inflated("h200-mistral-7b", "mistralai/Mistral-7B-Instruct-v0.3"),
}


def known_models() -> list[str]:
    """Short names that `resolve` takes."""
    return sorted([smollm2.NAME, *INFLATED])


def resolve(name_or_path: str, *, cache: Path | None = None) -> Pair:
    """The pair behind a name. Builds nothing: the directories of a short name in `cache` need not exist yet.

    An existing directory, and anything with a "/", is taken as vLLM takes it. ModelError: an unknown short name.
    """
    if name_or_path in known_models():
        small = smollm2.pair(cache or default_cache())
        if name_or_path == smollm2.NAME:
            return small
        target = inflated(Path(small.target), SHAPES[name_or_path])
        return Pair(name_or_path, target, small.draft, INFLATED[name_or_path].profile, small.tape)
    if name_or_path.startswith(("/", "./", "../", "~")) and not is_directory(name_or_path):
        raise ModelError(f"model directory {name_or_path!r} does not exist")
    if "/" in name_or_path or is_directory(name_or_path):
        return Pair(name_or_path, name_or_path)
    known = ", ".join(known_models())
    raise ModelError(f"model {name_or_path!r} is unknown; known: {known}, a directory, or an owner/model id")


def directory_of(part: str, given: Path) -> Path:
    """`given`, or where it is no directory and a name of `known_models`, the `target` or `draft` of that, prepared."""
    if given.is_dir() or str(given) not in known_models():
        return given
    return Path(str(getattr(prepare(str(given)), part)))


def inflated(source: Path, shape: Shape) -> Path:
    """Where `source`, a directory of the cache, is or will be at `shape`: beside it, under a name that says so.

    The name holds a hash of all that the weights depend on; the source's own name holds one of what it was made from.
    """
    key = hashlib.sha256("\n".join((RECIPE, source.name, *map(str, astuple(shape)))).encode()).hexdigest()[:12]
    return source.with_name(f"{source.name.rpartition('-')[0]}-at-{shape.name}-{key}")


def measured(name: str) -> tuple[StepCost, Tape]:
    """Step costs and recorded acceptances of a pair: what a policy is trained on.

    name: of a pair, or PROFILE,TAPE, each a name or a file. ModelError: neither, or the two do not belong together.
    ValueError: no such profile. TapeError: no such tape, a damaged one, or one of other models than those in the cache.
    """
    if name not in known_models():
        profile, comma, recorded = name.partition(",")
        if not comma:
            raise ModelError(f"pair is {name!r}; allowed: {', '.join(known_models())}, or PROFILE,TAPE")
        cost, tape = load_profile(profile), load_tape(recorded)
        if reason := foreign_to(cost, tape):
            raise ModelError(reason)
        return cost, tape
    pair = resolve(name)
    assert pair.profile is not None
    assert pair.tape is not None
    tape, small = load_tape(pair.tape), smollm2.pair(default_cache())
    refuse_tape(tape, pair.tape, small.target, small.draft)  # an inflated target's function is the small one's
    return load_profile(pair.profile), tape


def short_name(pair: str) -> str:
    """What a file about `pair`, as `measured` takes it, may be called."""
    if pair in known_models():
        return pair
    return "+".join(Path(part).name.partition(".")[0] for part in pair.split(",", 1))


def prepare(
    name_or_path: str = smollm2.NAME,
    *,
    cache: Path | None = None,
    progress: bool = True,
    verify: bool = False,
) -> Pair:
    """The pair behind a name, ready to be served: `smollm2` is built in `cache` if it is not there whole.

    cache: None is `default_cache()`. progress: a bar on stderr while building. verify: check every cached file by its
    hash (a second for `smollm2`), not by its size only, and build `smollm2` again where it is altered.
    ModelError: unknown name, an inflated model that is not built, no disk space, a cache that cannot be written, a
    missing or altered source.
    """
    cache = cache or default_cache()
    pair = resolve(name_or_path, cache=cache)
    if name_or_path in INFLATED:
        _refuse_unbuilt(pair, verify)
    if name_or_path in known_models():
        smollm2.prepare(cache, progress=progress, verify=verify)
    return pair


def gigabytes(name: str) -> float:
    """About how much disk a short name's target takes, and for `smollm2` its draft; 10^9 bytes."""
    if name == smollm2.NAME:
        return (smollm2.TARGET_BYTES + smollm2.DRAFT_BYTES) / 1e9
    return 2 * SHAPES[name].parameters(VOCABULARY) / 1e9


def _refuse_unbuilt(pair: Pair, verify: bool) -> None:
    reason = fault(Path(pair.target), verify=verify)
    if reason is not None:
        raise ModelError(
            f"model {pair.name!r} is not built ({reason}): it is SmolLM2 at that shape, {gigabytes(pair.name):.0f} GB; "
            f"build it with: faser models prepare {pair.name}; "
            f"the real one is served by its directory or hub id, such as {INFLATED[pair.name].real}"
        )
