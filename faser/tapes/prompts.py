"""Prompt files: lines of {"domain": ..., "prompt": ..., "max_tokens": ...}, the last optional; .xz: compressed."""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser.tapes.tape import TapeError

PROMPTS = Path(__file__).with_name("prompts.jsonl.xz")
"""The shipped ones: 1,000 of five domains, written for this project."""
MAX_DOMAINS = 256
"""What a tape's byte can tell apart."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One user message, its domain, and the longest answer that it asks for (None: it does not say)."""

    domain: str
    text: str
    max_tokens: int | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a .jsonl or .jsonl.xz file. TapeError names the line that is wrong. OSError: no such file."""
    content = path.read_bytes()
    if path.suffix == ".xz":
        try:
            content = lzma.decompress(content)
        except (lzma.LZMAError, EOFError) as error:
            raise TapeError(f"{path} is no whole .xz file: {error}") from None
    try:
        lines = content.decode("utf-8-sig").split("\n")  # other ends of lines may be in a prompt
    except UnicodeDecodeError as error:
        raise TapeError(f"{path} is no UTF-8: {error.reason} at byte {error.start}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                prompts.append(_prompt(json.loads(line)))
            except TapeError as error:
                raise TapeError(f"{path}, line {number}: {error}") from None
            except (KeyError, TypeError):
                raise TapeError(f"{path}, line {number}: needs 'domain' and 'prompt'") from None
            except (ValueError, RecursionError) as error:
                raise TapeError(f"{path}, line {number}: is no JSON: {error}") from None
    if not prompts:
        raise TapeError(f"{path} holds no prompts")
    if (domains := len({prompt.domain for prompt in prompts})) > MAX_DOMAINS:
        raise TapeError(f"{path} has {domains} domains; allowed: {MAX_DOMAINS} at most")
    return prompts


def _prompt(data: Any) -> Prompt:
    prompt = Prompt(data["domain"], data["prompt"], data.get("max_tokens"))
    if not all(isinstance(text, str) and text for text in (prompt.domain, prompt.text)):
        raise TapeError("domain and prompt must be text, not empty")
    try:
        (prompt.domain + prompt.text).encode()
    except UnicodeEncodeError as error:
        raise TapeError(f"domain and prompt must be text: {error.reason} ({error.object[error.start]!r})") from None
    limit = prompt.max_tokens
    if limit is not None and (type(limit) is not int or limit < 1):
        raise TapeError(f"max_tokens is {limit!r}; allowed: a whole number from 1 on")
    return prompt
