"""The command line, one file per command."""

from atoll.cli.app import main

__all__ = ["main"]
