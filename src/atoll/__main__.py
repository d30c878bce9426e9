"""The entry point of `python -m atoll`."""

from atoll.cli import main

main()
