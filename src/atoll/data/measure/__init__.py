"""Measures of how clients differ."""
