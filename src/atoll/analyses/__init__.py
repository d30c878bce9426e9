"""Analyses of a federation or of one finished run."""
