"""Pruning and frontiers, by hand: who leaves when, what is kept all the same, and what time it takes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from faser.core import MAX_DEPTH, Capabilities, Decision, Observation
from faser.costs import Curve, StepCost
from faser.envs.effects import HIDDEN, Pruner, Pruning, ahead_ms
from faser.envs.simulator import Simulator, replay
from faser.envs.trace import Trace
from faser.tapes import Tape

WIDTHS = {"hidden": 4, "layers": 10, "heads": 1, "kv_heads": 1, "head_dim": 1, "intermediate": 1, "vocabulary": 70}
"""Head 280, layers 40 x (4 + 3) = 280: the head is half of what a step reads."""
COST = StepCost(
    name="test",
    device="none",
    source="made up",
    verify=Curve((1.0, 100.0), (1.0, 100.0)),
    draft=Curve((1.0,), (2.0,)),
    measured={"target": WIDTHS},
)
RULE = Pruning(layer=1, rank=9)


def tape_of(match: str, suspect: str) -> Tape:
    """One request; `suspect` has a 1 where an early layer ranks the draft's first token over the rule's."""
    bits, odd = (np.array([b == "1" for b in text], np.bool_) for text in (match, suspect))
    return Tape(
        domains=("d",),
        domain=np.zeros(1, np.uint8),
        prompt_tokens=np.array([10], np.int32),
        output_tokens=np.array([len(match)], np.int32),
        max_tokens=np.array([64], np.int32),
        match=bits,
        confidence=np.full((len(match), MAX_DEPTH), 200, np.uint8),
        rank=np.where(odd, 10, 9).astype(np.uint8)[:, None],
        layers=(1,),
        source="by hand",
    )


def first_steps(
    tape: Tape, length: int, *, pruning: Pruning | None = RULE, frontier: int = 0
) -> list[tuple[int, float]]:
    """Tokens and ms of the two steps after the prompt's, which drafts `length`."""
    simulator = Simulator(tape, COST, slots=1, pruning=pruning)
    simulator.start(Trace(np.zeros(1), np.zeros(1, np.int64)))
    simulator.step(Decision(np.zeros(0, np.int64), length))
    steps = [simulator.step(Decision(np.array([length]), length, frontier)) for _ in range(2)]
    return [(step.tokens, step.outcome.seconds * 1e3) for step in steps]


def ms(rows: int, left: int, drafted: int, depth: int) -> float:
    """One of ten layers for all rows, nine for those that are left, the early look, and the drafts."""
    return 0.1 * rows + 0.9 * left + 0.5 * drafted + 2.0 * depth


def test_what_follows_a_suspect_leaves_and_a_wrong_suspect_costs_no_token() -> None:
    (tokens, took), _ = first_steps(tape_of("0110111111", "0001000000"), 4)  # positions 1, 2 right, 3 wrong
    assert (tokens, took) == (3, pytest.approx(ms(5, 3, 4, 4)))


def test_a_right_suspect_is_kept_without_a_further_token_and_the_request_goes_on_from_it() -> None:
    (tokens, took), (more, _) = first_steps(tape_of("0111111111", "0010000000"), 4)
    assert (tokens, took) == (2, pytest.approx(ms(5, 2, 4, 4)))  # positions 1 and 2
    assert more == 5  # 3 to 6, and the target's 7


def test_nothing_leaves_past_the_first_mismatch_where_nothing_was_recorded() -> None:
    (tokens, took), _ = first_steps(tape_of("0100111111", "0001000000"), 4)  # position 2 is wrong, but trusted
    assert (tokens, took) == (2, pytest.approx(ms(5, 5, 4, 4)))


def test_without_suspects_only_the_look_is_paid_for() -> None:
    tape = tape_of("0111111111", "0000000000")
    pruned, plain = first_steps(tape, 3), first_steps(tape, 3, pruning=None)
    assert [tokens for tokens, _ in pruned] == [tokens for tokens, _ in plain] == [4, 4]
    assert [a - b for (_, a), (_, b) in zip(pruned, plain, strict=True)] == pytest.approx([1.5, 1.5])


def test_a_frontier_hides_drafts_if_all_was_right_and_costs_otherwise() -> None:
    hidden = float(HIDDEN(1))
    tape = tape_of("0111101111", "0000000000")  # first 3 right and the next too; then position 5 is wrong
    plain, ahead = (first_steps(tape, 3, pruning=None, frontier=w) for w in (0, 2))
    assert [tokens for tokens, _ in ahead] == [tokens for tokens, _ in plain]
    changes = [a - b for (_, a), (_, b) in zip(ahead, plain, strict=True)]
    beside = 2 * (1 - hidden) * 2.0  # two draft steps, as far as they take time beside verification
    assert changes == pytest.approx([beside - 2.0, beside])  # the first of them is what the target emits itself


def test_nothing_is_hidden_in_large_batches_and_nothing_costs_more_than_drafting_it() -> None:
    batch = np.array([1, 134, 200, 256, 1000])
    miss = ahead_ms(COST, frontier=np.full(5, 4), depth=np.full(5, 2), hit=np.zeros(5, np.bool_), batch=batch)
    assert (miss <= 3 * 2.0).all()  # the bonus and two more: as many as the depth has use for
    assert miss[-2:].tolist() == [6.0, 6.0]


class Full:
    """Verifies and drafts all it may, always with a frontier."""

    def decide(self, observation: Observation) -> Decision:
        return Decision(np.full(observation.running, 3), 3, 4)


def test_an_engine_does_only_what_it_can() -> None:
    tape = tape_of("0111111111", "0010000000")
    tape = replace(tape, rank=np.where(tape.rank == 10, 255, 0).astype(np.uint8))
    trace = Trace(np.zeros(1), np.zeros(1, np.int64))
    able = (Capabilities(), Capabilities(pruning=True), Capabilities(max_frontier=4))
    none, pruning, frontier = (replay(lambda _: Full(), [trace], tape, COST, capabilities=c)[0] for c in able)
    assert none.tokens_per_s != frontier.tokens_per_s
    assert none.tokens_per_s != pruning.tokens_per_s


def test_what_is_not_known_is_refused() -> None:
    tape = tape_of("01", "00")
    with pytest.raises(ValueError, match=r"pruning after layer 3; the tape has ranks of layers: 1"):
        Pruner(replace(RULE, layer=3), tape, COST)
    with pytest.raises(ValueError, match="after layer 1; the target of profile test has 1"):
        Pruner(RULE, tape, replace(COST, measured={"target": {**WIDTHS, "layers": 1}}))
    with pytest.raises(ValueError, match="does not say its target's hidden"):
        Pruner(RULE, tape, replace(COST, measured={}))
