"""What a run found: metrics with spread, what crossed, how long it took, how to repeat it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from atoll.core.files import write_atomically
from atoll.core.method import Method
from atoll.core.tree import Tree
from atoll.engines.ledger import Ledger
from atoll.experiment.columns import ledger_table, metrics_table, table_file
from atoll.experiment.config import RunConfig, config_text
from atoll.experiment.hardware import environment
from atoll.experiment.history import SCORED, History, Selection
from atoll.experiment.metrics import METRICS, WEIGHTINGS, best_round, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG, RESULT = "config.toml", "result.json"


@dataclass(frozen=True)
class SeedResult:
    """One seed's history and traffic."""

    seed: int
    history: History
    ledger: Ledger

    @classmethod
    def of_checkpoint(
        cls, seed: int, tree: Tree, sizes: History, method: Method | None
    ) -> SeedResult:
        """The exact scores of a checkpoint, in a history that has the clients' sizes."""
        sizes.restore(tree)
        if method is not None:
            sizes.cached = method.diagnostics(tree["server"]).get("cached", [])
        ledger = Ledger()
        ledger.restore(tree["ledger"])
        return cls(seed, sizes, ledger)


@dataclass(frozen=True, repr=False, kw_only=True)
class Result:
    """All seeds of one configuration, which names every choice.

    Attributes:
        deployed: The model that `method.deploy` gives clients: "global" or "personalised".
        weights: The mean over clients that the protocol reports.
        select: How the protocol picks the round.
        setup_seconds: Loading, dividing and preparing.
        federation: How the first seed's federation was made.
        metric: What this data set is scored by; it picks the round.
        hyperparameters: Every value of method, net and optimizer, defaults included.
        privacy: What was spent (`experiment.privacy`); None without differential privacy.

    Examples:
        >>> import atoll
        >>> result = atoll.run("fedavg", "lagoon", clients=3, rounds=2, seeds=2)
        >>> len(result.metrics()["test_accuracy"]["per_seed"])
        2
        >>> result.of_clients("accuracy", "test").shape  # seeds, clients
        (2, 3)
        >>> sorted(result.bytes())
        ['down', 'up']
        >>> result.save("two-seeds")  # config.toml, result.json, metrics.csv, ledger.csv
    """

    config: RunConfig
    seeds: tuple[SeedResult, ...]
    deployed: str
    weights: str
    select: str
    engine: str
    device: str
    setup_seconds: float = 0.0
    environment: Mapping[str, str] = field(default_factory=environment)
    federation: Mapping[str, Any] = field(default_factory=dict)
    out: Path | None = None
    metric: str = "accuracy"
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] | None = None
    plot: ClassVar[Callable[..., Figure]]
    """Draws the result (`atoll.api.plot`, which attaches itself here)."""

    def __repr__(self) -> str:
        found = self.metrics().get("test_accuracy", {"mean": float("nan"), "std": None})
        std = "" if found["std"] is None else f" ± {found['std']:.4f}"
        how = f"{self.scored} model, {len(self.seeds)} seed(s), protocol {self.config.protocol}"
        what = f"{self.config.method} on {self.config.data}"
        return f"<Result {what}: test accuracy {found['mean']:.4f}{std} ({how})>"

    @property
    def scored(self) -> str:
        """The model behind the reported numbers: "global", "personalised" or "local"."""
        return self.deployed if self.config.evaluate == "deployed" else "local"

    @property
    def selection(self) -> Selection:
        """How the reported round is picked."""
        scored = self.config.evaluate or "deployed"
        return Selection(scored, self.metric, self.weights, self.select)

    @property
    def clients(self) -> int:
        """How many there are."""
        return len(self.seeds[0].history.nodes)

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Every reported number: mean, standard deviation and the value of each seed."""
        table: dict[str, list[float]] = defaultdict(list)
        for seed in self.seeds:
            for name, value in self.seed_metrics(seed.history).items():
                table[name].append(float(value))
        means = {name: float(np.mean(values)) for name, values in table.items()}
        return {k: {"mean": means[k], "std": spread(v), "per_seed": v} for k, v in table.items()}

    def seed_metrics(self, history: History) -> dict[str, float]:
        """One seed's numbers under the protocol's rules; undefined ones (NaN) are left out."""
        rule = replace(self.selection, metric=self.selection.picked_by(history))
        both = list(product(METRICS, ("test", "val")))
        out = {f"{role}_{metric}": rule.value(history, metric, role) for metric, role in both}
        others = {f"test_accuracy_by_{name}": replace(rule, weights=name) for name in WEIGHTINGS}
        others["last_test_accuracy"] = replace(rule, select="last")
        for scored in SCORED:
            name = self.deployed if scored == "deployed" else "local"
            others[f"{name}_test_accuracy"] = replace(rule, scored=scored)
        out |= {name: other.value(history, "accuracy", "test") for name, other in others.items()}
        out["best_round"] = float(best_round(rule.mean(history, rule.metric, "val")))
        return {name: value for name, value in out.items() if not np.isnan(value)}

    def of_clients(self, metric: str = "accuracy", role: str = "test") -> np.ndarray:
        """What each client reports, (S, K): a metric at the round that the protocol picks."""
        rule = self.selection
        return np.stack([rule.of_clients(seed.history, metric, role) for seed in self.seeds])

    def curve(
        self, metric: str | None = None, role: str = "test", scored: str | None = None
    ) -> np.ndarray:
        """A metric after each round, mean over clients as the protocol reports it, (S, R).

        The role is "train", "val" or "test"; the model is "deployed" or "local" (`scored`). By
        default the metric is the data set's, and the model is the one that the result reports.
        """
        rule, metric = self.selection, metric or self.metric
        rule = replace(rule, scored=scored or rule.scored)
        return np.stack([rule.mean(seed.history, metric, role) for seed in self.seeds])

    def seconds(self) -> dict[str, float]:
        """Set-up, training (with scoring), and the median round."""
        rounds = [s for seed in self.seeds for s in seed.history.seconds]
        return {
            "setup": round(self.setup_seconds, 4),
            "train": round(sum(rounds), 4),
            "per_round": round(float(np.median(rounds)), 6) if rounds else 0.0,
        }

    def bytes(self) -> dict[str, int]:
        """Training traffic of all seeds; scoring is kept apart in the ledger."""
        return {way: sum(s.ledger.total(way) for s in self.seeds) for way in ("up", "down")}

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        named = msgspec.structs.replace(self.config, clients=self.clients)
        choices = ("method", "data", "clients", "partition", "split", "protocol")
        return {
            **{name: getattr(named, name) for name in choices},
            "engine": self.engine,
            "device": self.device,
            "rounds": named.rounds,
            "seeds": len(self.seeds),
            "seed": self.seeds[0].seed,
            "scored": self.scored,
            "metrics": self.metrics(),
            "seconds": self.seconds(),
            "bytes": self.bytes(),
            "out": None if self.out is None else str(self.out),
            **({} if self.privacy is None else {"privacy": dict(self.privacy)}),
        }

    def save(self, out: str | Path, *, tables: bool = True) -> None:
        """Write everything into a folder; each file appears whole or not at all.

        The tables have the numbers of every round and client, which may be many.
        """
        out = Path(out)
        names = ("hyperparameters", "metric", "weights", "select", "environment", "federation")
        whole = self.summary() | {"out": str(out)} | {name: getattr(self, name) for name in names}
        whole["ledger"] = {str(s.seed): s.ledger.by_step() for s in self.seeds}
        files = {CONFIG: config_text(self.config).encode()}
        if tables:
            metrics = metrics_table({s.seed: s.history for s in self.seeds}, self.deployed)
            ledger = ledger_table({s.seed: s.ledger for s in self.seeds})
            files |= (table_file("metrics", metrics), table_file("ledger", ledger))
        # The last file: its presence shows that the run is finished.
        files[RESULT] = json.dumps(whole, indent=2, allow_nan=False, default=str).encode()
        for name, content in files.items():
            write_atomically(out / name, content)
