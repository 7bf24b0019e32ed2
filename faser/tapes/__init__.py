"""Acceptance tapes: what a draft model would have had accepted, at every position of recorded outputs.

With greedy drafting the draft's proposal at a position depends only on the text before it. So one recording answers,
exactly, what ANY speculation policy would have gained; only the clock of a simulation is a model.
"""

from faser.tapes.shelf import known_tapes, load_tape
from faser.tapes.tape import Tape, TapeError

__all__ = ["Tape", "TapeError", "known_tapes", "load_tape"]
