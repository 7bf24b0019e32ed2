"""Shipped weights: the learned policy and the draft of `smollm2`."""

from pathlib import Path

SHIPPED_POLICY = Path(__file__).parent / "ppo.pt"
"""The policy that `faser serve` uses unless told otherwise."""
