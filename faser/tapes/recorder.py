"""Record a tape: `faser record --target DIR --draft DIR --prompts FILE --out FILE.tape`.

One decision: the target writes its outputs once, in batches; what the draft would have proposed, and what the target's
early layers think of it, is computed afterwards from the finished texts. So one recording serves every speculation
policy. torch and transformers are imported only once there is something to record.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from faser.models.fingerprint import function
from faser.models.pair import ModelError
from faser.tapes.mapped import check_writable
from faser.tapes.prompts import Prompt, read_prompts
from faser.tapes.tape import PACKED, PLAIN, Tape, TapeError

if TYPE_CHECKING:
    import torch

    from faser.tapes.from_log import Logged
    from faser.tapes.generation import Request

DTYPES = ("float32", "bfloat16")
BATCH = {"cpu": 16, "cuda": 256}
"""Prompts generated at once, where the user does not say."""
MOST_TOKENS, SEEDS, LEAST_HEAT = 1 << 20, 1 << 31, 0.01


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = _Parser(prog="faser record", description="Record acceptances of a draft on a target's outputs.")
    add = parser.add_argument
    named = "Hugging Face directory, or a name of `faser models list` for its"
    add("--target", required=True, type=Path, metavar="DIR", help=f"{named} target")
    add("--draft", required=True, type=Path, metavar="DIR", help=f"{named} draft")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, metavar="FILE", help='lines of {"domain": ..., "prompt": ...}')
    source.add_argument(
        "--from-log",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="what a server of these models was asked and answered: its --faser-log, kept with --faser-log-prompts "
        "(FILE.1 and so on are read with FILE; with several engines, name FILE.dp1 and so on too)",
    )
    add("--out", required=True, type=Path, metavar="FILE", help=f"tape to write: NAME{PLAIN} or NAME{PACKED}")
    add("--temperature", nargs="+", type=float, metavar="T", help="each prompt once at each (default 0)")
    add(
        "--max-tokens",
        nargs=2,
        type=int,
        metavar=("LOW", "HIGH"),
        help="longest output, drawn for each request whose prompt does not say (default 64 384)",
    )
    add("--layers", nargs="+", type=int, metavar="L", help="layers of the pruning signal (default 1/3, 1/2, 2/3)")
    add("--device", default="cpu", help="cpu (default), cuda or cuda:N")
    add("--dtype", choices=DTYPES, default="float32", help="of both models (default float32, the exact one)")
    add("--batch", type=int, help=f"prompts generated at once (default {BATCH['cpu']}, on cuda {BATCH['cuda']})")
    add("--seed", type=int, default=0, help="of sampling and of the limits drawn (default 0)")
    return parser


def main(argv: list[str]) -> int:
    """The command; returns the exit status, 2 for a user's mistake."""
    args = build_parser().parse_args(argv)
    try:
        _check(args)
        tape = _record(args)
        tape.save(args.out)
    except (TapeError, ModelError) as error:
        print(f"faser record: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"faser record: {error.strerror or error}: {error.filename or args.out}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("faser record: interrupted, nothing was written", file=sys.stderr)
        return 130
    from faser.tapes.recording import report  # there by now

    print(report(tape))
    return 0


def _check(args: argparse.Namespace) -> None:
    """TapeError for what can be known before a model is loaded. ModelError: a named one cannot be made."""
    from faser.models import directory_of  # here, since faser.models looks tapes up by name

    args.target, args.draft = directory_of("target", args.target), directory_of("draft", args.draft)
    if args.from_log is not None and (args.temperature or args.max_tokens):
        raise TapeError("--from-log has its own temperatures and limits: leave out --temperature and --max-tokens")
    args.temperature, args.max_tokens = args.temperature or [0.0], args.max_tokens or [64, 384]
    low, high = args.max_tokens
    if not 1 <= low <= high <= MOST_TOKENS:
        raise TapeError(f"--max-tokens is {low} {high}; allowed: LOW from 1 on, HIGH from LOW to {MOST_TOKENS}")
    if not 0 <= args.seed < SEEDS:
        raise TapeError(f"--seed is {args.seed}; allowed: 0 to {SEEDS - 1}")
    if args.batch is not None and args.batch < 1:
        raise TapeError(f"--batch is {args.batch}; allowed: 1 or more")
    for temperature in args.temperature:
        if temperature and not LEAST_HEAT <= temperature <= 2.0:
            raise TapeError(f"--temperature is {temperature:g}; allowed: 0, and {LEAST_HEAT:g} to 2")
    if len(set(args.temperature)) < len(args.temperature):
        raise TapeError("--temperature names the same one twice")
    if not args.out.parent.is_dir():
        raise TapeError(f"--out is {args.out}; there is no folder {args.out.parent}")
    if not args.out.name.endswith((PLAIN, PACKED)):
        raise TapeError(f"--out is {args.out}; allowed: NAME{PLAIN} or NAME{PACKED}")
    try:
        check_writable(args.out)
    except OSError as error:
        raise TapeError(f"--out is {args.out}: {error.strerror}") from None
    sizes = [_size(name, getattr(args, name), "vocab_size") for name in ("target", "draft")]
    if sizes[0] != sizes[1]:
        raise TapeError(f"vocabularies differ: --target has {sizes[0]} tokens, --draft has {sizes[1]}")
    args.layers = _layers(args.layers, _size("target", args.target, "num_hidden_layers"))


def _size(name: str, directory: Path, key: str) -> int:
    """A number in the configuration of a model directory. TapeError: it is none."""
    try:
        return int(json.loads((directory / "config.json").read_text("utf-8"))[key])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise TapeError(f"--{name} is {directory}; that is no model directory: no config.json with a {key}") from None


def _record(args: argparse.Namespace) -> Tape:
    """Load the models, record, and say whose tape it is."""
    import torch

    from faser.tapes.from_log import check_target
    from faser.tapes.recording import record

    marks = function(args.target), function(args.draft)
    prompts = read_prompts(args.prompts) if args.prompts else []
    logged = _logged(args) if args.from_log else None
    device = _device(args.device)
    tokenizer = _tokenizer(args.target, args.draft)
    if logged is None:
        longest = _size("target", args.target, "max_position_embeddings")
        requests, outputs = _requests(prompts, tokenizer, args, longest), None
    else:
        requests, outputs = logged.requests, logged.outputs
    target, draft = (_model(name, getattr(args, name), args.dtype, device) for name in ("target", "draft"))
    if logged is not None:
        check_target(target, logged)
    batch = args.batch or BATCH[device.type]
    how = {"batch": batch, "seed": args.seed, "source": _source(args, device.type)}
    try:
        tape = record(target, draft, requests, layers=args.layers, outputs=outputs, **how)
    except torch.OutOfMemoryError:
        raise TapeError(f"--batch is {batch}: more than the memory of {device} holds; a smaller one may do") from None
    return replace(tape, target=marks[0], draft=marks[1])


def _logged(args: argparse.Namespace) -> Logged:
    from faser.tapes.from_log import read_log

    longest = _size("target", args.target, "max_position_embeddings")
    logged = read_log(args.from_log, vocabulary=_size("target", args.target, "vocab_size"), longest=longest)
    print(f"faser record: {logged}", file=sys.stderr)
    return logged


def _source(args: argparse.Namespace, device: str) -> str:
    """How the tape is made, for people."""
    models, where = f"{args.target.name} with draft {args.draft.name}", f"{args.dtype} on {device}"
    if args.from_log:
        return f"{models}, as a server was asked and answered: {', '.join(p.name for p in args.from_log)}, {where}"
    (low, high), how = args.max_tokens, " and ".join(f"{t:g}" for t in args.temperature)
    return f"{models}, {args.prompts.name}, temperature {how}, {where}, limits {low} to {high} tokens, seed {args.seed}"


def _device(name: str) -> torch.device:
    import torch

    allowed = [*BATCH][: 1 + torch.cuda.is_available()]
    try:
        device = torch.device(name)
        if device.type not in allowed or (device.index or 0) >= max(torch.cuda.device_count(), 1):
            raise RuntimeError
    except RuntimeError:
        raise TapeError(f"--device is {name!r}; allowed here: {', '.join(allowed)}") from None
    torch.set_float32_matmul_precision("highest")  # no TF32: float32 is promised to be exact
    torch.backends.cudnn.allow_tf32 = False
    return device


def _tokenizer(target: Path, draft: Path) -> Any:
    """The target's tokenizer. TapeError: the draft numbers tokens differently, if it says how it does."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(target)
        if (draft / "tokenizer.json").is_file():
            other: Any = AutoTokenizer.from_pretrained(draft)
            if other.get_vocab() != tokenizer.get_vocab():
                raise TapeError(
                    f"vocabularies differ: the tokenizers of {target} and {draft} number tokens differently"
                )
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, TapeError):
            raise
        raise TapeError(f"a tokenizer cannot be loaded: {_line(error)}") from None
    return tokenizer


def _model(name: str, directory: Path, dtype: str, device: torch.device) -> Any:
    """A Llama-like causal model whose logits are its output head over its last hidden states. TapeError: not so."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
        model, info = loaded
        model.to(device)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise TapeError(f"--{name} {directory} cannot be loaded: {_line(error)}") from None
    if missing := sorted(info["missing_keys"]):
        raise TapeError(f"--{name} {directory} lacks {len(missing)} weights, such as {missing[0]}")
    base, kind = model.base_model, type(model).__name__
    ids = torch.arange(8, device=device)[None]
    with torch.inference_mode():
        logits = model(input_ids=ids).logits
        plain = model.get_output_embeddings()(base(input_ids=ids).last_hidden_state)
    if not (hasattr(base, "layers") and hasattr(base, "norm") and torch.allclose(logits, plain, rtol=0.01, atol=0.01)):
        raise TapeError(f"--{name} {directory} is a {kind}; allowed: models laid out as Llama is")
    return model


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _requests(prompts: Sequence[Prompt], tokenizer: Any, args: argparse.Namespace, longest: int) -> list[Request]:
    """Each prompt at each temperature, temperature after temperature: `Tape.split` relies on that order."""
    from faser.tapes.generation import Request

    if tokenizer.chat_template is None:
        ids = tokenizer([p.text for p in prompts])["input_ids"]
    else:
        chats = [[{"role": "user", "content": p.text}] for p in prompts]
        ids = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    low, high = args.max_tokens
    drawn = np.random.default_rng(args.seed).integers(low, high + 1, (len(args.temperature), len(prompts))).tolist()
    requests = []
    for temperature, limits in zip(args.temperature, drawn, strict=True):
        for prompt, tokens, limit in zip(prompts, ids, limits, strict=True):
            limit = prompt.max_tokens or limit
            if len(tokens) + limit > longest:
                raise TapeError(
                    f"prompt {prompt.text[:40]!r} of {len(tokens)} tokens and its {limit} of output exceed the "
                    f"{longest} that the target can read"
                )
            requests.append(Request(prompt.domain, tokens, temperature, limit))
    return requests


def _layers(asked: list[int] | None, depth: int) -> tuple[int, ...]:
    from faser.tapes.early_exit import default_layers

    layers = default_layers(depth) if asked is None else tuple(sorted(set(asked)))
    if not all(1 <= layer < depth for layer in layers):
        raise TapeError(f"--layers is {' '.join(map(str, layers))}; allowed: 1 to {depth - 1}")
    return layers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
