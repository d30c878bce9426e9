"""One run: configuration, problem, rounds, scores, result and its folder."""
