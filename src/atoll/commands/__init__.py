"""The larger commands, one file each; `atoll.cli` holds the others and adds these."""
