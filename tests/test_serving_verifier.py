"""Verification in one launch: only where vLLM's sampler would do no more, and then with its outcome."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors, MinTokensLogitsProcessor

from faser.serving.compat import drafted, sampled
from faser.serving.verifier import plain, verified

COUNTS = [3, 0, 1, 2]
"""Of drafted tokens."""


def test_greedy_requests_keep_what_the_target_would_have_said() -> None:
    logits = torch.randn(sum(COUNTS) + len(COUNTS), 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    said = logits.argmax(dim=-1).tolist()
    a, b, c, d = said[:4], said[4:5], said[5:7], said[7:]
    drafts = torch.tensor([a[0], a[1], a[2] + 1, c[0], (d[0] + 1) % 50, d[1]], dtype=torch.int32)
    tokens = verified(drafted(drafts, COUNTS), logits, sampled(torch.zeros(4)))
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == [[*a[:3], -1], [*b, -1, -1, -1], [*c, -1, -1], [d[0], -1, -1, -1]]


def test_sampled_requests_write_what_the_target_would_whatever_was_drafted() -> None:
    torch.manual_seed(0)
    requests, heat = 6000, 0.7
    row = torch.tensor([2.0, 1.0, 0.0, -1.0])
    drafts = torch.randint(0, 4, (requests,), dtype=torch.int32)
    temperature = torch.full((requests,), heat)
    tokens = verified(drafted(drafts, [1] * requests), row.repeat(2 * requests, 1), sampled(temperature))
    p = torch.softmax(row / heat, dim=0)
    for written in (tokens[:, 0], tokens[:, 1][tokens[:, 0] == drafts]):
        expected = len(written) * p
        chi_square = ((torch.bincount(written, minlength=4) - expected) ** 2 / expected).sum()
        assert chi_square < 21.1  # of 3 degrees of freedom, one in 10,000 is larger
    assert (tokens[:, 1][tokens[:, 0] != drafts] == -1).all()


def test_greedy_and_sampled_requests_share_a_step() -> None:
    torch.manual_seed(0)
    row = torch.tensor([2.0, 1.9, 0.0])
    drafts = torch.zeros(400, dtype=torch.int32)
    heat = torch.tensor([0.0, 1.0]).repeat(200)
    tokens = verified(drafted(drafts, [1] * 400), row.repeat(800, 1), sampled(heat))
    assert (tokens[heat == 0.0] == 0).all()
    assert not (tokens[heat == 1.0] == 0).all()


class Minimum(MinTokensLogitsProcessor):
    """vLLM's, of which `requests` ask for a least number of tokens."""

    def __init__(self, requests: dict[int, Any]) -> None:
        self.min_toks = requests


@pytest.mark.parametrize(
    "more",
    [
        {"max_num_logprobs": 0},
        {"logprob_token_ids": {0: [1]}},
        {"no_penalties": False},
        {"allowed_token_ids_mask": torch.zeros(4, 50, dtype=torch.bool)},
        {"bad_words_token_ids": {0: [[1]]}},
        {"logitsprocs": LogitsProcessors([Minimum({0: (5, [], {2}, False)})])},
        {"logitsprocs": LogitsProcessors([SimpleNamespace(is_argmax_invariant=lambda: True)])},
        {"logitsprocs": LogitsProcessors([SimpleNamespace(is_argmax_invariant=lambda: False)])},
        {"thinking_budget_state_holder": SimpleNamespace(has_tracked_requests=lambda: True)},
    ],
    ids=lambda more: next(iter(more)),
)
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_what_asks_for_more_than_a_temperature_is_left_to_vllm(more: dict[str, Any], heat: float) -> None:
    assert not plain(replace(sampled(torch.full((4,), heat)), **more))


@pytest.mark.parametrize("more", [{"top_p": torch.ones(4)}, {"top_k": torch.ones(4)}, {"generators": {0: None}}])
def test_what_matters_to_sampled_requests_alone_does_not_to_greedy_ones(more: dict[str, Any]) -> None:
    assert plain(replace(sampled(torch.zeros(4)), **more))
    assert not plain(replace(sampled(torch.tensor([0.0, 1.0, 0.0, 0.0])), **more))


def test_processors_with_nothing_to_do_are_no_hindrance() -> None:
    idle = SimpleNamespace(has_tracked_requests=lambda: False)
    idle_too = LogitsProcessors([Minimum({})])
    assert plain(replace(sampled(torch.ones(4)), thinking_budget_state_holder=idle, logitsprocs=idle_too))
