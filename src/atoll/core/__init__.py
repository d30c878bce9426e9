"""The mechanism: trees, keys, graphs, steps, aggregation. Imports torch and nothing else."""
