"""`faser serve`: vLLM's own server, started with FASER's scheduler and worker.

vLLM's parser is used as it is, with a group FASER added; no flag of vLLM's is declared again. `--spec-model` and
`--spec-tokens` are vLLM's: the draft, and the most tokens that may be drafted.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faser.acceptance import known_predictors, load_predictor, shipped_for
from faser.checkpoints import SHIPPED_POLICY
from faser.controller import ControllerConfig
from faser.core import MAX_DEPTH, Policy
from faser.costs import known_profiles, load_profile
from faser.machine import cpu
from faser.models import ModelError, Pair, known_models, match, prepare, resolve
from faser.policies import KNOWN, PolicyError, make_policy
from faser.policies.learned import LearnedPolicy
from faser.serving import live_flags, log_flags, split_flags
from faser.serving.settings import Settings, UsageError

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DEFAULT_MODEL = "smollm2"
DEFAULT_PROFILE = "h200-llama2-13b"
SCHEDULER = "faser.serving.scheduler.FaserScheduler"
ASYNC_SCHEDULER = "faser.serving.asynchronous.AsyncFaserScheduler"
WORKER = "faser.serving.worker.FaserWorker"
ADMIN = "faser.serving.admin.AdminRoutes"
ARM_HEADER = "faser.serving.arm_header.ArmHeader"
GIB = 1 << 30

CPU_DEFAULTS: dict[str, Any] = {
    "enforce_eager": True,  # compiling takes longer than a small model's whole life on a CPU
    "kv_cache_memory_bytes": GIB,  # vLLM's own default is nearly all of the machine's memory
    "max_model_len": 2048,
    "max_num_seqs": 64,
}
"""What `smollm2` is served with on a CPU where the user says nothing else."""


def main(argv: list[str]) -> int:
    """Run the server until it is stopped. Returns the exit status; 2 for a user's mistake."""
    with tempfile.TemporaryDirectory(prefix="faser-metrics-") as counts, _environment(counts):
        try:
            args = build_parser().parse_args(argv)
            configure(args)
            _check_port(args)
            split_flags.begin(Settings.from_config(args.additional_config))
        except (UsageError, ModelError, PolicyError) as error:
            print(f"faser serve: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("faser serve: stopped; nothing half-made was kept", file=sys.stderr)
            return 130
        from vllm.entrypoints.cli.serve import ServeSubcommand

        command = ServeSubcommand()
        command.validate(args)
        command.cmd(args)
    return 0


@cache  # its defaults are asked for too, and making it takes vLLM a while
def build_parser() -> FlexibleArgumentParser:
    """vLLM's serve parser with the group FASER."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from faser.serving import compat

    compat.allow_several("--policy")
    parser = make_arg_parser(
        FlexibleArgumentParser(
            prog="faser serve",
            usage="faser serve [MODEL] [--policy POLICY] [options]",
            description="vLLM's OpenAI-compatible server with a learned speculation policy. "
            f"MODEL: {', '.join(known_models())}, a directory or a hub id (default {DEFAULT_MODEL}); "
            "its draft: --spec-model.",
            epilog="--help=faser shows FASER's flags, --help=all every flag, --help=NAME what matches NAME.",
        )
    )
    group = parser.add_argument_group("FASER", "Which policy decides how far to speculate, and its limits.")
    limits = ControllerConfig()
    policies = "; ".join(f"{name}: {what}" for name, what in KNOWN.items())
    group.add_argument(
        "--policy",
        action="append",
        default=None,
        help=f"{policies}. Default: the learned policy of this release. Several, each ARM=POLICY, are an A/B test.",
    )
    split_flags.add(group)
    group.add_argument(
        "--faser-profile",
        default=None,
        help=f"Step costs: a profile's name ({', '.join(known_profiles())}) or file. Default: the model's own.",
    )
    group.add_argument(
        "--faser-predictor",
        default=None,
        help=f"What a draft's confidences are worth: a predictor's name ({', '.join(known_predictors())}) or file, as "
        "train/acceptance.py writes it. Default: that of a named model with its own draft, else none.",
    )
    group.add_argument(
        "--faser-deadline-ms", type=float, default=limits.deadline_ms, help="Longest time for a decision, ms."
    )
    group.add_argument(
        "--faser-fallback-length",
        type=int,
        default=limits.fallback_length,
        help="Speculation length of a step whose decision failed.",
    )
    group.add_argument(
        "--faser-bench-after", type=int, default=limits.bench_after, help="Faults in a row that bench a policy."
    )
    live_flags.add(group)
    log_flags.add(group)
    return parser


def configure(args: Namespace) -> None:
    """Turn parsed arguments into those of a vLLM server with FASER in it, preparing an embedded model if asked for.

    Raises UsageError, ModelError or PolicyError.
    """
    from faser.serving import compat

    _refuse_conflicts(args)
    depth = MAX_DEPTH if args.spec_tokens is None else args.spec_tokens
    if not 1 <= depth <= MAX_DEPTH:
        raise UsageError(f"--spec-tokens is {depth}; allowed: 1 to {MAX_DEPTH}")
    name = args.model_tag or _model_option(args) or DEFAULT_MODEL
    pair = resolve(name)
    settings = _settings(args, pair)
    cost = load_profile(settings.profile)
    policies = [make_policy(policy, cost) for policy in settings.policies]  # refuses here, not in the engine
    pair = prepare(name, progress=True)
    draft = args.spec_model or pair.draft
    if settings.speculates:
        _refuse_draft(pair, draft)
        _warn(_doubts(pair, draft, policies, settings.profile))
    if name in known_models():
        _set_defaults(args, served_model_name=[name])
    if name == DEFAULT_MODEL and _on_cpu():
        _set_defaults(args, **CPU_DEFAULTS)
    if not _on_cpu() and args.compilation_config.cudagraph_mode is None:
        compat.use_full_graphs(args.compilation_config)
    args.model_tag = args.model = str(pair.target)
    _speculate(args, draft, depth if settings.speculates else 0)
    args.async_scheduling = bool(args.async_scheduling)
    args.scheduler_cls, args.worker_cls = ASYNC_SCHEDULER if args.async_scheduling else SCHEDULER, WORKER
    if settings.admin is not None:
        args.middleware = [*args.middleware, ADMIN]
    if settings.split is not None:
        args.middleware = [*args.middleware, ARM_HEADER]
    args.additional_config = {**(args.additional_config or {}), **settings.to_config()}


def _speculate(args: Namespace, draft: Any, depth: int) -> None:
    args.spec_model = args.spec_tokens = None
    if depth:  # else there is no draft at all: what a server without speculation costs
        args.speculative_config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": depth}


def _refuse_draft(pair: Pair, draft: Path | str | None) -> None:
    if draft is None:
        raise UsageError(
            f"model {str(pair.target)!r} has no draft of its own; give one with --spec-model, or --policy none"
        )
    match.refuse_vocabularies(pair.target, draft)


def _doubts(pair: Pair, draft: Path | str | None, policies: list[Policy], profile: str) -> Iterator[str]:
    """What does not belong together, though it can be served: it costs speed only."""
    if draft is not None and (differ := match.renumbered(pair.target, draft)):
        yield differ
    cost = load_profile(profile)
    if other := match.foreign_profile(cost, _device()) or match.foreign_shapes(cost, pair.target, draft):
        yield f"{other}, and give it with --faser-profile"
    for policy in policies:
        if isinstance(policy, LearnedPolicy) and (other := match.untrained(policy.file.training, pair)):
            yield f"the policy {other}"


def _warn(doubts: Iterator[str]) -> None:
    for doubt in doubts:
        print(f"faser serve: warning: {doubt}", file=sys.stderr)


def _settings(args: Namespace, pair: Pair) -> Settings:
    profile = args.faser_profile or pair.profile
    if profile is None:
        profile = DEFAULT_PROFILE
        print(f"faser serve: no step costs are known for {pair.name!r}; using profile {profile}", file=sys.stderr)
    predictor = args.faser_predictor
    if predictor is None and args.spec_model is None:
        predictor = shipped_for(pair.tape)
    try:
        load_profile(profile)
        if predictor is not None:
            load_predictor(predictor)
        controller = ControllerConfig(
            deadline_ms=args.faser_deadline_ms,
            fallback_length=args.faser_fallback_length,
            bench_after=args.faser_bench_after,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    admin = live_flags.admin(args)
    kept = live_flags.kept(admin)
    split, policy = split_flags.chosen(args, kept)
    return Settings(
        policy=policy or str(SHIPPED_POLICY),
        split=split,
        profile=str(profile),
        predictor=predictor,
        restored=split is None and (kept.policy or kept.kept) is not None,
        benched=kept.benched and (split is None or split == kept.split),
        admin=admin,
        controller=controller,
        **log_flags.settings(args),
    )


def _refuse_conflicts(args: Namespace) -> None:
    if args.speculative_config is not None:
        raise UsageError("--policy and --speculative-config conflict: FASER decides; give the draft with --spec-model")
    if args.spec_method not in (None, "draft_model"):
        raise UsageError(f"--spec-method is {args.spec_method!r}; allowed: draft_model")
    if not isinstance(args.additional_config or {}, dict):
        raise UsageError(f"--additional-config is {args.additional_config!r}; allowed: a JSON object")
    if args.async_scheduling and args.pipeline_parallel_size > 1:
        raise UsageError("--async-scheduling and --pipeline-parallel-size conflict: this vLLM has not both with drafts")
    if args.async_scheduling and _on_cpu():
        raise UsageError("--async-scheduling: vLLM has it on GPUs only")
    for flag, value, default in (
        ("--scheduler-cls", args.scheduler_cls, None),
        ("--worker-cls", args.worker_cls, "auto"),
    ):
        if value != default:
            raise UsageError(f"{flag} is {value!r}; FASER sets it")


def _model_option(args: Namespace) -> str | None:
    """vLLM's `--model`, if the user gave it."""
    return None if args.model == build_parser().get_default("model") else str(args.model)


def _set_defaults(args: Namespace, **defaults: Any) -> None:
    """Set what the user did not: an argument that still has its parser's default."""
    for name, value in defaults.items():
        if getattr(args, name) == build_parser().get_default(name):
            setattr(args, name, value)


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def _device() -> str:
    """What vLLM runs on, as profiles name it."""
    from vllm.platforms import current_platform

    return cpu() if current_platform.is_cpu() else str(current_platform.get_device_name())


def _check_port(args: Namespace) -> None:
    family = socket.AF_INET6 if ":" in (args.host or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((args.host or "", args.port))
        except (OSError, OverflowError) as error:
            raise UsageError(f"--port {args.port} on host {args.host or 'all'} cannot be used: {error}") from None


@contextmanager
def _environment(counts: str) -> Iterator[None]:
    """What vLLM and prometheus_client read. counts: folder of `faser.serving.metrics`, of this server alone."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # V1 is the runner whose draft model runs in CUDA graphs
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's: a policy's products are too small to share out
    theirs = os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", counts) != counts
    try:
        yield
    finally:
        if not theirs:  # the folder goes, and so must its name
            del os.environ["PROMETHEUS_MULTIPROC_DIR"]
