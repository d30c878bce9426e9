"""The private states of a run at a site, by round, each with its lineage.

The lineage is a hash of the questions that led to the state (`site.Job`).
"""

from __future__ import annotations

import re
from pathlib import Path

from atoll.core.errors import WireError
from atoll.core.tree import Tree
from atoll.engines.codec import load_checkpoint, save_checkpoint
from atoll.engines.fleet import NEVER

STATE = "atoll private state"
KEPT = 2  # further states of earlier rounds, in case a server has to go back


class States:
    """A run's private states by round. The last few are kept, because rounds may repeat."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rounds(self) -> list[int]:
        """Return the rounds with a state, ascending."""
        names = (path.stem[6:] for path in self.folder.glob("state_*.atoll"))
        return sorted(int(name) for name in names if re.fullmatch("-?[0-9]{1,10}", name))

    def load(self, counts: int) -> tuple[Tree, str]:
        """Return the state after round `counts` and its lineage. For NEVER, return None and ""."""
        if counts == NEVER:
            return None, ""
        if counts not in self.rounds():
            lost = f"the private state after round {counts} is not in its runs/{self.folder.name}"
            raise WireError(f"{lost}; this site cannot continue the run")
        tree = load_checkpoint(self._path(counts))
        if isinstance(tree, dict) and tree.get("kind") == STATE:
            return tree["state"], tree["lineage"]
        # Earlier versions stored the lineage in a second file, or not at all.
        path = self._path(counts).with_suffix(".lineage")
        return tree, path.read_text(encoding="utf-8") if path.exists() else f"after {counts}"

    def save(self, round: int, state: Tree, lineage: str, counts: int, keep: int = NEVER) -> None:
        """Write the state after `round` and its lineage atomically, and delete old states.

        The states of rounds `counts` (the valid one) and `keep` (of the selected model) remain, and
        the last `KEPT` states of other earlier rounds.
        """
        save_checkpoint(self._path(round), {"kind": STATE, "lineage": lineage, "state": state})
        others = [number for number in self.rounds() if number not in (round, counts, keep)]
        before = [number for number in others if number < round]
        for number in set(others) - set(before[-KEPT:]):
            self._path(number).unlink()
            self._path(number).with_suffix(".lineage").unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        return self.folder / f"state_{round}.atoll"
