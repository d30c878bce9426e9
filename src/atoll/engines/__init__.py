"""Where client steps run: one by one, through bytes, all at once, or on real sites."""
