"""Thresholds: the least probability of the positive class for an alert, chosen by a rule.

A rule sees only validation nodes (or graphs), as counts by score bin (`core.score_bins`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tomli_w

from atoll.core.errors import ConfigError
from atoll.core.files import write_atomically
from atoll.core.score_bins import lower_edges

RULES = {
    "max_f1": "the highest F1 of the positive class",
    "recall@precision=P": "the highest recall with a precision of at least P",
    "precision@recall=R": "the highest precision with a recall of at least R",
    "cost:FN,FP": "the lowest cost, where a missed positive costs FN and a false alert FP",
}
"""The form of each rule, and its goal."""
THRESHOLD = "threshold.toml"
"""The file of a site's own threshold, in the folder of a run whose scores stay at the site."""
_NUMBER = r"([\d.]+(?:e[+-]?\d+)?)"  # ASCII only: a card repeats it, and float() accepts more
_AT = re.compile(rf"(recall|precision)@(precision|recall)={_NUMBER}", re.ASCII)
_COST = re.compile(rf"cost:{_NUMBER},{_NUMBER}", re.ASCII)


@dataclass(frozen=True)
class Threshold:
    """Alert if the probability of the class `positive` is at least `value`."""

    rule: str
    value: float
    positive: int  # the number of the class
    # On the validation nodes (or graphs) that chose it. A delivered model lacks these values.
    precision: float | None = None
    recall: float | None = None
    alerts: float | None = None  # the share of alerts among them

    def plain(self) -> dict[str, object]:
        """Return the table `threshold` of model.toml."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def of(cls, about: Mapping[str, object] | None) -> Threshold | None:
        """Return the threshold in the content of model.toml, or None if the run chose none."""
        found = (about or {}).get("threshold")
        return cls(**found) if isinstance(found, dict) else None


@dataclass(frozen=True)
class Rule:
    """A parsed rule."""

    text: str
    kind: str  # "max_f1", "recall", "precision" or "cost"
    numbers: tuple[float, ...]

    def best(self, true: np.ndarray, false: np.ndarray) -> int | None:
        """Return the lowest bin that alerts, or None if no bin satisfies the rule.

        The arguments are the numbers of true and of false alerts for each possible lowest bin.
        Ties go to the fewest alerts.
        """
        positives, alerts = true[0], true + false
        precision = true / np.maximum(alerts, 1)
        recall = true / max(positives, 1)
        if self.kind == "max_f1":
            gain = 2 * true / np.maximum(alerts + positives, 1)
        elif self.kind == "cost":
            missed, wrong = self.numbers
            gain = -(missed * (positives - true) + wrong * false)
        else:
            wanted, bound = (recall, precision) if self.kind == "recall" else (precision, recall)
            gain = np.where((bound >= self.numbers[0]) & (alerts > 0), wanted, -np.inf)
        found = np.flatnonzero(gain == gain.max())
        return int(found[-1]) if np.isfinite(gain.max()) else None


def write_chosen(path: Path, rule: Rule, counts: np.ndarray, positive: int) -> None:
    """Write the threshold that a rule chooses to a file, or remove the file if it chooses none."""
    if (chosen := choose(rule, counts, positive)) is None:
        path.unlink(missing_ok=True)
    else:
        write_atomically(path, tomli_w.dumps(chosen.plain()).encode())


def of_alerts(counts: np.ndarray, value: float) -> tuple[float, float, float]:
    """Return precision, recall and share of alerts at a threshold, of counts (2, BINS)."""
    above = lower_edges()[:-1].numpy() >= value - 1e-12
    false, true = counts[:, above].sum(1).tolist()
    alerts = true + false
    return true / max(alerts, 1), true / max(counts[1].sum(), 1), alerts / max(counts.sum(), 1)


def parse_rule(text: str) -> Rule:
    """Parse a rule, or raise a one-sentence error."""
    try:
        if text == "max_f1":
            return Rule(text, text, ())
        if (at := _AT.fullmatch(text)) and at[1] != at[2] and 0 < (share := float(at[3])) <= 1:
            return Rule(text, at[1], (share,))
        if cost := _COST.fullmatch(text):
            missed, wrong = map(float, cost.groups())
            if min(missed, wrong) > 0 and max(missed, wrong) < float("inf"):
                return Rule(text, "cost", (missed, wrong))
    except ValueError:
        pass
    known = ", ".join(RULES)
    raise ConfigError(f"threshold cannot be '{text}'; give one of {known}, as in cost:10,1")


def choose(rule: Rule, counts: np.ndarray, positive: int) -> Threshold | None:
    """Return the rule's threshold, or None if no node is positive or no bin satisfies the rule.

    `counts` are the nodes of each true class and score bin, (2, BINS).
    """
    # Alerts if the lowest bin that alerts is b, for b from 0 to "none".
    false, true = np.append(counts[:, ::-1].cumsum(1)[:, ::-1], np.zeros((2, 1)), axis=1)
    lowest = rule.best(true, false)
    if not true[0] or lowest is None:
        return None
    hits, alerts = float(true[lowest]), float(true[lowest] + false[lowest])
    scores = hits / max(alerts, 1), hits / float(true[0]), alerts / float(counts.sum())
    return Threshold(rule.text, float(lower_edges()[lowest]), positive, *scores)
