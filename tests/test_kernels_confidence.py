"""The reference of tokens, probabilities, entropies and margins is right, and the kernel is the reference."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from faser.kernels.confidence import Confidence, argmax_confidence, confidence
from faser.kernels.confidence import triton as fast

Interpreted = Callable[..., Any]
NAN, INF = math.nan, math.inf
LEAST = torch.finfo(torch.float32).min

pytestmark = pytest.mark.usefixtures("one_thread")


def same(made: Confidence, expected: Confidence) -> None:
    assert made.tokens.dtype == torch.int64
    assert made.tokens.equal(expected.tokens)
    for a, b in zip(made[1:], expected[1:], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_known_distributions() -> None:
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.25, 0.25, 0.25, 0.25], [0.0, 0.0, 1.0, 0.0]])
    made = confidence(p.log())
    assert made.tokens.tolist() == [0, 0, 2]
    assert made.probability.tolist() == pytest.approx([0.5, 0.25, 1.0])
    assert made.entropy.tolist() == pytest.approx([1.75 * math.log(2), math.log(4), 0.0])
    assert made.margin.tolist() == pytest.approx([0.25, 0.0, 1.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("batch", "vocabulary"), [(1, 1), (3, 1), (7, 5), (5, 8192), (3, 32000), (2, 49152), (1, 128256)]
)
def test_the_kernel_is_the_reference(interpreted: Interpreted, batch: int, vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(batch * vocabulary)
    spread = torch.tensor([0.0, 1.0, 4.0, 20.0, 1000.0, 4.0, 4.0])[:batch, None]
    logits = (torch.randn(batch, vocabulary, generator=generator) * spread + 30.0).to(dtype)  # bfloat16 has many ties
    made = interpreted(fast.confidence, logits)
    same(made, confidence(logits))
    for tokens, probability in (interpreted(fast.argmax_confidence, logits), argmax_confidence(logits)):
        assert tokens.equal(made.tokens)
        torch.testing.assert_close(probability, made.probability, atol=1e-5, rtol=1e-5)


def test_ties_nan_and_infinities_are_as_in_torch(interpreted: Interpreted) -> None:
    odd = torch.randn(12, 20000, generator=torch.Generator().manual_seed(0))  # three tiles
    odd[0, 9000] = odd[0, 300] = odd[0, 19000] = NAN
    odd[1, 100], odd[1, 12000] = INF, NAN
    odd[2, 5:9] = -NAN
    odd[3, 17000] = odd[3, 9000] = INF
    odd[4] = -INF
    odd[5, :19000] = -INF  # as a cut vocabulary
    odd[6], odd[6, 10000] = -INF, LEAST
    odd[7] = LEAST
    odd[8], odd[8, 3] = -0.0, 0.0
    odd[9, 8000] = odd[9, 9000] = 9.0
    odd[10, 7] = odd[10, 8] = 9.0
    odd[11] = torch.arange(20000) * 0.01
    same(interpreted(fast.confidence, odd), confidence(odd))
    same(interpreted(fast.confidence, odd.bfloat16()), confidence(odd.bfloat16()))
    assert interpreted(fast.argmax_confidence, odd)[0].tolist() == odd.argmax(dim=-1).tolist()
    assert confidence(odd).margin[7:11].tolist() == [0.0] * 4


def test_rows_may_be_part_of_longer_ones(interpreted: Interpreted) -> None:
    padded = torch.randn(4, 640, generator=torch.Generator().manual_seed(0))
    padded[:, 600:] = 99.0
    same(interpreted(fast.confidence, padded[:, :600]), confidence(padded[:, :600]))
