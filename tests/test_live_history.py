"""The last minutes of an engine: where a step's time and tokens go, its bound, and several engines' sum."""

import numpy as np
import pytest

from faser.core import StepOutcome
from faser.live.history import SECONDS, History, merged


def outcome(seconds: float, verified: list[int], accepted: list[int], depth: int = 4) -> StepOutcome:
    return StepOutcome(seconds, np.array(verified, np.int64), np.array(accepted, np.int64), depth, 7)


def add(history: History, step: StepOutcome, start: float, policy: str = "p", arm: str = "") -> None:
    history.add(step, start, written=5, waiting=3, kv_usage=0.5, policy=policy, arm=arm)


def test_a_step_adds_its_time_to_the_seconds_that_it_took_and_the_rest_to_its_last() -> None:
    history = History()
    add(history, outcome(2.0, [0, 2, 2], [0, 1, 2]), 100.5)
    first, second, third = history.since(0)
    assert [s["t"] for s in (first, second, third)] == [100, 101, 102]
    assert [s["busy"] for s in (first, second, third)] == pytest.approx([0.5, 1.0, 0.5])
    assert [s["running"] for s in (first, second, third)] == pytest.approx([1.5, 3.0, 1.5])
    assert [s["waiting"] for s in (first, second, third)] == pytest.approx([1.5, 3.0, 1.5])
    assert [s["kv"] for s in (first, second, third)] == pytest.approx([0.25, 0.5, 0.25])
    assert [third[name] for name in ("steps", "prompt", "written", "depth", "accepted")] == [1, 7, 5, 4, 3]
    assert third["lengths"] == [1, 0, 2, 0, 0, 0, 0, 0]
    assert first["steps"] == 0
    assert first["lengths"] == [0] * 8


def test_steps_of_a_second_add_up_and_the_last_names_its_policy() -> None:
    history = History()
    add(history, outcome(0.25, [1], [1]), 10.0, "p", "a")
    add(history, outcome(0.25, [], []), 10.25, "q", "b")
    (second,) = history.since(0)
    assert (second["steps"], second["busy"], second["running"]) == (2, pytest.approx(0.5), pytest.approx(0.25))
    assert (second["policy"], second["arm"], second["lengths"][1]) == ("q", "b", 1)


def test_a_step_in_which_nothing_ran_says_nothing_of_depths() -> None:
    """A server takes one after its last request."""
    history, nothing = History(), np.zeros(0, np.int64)
    add(history, outcome(0.25, [1], [1]), 10.0)
    history.add(
        StepOutcome(0.25, nothing, nothing, 7, 0), 10.25, written=0, waiting=0, kv_usage=0.0, policy="p", arm=""
    )
    (second,) = history.since(0)
    assert (second["steps"], second["depth"], second["busy"]) == (1, 4, pytest.approx(0.5))


@pytest.mark.parametrize("step_s", [0.02, 7.0, 2.0 * SECONDS])
def test_it_is_bounded_and_keeps_the_newest(step_s: float) -> None:
    history = History()
    for i in range(400):
        add(history, outcome(step_s, [1], [0]), 1000.0 + i * step_s)
    seconds = history.since(0)
    assert len(seconds) <= SECONDS
    assert seconds[-1]["t"] == int(1000.0 + 400 * step_s)
    assert history.since(seconds[-1]["t"]) == seconds[-1:]


def test_idle_time_has_no_entries_and_a_clock_set_back_is_followed() -> None:
    history = History()
    add(history, outcome(0.1, [1], [1]), 50.0)
    add(history, outcome(0.1, [1], [1]), 90.0)
    add(history, outcome(0.1, [1], [1]), 89.5)
    assert [(s["t"], s["steps"]) for s in history.since(0)] == [(50, 1), (90, 2)]
    add(history, outcome(0.1, [1], [1]), 20.0)
    assert [(s["t"], s["steps"]) for s in history.since(0)] == [(20, 1)]


def test_engines_add_up_second_by_second() -> None:
    one, two = History(), History()
    add(one, outcome(0.5, [2], [1]), 10.0, "p")
    add(one, outcome(0.5, [2], [1]), 11.0, "p")
    add(two, outcome(0.5, [3], [0]), 11.0, "q")
    three = History()
    add(three, outcome(0.5, [], []), 12.0, "a=x, b=y")
    assert merged([three.since(0), three.since(0)])[0]["policy"] == "a=x, b=y"
    alone, both = merged([one.since(0), two.since(0)])
    assert (alone["t"], alone["busy"], alone["policy"]) == (10, pytest.approx(0.5), "p")
    assert (both["t"], both["steps"], both["accepted"], both["policy"]) == (11, 2, 1, "p, q")
    assert both["lengths"] == [0, 0, 1, 1, 0, 0, 0, 0]
    assert merged([]) == []
