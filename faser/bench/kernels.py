"""What the GPU kernels take, against plain torch and vLLM's own: `python -m faser.bench.kernels [--csv FILE]`.

Microseconds between CUDA events around a call, so the host's launches count where the GPU waits for them, as it does
when vLLM samples; the median of `--repeats` calls. The draft's part, `argmax` and `confidence` (which adds entropy and
margin), runs in CUDA graphs when serving, and does so here. `greedy` and `sampled` verify a greedy draft of K tokens
for each request, six in ten of them the target's most probable one. Logits are bfloat16.

`vllm` is its rejection sampler, from the same logits to the same tokens; `part` its `rejection_sample` alone, which
finds float32 logits and the bonus tokens made. Every kernel is first held against the reference: exit status 1 if it
is another.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from faser.bench.arguments import between, refuse_place
from faser.kernels import confidence, verify

BATCHES = (1, 4, 16, 64, 256)
LENGTHS = (1, 4, 7)
VOCABULARIES = (32000, 128256)
SPREAD = 6.0
"""Standard deviation of the logits: a few tokens have most of the probability."""


class WrongAnswerError(Exception):
    """A kernel's answer is not the reference's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Times in microseconds."""

    what: str
    vocabulary: int
    batch: int
    length: int | None = None
    ours: float
    torch: float
    vllm: float | None = None
    part: float | None = None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m faser.bench.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=between(1, 100_000), default=100, help="calls of each (default: %(default)s)")
    parser.add_argument("--csv", type=Path, help="write the table to this file, too")
    args = parser.parse_args(argv)
    if args.csv is not None:
        try:
            refuse_place("--csv", args.csv)
        except ValueError as error:
            print(f"python -m faser.bench.kernels: {error}", file=sys.stderr)
            return 2
    if not torch.cuda.is_available():
        print("python -m faser.bench.kernels: no CUDA GPU here, and it is GPU kernels that this times", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), f"median of {args.repeats}, us", sep=", ")
    names = [field.name for field in fields(Result)]
    print(*(f"{name:>10}" for name in names))
    results = []
    try:
        for result in measure(args.repeats):
            print(*(f"{_cell(getattr(result, name)):>10}" for name in names), flush=True)
            results.append(result)
    except WrongAnswerError as error:
        print(f"python -m faser.bench.kernels: {error}", file=sys.stderr)
        return 1
    if args.csv is not None:
        with args.csv.open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, names)
            table.writeheader()
            table.writerows(asdict(result) for result in results)
    return 0


def _cell(value: str | float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def measure(repeats: int) -> Iterator[Result]:
    for vocabulary in VOCABULARIES:
        for batch in BATCHES:
            yield from measure_confidence(vocabulary, batch, repeats)
    for vocabulary in VOCABULARIES:
        for batch in BATCHES:
            for length in LENGTHS:
                for temperature in (0.0, 1.0):
                    yield measure_verify(vocabulary, batch, length, temperature, repeats)


def measure_confidence(vocabulary: int, batch: int, repeats: int) -> Iterator[Result]:
    from faser.kernels.confidence import triton

    logits = random_logits(batch, vocabulary)
    made, expected = triton.confidence(logits), confidence.reference.confidence(logits)
    right = made.tokens.equal(expected.tokens) and triton.argmax_confidence(logits)[0].equal(expected.tokens)
    if not right or any((a - b).abs().max() > 1e-4 for a, b in zip(made[1:], expected[1:], strict=True)):
        raise WrongAnswerError(f"confidence of {batch} rows of {vocabulary} is not the reference's")

    def plain() -> tuple[torch.Tensor, ...]:
        p = torch.softmax(logits, dim=-1, dtype=torch.float32)
        return *p.topk(2), torch.special.entr(p).sum(dim=-1)

    for what, ours, theirs in (
        ("argmax", lambda: triton.argmax_confidence(logits), lambda: confidence.reference.argmax_confidence(logits)),
        ("confidence", lambda: triton.confidence(logits), plain),
    ):
        times = [microseconds(in_graph(call), repeats) for call in (ours, theirs)]
        yield Result(what=what, vocabulary=vocabulary, batch=batch, ours=times[0], torch=times[1])


def measure_verify(vocabulary: int, batch: int, length: int, temperature: float, repeats: int) -> Result:
    from faser.kernels.verify import triton
    from faser.serving.compat import verifiers

    what = "sampled" if temperature else "greedy"
    logits = random_logits(batch * (length + 1), vocabulary)
    best = logits.view(batch, length + 1, vocabulary)[:, :length].argmax(dim=-1).flatten()
    other = torch.rand(best.shape, device="cuda") < 0.4
    drafts = torch.where(other, torch.randint_like(best, vocabulary), best).int()
    ends = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda") * length
    heat = torch.full((batch,), temperature, device="cuda")
    arguments = (logits, drafts, ends, heat, torch.rand(len(logits), dtype=torch.float64, device="cuda"), length)
    vllms, part = verifiers(logits, drafts, [length] * batch, heat)
    expected = verify.reference.verify(*arguments).tokens
    differ = int((triton.verify(*arguments).tokens != expected).any(dim=1).sum())
    if differ > (1 + batch // 50 if temperature else 0):  # a sampled token may be its neighbour, by rounding
        raise WrongAnswerError(f"{what}: {differ} of {batch} are not the reference's; K {length}, V {vocabulary}")
    if not temperature and not vllms().equal(expected):
        raise WrongAnswerError(f"{what}: vLLM's tokens are others; B {batch}, K {length}, V {vocabulary}")
    calls = (lambda: triton.verify(*arguments), lambda: verify.reference.verify(*arguments), vllms, part)
    ours, theirs, *vllm = [microseconds(call, repeats) for call in calls]
    return Result(
        what=what,
        vocabulary=vocabulary,
        batch=batch,
        length=length,
        ours=ours,
        torch=theirs,
        vllm=vllm[0],
        part=vllm[1],
    )


def random_logits(rows: int, vocabulary: int) -> torch.Tensor:
    """[rows, vocabulary] bfloat16 on the GPU."""
    return (SPREAD * torch.randn(rows, vocabulary, device="cuda")).bfloat16()


def in_graph(call: Callable[[], Any]) -> Callable[[], None]:
    """The same as a CUDA graph."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def microseconds(call: Callable[[], Any], repeats: int) -> float:
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    event: Any = torch.cuda.Event  # untyped
    events = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return 1e3 * median(float(start.elapsed_time(end)) for start, end in events)


if __name__ == "__main__":
    raise SystemExit(main())
