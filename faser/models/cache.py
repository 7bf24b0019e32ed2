"""A cache of directories that are either absent or whole, whenever a builder is stopped, kill -9 included.

A directory is built beside its place, gets a manifest of sizes and sha256 last, is flushed to disk and then renamed.
One file lock per cache, which the kernel drops when its holder dies, keeps builders apart; readers take no lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from faser.models.pair import ModelError

MANIFEST = "faser-manifest.json"
PARTIAL = ".building-"
"""Prefix of what is not whole: a directory being built, or one being thrown away."""

_CHUNK = 1 << 22


def default_cache() -> Path:
    """$FASER_CACHE, else $XDG_CACHE_HOME/faser, else ~/.cache/faser."""
    if own := os.environ.get("FASER_CACHE"):
        return Path(own).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "faser"


def sha256(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """Hex digest of a file; `advance` is told the bytes read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def fault(directory: Path, *, verify: bool) -> str | None:
    """What is wrong with a cached directory, or None: sizes against the manifest; with `verify`, every hash too."""
    if not directory.is_dir():
        return "missing"
    try:
        files = json.loads((directory / MANIFEST).read_text())["files"]
        for name, recorded in files.items():
            path = directory / name
            if path.stat().st_size != recorded["bytes"] or (verify and sha256(path) != recorded["sha256"]):
                return f"{name} is altered"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{getattr(error, 'filename', None) or MANIFEST} is missing or unreadable"
    return None


@contextmanager
def building(cache: Path) -> Iterator[None]:
    """Be the only builder in `cache`, which is made if need be; waits, saying so, while another process builds.

    On entry, what killed builders left behind is removed. An OSError inside becomes a ModelError of one line.
    """
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"faser: waiting for another process that prepares models in {cache}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left_over in cache.glob(f"{PARTIAL}*"):
                shutil.rmtree(left_over)
            yield
    except OSError as error:
        where = error.filename or "a write failed"
        raise ModelError(
            f"cannot prepare models in {cache}: {error.strerror}: {where}; FASER_CACHE names another directory"
        ) from error


def check_space(cache: Path, needed: int) -> None:
    """ModelError unless the file system of `cache` has `needed` bytes free."""
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise ModelError(
            f"not enough disk space in {cache}: {needed:,} bytes needed, {free:,} free; "
            "set FASER_CACHE to another directory"
        )


def build(directory: Path, write: Callable[[Path], None], advance: Callable[[int], None]) -> None:
    """Put at `directory` what `write` writes into an empty one; call it inside `building`.

    advance: told the bytes hashed. A faulty `directory` is replaced: for a moment there is none, never half of one.
    """
    partial = directory.with_name(PARTIAL + directory.name)
    try:
        partial.mkdir()
        write(partial)
        files = {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256(path, advance)}
            for path in sorted(partial.iterdir())
        }
        (partial / MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n")
        for path in (*partial.iterdir(), partial):
            _flush(path)
        if directory.exists():
            old = directory.with_name(f"{PARTIAL}old-{directory.name}")
            directory.rename(old)
            shutil.rmtree(old)
        partial.rename(directory)
        _flush(directory.parent)
    except BaseException:  # Ctrl-C too: leave nothing, and let it go on
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _flush(path: Path) -> None:
    """fsync of a file or directory: a rename that survives a power cut must not outlive the data it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
