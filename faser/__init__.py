"""FASER: an LLM server that learns how far to speculate. `import faser` needs numpy only."""

from faser.core import (
    LOAD_FEATURES,
    MAX_DEPTH,
    MAX_FRONTIER,
    REQUEST_FEATURES,
    Capabilities,
    Decision,
    DecisionError,
    Observation,
    Policy,
    StepOutcome,
)

__version__ = "0.1.0"
__all__ = [
    "LOAD_FEATURES",
    "MAX_DEPTH",
    "MAX_FRONTIER",
    "REQUEST_FEATURES",
    "Capabilities",
    "Decision",
    "DecisionError",
    "Observation",
    "Policy",
    "StepOutcome",
]
