"""Scripts that `make` runs on the repository itself."""
