"""The chain of draft passes: padded rows change nothing, and nothing is written past the longest context.

Attention is not in it here: the draft is a rule of token and position. With a real one, the tests of identity and of
replay go through it.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from faser.serving import chain as chain_module
from faser.serving.catch_up import pieces
from faser.serving.chain import DraftChain

if TYPE_CHECKING:
    from collections.abc import Iterator

import numpy as np

LONGEST, BLOCK, TOKENS = 40, 4, 97


class Draft:
    """The next token of token t at position p is 3 t + p, and as sure as that is large. Keeps the slots that it saw."""

    def __init__(self, requests: int) -> None:
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=requests))
        self.device, self.max_model_len, self.block_size = torch.device("cpu"), LONGEST, BLOCK
        self.arange = torch.arange(requests + 1, dtype=torch.int32)
        self.slots: list[list[int]] = []

    def model(self, *, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: None) -> torch.Tensor:
        assert inputs_embeds is None
        return (3 * input_ids + positions) % TOKENS

    def best(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden, hidden / TOKENS

    def build_per_group_and_layer_attn_metadata(
        self, common: Any, draft_index: int
    ) -> tuple[list[Any], dict[str, Any]]:
        assert draft_index == 1
        assert (common.seq_lens == torch.where(common.slot_mapping >= 0, common.seq_lens, 1)).all()
        self.slots.append(common.slot_mapping.tolist())
        return None, {"layer": common}


@pytest.fixture(autouse=True)
def no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(chain_module, "set_forward_context", nothing)


def drafted(chain: DraftChain, positions: list[int], depth: int) -> tuple[Any, Any]:
    count = len(positions)
    table = torch.arange(1, 1 + count * 12, dtype=torch.int32).reshape(count, 12)
    return chain.run(torch.arange(count) + 5, torch.tensor(positions), table, depth)


def test_each_token_follows_from_the_one_before_it_at_the_next_position() -> None:
    draft = Draft(8)
    tokens, confidence = drafted(DraftChain(draft), [9, 20], 3)
    for row, (token, position) in enumerate([(5, 9), (6, 20)]):
        for j in range(3):
            token = (3 * token + position + 1 + j) % TOKENS
            assert tokens[row, j] == token
            assert confidence[row, j] == pytest.approx(token / TOKENS)
    # request 0 is at position 10 of blocks 1 to 12, request 1 at 21 of blocks 13 to 24
    assert draft.slots[0] == [(1 + 10 // BLOCK) * BLOCK + 10 % BLOCK, (13 + 21 // BLOCK) * BLOCK + 21 % BLOCK]


def test_rows_that_pad_a_graph_change_nothing_and_write_nothing() -> None:
    plain, padded = Draft(8), Draft(8)
    alone, graphed = DraftChain(plain), DraftChain(padded)
    graphed._table = torch.zeros(8, 12, dtype=torch.int32)  # as capture leaves it
    graphed._sizes = [4, 8]
    graphed._graphs = {n: SimpleNamespace(replay=lambda n=n: graphed._pass(n)) for n in (4, 8)}  # type: ignore[misc]
    for positions, rows in (([3, 30, 7], 4), ([1, 2, 3, 4, 5], 8), ([11, 12, 13, 14], 4)):
        padded.slots.clear()
        ours, theirs = drafted(graphed, positions, 5), drafted(alone, positions, 5)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        assert all(len(slots) == rows for slots in padded.slots)
        assert all(slot == -1 for slots in padded.slots for slot in slots[len(positions) :])


def test_past_the_longest_context_nothing_is_written() -> None:
    draft = Draft(4)
    drafted(DraftChain(draft), [LONGEST - 3, 5], 5)
    assert [slots[0] >= 0 for slots in draft.slots] == [True, True, False, False, False]
    assert all(slots[1] >= 0 for slots in draft.slots)


def test_what_is_missing_is_made_up_for_in_passes_that_fit() -> None:
    start, end = np.array([5, 0, 40, 7]), np.array([9, 25, 41, 10])
    seen = [set() for _ in start]  # type: list[set[int]]
    for spans, first, last in pieces(start, end, 10):
        assert 0 < (last - first).sum() <= 10
        for span, a, b in zip(spans.tolist(), first.tolist(), last.tolist(), strict=True):
            assert not seen[span] & set(range(a, b))
            assert not seen[span] or a == max(seen[span]) + 1
            seen[span] |= set(range(a, b))
    assert seen == [set(range(a, b)) for a, b in zip(start.tolist(), end.tolist(), strict=True)]
    assert not list(pieces(np.zeros(0, np.int64), np.zeros(0, np.int64), 10))
