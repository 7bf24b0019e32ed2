"""A tape out of two models and some prompts.

One decision: texts are finished before anything is asked about them. Then all of their positions are alike, and the
draft and the early layers are run over many of them at once, in groups of similar lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from faser.core import MAX_DEPTH
from faser.tapes.early_exit import early_ranks
from faser.tapes.generation import Request, generate
from faser.tapes.rollout import Texts, rollout
from faser.tapes.tape import Tape

GROUP = 8192
"""Tokens, padding included, of the texts that are looked at together: their caches and masks must fit in memory."""


def record(
    target: Any,
    draft: Any,
    requests: Sequence[Request],
    *,
    layers: tuple[int, ...],
    batch: int,
    seed: int,
    source: str,
    outputs: Sequence[list[int]] | None = None,
) -> Tape:
    """The tape of two Hugging Face causal models with one vocabulary on one device. Fingerprints are left empty.

    outputs: what the target has written, token ids for each of `requests`; None: it is to write now.
    """
    if outputs is None:
        with tqdm(total=len(requests), desc="target writes", unit=" requests") as bar:
            outputs = generate(target, requests, batch=batch, seed=seed, advance=bar.update)
    texts = [r.prompt + output for r, output in zip(requests, outputs, strict=True)]
    offsets = np.concatenate(([0], np.cumsum([len(o) for o in outputs])))
    total = int(offsets[-1])
    first = np.zeros(total, np.int64)
    confidence = np.zeros((total, MAX_DEPTH), np.uint8)
    rank = np.zeros((total, len(layers)), np.uint8)
    with tqdm(total=total, desc="draft proposes", unit=" tokens") as bar:
        for chosen in _groups([len(o) for o in outputs], [len(t) for t in texts]):
            group = Texts.of([texts[i] for i in chosen], [len(requests[i].prompt) for i in chosen], target.device)
            drafted, chance = rollout(draft, group)
            at = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in chosen])
            first[at] = drafted[:, 0].cpu().numpy()
            confidence[at] = (255.0 * chance).round().to(torch.uint8).cpu().numpy()
            if layers:
                rank[at] = early_ranks(target, group, drafted[:, 0], layers).cpu().numpy()
            bar.update(len(at))
    vocabulary = target.config.vocab_size
    names = tuple(dict.fromkeys(r.domain for r in requests))
    return Tape(
        domains=names,
        domain=np.array([names.index(r.domain) for r in requests], np.uint8),
        prompt_tokens=np.array([len(r.prompt) for r in requests], np.int32),
        output_tokens=np.diff(offsets).astype(np.int32),
        max_tokens=np.array([r.max_tokens for r in requests], np.int32),
        temperature=np.array([r.temperature for r in requests], np.float32),
        match=first == np.concatenate(outputs),
        confidence=confidence,
        rank=rank,
        tokens=np.concatenate(texts).astype(np.uint16 if vocabulary <= 1 << 16 else np.uint32),
        layers=layers,
        vocabulary=vocabulary,
        source=source,
    )


def _groups(outputs: Sequence[int], texts: Sequence[int]) -> list[list[int]]:
    """Indices of the texts of each group, by their numbers of output tokens and of tokens."""
    groups: list[list[int]] = [[]]
    longest = 0
    for i in sorted(range(len(outputs)), key=lambda i: (outputs[i] // 32, texts[i])):
        longest = max(longest, texts[i])
        if groups[-1] and (len(groups[-1]) + 1) * longest > GROUP:
            groups.append([])
            longest = texts[i]
        groups[-1].append(i)
    return groups


def report(tape: Tape) -> str:
    """A few lines on what was recorded."""
    lines = [f"{len(tape)} requests, {len(tape.match)} tokens; share of positions where the draft is right:"]
    lines += [f"  {name:<12} {rate:.3f}" for name, rate in tape.acceptance().items()]
    for temperature in np.unique(tape.temperature):
        part = tape.take(np.flatnonzero(tape.temperature == temperature))
        lines.append(f"  temperature {temperature:g}: {part.match.mean():.3f}")
    lines.append(f"mean run of matches, cut at {MAX_DEPTH}: {np.minimum(tape.run_lengths, MAX_DEPTH).mean():.3f}")
    for i, layer in enumerate(tape.layers):
        for kind, at in (("right", tape.match), ("wrong", ~tape.match)):
            if at.any():
                rank = np.percentile(tape.rank[at, i], (50, 90, 99))
                lines.append(
                    f"rank at layer {layer}, draft {kind}: median {rank[0]:g}, 90 % {rank[1]:g}, 99 % {rank[2]:g}"
                )
    return "\n".join(lines)
