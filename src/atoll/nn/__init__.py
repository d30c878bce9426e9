"""Networks as frozen dataclasses: `init(key)` gives a parameter tree, calling it gives logits."""
