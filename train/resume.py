"""What a stopped run needs to go on: DIR/resume/model.zip (of stable-baselines3) and DIR/resume/state.pt (the rest).

The decision: environments start anew, from seeds of the step reached, as their episodes are independent draws anyway.
A zip of stable-baselines3 holds pickles, so resume only from a directory that you trust; servers never read one.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import VecEnv

from faser.policies.policy_file import write_atomically


class ResumeError(ValueError):
    """A directory from which no run can be resumed, in one line."""


def save(directory: Path, model: PPO, state: dict[str, Any]) -> None:
    """Write `model`, the random states and `state` (plain values and arrays) to `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    zipped = io.BytesIO()
    model.save(zipped)
    kind, keys, *rest = np.random.get_state()
    content = {
        **state,
        "step": model.num_timesteps,
        "torch_random": torch.get_rng_state(),
        "numpy_random": [kind, np.asarray(keys).tolist(), *rest],
    }
    buffer = io.BytesIO()
    torch.save(_tensors(content), buffer)
    write_atomically(directory / "model.zip", zipped.getvalue())
    write_atomically(directory / "state.pt", buffer.getvalue())


def load_state(directory: Path) -> dict[str, Any]:
    """The `state` of `save`, with "step" and the random states. ResumeError if it is not there or damaged."""
    path = directory / "state.pt"
    if not path.is_file():
        raise ResumeError(f"{directory.parent} holds no stopped run ({path} is missing)")
    try:
        state: dict[str, Any] = _arrays(torch.load(path, weights_only=True))
    except Exception as error:  # damaged bytes can raise nearly anything
        raise ResumeError(f"{path} is damaged ({type(error).__name__})") from None
    return state


def load_model(directory: Path, env: VecEnv, state: dict[str, Any]) -> PPO:
    """The model of `save` over `env`, with random states as they were and environments seeded by the step reached."""
    try:
        model = PPO.load(directory / "model.zip", env=env, device="cpu")
    except Exception as error:  # as above
        raise ResumeError(f"{directory / 'model.zip'} is damaged or missing ({type(error).__name__})") from None
    if model.num_timesteps != state["step"]:
        raise ResumeError(f"{directory}: model.zip is at step {model.num_timesteps}, state.pt at {state['step']}")
    env.seed((model.seed or 0) + model.num_timesteps)
    torch.set_rng_state(state["torch_random"])
    kind, keys, *rest = state["numpy_random"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    return model


def _tensors(value: Any) -> Any:
    """`value` with numpy arrays as tensors, the only arrays that `torch.load(weights_only=True)` takes."""
    if isinstance(value, dict):
        return {k: _tensors(v) for k, v in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def _arrays(value: Any) -> Any:
    """The inverse of `_tensors` for float32."""
    if isinstance(value, dict):
        return {k: _arrays(v) for k, v in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value
