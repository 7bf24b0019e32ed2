"""Prompt files: lines of {"domain": ..., "prompt": ...}, the same for recording tapes and for benchmarks."""

from __future__ import annotations

import json
from pathlib import Path

from faser.tapes.tape import TapeError


def read_prompts(path: Path) -> list[tuple[str, str]]:
    """(domain, prompt) of each line of a .jsonl file. TapeError names the line that is wrong."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            pairs.append((data["domain"], data["prompt"]))
        except (ValueError, KeyError, TypeError) as error:
            raise TapeError(f"{path}, line {number}: needs 'domain' and 'prompt' ({error!r})") from None
        if not all(isinstance(text, str) and text for text in pairs[-1]):
            raise TapeError(f"{path}, line {number}: domain and prompt must be text, not empty")
    if not pairs:
        raise TapeError(f"{path} holds no prompts")
    return pairs
