"""Asynchronous scheduling: texts and accepted counts are those of the tape, whichever steps are waited for.

vLLM schedules asynchronously on GPUs only; here a CPU is made to, in a process of its own. That shows what is counted,
sent and read, and in which order; no race of a device with its host, and no time.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from faser.models import Pair
from faser.tapes import Tape, load_tape

REQUESTS, LONGEST, ABORTED = 16, 100, 9
WAITS: dict[str, Callable[[random.Random], bool]] = {
    "never": lambda _: False,
    "always": lambda _: True,
    "at random": lambda rng: rng.random() < 0.5,
}
WORTH = "where it is worth it"
"""As a server does."""


def chosen(tape: Tape) -> list[int]:
    """Greedy requests: drafting is greedy as well, so nothing is left to chance."""
    greedy = np.flatnonzero((tape.temperature == 0) & (tape.max_tokens <= LONGEST) & (tape.prompt_tokens <= 400))
    return [int(row) for row in np.random.default_rng(0).permutation(greedy)[:REQUESTS]]


def engine_of(target: str, draft: str, log: str, *, kv_tokens: int | None, budget: int | None) -> Any:
    """An engine in this process that schedules asynchronously. kv_tokens, budget: of its KV cache and a step, about."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.platforms.cpu import CpuPlatform

    from faser.controller import ControllerConfig
    from faser.serving import serve
    from faser.serving.offline import OfflineEngine
    from faser.serving.settings import Settings

    own = CpuPlatform.check_and_update_config

    def check(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        own(config)
        config.scheduler_config.async_scheduling = wanted

    patch.object(CpuPlatform, "check_and_update_config", staticmethod(check)).start()
    if kv_tokens is not None:
        serve.CPU_DEFAULTS |= {"kv_cache_memory_bytes": kv_tokens * KV_BYTES, "max_model_len": 512}
    settings = Settings(
        policy="static:0", profile="cpu-smollm2", log=log, controller=ControllerConfig(deadline_ms=1000)
    )
    return OfflineEngine(
        target, draft, settings, max_batch=REQUESTS, asynchronous=True, dtype="float32", max_batched_tokens=budget
    )


KV_BYTES = 52_000
"""Of a token, of the target and its draft in float32, about."""


def made_to_wait(waits: str, rng: random.Random) -> AbstractContextManager[Any]:
    """While open, a server waits for steps as WAITS has it."""
    from faser.serving.loop import SpeculationLoop

    if waits == WORTH:
        return nullcontext()
    ask = WAITS[waits]
    return patch.object(SpeculationLoop, "waits", lambda _, _requests, depth, _prompts: bool(depth and ask(rng)))


def stop_of(text: Sequence[int]) -> int:
    """A token in the middle of `text`, which may be in it before."""
    return text[len(text) // 2]


def serve_rows(
    target: str, draft: str, log: str, rounds: Sequence[tuple[str, str]], *, rough: bool = False, **room: int | None
) -> tuple[list[dict[int, list[int]]], int, int]:
    """What each round of (policy, key of WAITS or WORTH) wrote to `chosen`; preemptions; blocks not free at the end.

    rough: of three requests one ends at `stop_of` its text, and one is aborted at step ABORTED.
    """
    from faser.costs import load_profile
    from faser.policies import make_policy

    tape = load_tape("smollm2")
    engine = engine_of(target, draft, log, **room)
    core = engine._engine.engine_core.engine_core
    scheduler, preempted, texts, rng = core.scheduler, [], [], random.Random(0)
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *args, **kwargs: (preempted.append(args), preempt(*args, **kwargs))
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    for i, (policy, waits) in enumerate(rounds):
        scheduler.faser.controller.swap(make_policy(policy, load_profile("cpu-smollm2")), policy)
        written: dict[int, list[int]] = defaultdict(list)
        aborted, steps = [], 0
        for kind, row in zip(cycle(("whole", "stops", "aborted")), chosen(tape), strict=False):
            prompt, text = tape.text(row)
            until = [stop_of(text)] if rough and kind == "stops" else []
            name = engine.add(prompt, len(text), name=f"{i}-{row}-", until=until)
            aborted += [name] if rough and kind == "aborted" else []
        with made_to_wait(waits, rng):
            while engine.busy:
                for output in engine.outputs():
                    written[int(output.request_id.split("-")[1])] += output.outputs[0].token_ids
                steps += 1
                if steps == ABORTED:
                    engine._engine.abort_request(aborted)
                    engine._running.difference_update(aborted)
        texts.append(dict(written))
    while core.batch_queue or scheduler.has_requests():
        core.step_fn()
    taken = free - scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert not scheduler._flying
    assert not scheduler.faser.tracked
    engine.close()
    return texts, len(preempted), taken


def elsewhere(**arguments: Any) -> tuple[list[dict[int, list[int]]], int, int]:
    """`serve_rows` in a new process."""
    asked = [sys.executable, __file__, json.dumps(arguments)]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    texts, preempted, taken = json.loads(done.stdout.splitlines()[-1])
    return [{int(row): text for row, text in each.items()} for each in texts], preempted, taken


def accepted_otherwise(steps: Sequence[dict[str, Any]], tape: Tape) -> list[str]:
    """Where a log and the tape differ. A request may have rows beyond its end: it ended in the step before."""
    faults, reached = [], defaultdict(lambda: 1)
    for step in steps:
        for name, length, accepted in zip(step["request"], step["verified"], step["accepted"], strict=True):
            row, at = int(name.split("-")[1]), reached[name]
            left = int(tape.output_tokens[row]) - at
            if left > 0:
                expected = min(int(tape.run_lengths[tape.offsets[row] + at]), length)
                if min(accepted, left) != expected:
                    faults.append(f"{name}, token {at}: {accepted} of {length} accepted; {expected} on the tape")
                reached[name] = at + min(accepted + 1, left)
    return faults


ROUNDS = [("random:1", "never"), ("random:2", "always"), ("probe:12:0", "at random")]
CROWDED = [("random:3", "at random"), ("goodput", WORTH)]


@pytest.mark.server
@pytest.mark.parametrize(
    ("room", "rounds"), [({"kv_tokens": None, "budget": None}, ROUNDS), ({"kv_tokens": 1200, "budget": 96}, CROWDED)]
)
def test_texts_and_accepted_counts_are_the_tapes(
    models: Pair, tmp_path: Path, room: dict[str, int | None], rounds: list[tuple[str, str]]
) -> None:
    """`random` has every length beside every other; `probe` goes without drafting for long, then drafts again. With
    little room requests give way to each other, and prompts come in pieces.
    """
    tape, log = load_tape("smollm2"), tmp_path / "steps.jsonl"
    pair = {"target": str(models.target), "draft": str(models.draft)}
    texts, preempted, taken = elsewhere(**pair, log=str(log), rounds=rounds, **room)
    assert texts == [{row: tape.text(row)[1] for row in chosen(tape)}] * len(rounds)
    assert taken == 0
    assert (preempted > 0) == (room["kv_tokens"] is not None)
    steps = [line for line in map(json.loads, log.read_text().splitlines()) if line["kind"] == "step"]
    assert {length for step in steps for length in step["verified"]} == {*range(8)}
    if not preempted:  # who comes back has lost what was drafted for it
        assert accepted_otherwise(steps, tape) == []


@pytest.mark.server
def test_who_stops_or_is_aborted_while_a_step_is_under_way_leaves_others_and_memory_alone(
    models: Pair, tmp_path: Path
) -> None:
    tape, log = load_tape("smollm2"), str(tmp_path / "steps.jsonl")
    pair = {"target": str(models.target), "draft": str(models.draft)}
    rounds = [("random:4", "never"), ("random:5", "at random")]
    texts, _, taken = elsewhere(**pair, log=log, rounds=rounds, rough=True, kv_tokens=None, budget=None)
    assert taken == 0
    for written in texts:
        for kind, row in zip(cycle(("whole", "stops", "aborted")), chosen(tape), strict=False):
            have, text = written.get(row, []), tape.text(row)[1]
            if kind == "stops":
                text = text[: text.index(stop_of(text)) + 1]
            assert have == (text[: len(have)] if kind == "aborted" else text), (kind, row)


def test_what_two_steps_brought_goes_to_each_client_at_once() -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    from faser.serving import compat

    def brought(*requests: str) -> EngineCoreOutputs:
        outputs = [EngineCoreOutput(request_id=r, new_token_ids=[1]) for r in requests]
        return EngineCoreOutputs(outputs=outputs, finished_requests={*requests})

    settled = {0: brought("a")}
    for client, later in {0: brought("b"), 1: brought("c")}.items():
        compat.merge(settled, client, later)
    assert {c: [o.request_id for o in outs.outputs] for c, outs in settled.items()} == {0: ["a", "b"], 1: ["c"]}
    assert {c: outs.finished_requests for c, outs in settled.items()} == {0: {"a", "b"}, 1: {"c"}}


if __name__ == "__main__":
    print(json.dumps(serve_rows(**json.loads(sys.argv[1]))))
