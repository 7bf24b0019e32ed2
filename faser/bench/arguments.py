"""Command-line options and values that benchmarks share, `faser profile` among them: sizes, places, drafts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faser.machine import gpus
from faser.models import Pair, known_models, match
from faser.tapes.mapped import check_writable

LOAD_FORMATS = (
    "auto",
    "hf",
    "dummy",
    "fastsafetensors",
    "instanttensor",
    "ipc_cache",
    "mistral",
    "modelexpress",
    "npcache",
    "pt",
    "runai_streamer",
    "runai_streamer_sharded",
    "safetensors",
    "sharded_state",
    "tensorizer",
)
"""vLLM's, which takes seconds to say what they are."""
MOST_BATCH = 1024
"""Requests at once."""
MOST_SEED = 2**32 - 1


def positive(text: str) -> float:
    """A finite number over 0; for argparse."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: over 0")
    return value


def whole(text: str) -> int:
    """A whole number from 1 on; for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1 or more")
    return value


def between(least: int, most: int) -> Callable[[str], int]:
    """A whole number from `least` to `most`; for argparse."""

    def number(text: str) -> int:
        value = int(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {least} to {most}")
        return value

    return number


def add_engine(parser: argparse.ArgumentParser) -> None:
    """The options of an engine; `draft_of` and `refuse_async_scheduling` have to look at them."""
    parser.add_argument(
        "--target", required=True, help=f"{', '.join(known_models())}, a model directory or an owner/model id"
    )
    parser.add_argument("--draft", help="the draft's directory; a named target has one")
    parser.add_argument("--load-format", default="auto", choices=LOAD_FORMATS, help="'dummy': random weights")
    add_async_scheduling(parser)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `OfflineEngine` takes of them, but for the models."""
    return {"load_format": args.load_format, "asynchronous": args.async_scheduling}


def add_async_scheduling(parser: argparse.ArgumentParser) -> None:
    """The option; `refuse_async_scheduling` has to look at it."""
    parser.add_argument("--async-scheduling", action="store_true", help="as in `faser serve`, on a GPU")


def refuse_async_scheduling(args: argparse.Namespace) -> None:
    """ValueError: asked for where there is none."""
    if args.async_scheduling and not gpus():
        raise ValueError("--async-scheduling: vLLM has it on GPUs only, and there is none")


def stoppable(name: str, run: Callable[[], int]) -> int:
    """The exit status of `run`; after Ctrl-C 130, and a line of the program `name`."""
    try:
        return run()
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return 130


def refuse_place(flag: str, path: Path) -> None:
    """ValueError unless a file can be written at `path`."""
    try:
        if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
            raise ValueError(f"{flag} is {str(path)!r}; allowed: a file that can be written")
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{flag} is {str(path)!r}; its directory does not exist")
        check_writable(path)
    except OSError as error:
        raise ValueError(f"{flag} is {str(path)!r}, which cannot be written: {error.strerror}") from None


def draft_of(pair: Pair, draft: str | None) -> str:
    """The draft to serve `pair` with: `draft`, or its own. ValueError: none, no models, or of another vocabulary."""
    chosen = draft or pair.draft
    if chosen is None:
        raise ValueError(f"target {pair.name!r} has no draft of its own; give one with --draft")
    for flag, model in (("--target", str(pair.target)), ("--draft", str(chosen))):
        hub = "/" in model and not model.startswith(("/", "./", "../", "~")) and not Path(model).is_dir()
        if not hub and not (Path(model) / "config.json").is_file():
            raise ValueError(f"{flag} is {model!r}; allowed: a directory with a config.json, or an owner/model id")
    match.refuse_vocabularies(pair.target, chosen)
    return str(chosen)
