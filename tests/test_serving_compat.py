"""Repairs of vLLM are needed, and work."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

from faser.kernels.verify import verify
from faser.serving import compat
from faser.serving.inversion import recovered_tokens


@pytest.fixture
def cpu_kernels() -> None:
    """vLLM's, as its worker sets them up."""
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    compat.repair_cpu_kernels()


@pytest.mark.usefixtures("cpu_kernels")
def test_a_batch_is_expanded_to_its_drafted_tokens() -> None:
    ends = torch.tensor([1, 3, 3, 5], dtype=torch.int32)  # 1, 2, 0 and 2 drafted tokens
    temperature = expand_batch_to_tokens(torch.tensor([0.5, 0.0, 0.7, 0.9]), ends, 5, replace_from=0, replace_to=1)
    assert temperature.tolist() == torch.tensor([0.5, 1.0, 1.0, 0.9, 0.9]).tolist()
    top_k = expand_batch_to_tokens(torch.tensor([5, 6, 7, 8], dtype=torch.int32), ends, 5)
    assert top_k.tolist() == [5, 6, 6, 8, 8]


def test_a_step_of_single_rows_is_planned_as_longer_ones_where_graphs_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[tuple[int, bool]] = []

    def build(_self: object, _prefix: int, metadata: CommonAttentionMetadata, fast: bool) -> None:
        planned.append((metadata.max_query_len, fast))

    monkeypatch.setattr(FlashAttentionMetadataBuilder, "build", build)
    compat.plan_attention_as_captured()
    for full in (True, False):
        for rows in (1, 5):
            starts = torch.tensor([0, rows], dtype=torch.int32)
            metadata = CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=torch.tensor([9]),
                num_reqs=1,
                num_actual_tokens=rows,
                max_query_len=rows,
                max_seq_len=9,
                block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
                slot_mapping=torch.zeros(rows, dtype=torch.int64),
            )
            builder = SimpleNamespace(use_full_cuda_graph=full)
            FlashAttentionMetadataBuilder.build(builder, 0, metadata, fast_build=True)  # type: ignore[arg-type]
    assert planned == [(2, True), (5, True), (1, True), (5, True)]


@pytest.mark.usefixtures("cpu_kernels")
def test_vllm_verifies_greedy_requests_as_we_do() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = [0, 7, 3, 1, 0, 4]
    rows = sum(counts) + len(counts)
    logits = torch.randn(rows, 50, generator=generator).bfloat16()
    drafts = torch.cat([part.argmax(dim=-1)[:-1] for part in logits.split([n + 1 for n in counts])]).int()
    drafts[4], drafts[9] = 3, -1
    ends = torch.tensor(counts).cumsum(0).int()
    for temperature in ([0.0] * 6, [0.0, 0.0, 0.0, 0.0, 0.7, 1.0]):
        heat = torch.tensor(temperature)
        ours = verify(logits, drafts, ends, heat, torch.rand(rows, generator=generator), 7).tokens
        for theirs in compat.verifiers(logits, drafts, counts, heat):
            assert theirs()[heat == 0.0].equal(ours[heat == 0.0])
    assert ours[:4].gt(-1).sum(dim=1).tolist() == [1, 5, 3, 2]


def test_a_step_without_drafts_is_sampled_as_without_speculation() -> None:
    some, none = (SimpleNamespace(draft_token_ids=torch.zeros(n, dtype=torch.int32)) for n in (2, 0))
    budgets = (
        None,
        SimpleNamespace(has_tracked_requests=lambda: False),
        SimpleNamespace(has_tracked_requests=lambda: True),
    )
    for holder, expected in zip(budgets, (None, None, none), strict=True):
        given: list[object] = []
        runner = SimpleNamespace(
            input_batch=SimpleNamespace(thinking_budget_state_holder=holder),
            _sample=lambda _logits, metadata, given=given: given.append(metadata),
        )
        compat.sample_plainly_without_drafts(runner)
        for metadata in (some, none, None):
            runner._sample(torch.zeros(1, 3), metadata)
        assert given == [some, expected, None]


@pytest.mark.usefixtures("cpu_kernels")
def test_rejected_tokens_are_replaced_by_inversion(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(probabilities: torch.Tensor, drafts: torch.Tensor, *rest: Any) -> torch.Tensor:
        asked.append(len(drafts))
        return recovered_tokens(probabilities, drafts, *rest)

    monkeypatch.setattr(compat, "recovered_tokens", counted)
    monkeypatch.setattr(rejection_sampler, "sample_recovered_tokens", rejection_sampler.sample_recovered_tokens)
    compat.recover_by_inversion()
    torch.manual_seed(0)
    count, heat = 4000, torch.tensor([1.0])
    logits = torch.tensor([[0.5, 0.3, 0.2, 1e-9]]).log().repeat(2 * count, 1)
    drafts = torch.full((count,), 3, dtype=torch.int32)  # never right
    whole, _ = compat.verifiers(logits, drafts, [1] * count, heat.expand(count).contiguous())
    first = whole()[:, 0]
    assert torch.allclose(first.bincount(minlength=4) / count, torch.tensor([0.5, 0.3, 0.2, 0.0]), atol=0.04)  # 5 sigma
    assert asked == [count]
