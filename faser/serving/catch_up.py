"""A draft model that does not run while nothing is drafted, and catches up on what it missed when something is.

vLLM makes the draft's own pass over every step's rows, so that its KV cache follows the target's; a busy server that
drafts nothing pays for it at every step. Here such a pass is left out and only the first position missing is noted.
Before it drafts again, or when its input buffer would not hold what is missing, one pass over all of that makes up for
it: a row of one long pass costs a fraction of one of many short ones, and what belongs to requests that have ended
meanwhile is never computed. The tokens that it is over are kept on the device, by their place in the KV cache: the host
need not know a step's tokens when the next one begins. So where a prompt's prefix is an answer found in the cache, as
in a chat's next turn, the draft may lack part of it and guess worse. Outputs cannot change: only drafts depend on that
cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.forward_context import set_forward_context

from faser.serving.drafter import ConfidentDrafter

Positions = NDArray[np.int64]


def pieces(start: Positions, end: Positions, most: int) -> Iterator[tuple[Positions, Positions, Positions]]:
    """The spans `start` to `end` [M] in passes of at most `most` positions: which spans, and from where to where."""
    span, start = np.arange(len(start)), start.copy()
    while len(span):
        until = np.minimum(end[span], start[span] + most)
        fit = max(int(np.searchsorted((until - start[span]).cumsum(), most, side="right")), 1)
        yield span[:fit], start[span[:fit]], until[:fit]
        start[span[:fit]] = until[:fit]
        span = span[start[span] < end[span]]


class LazyDrafter(ConfidentDrafter):
    """Notes what its KV cache misses, by request."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self._missing: dict[str, int] = {}  # request id -> first position without draft KV
        # With data parallelism all ranks make a pass together, or none.
        self._lazy = self.vllm_config.parallel_config.data_parallel_size == 1
        self._text: torch.Tensor | None = None  # int32, of each place in the KV cache, where a pass was left out

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """[B, num_speculative_tokens] drafted tokens; vLLM passes everything by keyword."""
        length, metadata = kwargs["num_speculative_tokens"], kwargs["common_attn_metadata"]
        batch = self._runner.input_batch
        computed = batch.num_computed_tokens_cpu[: batch.num_reqs].astype(np.int64)
        self._missing = {r: at for r, at in self._missing.items() if r in self._runner.requests}
        noted = [self._missing.get(r, at) for r, at in zip(batch.req_ids, computed.tolist(), strict=True)]
        start = np.minimum(noted, computed)  # a preempted request comes back from an earlier position
        later = np.zeros(len(computed), np.bool_)  # rows whose pass can wait
        fits = int((computed - start).sum()) + metadata.num_actual_tokens <= self.max_num_tokens
        if length == 0 and self._lazy and fits:
            later = computed >= batch.num_prompt_tokens[: batch.num_reqs]  # a prompt's KV may soon be shared: at once
            self._keep(metadata.slot_mapping, kwargs["target_token_ids"])
        if later.all():
            drafted = torch.empty(len(computed), 0, dtype=torch.int64, device=self.device)
        else:
            rows = np.flatnonzero(~later & (start < computed))
            for piece, first, last in pieces(start[rows], computed[rows], self.max_num_tokens):
                self._catch_up(rows[piece], first, last, metadata)
            drafted = super().propose(*args, **kwargs)
        for request, waits, at in zip(batch.req_ids, later.tolist(), start.tolist(), strict=True):
            if waits:
                self._missing[request] = at
            else:
                self._missing.pop(request, None)
        return drafted

    def _keep(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note the `tokens` [N] that the target has just read, at the first N of `slots`; rejected ones are written
        over.
        """
        if self._text is None:
            cache = self.vllm_config.cache_config
            places = int(cache.num_gpu_blocks or 0) * max(int(cache.block_size), self.block_size)
            self._text = torch.zeros(places, dtype=torch.int32, device=self.device)
        self._text[slots[: len(tokens)]] = tokens.to(torch.int32)

    def _catch_up(self, rows: Positions, start: Positions, end: Positions, metadata: Any) -> None:
        """One pass over the positions `start` to `end` [M] of known text of M requests, the batch's `rows` [M]."""
        lengths = end - start
        row = np.repeat(rows, lengths)
        position = np.concatenate([np.arange(s, e) for s, e in zip(start, end, strict=True)])
        positions = self._sent(position)
        table = metadata.block_table_tensor
        block = table[self._sent(row), positions // self.block_size]
        slots = block.to(torch.int64) * self.block_size + positions % self.block_size
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        ends = end.astype(np.int32)
        own = metadata.replace(
            query_start_loc=self._sent(starts),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=self._sent(ends),
            seq_lens_cpu_upper_bound=torch.from_numpy(ends),
            num_reqs=len(rows),
            num_actual_tokens=len(position),
            max_query_len=int(lengths.max()),
            max_seq_len=int(end.max()),
            block_table_tensor=table[self._sent(rows)],
            slot_mapping=slots,
            positions=None,
            is_prefilling=None,
            req_idx=None,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        assert self._text is not None  # a pass was left out
        self.input_ids[: len(position)] = self._text[slots]
        self._set_positions(len(position), positions)
        _, per_layer = self.build_per_group_and_layer_attn_metadata(own)
        mode, padded, across = self._determine_batch_execution_and_padding(len(position))
        inputs, size = self.build_model_inputs_first_pass(len(position), padded, None)
        with set_forward_context(
            per_layer,
            self.vllm_config,
            num_tokens=padded,
            num_tokens_across_dp=across,
            cudagraph_runtime_mode=mode,
            slot_mapping=self._get_slot_mapping(size, slots),
        ):
            self.model(**inputs)

    def _sent(self, array: NDArray[Any]) -> torch.Tensor:
        """The array on the device, without waiting for what the device still computes."""
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
