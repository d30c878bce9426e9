"""Reproduce the papers' tables and figures."""
