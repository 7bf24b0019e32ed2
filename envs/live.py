"""`faser/LiveSpeculation-v0`: the environment of `faser/Speculation-v0` over a real vLLM engine, in real time.

One decision: `LiveEngines` has the surface of the simulator's `Engines`, so spaces, actions, rewards, info and episodes
are not like the simulator's but the very same code.
"""

from __future__ import annotations

from typing import Any, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

from faser.envs.engines import Engines
from faser.envs.live_engines import LiveEngines
from faser.envs.speculation import SpeculationEnv
from faser.models import known_models


class LiveSpeculationEnv(SpeculationEnv):
    """How far to speculate, decided step by step for a real engine that serves real requests.

    ## Description
    Observation and action space, rewards, info and the summary of an episode are those of `SpeculationEnv`. A step is a
    step of a vLLM engine in a process of its own, started by the first `reset` (half a minute on a CPU; `close` ends
    it). Requests are prompts of the pair's tape and come at the times that the arrival process says; they end where
    the target ends them.

    What differs from the simulator:

    - The clock is real: idle gaps are waited out, and the time that an agent takes to decide is part of the step.
    - So `seed` fixes which requests come and when, at which `load`, but not how long steps take.
    - Without speculation the same arrivals are not served, but simulated with the pair's measured step costs: rewards
      and `ratio_to_none` are relative to that, and true where the costs are this machine's.

    `reset` drops what still runs.

    ## Arguments
    Those of `SpeculationEnv`, with these defaults, and:

    | argument | default | meaning |
    |---|---|---|
    | pair | "smollm2" | must be built (`faser models prepare`) |
    | slots | 16 | requests that the engine runs at once |
    | requests | 32 | in an episode |
    | acceptance | "tape" | or a Tape of the pair that holds tokens; it says which requests come, not what is accepted |
    | dtype | "auto" | of the models, as vLLM's; with "float32" the same prompt has the same text at any action |
    | greedy | False | True: no request is sampled, whatever its temperature on the tape |
    """

    def __init__(
        self,
        *,
        pair: str = "smollm2",
        slots: int = 16,
        requests: int = 32,
        dtype: str = "auto",
        greedy: bool = False,
        **arguments: Any,
    ) -> None:
        if pair not in known_models():
            raise ValueError(f"pair is {pair!r}; allowed with a live engine: {', '.join(known_models())}")
        super().__init__(pair=pair, slots=slots, requests=requests, **arguments)
        episodes = self.episodes
        if episodes.capabilities.pruning or episodes.capabilities.max_frontier:
            raise ValueError("capabilities are of an engine that prunes or has frontiers; vLLM's does neither yet")
        if not episodes.tape.tokens.size:
            raise ValueError("acceptance is without tokens; allowed: a tape with them: a live engine needs prompts")
        self.live = LiveEngines(
            pair,
            episodes.tape,
            episodes.cost,
            slots=slots,
            max_batched_tokens=episodes.engines.max_batched_tokens,
            dtype=dtype,
            greedy=greedy,
        )
        episodes.engines = cast(Engines, self.live)  # the same surface, as far as `Episodes` uses it

    def step(self, action: NDArray[np.int64]) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        if not self.live.started:
            raise gymnasium.error.ResetNeeded("no engine runs: call reset() before step()")
        return super().step(action)

    def close(self) -> None:
        """End the engine. A later `reset` starts another."""
        self.live.close()
        super().close()
