"""The result of a run: metrics with standard deviations, traffic, times, and how to repeat it.

Its two large tables are CSV with six digits per score, or Parquet if they would be long.
"""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec
import numpy as np

from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import known_names
from atoll.core.files import side_by_side, write_atomically
from atoll.core.method import Method
from atoll.core.task import ROLES
from atoll.core.tree import Tree
from atoll.engines.ledger import Ledger
from atoll.experiment.card import write_cards
from atoll.experiment.config import RunConfig, saved_text
from atoll.experiment.hardware import environment
from atoll.experiment.history import SCORED, History, Selection, threshold_of
from atoll.experiment.metrics import METRICS, POOLED, WEIGHTINGS, best_round, find_metric, spread
from atoll.experiment.newcomer import FirstDay
from atoll.experiment.threshold import of_alerts
from atoll.experiment.unseen import Unseen

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch.nn import Module

    from atoll.experiment.predictions import Predictions

CONFIG, RESULT = "config.toml", "result.json"
Columns = Mapping[str, np.ndarray]
LONG = 5  # from this number of rounds on, the first one should not be the best
MAX_CSV_ROWS = 200_000  # a longer table becomes Parquet, a tenth of the size


@dataclass(frozen=True)
class SeedResult:
    """One seed's history and traffic."""

    seed: int
    history: History

    @property
    def ledger(self) -> Ledger:
        return self.history.ledger

    @classmethod
    def of_checkpoint(cls, seed: int, tree: Tree, sizes: History, method: Method | None) -> Self:
        """Restore the exact scores of a checkpoint into a history with the clients' sizes."""
        sizes.restore(tree)
        if method is not None:
            sizes.cached = method.diagnostics(tree["server"]).get("cached", [])
        return cls(seed, sizes)


@dataclass(frozen=True, repr=False, kw_only=True)
class Result:
    """All seeds of one configuration, which names every choice.

    Attributes:
        deployed: The kind of model that `method.deploy` gives clients: "global" or "personalised".
        weights: The weights of the mean over clients that the protocol reports.
        select: The protocol's rule that selects the round.
        setup_seconds: The time for loading, partitioning and preparing.
        federation: How the first seed's federation was made.
        metric: The user's metric, or the data set's. It selects the round.
        hyperparameters: Every value of method, net and optimizer, including defaults.
        privacy: The spent privacy (`experiment.privacy`), or None without differential privacy.
        first_day: The scores of a client that never trained, or None if all clients trained.
        unseen: Scores of nodes that arrived after training, by kind. Empty without such nodes.
        positive: The number of the positive class, of two.
        profile: Wall and CPU seconds of each stage. Empty unless they were requested.

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
    first_day: FirstDay | None = None
    unseen: Mapping[str, Unseen] = field(default_factory=dict)
    positive: int = 1
    profile: Mapping[str, Sequence[float]] = field(default_factory=dict)
    plot: ClassVar[Callable[..., Figure]]
    """Draw the result (`atoll.api.plot`, which attaches itself here)."""
    predict: ClassVar[Callable[..., Predictions]]
    """Predict new nodes with the saved model (`experiment.predict.predict`)."""
    model: ClassVar[Callable[..., Module]]
    """The saved model as a torch module (`atoll.api.model`)."""

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
        """The rule that selects the reported round."""
        scored = self.config.evaluate or "deployed"
        return Selection(scored, self.metric, self.weights, self.select)

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.seeds[0].history.nodes)

    @property
    def client_names(self) -> tuple[str, ...]:
        """The names of the clients, or their numbers if the data do not name them."""
        known, numbers = known_names(self.federation, "client"), range(self.clients)
        return known if self.named else tuple(map(str, numbers))

    @property
    def named(self) -> bool:
        """Whether the data name the clients."""
        return len(known_names(self.federation, "client")) == self.clients

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes. Empty if the data do not name them."""
        return known_names(self.federation, "class")

    def positive_class(self, metric: str | None = None) -> str:
        """Return the positive class's name if the metric depends on it, otherwise "".

        The default is the metric that selects the round; a threshold for alerts also depends on it.
        """
        alerts = metric is None and self.config.threshold is not None
        needed = alerts or find_metric(metric or self.metric).of_class
        return (self.class_names or ("0", "1"))[self.positive] if needed else ""

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return every reported number: mean, standard deviation and the value of each seed."""
        table: dict[str, list[float]] = defaultdict(list)
        for seed in self.seeds:
            for name, value in self.seed_metrics(seed.history).items():
                table[name].append(float(value))
        means = {name: float(np.mean(values)) for name, values in table.items()}
        return {k: {"mean": means[k], "std": spread(v), "per_seed": v} for k, v in table.items()}

    def seed_metrics(self, history: History) -> dict[str, float]:
        """Return one seed's numbers under the protocol's rules, without undefined ones (NaN)."""
        rule = replace(self.selection, metric=self.selection.picked_by(history))
        more = dict.fromkeys((*POOLED, *history.chosen)) if history.bins_known else ()
        both = list(product((*METRICS, *more), ("test", "val")))
        out = {f"{role}_{metric}": rule.value(history, metric, role) for metric, role in both}
        others = {f"test_accuracy_by_{name}": replace(rule, weights=name) for name in WEIGHTINGS}
        others["last_test_accuracy"] = replace(rule, select="last")
        for scored in SCORED:
            name = self.deployed if scored == "deployed" else "local"
            others[f"{name}_test_accuracy"] = replace(rule, scored=scored)
        out |= {name: other.value(history, "accuracy", "test") for name, other in others.items()}
        if (threshold := threshold_of(self.config, rule, history, self.positive)) is not None:
            picked = rule.one_round(history) or 0
            now = slice(picked, picked + 1)
            test = history.counts_of(rule.scored, "bins", "test", now)
            assert test is not None
            names = [f"threshold_{name}" for name in ("precision", "recall", "alerts")]
            out["threshold"] = threshold.value
            out |= dict(zip(names, of_alerts(test[0], threshold.value), strict=True))
        if self.config.metric is not None:
            local = replace(rule, scored="local").value(history, self.metric, "test")
            out[f"local_test_{self.metric}"] = local
        out["best_round"] = float(best_round(rule.mean(history, rule.metric, "val")))
        return {name: value for name, value in out.items() if not np.isnan(value)}

    def of_clients(self, metric: str = "accuracy", role: str = "test") -> np.ndarray:
        """Return a metric by seed and client, (S, K), at the round that the protocol selects."""
        rule = self.selection
        _check_score(metric, role, rule.scored)
        return np.stack([rule.of_clients(seed.history, metric, role) for seed in self.seeds])

    def curve(
        self, metric: str | None = None, role: str = "test", scored: str | None = None
    ) -> np.ndarray:
        """Return a metric by seed and round, (S, R), as the protocol's mean over clients.

        A pooled metric is computed over all clients' nodes instead. The role is "train", "val" or
        "test". The model is "deployed" or "local" (`scored`). The defaults are the metric that
        selects the round, and the model that the result reports.
        """
        rule, metric = self.selection, metric or self.metric
        rule = replace(rule, scored=scored or rule.scored)
        _check_score(metric, role, rule.scored)
        return np.stack([rule.mean(seed.history, metric, role) for seed in self.seeds])

    def after_training(self) -> list[str]:
        """Return a sentence for each score of nodes and clients that arrived after training."""
        said = [one.sentence(self.metric) for one in self.unseen.values()]
        return said + ([self.first_day.sentence(self.metric)] if self.first_day else [])

    def warnings(self) -> list[str]:
        """Return warnings about a selection without validation data, and about a poor model."""
        found, said, counts = self.metrics(), list[str](), self.confusion()
        ranks = self.metric != "accuracy" and found.get("test_auc", {"mean": 0.0})["mean"] > 0.6
        if counts is not None and len(counts) > 1 and not ranks:
            right, most = np.diagonal(counts).sum(), counts.sum(1).max()
            if right <= most:
                said.append(
                    "the model does no better than always predicting the most frequent class, "
                    f"which is right for {most / counts.sum():.1%}; try --class-weights balanced, "
                    "scaled features, or a --metric that looks at the rare class"
                )
        best_of = self.select.startswith("best-val") and f"test_{self.metric}" in found
        if best_of and f"val_{self.metric}" not in found:
            said.append(
                "no validation score exists, so the result is that of the last round; "
                "give more labels, or other --ratios"
            )
        picks = self.select.startswith("best-val") and (self.config.rounds or 1) >= LONG
        if picks and not any(found.get("best_round", {"per_seed": [1.0]})["per_seed"]):
            said.append(
                "the best round is the first, so that training did not help; try another learning "
                "rate, and check the features"
            )
        return said

    def confusion(self, role: str = "test") -> np.ndarray | None:
        """Return counts of all clients and seeds by true and predicted class, (C, C).

        They are from the selected rounds. Return None if counts are unknown, or if the selected
        round differs between clients.
        """
        rule, found = self.selection, []
        for seed in self.seeds:
            picked = rule.one_round(seed.history)
            rounds = slice(0, 0) if picked is None else slice(picked, picked + 1)
            counts = seed.history.counts_of(rule.scored, "confusion", role, rounds)
            if counts is None or not counts.any():
                return None
            found.append(counts[0])
        return np.asarray(np.sum(found, axis=0))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of set-up, of training (with scoring), and of the median round."""
        rounds = [s for seed in self.seeds for s in seed.history.seconds]
        return {
            "setup": round(self.setup_seconds, 4),
            "train": round(sum(rounds), 4),
            "per_round": round(float(np.median(rounds)), 6) if rounds else 0.0,
        }

    def bytes(self) -> dict[str, int]:
        """Return the bytes "up" and "down" of training in all seeds. Scoring is not included."""
        return {way: sum(s.ledger.total(way) for s in self.seeds) for way in ("up", "down")}

    def summary(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
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
            **({"positive_class": name} if (name := self.positive_class()) else {}),
            "metrics": self.metrics(),
            "seconds": self.seconds(),
            "bytes": self.bytes(),
            "out": None if self.out is None else str(self.out),
            **({} if self.privacy is None else {"privacy": dict(self.privacy)}),
            **({"warnings": warnings} if (warnings := self.warnings()) else {}),
            **({} if self.first_day is None else {"first_day": asdict(self.first_day)}),
            **({"unseen": {k: asdict(v) for k, v in self.unseen.items()}} if self.unseen else {}),
        }

    def save(self, out: str | Path, *, tables: bool = True) -> None:
        """Write the result to a folder. Without `tables`, omit the large tables of all rounds."""
        out = Path(out)
        names = ("hyperparameters", "metric", "weights", "select", "environment", "federation")
        whole = self.summary() | {"out": str(out)} | {name: getattr(self, name) for name in names}
        whole |= {"positive": self.positive} if self.config.positive is not None else {}
        profile = {name: [round(s, 4) for s in both] for name, both in self.profile.items()}
        whole |= {"profile": profile} if profile else {}
        whole["ledger"] = {str(s.seed): s.ledger.by_step() for s in self.seeds}
        files = {CONFIG: saved_text(self.config).encode()}
        if tables:
            called = self.client_names if self.named else ()
            metrics = metrics_table({s.seed: s.history for s in self.seeds}, self.deployed, called)
            ledger = ledger_table({s.seed: s.ledger for s in self.seeds})
            files |= (table_file("metrics", metrics), table_file("ledger", ledger))
        if self.out is not None and out == Path(self.out):
            write_cards(self, out)
        text = json.dumps(whole, indent=2, allow_nan=False, default=str)
        side_by_side(partial(write_atomically, out / name, files[name]) for name in files)
        # The last file. Its presence shows that the run is finished.
        write_atomically(out / RESULT, text.encode())


def _check_score(metric: str, role: str, scored: str) -> None:
    """Raise an error that lists the names if one of the three is unknown."""
    find_metric(metric)
    for kind, given, known in (("role", role, ROLES), ("scored model", scored, SCORED)):
        if given not in known:
            raise ConfigError(f"unknown {kind} '{given}'; choose one of: {', '.join(known)}")


def metrics_table(
    seeds: Mapping[int, History], deployed: str, names: Sequence[str] = ()
) -> Columns:
    """Return the columns of metrics.csv. `names` are the clients' names, if they have any."""
    blocks = [
        (seed, number, deployed if scored == "deployed" else scored, table)
        for seed, history in seeds.items()
        for scored in SCORED
        for number, table in enumerate(history.scores[scored])
    ]
    sizes = [len(table) for *_, table in blocks]
    numbers = np.concatenate([table.reshape(len(table), -1) for *_, table in blocks])
    chosen = next(iter(seeds.values())).columns
    clients = np.concatenate([np.arange(size) for size in sizes])
    return {
        "seed": np.repeat([seed for seed, *_ in blocks], sizes),
        "round": np.repeat([number for _, number, *_ in blocks], sizes),
        "client": clients,
        **({"name": np.array(names)[clients]} if names else {}),
        "scored": np.repeat([label for _, _, label, _ in blocks], sizes),
        **dict(zip(score_names(chosen), numbers.T, strict=True)),
    }


def score_names(metrics: Sequence[str] = METRICS) -> list[str]:
    """Return the columns of metrics.csv that contain scores."""
    return [f"{role}_{metric}" for role in ROLES for metric in metrics]


def ledger_table(seeds: Mapping[int, Ledger]) -> Columns:
    """Return the columns of ledger.csv: seed, round, step, client and the transferred bytes."""
    entries = [(seed, entry) for seed, ledger in seeds.items() for entry in ledger.entries]
    sizes = [entry.size for _, entry in entries]
    none = np.empty(0, dtype=np.int64)
    return {
        "seed": np.repeat([seed for seed, _ in entries], sizes),
        "round": np.repeat([entry.round for _, entry in entries], sizes),
        "step": np.repeat([entry.step for _, entry in entries], sizes),
        "client": np.concatenate([none, *(entry.clients for _, entry in entries)]),
        "bytes_down": np.repeat([entry.down for _, entry in entries], sizes),
        "bytes_up": np.repeat([entry.up for _, entry in entries], sizes),
    }


def table_file(name: str, columns: Columns) -> tuple[str, bytes]:
    """Return the name and content of a table's file. Undefined numbers are empty."""
    if len(columns["seed"]) <= MAX_CSV_ROWS:
        text = io.StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(zip(*map(_cells, columns.values()), strict=True))
        return f"{name}.csv", text.getvalue().encode()
    import pyarrow as pa
    import pyarrow.parquet

    small = {k: v.astype(np.float32) if v.dtype.kind == "f" else v for k, v in columns.items()}
    arrays = {k: pa.array(v, from_pandas=v.dtype.kind == "f") for k, v in small.items()}
    content = io.BytesIO()
    pa.parquet.write_table(pa.table(arrays), content, compression="zstd")
    return f"{name}.parquet", content.getvalue()


def _cells(values: np.ndarray) -> Sequence[object]:
    if values.dtype.kind != "f":
        return list(values.tolist())
    # One format for all values, because one for each takes three times as long.
    cells = ("%.6g," * len(values) % tuple(values.tolist())).split(",")[:-1]
    return ["" if cell == "nan" else cell for cell in cells]


def read_table(folder: Path, name: str) -> Columns:
    """Read a table that `table_file` made."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    path = folder / f"{name}.csv"
    try:
        if path.exists():
            kinds = dict.fromkeys(score_names(), pa.float64())
            options = pa.csv.ConvertOptions(column_types=kinds)
            table = pa.csv.read_csv(path, convert_options=options)
        else:
            path = folder / f"{name}.parquet"
            table = pa.parquet.read_table(path)
    except FileNotFoundError:
        raise DataError(f"the run in '{folder}' has no {name}.csv; copy it whole") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"'{path}' cannot be read ({error})") from error
    return {key: table.column(key).to_numpy() for key in table.column_names}


def read_history(metrics: Columns, ledger: Columns, seed: int, arrays: Columns) -> History:
    """Restore a seed's history from the two tables and the arrays of `RunFolder.seed_data`."""
    own = {key: values[metrics["seed"] == seed] for key, values in metrics.items()}
    clients = int(own["client"].max()) + 1
    known = [name.removeprefix("test_") for name in own if name.startswith("test_")]
    chosen = tuple(name for name in known if name not in METRICS)
    names = score_names((*METRICS, *chosen))
    shape = -1, clients, len(ROLES), len(METRICS) + len(chosen)
    unknown = np.full(len(own["client"]), np.nan)  # for runs of versions without this metric
    numbers = np.stack([own.get(name, unknown).astype(float) for name in names], axis=-1)
    local = own["scored"] == "local"
    order = np.lexsort((own["client"], own["round"]))
    rows = {"deployed": order[~local[order]], "local": order[local[order]]}
    scores = {name: list(numbers[chosen].reshape(shape)) for name, chosen in rows.items()}
    pairs = arrays.get("cached", np.empty((0, 2), dtype=int)).tolist()
    cached: list[list[int]] = [[] for _ in range(clients)] if pairs else []
    for client, number in pairs:
        cached[client].append(number)
    alike = np.ones(clients, dtype=np.int64)
    counts = arrays.get("counts", np.stack([alike] * len(ROLES), axis=1))
    seconds = arrays["seconds"].tolist() if arrays else []
    nodes, traffic = arrays.get("nodes", alike), _read_ledger(ledger, seed)
    start = "pooled_"
    pooled = {k.removeprefix(start): list(v) for k, v in arrays.items() if k.startswith(start)}
    return History(counts, nodes, scores, seconds, cached, traffic, chosen, pooled)


def _read_ledger(table: Columns, seed: int) -> Ledger:
    """Restore a seed's ledger. Consecutive lines of one step become one entry again."""
    ledger = Ledger()
    own = {key: values[table["seed"] == seed] for key, values in table.items()}
    client = own["client"]
    breaks = np.ones(len(client), dtype=bool)
    breaks[1:] = client[1:] <= client[:-1]
    for key in ("round", "step", "bytes_down", "bytes_up"):
        breaks[1:] |= own[key][1:] != own[key][:-1]
    for first, end in pairwise([*np.flatnonzero(breaks), len(client)]):
        number, down, up = (int(own[key][first]) for key in ("round", "bytes_down", "bytes_up"))
        ledger.add(number, str(own["step"][first]), client[first:end].tolist(), down, up)
    return ledger
