"""A finished run, read back from its folder: its result, and what the server had at the end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.method import Method
from atoll.core.tree import Tree
from atoll.engines.checkpoint import load_checkpoint
from atoll.engines.ledger import Ledger
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig, make_config, read_config, resolve
from atoll.experiment.protocols import Protocol, protocol
from atoll.experiment.result import Result, SeedResult
from atoll.experiment.rounds import cached_rounds, empty_history, restored_scores
from atoll.experiment.run import CHECKPOINT, Data, make_federation, selection, task_of_object


@dataclass(frozen=True, eq=False)
class SavedRun:
    """What `read_run` finds.

    Attributes:
        result: As the run returned it, but for the times.
        servers: The server's tree at the end of each seed.
        federations: Each seed's clients.
        method: Built again from the configuration; None if Python gave an object.
    """

    result: Result
    servers: tuple[Tree, ...]
    federations: tuple[Federation, ...]
    method: Method | None

    @property
    def config(self) -> RunConfig:
        return self.result.config


def read_run(folder: Path, data: Data | None = None, *, like: SavedRun | None = None) -> SavedRun:
    """Read a finished run.

    Args:
        folder: Where it was saved.
        data: What Python gave in place of a name.
        like: A run whose clients this one must share; they are not made again.
    """
    asked = _configuration(folder, data)
    config, rules = resolve(asked, task_of_object(data))
    if like is not None:
        _check_same_clients(folder, config, like.config)
        federations = like.federations
    else:
        federations, config = _federations(config, rules, asked, data)
    if rules.data_seed is not None:
        federations = federations[:1] * config.seeds
    first, method = federations[0], None
    if "method" not in config.objects:
        method = build_method(config, first.features, first.classes, first.task)
    seeds, servers = [], []
    for seed, federation in enumerate(federations, start=config.seed):
        tree = load_checkpoint(folder / f"seed-{seed}" / CHECKPOINT)
        seeds.append(_seed_result(seed, tree, federation, method))
        servers.append(tree["server"])
    about = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    result = Result(
        config,
        tuple(seeds),
        method.scored_as() if method else about["scored"],
        rules.weights,
        selection(config, rules),
        about["engine"],
        about["device"],
        metric=first.metric,
        out=folder,
        hyperparameters=about["hyperparameters"],
        federation=about["federation"],
        privacy=about.get("privacy"),
    )
    return SavedRun(result, tuple(servers), federations, method)


def _configuration(folder: Path, data: Data | None) -> RunConfig:
    """The run's configuration; a clear word where there is no finished run."""
    if not (folder / "config.toml").exists():
        raise ConfigError(f"'{folder}' holds no run (it has no config.toml)")
    if not (folder / "result.json").exists():
        raise ConfigError(
            f"the run in '{folder}' is not finished; continue it with: atoll run --resume {folder}"
        )
    config = make_config(**read_config(folder / "config.toml"))
    if "data" in config.objects and data is None:
        raise ConfigError(
            f"the run in '{folder}' was started in Python with a data object, which its folder "
            "does not hold; read it in Python, and give the data again"
        )
    return config


def _federations(
    config: RunConfig, rules: Protocol, asked: RunConfig, data: Data | None
) -> tuple[tuple[Federation, ...], RunConfig]:
    """Every seed's clients, or the first seed's where the protocol fixes the data."""
    count = config.seeds if rules.data_seed is None else 1
    made = [
        make_federation(config, rules, seed, data, asked)
        for seed in range(config.seed, config.seed + count)
    ]
    return tuple(one[0] for one in made), made[0][2]


def _check_same_clients(folder: Path, config: RunConfig, other: RunConfig) -> None:
    """Refuse to compare client by client what was not run on the same clients."""
    names = ["protocol", "data", "partition", "split", "ratios", "clients", "own", "schema"]
    if protocol(config.protocol).data_seed is None:
        names += ["seed", "seeds"]
    for name in names:
        one, two = getattr(config, name), getattr(other, name)
        if one != two:
            raise ConfigError(
                f"the run in '{folder}' has {name} {one}, but the other has {two}; only runs on "
                "the same clients can be compared client by client"
            )


def _seed_result(
    seed: int, tree: Tree, federation: Federation, method: Method | None
) -> SeedResult:
    history, ledger = empty_history(federation), Ledger()
    history.scores, history.seconds = restored_scores(tree), tree["seconds"].tolist()
    history.cached = cached_rounds(method, tree["server"])
    ledger.restore(tree["ledger"])
    return SeedResult(seed, history, ledger)
