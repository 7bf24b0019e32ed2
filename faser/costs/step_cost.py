"""The step-time model: measured curves, read from `profiles/<name>.json`."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from faser.core import MAX_DEPTH

PROFILES = Path(__file__).parent / "profiles"


FAR = 1e9
"""How far past its last point a curve goes on: more rows, requests or tokens than there can be."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Piecewise linear through (x, ms), flat before the first point, at the last slope after the last one."""

    x: tuple[float, ...]
    ms: tuple[float, ...]
    _points: tuple[NDArray[np.float64], NDArray[np.float64]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.x) != len(self.ms) or not self.x:
            raise ValueError(f"a curve needs as many x ({len(self.x)}) as ms ({len(self.ms)}), at least 1")
        if any(b <= a for a, b in zip(self.x, self.x[1:], strict=False)):
            raise ValueError("a curve's x must increase")
        if not (np.isfinite(self.ms).all() and min(self.ms) >= 0):
            raise ValueError("a curve's ms must be finite and not negative")
        slope = (self.ms[-1] - self.ms[-2]) / (self.x[-1] - self.x[-2]) if len(self.x) > 1 else 0.0
        points = np.array([*self.x, self.x[-1] + FAR]), np.array([*self.ms, self.ms[-1] + FAR * slope])
        object.__setattr__(self, "_points", points)  # made once: a policy evaluates curves in every step

    def __call__(self, at: ArrayLike) -> NDArray[np.float64]:
        """ms at `at` (any shape)."""
        return np.interp(np.asarray(at, np.float64), *self._points)


NOTHING = Curve((1.0,), (0.0,))


def drafted_each(rows: ArrayLike, batch: ArrayLike) -> NDArray[np.float64]:
    """Drafted tokens that a request of `batch` verifies, on average, in steps of `rows` without those of prompts."""
    drafted: NDArray[np.float64] = np.maximum(np.asarray(rows) / np.maximum(batch, 1) - 1.0, 0.0)
    return drafted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Step time of one (device, target, draft).

    verify: ms by rows; request: ms more by batch; sync: ms by rows where anything is drafted; draft: ms of one draft
    step by batch; context_ms: ms per token of context; attend_ms: per such token more for each drafted token that its
    request verifies, where attention takes time by the row (on a CPU); logits_ms: ms more of a row that has logits, as
    all have but those of prompts.
    host_ms, launch_ms: ms that the host takes for a step, and for each draft step more; the device works meanwhile.
    measured: how it was measured, see MEASURED; not compared.
    """

    name: str
    device: str
    source: str
    verify: Curve
    request: Curve = NOTHING
    sync: Curve = NOTHING
    draft: Curve = NOTHING
    context_ms: float = 0.0
    attend_ms: float = 0.0
    logits_ms: float = 0.0
    host_ms: float = 0.0
    launch_ms: float = 0.0
    measured: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def ms(
        self,
        *,
        rows: ArrayLike,
        batch: ArrayLike,
        depth: ArrayLike = 0,
        context: ArrayLike = 0,
        prefill: ArrayLike = 0,
    ) -> NDArray[np.float64]:
        """ms of steps of `rows` target rows, `prefill` of them of prompts, over `context` tokens, drafting `depth` for
        each of `batch`; any shapes that broadcast.
        """
        device = self.verify(rows) + self.request(batch) + self.context_ms * np.asarray(context)
        if self.attend_ms or self.logits_ms:
            own = np.asarray(rows) - np.asarray(prefill)
            device = device + self.logits_ms * own + self.attend_ms * drafted_each(own, batch) * np.asarray(context)
        depth = np.asarray(depth, np.float64)
        if depth.any():
            device = device + (depth > 0) * self.sync(rows) + depth * self.draft(batch)
        return np.maximum(device, self.host_ms + self.launch_ms * depth)

    def step_ms(self, *, rows: float, batch: float, depth: int = 0, context: float = 0, prefill: float = 0) -> float:
        """`ms` of one step."""
        return float(self.ms(rows=rows, batch=batch, depth=depth, context=context, prefill=prefill))

    def scaled(self, factor: float) -> StepCost:
        """The same on a device that takes `factor` times as long for everything."""
        curves = {name: getattr(self, name) for name in CURVES}
        slower: dict[str, Any] = {n: Curve(c.x, tuple(factor * ms for ms in c.ms)) for n, c in curves.items()}
        return replace(self, **slower, **{name: factor * getattr(self, name) for name in NUMBERS})

    def break_even(
        self, *, batch: ArrayLike, prefill_tokens: ArrayLike = 0, context: ArrayLike = 0
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Survival at which one more row, at no and at full speculation, and one more draft step pay in tokens per ms.

        Any shapes that broadcast. An extra row costs dT and brings p tokens; it raises tokens/ms iff p > dT * tokens /
        T. T is the step without its prompts, whose time is spent anyway: with them a token would look dear and
        speculation nearly free. A draft step is the mean of K.
        """
        batch = np.asarray(batch)
        start = batch + np.asarray(prefill_tokens)
        none = np.zeros_like(start)
        lengths = (0, 1, MAX_DEPTH - 1, MAX_DEPTH)
        rows = np.stack([batch + none, *(start + length * batch for length in lengths), batch + none])
        depth = np.stack([none] * (1 + len(lengths)) + [none + MAX_DEPTH])
        prompts = np.stack([none, *[none + prefill_tokens] * len(lengths), none])
        ms = self.ms(rows=rows, batch=batch, depth=depth, context=context, prefill=prompts)
        return (ms[2] - ms[1]) / ms[0], (ms[4] - ms[3]) / ms[0], (ms[5] - ms[0]) / MAX_DEPTH / ms[0]


def known_profiles() -> list[str]:
    """Names that `load_profile` takes."""
    return sorted(p.stem for p in PROFILES.glob("*.json"))


def load_profile(name: str | Path) -> StepCost:
    """The profile `name`, or that of a file. ValueError names what is wrong, or the known names."""
    path = PROFILES / f"{name}.json" if str(name) in known_profiles() else Path(name)
    try:
        if path.is_file():
            return _parse(json.loads(path.read_text("utf-8")))
    except OSError as error:
        raise ValueError(f"profile {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"profile {path}: {error}") from None
    raise ValueError(f"profile {str(name)!r} is unknown; known: {', '.join(known_profiles())}, or a file")


_TEXTS = ("name", "device", "source")
CURVES = ("verify", "request", "sync", "draft")
NUMBERS = ("context_ms", "attend_ms", "logits_ms", "host_ms", "launch_ms")
MEASURED = ("date", "command", "driver", "versions", "clocks", "cuda_graphs", "target", "draft", "held_out", "points")
"""Entries of `StepCost.measured`, any of which may be missing.

driver: of the GPU. versions: of packages. clocks: MHz of the GPU while it was measured. cuda_graphs: vLLM's mode.
target, draft: widths of the models (`faser.models.shapes.Shape`). held_out: errors of a fit without a third of the
points, on that third. points: what was fitted, `columns` and `rows`.
"""
_OBJECTS = ("versions", "clocks", "target", "draft", "held_out", "points")
_MOST = 1e9
"""ms, rows or requests: above any that there can be, and sums of such are still numbers."""
_ROWS = (1, 8192)
"""Steps of so many take time in every profile."""


def _parse(data: Any) -> StepCost:
    """The profile in a parsed JSON file; ValueError names the entry that is wrong."""
    allowed = (*_TEXTS, *NUMBERS, "measured", "curves")
    if not isinstance(data, dict) or not set(data) <= set(allowed):
        raise ValueError(f"holds {_kind(data)}; allowed: an object of {', '.join(allowed)}")
    for key in _TEXTS:
        if not isinstance(data.get(key), str):
            raise ValueError(f"{key} is {data.get(key)!r}; allowed: text")
    curves = data.get("curves")
    if not isinstance(curves, dict) or "verify" not in curves or not set(curves) <= set(CURVES):
        raise ValueError(f"curves is {_kind(curves)}; allowed: an object of {', '.join(CURVES)}, with verify")
    measured = data.get("measured", {})
    if not isinstance(measured, dict) or not set(measured) <= set(MEASURED):
        raise ValueError(f"measured is {_kind(measured)}; allowed: an object of {', '.join(MEASURED)}")
    for key in _OBJECTS:
        if not isinstance(measured.get(key, {}), dict):
            raise ValueError(f"measured.{key} is {_kind(measured[key])}; allowed: an object")
    numbers = {key: data.get(key, 0.0) for key in NUMBERS}
    for key, value in numbers.items():
        if not _is_number(value) or value < 0:
            raise ValueError(f"{key} is {_kind(value)}; allowed: 0 or more, up to {_MOST:g}")
    made: dict[str, Any] = {name: _curve(name, curve) for name, curve in curves.items()}
    made |= {key: float(value) for key, value in numbers.items()}
    cost = StepCost(**{key: data[key] for key in _TEXTS}, measured=measured, **made)
    for rows in _ROWS:
        if not (took := cost.step_ms(rows=rows, batch=1)) > 0:
            raise ValueError(f"a step of {rows} rows takes {took:g} ms; allowed: over 0")
    return cost


def _curve(name: str, data: Any) -> Curve:
    if not isinstance(data, dict) or set(data) != {"x", "ms"}:
        raise ValueError(f"{name} is {_kind(data)}; allowed: an object of x and ms")
    for key, numbers in data.items():
        if not isinstance(numbers, list):
            raise ValueError(f"{name}.{key} is {_kind(numbers)}; allowed: a list of numbers")
        for i, number in enumerate(numbers):
            if not _is_number(number):
                raise ValueError(f"{name}.{key}[{i}] is {_kind(number)}; allowed: numbers, up to {_MOST:g}")
    try:
        return Curve(tuple(map(float, data["x"])), tuple(map(float, data["ms"])))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST <= value <= _MOST


def _kind(data: Any) -> str:
    return f"an object of {', '.join(map(str, data)) or 'nothing'}" if isinstance(data, dict) else reprlib.repr(data)
