"""From trained weights to a draft that can be shipped: int8 rows, acceptance on prompts that it never saw, a card."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faser.models import ModelError
from faser.models.int8_draft import SETTINGS, WEIGHTS, Int8Draft, write_int8
from faser.models.json_file import write_json
from faser.models.smollm2 import TOKENIZER_FILES
from faser.tapes import Tape, recorder

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
CARD, INT8, EXPANDED = "README.md", "int8", "expanded"
LONGEST_ANSWER = 256
"""Tokens of an answer in the evaluation."""


def export(kept: dict[str, Any], out: Path) -> None:
    """Write a draft's config.json, generation_config.json and int8 weights. kept: its `config` and `weights`."""
    out.mkdir(exist_ok=True)
    config = {key: value for key, value in kept["config"].items() if value is not None}
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {key: config[key] for key in SPECIAL if key in config})
    weights: dict[str, torch.Tensor] = kept["weights"]
    write_int8(out, {name: w.float().numpy() for name, w in weights.items() if name != "lm_head.weight"})


def evaluate(target: Path, draft: Path, prompts: Path, *, device: str, work: Path) -> Tape:
    """The tape of an exported draft over `prompts`, greedy; also left in `work`. ModelError: not recorded."""
    expanded, tape = work / EXPANDED, work / "evaluation.tape"
    expanded.mkdir(exist_ok=True)
    Int8Draft(draft).write(expanded, lambda _: None)
    command = ["--target", target, "--draft", expanded, "--prompts", prompts, "--out", tape, "--device", device]
    command += ["--max-tokens", LONGEST_ANSWER, LONGEST_ANSWER]
    if recorder.main([str(part) for part in command]):
        raise ModelError("the evaluation was not recorded")
    return Tape.load(tape)


def write_card(out: Path, *, target: str, command: str, table: str) -> None:
    """README.md of a draft: what it is, how it was made, what it reaches."""
    size = sum(int(np.prod(shape)) for shape in Int8Draft(out).shapes.values())
    text = f"""\
{heading(target)}{size / 1e6:.1f} M parameters
Distilled from conversations that the target wrote by itself, both turns of them. Greedy acceptance on held-out prompts:

{table}

acceptance: share of output positions where the draft's most probable token is the target's. tokens a step: were K
tokens drafted and verified at every step.

    {command}
"""
    (out / CARD).write_text(text, "utf-8")


def heading(target: str) -> str:
    """How a card begins, which tells a draft's directory from any other."""
    return f"# Draft of {target}, "


def place(made: Path, expanded: Path, target: Path, out: Path) -> None:
    """A draft that vLLM loads, `expanded` with the target's tokenizer, to `out`; and the same as int8, to out/int8.

    Its card first, so that a copy that was stopped is known again.
    """
    (out / INT8).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made / CARD, out / CARD)
    for name in (CARD, *SETTINGS, WEIGHTS):
        shutil.copyfile(made / name, out / INT8 / name)
    for name in (*SETTINGS, "model.safetensors"):
        shutil.copyfile(expanded / name, out / name)
    for name in TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, out / name)


def acceptance_table(tape: Tape) -> str:
    """Markdown: per domain, how often the draft's token is the target's, and tokens a step at lengths 2, 4 and 7."""
    lines = ["| domain | requests | acceptance | tokens a step, K=2 | K=4 | K=7 |", "|---|---|---|---|---|---|"]
    parts = {name: np.flatnonzero(tape.domain == i) for i, name in enumerate(tape.domains)}
    for name, requests in {**parts, "all": np.arange(len(tape))}.items():
        part = tape.take(requests)
        emitted = " | ".join(f"{tokens_a_step(part, k):.2f}" for k in (2, 4, 7))
        lines.append(f"| {name} | {len(part)} | {part.match.mean():.3f} | {emitted} |")
    return "\n".join(lines)


def tokens_a_step(tape: Tape, length: int) -> float:
    """Output tokens over steps, were `length` tokens drafted and verified at every step."""
    steps = 0
    for start, end in zip(tape.offsets[:-1], tape.offsets[1:], strict=True):
        at = start
        while at < end:
            at += min(int(tape.run_lengths[at]), length) + 1
            steps += 1
    return len(tape.match) / steps
