"""What the demo's policies would do for a larger model on a GPU: a table in half a minute, without either.

    python -m faser.bench.panel
    python -m faser.bench.panel --pair mistral-7b --policies static:2 ema

Simulated: `faser.envs.simulator` runs the queue and the batch on step times measured on that GPU and on acceptances
recorded from real text, over arrivals and requests of the test period. `faser bench sim` is the same at length.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from faser.bench.sim import PAIRS, run_cell
from faser.checkpoints import SHIPPED_POLICY
from faser.envs.periods import period
from faser.models import measured, short_name
from faser.policies import PolicyError, make_policy

POLICIES = ("static:2", "static:4", "schedule", str(SHIPPED_POLICY))
SUITE, LOADS, EPISODES = "mixed", (0.1, 0.6, 1.2), 2
SAYS = """\
Mean time in system over that without speculation, simulated: queue and batch; measured: step times ({device},
profile {profile}) and acceptances (recorded from real text). Load is what arrives over what it can do without."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status; 2 for a user's mistake."""
    args = _parser().parse_args(argv)
    try:
        print(panel(args.pair, args.policies))
    except (PolicyError, ValueError, OSError) as error:
        print(f"panel: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("panel: stopped", file=sys.stderr)
        return 130
    return 0


def panel(pair: str, policies: Sequence[str]) -> str:
    """The table, in Markdown. ValueError: no such policy, or nothing measured of `pair`."""
    cost, tape = measured(pair)
    for name in policies:
        make_policy(name, cost)
    test = period("test", tape)
    lines = [
        f"| {short_name(pair)} | {' | '.join(f'load {load:g}' for load in LOADS)} |",
        f"|---{'|---' * len(LOADS)}|",
    ]
    with tqdm(total=len(policies) * len(LOADS), desc=f"simulating {short_name(pair)}", unit="cell", leave=False) as bar:
        for name in policies:
            ratios = []
            for load in LOADS:
                cell = run_cell(pair, cost, test, SUITE, load, name, EPISODES)
                ratios.append(float(np.mean([result.ratio_to_none for result in cell])))
                bar.update()
            lines.append(f"| {Path(name).name} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")
    return "\n".join([*lines, "", SAYS.format(device=cost.device, profile=cost.name)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m faser.bench.panel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", default="llama2-13b", help=PAIRS)
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="default: %(default)s")
    return parser


if __name__ == "__main__":
    sys.exit(main())
