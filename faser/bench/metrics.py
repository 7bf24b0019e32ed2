"""A server's `/metrics` as numbers.

The decision here: samples keep their labels, and two readings subtract, since every figure of a phase is a difference
of counters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

Key = tuple[str, tuple[tuple[str, str], ...]]

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Metrics:
    """One reading. samples: (name, sorted (label, value) pairs) -> value."""

    samples: dict[Key, float]

    @classmethod
    def parse(cls, text: str, prefix: str = "") -> Metrics:
        """From Prometheus text; only the series whose names start with `prefix`. ValueError: not a sample."""
        samples: dict[Key, float] = {}
        for line in text.splitlines():
            if not line or line[0] == "#" or not line.startswith(prefix):
                continue
            match = _SAMPLE.match(line)
            if match is None:
                raise ValueError(f"not a Prometheus sample: {line[:80]!r}")
            name, labels, value = match.groups()
            samples[name, tuple(sorted(_LABEL.findall(labels or "")))] = float(value)
        return cls(samples)

    def total(self, name: str) -> float:
        """The sum over all labels of the series `name`; 0 if there is none."""
        return sum(value for (series, _), value in self.samples.items() if series == name)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The series `name` by the values of one label, the others added up."""
        totals: dict[str, float] = {}
        for (series, labels), value in self.samples.items():
            if series == name and (of := dict(labels).get(label)) is not None:
                totals[of] = totals.get(of, 0.0) + value
        return totals

    def __sub__(self, earlier: Metrics) -> Metrics:
        """What was gained since `earlier`; series that it lacks count from 0."""
        return Metrics({key: value - earlier.samples.get(key, 0.0) for key, value in self.samples.items()})
