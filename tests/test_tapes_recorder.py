"""What the recorder writes is what the models do; and it refuses, by name, what it cannot do."""

from __future__ import annotations

import json
import lzma
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from faser.models.fingerprint import fingerprint  # noqa: E402
from faser.tapes import Tape, TapeError, load_tape  # noqa: E402
from faser.tapes import recorder as recorder_module  # noqa: E402
from faser.tapes.generation import Request, batches, generate  # noqa: E402
from faser.tapes.prompts import PROMPTS as SHIPPED  # noqa: E402
from faser.tapes.prompts import Prompt, read_prompts  # noqa: E402
from faser.tapes.recorder import main  # noqa: E402
from faser.tapes.recording import record  # noqa: E402

WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(93))]
END = 2
PROMPTS = [[5, 9, 11], [7, 4, 3, 8, 30, 31, 12], [20], [40, 41, 42, 43]]


pytestmark = pytest.mark.usefixtures("one_thread")


def tiny(seed: int, vocabulary: int = len(WORDS), longest: int = 64) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=longest,
        initializer_range=0.5,
        eos_token_id=END,
        bos_token_id=1,
        pad_token_id=END,
    )
    return transformers.LlamaForCausalLM(config).eval()


def next_token(model: Any, text: list[int]) -> Any:
    with torch.inference_mode():
        return model(torch.tensor([text])).logits[0, -1]


def unwatched(_: int) -> None:
    """A progress that nobody watches."""


def naive(model: Any, request: Request) -> list[int]:
    text = list(request.prompt)
    while len(text) < len(request.prompt) + request.max_tokens:
        text.append(int(next_token(model, text).argmax()))
        if text[-1] == END:
            break
    return text[len(request.prompt) :]


def requests_of(temperature: float = 0.0, limits: tuple[int, ...] = (12, 5, 9, 12)) -> list[Request]:
    return [
        Request(domain, prompt, temperature, limit)
        for domain, prompt, limit in zip("abab", PROMPTS, limits, strict=True)
    ]


def recorded(target: Any, draft: Any, requests: list[Request]) -> Tape:
    return record(target, draft, requests, layers=(1, 2), batch=3, seed=0, source="test")


def test_batched_outputs_are_those_of_one_prompt_at_a_time_each_up_to_its_own_limit() -> None:
    model, requests = tiny(2), requests_of()
    done: list[int] = []
    outputs = generate(model, requests, batch=3, seed=0, advance=done.append)
    assert outputs == [naive(model, request) for request in requests]
    assert sum(done) == len(requests)


def test_an_output_ends_with_its_end_token() -> None:
    model = tiny(2)
    free = generate(model, requests_of(), batch=4, seed=0, advance=unwatched)
    model.generation_config.eos_token_id = [END, free[0][3], free[3][1]]
    short = generate(model, requests_of(), batch=4, seed=0, advance=unwatched)
    assert short[0] == free[0][: 1 + free[0].index(next(t for t in free[0] if t in {free[0][3], free[3][1]}))]
    assert len(short[3]) <= 2


def test_sampling_follows_the_softmax_at_the_temperature_and_its_seed() -> None:
    model = tiny(2)
    model.generation_config.top_k, model.generation_config.repetition_penalty = 2, 1.5  # to be overruled
    requests = [Request("a", PROMPTS[0], 0.7, 1)] * 4000
    tokens = np.array(generate(model, requests, batch=1000, seed=3, advance=unwatched))[:, 0]
    expected = (next_token(model, PROMPTS[0]) / 0.7).softmax(-1).numpy()
    share = np.bincount(tokens, minlength=len(WORDS)) / len(tokens)
    assert np.abs(share - expected).sum() / 2 < 0.06
    assert (share > 0).sum() > 5
    again = np.array(generate(model, requests, batch=1000, seed=3, advance=unwatched))[:, 0]
    other = np.array(generate(model, requests, batch=1000, seed=4, advance=unwatched))[:, 0]
    assert (tokens == again).all()
    assert (tokens != other).any()


def test_a_batch_has_one_temperature_close_limits_and_prompts_of_one_span() -> None:
    mixed = [*requests_of(0.0, (50, 8, 9, 51)), *requests_of(0.8, (1, 2, 3, 4))]
    mixed.append(Request("a", [5] * 512, 0.0, 9))
    assert list(batches(mixed, 2)) == [[1, 2], [0, 3], [8], [4, 5], [6, 7]]


def test_a_tape_holds_texts_matches_and_ranks_request_after_request() -> None:
    target, draft, requests = tiny(2), tiny(3), [*requests_of(), *requests_of(0.8)]
    tape = recorded(target, draft, requests)
    assert tape.temperature.tolist() == [0.0] * 4 + [np.float32(0.8)] * 4
    assert tape.max_tokens.tolist() == [12, 5, 9, 12] * 2
    assert (tape.layers, tape.vocabulary, tape.tokens.dtype) == ((1, 2), len(WORDS), np.uint16)
    for i, request in enumerate(requests):
        prompt, output = tape.text(i)
        assert prompt == request.prompt
        if not request.temperature:
            assert output == naive(target, request)
        first = tape.offsets[i]
        for t in range(len(output)):
            logits = next_token(draft, prompt + output[:t])
            assert tape.match[first + t] == (int(logits.argmax()) == output[t])
            assert tape.confidence[first + t, 0] == pytest.approx(255 * float(logits.softmax(-1).max()), abs=0.51)
    assert 0.0 < tape.rank.mean() < len(WORDS) - 1


def test_a_model_that_drafts_for_itself_is_always_right() -> None:
    model = tiny(2)
    tape = recorded(model, model, requests_of())
    assert tape.match.all()
    assert tape.acceptance() == {"a": 1.0, "b": 1.0}
    assert recorded(model, tiny(3), requests_of()).match.mean() < 0.5


def test_bad_prompt_files_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    good = json.dumps({"domain": "a", "prompt": "b", "max_tokens": 7})
    bad = ("{", "[1]", '{"domain": "a"}', '{"domain": "a", "prompt": ""}', '{"domain": 1, "prompt": "b"}')
    for line in (*bad, *(f'{{"domain": "a", "prompt": "b", "max_tokens": {limit}}}' for limit in ("0", "1.5", "true"))):
        path.write_text(f"{good}\n{line}\n")
        with pytest.raises(TapeError, match="line 2"):
            read_prompts(path)
    path.write_text(f"{good}\n\n")
    assert read_prompts(path) == [Prompt("a", "b", 7)]
    path.write_text("\n")
    with pytest.raises(TapeError, match="holds no prompts"):
        read_prompts(path)
    path.write_text(good.replace('"a"', '"a\u2028"'), "utf-8-sig")  # an end of a line to some, but none of JSONL
    assert read_prompts(path)[0].domain == "a\u2028"
    for content, says in (
        (b"\xff\xfe", "is no UTF-8"),
        (b"[" * 100_000, "line 1: is no JSON"),
        (b'{"domain": "a"}', "line 1: needs 'domain' and 'prompt'$"),
        (b'{"domain": "a", "prompt": "\\ud800"}', "must be text: surrogates not allowed"),
        (b"\n".join(b'{"domain": "%d", "prompt": "b"}' % i for i in range(257)), "257 domains; allowed: 256"),
    ):
        path.write_bytes(content)
        with pytest.raises(TapeError, match=says):
            read_prompts(path)
    packed = tmp_path / "p.jsonl.xz"
    packed.write_bytes(lzma.compress(good.encode()))
    assert read_prompts(packed) == [Prompt("a", "b", 7)]
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(TapeError, match=r"no whole \.xz file"):
        read_prompts(packed)


def test_the_shipped_prompts_are_a_thousand_of_five_domains() -> None:
    prompts = read_prompts(SHIPPED)
    assert Counter(prompt.domain for prompt in prompts) == dict.fromkeys(
        ("chat", "code", "maths", "qa", "summarisation"), 200
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `target` and `draft`, whole model directories, and `p.jsonl`."""
    folder = tmp_path_factory.mktemp("pair")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    for name, seed in (("target", 2), ("draft", 3)):
        tiny(seed).save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
    lines = [{"domain": "xy"[i % 2], "prompt": f"w{i} w{i + 1} w9"} for i in range(7)]
    lines[3]["max_tokens"] = "?"
    (folder / "p.jsonl").write_text("\n".join(json.dumps(line) for line in lines).replace('"?"', "2"))
    return folder


def command(pair: Path, out: Path, *more: str) -> list[str]:
    given = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--prompts", str(pair / "p.jsonl")]
    return [*given, "--out", str(out), "--max-tokens", "4", "9", *more]


def test_the_command_writes_a_tape_that_says_whose_it_is(pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.tape"
    assert main(command(pair, out, "--temperature", "0", "0.8", "--batch", "4")) == 0
    tape = load_tape(out)
    assert (tape.target, tape.draft) == (fingerprint(pair / "target"), fingerprint(pair / "draft"))
    assert len(tape) == 14
    assert (tape.max_tokens[3], tape.max_tokens[10]) == (2, 2)
    assert {*tape.max_tokens.tolist()} <= {2, *range(4, 10)}
    assert len({*tape.max_tokens.tolist()}) > 3
    assert "temperature 0 and 0.8, float32 on cpu" in tape.source
    halves = [{tuple(half.text(i)[0]) for i in range(len(half))} for half in (tape.split("train"), tape.split("eval"))]
    assert not halves[0] & halves[1]  # no prompt is trained on at one temperature and evaluated at another
    assert [p.name for p in tmp_path.iterdir()] == ["t.tape"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--target", "nowhere"], "--target is nowhere; that is no model directory"),
        (["--draft", "tests"], "--draft is tests; that is no model directory"),
        (["--out", "nowhere/t.tape"], "there is no folder nowhere"),
        (["--out", "t.npz"], "--out is t.npz; allowed: NAME.tape or NAME.tape.xz"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--max-tokens", "9", "3"], "--max-tokens is 9 3"),
        (["--max-tokens", "4", "80"], "64 that the target can read"),
        (["--batch", "0"], "--batch is 0; allowed: 1 or more"),
        (["--temperature", "-1"], "--temperature is -1; allowed: 0, and 0.01 to 2"),
        (["--temperature", "0", "0"], "same one twice"),
        (["--device", "abacus"], "--device is 'abacus'; allowed here: cpu"),
        (["--temperature", "1e-45"], "--temperature is 1e-45; allowed: 0, and 0.01 to 2"),
        (["--max-tokens", "1", "99999999999999999999"], "HIGH from LOW to 1048576"),
        (["--seed", "-1"], "--seed is -1; allowed: 0 to 2147483647"),
        (["--out", "tests/x" + "x" * 250 + ".tape"], "File name too long"),
        (["--layers", "3"], "--layers is 3; allowed: 1 to 2"),
        (["--dtype", "int3"], "int3"),
    ],
)
def test_mistakes_are_refused_in_one_line_and_leave_no_file(
    flags: list[str], says: str, pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    try:
        status: Any = main(command(pair, tmp_path / "t.tape", *flags))
    except SystemExit as ended:  # argparse's own refusals
        status = ended.code
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("faser record:")]
    assert (status, len(lines)) == (2, 1)
    assert says in lines[0]
    assert not list(tmp_path.iterdir())


def test_weights_that_are_missing_or_cut_are_no_model(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking, cut = tmp_path / "lacking", tmp_path / "cut"
    for folder in (lacking, cut):
        shutil.copytree(pair / "target", folder)
    weights = safetensors_torch.load_file(lacking / "model.safetensors")
    del weights["model.embed_tokens.weight"]
    safetensors_torch.save_file(weights, lacking / "model.safetensors", {"format": "pt"})
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    for folder, says in ((lacking, "lacks 1 weights, such as model.embed_tokens.weight"), (cut, "cannot be loaded")):
        assert main(command(pair, tmp_path / "t.tape", "--target", str(folder))) == 2
        assert f"--target {folder} {says}" in capsys.readouterr().err
    assert not (tmp_path / "t.tape").exists()


def test_pairs_that_do_not_fit_are_refused_by_name(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    tiny(3, vocabulary=90).save_pretrained(other)
    assert main(command(pair, tmp_path / "t.tape", "--draft", str(other))) == 2
    assert "vocabularies differ: --target has 96 tokens, --draft has 90" in capsys.readouterr().err
    shutil.rmtree(other)
    shutil.copytree(pair / "draft", other)
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"w7": 10', '"w7": 11').replace('"w8": 11', '"w8": 10'))
    assert (other / "tokenizer.json").read_text() != text
    assert main(command(pair, tmp_path / "t.tape", "--draft", str(other))) == 2
    assert "number tokens differently" in capsys.readouterr().err
    (other / "model.safetensors").unlink()
    assert main(command(pair, tmp_path / "t.tape", "--draft", str(other))) == 2
    assert "holds no .safetensors file" in capsys.readouterr().err
    assert not (tmp_path / "t.tape").exists()


def test_an_interruption_leaves_no_file(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Tape:
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder_module, "_record", interrupted)
    assert main(command(pair, tmp_path / "t.tape")) == 130
    assert not list(tmp_path.iterdir())
