"""Code below `vmap`: stacks of all clients, values per run, and fused GPU operations."""
