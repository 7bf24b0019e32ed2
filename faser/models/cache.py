"""A cache of directories that are either absent or whole, whenever a builder is stopped, kill -9 included.

A directory is built beside its place, gets a manifest of sizes and sha256 last, is flushed to disk and then renamed.
A file lock, which the kernel drops when its holder dies, keeps builders apart; readers take no lock. The folder may be
the user's: all that is made beside a directory has its name in it, and nothing else there is touched.
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
LOCK, PARTIAL, OLD = ".faser-lock-", ".faser-building-", ".faser-old-"
"""Prefixes, before a directory's name, of its lock file, of itself being built, and of what it replaces."""

MOVE_CACHE, MOVE_OUT = "FASER_CACHE names another directory", "--out names another directory"
"""What to do where nothing can be built."""

_CHUNK = 1 << 22


def default_cache() -> Path:
    """$FASER_CACHE, else $XDG_CACHE_HOME/faser, else ~/.cache/faser."""
    own = os.environ.get("FASER_CACHE")
    place = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "faser"
    try:
        return place.expanduser().absolute()
    except RuntimeError:
        raise ModelError(f"the cache is {str(place)!r}, and there is no such home; {MOVE_CACHE}") from None


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
        return "not a directory" if os.path.lexists(directory) else "missing"
    try:
        files = json.loads((directory / MANIFEST).read_text())["files"]
        if not files:
            return f"{MANIFEST} names no files"
        for name, recorded in files.items():
            path = directory / name
            if path.stat().st_size != recorded["bytes"] or (verify and sha256(path) != recorded["sha256"]):
                return f"{name} is altered"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{getattr(error, 'filename', None) or MANIFEST} is missing or unreadable"
    return None


@contextmanager
def building(*directories: Path, remedy: str = MOVE_CACHE) -> Iterator[None]:
    """Be the only builder of `directories`, in one folder, which is made if need be; waits, saying so, for another one.

    On entry, what killed builders of them left behind is removed. An OSError inside becomes a ModelError of one line,
    which ends with `remedy`.
    """
    folder = directories[0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{LOCK}{directories[0].name}").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"faser: waiting for another process that prepares models in {folder}", file=sys.stderr)
                fcntl.flock(lock, fcntl.LOCK_EX)
            for directory in directories:
                for prefix in (PARTIAL, OLD):
                    _remove(directory.with_name(prefix + directory.name))
            yield
    except OSError as error:
        where = error.filename or "a write failed"
        raise ModelError(f"cannot prepare models in {folder}: {error.strerror}: {where}; {remedy}") from error


def check_space(folder: Path, needed: int, *, remedy: str = MOVE_CACHE) -> None:
    """ModelError, ending with `remedy`, unless the file system of `folder` has `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(f"not enough disk space in {folder}: {needed:,} bytes needed, {free:,} free; {remedy}")


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
        if os.path.lexists(directory):
            old = directory.with_name(OLD + directory.name)
            directory.rename(old)
            _remove(old)
        partial.rename(directory)
        _flush(directory.parent)
    except BaseException:  # Ctrl-C too: leave nothing, and let it go on
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _remove(path: Path) -> None:
    """Whatever is at `path`, which need not exist: a file, a link or all of a directory."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """fsync of a file or directory: a rename that survives a power cut must not outlive the data it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
