"""What a run found: metrics with spread, what crossed, how long it took, how to repeat it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from atoll.core.files import write_atomically
from atoll.core.method import Method
from atoll.engines.ledger import Ledger
from atoll.experiment.columns import ledger_table, metrics_table, table_file
from atoll.experiment.config import RunConfig, config_text
from atoll.experiment.hardware import environment
from atoll.experiment.history import SCORED, History
from atoll.experiment.metrics import METRICS, WEIGHTINGS, best_round, spread
from atoll.experiment.privacy import privacy_report
from atoll.experiment.protocols import Protocol
from atoll.experiment.selection import Selection, select_rule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONFIG, RESULT = "config.toml", "result.json"


@dataclass(frozen=True)
class SeedResult:
    """One seed's history and traffic."""

    seed: int
    history: History
    ledger: Ledger


@dataclass(frozen=True, repr=False, kw_only=True)
class Result:
    """All seeds of one configuration.

    Attributes:
        config: Resolved: every choice named.
        seeds: One per seed.
        deployed: What `method.deploy` makes clients predict with: "global" or "personalised".
        weights: The mean over clients that the protocol reports.
        select: How the protocol picks the round.
        engine: The engine that ran.
        device: The device that ran.
        setup_seconds: Loading, dividing and preparing.
        environment: Versions and machine.
        federation: How the first seed's federation was made.
        out: Where it is saved.
        hyperparameters: Every value of method, net and optimizer, defaults included.
        metric: What this data set is scored by; it picks the round.
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
    environment: Mapping[str, str] = field(default_factory=dict)
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
        return (
            f"<Result {self.config.method} on {self.config.data}: test accuracy "
            f"{found['mean']:.4f}{std} ({self.scored} model, {len(self.seeds)} "
            f"seed(s), protocol {self.config.protocol})>"
        )

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
        table: dict[str, list[float]] = {}
        for seed in self.seeds:
            for name, value in seed_metrics(seed.history, self).items():
                table.setdefault(name, []).append(value)
        return {name: _spread(values) for name, values in table.items()}

    def of_clients(self, metric: str = "accuracy", role: str = "test") -> np.ndarray:
        """What each client reports, (S, K): a metric at the round that the protocol picks."""
        rule = self.selection
        return np.stack([rule.of_clients(seed.history, metric, role) for seed in self.seeds])

    def curve(
        self, metric: str | None = None, role: str = "test", scored: str | None = None
    ) -> np.ndarray:
        """A metric after each round, mean over clients as the protocol reports it, (S, R).

        Args:
            metric: One of `metrics.METRICS`; None is what the data set is scored by.
            role: "train", "val" or "test".
            scored: "deployed" or "local"; None is what the result reports.
        """
        rule = replace(self.selection, scored=scored or self.selection.scored)
        return np.stack(
            [rule.mean(seed.history, metric or self.metric, role) for seed in self.seeds]
        )

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
        config = self.config
        privacy = {} if self.privacy is None else {"privacy": dict(self.privacy)}
        return {
            "method": config.method,
            "data": config.data,
            "clients": self.clients,
            "partition": config.partition,
            "split": config.split,
            "protocol": config.protocol,
            "engine": self.engine,
            "device": self.device,
            "rounds": config.rounds,
            "seeds": len(self.seeds),
            "seed": self.seeds[0].seed,
            "scored": self.scored,
            "metrics": self.metrics(),
            "seconds": self.seconds(),
            "bytes": self.bytes(),
            "out": None if self.out is None else str(self.out),
            **privacy,
        }

    def save(self, out: str | Path, *, tables: bool = True) -> None:
        """Write everything into a folder; each file appears whole or not at all.

        Args:
            out: The folder.
            tables: Whether the numbers of every round and client go along, which may be many.
        """
        out = Path(out)
        whole = {
            **self.summary(),
            "out": str(out),
            "hyperparameters": dict(self.hyperparameters),
            "metric": self.metric,
            "weights": self.weights,
            "select": self.select,
            "environment": dict(self.environment),
            "federation": dict(self.federation),
            "ledger": {str(s.seed): s.ledger.by_step() for s in self.seeds},
        }
        files = {CONFIG: config_text(self.config).encode()}
        if tables:
            histories = {seed.seed: seed.history for seed in self.seeds}
            ledgers = {seed.seed: seed.ledger for seed in self.seeds}
            files |= (
                table_file("metrics", metrics_table(histories, self.deployed)),
                table_file("ledger", ledger_table(ledgers)),
            )
        # The last file: its presence shows that the run is finished.
        files[RESULT] = json.dumps(whole, indent=2, allow_nan=False, default=str).encode()
        for name, content in files.items():
            write_atomically(out / name, content)


def seed_metrics(history: History, rules: Result) -> dict[str, float]:
    """One seed's numbers under the protocol's rules; undefined ones (NaN) are left out."""
    rule = rules.selection
    rule = replace(rule, metric=rule.picked_by(history))
    out: dict[str, float] = {}
    for metric in METRICS:
        for role in ("test", "val"):
            out[f"{role}_{metric}"] = rule.value(history, metric, role)
    others = {f"test_accuracy_by_{name}": replace(rule, weights=name) for name in WEIGHTINGS}
    others["last_test_accuracy"] = replace(rule, select="last")
    for scored in SCORED:
        name = rules.deployed if scored == "deployed" else "local"
        others[f"{name}_test_accuracy"] = replace(rule, scored=scored)
    out |= {name: other.value(history, "accuracy", "test") for name, other in others.items()}
    out["best_round"] = float(best_round(rule.mean(history, rule.metric, "val")))
    return {name: value for name, value in out.items() if not np.isnan(value)}


def _spread(values: list[float]) -> dict[str, Any]:
    each = [float(v) for v in values]
    return {"mean": float(np.mean(values)), "std": spread(values), "per_seed": each}


def make_result(
    config: RunConfig,
    rules: Protocol,
    method: Method,
    seeds: Sequence[SeedResult],
    *,
    engine: str,
    device: str,
    setup_seconds: float,
    federation: Mapping[str, Any],
    metric: str,
    out: Path | None,
    federated: bool = False,
) -> Result:
    """The result of all seeds; see `Result`.

    Args:
        config: Resolved.
        rules: Its protocol.
        method: As built, without the wrapper of differential privacy.
        seeds: One for each seed.
        engine: The engine that ran.
        device: The device that ran.
        setup_seconds: Loading, dividing and preparing.
        federation: How the first seed's federation was made.
        metric: The data set's metric.
        out: The folder of the run.
        federated: Whether real sites ran all seeds on the same data.
    """
    return Result(
        config=config,
        seeds=tuple(seeds),
        deployed=method.scored_as(),
        weights=rules.weights,
        select=select_rule(config, rules),
        engine=engine,
        device=device,
        setup_seconds=setup_seconds,
        environment=environment(),
        federation=federation,
        out=out,
        metric=metric,
        hyperparameters=asdict(method),
        privacy=_privacy_of(config, seeds, federated=federated),
    )


def _privacy_of(
    config: RunConfig, seeds: Sequence[SeedResult], *, federated: bool
) -> dict[str, Any] | None:
    """The report on differential privacy; None if the run had none."""
    if config.dp is None:
        return None
    return privacy_report(
        config.dp,
        [seed.ledger for seed in seeds],
        clients=len(seeds[0].history.nodes),
        fraction=config.fraction,
        rounds=config.rounds or 0,
        federated=federated,
    )
