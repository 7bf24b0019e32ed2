"""`Split`: which arm of an A/B test is used when, or for whom.

One decision: an arm is a pure function of the split and the time, or of the split and a client's key. Engines and API
processes, and a server that comes back after a restart, agree on it without a word. The orders come from SHA-256, whose
values are the same in every version of everything.

By window, the default, the whole engine uses one arm for a slice of time, since requests that share a batch share its
steps: an arm that drafts much slows those of the other. By request, arms share batches, and what is measured is what a
request gets in such a mixture. See `faser.ab.arms`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

NAMED = re.compile(r"([A-Za-z0-9_-]{1,32})=(.+)", re.DOTALL)
"""NAME=POLICY. A policy's own "=" comes after a ":" (`schedule:1-8=4`), which no name has; a file `x=1.pt` needs `./`.
"""

UNITS = ("window", "request")
LONGEST_BLOCK = 100
TOLERANCE = 0.01
"""How far shares may be from a sum of 1, so that three times 0.33 is a split."""


class SplitError(ValueError):
    """A split that cannot be; the message is one line."""


@dataclass(frozen=True, slots=True)
class Arm:
    """policy: what `make_policy` takes."""

    name: str
    policy: str


class Turn(NamedTuple):
    """What an instant belongs to. washout: not counted, since what the arm before left is still under way."""

    window: int
    arm: str
    washout: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """arms and their shares, which sum to 1. unit: "window" or "request". window_s: one arm's slice of time, from
    `start` (s since the epoch) on; washout_s: of its beginning. block: windows in which each arm appears as its share
    says, in an order that `salt` randomises.
    """

    arms: tuple[Arm, ...]
    shares: tuple[float, ...]
    unit: str = "window"
    window_s: float = 60.0
    washout_s: float = 5.0
    block: int = 2
    salt: str = ""
    start: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arms."""
        return tuple(arm.name for arm in self.arms)

    def arm_at(self, t: float) -> Turn:
        """What `t`, in seconds since the epoch, belongs to."""
        window = math.floor((t - self.start) / self.window_s)
        block, place = divmod(window, self.block)
        washout = t - self.start - window * self.window_s < self.washout_s
        return Turn(window, _order(self, block)[place], washout)

    def arm_of_key(self, key: str) -> str:
        """Always the same arm for the same key."""
        at = int.from_bytes(self._digest(key)[:8]) / 2**64
        for name, end in zip(self.names, accumulate(self.shares), strict=True):
            if at < end:
                return name
        return self.names[-1]  # the shares' sum is rounded

    def pseudonym(self, key: str) -> str:
        """Tells keys apart in a log without telling them."""
        return self._digest("pseudonym\0" + key).hex()[:12]

    def same_test(self, other: Split) -> bool:
        """Whether they differ by salt and start only."""
        return self.terms == other.terms

    @property
    def terms(self) -> tuple[Any, ...]:
        """What an operator chose."""
        return self.arms, self.shares, self.unit, self.window_s, self.washout_s

    def __str__(self) -> str:
        """As the flags say it, and as the name of the policy in force."""
        return ", ".join(
            f"{arm.name}={arm.policy} ({share:.3g})" for arm, share in zip(self.arms, self.shares, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        """JSON types only."""
        return {**asdict(self), "arms": [asdict(arm) for arm in self.arms], "shares": list(self.shares)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Split:
        """What `to_json` made. SplitError: it did not."""
        try:
            arms = tuple(Arm(**arm) for arm in data["arms"])
            split = cls(**{**data, "arms": arms, "shares": tuple(data["shares"])})
            ok = len(split.arms) == len(split.shares) > 1 and split.unit in UNITS
            ok = ok and (split.unit == "request" or 0 < min(_counts(split)) < sum(_counts(split)) == split.block)
            split.salt.encode()  # a str, and without half a surrogate pair
            told = [(NAMED.fullmatch(f"{arm.name}={arm.policy}"), arm) for arm in split.arms]
            ok = ok and all(match and match.groups() == (arm.name, arm.policy) for match, arm in told)
            ok = ok and len(set(split.names)) == len(split.names)
            ok = ok and all(type(share) is float and share > 0 for share in split.shares)
            ok = ok and abs(sum(split.shares) - 1) <= TOLERANCE
            ok = ok and type(split.block) is int and 1 < split.block <= max(LONGEST_BLOCK, len(split.arms))
            ok = ok and 0 <= split.washout_s < split.window_s < math.inf and math.isfinite(split.start)
        except (TypeError, KeyError, AttributeError, ValueError, OverflowError) as error:
            raise SplitError(f"not a split: {error!r}") from None
        if not ok:
            raise SplitError("not a split")
        return split

    def _digest(self, text: str) -> bytes:
        return hashlib.sha256(f"{self.salt}\0{text}".encode()).digest()


def parse(
    policies: Sequence[str],
    shares: str | None,
    *,
    unit: str = "window",
    window_s: float = 60.0,
    washout_s: float = 5.0,
    salt: str = "",
    start: float = 0.0,
) -> Split | None:
    """From the values of `--policy` and of `--split` ("a=0.5,b=0.5"; None: equal shares). None: one policy, no split.

    Raises SplitError.
    """
    named = [NAMED.fullmatch(policy) for policy in policies]
    if len(policies) < 2 and shares is None and not any(named):
        return None
    arms = []
    for policy, match in zip(policies, named, strict=True):
        if match is None:
            raise SplitError(f"--policy {policy!r} has no name; in a split each is NAME=POLICY, as a={policy}")
        arms.append(Arm(*match.groups()))
    names = [arm.name for arm in arms]
    if len(arms) < 2:
        raise SplitError(f"--policy names {len(arms)} arms; a split takes two or more, each --policy NAME=POLICY")
    if twice := [name for name in names if names.count(name) > 1]:
        raise SplitError(f"--policy names the arm {twice[0]!r} twice")
    if unit not in UNITS:
        raise SplitError(f"--split-by is {unit!r}; allowed: {', '.join(UNITS)}")
    if not 0 < window_s < math.inf:
        raise SplitError(f"--split-window-s is {window_s:g}; allowed: over 0")
    if not 0 <= washout_s < window_s:
        raise SplitError(f"--split-washout-s is {washout_s:g}; allowed: 0 to less than --split-window-s, {window_s:g}")
    of = _shares(names, shares)
    return Split(
        arms=tuple(arms),
        shares=of,
        unit=unit,
        window_s=window_s,
        washout_s=washout_s,
        block=_block(of) if unit == "window" else len(arms),
        salt=salt,
        start=start,
    )


def _shares(names: list[str], text: str | None) -> tuple[float, ...]:
    if text is None:
        return (1.0 / len(names),) * len(names)
    given: dict[str, float] = {}
    for part in text.split(","):
        name, _, share = part.strip().partition("=")
        try:
            given[name] = float(share) if name not in given else math.nan
        except ValueError:
            given[name] = math.nan
        if not 0 < given[name] < 1:
            raise SplitError(f"--split {text!r}: {part!r} is not allowed; allowed: ARM=SHARE, over 0, once an arm")
    if set(given) != set(names):
        raise SplitError(f"--split {text!r} is of {', '.join(given)}; the arms of --policy are {', '.join(names)}")
    total = sum(given.values())
    if abs(total - 1) > TOLERANCE + 1e-9:
        raise SplitError(f"--split {text!r}: the shares sum to {total:g}; allowed: 1")
    return tuple(given[name] / total for name in names)


def _block(shares: Sequence[float]) -> int:
    """The fewest windows of which every arm's share is a whole number, to the tolerance of a window in a hundred."""
    for block in range(len(shares), LONGEST_BLOCK + 1):
        counts = [share * block for share in shares]
        if all(round(count) and abs(count - round(count)) < TOLERANCE for count in counts):
            return block
    raise SplitError(f"--split: these shares are no whole numbers of up to {LONGEST_BLOCK} windows; round them")


def _counts(split: Split) -> list[int]:
    """Windows of each arm in a block."""
    return [round(share * split.block) for share in split.shares]


@lru_cache(maxsize=64)
def _order(split: Split, block: int) -> tuple[str, ...]:
    """The arms of a block's windows."""
    places = [name for name, count in zip(split.names, _counts(split), strict=True) for _ in range(count)]
    order = sorted(range(len(places)), key=lambda place: split._digest(f"{block} {place}"))
    return tuple(places[place] for place in order)
