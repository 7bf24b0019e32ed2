"""A tape of what a server was asked and answered: exact, without those who are excluded, and of this target only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from faser.tapes import TapeError, load_tape  # noqa: E402
from faser.tapes.from_log import read_log  # noqa: E402
from faser.tapes.recorder import main  # noqa: E402

VOCABULARY, LONGEST = 96, 64


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=LONGEST, initializer_range=0.5, eos_token_id=2, bos_token_id=1,
        pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def next_token(model: Any, text: list[int]) -> int:
    with torch.inference_mode():
        return int(model(torch.tensor([text])).logits[0, -1].argmax())


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(tokens):
        text.append(next_token(model, text))
    return text[len(prompt) :]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target`, `draft` and `other`, whole model directories."""
    folder = tmp_path_factory.mktemp("pair")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w2")
    for seed, name in enumerate(("target", "draft", "other")):
        tiny(seed).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    return folder


def line(prompt: list[int], output: list[int], **fields: Any) -> str:
    texts = {"prompt_ids": prompt, "output_ids": output, "temperature": 0.0, "max_tokens": 20}
    return json.dumps({"kind": "request", "request": "r", "excluded": False, **texts, **fields})


def test_the_tape_is_what_was_answered_and_what_the_draft_thinks_of_it(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, draft = tiny(0), tiny(1)
    prompts = [[5, 9, 11], [7, 4, 3, 8, 30], [20]]
    outputs = [greedy(target, prompt, 9) for prompt in prompts]
    sampled = [33, 34, 35]  # no greedy one, and none that the draft would write
    step = json.dumps({"kind": "step", "request": ["r"], "verified": [1]})
    log = tmp_path / "log.jsonl"
    older, newest = log.with_name("log.jsonl.1"), log
    older.write_text("\n".join([step, line(prompts[0], outputs[0]), line(prompts[1], outputs[1]), ""]))
    newest.write_text(
        "\n".join([
            line(prompts[2], outputs[2], status="abort"),
            json.dumps({"kind": "request", "excluded": True}),
            json.dumps({"kind": "request", "excluded": False}),
            line([1], []),
            line([1] * LONGEST, [1]),
            line([3, 4], sampled, temperature=0.7, max_tokens=3),
            '{"kind": "request", "prompt_ids": [1, 2',
        ])
    )  # fmt: skip
    flags = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--from-log", str(log)]
    assert main([*flags, "--out", str(tmp_path / "t.tape")]) == 0
    assert (
        "4 requests; left out: 1 under penalties, a grammar or the like, 1 without tokens, 1 without output, 1 longer"
        in capsys.readouterr().err
    )
    tape = load_tape(tmp_path / "t.tape")
    assert [tape.text(i) for i in range(4)] == [*zip(prompts, outputs, strict=True), ([3, 4], sampled)]
    assert tape.temperature.tolist() == pytest.approx([0, 0, 0, 0.7])
    assert tape.max_tokens.tolist() == [20, 20, 20, 3]
    assert "log.jsonl" in tape.source
    for i in range(4):
        prompt, output = tape.text(i)
        own = [next_token(draft, prompt + output[:t]) for t in range(len(output))]
        at = int(tape.offsets[i])
        assert tape.match[at : at + len(output)].tolist() == [a == b for a, b in zip(own, output, strict=True)]


def test_another_models_log_is_refused(pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(line([5, 9, 11], greedy(tiny(0), [5, 9, 11], 12)))
    flags = ["--target", str(pair / "other"), "--draft", str(pair / "draft"), "--from-log", str(log)]
    assert main([*flags, "--out", str(tmp_path / "t.tape")]) == 2
    assert "of 12 greedy tokens of the log are --target's own" in capsys.readouterr().err
    assert not (tmp_path / "t.tape").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request with its tokens"),
        ('{"kind": "request"}', "0 requests; left out: 1 without tokens"),
        ("[" * 100_000 + "\n" + '{"kind": "request"}', "0 requests; left out: 1 without tokens"),
        (line([1, "2"], [3]), "1 without tokens"),  # type: ignore[list-item]
        (line([1, 2], [-3]), "1 without tokens"),
        (line([1, 2], [3], temperature=-1), "1 without tokens"),
        (line([1, 2], [VOCABULARY]), "holds token 96; --target has 96"),
    ],
)
def test_a_log_without_use_is_refused_in_a_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(TapeError, match=says) as refused:
        read_log([tmp_path / "log.jsonl"], vocabulary=VOCABULARY, longest=LONGEST)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--from-log", "gone.jsonl"], "gone.jsonl"),
        (["--from-log", "a.jsonl", "--prompts", "b.jsonl"], "not allowed with"),
        ([], "one of the arguments --prompts --from-log is required"),
        (["--from-log", "a.jsonl", "--temperature", "0"], "leave out --temperature"),
        (["--from-log", "a.jsonl", "--max-tokens", "1", "2"], "leave out --temperature"),
    ],
)
def test_mistakes_are_refused_in_one_line(
    flags: list[str], says: str, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--out", str(tmp_path / "t.tape")]
    try:
        status: Any = main([*given, *flags])
    except SystemExit as ended:  # argparse's own refusals
        status = ended.code
    (said,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("faser record:")]
    assert status == 2
    assert says in said
    assert not list(tmp_path.iterdir())
