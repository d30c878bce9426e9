"""All code that uses functorch's internals: stacks, per-run values and GPU kernels."""
