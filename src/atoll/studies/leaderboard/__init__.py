"""Rank every method on every data set, and store the rows in a file that grows."""
