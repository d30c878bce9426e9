"""Many runs: comparisons, searches and reproduced tables."""
