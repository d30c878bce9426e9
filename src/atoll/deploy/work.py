"""The work of a run at a site: questions and seconds per round, which no restart resets.

The seconds of packets that are not steps (`OTHERS`) count for the round before the first one.

The audit log has an entry for every answer. A file names the round of a running step, or `BEFORE`
for a running packet of `OTHERS`. Without this file, a server could stop the job during each of
them, and no log entry would count it.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter, defaultdict
from pathlib import Path

from atoll.deploy.audit import Audit
from atoll.engines.fleet import BAD

SENT = "sent"
UNDER_WAY = "step_under_way"
BEFORE = -1  # the round before the first one
OTHERS = ("hello", "begin", "deliver", "delivered", "kept")
"""Packets that are not steps, and their events in the audit log."""


def mark_of(run: str) -> str:
    """Return the name of the file that names a running packet of `OTHERS`."""
    return f"{UNDER_WAY}-{hashlib.sha256(run.encode(errors='replace')).hexdigest()[:32]}"


class Work:
    """Counts from the audit log. An interrupted step counts for at most `longest` seconds."""

    def __init__(
        self, audit: Audit, run: str, folder: Path, longest: float, mark: str = UNDER_WAY
    ) -> None:
        self.questions, self.seconds = Counter[int](), defaultdict[int, float](float)
        self.mark = folder / mark
        if self.mark.exists():
            self._note(audit, run, longest)
        with audit.readable():
            for event in audit.events(run=run):
                # Any failure has a reason. A private step that diverged is logged as sent.
                asked = event["event"] == SENT or "reason" in event
                if type(event.get("round")) is int and (asked or event["event"] in OTHERS):
                    self.questions[event["round"]] += asked
                    self.seconds[event["round"]] += event.get("seconds", 0.0)

    def _note(self, audit: Audit, run: str, longest: float) -> None:
        """Log a step whose process ended during it. Its duration is only known up to a bound."""
        number = self.mark.read_text(encoding="ascii", errors="replace")
        since = time.time() - self.mark.stat().st_mtime
        if re.fullmatch("-?[0-9]{1,10}", number):  # a crash may leave an empty file
            seconds = round(min(max(since, 0.0), longest), 3)
            reason = "its process ended in a step"
            audit.note(BAD, reason=reason, seconds=seconds, run=run, round=int(number))
        self.mark.unlink()

    def begin(self, number: int) -> None:
        """Count a question of a round, and write the file of the running step."""
        self.questions[number] += 1
        self.mark.write_text(str(number))

    def end(self, number: int, seconds: float) -> None:
        """Count the time of an answer, and delete the file of the running step."""
        self.seconds[number] += seconds
        self.mark.unlink(missing_ok=True)
