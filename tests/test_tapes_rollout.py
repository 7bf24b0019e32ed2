"""The rollout from all positions at once equals the plain one, position by position."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from faser.core import MAX_DEPTH  # noqa: E402
from faser.tapes import TapeError  # noqa: E402
from faser.tapes.prompts import read_prompts  # noqa: E402
from faser.tapes.recorder import generate, main, record  # noqa: E402
from faser.tapes.rollout import rollout  # noqa: E402

VOCABULARY, END = 96, 2


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,  # wide, so that the argmax depends on the whole context
        eos_token_id=END,
        bos_token_id=1,
        pad_token_id=END,
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


@pytest.mark.parametrize("start", [1, 6])
def test_it_equals_a_naive_rollout_of_every_prefix(start: int) -> None:
    model = tiny(0)
    tokens = torch.randint(3, VOCABULARY, (14,), generator=torch.Generator().manual_seed(1))
    drafted, confidence = rollout(model, tokens, start)
    assert drafted.shape == confidence.shape == (14 - start, MAX_DEPTH)
    plain = [naive(model, tokens[: start + t].tolist(), MAX_DEPTH) for t in range(14 - start)]
    assert drafted.tolist() == [p[0] for p in plain]
    assert len({tuple(row) for row in drafted.tolist()}) > 3  # or the comparison would show nothing
    np.testing.assert_allclose(confidence.numpy(), [p[1] for p in plain], rtol=1e-4, atol=1e-6)


def test_a_start_outside_the_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="start is 5; allowed: 1 to 4"):
        rollout(tiny(0), torch.arange(3, 8), 5)


PROMPTS = [[5, 9, 11], [7, 4, 3, 8, 30, 31, 12], [20], [40, 41, 42, 43]]


def test_batched_outputs_are_those_of_one_prompt_at_a_time() -> None:
    model = tiny(2)
    outputs = generate(model, PROMPTS, max_tokens=12, batch=3)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected, _ = naive(model, prompt, 12)
        if END in expected:
            expected = expected[: expected.index(END) + 1]
        assert output == expected


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    model = tiny(2)
    tape = record(model, model, PROMPTS, ["a", "b", "a", "b"], max_tokens=12, batch=2, source="self")
    assert tape.match.all()
    assert tape.prompt_tokens.tolist() == [3, 7, 1, 4]
    assert tape.acceptance() == {"a": 1.0, "b": 1.0}
    other = record(model, tiny(3), PROMPTS, ["a"] * 4, max_tokens=12, batch=2, source="another")
    assert other.match.mean() < 0.5


def test_bad_prompt_files_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    good = json.dumps({"domain": "a", "prompt": "b"})
    for line in ("{", "[1]", '{"domain": "a"}', '{"domain": "a", "prompt": ""}', '{"domain": 1, "prompt": "b"}'):
        path.write_text(f"{good}\n{line}\n")
        with pytest.raises(TapeError, match="line 2"):
            read_prompts(path)
    path.write_text("\n")
    with pytest.raises(TapeError, match="holds no prompts"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--target", "nowhere"], "--target: nowhere is not a folder"),
        (["--out", "nowhere/t.npz"], "--out: nowhere is not a folder"),
        (["--max-tokens", "0"], "--max-tokens is 0; allowed: 1 or more"),
        ([], "p.jsonl"),
    ],
)
def test_the_command_refuses_what_it_cannot_do_before_it_starts(
    change: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = str(tmp_path)
    good = ["--target", here, "--draft", here, "--prompts", f"{here}/p.jsonl", "--out", f"{here}/t.npz"]
    monkeypatch.setattr("sys.argv", ["recorder", *good, *change])
    with pytest.raises(SystemExit) as ended:
        main()
    assert says in capsys.readouterr().err + str(ended.value)
    assert not list(tmp_path.iterdir())
