"""`python train/draft.py --target DIR --out DIR`: give a target a draft, from nothing but its own weights.

Three phases, each leaving its result in the work directory, so that a stopped run goes on where it was: the target
writes conversations (`corpus`, through vLLM), a small Llama is distilled from them (`distil`), and its acceptance is
measured on prompts that it never saw, after quantising it to int8 rows as it is shipped.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faser.models import ModelError
from faser.tapes import TapeError
from faser.tapes.prompts import PROMPTS
from faser.train.arguments import positive
from faser.train.corpus import LONGEST, Author, ChatFormat, Conversations
from faser.train.distil import Schedule, Shape, distil, draft_model
from faser.train.draft_export import acceptance_table, evaluate, export, write_card

ROUND = 6144
"""Conversations of one engine's round; a round is what a stopped run can lose."""
MODEL = "model.pt"
PHASES = ("generate", "distil", "evaluate")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    shape, schedule = Shape(), Schedule()
    p = argparse.ArgumentParser(prog="train/draft.py", description=__doc__)
    p.add_argument("--target", type=Path, required=True, help="Hugging Face directory of a Llama")
    p.add_argument("--out", type=Path, required=True, help="directory of the draft: int8 weights, config.json, card")
    p.add_argument("--work", type=Path, help="directory of conversations and weights (default: OUT.work)")
    p.add_argument(
        "--prompts", type=Path, default=PROMPTS, help="held-out prompts to evaluate on (default: those shipped)"
    )
    p.add_argument("--tokens", type=positive, default=20_000_000, help="to write (default: %(default)s)")
    p.add_argument("--engines", type=positive, default=1, help="vLLM engines side by side, over all GPUs (default: 1)")
    p.add_argument("--round", type=positive, default=ROUND, help="conversations of a round (default: %(default)s)")
    p.add_argument("--steps", type=positive, default=schedule.steps, help="of training (default: %(default)s)")
    p.add_argument(
        "--batch-tokens", type=positive, default=schedule.batch_tokens, help="of a step (default: %(default)s)"
    )
    p.add_argument("--rate", type=float, default=schedule.rate, help="peak learning rate (default: %(default)s)")
    for name in ("hidden", "layers", "heads", "kv_heads", "intermediate"):
        p.add_argument(f"--{name.replace('_', '-')}", type=positive, default=getattr(shape, name), help="of the draft")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--phase", choices=PHASES, default=PHASES[-1], help="stop after this one (default: evaluate)")
    p.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 1 an engine failed, 2 a mistake in the command."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    args.work = args.work or args.out.with_name(args.out.name + ".work")
    corpus = args.work / "corpus"
    try:
        _check(args)
        corpus.mkdir(parents=True, exist_ok=True)
        if args.engine is not None:
            write(args, corpus)
            return 0
        if written(corpus) < args.tokens and (failed := _run_engines(argv, args.engines)):
            print(f"error: {failed} of {args.engines} engines failed; what they wrote is kept", file=sys.stderr)
            return 1
        if args.phase == "generate":
            return 0
        kept = trained(args, corpus)
        if args.phase == "distil":
            return 0
        export(kept, args.out)
        tape = evaluate(args.target, args.out, args.prompts, device=args.device, work=args.work)
        table = acceptance_table(tape)
        command = shlex.join(["python", "train/draft.py", *argv])
        write_card(args.out, target=args.target.name, command=command, table=table)
        print(table)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last finished round or phase", file=sys.stderr)
        return 130
    except (ModelError, TapeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check(args: argparse.Namespace) -> None:
    """ModelError or ValueError for what can be known before anything runs."""
    if not (args.target / "config.json").is_file():
        raise ModelError(f"--target is {args.target}; allowed: a directory with a config.json")
    if not args.prompts.is_file():
        raise ValueError(f"--prompts is {args.prompts}; there is no such file")
    for name, of in (("heads", "hidden"), ("kv_heads", "heads")):
        if getattr(args, of) % getattr(args, name):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {getattr(args, name)}; allowed: a divisor of --{of}, {getattr(args, of)}")


def written(corpus: Path) -> int:
    """Tokens of the finished rounds."""
    return sum(int(np.load(path)["length"].sum()) for path in corpus.glob("*.npz"))


def _run_engines(argv: list[str], count: int) -> int:
    """`write` in `count` processes, an engine each, shared out over the GPUs; returns how many failed."""
    command = [sys.executable, __file__, *argv]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = seen.split(",")
    engines = [
        subprocess.Popen(
            [*command, "--engine", str(i)], env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]}
        )
        for i in range(count)
    ]
    return sum(engine.wait() != 0 for engine in engines)


def write(args: argparse.Namespace, corpus: Path) -> None:
    """Rounds of conversations by one engine, until its share of the tokens is there."""
    from transformers import AutoTokenizer, GenerationConfig

    from faser.serving.writer import Writer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    ends = GenerationConfig.from_pretrained(args.target).eos_token_id
    chat = ChatFormat.of(tokenizer, ends if isinstance(ends, list) else [ends])
    done = sorted(corpus.glob(f"{args.engine}-*.npz"))
    tokens = written_by = sum(int(np.load(path)["length"].sum()) for path in done)
    seed = args.seed + 1000 * args.engine + len(done)
    writer = Writer(args.target, seed=seed, length=LONGEST, sequences=min(args.round, 1024))
    author = Author(writer, chat, np.random.default_rng(seed))
    if done:
        author.remember(Conversations.load(done))
    started = time.monotonic()
    for number in range(len(done), 10**6):
        if tokens >= args.tokens / args.engines:
            break
        made = author.round(args.round)
        made.save(corpus / f"{args.engine}-{number:04d}.npz")
        tokens += int(made.length.sum())
        rate = (tokens - written_by) / (time.monotonic() - started)
        print(f"engine {args.engine}: {tokens} tokens, {rate:.0f} a second", flush=True)
    writer.close()


def trained(args: argparse.Namespace, corpus: Path) -> dict[str, Any]:
    """`config`, `weights` and `settings` of the draft in the work directory, distilled first if it is not there.

    ValueError: there is one, of other settings.
    """
    path = args.work / MODEL
    shape = Shape(**{name: getattr(args, name) for name in Shape.__dataclass_fields__})
    schedule = Schedule(steps=args.steps, batch_tokens=args.batch_tokens, rate=args.rate, seed=args.seed)
    settings = asdict(shape) | asdict(schedule)
    if path.is_file():
        kept: dict[str, Any] = torch.load(path, weights_only=True)
        if kept["settings"] != settings:
            raise ValueError(f"{path} was trained with {kept['settings']}, asked for is {settings}; remove one of them")
        return kept
    torch.manual_seed(args.seed)
    target = load(args.target, args.device)
    draft = draft_model(target, shape).to(args.device)
    conversations = Conversations.load(sorted(corpus.glob("*.npz")))
    names, counts = np.unique(conversations.domain, return_counts=True)
    shares = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
    print(f"{len(conversations.length)} conversations ({shares}), {len(conversations.tokens)} tokens")
    print(f"draft of {sum(p.numel() for p in draft.parameters()) / 1e6:.1f} M parameters", flush=True)
    every = max(args.steps // 40, 1)
    distil(target, draft, conversations, schedule, said=lambda line: print(line, flush=True), every=every)
    kept = {"config": draft.config.to_dict(), "weights": draft.cpu().state_dict(), "settings": settings}
    partial = args.work / f".{MODEL}.partial"
    torch.save(kept, partial)
    partial.replace(path)
    return kept


def load(directory: Path, device: str) -> Any:
    """A causal model in bfloat16 on `device`."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return model.to(device)


if __name__ == "__main__":
    raise SystemExit(main())
