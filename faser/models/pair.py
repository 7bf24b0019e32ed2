"""The two nouns of this package, a pair of models and the error of not having one; and what a directory is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


class ModelError(ValueError):
    """A model that cannot be had; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What one name stands for.

    target, draft: a Hugging Face directory, or whatever vLLM takes as a model; draft None: none is known.
    profile, tape: names of its step costs (`faser.costs.load_profile`) and of its recorded acceptances
        (`faser.tapes.load_tape`), which policies are trained on; None: none.
    """

    name: str
    target: Path | str
    draft: Path | str | None = None
    profile: str | None = None
    tape: str | None = None


def is_directory(path: Path | str) -> bool:
    """Whether `path` is a directory; False too for what can be no path, such as a name that is too long."""
    return os.path.isdir(path)  # noqa: PTH112  # Path's raises
