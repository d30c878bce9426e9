"""Compare methods on the same clients and seeds."""
