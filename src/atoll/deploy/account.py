"""The account of a site: every reply that left it in all runs, read from its audit log."""

from __future__ import annotations

from collections import Counter, defaultdict

from atoll.deploy.audit import Audit
from atoll.deploy.policy import all_seeds
from atoll.deploy.work import SENT
from atoll.experiment.metrics import SENT as TOLD
from atoll.experiment.privacy import release


class Account:
    """Noised updates (releases), scores and bytes that left a site. No restart resets them."""

    def __init__(self, audit: Audit) -> None:
        with audit.readable():
            sent = audit.events(event=SENT)
            self.releases: dict[str, tuple[str, float]] = {
                event["release"]: (str(event["run"]), float(event["noise"]))
                for event in sent
                if "release" in event
            }
            self.bytes = Counter[str]()  # of all seeds of a run
            for event in sent:
                self.bytes[all_seeds(str(event["run"]))] += int(event["bytes"])
            # Score fields that left the site, by run, and by run and round. Earlier versions did
            # not log the names of these fields.
            self.scores = defaultdict[str, set[str]](set)
            self.of_round = defaultdict[tuple[str, int], set[str]](set)
            for event in sent:
                if event.get("step") == "score" and not event.get("kept"):
                    run, told = str(event["run"]), set(event.get("scores", TOLD))
                    self.scores[run] |= told
                    self.of_round[run, event["round"]] |= told
            # Replies that left with tensors but without this site's noise: updates, or scores
            # that the site did not replace by zeros.
            self.clear = sum(
                event.get("array_bytes", 1) > 0
                for event in sent
                if "release" not in event and not event.get("kept")
            )

    def sent(self, run: str) -> int:
        """Return the bytes of all replies of a run, over all its seeds."""
        return self.bytes[all_seeds(run)]

    def noises(self, run: str) -> list[float]:
        """Return the noise multiplier of each release of a run, over all its seeds."""
        return [noise for name, noise in self.releases.values() if all_seeds(name) == run]

    def precision(self, but: str | None = None) -> float:
        """Return the sum of 1/z² (z: noise multiplier) over all releases except those of `but`."""
        every = self.releases.values()
        return sum(release(noise) for run, noise in every if but is None or all_seeds(run) != but)
