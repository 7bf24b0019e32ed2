"""Record a tape: `python -m faser.tapes.recorder --target DIR --draft DIR --prompts FILE.jsonl --out FILE.npz`.

One decision: the target writes its greedy outputs once, in batches; what the draft would have proposed is computed
afterwards from the finished texts (`rollout`), so one recording serves every speculation policy. torch and transformers
are imported only once there is something to record.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from faser.core import MAX_DEPTH
from faser.tapes.prompts import read_prompts
from faser.tapes.tape import Tape, TapeError

DTYPES = ("float32", "bfloat16")


def generate(model: Any, prompts: list[list[int]], max_tokens: int, batch: int) -> list[list[int]]:
    """Greedy outputs of `prompts` (token ids), each up to and with its end token, or `max_tokens` long.

    Batches are left-padded and of similar prompt lengths.
    """
    import torch

    ends = model.generation_config.eos_token_id
    ends = set(ends) if isinstance(ends, list) else {ends}
    pad = min(ends)
    outputs: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    started, written = time.monotonic(), 0
    for at in range(0, len(order), batch):
        chosen = order[at : at + batch]
        width = max(len(prompts[i]) for i in chosen)
        ids = torch.tensor([[pad] * (width - len(prompts[i])) + prompts[i] for i in chosen])
        mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen])
        made = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=pad
        )
        for i, row in zip(chosen, made[:, width:].tolist(), strict=True):
            stop = next((t + 1 for t, token in enumerate(row) if token in ends), len(row))
            outputs[i] = row[:stop]
            written += stop
        rate = written / (time.monotonic() - started)
        print(f"target: {at + len(chosen)} of {len(prompts)} outputs, {rate:.0f} tokens/s", file=sys.stderr)
    return outputs


def record(
    target: Any, draft: Any, prompts: list[list[int]], domains: list[str], *, max_tokens: int, batch: int, source: str
) -> Tape:
    """The tape of two Hugging Face causal models with one vocabulary, over `prompts` (token ids) and their domains."""
    import torch

    from faser.tapes.rollout import rollout

    outputs = generate(target, prompts, max_tokens, batch)
    match, confidence = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        drafted, chance = rollout(draft, torch.tensor(prompt + output), len(prompt))
        match.append(drafted[:, 0].numpy() == np.array(output))
        confidence.append(np.rint(255.0 * chance.numpy()).astype(np.uint8))
    names = tuple(dict.fromkeys(domains))
    return Tape(
        domains=names,
        domain=np.array([names.index(d) for d in domains], np.uint8),
        prompt_tokens=np.array([len(p) for p in prompts], np.int32),
        output_tokens=np.array([len(o) for o in outputs], np.int32),
        max_tokens=np.full(len(prompts), max_tokens, np.int32),
        match=np.concatenate(match),
        confidence=np.concatenate(confidence),
        source=source,
    )


def report(tape: Tape) -> str:
    """A few lines on what was recorded."""
    lines = [f"{len(tape)} requests, {len(tape.match)} tokens; share of positions where the draft is right:"]
    lines += [f"  {name:<12} {rate:.3f}" for name, rate in tape.acceptance().items()]
    lines.append(f"  {'all':<12} {tape.match.mean():.3f}")
    lines.append(f"mean run of matches, cut at {MAX_DEPTH}: {np.minimum(tape.run_lengths, MAX_DEPTH).mean():.3f}")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m faser.tapes.recorder", description=__doc__)
    parser.add_argument("--target", required=True, type=Path, help="Hugging Face directory of the target")
    parser.add_argument("--draft", required=True, type=Path, help="Hugging Face directory of the draft")
    parser.add_argument("--prompts", required=True, type=Path, help='lines of {"domain": ..., "prompt": ...}')
    parser.add_argument("--out", required=True, type=Path, help="tape to write (.npz)")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest output (default 256)")
    parser.add_argument("--batch", type=int, default=16, help="prompts generated at once (default 16)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of both models (default float32)")
    args = parser.parse_args()
    for name in ("max_tokens", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed: 1 or more")
    for name, folder in (("target", args.target), ("draft", args.draft), ("out", args.out.parent)):
        if not folder.is_dir():
            parser.error(f"--{name}: {folder} is not a folder")
    try:
        tape = _record_files(args)
    except (TapeError, OSError) as error:
        sys.exit(f"error: {error}")
    tape.save(args.out)
    print(report(tape))


def _record_files(args: argparse.Namespace) -> Tape:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pairs = read_prompts(args.prompts)
    tokenizer: Any = AutoTokenizer.from_pretrained(args.target)
    chats = [[{"role": "user", "content": text}] for _, text in pairs]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    target, draft = (AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype) for path in (args.target, args.draft))
    if target.config.vocab_size != draft.config.vocab_size:
        raise TapeError(
            f"vocabularies differ: target {target.config.vocab_size}, draft {draft.config.vocab_size} tokens"
        )
    source = (
        f"{args.target.name} with draft {args.draft.name}, greedy, {args.dtype}, {args.prompts.name}, "
        f"at most {args.max_tokens} tokens"
    )
    domains = [domain for domain, _ in pairs]
    return record(target, draft, prompts, domains, max_tokens=args.max_tokens, batch=args.batch, source=source)


if __name__ == "__main__":
    main()
