"""Distil a target into a small Llama of its vocabulary, on conversations that the target wrote.

Loss at each position of an answer, p the target's distribution and q the draft's:

    KL(p || q) - SHARP log q(argmax p)

Forward KL is what a sampled target asks for: the chance that a greedy draft's token is kept is p of it. A greedy target
keeps its own most probable token only, which the second term asks for; it also makes q's confidence a calibrated
chance of being right. Prompts are read, not learned: nobody drafts them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from faser.train.corpus import Conversations

SHARP = 0.5
WIDTHS = (128, 256, 512, 1024, 2048)
"""Conversations are padded at their end to the next of these: causal attention never looks there."""
CHUNK = 8192
"""Positions whose [CHUNK, V] float32 logits are held at once."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A draft's. Vocabulary, rotary base and positions are the target's; embeddings are tied."""

    hidden: int = 256
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 768


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Of training. batch_tokens: of a step, padding included; the rate rises over `warm_up` steps, falls to 1 %."""

    steps: int = 6000
    batch_tokens: int = 32_768
    rate: float = 2e-3
    warm_up: int = 200
    seed: int = 0


def draft_model(target: Any, shape: Shape) -> Any:
    """A new draft for `target` (Hugging Face causal models both), embeddings set from the target's principal axes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = target.config
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=theirs.max_position_embeddings,
        rope_parameters=getattr(theirs, "rope_parameters", None),
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id,
        pad_token_id=theirs.pad_token_id,
    )
    draft: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers leaves it so
    with torch.no_grad():
        table = target.get_input_embeddings().weight.float()
        table = table - table.mean(0)
        _, axes = torch.linalg.eigh(table.T @ table)
        main = table @ axes[:, -min(shape.hidden, table.shape[1]) :].flip(1)
        own = draft.get_input_embeddings().weight
        own[:, : main.shape[1]] = (main * (0.08 / main.std())).to(own)
    return draft


def distil(
    target: Any,
    draft: Any,
    corpus: Conversations,
    schedule: Schedule,
    *,
    said: Callable[[str], None] = print,
    every: int = 200,
) -> None:
    """Train `draft` in place. Both models on one device. `said` gets a line of progress every `every` steps."""
    device = next(draft.parameters()).device
    optimiser = torch.optim.AdamW(
        draft.parameters(), lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.01, fused=device.type == "cuda"
    )
    teacher = Teacher(target, corpus)
    started, seen = time.monotonic(), 0
    rolling: list[torch.Tensor] = []
    for step, (rows, ids, learned) in enumerate(batches(corpus, schedule), start=1):
        for group in optimiser.param_groups:
            group["lr"] = schedule.rate * _rate(step, schedule)
        ids, learned = (x.to(device, non_blocking=True) for x in (ids, learned))
        loss, agreed = _loss(draft, target.lm_head.weight, teacher(rows, ids, learned), ids, learned)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it so
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimiser.step()
        seen += ids.numel()
        rolling.append(torch.stack((loss.detach(), agreed)))
        if step % every == 0 or step == schedule.steps:
            mean_loss, mean_agreed = torch.stack(rolling).mean(0).tolist()
            rate, seen, started = seen / (time.monotonic() - started), 0, time.monotonic()
            said(
                f"step {step} of {schedule.steps}: loss {mean_loss:.4f}, agrees {mean_agreed:.4f}, {rate:.0f} tokens/s"
            )
            rolling.clear()


class Teacher:
    """The target's last hidden states at the learned positions, computed once and kept if they fit.

    Most conversations come again in later epochs, and reading them is then most of the work.
    """

    def __init__(self, target: Any, corpus: Conversations) -> None:
        self._target = target.eval()
        learned = np.minimum(corpus.length, WIDTHS[-1]) - corpus.answer
        self._offsets = np.concatenate(([0], np.cumsum(learned, dtype=np.int64)))
        self._known = np.zeros(len(learned), np.bool_)
        weight = target.lm_head.weight
        free = torch.cuda.mem_get_info(weight.device)[0] // 2 if weight.is_cuda else 1 << 31
        fits = int(self._offsets[-1]) * weight.shape[1] * weight.element_size() < free
        size = (int(self._offsets[-1]), weight.shape[1])
        self._kept = torch.empty(size, dtype=weight.dtype, device=weight.device) if fits else None

    @torch.no_grad()
    def __call__(self, rows: NDArray[np.int64], ids: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
        """[learned positions, target's hidden size] of the conversations `rows` of the corpus, in their order."""
        if self._kept is None:
            return self._read(ids, learned)
        spans = [np.arange(self._offsets[r], self._offsets[r + 1]) for r in rows]
        at = torch.from_numpy(np.concatenate(spans)).to(ids.device)
        if not self._known[rows].all():
            self._kept[at] = self._read(ids, learned)
            self._known[rows] = True
        return self._kept[at]

    def _read(self, ids: torch.Tensor, learned: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self._target.model(input_ids=ids, use_cache=False).last_hidden_state
        return states[:, :-1][learned]


Batch = tuple[NDArray[np.int64], torch.Tensor, torch.Tensor]


def batches(corpus: Conversations, schedule: Schedule) -> Iterator[Batch]:
    """`steps` times: rows [B] of the corpus, ids [B, W] int64, learned [B, W - 1] bool: the next token is an answer's.

    All of one width; every conversation once, in a new order, before any comes again.
    """
    rng = np.random.default_rng(schedule.seed)
    offsets = np.concatenate(([0], np.cumsum(corpus.length, dtype=np.int64)))
    width = np.array(WIDTHS)[np.minimum(np.searchsorted(WIDTHS, corpus.length), len(WIDTHS) - 1)]
    made = 0
    while True:
        order = rng.permutation(len(corpus.length))
        groups: list[tuple[int, NDArray[np.int64]]] = []
        for w in WIDTHS:
            mine, size = order[width[order] == w], max(schedule.batch_tokens // w, 1)
            groups += [(w, mine[i : i + size]) for i in range(0, len(mine), size)]
        for g in rng.permutation(len(groups)):
            if made == schedule.steps:
                return
            yield _padded(corpus, offsets, *groups[g])
            made += 1


def _padded(corpus: Conversations, offsets: NDArray[np.int64], width: int, rows: NDArray[np.int64]) -> Batch:
    ids = np.zeros((len(rows), width), np.int64)
    learned = np.zeros((len(rows), width - 1), np.bool_)
    for i, row in enumerate(rows):
        length = min(int(corpus.length[row]), width)
        ids[i, :length] = corpus.tokens[offsets[row] : offsets[row] + length]
        learned[i, corpus.answer[row] - 1 : length - 1] = True
    return rows, torch.from_numpy(ids), torch.from_numpy(learned)


def _rate(step: int, schedule: Schedule) -> float:
    fall = 0.5 * (1 + math.cos(math.pi * step / schedule.steps))
    return min(1.0, step / schedule.warm_up) * (0.99 * fall + 0.01)


def _loss(
    draft: Any, their_head: torch.Tensor, theirs: torch.Tensor, ids: torch.Tensor, learned: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean loss over the learned positions, and the share where both models' most probable tokens agree."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        ours = draft.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][learned]
    total, agreed = ours.new_zeros((), dtype=torch.float32), ours.new_zeros((), dtype=torch.float32)
    for at in range(0, len(ours), CHUNK):
        chunk = slice(at, at + CHUNK)
        part, right = checkpoint(  # logits are computed again for the gradient rather than kept
            _chunk_loss, ours[chunk], theirs[chunk], draft.lm_head.weight, their_head, use_reentrant=False
        )
        total, agreed = total + part, agreed + right.detach()
    return total / len(ours), agreed / len(ours)


def _chunk_loss(
    ours: torch.Tensor, theirs: torch.Tensor, our_head: torch.Tensor, their_head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        p = functional.linear(theirs, their_head).float().softmax(-1)
        best = p.argmax(-1)
    with torch.autocast(ours.device.type, torch.bfloat16):
        logits = functional.linear(ours, our_head)
    ours_f = logits.float()
    cross = functional.cross_entropy(ours_f, p, reduction="sum")  # KL but for p's entropy, which no gradient sees
    sharp = functional.cross_entropy(ours_f, best, reduction="sum")
    return cross + SHARP * sharp, (logits.argmax(-1) == best).float().sum()
