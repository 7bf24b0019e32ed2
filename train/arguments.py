"""Kinds of command-line values that the training commands share."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """A whole number, 1 or more; for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}; allowed: a whole number, 1 or more")
    return int(text)
