"""The batch-size table: tokens counted on recorded requests, the best K of each batch, and vLLM's form of it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from faser.core import MAX_DEPTH
from faser.costs import Curve, StepCost
from faser.policies import PolicyError, make_policy
from faser.policies.schedule import LARGEST_BATCH, Schedule, geometric, tokens_per_step
from faser.tapes import Tape

COST = StepCost(
    name="t",
    device="t",
    source="t",
    verify=Curve((1.0, 64.0, 128.0, 512.0), (8.0, 8.0, 9.0, 30.0)),
    sync=Curve((1.0, 128.0), (0.2, 0.4)),
    draft=Curve((1.0, 64.0), (0.3, 0.5)),
    context_ms=0.0002,
    host_ms=4.0,
    launch_ms=1.0,
)


def tape_of(*matches: str) -> Tape:
    bits = np.array([b == "1" for b in "".join(matches)], np.bool_)
    return Tape(
        domains=("d",),
        domain=np.zeros(len(matches), np.uint8),
        prompt_tokens=np.full(len(matches), 10, np.int32),
        output_tokens=np.array([len(m) for m in matches], np.int32),
        max_tokens=np.full(len(matches), 99, np.int32),
        match=bits,
        confidence=np.zeros((len(bits), MAX_DEPTH), np.uint8),
        source="by hand",
    )


def test_tokens_of_a_step_are_counted_from_the_first_decoded_token_to_the_end() -> None:
    tokens = tokens_per_step(tape_of("0110111", "1"))  # the second one ends with its prompt
    assert tokens[0] == 1.0
    assert tokens[1] == pytest.approx(6 / 4)  # positions 1 and 2; 3; 4 and 5; 6
    assert tokens[2] == pytest.approx(6 / 2)  # 1 to 3; 4 to 6


def test_tokens_of_independent_matches_are_the_closed_form() -> None:
    tokens = tokens_per_step(Tape.iid(0.6, requests=2000, output_tokens=(400, 400), seed=3))
    assert tokens == pytest.approx(geometric(0.6), rel=0.01)
    k = np.arange(MAX_DEPTH + 1)
    assert geometric(0.6) == pytest.approx((1 - 0.6 ** (k + 1)) / (1 - 0.6))


def test_runs_of_right_tokens_are_worth_other_than_their_mean() -> None:
    """Half the requests are always right, half never: the hard ones take most of the steps."""
    tokens = tokens_per_step(tape_of(*(["1" * 65] * 4 + ["0" * 65] * 4)))
    assert tokens[1] == pytest.approx(2 / (1 + 1 / 2))
    assert tokens[1] < geometric(0.5)[1]
    assert tokens[7] == pytest.approx(2 / (1 + 1 / 8))


@pytest.mark.parametrize("context", [0.0, 400.0])
def test_the_table_is_what_trying_each_length_gives(context: float) -> None:
    tokens = np.array([1.0, 1.5, 1.8, 2.0, 2.1, 2.17, 2.21, 2.24])
    table = Schedule.from_cost(COST, tokens, context).table
    for n in (1, 2, 7, 16, 31, 64, 100, 256, LARGEST_BATCH):
        speeds = [
            n * tokens[k] / COST.step_ms(rows=n * (1 + k), batch=n, depth=k, context=n * context)
            for k in range(MAX_DEPTH + 1)
        ]
        assert table[n] == int(np.argmax(speeds))
    assert len({*table}) > 2


def test_an_acceptance_by_name_is_the_geometric_table() -> None:
    by_name = make_policy("schedule:0.8", COST)
    assert isinstance(by_name, Schedule)
    assert by_name.table == Schedule.from_cost(COST, geometric(0.8)).table
    assert by_name.table != Schedule.from_cost(COST, geometric(0.4)).table
    never = make_policy("schedule:0.0", COST)
    assert isinstance(never, Schedule)
    assert {*never.table} == {0}


def test_what_is_printed_reads_back_as_the_same_table() -> None:
    schedule = Schedule.from_cost(COST)
    again = Schedule.parse(str(schedule))
    assert again.table[: LARGEST_BATCH + 1] == schedule.table
    assert str(Schedule.parse("1-2=4,3-4=1")) == "1-2=4,3-4=1,5-1024=0"


def test_vllms_form_starts_at_1_has_no_gaps_and_says_the_same_of_every_batch() -> None:
    """vLLM goes on with the last K past the last range, so one that ends in K = 0 has to say so."""
    for schedule in (Schedule.from_cost(COST), Schedule.parse("1-2=4,3-4=1")):
        ranges = json.loads(schedule.vllm_option())
        looked_up = [k for first, last, k in ranges for _ in range(first, last + 1)]
        assert ranges[0][0] == 1
        assert len(looked_up) == ranges[-1][1]
        n = len(schedule.table)
        assert looked_up[: n - 1] == schedule.table[1:n]
        assert looked_up[-1] == schedule.table[-1]


@pytest.mark.parametrize("spec", ["schedule:1.5", "schedule:-0.1", "schedule:0.5,0.4", "schedule:x", "schedule:1-2=9"])
def test_a_table_that_cannot_be_is_refused_in_a_line(spec: str) -> None:
    with pytest.raises(PolicyError, match=f"policy {spec}") as error:
        make_policy(spec, COST)
    assert "\n" not in str(error.value)


def test_tokens_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens has shape \(3,\); allowed: \(8,\)"):
        Schedule.from_cost(COST, [1.0, 1.5, 1.8])
