"""Greedy token and how sure the draft is of it, from logits."""

from faser.kernels.confidence.reference import argmax_confidence

__all__ = ["argmax_confidence"]
