"""A real federation: sites on the network, each with its own data, policy and audit log.

NVIDIA FLARE ("FLARE") starts the jobs and carries the packets. A run may need several jobs.
"""
