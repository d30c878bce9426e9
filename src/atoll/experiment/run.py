"""From a configuration to a saved result: load, partition, run every seed, save the results."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Unpack

from atoll.core.batching import batching_of
from atoll.core.clock import OFF, Clock
from atoll.core.errors import ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.files import clear_left_over, folder_of, locked, side_by_side
from atoll.core.losses import BALANCED
from atoll.core.method import Method
from atoll.data.load import is_own
from atoll.engines.base import AUTO, EngineFactory, choose_engine, engine_factory, engine_name
from atoll.experiment import problem as problems
from atoll.experiment.build import build_method, check_memory
from atoll.experiment.config import RunConfig, make_config, read_config
from atoll.experiment.continued import extend, trained_models
from atoll.experiment.folder import RunFolder, check_folder, check_method_files
from atoll.experiment.hardware import choose_device, cores, start, synchronize, tuned_process
from atoll.experiment.history import bins_metric, metric_of, positive_of, select_rule, selection_of
from atoll.experiment.loggers import open_logs
from atoll.experiment.newcomer import check_newcomer, first_day, seed_scores
from atoll.experiment.observers import Observer, Observers
from atoll.experiment.options import RunOptions
from atoll.experiment.privacy import privacy_report, with_privacy
from atoll.experiment.problem import Data, Divide, Division, Problem, name_configuration
from atoll.experiment.result import Result, SeedResult
from atoll.experiment.rounds import Experiment, Run
from atoll.experiment.sweep import run_together, why_one_by_one
from atoll.experiment.unseen import Scores, check_unseen, over_seeds, unseen_scores

SAVE_EVERY = 10.0  # least seconds between two checkpoints


class Stopped(Exception):
    """The user stopped the run. A run with a folder is saved up to the last round."""

    def __init__(self, out: Path | None, seed: int, rounds: int) -> None:
        super().__init__()
        self.out, self.seed, self.rounds = out, seed, rounds


def run(
    method: str | Method = "fedavg",
    data: str | Data = "lagoon",
    *,
    engine: str | EngineFactory = AUTO,
    out: str | Path | None = None,
    observer: Observer | None = None,
    save_every: float = SAVE_EVERY,
    log: str | Sequence[str] = (),
    **options: Unpack[RunOptions],
) -> Result:
    """Run a method on data and return the result.

    Args:
        method: A name, or a method object, which brings its own hyper-parameters.
        data: A name or path, the result of `atoll.load`, or a finished `Federation`.
        engine: A name, or a function that takes `engines.prepare.EngineInputs` and returns an
            engine (`engines.base.Engine`).
        out: Folder for the result and checkpoints. None saves nothing.
        observer: Is notified of progress.
        save_every: Least seconds between two checkpoints.
        log: Other tools for the numbers of every round: "tensorboard", "mlflow", or both.
        **options: The fields of `RunConfig`: clients, partition, rounds, seeds, set and others.
            docs/api.md and `atoll run --help` describe each of them.

    Examples:
        >>> import atoll
        >>> result = atoll.run("fedprox", "lagoon", rounds=5, set={"mu": 0.1})
        >>> result.metrics()["test_accuracy"]["mean"] > 0.5
        True
    """
    if isinstance(method, type):
        made = f"{method.__name__}(net=...)"
        raise ConfigError(f"method is the class {method.__name__}; give its name, or {made}")
    given_method = None if isinstance(method, str) else method
    given_data = problems.data_object(data)
    given_engine = None if isinstance(engine, str) else engine_factory(engine)
    for name in ("set", "epochs"):
        if given_method is not None and options.get(name):
            raise ConfigError(
                f"a method object has its own hyper-parameters, but {name} was given, too; "
                f"remove {name}, or give the method by name"
            )
    objects = {"method": given_method, "data": given_data, "engine": given_engine}
    config = make_config(
        method=method if isinstance(method, str) else type(method).__name__,
        data=data if isinstance(data, str) else data.name,
        engine=engine_name(engine),
        objects=[name for name, value in objects.items() if value is not None],
        **options,
    )
    given = given_method, given_data, given_engine
    return RunPlan(config, folder_of(out), observer, *given, save_every=save_every, log=log).run()


def resume(
    folder: str | Path,
    observer: Observer | None = None,
    *,
    method: Method | None = None,
    data: Data | None = None,
    engine: EngineFactory | None = None,
    rounds: int | None = None,
    save_every: float = SAVE_EVERY,
    log: str | Sequence[str] = (),
    clock: Clock = OFF,
) -> Result:
    """Continue a stopped run, or extend a run to `rounds` rounds in total.

    Without `rounds`, a finished run is not trained further. A run that was started with an object
    (method, data, engine) needs the same object again.

    Examples:
        >>> import atoll
        >>> first = atoll.run("fedavg", "lagoon", rounds=2, out="my-run")  # and now it is killed
        >>> atoll.resume("my-run").metrics() == first.metrics()
        True
    """
    folder = Path(folder)
    if not (folder / "config.toml").exists():
        problem = f"'{folder}' holds no run to resume (it has no config.toml)"
        raise ConfigError(f"{problem}; give the folder of a run")
    config = make_config(**read_config(folder / "config.toml"))
    check_method_files(folder)
    if rounds is not None:
        # A finished run cannot continue without its method or data, and stays finished.
        next(RunPlan(config, None, None, method, data, engine).experiments())
        config = extend(folder, config, rounds, lambda c: name_configuration(c, method, data))
    plan = partial(RunPlan, save_every=save_every, log=log, clock=clock)
    return plan(config, folder, observer, method, data, engine, True).run()


@dataclass(eq=False)
class RunPlan:
    """All seeds of a configuration up to the result. Python objects may replace names."""

    given: RunConfig
    out: Path | None = None
    observer: Observer | None = None
    given_method: Method | None = None
    data: Data | None = None
    given_engine: EngineFactory | None = None
    resuming: bool = False  # whether the folder may contain a run to continue
    overwrite: bool = False  # whether the folder may contain a run to delete
    save_every: float = SAVE_EVERY
    log: str | Sequence[str] = ()
    divide: Divide | None = None  # runs that share their clients share a `FederationCache`
    clock: Clock = OFF

    def __post_init__(self) -> None:
        given = {"method": self.given_method, "data": self.data, "engine": self.given_engine}
        if lacking := [name for name in self.given.objects if given.get(name) is None]:
            words = " and ".join(f"a{'n' if k == 'engine' else ''} {k} object" for k in lacking)
            hints = ", ".join(f"{name}=..." for name in lacking)
            raise ConfigError(
                f"this run was started in Python with {words}, which its configuration cannot "
                f"hold; continue it in Python with atoll.resume(folder, {hints})"
            )
        self.problem = Problem.of(self.given, self.data, self.clock)
        self.began, self.setup = time.perf_counter(), 0.0
        self.config, self.rules = config, _ = self.problem.config, self.problem.rules
        self.engine, self.why = config.engine, "given as an object"
        if self.given_engine is None:
            self.engine, self.why = choose_engine(config.engine)
        self.device = choose_device(config.device)
        with self.clock.stage("device"):
            start(self.device)
        if self.clock.on:
            self.clock.wait = partial(synchronize, self.device)
        if self.given_method is not None:  # refuse unsupported options before any file is written
            with_privacy(self.given_method, config.dp)
        if not 0 <= self.save_every < math.inf:
            raise ConfigError(f"save_every is {self.save_every}; give seconds, 0 for every round")
        self.folder = None if self.out is None else RunFolder(self.out)
        if self.out is not None:
            check_folder(self.out, resuming=self.resuming or self.overwrite)
            clear_left_over(self.out)
        self.observers = Observers(self.observer, self.out, open_logs(self.log, self.out))
        self.method: Method | None = None
        self.federation: Federation | None = None
        self.newcomers: dict[int, Federation] = {}
        self.first_days: list[dict[str, float]] = []  # a new client's scores, by seed
        self.wholes: dict[int, Federation] = {}
        self.unseen: list[Scores] = []  # of nodes that arrived after training, by seed
        self.fingerprint = ""
        self.before: set[Path] | None = None  # files of the folder before this run's first write
        self.made = False  # whether this run created its folder
        self.held: ExitStack | None = None  # the lock of the folder; a study locks its own folder

    @tuned_process()
    def run(self, *, at_once: bool | None = None) -> Result:
        """Run every seed, `at_once` if possible. None: only on a GPU, as a CPU gains nothing."""
        at_once = self.device.type == "cuda" if at_once is None else at_once
        try:
            with ExitStack() as self.held:
                waiting = list(self.experiments(at_once=True)) if at_once else []
                groups: Iterable[list[Experiment]] = [waiting]
                if not waiting or why_one_by_one(waiting):
                    groups = ([experiment] for experiment in waiting or self.experiments())
                return self.result([seed for group in groups for seed in self._train(group)])
        except (ConfigError, DataError):
            began = self.observers.progress and self.observers.progress.now
            if self.folder is not None and self.before is not None and not began:
                wrote = self.folder.files_of_start(self.config.all_seeds) - self.before
                self.folder.withdraw(wrote, self.made)
            raise

    def _train(self, experiments: Sequence[Experiment]) -> list[SeedResult]:
        runs = run_together(
            experiments,
            checkpoints=[self.checkpoint(experiment) for experiment in experiments],
            every_seconds=self.save_every,
            should_stop=self.observers.should_stop,
            on_round=lambda place, history: self.observers.round(experiments[place].seed, history),
        )
        return self.seed_results(runs)

    def _divided_at_once(self) -> list[Division]:
        """Return the clients of all seeds, made in parallel."""
        seeds = self.config.all_seeds
        with self.clock.stage("partition"), ThreadPoolExecutor(min(len(seeds), cores())) as pool:
            return list(pool.map(partial(Problem.divide, self.problem), seeds))

    def experiments(self, *, at_once: bool = False) -> Iterator[Experiment]:
        """Yield an experiment for each seed. `at_once` partitions the data for all seeds first."""
        alone = not at_once or self.divide is not None or self.config.seeds == 1
        ready = [] if alone else self._divided_at_once()
        waiting = list[Callable[[], object]]()  # partitions to write
        for place, number in enumerate(self.config.all_seeds):
            with self.clock.stage("partition"):
                make = self.divide or Problem.divide
                made = ready[place] if ready else make(self.problem, number)
            self.config = config = made.config
            federation = made.federation.with_loss(config.class_weights, config.loss)
            sizes = federation.features, federation.classes, federation.task.name
            method = self.given_method
            if method is None:
                method = build_method(config, *sizes)
                check_memory(method.net)
            select = select_rule(config, self.rules)
            if made.whole is not None:
                check_unseen(method, select, config.evaluate)
                self.wholes[number] = made.whole
            if made.newcomer is not None:
                check_newcomer(method, select, every=made.whole is not None)
                self.newcomers[number] = made.newcomer
            keep = selection_of(config, self.rules, federation)
            size, start = self.given.batch_size, config.from_run
            experiment = Experiment(
                with_privacy(method, config.dp),
                federation,
                rounds=config.rounds or self.rules.rounds,
                fraction=config.fraction,
                seed=number,
                engine=self.given_engine or self.engine,
                device=self.device,
                chunk=config.chunk,
                batching=None if size is None else batching_of(size),
                compat=config.compat,
                start=None if start is None else (partial(trained_models, start, number), start),
                metric=bins_metric(config, federation),
                positive=positive_of(config, federation),
                keep=keep if self.folder or made.newcomer or made.whole else None,
                clock=self.clock,
            )
            if self.method is None:  # write nothing before all options are checked
                self._begin(federation, method, made.notes)
            self.method = method
            if self.folder is not None:
                waiting.append(partial(self.folder.write_partition, number, federation))
            if not at_once or place == self.config.seeds - 1:
                with self.clock.stage("saving"):
                    side_by_side(waiting)
                waiting.clear()
            self.setup += time.perf_counter() - self.began
            yield experiment
            self.began = time.perf_counter()

    def _lock(self, folder: Path) -> None:
        if self.held is not None:
            where = f"another process trains the run in '{folder}'"
            self.held.enter_context(locked(folder, f"{where}; wait for its end, or stop it"))

    def _begin(self, federation: Federation, method: Method, notes: list[str]) -> None:
        self.federation = federation
        self.fingerprint = name_configuration(self.config, self.given_method, self.data)
        if self.folder is not None:
            made = not self.folder.path.exists()
            again = not made and (self.resuming or self.overwrite)
            if again:
                self._lock(self.folder.path)
            if not self.resuming:  # a refusal must not delete a resumed run
                if self.overwrite:
                    self.folder.clear()
                before = self.folder.files_of_start(self.config.all_seeds)
                self.folder.claim(self.config)
                self.before, self.made = before, made
            with self.clock.stage("saving"):
                self.folder.begin(self.config, federation)
            if not again:
                self._lock(self.folder.path)
        short = method.too_short(self.config.rounds or self.rules.rounds)
        wanted = (
            metric_of(self.config, federation),
            positive_of(self.config, federation),
        )
        notes = [
            *notes,
            *problems.nearly_single_class(federation, *wanted),
            *problems.frequent_positive(self.config, federation, *wanted),
            *([short] if short else []),
        ]
        if self.data is not None or is_own(self.config.data):
            notes += problems.uneven_features(federation)
        if self.config.class_weights == BALANCED:
            counted = "class weights are balanced by each client's own training labels"
            notes.append(f"{counted}; nothing more leaves a client for it")
        self.observers.begin(self.config, self.engine, self.why, notes)

    def checkpoint(self, experiment: Experiment) -> tuple[Path | None, str]:
        """Return an experiment's checkpoint file and its fingerprint."""
        seed, folder = experiment.seed, self.folder
        return folder.checkpoint(seed) if folder else None, f"{self.fingerprint}/{seed}"

    def seed_results(self, runs: Sequence[Run]) -> list[SeedResult]:
        """Return the results of experiments. Raise `Stopped` for the first stopped one."""
        ended = list(takewhile(lambda run: run.finished, runs))
        if self.folder is not None:
            assert self.method is not None
            write = partial(self.folder.write_seed, config=self.config, method=self.method)
            with self.clock.stage("saving"):
                side_by_side(partial(write, run) for run in ended)
        for run in ended:
            if (newcomer := self.newcomers.get(run.experiment.seed)) is not None:
                self.first_days.append(seed_scores(run, newcomer))
            if (whole := self.wholes.get(run.experiment.seed)) is not None:
                self.unseen.append(unseen_scores(run, whole))
        if len(ended) < len(runs):
            stopped = runs[len(ended)]
            raise Stopped(self.out, stopped.experiment.seed, stopped.history.rounds)
        return [SeedResult(run.experiment.seed, run.history) for run in ended]

    def result(self, seeds: Sequence[SeedResult]) -> Result:
        """Save and return the result of all experiments."""
        assert self.method is not None
        assert self.federation is not None
        config, ledgers = self.config, [seed.ledger for seed in seeds]
        newcomers, whole = list(self.newcomers.values()), next(iter(self.wholes.values()), None)
        models = 1 if self.method.scored_as() == "global" else len(seeds[0].history.nodes)
        result = Result(
            config=config,
            seeds=tuple(seeds),
            deployed=self.method.scored_as(),
            weights=self.rules.weights,
            select=select_rule(config, self.rules),
            engine=self.engine,
            device=self.device.type,
            setup_seconds=self.setup,
            federation=self.federation.about,
            out=self.out,
            metric=metric_of(config, self.federation),
            positive=positive_of(config, self.federation),
            hyperparameters=asdict(self.method),
            privacy=privacy_report(config, ledgers, len(seeds[0].history.nodes)),
            first_day=first_day(newcomers, self.first_days, models) if newcomers else None,
            unseen={} if whole is None else over_seeds(whole, self.unseen),
            profile=self.clock.read(),
        )
        if self.out is not None:
            with self.clock.stage("saving"):
                result.save(self.out)
        self.observers.end(result)
        return result
