"""Kernels: each folder holds reference.py, plain torch and the ground truth, and its fast twin where one pays."""
