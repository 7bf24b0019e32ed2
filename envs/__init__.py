"""The training side's world: a Gymnasium environment over a simulator of continuous batching.

Importing this registers `faser/Speculation-v0` with Gymnasium.
"""

from gymnasium.envs.registration import register

register(
    id="faser/Speculation-v0",
    entry_point="faser.envs.speculation:SpeculationEnv",
    vector_entry_point="faser.envs.vector:SpeculationVectorEnv",
)
