"""`faser doctor`: whether everything that FASER works with is there, whole, and belongs together; one line a check.

One decision: a check yields what it finds and the next one runs, whatever went wrong. So nothing hides anything, and
no check ends in a traceback.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from faser.checkpoints import SHIPPED_POLICY
from faser.costs import known_profiles, load_profile
from faser.installed import ERROR, OK, WARNING, Finding, names, packages, python
from faser.machine import Gpu, cpu, device, gpus
from faser.models import ModelError, Pair, default_cache, known_models, match, resolve, smollm2
from faser.models.cache import fault
from faser.models.checkpoint import check_weights
from faser.models.fingerprint import fingerprint, function
from faser.models.names import INFLATED, gigabytes
from faser.models.pair import is_directory
from faser.tapes import known_tapes, load_tape


def main(argv: list[str]) -> int:
    """Run all checks. Returns 0 if none found an error, else 1; argparse exits with 2 for a mistake in the command."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.model and args.target:
        parser.error("MODEL and --target are one too many")
    if args.draft and not args.target:
        parser.error("--draft needs --target")
    counts = dict.fromkeys((OK, WARNING, ERROR), 0)
    try:
        for finding in _examine(args):
            counts[finding.status] += 1
            print(f"{finding.status:8}{finding.subject:24} {finding.text}", flush=True)
        print(f"{ERROR}: {counts[ERROR]}, {WARNING}: {counts[WARNING]}, {OK}: {counts[OK]}", flush=True)
    except KeyboardInterrupt:
        print("faser doctor: stopped", file=sys.stderr)
        return 130
    except OSError as error:  # of printing: whoever read the lines has gone, or a disk is full
        print(f"faser doctor: stopped: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # it is flushed once more when Python ends
        return 2
    return 1 if counts[ERROR] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="faser doctor",
        description="Check versions, GPU, cache, models, tapes, profiles and the policy, and that they belong together."
        " Exit status 1 if a line says error.",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help=f"what you serve: {', '.join(known_models())}, or a directory")
    add("--target", type=Path, metavar="DIR", help="instead of MODEL: a target's directory")
    add("--draft", type=Path, metavar="DIR", help="and its draft's")
    add("--tape", metavar="T", help="a tape to hold against them, by name or file")
    add("--profile", metavar="P", help="step costs to hold against this machine, by name or file")
    add("--policy", type=Path, default=SHIPPED_POLICY, metavar="FILE", help="policy file (default: the shipped one)")
    return parser


def _examine(args: argparse.Namespace) -> Iterator[Finding]:
    """All findings, in the order in which they are best read."""
    found, unread = _gpus()
    yield from _guarded("python", python())
    yield from _guarded("packages", packages(found))
    yield from _guarded("names", names())
    yield from _guarded("gpu", unread or _gpu(found))
    try:
        cache = default_cache()
    except ModelError as error:  # and nothing below can be looked up
        yield Finding(ERROR, "cache", str(error))
        return
    yield from _guarded("cache", _cache(cache))
    known = {name: resolve(name, cache=cache) for name in known_models()}
    for name, pair in known.items():
        subject = f"model {name}"
        check = _inflated(subject, pair, asked=name == args.model) if name in INFLATED else _small(subject, pair)
        yield from _guarded(subject, check)
    chosen = None
    try:
        chosen = _chosen(args)
    except ModelError as error:
        yield Finding(ERROR, "model", str(error))
    for name, pair in {**known, **({chosen.name: chosen} if chosen else {})}.items():
        subject = _subject("pair", name)
        yield from _guarded(subject, _pair(subject, pair))
    small = known[smollm2.NAME]
    for tape in dict.fromkeys([*known_tapes(), *([args.tape] if args.tape else [])]):
        owner = chosen if tape == args.tape else small if tape == small.tape else None
        subject = _subject("tape", tape)
        yield from _guarded(subject, _tape(subject, tape, owner))
    used = args.profile or (chosen.profile if chosen else None)
    for profile in dict.fromkeys([*known_profiles(), *([args.profile] if args.profile else [])]):
        subject = _subject("profile", profile)
        yield from _guarded(subject, _profile(subject, profile, device(found), chosen, used=profile == used))
    subject = _subject("policy", str(args.policy))
    yield from _guarded(subject, _policy(subject, args.policy, chosen))


def _guarded(subject: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """`findings`; an exception ends them as an error of `subject` that says what it was."""
    try:
        yield from findings
    except ValueError as error:  # ours are: ModelError, TapeError, PolicyFileError, a profile's
        yield Finding(ERROR, subject, str(error))
    except Exception as error:  # whatever it is: the user asked what is broken
        yield Finding(ERROR, subject, f"cannot be checked: {type(error).__name__}: {' '.join(str(error).split())}")


def _subject(kind: str, name: str) -> str:
    """What a line is about: a path by its last part, and a long one by its start."""
    last = Path(name).name
    return f"{kind} {last if len(last) <= 16 else last[:14] + '..'}"


def _chosen(args: argparse.Namespace) -> Pair:
    """The pair that the user serves. ModelError: there is no such thing."""
    if args.target is None:
        return resolve(args.model or smollm2.NAME)
    for flag, path in (("--target", args.target), ("--draft", args.draft)):
        if path is not None and not is_directory(path):
            raise ModelError(f"{flag} is {path}; there is no such directory")
    return Pair(str(args.target), args.target, args.draft)


def _gpus() -> tuple[list[Gpu], Iterator[Finding] | None]:
    """The GPUs here, and what is wrong with the driver's answer, if anything."""
    try:
        return gpus(), None
    except ValueError as error:
        return [], iter([Finding(ERROR, "gpu", f"nvidia-smi says what cannot be read: {error}")])


def _gpu(found: list[Gpu]) -> Iterator[Finding]:
    if not found:
        yield Finding(OK, "gpu", f"no GPU: CPU backend, {cpu()}")
    for gpu in found:
        memory = f"{gpu.memory_mib / 1024:.0f} GiB" if gpu.memory_mib else "memory not said"
        yield Finding(OK, "gpu", f"{gpu.name}, {memory}, driver {gpu.driver}")


def _cache(cache: Path) -> Iterator[Finding]:
    """Whether models can be built in `cache`; nothing is left there."""
    there = next(path for path in (cache, *cache.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            free = shutil.disk_usage(there).free / 1e9
    except OSError as error:
        text = f"{cache} cannot be written: {error.strerror}; FASER_CACHE names another directory"
        yield Finding(ERROR, "cache", text)
        return
    small, needed = smollm2.pair(cache), gigabytes(smollm2.NAME)
    if free < needed and any(fault(Path(str(part)), verify=False) for part in (small.target, small.draft)):
        text = f"{cache} has {free:.1f} GB free, {smollm2.NAME} takes {needed:.1f}; FASER_CACHE names another directory"
        yield Finding(ERROR, "cache", text)
    else:
        yield Finding(OK, "cache", f"{cache}, {free:.1f} GB free")


def _inflated(subject: str, pair: Pair, *, asked: bool) -> Iterator[Finding]:
    """Whether an inflated model is whole, by its files' sizes: hashing 26 GB would take a minute. asked: by name."""
    wrong = fault(Path(pair.target), verify=False)
    build = f"faser models prepare {pair.name} ({gigabytes(pair.name):.0f} GB)"
    if wrong is None:
        yield Finding(OK, subject, str(pair.target))
    elif wrong != "missing":
        yield Finding(ERROR, subject, f"{pair.target}: {wrong}; build it again: {build}")
    elif asked:
        yield Finding(ERROR, subject, f"not built; build it: {build}")
    else:
        yield Finding(OK, subject, f"not built; only serving it needs that: {build}")


def _small(subject: str, pair: Pair) -> Iterator[Finding]:
    """Whether the embedded target and its draft are whole, by their hashes, or can be built."""
    parts = [Path(str(part)) for part in (pair.target, pair.draft)]
    faults = {part: wrong for part in parts if (wrong := fault(part, verify=True))}
    for part, wrong in faults.items():
        if wrong != "missing":
            yield Finding(ERROR, subject, f"{part}: {wrong}; remove that directory, then: faser models prepare smollm2")
    if pair.target in faults:
        try:
            smollm2.find_source()
        except ModelError as error:
            yield Finding(WARNING, subject, f"cannot be built: {error}")
            return
    absent = [part.name for part, wrong in faults.items() if wrong == "missing"]
    if absent:
        yield Finding(OK, subject, f"not built yet: {', '.join(absent)}; faser serve builds it")
    elif not faults:
        yield Finding(OK, subject, f"{parts[0]}, draft {parts[1].name}")


def _pair(subject: str, pair: Pair) -> Iterator[Finding]:
    """Whether target and draft belong together."""
    paths = [Path(str(part)) for part in (pair.target, pair.draft) if part]
    if not all(path.is_dir() for path in paths):
        if pair.tape is None:  # of the known ones, `model` says it
            yield Finding(WARNING, subject, f"{paths[0]} is no directory here: vLLM asks a hub for it, unchecked")
        return
    for path in paths:
        if match.vocabulary(path) is None:
            yield Finding(ERROR, subject, f"{path} has no config.json with a vocab_size")
            return
    if pair.draft is not None:
        match.refuse_vocabularies(pair.target, pair.draft)
    for path in paths:
        if not match.has_weights(path) and any(path.glob("*.bin")):
            yield Finding(WARNING, subject, f"{path} holds no .safetensors file: its weights are unchecked")
        else:
            check_weights(path)
    if pair.draft is None:
        yield Finding(
            WARNING, subject, "no draft to compare; give --target and --draft, and serve it with --spec-model"
        )
        return
    if differ := match.renumbered(pair.target, pair.draft):
        yield Finding(WARNING, subject, differ)
    text = f"one vocabulary, {match.vocabulary(pair.target)} tokens"
    if all(map(match.has_weights, paths)):
        text += f"; target {function(paths[0])}, draft {fingerprint(paths[1])}"
    yield Finding(OK, subject, text)


def _tape(subject: str, name: str, pair: Pair | None) -> Iterator[Finding]:
    """Whether a tape is whole, and of `pair`, where there is one to hold it against."""
    tape = load_tape(name)
    about = f"{len(tape)} requests, {len(tape.match)} tokens"
    if pair and (reason := match.foreign_tape(tape, pair.target, pair.draft)):
        yield Finding(ERROR, subject, f"not of {pair.name}: it {reason}; record one with: faser record")
    elif not tape.target:
        yield Finding(WARNING, subject, f"{about}; does not say of which models; record it again: faser record")
    elif pair and all(match.has_weights(part) for part in (pair.target, pair.draft) if part):
        yield Finding(OK, subject, f"{about}; of {pair.name}")
    else:
        yield Finding(OK, subject, f"{about}; of target {tape.target} and draft {tape.draft}, not here to compare")


def _profile(subject: str, name: str, here: str, pair: Pair | None, *, used: bool) -> Iterator[Finding]:
    """Whether a profile can be read, and, if it is the one that would be used, is of this machine and `pair`."""
    cost = load_profile(name)
    other = match.foreign_profile(cost, here)
    if other is None and used and pair:
        other = match.foreign_shapes(cost, pair.target, pair.draft)
    if other is None:
        yield Finding(OK, subject, f"of this machine, {here}")
    elif used:
        yield Finding(WARNING, subject, other)
    else:
        yield Finding(OK, subject, f"of another machine, {cost.device}: for training")


def _policy(subject: str, path: Path, pair: Pair | None) -> Iterator[Finding]:
    """Whether a policy file loads, and was trained on the pair."""
    from faser.policies.policy_file import load

    try:
        training = load(path).training
    except ImportError:
        yield Finding(WARNING, subject, "not checked: reading it needs torch")
        return
    models = training.get("models")
    if pair and (other := match.untrained(training, pair)):
        yield Finding(WARNING, subject, other)
    else:
        yield Finding(OK, subject, f"trained on {', '.join(map(str, models))}" if models else "does not say on what")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
