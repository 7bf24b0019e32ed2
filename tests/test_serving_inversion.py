"""Drawing by inversion gives each token its share, and no other."""

import pytest
import torch

from faser.serving.inversion import draw, recovered_tokens

EVEN = 100_000


def shares(weights: torch.Tensor) -> torch.Tensor:
    """[V] how often each is drawn from `weights` [V], by numbers evenly over [0, 1)."""
    uniform = (torch.arange(EVEN, dtype=torch.float64) + 0.5) / EVEN
    drawn = torch.cat([draw(weights.expand(len(part), -1), part) for part in uniform.split(2000)])
    return drawn.bincount(minlength=len(weights)) / EVEN


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 1000])
def test_every_token_is_drawn_as_often_as_it_weighs(vocabulary: int) -> None:
    weights = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)).mul(3).softmax(0)
    weights[::3] = 0.0 if vocabulary > 1 else 1.0
    seen = shares(weights)
    assert (seen - weights / weights.sum()).abs().max() <= 1.5 / EVEN  # of evenly spread numbers, one more or less
    assert not seen[weights == 0.0].any()


def test_numbers_at_either_end_draw_tokens_that_weigh_something() -> None:
    weights = torch.zeros(3, 700)
    weights[:, 300:310] = 0.1
    ends = torch.tensor([0.0, 1.0 - 2.0**-53, 1.0])  # [0, 1) is asked for; a product may round up to the total
    assert draw(weights, ends.double()).tolist() == [300, 309, 309]


def test_rows_without_a_distribution_draw_tokens_of_the_vocabulary() -> None:
    odd = torch.stack((torch.zeros(300), torch.full((300,), torch.nan)))
    drawn = draw(odd, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert drawn.ge(0).all()
    assert drawn.lt(300).all()


def test_a_rejected_token_is_not_drawn_in_its_own_place() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).repeat(40_000, 1)
    before = probabilities.clone()
    for draft, expected in ((0, [0.0, 0.5, 0.5, 0.0]), (3, [0.5, 0.25, 0.25, 0.0]), (-1, [0.5, 0.25, 0.25, 0.0])):
        drafts = torch.full((40_000,), draft, dtype=torch.int32)
        drawn = recovered_tokens(probabilities, drafts, [40_000], {0: torch.Generator().manual_seed(1)})
        assert drawn.dtype == torch.int32
        assert torch.allclose(drawn.bincount(minlength=4) / 40_000, torch.tensor(expected), atol=0.015)  # 6 sigma
    assert probabilities.equal(before)


def test_a_seed_draws_the_same_and_is_left_alone_where_nothing_was_drafted() -> None:
    probabilities = torch.rand(5, 400, generator=torch.Generator().manual_seed(0))
    drafts = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32)
    seeded = {i: torch.Generator().manual_seed(7) for i in (0, 1)}
    idle = seeded[1].get_state()
    first = recovered_tokens(probabilities, drafts, [3, 0, 2], seeded)
    again = recovered_tokens(probabilities, drafts, [3, 0, 2], {0: torch.Generator().manual_seed(7)})
    assert first[:3].equal(again[:3])
    assert seeded[1].get_state().equal(idle)
