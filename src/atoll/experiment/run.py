"""From a configuration to a saved result: load, divide, run every seed, keep everything."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from typing import Protocol as TypingProtocol

import msgspec

from atoll.core.batching import batching_of
from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.method import Method
from atoll.data.source import GraphGroup
from atoll.engines.base import AUTO, EngineFactory, choose_engine, engine_factory, engine_name
from atoll.experiment.build import build_method
from atoll.experiment.config import (
    RunConfig,
    config_text,
    make_config,
    read_config,
    saved_header,
)
from atoll.experiment.folder import RunFolder, check_folder
from atoll.experiment.hardware import (
    choose_device,
    start,
    tuned_process,
)
from atoll.experiment.history import History
from atoll.experiment.loggers.base import open_logs
from atoll.experiment.model import about_model
from atoll.experiment.observers import Heard, Progress
from atoll.experiment.privacy import with_privacy
from atoll.experiment.problem import Data, Divide, Problem, nearly_single_class
from atoll.experiment.result import Result, SeedResult, make_result
from atoll.experiment.rounds import Experiment, Run
from atoll.experiment.selection import select_rule, selection_of
from atoll.experiment.sweep import can_be_one, run_together

SAVE_EVERY = 10.0
"""Least seconds between two checkpoints."""


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
    data: str | Data = "lagoon",
    *,
    engine: str | EngineFactory = AUTO,
    out: str | Path | None = None,
    observer: Observer | None = None,
    save_every: float = SAVE_EVERY,
    log: str | Sequence[str] = (),
    **options: Any,
) -> Result:
    """Run a method on data and return the result.

    Args:
        method: A name, or a method object, which brings its own hyper-parameters.
        data: A name or path, what `atoll.load` gave, or a finished `Federation`.
        engine: A name, or a function that takes `engines.prepare.EngineInputs` and returns an
            engine (`engines.base.Engine`).
        out: Folder to save the result and checkpoints in; None saves nothing.
        observer: Hears about progress.
        save_every: Least seconds between two checkpoints.
        log: Where else the numbers of every round go: "tensorboard", "mlflow", or both.
        **options: As in `RunConfig`: clients, partition, split, protocol, rounds, epochs,
            fraction, seeds, seed, device, chunk, set, compat, evaluate, allow, batch_size, task,
            data_root, schema, own, dp.

    Examples:
        >>> import atoll
        >>> result = atoll.run("fedprox", "lagoon", rounds=5, set={"mu": 0.1})
        >>> result.metrics()["test_accuracy"]["mean"] > 0.5
        True
    """
    given_method = None if isinstance(method, str) else method
    given_data = None if isinstance(data, str) else data
    given_engine = None if isinstance(engine, str) else engine_factory(engine)
    objects = {"method": given_method, "data": given_data, "engine": given_engine}
    for name in ("set", "epochs"):
        if given_method is not None and options.get(name):
            raise ConfigError(
                f"a method object has its own hyper-parameters, but {name} was given beside it; "
                f"leave {name} out, or give the method by name"
            )
    config = make_config(
        method=method if isinstance(method, str) else type(method).__name__,
        data=data if isinstance(data, str) else data.name,
        engine=engine_name(engine),
        objects=[name for name, value in objects.items() if value is not None],
        **options,
    )
    return run_config(
        config,
        out=None if out is None else Path(out),
        observer=observer,
        method=given_method,
        data=given_data,
        engine=given_engine,
        save_every=save_every,
        log=log,
    )


def resume(
    folder: str | Path,
    observer: Observer | None = None,
    *,
    method: Method | None = None,
    data: Data | None = None,
    engine: EngineFactory | None = None,
    save_every: float = SAVE_EVERY,
    log: str | Sequence[str] = (),
) -> Result:
    """Continue a stopped run; a finished one is only read again.

    A run that was started with an object (method, data, engine) needs the same object again.

    Examples:
        >>> import atoll
        >>> first = atoll.run("fedavg", "lagoon", rounds=2, out="my-run")  # and now it is killed
        >>> atoll.resume("my-run").metrics() == first.metrics()
        True
    """
    folder = Path(folder)
    if not (folder / "config.toml").exists():
        raise ConfigError(
            f"'{folder}' holds no run to resume (it has no config.toml); give the folder of a run"
        )
    config = make_config(**read_config(folder / "config.toml"))
    return run_config(
        config,
        out=folder,
        observer=observer,
        method=method,
        data=data,
        engine=engine,
        resuming=True,
        save_every=save_every,
        log=log,
    )


@tuned_process()
def run_config(
    config: RunConfig,
    *,
    out: Path | None = None,
    observer: Observer | None = None,
    method: Method | None = None,
    data: Data | None = None,
    engine: EngineFactory | None = None,
    resuming: bool = False,
    save_every: float = SAVE_EVERY,
    at_once: bool | None = None,
    log: str | Sequence[str] = (),
    divide: Divide | None = None,
) -> Result:
    """Run every seed of a configuration.

    Args:
        config: What to run.
        out: Folder to save everything in.
        observer: Hears about progress.
        method: In the place of a name.
        data: In the place of a name.
        engine: In the place of a name.
        resuming: Whether the folder holds a run that goes on.
        save_every: Least seconds between two checkpoints.
        at_once: Whether all seeds are trained in one program, if they can be; None does on a GPU,
            where that costs little more than one seed. On a CPU it gains nothing.
        log: Where else the numbers of every round go (`experiment.loggers.base.LOGS`).
        divide: Makes the clients of a seed; a `FederationCache` for runs that share them.
    """
    check_objects(config, {"method": method, "data": data, "engine": engine})
    plan = Plan(
        Problem.of(config, data),
        out=out,
        observer=observer,
        method=method,
        engine=engine,
        resuming=resuming,
        save_every=save_every,
        log=log,
        divide=divide,
    )
    if not (plan.device.type == "cuda" if at_once is None else at_once):
        return plan.result([plan.one_seed(experiment) for experiment in plan.experiments()])
    waiting = list(plan.experiments())
    if can_be_one(waiting):
        return plan.result([plan.one_seed(experiment) for experiment in waiting])
    runs = run_together(
        waiting,
        checkpoints=[plan.checkpoint(e) for e in waiting],
        every_seconds=save_every,
        should_stop=plan.heard.should_stop,
        on_round=lambda place, history: plan.heard.round(waiting[place].seed, history),
    )
    return plan.result([plan.seed_result(run) for run in runs])


class Plan:
    """A configuration on its way to a result: experiments, where they are saved, what they gave.

    The other arguments are those of `run_config`.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        out: Path | None,
        observer: Observer | None,
        resuming: bool,
        save_every: float,
        log: str | Sequence[str],
        divide: Divide | None,
        method: Method | None = None,
        engine: EngineFactory | None = None,
    ) -> None:
        self.began, self.setup = time.perf_counter(), 0.0
        self.out, self.save_every, self.given, self.problem = out, save_every, method, problem
        self.divide: Divide = divide or Problem.divide
        self.config, self.rules = config, _ = problem.config, problem.rules
        if engine is None:
            self.engine, self.why = choose_engine(config.engine)
        else:
            self.engine, self.why = config.engine, "given as an object"
        self.makes_engine = engine or self.engine
        self.device = choose_device(config.device)
        start(self.device)
        if method is not None:
            # What it cannot protect is refused before anything is kept.
            with_privacy(method, config.dp)
        if not 0 <= save_every < math.inf:
            raise ConfigError(f"save_every is {save_every}; give seconds, 0 for every round")
        if out is not None:
            check_folder(out, resuming=resuming)
        self.folder = None if out is None else RunFolder(out)
        progress = None if self.folder is None else Progress(self.folder.path)
        self.heard = Heard(observer or Silent(), progress, open_logs(log, out))
        self.method: Method | None = None
        self.federation: Federation | None = None
        self.about: Any = {}
        self.fingerprint = ""

    def experiments(self) -> Iterator[Experiment]:
        """One for each seed, made when it is asked for."""
        for number in range(self.config.seed, self.config.seed + self.config.seeds):
            given, made = self.problem.given, self.divide(self.problem, number)
            federation, self.config = made.federation, made.config
            config, method = made.config, self.given
            method = method or build_method(
                config, federation.features, federation.classes, federation.task.name
            )
            if self.method is None:
                self._begin(federation, method, made.notes)
            self.method, self.federation = method, federation
            keep = None
            if self.folder is not None:
                self.folder.write_partition(number, federation)
                keep = selection_of(config, self.rules, federation.metric)
            experiment = Experiment(
                with_privacy(method, config.dp),
                federation,
                rounds=config.rounds or self.rules.rounds,
                fraction=config.fraction,
                seed=number,
                engine=self.makes_engine,
                device=self.device,
                chunk=config.chunk,
                batching=None if given.batch_size is None else batching_of(given.batch_size),
                compat=config.compat,
                keep=keep,
            )
            self.setup += time.perf_counter() - self.began
            yield experiment
            self.began = time.perf_counter()

    def _begin(self, federation: Federation, method: Method, notes: list[str]) -> None:
        self.about = federation.about
        self.fingerprint = name_configuration(self.config, self.given, self.problem.data)
        if self.folder is not None:
            self.folder.begin(self.config, federation)
        short = method.too_short(self.config.rounds or self.rules.rounds)
        said = [*notes, *nearly_single_class(federation), *([short] if short else [])]
        self.heard.begin(self.config, self.engine, self.why, said)

    def checkpoint(self, experiment: Experiment) -> tuple[Path | None, str]:
        """An experiment's file, and its fingerprint."""
        seed = experiment.seed
        path = None if self.folder is None else self.folder.checkpoint(seed)
        return path, f"{self.fingerprint}/{seed}"

    def one_seed(self, experiment: Experiment) -> SeedResult:
        """Run an experiment by itself."""
        path, fingerprint = self.checkpoint(experiment)
        run = experiment.run(
            checkpoint=path,
            fingerprint=fingerprint,
            every_seconds=self.save_every,
            on_round=lambda history: self.heard.round(experiment.seed, history),
            should_stop=self.heard.should_stop,
        )
        return self.seed_result(run)

    def seed_result(self, run: Run) -> SeedResult:
        """What one of the experiments gave."""
        seed = run.experiment.seed
        if not run.finished:
            raise Stopped(self.out, seed, run.history.rounds)
        if self.folder is not None:
            self.folder.write_seed(run)
            federation, method = run.experiment.federation, self.method
            assert method is not None
            self.folder.write_model(run, about_model(self.config, method, federation))
        return SeedResult(seed, run.history, run.ledger)

    def result(self, seeds: Sequence[SeedResult]) -> Result:
        """What all of them gave, saved."""
        assert self.method is not None
        assert self.federation is not None
        result = make_result(
            self.config,
            self.rules,
            self.method,
            seeds,
            engine=self.engine,
            device=self.device.type,
            setup_seconds=self.setup,
            federation=self.about,
            metric=self.federation.metric,
            out=self.out,
        )
        if self.out is not None:
            result.save(self.out)
        self.heard.end(result)
        return result


selection = select_rule
_ARTICLE = {"engine": "an"}


def check_objects(config: RunConfig, given: Mapping[str, object]) -> None:
    """Refuse to continue without the objects that the run was started with: no file holds them."""
    lacking = [name for name in config.objects if given.get(name) is None]
    if lacking:
        words = " and ".join(f"{_ARTICLE.get(name, 'a')} {name} object" for name in lacking)
        hints = ", ".join(f"{name}=..." for name in lacking)
        raise ConfigError(
            f"this run was started in Python with {words}, which its configuration cannot hold; "
            f"continue it in Python with atoll.resume(folder, {hints})"
        )


def name_configuration(
    config: RunConfig, method: object | None = None, data: Data | None = None
) -> str:
    """A short name of everything that decides the numbers, for checkpoints."""
    # Where a run happens does not change it (engines agree only to rounding, so they are named).
    plain = msgspec.structs.replace(config, seeds=1, seed=0, data_root=None)
    header = saved_header(config) if data is None else None
    if header is not None:  # the same clients, wherever the file lies
        plain = msgspec.structs.replace(plain, data=str(header))
    text = config_text(plain)
    if method is not None:
        text += repr(method)
    if isinstance(data, Federation):
        text += str([(g.num_nodes, g.edges.shape[1], g.num_features) for g in data.graphs])
    elif data is not None:
        parts = data.sets if isinstance(data, GraphGroup) else (data,)
        text += "".join(str((part.x.shape, part.edges.shape, part.classes)) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
