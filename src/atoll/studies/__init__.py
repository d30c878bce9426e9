"""Studies of many runs: comparisons, searches and reproduced tables."""
