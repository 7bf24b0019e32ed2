"""A stock OpenAI client against a server that speculates with random lengths; and no request leaves state behind."""

import json
import time
from collections.abc import Iterator

import openai
import pytest

from faser.bench.server import Server

pytestmark = pytest.mark.server

COUNT = [{"role": "user", "content": "Count from one to twenty in words."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # float32: in bfloat16 the lengths of a step change the rounding. The deadline: on a busy machine too.
    with Server(["--policy", "random:5", "--dtype", "float32", "--faser-deadline-ms", "1000"]) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120) as opened:
        yield opened


def tracked(server: Server) -> float:
    return server.metrics("faser:").total("faser:tracked_requests")


def test_a_chat_completion(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="smollm2", messages=COUNT, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    assert reply.choices[0].message.content
    assert reply.usage is not None
    assert reply.usage.completion_tokens <= 40


def test_a_completion_and_its_stream_are_the_same_text(client: openai.OpenAI) -> None:
    ask = {"model": "smollm2", "prompt": "The sky is", "temperature": 0, "max_tokens": 30}
    whole = client.completions.create(**ask).choices[0].text  # type: ignore[call-overload]
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True)]  # type: ignore[call-overload]
    assert "".join(pieces) == whole
    assert len(pieces) > 3


def test_a_stop_string_ends_the_text_before_it_and_its_logprobs_with_it(client: openai.OpenAI) -> None:
    ask = {"model": "smollm2", "prompt": "1, 2, 3, 4, 5, 6,", "temperature": 0, "max_tokens": 60, "logprobs": 1}
    free = client.completions.create(**ask).choices[0]  # type: ignore[call-overload]
    stop = free.text[10:14]
    choice = client.completions.create(**ask, stop=[stop]).choices[0]  # type: ignore[call-overload]
    assert choice.finish_reason == "stop"
    assert choice.text == free.text[: free.text.index(stop)]
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) < len(free.logprobs.tokens)


def test_logprobs_are_those_of_the_emitted_tokens(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2",
        messages=COUNT,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=24,
        logprobs=True,
        top_logprobs=2,
    )
    assert reply.usage is not None
    content = reply.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert len(content) == reply.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0
        assert token.logprob == pytest.approx(max(t.logprob for t in token.top_logprobs), abs=1e-3)  # greedy
        assert token.token in {t.token for t in token.top_logprobs}


def test_two_choices_and_a_seed(client: openai.OpenAI) -> None:
    ask = {"model": "smollm2", "messages": COUNT, "temperature": 1.0, "max_tokens": 24, "n": 2, "seed": 7}
    first, second = (client.chat.completions.create(**ask) for _ in range(2))  # type: ignore[call-overload]
    assert len(first.choices) == len(second.choices) == 2
    assert all(choice.message.content for choice in first.choices)
    assert first.choices[0].message.content != first.choices[1].message.content


def test_a_json_schema_request_follows_its_schema(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Give me a person as JSON with a name and an age."}],
        temperature=0,
        max_tokens=80,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
    )
    person = json.loads(reply.choices[0].message.content or "")
    assert isinstance(person["name"], str)
    assert isinstance(person["age"], int)
    assert set(person) == {"name", "age"}


def test_exactly_min_tokens_when_the_stop_is_at_once(client: openai.OpenAI) -> None:
    ask = {"model": "smollm2", "prompt": "Say hi.", "temperature": 0, "max_tokens": 30}
    reply = client.completions.create(**ask, extra_body={"min_tokens": 20})  # type: ignore[call-overload]
    assert 20 <= reply.usage.completion_tokens <= 30


def test_penalties_and_bad_words_are_served(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="smollm2",
        prompt="The cat sat on the mat. The cat",
        temperature=0,
        max_tokens=30,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        extra_body={"bad_words": [" cat"]},
    )
    assert " cat" not in reply.choices[0].text


@pytest.mark.parametrize("body", [{"logit_bias": {"100": 5}}, {"extra_body": {"min_p": 0.1}}])
def test_what_vllm_cannot_do_while_speculating_is_refused_not_ignored(
    client: openai.OpenAI, body: dict[str, object]
) -> None:
    with pytest.raises(openai.BadRequestError, match="speculative decoding"):
        client.completions.create(model="smollm2", prompt="Hello", max_tokens=4, **body)  # type: ignore[call-overload]


def test_an_abort_in_mid_stream_leaves_no_state_behind(server: Server, client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=COUNT,  # type: ignore[arg-type]
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    for seen, _ in enumerate(stream):
        if seen == 5:
            break
    assert tracked(server) == 1
    stream.close()  # type: ignore[union-attr]  # a Stream, since stream=True
    for _ in range(100):
        if tracked(server) == 0:
            break
        time.sleep(0.1)
    assert tracked(server) == 0


def test_counts_add_up_and_the_policy_never_failed(server: Server, client: openai.OpenAI) -> None:
    before = server.metrics("faser:")
    ask = {"model": "smollm2", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 50}
    reply = client.completions.create(**ask, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
    assert reply.usage.completion_tokens == 50
    client.completions.create(**{**ask, "max_tokens": 1})  # type: ignore[call-overload]  # ends the last step's accounting
    counts = server.metrics("faser:") - before
    lengths = counts.by("faser:verify_length_total", "length")
    assert sum(int(k) * n for k, n in lengths.items()) == counts.total("faser:verified_tokens_total")
    steps = sum(lengths.values())  # one request: as many request-steps as steps, those with length 0 included
    assert steps == counts.total("faser:steps_total")
    emitted = steps + counts.total("faser:accepted_tokens_total")
    assert 49 <= emitted <= 49 + 7  # the first token is the prefill's; the last step may overshoot
    assert counts.total("faser:drafted_tokens_total") >= counts.total("faser:verified_tokens_total")
    assert server.metrics("faser:").total("faser:fallbacks_total") == 0
