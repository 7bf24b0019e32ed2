"""`python train/draft.py --target DIR --out DIR`: give a target a draft, from nothing but its own weights.

Three phases, each leaving its result in the work directory, so that a stopped run goes on where it was: the target
writes conversations (`corpus`, through vLLM), a small Llama is distilled from them (`distil`), and its acceptance is
measured on prompts that it never saw, after quantising it to int8 rows as it is shipped.
"""

from __future__ import annotations

import argparse
import fcntl
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from faser.models import ModelError, directory_of, known_models
from faser.models.checkpoint import check_weights
from faser.models.fingerprint import function
from faser.tapes import TapeError
from faser.tapes.prompts import PROMPTS, read_prompts
from faser.train.arguments import positive
from faser.train.corpus import LONGEST, Author, ChatFormat, Conversations
from faser.train.distil import Schedule, Shape, distil, draft_model
from faser.train.draft_export import CARD, EXPANDED, acceptance_table, evaluate, export, heading, place, write_card

ROUND = 6144
"""Conversations of one engine's round; a round is what a stopped run can lose."""
MODEL = "model.pt"
NOTE = "target.txt"
"""In the work directory: the fingerprint of the target whose work it is. Locked while somebody works there."""
PHASES = ("generate", "distil", "evaluate")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    shape, schedule = Shape(), Schedule()
    p = argparse.ArgumentParser(prog="train/draft.py", description=__doc__)
    p.add_argument("--target", type=Path, required=True, help="Hugging Face directory of a Llama, or a name")
    p.add_argument("--out", type=Path, required=True, help="directory of the draft; as int8: its `int8`")
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
    args.work = args.work or Path(f"{os.path.abspath(args.out)}.work")  # noqa: PTH100  # absolute() leaves `..`
    try:
        args.named, args.target = args.target.absolute().name, directory_of("target", args.target)
        if args.engine is not None:  # of a command that was checked
            write(args, args.work / "corpus")
            return 0
        mark = _check(args)
        with _working(args.work, mark) as lock:
            return _make(args, argv, lock)
    except KeyboardInterrupt:
        if args.engine is None:
            print("stopped; the same command goes on from the last finished round or phase", file=sys.stderr)
        return 130
    except (ModelError, TapeError, ValueError, OSError) as error:
        print(f"error: {(str(error).splitlines() or [type(error).__name__])[0]}", file=sys.stderr)
        return 2


def _make(args: argparse.Namespace, argv: list[str], lock: int) -> int:
    """The phases, in a work directory that is nobody else's. lock: file descriptor that holds it."""
    corpus, made = args.work / "corpus", args.work / "draft"
    corpus.mkdir(exist_ok=True)
    if written(corpus) < args.tokens and (failed := _run_engines(argv, args.engines, lock)):
        print(f"error: {failed} of {args.engines} engines failed; what they wrote is kept", file=sys.stderr)
        return 1
    if args.phase == "generate":
        return 0
    kept = trained(args, corpus)
    if args.phase == "distil":
        return 0
    export(kept, made)
    tape = evaluate(args.target, made, args.prompts, device=args.device, work=args.work)
    table = acceptance_table(tape)
    command = shlex.join(["python", "train/draft.py", *argv])
    write_card(made, target=args.named, command=command, table=table)
    place(made, args.work / EXPANDED, args.target, args.out)
    print(table)
    print(f"\nfaser serve {shlex.quote(str(args.target))} --spec-model {shlex.quote(str(args.out))}")
    return 0


def _check(args: argparse.Namespace) -> str:
    """The target's fingerprint. ModelError, TapeError, ValueError or OSError for what can be known before a phase."""
    if not (args.target / "config.json").is_file():
        names = ", ".join(known_models())
        raise ModelError(f"--target is {args.target}; allowed: a directory with a config.json, or {names}")
    check_weights(args.target)
    if not args.prompts.is_file():
        raise ValueError(f"--prompts is {args.prompts}; there is no such file")
    read_prompts(args.prompts)
    if not (math.isfinite(args.rate) and args.rate > 0):
        raise ValueError(f"--rate is {args.rate}; allowed: a finite number above 0")
    if not 0 <= args.seed < 2**31:
        raise ValueError(f"--seed is {args.seed}; allowed: 0 to {2**31 - 1}")
    _check_device(args.device)
    for name, of in (("heads", "hidden"), ("kv_heads", "heads")):
        if getattr(args, of) % getattr(args, name):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is {getattr(args, name)}; allowed: a divisor of --{of}, {getattr(args, of)}")
    if (size := args.hidden // args.heads) % 2:
        raise ValueError(f"--hidden over --heads, the size of a head, is {size}; allowed: an even number")
    mark = function(args.target)
    for name in ("out", "work"):
        _check_folder(name, getattr(args, name))
    _check_out(args.out, args)
    _check_work(args.work, mark)
    return mark


def _check_device(name: str) -> None:
    """ValueError: not a device of this machine."""
    counts = {"cpu": 1, "cuda": torch.cuda.device_count()}
    try:
        device = torch.device(name)
        if (device.index or 0) < counts.get(device.type, 0):
            return
    except RuntimeError:
        pass
    allowed = ", ".join(kind for kind, count in counts.items() if count)
    raise ValueError(f"--device is {name!r}; allowed here: {allowed}")


def _check_folder(name: str, path: Path) -> None:
    """ValueError: it is no directory, and none can be made."""
    there = next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        raise ValueError(f"--{name} is {path}; {there} is no directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--{name} is {path}; {there} cannot be written to")


def _check_out(out: Path, args: argparse.Namespace) -> None:
    """ValueError: what is there is not a draft of this target that this command made."""
    for name in ("target", "work"):
        if out.resolve() == getattr(args, name).resolve():
            raise ValueError(f"--out is {out}, as --{name} is; name a directory that is empty or does not exist")
    if not out.exists() or all(path.resolve() == args.work.resolve() for path in out.iterdir()):
        return
    card = out / CARD
    if not card.is_file() or not card.read_bytes().startswith(heading(args.named).encode()):
        raise ValueError(
            f"--out is {out}, which holds something else than a draft of {args.named}; "
            "name a directory that is empty or does not exist"
        )


def _check_work(work: Path, mark: str) -> None:
    """ValueError: it is not the work on the target of fingerprint `mark`."""
    if not work.exists():
        return
    note = work / NOTE
    said = note.read_bytes().decode("utf-8", "replace").strip() if note.is_file() else ""
    if said == mark or (not said and all(path == note for path in work.iterdir())):
        return
    if said:
        raise ValueError(
            f"--work is {work}, which is of target {said[:16]}; --target is {mark}; name another directory"
        )
    raise ValueError(
        f"--work is {work}, which does not say whose it is; name another directory, or, if it is this target's work, "
        f"write {mark} to {note}"
    )


@contextmanager
def _working(work: Path, mark: str) -> Iterator[int]:
    """Be the only one in the work directory, and note whose it is. ValueError: somebody else is there."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / NOTE).open("a+") as note:
        try:
            fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"--work is {work}; another run, or an engine of one, is at work there") from None
        if not note.tell():
            print(mark, file=note, flush=True)
        yield note.fileno()


def written(corpus: Path) -> int:
    """Tokens of the finished rounds."""
    return sum(int(Conversations.load([path]).length.sum()) for path in sorted(corpus.glob("*.npz")))


def _run_engines(argv: list[str], count: int, lock: int) -> int:
    """`write` in `count` processes, an engine each, shared out over the GPUs; returns how many failed.

    They hold the lock too, in case this process is killed, and end when it is interrupted: each is a process group, so
    that Ctrl-C reaches this process alone, and vLLM's own processes are told by their engine.
    """
    command = [sys.executable, __file__, *argv]
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpus = seen.split(",")
    engines: list[subprocess.Popen[bytes]] = []
    try:
        for i in range(count):
            env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]}
            own = [*command, "--engine", str(i)]
            engines.append(subprocess.Popen(own, env=env, pass_fds=[lock], process_group=0))
        return sum(engine.wait() != 0 for engine in engines)
    finally:
        for engine in engines:
            engine.terminate()
        for engine in engines:
            try:
                engine.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(engine.pid, signal.SIGKILL)
                engine.wait()


def write(args: argparse.Namespace, corpus: Path) -> None:
    """Rounds of conversations by one engine, until its share of the tokens is there."""
    from transformers import AutoTokenizer, GenerationConfig

    from faser.serving.writer import Writer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    ends = GenerationConfig.from_pretrained(args.target).eos_token_id
    chat = ChatFormat.of(tokenizer, ends if isinstance(ends, list) else [ends])
    done = sorted(corpus.glob(f"{args.engine}-[0-9][0-9][0-9][0-9].npz"))
    earlier = Conversations.load(done) if done else None
    tokens = written_by = int(earlier.length.sum()) if earlier else 0
    first = int(done[-1].stem[-4:]) + 1 if done else 0  # not how many there are: one may have been removed
    seed = args.seed + 1000 * args.engine + first
    writer = Writer(args.target, seed=seed, length=LONGEST, sequences=min(args.round, 1024))
    try:
        author = Author(writer, chat, np.random.default_rng(seed))
        if earlier:
            author.remember(earlier)
        started = time.monotonic()
        for number in range(first, 10**4):
            if tokens >= args.tokens / args.engines:
                break
            made = author.round(args.round)
            made.save(corpus / f"{args.engine}-{number:04d}.npz")
            tokens += int(made.length.sum())
            rate = (tokens - written_by) / (time.monotonic() - started)
            print(f"engine {args.engine}: {tokens} tokens, {rate:.0f} a second", flush=True)
    finally:
        writer.close()


def trained(args: argparse.Namespace, corpus: Path) -> dict[str, Any]:
    """`config`, `weights` and `settings` of the draft in the work directory, distilled first if it is not there.

    ValueError: there is one of other settings, or something else; or the draft is too large to be made.
    """
    path = args.work / MODEL
    shape = Shape(**{name: getattr(args, name) for name in Shape.__dataclass_fields__})
    schedule = Schedule(steps=args.steps, batch_tokens=args.batch_tokens, rate=args.rate, seed=args.seed)
    settings = asdict(shape) | asdict(schedule)
    if path.is_file():
        kept = _kept(path)
        if kept["settings"] != settings:
            raise ValueError(f"{path} was trained with {kept['settings']}, asked for is {settings}; remove one of them")
        return kept
    torch.manual_seed(args.seed)
    target = load(args.target, args.device)
    try:
        draft = draft_model(target, shape).to(args.device)
    except (RuntimeError, MemoryError) as error:
        why = (str(error).splitlines() or ["out of memory"])[0]
        raise ValueError(f"a draft of {shape} cannot be made: {why}") from None
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


def _kept(path: Path) -> dict[str, Any]:
    """What `trained` saved. ValueError: something else."""
    try:
        kept: Any = torch.load(path, weights_only=True)
        if isinstance(kept, dict) and all(isinstance(kept.get(key), dict) for key in ("config", "weights", "settings")):
            return kept
    except OSError:
        raise
    except Exception:  # what unpickling arbitrary bytes raises is anybody's guess
        pass
    raise ValueError(f"{path} is no draft in training; remove it to make it anew")


def load(directory: Path, device: str) -> Any:
    """A causal model in bfloat16 on `device`."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    return model.to(device)


if __name__ == "__main__":
    for ending in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C, but for what nohup ignores
        if signal.getsignal(ending) is signal.SIG_DFL:
            signal.signal(ending, signal.default_int_handler)
    raise SystemExit(main())
