"""The target's own outputs, in batches, with Hugging Face's `generate`.

One decision: requests are sorted by temperature, then long prompts apart from short ones, then by limit. So a batch has
one way of sampling, does not carry padding of a thousand tokens, and does not wait for one long output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be continued: token ids, temperature (0: greedy), and the longest output."""

    domain: str
    prompt: list[int]
    temperature: float
    max_tokens: int


def batches(requests: Sequence[Request], size: int) -> Iterator[list[int]]:
    """Indices of `requests` that are generated together, at most `size`."""

    def kind(i: int) -> tuple[float, int]:
        return requests[i].temperature, _span(len(requests[i].prompt))

    def key(i: int) -> tuple[float, int, int, int]:
        return *kind(i), requests[i].max_tokens, len(requests[i].prompt)

    for _, group in groupby(sorted(range(len(requests)), key=key), key=kind):
        order = list(group)
        yield from (order[at : at + size] for at in range(0, len(order), size))


def _span(tokens: int) -> int:
    """Prompts of one span share batches: below 512 tokens, below 2,048, below 8,192, and so on."""
    return max(tokens.bit_length() - 8, 0) // 2


def generate(
    model: Any, requests: Sequence[Request], *, batch: int, seed: int, advance: Callable[[int], object]
) -> list[list[int]]:
    """The output token ids of each of `requests`, up to and with its end token, or `max_tokens` long.

    Sampling is from the whole softmax at the temperature, seeded. advance: told the number of requests done.
    """
    torch.manual_seed(seed)
    outputs: list[list[int]] = [[] for _ in requests]
    for chosen in batches(requests, batch):
        for i, output in zip(chosen, _batch(model, [requests[i] for i in chosen]), strict=True):
            outputs[i] = output
        advance(len(chosen))
    return outputs


def _batch(model: Any, requests: Sequence[Request]) -> list[list[int]]:
    """Outputs of requests at one temperature."""
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends or ())
    pad, temperature = min(ends, default=0), requests[0].temperature
    width = max(len(r.prompt) for r in requests)
    ids = [[pad] * (width - len(r.prompt)) + r.prompt for r in requests]
    mask = [[0] * (width - len(r.prompt)) + [1] * len(r.prompt) for r in requests]
    # Spelled out, since the model's own generation_config fills in what is not said here.
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    made = model.generate(
        input_ids=torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max(r.max_tokens for r in requests),
        eos_token_id=ends or None,
        pad_token_id=pad,
        repetition_penalty=1.0,
        do_sample=temperature > 0,
        **sampling,
    )[:, width:].cpu()
    limit = torch.tensor([r.max_tokens for r in requests]).clamp(max=made.shape[1])
    ended = torch.isin(made, torch.tensor(ends, dtype=made.dtype))
    first = torch.where(ended.any(1), ended.int().argmax(1) + 1, made.shape[1])
    return [row[:n].tolist() for row, n in zip(made, torch.minimum(limit, first).tolist(), strict=True)]
