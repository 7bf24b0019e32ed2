"""The rollout from all positions of many texts at once equals the plain one; early ranks equal counted ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from faser.core import MAX_DEPTH  # noqa: E402
from faser.tapes import rollout as rollout_module  # noqa: E402
from faser.tapes.early_exit import default_layers, early_ranks  # noqa: E402
from faser.tapes.rollout import Texts, rollout  # noqa: E402

VOCABULARY = 400


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(seed: int, layers: int = 2) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,  # wide, so that the argmax depends on the whole context
    )
    return transformers.LlamaForCausalLM(config).eval()


def naive(model: Any, prefix: list[int], depth: int) -> tuple[list[int], list[float]]:
    text, confidence = list(prefix), []
    for _ in range(depth):
        with torch.inference_mode():
            chance, token = model(torch.tensor([text])).logits[0, -1].softmax(-1).max(-1)
        text.append(int(token))
        confidence.append(float(chance))
    return text[len(prefix) :], confidence


def some_texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(params=[1 << 25, 3 * VOCABULARY], ids=["one chunk", "many chunks"])
def chunked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_module, "CHUNK", request.param)


@pytest.mark.usefixtures("chunked")
def test_it_equals_a_naive_rollout_of_every_prefix_of_every_text() -> None:
    model = tiny(0)
    texts, start = some_texts(14, 9, 11, 3), [6, 1, 10, 2]
    drafted, confidence = rollout(model, Texts.of(texts, start))
    prefixes = [text[:t] for text, first in zip(texts, start, strict=True) for t in range(first, len(text))]
    assert drafted.shape == confidence.shape == (len(prefixes), MAX_DEPTH)
    plain = [naive(model, prefix, MAX_DEPTH) for prefix in prefixes]
    assert drafted.tolist() == [p[0] for p in plain]
    assert len({tuple(row) for row in drafted.tolist()}) > 10  # or the comparison would show nothing
    np.testing.assert_allclose(confidence.numpy(), [p[1] for p in plain], rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("chunked")
def test_early_ranks_count_the_tokens_that_an_early_layer_finds_more_likely() -> None:
    model = tiny(5, layers=6)
    texts, start = some_texts(14, 9, 11), [6, 1, 10]
    drafted = torch.tensor([t for text, first in zip(texts, start, strict=True) for t in text[first:]]).flip(0)
    ranks = early_ranks(model, Texts.of(texts, start), drafted, (1, 3, 4))
    expected = []
    for text, first in zip(texts, start, strict=True):
        with torch.inference_mode():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
            for t in range(first, len(text)):
                logits = [model.lm_head(model.model.norm(states[layer][0, t - 1])) for layer in (1, 3, 4)]
                token = int(drafted[len(expected)])
                expected.append([min(int((of > of[token]).sum()), 255) for of in logits])
    assert ranks.dtype == torch.uint8
    assert ranks.tolist() == expected
    assert {0 < r < 255 for row in expected for r in row} == {True, False}  # some of them at the bound, most not


@pytest.mark.parametrize(("depth", "layers"), [(30, (10, 15, 20)), (2, (1,)), (1, ()), (40, (13, 20, 26))])
def test_early_layers_lie_inside_the_model(depth: int, layers: tuple[int, ...]) -> None:
    assert default_layers(depth) == layers


def test_a_start_outside_its_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="start is 5; allowed: 1 to 4"):
        Texts.of(some_texts(8, 5), [5, 5])
