"""Where tapes are found: shipped ones by name, users' ones by path; compressed ones are expanded once.

A compressed tape is expanded into the cache, under the sha256 of the compressed file, and mapped there. So a new tape
never meets an old expansion, and a second process finds the first one's.
"""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

from faser.tapes.mapped import write_whole
from faser.tapes.tape import PACKED, PLAIN, Tape, TapeError

SHIPPED = Path(__file__).parent


def known_tapes() -> list[str]:
    """Names that `load_tape` takes."""
    return sorted({p.name.removesuffix(end) for end in (PLAIN, PACKED) for p in SHIPPED.glob(f"*{end}")})


def load_tape(name: str | Path) -> Tape:
    """The shipped tape `name`, or the one in a file of that path. TapeError: unknown, or unusable."""
    for path in (SHIPPED / f"{name}{PLAIN}", SHIPPED / f"{name}{PACKED}", Path(name)):
        if path.is_file():
            return _expanded(path) if path.suffix == ".xz" else Tape.load(path)
    raise TapeError(f"tape {str(name)!r} is unknown; known: {', '.join(known_tapes())}, or a file")


def _expanded(path: Path) -> Tape:
    """The tape in a compressed file, by way of the cache."""
    from faser.models.cache import default_cache  # here, since faser.models looks tapes up by name

    try:
        packed = path.read_bytes()
        place = default_cache() / "tapes" / f"{hashlib.sha256(packed).hexdigest()}{PLAIN}"
        if place.is_file():
            try:
                return Tape.load(place)
            except TapeError:
                pass  # damaged since; the source is at hand
        content = lzma.decompress(packed)
    except (OSError, lzma.LZMAError) as error:
        raise TapeError(f"tape {path} cannot be read: {error}") from None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, content)
    except OSError as error:
        raise TapeError(
            f"tape {path} cannot be expanded: {error.strerror}: {place.parent}; FASER_CACHE names another directory"
        ) from None
    try:
        return Tape.load(place)
    except TapeError as error:
        place.unlink(missing_ok=True)
        raise TapeError(str(error).replace(str(place), str(path))) from None
