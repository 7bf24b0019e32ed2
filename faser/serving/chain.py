"""`DraftChain`: one more drafted token for every request, over and over, as one CUDA graph for a number of requests.

Everything that a pass reads and leaves lives in buffers of its own: tokens, positions, block table, slots, lengths, and
which column of the results comes next. So a pass needs nothing from the host but to be started, and the graph of B rows
serves every depth. Rows beyond the requests stand past the longest context, where a pass writes nothing.

Without CUDA graphs, on a CPU, the same pass runs eagerly; there attention wants metadata that are made anew each time.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import PAD_SLOT_ID

from faser.core import MAX_DEPTH

if TYPE_CHECKING:
    from faser.serving.drafter import ConfidentDrafter


class DraftChain:
    """Of one drafter. Symbols: B requests, R rows of a pass, R >= B."""

    def __init__(self, drafter: ConfidentDrafter) -> None:
        self._drafter = drafter
        config = drafter.vllm_config
        self._most = int(config.scheduler_config.max_num_seqs)
        self._sizes: list[int] = []  # rows of the graphs, increasing
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        device, rows = drafter.device, self._most
        self._ids = torch.zeros(rows, dtype=torch.int32, device=device)
        self._position = torch.zeros(rows, dtype=torch.int64, device=device)  # of the token in _ids, less one
        self._at = torch.zeros(rows, dtype=torch.int64, device=device)  # the same, 0 for rows past the longest context
        self._slot = torch.full((rows,), PAD_SLOT_ID, dtype=torch.int64, device=device)
        self._length = torch.ones(rows, dtype=torch.int32, device=device)
        self._column = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(rows, MAX_DEPTH, dtype=torch.int64, device=device)
        self._confidence = torch.zeros(rows, MAX_DEPTH, dtype=torch.float32, device=device)
        self._table: torch.Tensor | None = None  # [most, blocks of a request], once its width is known

    def run(
        self, first: torch.Tensor, position: torch.Tensor, table: torch.Tensor, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`depth` >= 1 more tokens [B, depth] int64 after the drafted tokens `first` [B], and their confidences.

        position: [B] of the tokens before `first`, the last ones in the draft's KV cache. table: [B, blocks].
        """
        count = len(first)
        rows = self._rows(count)
        self._ids[:count] = first
        self._position[:count] = position
        self._position[count:rows] = self._drafter.max_model_len
        width = table.shape[1]
        if self._table is None or self._table.shape[1] < width:
            self._graphs.clear()  # they hold the address of a narrower one
            self._sizes.clear()
            self._table = table.new_zeros(self._most, width)
        self._table[:count, :width] = table[:count]
        self._column.zero_()
        graph = self._graphs.get(rows)
        for _ in range(depth):
            if graph is None:
                self._pass(rows)
            else:
                graph.replay()
        return self._tokens[:count, :depth].clone(), self._confidence[:count, :depth].clone()

    def capture(self, sizes: list[int], table: torch.Tensor) -> None:
        """Record a graph for each of `sizes`, rows; larger ones than there can be requests are left out.

        table: any block table, for its width. The graphs share memory of their own: vLLM's may not reuse it meanwhile.
        """
        pool = torch.cuda.graph_pool_handle()
        self._table = table.new_zeros(self._most, table.shape[1])
        self._position.fill_(self._drafter.max_model_len)
        for rows in sorted({min(size, self._most) for size in sizes}, reverse=True):  # smaller ones reuse the memory
            self._column.zero_()  # the passes below are none of a draft
            for _ in range(2):  # what compiles or sets itself up on the way does it now
                self._pass(rows)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self._pass(rows)
            self._graphs[rows] = graph
        self._sizes = sorted(self._graphs)

    def _rows(self, count: int) -> int:
        """Rows of the smallest graph for `count` requests; without one just those."""
        at = bisect_left(self._sizes, count)
        return self._sizes[at] if at < len(self._sizes) else count

    def _pass(self, rows: int) -> None:
        drafter, most = self._drafter, self._drafter.max_model_len
        assert self._table is not None
        position = self._position[:rows]
        position += 1
        past = position >= most
        at = torch.where(past, 0, position)
        block = self._table[:rows].gather(1, (at // drafter.block_size)[:, None]).squeeze(1)
        self._at[:rows] = at
        self._slot[:rows] = torch.where(past, PAD_SLOT_ID, block * drafter.block_size + at % drafter.block_size)
        self._length[:rows] = at + 1
        names, metadata = self._metadata(rows)
        with set_forward_context(
            metadata,
            drafter.vllm_config,
            num_tokens=rows,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=dict.fromkeys(names, self._slot[:rows]),
        ):
            model: Any = drafter.model
            hidden = model(input_ids=self._ids[:rows], positions=self._at[:rows], inputs_embeds=None)
        tokens, confidence = drafter.best(hidden)
        self._ids[:rows] = tokens
        column = self._column.expand(rows, 1)
        self._tokens[:rows].scatter_(1, column, tokens[:, None])
        self._confidence[:rows].scatter_(1, column, confidence[:, None])
        self._column += 1

    def _metadata(self, rows: int) -> tuple[list[str], dict[str, Any]]:
        """Names of the draft's attention layers, and the attention metadata of each."""
        drafter = self._drafter
        assert self._table is not None
        starts = torch.arange(rows + 1, dtype=torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=drafter.arange[: rows + 1],
            query_start_loc_cpu=starts,
            seq_lens=self._length[:rows],
            seq_lens_cpu_upper_bound=self._length[:rows] if drafter.device.type == "cpu" else None,
            num_reqs=rows,
            num_actual_tokens=rows,
            max_query_len=1,
            max_seq_len=drafter.max_model_len,  # a graph must hold for any
            block_table_tensor=self._table[:rows],
            slot_mapping=self._slot[:rows],
        )
        _, layers = drafter.build_per_group_and_layer_attn_metadata(common, draft_index=1)
        return list(layers), layers
