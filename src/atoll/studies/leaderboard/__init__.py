"""Rank every method on every data set, and keep the rows in a file that grows."""
