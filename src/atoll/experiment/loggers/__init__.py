"""Loggers that send the numbers of every round to other tools."""
