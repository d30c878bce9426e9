"""The command line. Each file defines one command, or a few related ones."""

from atoll.cli.app import main

__all__ = ["main"]
