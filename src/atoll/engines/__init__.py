"""Engines, which run client steps: one by one, through bytes, all at once, or on real sites."""
