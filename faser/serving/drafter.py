"""Greedy drafting that says how sure it is, and whose passes after the first cost the host next to nothing.

The confidence of a drafted token is its softmax probability; drafting is greedy, so that is the largest one.

vLLM drafts token after token from Python, and only in piecewise CUDA graphs: on an H200 the host needs 1.5 to 2 ms for
what the GPU does in a tenth of that. Here the first pass, over the tokens that the target has just accepted, is vLLM's;
the passes after it, one row a request, are `DraftChain`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.spec_decode.draft_model import DraftModelProposer

from faser.kernels.confidence import argmax_confidence
from faser.serving import compat
from faser.serving.chain import DraftChain

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ConfidentDrafter(DraftModelProposer):
    """Keeps the confidences of its last call."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self._runner = runner
        self._confidence: list[torch.Tensor] = []  # [B, tokens] each
        self._sampled: torch.Tensor | None = None  # [B] the first pass's rows that a token was drafted from
        # Ranks that work together make each pass together, padded alike: vLLM's own loop sees to that.
        alone = self.vllm_config.parallel_config.world_size_across_dp == 1
        self._chain = DraftChain(self) if alone and not self.use_heterogeneous_vocab else None

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[B, num_speculative_tokens] drafted tokens; vLLM passes everything by keyword."""
        self._confidence = []
        depth = kwargs["num_speculative_tokens"]
        if depth < 2 or self._chain is None:
            return super().propose(*args, **kwargs)
        first = super().propose(*args, **{**kwargs, "num_speculative_tokens": 1})
        self.num_speculative_tokens = depth  # as that call would have left it
        table = kwargs["common_attn_metadata"].block_table_tensor
        more, confidence = self._chain.run(first[:, 0], self.positions[self._sampled], table, depth - 1)
        self._confidence.append(confidence)
        return torch.cat((first, more), dim=1)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record the chain's graphs, once vLLM has recorded its own; where that cannot be, vLLM drafts as ever."""
        config = self.vllm_config.compilation_config
        if self._chain is None or not compat.captures_graphs(config):
            return
        if not compat.attention_fits_graphs(self):
            self._chain = None
            return
        table = self._runner.input_batch.block_table[self.kv_cache_gid].get_device_tensor(1)
        self._chain.capture(config.cudagraph_capture_sizes, table)

    def set_inputs_first_pass(self, *args: Any, **kwargs: Any) -> tuple[int, torch.Tensor, Any]:
        made: tuple[int, torch.Tensor, Any] = super().set_inputs_first_pass(*args, **kwargs)
        self._sampled = made[1]
        return made

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens, confidence = self.best(hidden_states)
        self._confidence.append(confidence[:, None])
        return tokens

    def best(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The most probable tokens [B] of `hidden_states` [B, H], and their probabilities [B] float32."""
        model: Any = self.model  # a torch module with vLLM's own methods
        return argmax_confidence(model.compute_logits(hidden_states))

    def take_confidence(self) -> torch.Tensor | None:
        """[B, depth] float32 of the last call, once; None if it drafted nothing or did not run."""
        taken, self._confidence = self._confidence, []
        return torch.cat(taken, dim=1) if taken else None

    def _create_draft_vllm_config(self) -> VllmConfig:
        config: VllmConfig = super()._create_draft_vllm_config()
        config.compilation_config = compat.piecewise_graphs(config.compilation_config)
        return config

    def dummy_run(
        self,
        num_tokens: int,
        use_cudagraphs: bool = True,
        is_graph_capturing: bool = False,
        slot_mappings: dict[str, torch.Tensor] | None = None,
    ) -> None:
        # vLLM captures none of the draft's graphs, which are piecewise, while the target's are full ones.
        super().dummy_run(num_tokens, use_cudagraphs or is_graph_capturing, is_graph_capturing, slot_mappings)
