"""Triton kernels of the networks."""
