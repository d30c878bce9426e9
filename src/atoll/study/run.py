"""From a configuration to a saved result: load, divide, run every seed, keep everything."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import Protocol as TypingProtocol

import msgspec

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.method import Method
from atoll.data.federate import federate
from atoll.data.load import load, one_graph
from atoll.data.prepare import PREPARATIONS
from atoll.data.source import Source
from atoll.study.config import (
    RunConfig,
    build_method,
    config_text,
    make_config,
    read_config,
    resolve,
    with_own_partition,
)
from atoll.study.experiment import Experiment, History
from atoll.study.machine import choose_device, choose_engine, environment, tune_process
from atoll.study.protocols import Protocol
from atoll.study.result import Result, SeedResult

CHECKPOINT = "checkpoint.atoll"


class Stopped(Exception):
    """The user stopped the run; everything up to the last round is saved."""

    def __init__(self, out: Path | None, seed: int, rounds: int) -> None:
        super().__init__()
        self.out, self.seed, self.rounds = out, seed, rounds


class Observer(TypingProtocol):
    """Hears how a run goes; the command line draws a progress bar with it."""

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        """Before the first seed."""

    def round(self, seed: int, history: History) -> None:
        """After every round."""

    def should_stop(self) -> bool:
        """Whether to stop after this round."""


@dataclass
class Silent:
    """Hears everything, says nothing."""

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        pass

    def round(self, seed: int, history: History) -> None:
        pass

    def should_stop(self) -> bool:
        return False


def run(
    method: str | Method = "fedavg",
    data: str | Source | Federation = "lagoon",
    *,
    out: str | Path | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Result:
    """Run a method on data and return the result.

    Args:
        method: A name, or a method object (then `--set` style options do not apply).
        data: A name or path, a `Source`, or a finished `Federation`.
        out: Folder to save the result and checkpoints in; None saves nothing.
        observer: Hears about progress.
        **options: As in `RunConfig`: clients, partition, split, protocol, rounds, epochs,
            fraction, seeds, seed, engine, device, chunk, set, compat, evaluate, allow, data_root,
            schema, own.
    """
    named = {
        "method": method if isinstance(method, str) else type(method).__name__.lower(),
        "data": data if isinstance(data, str) else data.name,
    }
    config = make_config(**named, **options)
    return run_config(
        config,
        out=None if out is None else Path(out),
        observer=observer,
        method=None if isinstance(method, str) else method,
        data=None if isinstance(data, str) else data,
    )


def resume(folder: str | Path, observer: Observer | None = None) -> Result:
    """Continue a stopped run; a finished one is only read again."""
    folder = Path(folder)
    if not (folder / "config.toml").exists():
        raise ConfigError(f"{folder} holds no run to resume (it has no config.toml)")
    config = make_config(**read_config(folder / "config.toml"))
    return run_config(config, out=folder, observer=observer, resuming=True)


def run_config(
    config: RunConfig,
    *,
    out: Path | None = None,
    observer: Observer | None = None,
    method: Method | None = None,
    data: Source | Federation | None = None,
    resuming: bool = False,
) -> Result:
    """Run every seed of a configuration."""
    began = time.perf_counter()
    observer = observer or Silent()
    tune_process()
    asked_partition = config.partition
    config, rules = resolve(config)
    engine, why = choose_engine(config.engine)
    device = choose_device(config.device)
    if out is not None:
        claim_folder(out, resuming=resuming)
    seeds: list[SeedResult] = []
    setup = 0.0
    about: Any = {}
    for number in range(config.seed, config.seed + config.seeds):
        federation, notes, config = make_federation(config, rules, number, data, asked_partition)
        if not seeds:
            about = federation.about
            fingerprint = name_configuration(config)
            if out is not None:
                (out / "config.toml").write_text(config_text(config))
            observer.begin(config, engine, why, notes)
        chosen = method or build_method(config, federation.features, federation.classes)
        experiment = Experiment(
            chosen, federation, rounds=config.rounds or rules.rounds, fraction=config.fraction,
            seed=number, engine=engine, device=device, chunk=config.chunk, compat=config.compat,
        )  # fmt: skip
        setup += time.perf_counter() - began
        seeds.append(_one_seed(experiment, number, fingerprint, out, observer))
        began = time.perf_counter()
    result = Result(
        config, tuple(seeds), type(chosen).deployed, rules.weights, rules.select, engine,
        device.type, setup, environment(), about, out,
    )  # fmt: skip
    if out is not None:
        result.save(out)
    return result


def _one_seed(
    experiment: Experiment, seed: int, fingerprint: str, out: Path | None, observer: Observer
) -> SeedResult:
    path = None if out is None else out / f"seed-{seed}" / CHECKPOINT
    report: Callable[[History], None] = lambda history: observer.round(seed, history)  # noqa: E731
    finished = experiment.run(
        checkpoint=path, fingerprint=f"{fingerprint}/{seed}", on_round=report,
        should_stop=observer.should_stop,
    )  # fmt: skip
    if not finished.finished:
        raise Stopped(out, seed, finished.history.rounds)
    return SeedResult(seed, finished.history, finished.ledger)


def make_federation(
    config: RunConfig,
    rules: Protocol,
    seed: int,
    data: Source | Federation | None,
    asked_partition: str | None,
) -> tuple[Federation, list[str], RunConfig]:
    """The federation of one seed, what the loader has to say, and the completed configuration."""
    if isinstance(data, Federation):
        return data, [], config
    data_seed = seed if rules.data_seed is None else rules.data_seed
    notes: list[str] = []
    if data is None:
        loaded, notes = load(
            config.data, clients=config.clients or rules.clients, seed=data_seed,
            root=config.data_root, schema=config.schema, own=config.own,
        )  # fmt: skip
        source = one_graph(loaded)
    else:
        source = data
    config = with_own_partition(config, source, asked_partition)
    for name in rules.prepare:
        source = PREPARATIONS[name](source)
    federation = federate(
        source, clients=config.clients, partition=config.partition or rules.partition,
        split=config.split or rules.split, ratios=config.ratios, seed=data_seed, allow=config.allow,
    )  # fmt: skip
    return federation, notes, config


def name_configuration(config: RunConfig) -> str:
    """A short name of everything that decides the numbers, for checkpoints."""
    # Where a run happens does not change it (engines agree only to rounding, so they are named).
    plain = msgspec.structs.replace(config, seeds=1, seed=0, data_root=None)
    return hashlib.sha256(config_text(plain).encode()).hexdigest()[:16]


def claim_folder(out: Path, *, resuming: bool) -> None:
    """Make sure that the folder can be written and that nothing in it would be lost."""
    if (out / "config.toml").exists() and not resuming:
        raise ConfigError(
            f"{out} already holds a run; continue it with --resume {out}, or choose another --out"
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"output folder {out} cannot be made: {error}") from error
    if not os.access(out, os.W_OK):
        raise ConfigError(f"output folder {out} cannot be written; choose another --out")
