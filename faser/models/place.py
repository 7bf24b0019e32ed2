"""A model directory made where the user says. One decision: what is there already is never replaced, unless it is this
very model and broken; `build` alone would replace whatever it finds.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from faser.models.cache import MOVE_CACHE, MOVE_OUT, build, building, check_space, default_cache, fault
from faser.models.json_file import read_json
from faser.models.pair import ModelError

Advance = Callable[[int], None]


def place(
    out: Path, config: dict[str, Any], size: int, write: Callable[[Path, Advance], None], *, title: str, progress: bool
) -> Path:
    """`out`, absolute, with what `write` writes into an empty directory; nothing is done if it is there, whole.

    config: contents of the model's config.json, by which it is known again. size: bytes that `write` will report.
    ModelError: `out` holds something else; or no disk space, or it cannot be written.
    """
    out = out.expanduser().absolute()
    _refuse_foreign(out, config)
    if fault(out, verify=False) is None:
        return out
    remedy = MOVE_CACHE if out.parent == default_cache() else MOVE_OUT
    with building(out, remedy=remedy):
        wrong = fault(out, verify=False)
        if wrong is None:  # made by another process while this one waited
            return out
        if out.is_dir() and any(out.iterdir()):
            print(f"faser: {out}: {wrong}; building it again", file=sys.stderr)
        check_space(out.parent, size, remedy=remedy)
        with tqdm(total=2 * size, desc=title, unit="B", unit_scale=True, disable=not progress, leave=False) as bar:

            def advance(count: int) -> None:
                bar.update(count)

            build(out, lambda directory: write(directory, advance), advance)
    return out


def _refuse_foreign(out: Path, config: dict[str, Any]) -> None:
    """ModelError if `out` is or holds anything but this very model."""
    if out.is_dir():
        if not any(out.iterdir()):
            return
        try:
            if read_json(out / "config.json") == config:
                return
        except ModelError:
            pass
    elif not os.path.lexists(out):
        return
    raise ModelError(f"{out} exists and is not this model; name a directory that is empty or does not exist")
