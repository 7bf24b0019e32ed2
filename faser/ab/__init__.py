"""A/B tests in a running server: who gets which policy, what came of it, and what can be concluded."""
