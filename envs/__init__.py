"""The training side's world: a Gymnasium environment over a simulator of continuous batching.

Importing this registers `faser/Speculation-v0` with Gymnasium, a variant of it for each shipped pair of models, and
`faser/LiveSpeculation-v0`, the same over a real engine.
"""

from typing import Any

from gymnasium.envs.registration import register

VARIANTS: dict[str, dict[str, Any]] = {
    "faser/Speculation-v0": {},
    "faser/Speculation-smollm2-v0": {"pair": "smollm2", "slots": 32, "requests": 96, "load": (0.1, 1.3)},
    "faser/Speculation-llama2-13b-v0": {"pair": "llama2-13b", "slots": 128, "requests": 384, "load": (0.1, 1.3)},
    "faser/Speculation-mistral-7b-v0": {"pair": "mistral-7b", "slots": 128, "requests": 384, "load": (0.1, 1.3)},
}
"""Arguments by id. Slots and loads are those that training uses; three requests a slot fill them when load is high."""

for _id, _arguments in VARIANTS.items():
    register(
        id=_id,
        entry_point="faser.envs.speculation:SpeculationEnv",
        vector_entry_point="faser.envs.vector:SpeculationVectorEnv",
        kwargs=_arguments,
    )

register(id="faser/LiveSpeculation-v0", entry_point="faser.envs.live:LiveSpeculationEnv", nondeterministic=True)
