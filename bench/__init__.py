"""Side-by-side benchmarks: `python -m bench peer` (see README.md in this folder)."""
