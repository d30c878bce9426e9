"""Everything that touches functorch's internals: stacks, per-run values and GPU kernels."""
