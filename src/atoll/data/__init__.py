"""Data: loading, preparing, partitioning and splitting graphs, and measuring their differences."""
