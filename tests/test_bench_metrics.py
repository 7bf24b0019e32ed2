"""Prometheus text becomes numbers, and two readings a difference."""

import pytest

from faser.bench.measure import Steps, samples
from faser.bench.metrics import Metrics

TEXT = """\
# HELP faser:verify_length_total Request-steps by drafted tokens verified, 0 included.
# TYPE faser:verify_length_total counter
faser:verify_length_total{length="0"} 6.0
faser:verify_length_total{length="4",engine="1"} 2.0
faser:verify_length_total{engine="0",length="4"} 1.0
faser:accepted_tokens_total 5.0
faser:steps_total 3.0
faser:draft_depth_total{depth="4"} 1.0
faser:draft_depth_total{depth="0"} 3.0

vllm:odd{path="a\\"b}c, d",le="+Inf"} 1e+06 1700000000
"""


def test_series_are_read_with_labels_in_any_order_and_added_up() -> None:
    metrics = Metrics.parse(TEXT)
    assert metrics.by("faser:verify_length_total", "length") == {"0": 6.0, "4": 3.0}
    assert metrics.total("faser:verify_length_total") == 9.0
    assert metrics.total("faser:unknown_total") == 0.0
    assert metrics.samples["vllm:odd", (("le", "+Inf"), ("path", 'a\\"b}c, d'))] == 1e6


def test_a_prefix_leaves_other_series_out() -> None:
    assert {name for name, _ in Metrics.parse(TEXT, "vllm:").samples} == {"vllm:odd"}


def test_a_line_that_is_no_sample_is_named() -> None:
    with pytest.raises(ValueError, match="not a Prometheus sample: '<html>'"):
        Metrics.parse("<html>")


def test_a_difference_counts_new_series_from_zero() -> None:
    earlier = Metrics.parse('faser:steps_total 1\nfaser:verify_length_total{length="0"} 2\n')
    gained = Metrics.parse(TEXT) - earlier
    assert gained.total("faser:steps_total") == 2.0
    assert gained.by("faser:verify_length_total", "length") == {"0": 4.0, "4": 3.0}


def test_means_count_request_steps_without_speculation() -> None:
    steps = Steps.of(Metrics.parse(TEXT))
    assert steps.running == 9 / 3
    assert steps.chosen_length == 3 * 4 / 9
    assert steps.accepted_length == 1 + 5 / 9
    assert steps.draft_depth == 1.0


def test_nothing_done_is_one_token_per_step_and_no_division_by_zero() -> None:
    steps = Steps.of(Metrics.parse(""))
    assert (steps.running, steps.chosen_length, steps.accepted_length, steps.draft_depth) == (0, 0, 1, 0)


def test_samples_hold_what_each_reading_gained_and_skip_idle_ones() -> None:
    at = {0.0: 4, 0.5: 10, 1.0: 10, 1.5: 13}
    readings = [(t, Metrics.parse(f'faser:steps_total {n}\nfaser:verify_length_total{{length="1"}} {2 * n}'))
                for t, n in at.items()]  # fmt: skip
    assert [(s.at_s, s.steps.steps, s.steps.running) for s in samples(readings)] == [(0.5, 6, 2), (1.5, 3, 2)]
