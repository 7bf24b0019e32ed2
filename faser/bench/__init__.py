"""Benchmarks: a server to run, a client to load it, and what they print."""
