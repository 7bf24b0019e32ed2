"""Faults of policies, of requests and of their clients, against a real server: no request suffers from another's."""

from __future__ import annotations

import asyncio
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from faser import cli
from faser.bench.client import Reply, own_connections, replay
from faser.bench.server import Server
from faser.checkpoints import SHIPPED_POLICY
from faser.costs import load_profile
from faser.models import Pair
from faser.policies.schedule import Schedule
from faser.tapes import load_tape

pytestmark = pytest.mark.server

HERE = Path(__file__).parent
KEY = "an-admin-key-of-a-test"
PROMPTS = [f"Write a short story about the number {i}." for i in range(8)]
BENCH_AFTER = 5
BUDGET = 96
"""Rows of a step at most: prompts come in pieces."""
STORY = {"model": "smollm2", "prompt": "Once upon a time there was a cat.", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    shutil.copy(SHIPPED_POLICY, folder / "shipped.pt")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    # float32: in bfloat16 the lengths of a step change the rounding.
    flags = ["--policy", "static:2", "--dtype", "float32", "--faser-fallback-length", "1", "--faser-deadline-ms", "250"]
    flags += ["--faser-bench-after", str(BENCH_AFTER), "--policy-dir", str(folder)]
    flags += ["--faser-log", str(folder / "log.jsonl"), "--faser-log-prompts"]
    flags += ["--max-num-batched-tokens", str(BUDGET)]
    env = {"FASER_ADMIN_KEY": KEY, "PYTHONPATH": str(HERE)}
    command = (sys.executable, str(HERE / "faulty_server.py"), "serve")
    with Server(flags, env=env, command=command) as running:
        yield running


def admin(server: Server, method: str, route: str, **kwargs: Any) -> Any:
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = httpx.request(
        method, f"{server.url}/faser/{route}", headers=headers, timeout=60, trust_env=False, **kwargs
    )
    return answer.json()


def swap(server: Server, policy: str) -> None:
    assert "engines" in admin(server, "POST", "policy", json={"policy": policy})


def status(server: Server) -> dict[str, Any]:
    (engine,) = admin(server, "GET", "policy")["engines"]
    return dict(engine)


def texts(server: Server) -> list[str]:
    replies: list[Reply] = asyncio.run(replay(server.url, PROMPTS, concurrency=len(PROMPTS), max_tokens=16))
    return [reply.text for reply in replies]


@pytest.fixture(scope="module")
def expected(server: Server) -> list[str]:
    return texts(server)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raises", "raised"),
        ("nothing", "raised"),
        ("exits", "deadline"),
        ("hangs", "deadline"),
        ("nan", "nan"),
        ("negative", "range"),
        ("too-long", "range"),
        ("too-deep", "range"),
        ("too-many", "shape"),
        ("square", "shape"),
    ],
)
def test_a_faulty_policy_fails_no_request_is_counted_by_reason_and_benched(
    server: Server, expected: list[str], kind: str, reason: str
) -> None:
    before = server.metrics("faser:")
    swap(server, f"faulty:{kind}")
    assert texts(server) == expected
    assert status(server)["benched"] is True
    counts = (server.metrics("faser:") - before).by("faser:fallbacks_total", "reason")
    assert {name for name, count in counts.items() if count} == {reason, "benched"}
    assert counts[reason] == BENCH_AFTER
    swap(server, "static:2")  # whatever the last one's thread does
    before = server.metrics("faser:")
    assert texts(server) == expected
    assert (server.metrics("faser:") - before).total("faser:decisions_total") > 5


def engine(server: Server) -> int:
    """The process that runs the engine's loop."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
        if "EngineCor" in name and int(fields.split()[2]) == server.pid:
            return int(stat.parent.name)
    raise AssertionError("no engine in the server's process group")


def resident_mb(process: int) -> float:
    (line,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1024


def test_what_a_leaking_policy_has_taken_comes_back_when_it_is_swapped_out(server: Server, expected: list[str]) -> None:
    process = engine(server)
    swap(server, "faulty:leaks")
    before = resident_mb(process)
    for _ in range(4):
        assert texts(server) == expected
    leaked = resident_mb(process) - before
    steps = status(server)["decisions"]
    assert leaked > 20, steps
    swap(server, "static:2")
    assert texts(server) == expected
    assert resident_mb(process) - before < leaked / 2


def test_two_hundred_swaps_leave_no_thread_behind(server: Server) -> None:
    tasks = Path(f"/proc/{engine(server)}/task")
    before = len([*tasks.iterdir()])
    for i in range(200):
        swap(server, f"static:{i % 8}")
    for _ in range(100):
        if len([*tasks.iterdir()]) <= before:
            break
        time.sleep(0.1)
    assert len([*tasks.iterdir()]) <= before


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Of the log; the last ones may be on their way."""
    time.sleep(0.5)
    every = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in every if line["kind"] == kind]


def post(server: Server, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}/v1/completions", json={**STORY, **body}, timeout=120, trust_env=False)
    return answer.raise_for_status().json()["choices"][0]


RULES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 0.5},
    "frequency": {"frequency_penalty": 0.5},
    "repetition": {"repetition_penalty": 1.2},
    "bad-words": {"bad_words": [" cat"]},
    "allowed": {"allowed_token_ids": [*range(1000, 3000)]},
    "min-tokens": {"min_tokens": 5},
    "grammar": {"structured_outputs": {"regex": "[a-z ]{10,20}"}},
}


def asked(folder: Path) -> dict[str, dict[str, Any]]:
    """Lines of requests by the id that their client gave."""
    return {
        re.sub(r"-0(-[0-9a-f]+)?$", "", line["request"]).removeprefix("cmpl-"): line
        for line in lines(folder, "request")
    }


@pytest.fixture(scope="module")
def free(server: Server) -> dict[str, dict[str, Any]]:
    """Answers to requests under no rules, the last one sampled, while lengths were random."""
    swap(server, "random:3")
    ask = {"return_token_ids": True, "ignore_eos": True}
    made = {f"free-{i}": post(server, request_id=f"free-{i}", max_tokens=20 + 5 * i, **ask) for i in range(4)}
    made["free-4"] = post(server, request_id="free-4", temperature=0.8, top_p=0.9, **ask)
    return made


@pytest.mark.parametrize("name", RULES)
def test_a_request_under_rules_of_its_own_is_served_and_excluded(server: Server, folder: Path, name: str) -> None:
    swap(server, "random:3")
    assert post(server, request_id=f"ruled-{name}", **RULES[name])["text"]
    line = asked(folder)[f"ruled-{name}"]
    assert line["excluded"] is True
    assert "prompt_ids" not in line
    assert line["verified"] > 0  # it is speculated for like any other


def test_a_tape_of_the_log_is_what_was_answered_and_accepted(
    free: dict[str, dict[str, Any]], folder: Path, models: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = asked(folder)
    for name, choice in free.items():
        assert known[name]["excluded"] is False
        assert known[name]["prompt_ids"] == choice["prompt_token_ids"]
        assert known[name]["output_ids"] == choice["token_ids"]
    log, out = tmp_path / "log.jsonl", tmp_path / "t.tape"
    log.write_text("".join(json.dumps(known[name]) + "\n" for name in free))
    given = ["--target", str(models.target), "--draft", str(models.draft), "--from-log", str(log), "--out", str(out)]
    assert cli.main(["record", *given]) == 0
    assert "5 requests" in capsys.readouterr().err
    tape = load_tape(out)
    assert [tape.text(i)[1] for i in range(5)] == [choice["token_ids"] for choice in free.values()]
    assert tape.temperature.tolist() == pytest.approx([0, 0, 0, 0, 0.8])
    rows, judged = {known[name]["request"]: i for i, name in enumerate(free)}, 0
    for step in lines(folder, "step"):
        per_request = (step[name] for name in ("request", "generated", "verified", "accepted"))
        for request, at, verified, accepted in zip(*per_request, strict=True):
            if (row := rows.get(request)) is not None and not tape.temperature[row]:
                left = int(tape.output_tokens[row]) - at
                run = int(tape.run_lengths[tape.offsets[row] + at])
                assert min(accepted, left) == min(run, verified, left)
                judged += verified
    assert judged > 50


def test_no_token_is_drafted_at_depth_0_and_drafts_are_as_good_as_before_when_it_is_over(server: Server) -> None:
    """The draft's cache is behind by then; a draft that did not catch up would have nearly nothing accepted."""

    def rate() -> float:
        before = server.metrics("faser:")
        texts(server)
        counts = server.metrics("faser:") - before
        return counts.total("faser:accepted_tokens_total") / max(counts.total("faser:verified_tokens_total"), 1)

    swap(server, "static:1")
    usual = rate()
    assert usual > 0.3
    body = {**STORY, "max_tokens": 120, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120, trust_env=False) as long:
        pieces = long.iter_lines()
        swap(server, "static:0")
        for _ in range(40):
            next(pieces)
        idle = server.metrics("faser:")
        for _ in range(40):
            next(pieces)
        assert (server.metrics("faser:") - idle).total("faser:drafted_tokens_total") == 0
        swap(server, "static:1")
        before = server.metrics("faser:")
        for _ in pieces:
            pass
    counts = server.metrics("faser:") - before
    assert counts.total("faser:verified_tokens_total") > 5
    late = counts.total("faser:accepted_tokens_total") / counts.total("faser:verified_tokens_total")
    assert late > usual / 2


def test_prompts_in_pieces_beside_ragged_drafts_alter_no_token(server: Server) -> None:
    """Prompts of several pieces and decoding requests share steps: a placeholder that reached the model would show."""
    prompts = [" ".join(f"{word} {i}" for i in range(40 * (n % 3 + 1))) for n, word in enumerate("abcdefgh")]
    swap(server, "static:0")
    alone = [post(server, prompt=prompt)["text"] for prompt in prompts]
    swap(server, "random:7")

    async def together() -> list[str]:
        async with own_connections(server.url) as client:

            async def one(n: int) -> str:
                await asyncio.sleep(0.15 * n)
                body = {**STORY, "prompt": prompts[n]}
                answer = await client.post("/v1/completions", json=body)
                return str(answer.raise_for_status().json()["choices"][0]["text"])

            return list(await asyncio.gather(*map(one, range(len(prompts)))))

    assert asyncio.run(together()) == alone


def test_a_seed_of_a_request_whose_prompt_comes_in_pieces_ends_no_engine_and_holds(server: Server) -> None:
    """What is drawn before its prompt is read is undone."""
    swap(server, "static:0")
    ask = {"prompt": " ".join(f"seed {i}" for i in range(100)), "temperature": 1.0, "seed": 7}
    in_pieces = post(server, **ask)["text"]
    assert post(server, **ask)["text"] == in_pieces  # now it is in the prefix cache but for its last piece


async def answered(server: Server, bodies: Sequence[dict[str, Any]], at_once: int) -> None:
    """All `bodies` as completions of `max_tokens`, at most so many at once."""
    gate = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        async with gate:
            answer = await client.post("/v1/completions", json={**STORY, "ignore_eos": True, **body})
        answer.raise_for_status()

    async with own_connections(server.url) as client:
        await asyncio.gather(*(one(client, body) for body in bodies))


def steps(server: Server, folder: Path, policy: str, load: Coroutine[Any, Any, None]) -> list[dict[str, Any]]:
    """What the log has of the steps that `policy` decided under `load`."""
    swap(server, policy)
    since = time.time()
    asyncio.run(load)
    return [step for step in lines(folder, "step") if step["t"] >= since and step["decided"]]


def changes(values: Sequence[int]) -> int:
    return sum(a != b for a, b in pairwise(values))


def unlike(count: int) -> list[dict[str, Any]]:
    """Requests of unlike lengths: some come and go all the time."""
    return [{"prompt": PROMPTS[i % 8], "max_tokens": 5 + 7 * i % 29} for i in range(count)]


TABLE = Schedule.from_cost(load_profile("cpu-smollm2")).table
EDGE = TABLE.index(0)
"""The smallest batch for which the best table of batch sizes drafts nothing."""


@pytest.mark.parametrize("policy", ["ema", "goodput", "shipped.pt"])
def test_depths_do_not_flip_where_those_of_a_table_would_with_each_request_that_comes_or_goes(
    server: Server, folder: Path, policy: str
) -> None:
    seen = steps(server, folder, policy, answered(server, unlike(40), at_once=EDGE + 1))
    hovers = [step for step in seen if abs(step["running"] - EDGE) < 4]
    of_table = changes([TABLE[step["running"]] for step in hovers])
    assert of_table > 5
    assert changes([step["depth"] for step in hovers]) < of_table / 2


def test_depths_that_hover_where_drafting_just_pays_make_no_draft_worse(server: Server, folder: Path) -> None:
    """There they go to 0 and back every few steps, and each time the draft's cache has to catch up."""

    async def load() -> None:
        for at_once in (6, 7, 8):
            await answered(server, unlike(2 * at_once), at_once)

    def good(seen: Sequence[dict[str, Any]]) -> float:
        """The share of drafts whose first token was accepted."""
        judged = [a > 0 for s in seen for v, a in zip(s["verified"], s["accepted"], strict=True) if v]
        return sum(judged) / len(judged)

    steady = steps(server, folder, "static:1", load())
    hovers = steps(server, folder, "shipped.pt", load())
    depths = [step["depth"] for step in hovers]
    assert 5 < changes(depths) < len(depths) / 3
    assert good(hovers) > good(steady) - 0.1


def test_hysteresis_keeps_a_tier_from_flipping_where_acceptance_hovers_at_a_threshold(
    server: Server, folder: Path
) -> None:
    def flips(policy: str) -> int:
        bodies = [{"prompt": prompt, "temperature": 0.6, "max_tokens": 40} for prompt in PROMPTS[:6]]
        return changes([step["depth"] for step in steps(server, folder, policy, answered(server, bodies, at_once=2))])

    assert flips("ema:0.02:0.02") > 2 * flips("ema")


@pytest.mark.parametrize("policy", ["goodput", "shipped.pt"])
def test_speculation_stops_for_a_long_prompt_with_hopeless_drafts_but_not_for_easy_requests_beside_it(
    server: Server, folder: Path, policy: str
) -> None:
    """A prompt of noise, as long as this server takes; it goes on when the easy ones are over. What is drafted is
    drafted for all: beside two such prompts, what one easy request gains would just be lost here.
    """
    rng = random.Random(0)
    noise = [rng.randrange(1000, 49000) for _ in range(1900)]
    swap(server, "static:2")  # an ordinary past: it is what newcomers are thought to accept
    asyncio.run(answered(server, [{"prompt": prompt, "max_tokens": 50} for prompt in PROMPTS], at_once=4))
    hopeless = {"prompt": noise, "temperature": 1.0, "max_tokens": 80, "request_id": f"hopeless-{policy}"}
    counting = {first: ", ".join(map(str, range(first, first + 19))) for first in (1, 40)}
    easy = [{"prompt": p, "max_tokens": 60, "request_id": f"easy-{policy}-{first}"} for first, p in counting.items()]

    async def load() -> None:
        await answered(server, [{**hopeless, "max_tokens": 1}], 1)  # then all three begin together
        await answered(server, [hopeless, *easy], 3)

    seen, counts = steps(server, folder, policy, load()), {kind: np.zeros(3) for kind in ("hopeless", "easy", "beside")}
    last = max(i for i, step in enumerate(seen) if any("easy" in request for request in step["request"]))
    for i, step in enumerate(seen):
        for request, *judged in zip(step["request"], step["verified"], step["accepted"], strict=True):
            kind = "easy" if "easy" in request else "hopeless"
            counts[kind] += (1, *judged)
            counts["beside"] += (kind == "hopeless" and i <= last) * np.array((1, *judged))
    rows, verified, accepted = counts["easy"]
    assert verified > 0.5 * rows
    assert accepted > 0.7 * verified
    assert counts["hopeless"][1] < 0.4 * counts["hopeless"][0]
    assert counts["beside"][1] / counts["beside"][0] < 0.8 * verified / rows
    assert sum(step["depth"] > 0 for step in seen[last + 10 :]) < 5


@pytest.mark.parametrize("policy", ["none", "shipped.pt"])
def test_a_busy_server_hardly_speculates_and_no_prompt_waits_for_drafts(
    server: Server, folder: Path, policy: str
) -> None:
    """Prompts get what decoding leaves of a step, where a request takes a row and vLLM keeps one more for a draft."""
    bodies = [{"prompt": f"{policy} {i} " * (10 + i % 5), "max_tokens": 24 + 6 * (i % 3)} for i in range(48)]
    seen = steps(server, folder, policy, answered(server, bodies, at_once=24))
    busy = [step for step in seen if step["running"] > EDGE]
    assert len(busy) > 20
    assert sum(sum(step["verified"]) for step in busy) <= 0.05 * sum(step["running"] for step in busy)
    assert all(step["prefill"] for step in seen if step["waiting"])
    full = [step for step, after in pairwise(busy) if step["waiting"] and after["waiting"] > step["waiting"] / 2]
    assert len(full) > 5
    assert all(step["prefill"] + 2 * step["running"] > 0.85 * BUDGET for step in full)


REQUESTS = 400


def test_of_many_requests_and_aborts_nothing_is_left(server: Server, expected: list[str]) -> None:
    """Every fourth client goes away in mid-stream; some before the first token."""
    swap(server, "static:2")
    process = engine(server)

    async def storm(count: int) -> None:
        gate = asyncio.Semaphore(24)

        async def one(client: httpx.AsyncClient, n: int) -> None:
            body = {**STORY, "prompt": f"{n} and", "max_tokens": 400 if n % 4 == 0 else 4, "stream": True}
            body["ignore_eos"] = True
            async with gate, client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                if n % 4:
                    async for _ in answer.aiter_lines():
                        pass
                elif n % 8:
                    await anext(answer.aiter_lines())

        async with own_connections(server.url) as client:
            await asyncio.gather(*(one(client, n) for n in range(count)))

    asyncio.run(storm(REQUESTS // 2))
    before = resident_mb(process)
    asyncio.run(storm(REQUESTS // 2))
    for _ in range(100):
        if server.metrics("faser:").total("faser:tracked_requests") == 0:
            break
        time.sleep(0.1)
    assert server.metrics("faser:").total("faser:tracked_requests") == 0
    assert server.metrics("vllm:num_requests").total("vllm:num_requests_running") == 0
    assert resident_mb(process) - before < 50
    statuses = [line["status"] for line in lines(folder_of(server), "request")[-REQUESTS:]]
    assert statuses.count("abort") > REQUESTS / 8
    assert texts(server) == expected


def folder_of(server: Server) -> Path:
    return Path(server.arguments[server.arguments.index("--faser-log") + 1]).parent


NASTY = 45


def test_the_nastiest_policy_files_are_refused_and_cost_a_server_nothing(
    server: Server,
    folder: Path,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = [sys.executable, str(HERE / "test_policy_file_mutations.py"), str(folder), str(NASTY)]
    subprocess.run(script, check=True)
    monkeypatch.setenv("FASER_ADMIN_KEY", KEY)
    swap(server, "static:2")
    process = engine(server)
    Path(f"/proc/{process}/clear_refs").write_text("5")  # its peak starts anew
    before = resident_mb(process)
    refused = 0
    for n in range(NASTY):
        capsys.readouterr()
        if cli.main(["policy", "swap", f"nasty-{n}.pt", "--url", server.url]) == 0:
            assert "engine 0: nasty" in capsys.readouterr().out  # damage that no policy notices
            swap(server, "static:2")
            continue
        refused += 1
        said = capsys.readouterr().err
        assert said.startswith("faser policy: ")
        assert said.count("\n") == 1
        assert status(server)["policy"] == "static:2"
    assert refused > NASTY / 2
    (peak,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("VmHWM")]
    assert int(peak.split()[1]) / 1024 - before < 256
    assert texts(server) == expected
