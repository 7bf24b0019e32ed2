"""Conversations that a target writes by itself, both turns of them: what a draft is distilled from.

One decision: no corpus is needed. The target continues the opening words of a user turn (`OPENERS`, which steer the
domain), then answers; its long answers become the documents that other user turns ask it to read. So any chat model
can be given a draft, on text of its own, with nothing but its weights.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Tokens = list[int]
Ids = NDArray[np.int32]

NAMES = ("Maria", "Tom", "Aisha", "Li", "Sam", "Olga", "Diego", "Priya", "Ben", "Noor", "Kofi", "Emma")
OPENERS: dict[str, tuple[float, tuple[str, ...]]] = {
    "any": (0.16, ("",)),
    "chat": (
        0.13,
        (
            "How do I",
            "How can I",
            "Can you explain",
            "What is the",
            "What are",
            "Why do",
            "Why is",
            "Give me",
            "I want to",
            "Write a short",
            "Write an email",
            "Write a poem about",
            "Suggest",
            "List",
            "Describe",
            "Rewrite the sentence",
            "Compare",
            "What would be",
            "Who",
            "When",
            "Tell me about",
            "Generate a",
            "Create a",
            "Explain how",
            "Name",
        ),
    ),
    "articles": (
        0.07,
        (
            "Write a long news article about",
            "Write a detailed report on",
            "Tell me a long story about",
            "Write a detailed article about",
            "Write a long essay on",
            "Write the minutes of a meeting about",
            "Write a biography of",
            "Describe in detail the history of",
            "Write a long review of",
        ),
    ),
    "code": (
        0.14,
        (
            "Complete this Python function:\n\ndef",
            "Finish the function.\n\ndef",
            "Write a Python function",
            "Please complete the code below.\n\nfrom typing import List\n\n\ndef",
            "```python\ndef",
            "Implement",
            "Complete the following code:\n\ndef solve(",
            "Write a program that",
            "Fix the bug in this code:\n\n",
            "Write a SQL query",
            "Explain this code:\n\n",
            "Write a function that takes",
            "def ",
            "Write a class",
        ),
    ),
    "maths": (
        0.14,
        (
            *(f"{name} {verb}" for name in NAMES for verb in ("has", "buys", "is", "wants to", "earns", "reads")),
            "A train",
            "A store sells",
            "If",
            "There are",
            "The sum of",
            "Solve",
            "Find the",
            "A rectangle",
            "Calculate",
            "In a class of",
            "A farmer",
            "What is the probability",
            "The price of",
            "How many",
        ),
    ),
}
"""Domain: share of all conversations, and how its user turns begin. What is left over reads documents."""

READING = (
    ("summarisation", "Summarize the following text.\n\n{}"),
    ("summarisation", "Summarize this article in three sentences:\n\n{}"),
    ("summarisation", "Write a short summary of this document:\n\n{}"),
    ("summarisation", "{}\n\nWrite a summary of the text above."),
    ("summarisation", "Read the text and give its main points.\n\n{}"),
    ("summarisation", "What is this text about?\n\n{}"),
    ("summarisation", "Summarize: {}"),
    ("summarisation", "{}\n\nTL;DR"),
    ("summarisation", "List the key facts of the report below.\n\n{}"),
    ("summarisation", "Give a headline and a one-paragraph summary of:\n\n{}"),
    ("qa", "Read the text and answer the question.\n\n{}\n\nQuestion:"),
    ("qa", "{}\n\nAccording to the text, what"),
    ("qa", "{}\n\nAccording to the text, who"),
    ("qa", "{}\n\nBased on the passage above,"),
    ("qa", "{}\n\nWhy"),
)
"""Domain and user turn around a document. Turns of `qa` are unfinished: the target writes the question."""

USER_TOKENS, ANSWER_TOKENS, DOCUMENT_TOKENS, LONGEST = 160, 384, 1400, 2048
SHORT_DOCUMENT = 120
"""Tokens of an answer, at least, to serve as (part of) a document."""
KEPT = 20_000
"""Documents at hand, the latest ones."""


class Writes(Protocol):
    """`faser.serving.writer.Writer`, or whatever else writes."""

    def write(
        self,
        prompts: Sequence[Tokens],
        *,
        max_tokens: Sequence[int],
        temperatures: Sequence[float],
        ends: Sequence[int],
    ) -> list[Tokens]: ...


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Token ids around a user turn, and those that end a turn."""

    before: Tokens
    after: Tokens
    ends: tuple[int, ...]
    encode: Callable[[str], Tokens]

    @classmethod
    def of(cls, tokenizer: Any, ends: Sequence[int]) -> ChatFormat:
        """From a Hugging Face tokenizer; without a chat template a turn ends at a line's end. ends: the model's own."""

        def encode(text: str) -> Tokens:
            return list(tokenizer.encode(text, add_special_tokens=False))

        if not tokenizer.chat_template:
            return cls([], encode("\n"), tuple(ends), encode)
        mark = "<<user turn>>"
        chat = [{"role": "user", "content": mark}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        before, _, after = text.partition(mark)
        closing = encode(after)
        return cls(encode(before), closing, tuple({*ends, closing[0]}), encode)


@dataclass(frozen=True, slots=True)
class Conversations:
    """C conversations, flat: tokens [T] int32 (any vocabulary), length [C], answer [C] first position of the answer,
    domain [C] names."""

    tokens: Ids
    length: Ids
    answer: Ids
    domain: NDArray[np.str_]

    def save(self, path: Path) -> None:
        """Complete or not at all."""
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            np.savez(file, tokens=self.tokens, length=self.length, answer=self.answer, domain=self.domain)
        partial.replace(path)

    @classmethod
    def load(cls, paths: Sequence[Path]) -> Conversations:
        """All of several files. ValueError names one that holds no conversations."""
        parts = [_arrays(path) for path in paths]
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def _arrays(path: Path) -> list[NDArray[Any]]:
    """The arrays of `Conversations` in a file. ValueError: they are not there, or do not fit each other."""
    try:
        with np.load(path) as part:
            tokens, length, answer, domain = (part[name] for name in ("tokens", "length", "answer", "domain"))
        whole = 0 < len(length) == len(answer) == len(domain) and int(length.sum()) == len(tokens)
        if not whole or (answer < 1).any() or (answer > length).any():
            raise ValueError
    except (ValueError, TypeError, KeyError, IndexError, EOFError, zipfile.BadZipFile):
        raise ValueError(f"{path} holds no whole conversations; remove it to make it anew") from None
    return [tokens, length, answer, domain]


@dataclass(slots=True)
class Author:
    """Writes conversations, round after round; documents are kept between rounds."""

    writer: Writes
    chat: ChatFormat
    rng: np.random.Generator
    documents: list[Tokens] = field(default_factory=list)

    def round(self, count: int) -> Conversations:
        """About `count` new conversations. Answers are greedy half of the time: so are many requests of a server."""
        asking = self._opened(count)
        asking += self._reading(count - len(asking))
        asked = [(domain, turn) for domain, turn, _ in asking]
        open_turns = [i for i, (_, _, unfinished) in enumerate(asking) if unfinished]
        written = self.writer.write(
            [self.chat.before + asked[i][1] for i in open_turns],
            max_tokens=[USER_TOKENS] * len(open_turns),
            temperatures=[0.9] * len(open_turns),
            ends=self.chat.ends,
        )
        for i, more in zip(open_turns, written, strict=True):
            asked[i] = (asked[i][0], asked[i][1] + self._unended(more))
        prompts = [self.chat.before + turn + self.chat.after for _, turn in asked]
        answers = self.writer.write(
            prompts,
            max_tokens=[DOCUMENT_TOKENS // 2 if domain == "articles" else ANSWER_TOKENS for domain, _ in asked],
            temperatures=[0.8 * float(self.rng.random() < 0.5) for _ in asked],
            ends=self.chat.ends,
        )
        self._keep(answers)
        whole = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        return Conversations(
            np.concatenate([np.array(tokens, np.int32) for tokens in whole]),
            np.array([len(tokens) for tokens in whole], np.int32),
            np.array([len(prompt) for prompt in prompts], np.int32),
            np.array([domain for domain, _ in asked]),
        )

    def _opened(self, count: int) -> list[tuple[str, Tokens, bool]]:
        """Of `count` user turns those that `OPENERS` has, all while there is no document; see `_reading`."""
        share = 1.0 if self.documents else sum(weight for weight, _ in OPENERS.values())
        turns: list[tuple[str, Tokens, bool]] = []
        for domain, (weight, openers) in OPENERS.items():
            picks = self.rng.integers(0, len(openers), round(count * weight / share))
            turns += [(domain, self.chat.encode(openers[i]) if openers[i] else [], True) for i in picks]
        return turns

    def _reading(self, count: int) -> list[tuple[str, Tokens, bool]]:
        """Domain, user turn, and whether its question is still to be written."""
        turns = []
        for _ in range(count if self.documents else 0):
            document: Tokens = []
            wanted = int(self.rng.integers(SHORT_DOCUMENT, DOCUMENT_TOKENS))
            while len(document) < wanted:
                document += self.documents[self.rng.integers(len(self.documents))] + self.chat.encode("\n\n")
            domain, text = READING[self.rng.integers(len(READING))]
            before, after = text.split("{}")
            turn = self.chat.encode(before) if before else []
            turn = turn + document[:DOCUMENT_TOKENS] + (self.chat.encode(after) if after else [])
            turns.append((domain, turn, domain == "qa"))
        return turns

    def remember(self, conversations: Conversations) -> None:
        """Take documents from the answers of earlier rounds."""
        starts = np.cumsum(conversations.length) - conversations.length
        spans = zip(starts + conversations.answer, starts + conversations.length, strict=True)
        self._keep([conversations.tokens[start:end].tolist() for start, end in spans])

    def _keep(self, answers: list[Tokens]) -> None:
        fresh = [self._unended(answer) for answer in answers if len(answer) >= SHORT_DOCUMENT]
        self.documents = (self.documents + fresh)[-KEPT:]

    def _unended(self, tokens: Tokens) -> Tokens:
        return tokens[:-1] if tokens and tokens[-1] in self.chat.ends else tokens
