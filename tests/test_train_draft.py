"""A draft from a target's own conversations: what is written, what is learned, what is exported."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from faser.models import Pair, names
from faser.models.fingerprint import function
from faser.models.int8_draft import Int8Draft
from faser.tapes import Tape
from faser.train import draft as command
from faser.train.corpus import SHORT_DOCUMENT, Author, ChatFormat, Conversations
from faser.train.distil import Schedule, Shape, Teacher, batches, distil, draft_model
from faser.train.draft import NOTE, main
from faser.train.draft_export import acceptance_table, export, tokens_a_step

VOCABULARY = 96
ROOT = Path(__file__).parent.parent


pytestmark = pytest.mark.usefixtures("one_thread")


def target(vocabulary: int = VOCABULARY) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32: the smallest that vLLM has attention for on a CPU
        num_key_value_heads=1,
        max_position_embeddings=4096,
        initializer_range=0.5,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


class Parrot:
    """Answers with the last token of a prompt, `answer` times or to the limit, and an end; keeps what it was asked."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.asked: list[list[int]] = []

    def write(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: Sequence[int],
        temperatures: Sequence[float],
        ends: Sequence[int],
    ) -> list[list[int]]:
        assert len(prompts) == len(max_tokens) == len(temperatures)
        self.asked += prompts
        return [[p[-1]] * min(self.answer, m - 1) + [ends[0]] for p, m in zip(prompts, max_tokens, strict=True)]


def chat() -> ChatFormat:
    return ChatFormat([50], [51, 52], (2,), lambda text: [10 + ord(c) % 30 for c in text])


def corpus(conversations: int = 12, length: int = 40) -> Conversations:
    """Answers repeat a token of the prompt."""
    rng = np.random.default_rng(0)
    tokens = np.repeat(rng.integers(3, VOCABULARY, conversations), length).astype(np.int32)
    lengths, answers = np.full(conversations, length, np.int32), np.full(conversations, 10, np.int32)
    return Conversations(tokens, lengths, answers, np.array(["any"] * conversations))


TINY = ["--hidden", "32", "--heads", "2", "--kv-heads", "1", "--layers", "1", "--intermediate", "32"]
TINY += ["--steps", "2", "--batch-tokens", "256"]


@pytest.fixture(scope="module")
def small(models: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a target of the embedded model's vocabulary that is small enough to be run quickly."""
    directory = tmp_path_factory.mktemp("small")
    target(49152).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (directory / name).write_bytes((Path(models.target) / name).read_bytes())
    return directory


def begun(work: Path, small: Path) -> list[str]:
    """Flags of a run whose conversations are written."""
    (work / "corpus").mkdir(parents=True)
    (work / NOTE).write_text(function(small))
    corpus().save(work / "corpus" / "0-0000.npz")
    prompts = work.with_name("prompts.jsonl")
    prompts.write_text('{"domain": "chat", "prompt": "Hello there", "max_tokens": 12}\n')
    return ["--target", str(small), "--work", str(work), "--tokens", "1", "--prompts", str(prompts), *TINY]


def test_author_reads_documents_once_there_are_answers_to_read(tmp_path: Path) -> None:
    author = Author(Parrot(SHORT_DOCUMENT), chat(), np.random.default_rng(0))
    first, second = author.round(60), author.round(60)
    assert not set(first.domain) & {"summarisation", "qa"}
    assert set(second.domain) >= {"summarisation", "qa", "any", "code", "maths", "chat", "articles"}
    assert len(first.length) == pytest.approx(60, abs=3)
    first.save(tmp_path / "0.npz")
    restarted = Author(Parrot(3), chat(), np.random.default_rng(0))
    restarted.remember(Conversations.load([tmp_path / "0.npz"]))
    assert restarted.documents == author.documents[: len(restarted.documents)]
    assert len(restarted.documents) > 0


def test_conversations_are_the_prompt_the_model_was_given_and_its_answer() -> None:
    parrot = Parrot(5)
    made = Author(parrot, chat(), np.random.default_rng(1)).round(20)
    starts = np.cumsum(made.length) - made.length
    prompts = parrot.asked[-len(made.length) :]
    for start, length, answer, prompt in zip(starts, made.length, made.answer, prompts, strict=True):
        tokens = made.tokens[start : start + length].tolist()
        assert tokens[:answer] == prompt
        assert tokens[0] == 50
        assert prompt[-2:] == [51, 52]
        assert 2 not in prompt  # the end of a user turn is the format's, not one more
        assert tokens[answer:] == [52] * 5 + [2]


def test_chat_format_of_the_embedded_model(models: Pair) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.target)
    chat_format = ChatFormat.of(tokenizer, [2])
    whole = chat_format.before + chat_format.encode("Hello") + chat_format.after
    asked = [{"role": "user", "content": "Hello"}]
    assert whole == tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert chat_format.ends == (2,)


def test_batches_bring_every_conversation_once_before_any_again() -> None:
    c = corpus(10)
    schedule = Schedule(steps=10, batch_tokens=256)  # 2 rows of 128 a step: 5 steps an epoch
    seen = [row for rows, _, _ in batches(c, schedule) for row in rows]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    for rows, ids, learned in batches(c, schedule):
        assert ids.shape == (2, 128)
        assert learned.sum(1).tolist() == [30, 30]
        assert bool(learned[:, 9].all())
        assert not bool(learned[:, 39:].any())
        assert ids[0, :40].tolist() == c.tokens[40 * rows[0] : 40 * rows[0] + 40].tolist()


def test_teacher_remembers_what_it_read() -> None:
    model, c = target(), corpus()
    teacher, seen = Teacher(model, c), {}
    for rows, ids, learned in batches(c, Schedule(steps=12, batch_tokens=256)):
        states = teacher(rows, ids, learned)
        with torch.no_grad():
            fresh = model.model(input_ids=ids).last_hidden_state[:, :-1][learned]
        torch.testing.assert_close(states, fresh, rtol=1e-4, atol=1e-4)
        seen.update(dict.fromkeys(rows.tolist()))
    assert len(seen) == len(c.length)
    model.model.forward = None  # all is known: the target is not asked again
    teacher(rows, ids, learned)


def test_distilling_makes_the_draft_agree_with_the_target() -> None:
    model, said = target(), []
    torch.manual_seed(1)
    draft = draft_model(model, Shape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64))
    schedule = Schedule(steps=150, batch_tokens=2048, rate=1e-2, warm_up=10)
    distil(model, draft, corpus(48), schedule, said=said.append, every=50)
    agrees = [float(line.split("agrees ")[1].split(",")[0]) for line in said]
    assert len(said) == 3
    assert agrees[-1] > 0.9
    assert agrees[-1] > agrees[0]


def test_export_is_read_back_within_half_a_step_of_int8(tmp_path: Path) -> None:
    draft = draft_model(target(), Shape(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=64))
    export({"config": draft.config.to_dict(), "weights": draft.state_dict()}, tmp_path)
    read = dict(Int8Draft(tmp_path).tensors())
    for name, weight in draft.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = weight.numpy()
        allowed = np.abs(values).max(-1, keepdims=True) / 127 / 2 + 1e-7 if values.ndim > 1 else 0.0
        assert (np.abs(read[name] - values) <= allowed).all()
    assert set(read) == {name for name in draft.state_dict() if name != "lm_head.weight"}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_tokens_a_step_counts_what_a_server_would_emit() -> None:
    assert tokens_a_step(Tape.iid(0.0, requests=4), 4) == 1.0
    tape = Tape.iid(1.0, requests=4, output_tokens=(60, 60))
    assert tokens_a_step(tape, 4) == 5.0
    assert "| iid | 4 | 1.000 | 3.00 | 5.00 |" in acceptance_table(tape)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "nowhere"], "--target is nowhere; allowed: a directory with a config.json"),
        (["--heads", "3"], "--heads is 3; allowed: a divisor of --hidden, 256"),
        (["--prompts", "nowhere"], "--prompts is nowhere; there is no such file"),
        (["--prompts", __file__], "line 1: is no JSON"),
        (["--hidden", "6", "--heads", "2"], "the size of a head, is 3; allowed: an even number"),
        (["--rate", "nan"], "--rate is nan; allowed: a finite number above 0"),
        (["--rate", "0"], "--rate is 0.0; allowed: a finite number above 0"),
        (["--seed", "-1"], "--seed is -1; allowed: 0 to 2147483647"),
        (["--device", "cpu:7"], "--device is 'cpu:7'; allowed here: cpu"),
        (["--device", "moon"], "--device is 'moon'; allowed here: cpu"),
        (["--out", __file__], f"--out is {__file__}; {__file__} is no directory"),
        (["--out", f"{__file__}/draft"], f"--out is {__file__}/draft; {__file__} is no directory"),
        (["--out", "x" * 300], "File name too long"),
        (["--out", "."], "--out is ., which holds something else than a draft of"),
        (["--work", str(ROOT / "train")], "train, which does not say whose it is; name another directory, or"),
    ],
)
def test_mistakes_are_named(
    flags: list[str], message: str, models: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--target", str(models.target), "--out", str(tmp_path / "draft"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_target_may_be_named(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "prepare", lambda name: Pair(name, small, None))
    monkeypatch.chdir(tmp_path)
    flags = begun(tmp_path / "work", small)
    flags[flags.index("--target") + 1] = "smollm2"
    assert main([*flags, "--out", str(tmp_path / "draft")]) == 0
    assert (tmp_path / "draft" / "README.md").read_text().startswith("# Draft of smollm2, ")


def test_a_draft_is_made_beside_nothing_of_the_users(small: Path, tmp_path: Path) -> None:
    """Without vLLM: the conversations are there. A draft that is there is made again, what else is there is kept."""
    out, flags = tmp_path / "draft", begun(tmp_path / "work", small)
    for _ in range(2):
        assert main([*flags, "--out", str(out)]) == 0
        assert {"README.md", "config.json", "generation_config.json", "model.safetensors"} < {
            path.name for path in out.iterdir()
        }
        assert len(Int8Draft(out / "int8").shapes) > 3
        (out / "notes.txt").write_text("mine")
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["target", "work", "project"])
def test_out_is_not_where_something_else_is(
    name: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = begun(tmp_path / "work", small)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("# My own\n")
    out = small if name == "target" else tmp_path / name
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert main([*flags, "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --out is {out}, ")
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_work_is_of_one_target(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = tmp_path / "work"
    flags = [*begun(work, small), "--out", str(tmp_path / "draft"), "--phase", "generate"]
    assert main(flags) == 0
    target(64).save_pretrained(tmp_path / "other")
    assert main([*flags, "--target", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert (
        f"--work is {work}, which is of target {function(small)}; --target is {function(tmp_path / 'other')}; " in error
    )
    (work / NOTE).unlink()
    assert main(flags) == 2
    assert f"write {function(small)} to {work / NOTE}" in capsys.readouterr().err
    assert not (work / NOTE).exists()


def test_only_one_run_is_at_work(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*begun(tmp_path / "work", small), "--out", str(tmp_path / "draft")]
    with (tmp_path / "work" / NOTE).open() as note:
        fcntl.flock(note, fcntl.LOCK_EX)
        assert main(flags) == 2
    assert capsys.readouterr().err.endswith("another run, or an engine of one, is at work there\n")
    assert main([*flags, "--phase", "generate"]) == 0


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04cut", {"tokens": [1]}, {"length": [5]}, None])
@pytest.mark.parametrize("name", ["corpus/0-0000.npz", "model.pt"])
def test_a_broken_file_of_the_work_is_named(
    name: str, content: Any, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*begun(tmp_path / "work", small), "--out", str(tmp_path / "draft")]
    path = tmp_path / "work" / name
    if content is None:  # not the right number of tokens; of weights nothing is kept
        whole = {key: getattr(corpus(), key) for key in ("length", "answer", "domain")}
        np.savez(tmp_path / "made.npz", tokens=corpus().tokens[:-1], **whole)
        path.write_bytes((tmp_path / "made.npz").read_bytes())
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif name == "model.pt":
        torch.save(content, path)
    else:
        np.savez(path, **content)
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert error.endswith("; remove it to make it anew\n")


def test_a_draft_too_large_to_be_made(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*begun(tmp_path / "work", small), "--out", str(tmp_path / "draft"), "--hidden", str(10**10)]
    assert main(flags) == 2
    assert "error: a draft of Shape(hidden=10000000000," in capsys.readouterr().err


def test_a_round_never_replaces_another(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*begun(tmp_path / "work", small), "--out", str(tmp_path / "draft")]
    rounds = tmp_path / "work" / "corpus"
    (rounds / "0-0000.npz").rename(rounds / "0-0001.npz")
    before = (rounds / "0-0001.npz").read_bytes()

    class Nothing:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def remember(self, _: Any) -> None: ...
        def close(self) -> None: ...
        def round(self, _: int) -> Conversations:
            return corpus(1)

    monkeypatch.setattr("faser.serving.writer.Writer", Nothing)
    monkeypatch.setattr(command, "Author", Nothing)
    assert main([*flags, "--engine", "0", "--tokens", "500"]) == 0
    assert sorted(path.name for path in rounds.iterdir()) == ["0-0001.npz", "0-0002.npz"]
    assert (rounds / "0-0001.npz").read_bytes() == before


def test_an_interrupted_run_ends_its_engines(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, started = tmp_path / "engine.py", tmp_path / "started"
    engine.write_text(f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    monkeypatch.setattr(command, "__file__", str(engine))

    def interrupt() -> None:
        deadline = time.monotonic() + 20
        while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    flags = [*begun(tmp_path / "work", small), "--out", str(tmp_path / "draft"), "--tokens", "10000"]
    assert main(flags) == 130
    thread.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


@pytest.mark.server
def test_the_command_makes_a_draft_and_does_no_phase_twice(small: Path, tmp_path: Path) -> None:
    """Through vLLM."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"domain": "chat", "prompt": "Hello there", "max_tokens": 12}\n')
    command = [sys.executable, str(ROOT / "train" / "draft.py"), "--target", str(small)]
    command += ["--out", str(tmp_path / "draft"), "--work", str(tmp_path / "work"), "--prompts", str(prompts)]
    command += ["--tokens", "500", "--round", "4", "--steps", "3", "--batch-tokens", "256"]
    command += ["--hidden", "32", "--heads", "2", "--kv-heads", "1", "--layers", "1", "--intermediate", "32"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "step 3 of 3" in run.stdout
    assert "| chat | 1 |" in (tmp_path / "draft" / "README.md").read_text()
    assert f"faser serve {small} --spec-model {tmp_path / 'draft'}" in run.stdout
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "draft", output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "draft").get_vocab()
    assert Int8Draft(tmp_path / "draft" / "int8").shapes
    made = {p: p.stat().st_mtime_ns for p in (tmp_path / "work").rglob("*.npz")}
    made[tmp_path / "work" / "model.pt"] = (tmp_path / "work" / "model.pt").stat().st_mtime_ns
    again = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert again.returncode == 0, again.stderr[-2000:]
    assert "step 3 of 3" not in again.stdout
    assert {p: p.stat().st_mtime_ns for p in made} == made
    other = subprocess.run([*command, "--steps", "4"], capture_output=True, text=True, timeout=300, check=False)
    assert other.returncode == 2
    assert "was trained with" in other.stderr
