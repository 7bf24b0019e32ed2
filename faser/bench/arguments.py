"""Kinds of command-line values that benchmarks share."""

from __future__ import annotations

import argparse


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
