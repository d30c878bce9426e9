"""The data structures and contracts of Atoll: trees, keys, graphs, tasks, steps and aggregation.

Start with `method` (the contract of a method), then `training` (the part that most methods share),
`aggregate` (the server) and `fit` (the epoch loop). This package imports no third-party library
except torch, and Triton for its GPU kernels (`kernels`). Networks are in `atoll.nn`, methods in
`atoll.methods`, execution in `atoll.engines`.
"""
