"""How likely each drafted token is to be accepted: learned from tapes, evaluated in microseconds, numpy only.

A draft's own confidence says the same of a greedy request as of a sampled one, and of code as of a summary. A small
network adds what the engine knows besides: the request's temperature, how its earlier drafts fared, and where in its
draft a token stands.
"""

from faser.acceptance.predictor import HISTORY_FEATURES, TOKEN_FEATURES, Predictor, PredictorError
from faser.acceptance.predictor_file import known_predictors, load_predictor, predictor_of, save, shipped_for

__all__ = [
    "HISTORY_FEATURES",
    "TOKEN_FEATURES",
    "Predictor",
    "PredictorError",
    "known_predictors",
    "load_predictor",
    "predictor_of",
    "save",
    "shipped_for",
]
