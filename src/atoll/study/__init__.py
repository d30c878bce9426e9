"""Experiments: configuration, protocols, the round loop, scoring and results."""
