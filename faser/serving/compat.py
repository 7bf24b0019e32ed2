"""Touches of vLLM that may break with its next version: all but those of `asynchronous`. For 0.32 and its V1 runner."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from vllm.platforms import current_platform

from faser.serving.inversion import recovered_tokens
from faser.serving.loop import Ended, Newcomer, Rows

if TYPE_CHECKING:
    from vllm.config import CompilationConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata


MARK = "faser_assigned"
"""What `mark_requests` says is under this name in vLLM's extra arguments of a request."""


def worker_base() -> type[Any]:
    """The worker class of this platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def repair_cpu_kernels() -> None:
    """Replace vLLM's CPU `expand_kernel`, which leaves its result in a copy.

    Without this, a temperature of a request with drafts is uninitialised memory on a CPU without Triton, and sampled
    outputs are not the target's. Greedy requests never use it.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import register_kernels

    if current_platform.is_cpu() and not HAS_TRITON:
        register_kernels({"vllm.v1.sample.rejection_sampler.expand_kernel": _expand})


def _expand(
    output: torch.Tensor,
    values: torch.Tensor,
    ends: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,  # noqa: ARG001  # the Triton kernel's block size
) -> None:
    """output [sum of counts] = each of `values` [B], `replace_from` replaced, as often as its request has drafts.

    ends: [B] running sum of the counts.
    """
    counts = torch.diff(ends, prepend=ends.new_zeros(1)).long()
    output.copy_(torch.where(values == replace_from, replace_to, values).repeat_interleave(counts))


def recover_by_inversion() -> None:
    """On a CPU, draw tokens in place of rejected ones by `faser.serving.inversion`."""
    from vllm.v1.sample import rejection_sampler

    if not current_platform.is_cpu():
        return
    own = rejection_sampler.sample_recovered_tokens

    def recover(*args: Any, **kwargs: Any) -> torch.Tensor:
        _, counts, _, drafts, draft_probs, target_probs, metadata, *_ = args
        if draft_probs is None:  # drafting is greedy
            return recovered_tokens(target_probs, drafts, counts, metadata.generators)
        return own(*args, **kwargs)

    rejection_sampler.sample_recovered_tokens = recover


def sample_plainly_without_drafts(runner: Any) -> None:
    """Where a step verifies nothing, sample as without speculation.

    vLLM verifies none as it verifies some, with copies of all logits and noise for tokens that nothing rejected: a busy
    server that has stopped speculating pays for it at every step. Not so if any request has a thinking budget: vLLM
    counts rows for those as a server that drafts has them.
    """
    own = runner._sample

    def sample(logits: torch.Tensor | None, metadata: SpecDecodeMetadata | None) -> Any:
        if metadata is not None and not len(metadata.draft_token_ids):
            budgets = runner.input_batch.thinking_budget_state_holder
            if budgets is None or not budgets.has_tracked_requests():
                metadata = None
        return own(logits, metadata)

    runner._sample = sample


def rewind_cpu_generators(runner: Any) -> None:
    """Undo on a CPU what a request with a seed draws before all of its prompt is read.

    vLLM does it by an offset, which a CPU's generators do not have: the engine would end at the first such request.
    """
    if not current_platform.is_cpu():
        return
    own_sample, own_books = runner._sample, runner._bookkeeping_sync

    def unread() -> dict[int, torch.Generator]:
        """By row, the generators of requests whose token is dropped."""
        dropped = runner.discard_request_mask.np
        return {row: each for row, each in runner.input_batch.generators.items() if dropped[row]}

    def sample(*args: Any, **kwargs: Any) -> Any:
        before = [(each, each.get_state()) for each in unread().values()]
        output = own_sample(*args, **kwargs)
        for each, state in before:
            each.set_state(state)
        return output

    def books(*args: Any, **kwargs: Any) -> Any:
        generators, kept = runner.input_batch.generators, unread()
        for row in kept:
            del generators[row]
        result = own_books(*args, **kwargs)
        generators.update(kept)
        return result

    runner._sample, runner._bookkeeping_sync = sample, books


@contextmanager
def drafter_class(cls: type[Any]) -> Iterator[None]:
    """While open, model runners build `cls` as their draft-model proposer: they name its class inline."""
    from vllm.v1.worker import gpu_model_runner

    with patch.object(gpu_model_runner, "DraftModelProposer", cls):
        yield


def allow_several(option: str) -> None:
    """Keep vLLM's parser from warning that `option` is there more than once."""
    logging.getLogger("vllm.utils.argparse_utils").addFilter(lambda record: record.args != (option,))


def allow_ragged_drafts(scheduler: Scheduler) -> None:
    """Stop the scheduler from padding a new decode to 1 + K rows: having a batch-size table does."""
    scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (scheduler.max_num_running_reqs + 1)


def answer_control() -> None:
    """Give this process's engine a method that its API processes can call between two steps: `Control.handle`."""
    from vllm.v1.engine.core import EngineCore

    def faser_control(self: Any, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = self.scheduler.control.handle(verb, arguments)
        return answer

    EngineCore.faser_control = faser_control  # type: ignore[attr-defined]  # ours


def mark_requests(mark: Callable[[], dict[str, Any] | None]) -> None:
    """Have every request that this API process sends to an engine carry what `mark` says, for `assigned`.

    Clients neither see it nor can say it. It is asked in the task of the HTTP request, so it may read its context.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    own = InputProcessor.assign_request_id

    def assign(request: Any) -> None:
        own(request)
        if (said := mark()) is not None and request.sampling_params is not None:
            params = request.sampling_params  # this request's own
            params.extra_args = {**(params.extra_args or {}), MARK: said}

    InputProcessor.assign_request_id = staticmethod(assign)  # type: ignore[method-assign]


def assigned(request: Request) -> dict[str, Any] | None:
    """What the API process marked the request with."""
    extra = request.sampling_params.extra_args if request.sampling_params else None
    said = extra.get(MARK) if extra else None
    return said if isinstance(said, dict) else None  # vLLM takes no dict from a client


def use_full_graphs(config: CompilationConfig) -> None:
    """Run ragged batches in full CUDA graphs: vLLM's default has them for batches of one length only.

    On an H200 with a 13B shape, batch 1 and depth 0: 12.4 ms a step instead of 18.2. With an attention backend that
    cannot do it, vLLM warns and falls back.
    """
    from vllm.config import CUDAGraphMode

    config.cudagraph_mode = CUDAGraphMode.FULL


def plan_attention_as_captured() -> None:
    """Have FlashAttention 3 plan a step of single rows as the full CUDA graph that it runs in was captured.

    The plan's layout depends on whether attention is causal, and where the longest query has one row and heads are not
    65 to 128 wide, causal attention is taken for full attention. Graphs are captured over several rows a request, so
    they read a column that such a plan lacks: on an H200, SmolLM2 at draft length 0 wrote nonsense. So no step says
    that its longest query is shorter than two rows.
    """
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    own = FlashAttentionMetadataBuilder.build

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        if self.use_full_cuda_graph and common_attn_metadata.max_query_len == 1:
            common_attn_metadata = common_attn_metadata.replace(max_query_len=2)
        return own(self, common_prefix_len, common_attn_metadata, fast_build)

    FlashAttentionMetadataBuilder.build = build  # type: ignore[method-assign]


def piecewise_graphs(config: CompilationConfig) -> CompilationConfig:
    """The same with piecewise CUDA graphs in place of full ones; the registry of layers in it stays shared."""
    from vllm.config import CUDAGraphMode

    if config.cudagraph_mode is None or not config.cudagraph_mode.has_full_cudagraphs():
        return config
    config = copy.copy(config)
    config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    return config


def captures_graphs(config: CompilationConfig) -> bool:
    """Whether vLLM runs models in CUDA graphs at all."""
    from vllm.config import CUDAGraphMode

    return config.cudagraph_mode not in (None, CUDAGraphMode.NONE)


def attention_fits_graphs(drafter: Any) -> bool:
    """Whether the draft's attention metadata, once made, serve every replay of a graph: FlashAttention's do."""
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    builders = [group.get_metadata_builder() for group in drafter.draft_attn_groups]
    return all(isinstance(builder, FlashAttentionMetadataBuilder) for builder in builders)


def capture_too(runner: Any, capture: Callable[[], None]) -> None:
    """Have `capture` done whenever `runner` has captured its own graphs, before it warms up what comes after."""
    own = runner.capture_model

    def both() -> int:
        used: int = own()
        with runner._freeze_gc():
            capture()
        return used

    runner.capture_model = both


def engine_index(scheduler: Scheduler) -> int:
    """Which of several data-parallel engines this is; 0 of one. (For dense models vLLM sets their rank back to 0.)"""
    index: int = scheduler.vllm_config.parallel_config.data_parallel_index
    return index


def decoding(scheduler: Scheduler) -> list[Request]:
    """Running requests past their prefill, but for those that are sure to end in the step under way."""
    return [r for r in scheduler.running if not (r.is_prefill_chunk or _ends(r))]


def _ends(request: Request) -> bool:
    """Whether the step under way, if there is one, brings the last token: vLLM schedules no other one then."""
    under_way = request.num_output_placeholders
    least = request.num_computed_tokens + 2 - under_way
    return under_way > 0 and least >= request.num_prompt_tokens + request.max_tokens


def prefill_tokens(scheduler: Scheduler, rows: int) -> int:
    """Prompt tokens that the next step may compute: running prefills, then as many of the queue as there are slots."""
    budget = max(scheduler.max_num_scheduled_tokens - rows, 0)
    free = scheduler.max_num_running_reqs - len(scheduler.running)
    tokens = sum(r.num_tokens - r.num_computed_tokens for r in scheduler.running if r.is_prefill_chunk)
    for request in islice(scheduler.waiting, free):
        if tokens >= budget:
            break
        tokens += request.num_tokens - request.num_computed_tokens
    return min(tokens, budget)


def rows(requests: list[Request]) -> Rows:
    """Requests as the loop knows them; a step under way counts as if it accepted no draft."""
    return Rows(
        ids=[r.request_id for r in requests],
        context=[r.num_computed_tokens - max(r.num_output_placeholders - 1, 0) for r in requests],
        generated=[r.num_output_tokens + (r.num_output_placeholders > 0) for r in requests],
        drafted=[len(r.spec_token_ids) for r in requests],
        newcomer=lambda i: _newcomer(requests[i]),
    )


def add_rejected(scheduled: SchedulerOutput, rejected: dict[str, int]) -> None:
    """Have the counts of requests that stay in the batch include `rejected` drafts of the step before."""
    cached = scheduled.scheduled_cached_reqs
    for i, request in enumerate(cached.req_ids if rejected else ()):
        if (count := rejected.get(request)) and request not in cached.resumed_req_ids:
            cached.num_computed_tokens[i] += count
            cached.num_output_tokens[i] += count


def merge(outputs: dict[int, EngineCoreOutputs], client: int, later: EngineCoreOutputs) -> None:
    """Add what a later step brought for a client."""
    earlier = outputs.setdefault(client, later)
    if earlier is later:
        return
    earlier.outputs = [*earlier.outputs, *later.outputs]
    earlier.scheduler_stats = earlier.scheduler_stats or later.scheduler_stats
    if later.finished_requests:
        earlier.finished_requests = (earlier.finished_requests or set()) | later.finished_requests


def _newcomer(request: Request) -> Newcomer:
    params = request.sampling_params
    temperature = params.temperature if params else 0.0
    return Newcomer(request.max_tokens, request.arrival_time, temperature, excluded(request))


def written(outputs: dict[int, EngineCoreOutputs]) -> dict[str, tuple[int, bool]]:
    """Request id -> (tokens that a step added to its output, whether it goes on)."""
    every = [out for client in outputs.values() for out in client.outputs]
    return {out.request_id: (len(out.new_token_ids), out.finish_reason is None) for out in every}


def ended(request: Request, *, texts: bool) -> Ended:
    """A finished request as the loop logs it; `texts`: with its tokens, if a tape may be made of them."""
    return Ended(
        request_id=request.request_id,
        arrival=request.arrival_time,
        prompt=request.num_prompt_tokens,
        tokens=request.num_output_tokens,
        status=str(request.get_finished_reason()),
        excluded=excluded(request),
        texts=_texts(request) if texts and not excluded(request) else {},
    )


def _texts(request: Request) -> dict[str, Any]:
    """Of a request of tokens alone: images and ready-made embeddings are no text."""
    p = request.sampling_params
    if p is None or request.prompt_token_ids is None or request.prompt_embeds is not None or request.mm_features:
        return {}
    return {
        "prompt_ids": list(request.prompt_token_ids),
        "output_ids": list(request.output_token_ids),
        "temperature": p.temperature,
        "max_tokens": request.max_tokens,
    }


def excluded(request: Request) -> bool:
    """Whether the request is sampled under rules that make its acceptance say nothing about others'."""
    p = request.sampling_params
    if p is None or request.use_structured_output or request.lora_request:
        return True
    penalised = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0
    ruled = p.logit_bias or p.bad_words or p.allowed_token_ids or p.min_p or p.min_tokens
    return bool(penalised or ruled or p.thinking_token_budget is not None)


def verdicts(scheduled: SchedulerOutput, output: ModelRunnerOutput) -> dict[str, tuple[int, int]]:
    """Request id -> (drafted tokens verified, accepted) for every request that verified any."""
    result = {}
    for request_id, drafts in scheduled.scheduled_spec_decode_tokens.items():
        index = output.req_id_to_index.get(request_id)
        if index is None or not output.sampled_token_ids or not output.sampled_token_ids[index]:
            continue
        result[request_id] = (len(drafts), len(output.sampled_token_ids[index]) - 1)
    return result


def prefilled(scheduled: SchedulerOutput, decoding: frozenset[str]) -> int:
    """Prompt tokens computed in a step whose decoding requests were `decoding`."""
    return sum(n for request_id, n in scheduled.num_scheduled_tokens.items() if request_id not in decoding)


def verifiers(
    logits: torch.Tensor, drafts: torch.Tensor, counts: list[int], temperature: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """vLLM's verification of greedy drafts, to hold ours against: whole, from `logits`, and its last part alone.

    logits: [N + B, V], drafts: [N] int32 and temperature: [B] float32 as for `faser.kernels.verify`; counts: of drafts,
    not all 0. Either gives tokens [B, longest + 1] int32. The part is `rejection_sample`, which finds ready what the
    whole has made by then: the drafts' logits, gathered and float32, and one more token for each request.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler, rejection_sample
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    device = logits.device
    rows = torch.tensor(counts, device=device) + 1
    ends = rows.cumsum(0)
    last = ends - 1
    drafted = torch.ones(len(logits), dtype=torch.bool, device=device).index_fill(0, last, False).nonzero().squeeze(1)
    metadata = SpecDecodeMetadata(
        draft_token_ids=drafts,
        num_draft_tokens=counts,
        cu_num_draft_tokens=(rows - 1).cumsum(0).int(),
        cu_num_sampled_tokens=ends.int(),
        target_logits_indices=drafted.int(),
        bonus_logits_indices=last.int(),
        logits_indices=torch.arange(len(logits), dtype=torch.int32, device=device),
    )
    greedy = bool((temperature == 0.0).all())
    none = torch.empty(0, device=device)
    sampling = SamplingMetadata(
        temperature=None if greedy else temperature,
        all_greedy=greedy,
        all_random=bool((temperature != 0.0).all()),
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in counts],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = RejectionSampler(Sampler(), device=device)
    ready, bonus = logits[drafted].float(), logits[last].argmax(dim=-1, keepdim=True).int()

    def whole() -> torch.Tensor:
        tokens: torch.Tensor = sampler(metadata, None, logits, sampling).sampled_token_ids
        return tokens

    def part() -> torch.Tensor:
        made = metadata.cu_num_draft_tokens
        return rejection_sample(drafts, counts, metadata.max_spec_len, made, None, ready, bonus, sampling)

    return whole, part
