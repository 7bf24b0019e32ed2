"""What the target's early layers already think of a draft: the rank of its tokens in their logits.

One decision: a rank, not a probability. An early layer's probabilities are not calibrated, but a token that stands far
down its list is seldom the one that the last layer chooses; pruning needs no more than that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from faser.tapes.rollout import Texts, by_logits

WORST = 255
"""Ranks are kept in a byte: this one means `or worse`."""


def default_layers(depth: int) -> tuple[int, ...]:
    """About 1/3, 1/2 and 2/3 of a model's `depth` layers; fewer if it has not so many."""
    return tuple(sorted({depth // 3, depth // 2, 2 * depth // 3} & {*range(1, depth)}))


@torch.inference_mode()
def early_ranks(model: Any, texts: Texts, drafted: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """[M, L] uint8: how many tokens are more likely than `drafted` [M], at each position of `texts`, after each of
    `layers` of a Llama-like Hugging Face `model` (counted from 1; final norm and output head applied).
    """
    base, valid = model.base_model, texts.valid
    texts_at, _ = valid.nonzero(as_tuple=True)
    before = texts.positions[valid] - 1
    hidden: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: Any) -> None:
        del module, inputs
        state = output[0] if isinstance(output, tuple) else output
        hidden.append(state[texts_at, before])

    hooks = [base.layers[layer - 1].register_forward_hook(keep) for layer in layers]
    try:
        base(input_ids=texts.tokens[:, :-1], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()

    def rank(logits: torch.Tensor, chunk: slice) -> tuple[torch.Tensor]:
        own = logits.gather(1, drafted[chunk, None])
        return ((logits > own).sum(1).clamp(max=WORST).to(torch.uint8),)

    return torch.stack([by_logits(model, base.norm(state), rank)[0] for state in hidden], dim=1)
