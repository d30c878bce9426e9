"""The account of a site: everything that left it, in all runs, by its audit log."""

from __future__ import annotations

from collections import Counter, defaultdict

from atoll.deploy.audit import Audit
from atoll.deploy.policy import all_seeds
from atoll.deploy.work import SENT
from atoll.experiment.metrics import SENT as TOLD
from atoll.experiment.privacy import release


class Account:
    """The releases of a site in all its runs, by its audit log: no restart renews it."""

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
            # Fields of scores that left, by run, and by run and round. An earlier version did not
            # note their names.
            self.scores = defaultdict[str, set[str]](set)
            self.of_round = defaultdict[tuple[str, int], set[str]](set)
            for event in sent:
                if event.get("step") == "score" and not event.get("kept"):
                    run, told = str(event["run"]), set(event.get("scores", TOLD))
                    self.scores[run] |= told
                    self.of_round[run, event["round"]] |= told
            # Replies with tensors that left without this site's noise: updates, or scores that
            # the site did not replace by zeros.
            self.clear = sum(
                event.get("array_bytes", 1) > 0
                for event in sent
                if "release" not in event and not event.get("kept")
            )

    def sent(self, run: str) -> int:
        """The bytes of all replies of a run, in all its seeds."""
        return self.bytes[all_seeds(run)]

    def noises(self, run: str) -> list[float]:
        """The noise multiplier of each release of a run, in all its seeds."""
        return [noise for name, noise in self.releases.values() if all_seeds(name) == run]

    def precision(self, but: str | None = None) -> float:
        """The sum of 1/z² over all releases, without those of one run if it is given."""
        every = self.releases.values()
        return sum(release(noise) for run, noise in every if but is None or all_seeds(run) != but)
