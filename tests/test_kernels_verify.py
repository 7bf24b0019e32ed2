"""Drafts of any lengths are verified by the rule: known answers, distributions, and the kernel is the reference."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from faser.core import MAX_DEPTH
from faser.kernels.verify import Verified, verify
from faser.kernels.verify import triton as fast

Interpreted = Callable[..., Any]
NAN, INF = math.nan, math.inf

pytestmark = pytest.mark.usefixtures("one_thread")


class Case(NamedTuple):
    """Arguments of `verify`."""

    logits: torch.Tensor
    drafts: torch.Tensor
    ends: torch.Tensor
    temperature: torch.Tensor
    uniform: torch.Tensor
    longest: int
    draft_probs: torch.Tensor | None


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


def drafted_rows(counts: list[int]) -> torch.Tensor:
    """[N + B]: which rows of logits are for a drafted token."""
    return torch.cat([torch.arange(n + 1) < n for n in counts])


def random_case(counts: list[int], vocabulary: int, dtype: torch.dtype, one_hot: bool, seed: int) -> Case:
    """Every third request greedy; drafts that are often kept, and some that are padding."""
    generator = torch.Generator().manual_seed(seed)
    batch, rows = len(counts), sum(counts) + len(counts)
    logits = (6.0 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    temperature = torch.tensor([0.7, 0.0, 1.3]).repeat(batch)[:batch]
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    at = logits[drafted_rows(counts)].float()
    chance = torch.softmax(at + torch.randn(at.shape, generator=generator), dim=-1)
    drafts = at.argmax(dim=-1) if one_hot else torch.multinomial(chance, 1, generator=generator).squeeze(1)
    drafts[torch.rand(len(drafts), generator=generator) < 0.1] = -1
    case = Case(logits, drafts, ends_of(counts).long(), temperature, uniform.float(), MAX_DEPTH, chance)
    if seed % 2 == 0:  # other types that may come
        case = case._replace(drafts=drafts.int(), ends=ends_of(counts), uniform=uniform)
    return case._replace(draft_probs=None) if one_hot else case


def steady(case: Case, made: Verified) -> torch.Tensor:
    """[B]: requests for which slightly other random numbers make no difference, so that rounding may not either."""
    near = [verify(*case._replace(uniform=(case.uniform + off).clamp(0.0, 1.0 - 1e-7))) for off in (-1e-5, 1e-5)]
    return torch.stack([(other.tokens == made.tokens).all(dim=1) for other in near]).all(dim=0)


SHAPES = {
    1: [[0], [7], [3, 0, 1]],
    50: [[0], [5], [0, 0, 0], list(range(8)), [7, 1, 0, 4, 2] * 3],
    8193: [[2, 0, 7]],
    32000: [list(range(8))],
    49152: [[1, 0, 5]],
    128256: [[2], [0, 3, 1]],
}
"""Vocabulary: the lengths of drafts of each batch."""


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", SHAPES)
def test_the_kernel_is_the_reference(
    interpreted: Interpreted, vocabulary: int, dtype: torch.dtype, one_hot: bool
) -> None:
    certain = []
    for seed, counts in enumerate(SHAPES[vocabulary]):
        case = random_case(counts, vocabulary, dtype, one_hot, seed)
        made, expected = interpreted(fast.verify, *case), verify(*case)
        for a, b in zip(made, expected, strict=True):
            assert (a.dtype, a.shape) == (torch.int32, b.shape)
        same = steady(case, expected)
        for a, b in zip(made, expected, strict=True):
            assert a[same].equal(b[same])
        past = torch.arange(MAX_DEPTH + 1) > made.accepted[:, None]
        assert (made.tokens[past] == -1).all()
        assert ((made.tokens[~past] >= 0) & (made.tokens[~past] < vocabulary)).all()
        certain += same.tolist()
    assert sum(certain) >= 0.7 * len(certain)


EACH = pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])


def run(interpreted: Interpreted, kernel: bool, case: Case) -> Verified:
    made: Verified = interpreted(fast.verify, *case) if kernel else verify(*case)
    return made


def one_row(p: list[float], draft: list[int], u: float, q: list[float] | None = None, temperature: float = 1.0) -> Case:
    """A request whose rows, one for each drafted token and one more, have the distribution p and the number u."""
    rows = len(draft) + 1
    return Case(
        torch.tensor([p] * rows).log(),
        torch.tensor(draft, dtype=torch.int32),
        ends_of([len(draft)]),
        torch.tensor([temperature]),
        torch.full((rows,), u),
        MAX_DEPTH,
        None if q is None else torch.tensor([q] * len(draft)),
    )


@EACH
@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        (one_row([0.5, 0.3, 0.2], [], 0.6), [1]),
        (one_row([0.5, 0.3, 0.2], [], 0.0), [0]),
        (one_row([0.5, 0.3, 0.2], [1], 0.29), [1, 0]),  # kept with probability 0.3
        (one_row([0.5, 0.3, 0.2], [1], 0.31), [0]),  # otherwise 0 or 2, as 5 to 2
        (one_row([0.5, 0.3, 0.2], [1], 0.79), [0]),
        (one_row([0.5, 0.3, 0.2], [1], 0.81), [2]),
        (one_row([0.5, 0.0, 0.5], [1], 0.0), [0]),  # what cannot be is never kept
        (one_row([0.0, 1.0, 0.0], [1] * 7, 0.999999), [1] * 8),
        (one_row([0.25, 0.0625, 0.6875], [0, 0], 0.24, temperature=0.5), [2]),  # p squared: 0.116 to 0.876
        (one_row([0.25, 0.0625, 0.6875], [0, 2], 0.11, temperature=0.5), [0, 2, 0]),
        (one_row([0.5, 0.3, 0.2], [0, 0, 1], 0.9, temperature=0.0), [0, 0, 0]),
        (one_row([0.5, 0.3, 0.2], [-1, 0], 0.6), [1]),  # padding: drawn from all of p
        (one_row([0.5, 0.3, 0.2], [-1, 0], 0.6, q=[1.0, 0.0, 0.0]), [1]),
        (one_row([0.5, 0.3, 0.2], [3, 0], 0.6), [1]),
        (one_row([0.5, 0.3, 0.2], [0, -1, 0], 0.1, temperature=0.0), [0, 0]),
        (one_row([0.2, 0.3, 0.5], [0], 0.24, q=[0.8, 0.1, 0.1]), [0, 1]),  # kept with probability 0.2 / 0.8
        (one_row([0.2, 0.3, 0.5], [0], 0.26, q=[0.8, 0.1, 0.1]), [1]),  # otherwise 1 or 2, as 2 to 4
        (one_row([0.2, 0.3, 0.5], [0], 0.51, q=[0.8, 0.1, 0.1]), [2]),
        (one_row([0.2, 0.3, 0.5], [2, 1], 0.999999, q=[0.2, 0.3, 0.5]), [2, 1, 2]),
        (one_row([0.2, 0.3, 0.5], [0], 0.9, q=[0.0, 0.6, 0.4]), [2]),  # was never drawn from this q
    ],
)
def test_known_answers(interpreted: Interpreted, kernel: bool, case: Case, tokens: list[int]) -> None:
    made = run(interpreted, kernel, case)
    assert made.tokens.tolist() == [tokens + [-1] * (MAX_DEPTH + 1 - len(tokens))]
    assert made.accepted.tolist() == [len(tokens) - 1]
    assert made.bonus.tolist() == tokens[-1:]


@EACH
def test_rows_without_a_softmax_give_what_argmax_gives(interpreted: Interpreted, kernel: bool) -> None:
    logits = torch.randn(6, 9000, generator=torch.Generator().manual_seed(0))  # two tiles
    logits[0, 8500] = logits[0, 70] = NAN
    logits[1, 8500], logits[1, 70] = NAN, INF
    logits[2, 8500] = logits[2, 8600] = INF
    logits[3] = -INF
    logits[4, 70] = logits[4, 8500] = 9.0
    logits[5, :8990], logits[5, 8995] = -INF, 9.0
    first = [70, 8500, 8500, 0, 70, 8995]
    assert logits.argmax(dim=-1).tolist() == first
    counts, numbers = ends_of([5]), torch.full((6,), NAN)
    greedy = Case(logits, torch.tensor(first[:5]).int(), counts, torch.zeros(1), numbers, 5, None)
    assert run(interpreted, kernel, greedy).tokens.tolist() == [first]
    assert run(interpreted, kernel, greedy._replace(logits=logits.bfloat16())).tokens.tolist() == [first]
    for draft_probs in (None, torch.full((4, 9000), 1 / 9000)):
        odd = logits[:4].repeat_interleave(2, dim=0)  # a drafted token each, and none kept
        drafts, ends = torch.full((4,), 5).int(), ends_of([1] * 4)
        sampled = run(interpreted, kernel, Case(odd, drafts, ends, torch.ones(4), torch.rand(8), 1, draft_probs))
        assert sampled.tokens.tolist() == [[token, -1] for token in first[:4]]


@EACH
def test_a_vocabulary_that_was_cut_is_never_left(interpreted: Interpreted, kernel: bool) -> None:
    """u just below 1 leaves the draw nothing but rounding: the last token that can be is taken, not one past it."""
    logits = torch.full((40, 9000), -INF)
    logits[:, 100:8900] = torch.randn(40, 8800, generator=torch.Generator().manual_seed(0))
    uniform = torch.full((40,), 1.0 - 2.0**-53, dtype=torch.float64)
    drafts = torch.full((20,), 8899, dtype=torch.int32)
    for draft_probs in (None, torch.full((20, 9000), 1 / 9000)):
        case = Case(logits, drafts, ends_of([1] * 20), torch.ones(20), uniform, 1, draft_probs)
        made = run(interpreted, kernel, case)
        assert (made.tokens[:, 0] > 8000).all()
        assert (made.tokens < 8900).all()


@EACH
def test_rows_may_be_part_of_longer_ones(interpreted: Interpreted, kernel: bool) -> None:
    case = random_case([3, 0, 7], 600, torch.bfloat16, True, 0)
    padded = torch.full((len(case.logits), 640), 99.0, dtype=torch.bfloat16)
    padded[:, :600] = case.logits
    made = run(interpreted, kernel, case._replace(logits=padded[:, :600]))
    assert made.tokens.equal(run(interpreted, kernel, case).tokens)


def p_value(seen: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's chi-square, of counts [outcomes] that should be of the distribution p [outcomes]."""
    expected = p.double() * seen.sum()
    if seen[expected == 0.0].any():
        return 0.0
    seen, expected = seen[expected > 0.0], expected[expected > 0.0]
    statistic = ((seen - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(seen) - 1) / 2, dtype=torch.float64), statistic / 2))


P = torch.tensor([[0.35, 0.25, 0.2, 0.2, 0.0], [0.1, 0.1, 0.2, 0.3, 0.3]])  # of the token, and of the one after it
Q = torch.tensor([0.1, 0.3, 0.25, 0.25, 0.1])  # of the draft


def sampled(samples: int, kind: str, seed: int = 0) -> tuple[Case, torch.Tensor]:
    """Requests alike, and the distribution [5, 5 + 1] of the first token and the one after it, 5 for none.

    kind: a greedy draft of token 1, one drawn from Q, or padding beside a Q that says nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    q, drafts = torch.nn.functional.one_hot(torch.tensor(1), 5).float(), torch.ones(samples)
    if kind == "drawn":
        q, drafts = Q, torch.multinomial(Q, samples, replacement=True, generator=generator)
    elif kind == "padding":
        q, drafts = torch.zeros(5), torch.full((samples,), -1)
    case = Case(
        P.log().repeat(samples, 1),
        drafts.int(),
        ends_of([1] * samples),
        torch.ones(samples),
        torch.rand(2 * samples, generator=generator, dtype=torch.float64),
        1,
        None if kind == "greedy" else Q.repeat(samples, 1),
    )
    kept = torch.minimum(P[0], q)
    return case, torch.cat([kept[:, None] * P[1], (P[0] - kept)[:, None]], dim=1)


def counts(made: Verified) -> torch.Tensor:
    """Outcomes as in `sampled`, counted: [30]."""
    first, second = made.tokens.long().T
    return torch.bincount(first * 6 + torch.where(second < 0, 5, second), minlength=30)


KINDS = pytest.mark.parametrize("kind", ["greedy", "drawn", "padding"])


@KINDS
def test_sampled_tokens_have_the_targets_distribution(kind: str) -> None:
    case, distribution = sampled(400_000, kind)
    seen = counts(verify(*case))
    assert p_value(seen, distribution.flatten()) > 0.001
    assert p_value(seen.view(5, 6).sum(dim=1), P[0]) > 0.001


@KINDS
def test_tokens_that_the_kernel_samples_have_the_targets_distribution(interpreted: Interpreted, kind: str) -> None:
    case, distribution = sampled(200, kind)  # a row takes 10 ms
    made, expected = interpreted(fast.verify, *case), verify(*case)
    assert p_value(counts(made), distribution.flatten()) > 0.001
    assert p_value(counts(made).view(5, 6).sum(dim=1), P[0]) > 0.001
    same = steady(case, expected)
    assert made.tokens[same].equal(expected.tokens[same])


def test_a_rule_that_leans_to_the_draft_is_caught() -> None:
    case, distribution = sampled(400_000, "greedy")
    case.uniform[::2] *= 0.98  # numbers of drafted rows, a little low
    assert p_value(counts(verify(*case)), distribution.flatten()) < 1e-6
    case, distribution = sampled(400_000, "padding")
    case.drafts.fill_(1)  # vLLM's own would draw from max(p - q, 0) here
    assert p_value(counts(verify(*case)), distribution.flatten()) < 1e-6
