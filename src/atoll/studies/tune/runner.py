"""A tuning under way: plans, trials on clients without test nodes, and the final test."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from atoll.core.errors import ConfigError, DataError, ServerDiverged, StepError
from atoll.core.federation import Federation
from atoll.core.space import Range, Value
from atoll.data.public.registry import task_of_data
from atoll.experiment.baseline import without_test
from atoll.experiment.config import RunConfig, config_text, resolve, saved_header
from atoll.experiment.federation_cache import FederationCache
from atoll.experiment.history import History
from atoll.experiment.metrics import mean_over_clients
from atoll.experiment.observers import Observer
from atoll.experiment.problem import Data, Division, Problem, task_of_object
from atoll.experiment.protocols import Protocol
from atoll.experiment.result import Result
from atoll.experiment.selection import BEST_CACHED, select_rule, weight_of
from atoll.experiment.sweep import SeedFailed
from atoll.studies.parallel import Crew, run_parallel
from atoll.studies.study import write_about
from atoll.studies.study_run import (
    RunOutcome,
    SeesProcesses,
    SilentStudy,
    StudyObserver,
    StudyRun,
    StudySettings,
    read_outcome,
    run_one,
)
from atoll.studies.tune.search import Search, Trial
from atoll.studies.tune.search_space import defaults_of, grid_of, parse_range, space_of

STORE = "optuna.db"


class Budget(NamedTuple):
    """What each method gets, and how it is spent."""

    trials: int
    pruner: str
    preset: str | None
    search: Mapping[str, str]


@dataclass(frozen=True)
class SearchPlan:
    """One method's part of a tuning, checked before anything is run.

    Attributes:
        asked: As the user gave it, for this method.
        config: The same, resolved.
        rules: Its protocol.
        space: What is searched.
        first: Points to try first: the method's own defaults, or all there are.
        whole: Whether all points of the space are tried.
        trials: How many.
        pruner: As in `Budget`.
        notes: For the user.
    """

    asked: RunConfig
    config: RunConfig
    rules: Protocol
    space: dict[str, Range]
    first: list[dict[str, Value]]
    whole: bool
    trials: int
    pruner: str
    notes: list[str]

    @property
    def name(self) -> str:
        return self.asked.method

    def redivides(self, data: Data | None) -> bool:
        """Whether fresh seeds divide the data anew, so that other nodes become test nodes."""
        fixed = isinstance(data, Federation) or saved_header(self.asked) is not None
        return not fixed and self.rules.data_seed is None and self.config.split != "given"

    def trial(self, number: int, settings: Mapping[str, Value]) -> StudyRun:
        """The run of a trial."""
        labels = {"method": self.name, "role": "trial", "trial": number}
        return StudyRun(
            f"{safe_name(self.name)}-{number:04d}", self.with_settings(settings), labels
        )

    def test(self, settings: Mapping[str, Value], seeds: int, again: int = 1) -> StudyRun:
        """The run of the final test; its seeds come after those of the trials."""
        fresh = {"seed": self.asked.seed + self.asked.seeds, "seeds": seeds}
        config = msgspec.structs.replace(self.with_settings(settings), **fresh)
        name = f"test-{safe_name(self.name)}" + (f"-{again}" if again > 1 else "")
        return StudyRun(name, config, {"method": self.name, "role": "test"})

    def with_settings(self, settings: Mapping[str, Value]) -> RunConfig:
        return msgspec.structs.replace(self.asked, set={**self.asked.set, **settings})


def safe_name(name: str) -> str:
    """A method's name as a folder's; one's own may be a path."""
    return "".join(c if c.isalnum() or c in "-_.+" else "-" for c in name)


def make_plan(asked: RunConfig, budget: Budget, data: Data | None) -> SearchPlan:
    """What will be tried for a method; everything that cannot be is refused here."""
    config, rules = resolve(asked, task_of_object(data))
    if select_rule(config, rules) == BEST_CACHED:
        raise ConfigError(
            "compat test-selection picks by test scores, which tuning must not see; leave it out"
        )
    header = saved_header(config) if data is None else None
    task = task_of_object(data) or (header.task if header else task_of_data(config.data))
    search = {key: parse_range(key, text) for key, text in budget.search.items()}
    space, notes = space_of(asked, config, task, budget.preset, search)
    points = grid_of(space, budget.trials)
    trials = budget.trials if points is None else len(points)
    if trials < budget.trials:
        notes.append(f"{asked.method}: the space has {trials} points, and each is tried once")
    first = [defaults_of(config, task, space)] if points is None else points
    whole = points is not None
    return SearchPlan(asked, config, rules, space, first, whole, trials, budget.pruner, notes)


class Trials:
    """Spends every method's budget, then tests the best of each.

    Trials are judged one after the other, in order, so that the result does not depend on the
    number of jobs. With several jobs, other processes run ahead: first the trials whose settings
    depend on no open result (`Search.known`), then the next trial of each method.

    Attributes:
        searches: The search of each method.
        spent: Methods whose space had nothing left to try.
        chosen: The best configuration of each method, as it is tested.
        tests: The final test of each method.
        lost: Methods without a complete trial, each with a sentence.
        notes: For the user.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, object],
        plans: Sequence[SearchPlan],
        seeds: int,
        data: Data | None,
        observer: StudyObserver,
        blinded: Blinded,
        jobs: int = 1,
    ) -> None:
        self.folder, self.about, self.plans, self.seeds = folder, about, plans, seeds
        self.data, self.observer, self.blinded, self.jobs = data, observer, blinded, jobs
        self.settings = StudySettings(folder, blinded)
        self.seconds: dict[str, float] = {}
        self.spent: set[str] = set()
        self.chosen: dict[str, RunConfig] = {}
        self.tests: dict[str, RunOutcome] = {}
        self.finals: dict[str, StudyRun] = {}
        self.lost: dict[str, str] = {}
        self.notes: list[str] = []
        self.searches = {
            plan.name: Search(
                folder / STORE,
                plan.name,
                plan.space,
                seed=plan.asked.seed,
                rounds=plan.config.rounds or 1,
                pruner=plan.pruner,
                first=plan.first,
            )
            for plan in plans
        }

    def run(self) -> None:
        runs = self._describe()
        done = sum(len(search.frozen) for search in self.searches.values())
        self.observer.begin(runs, done)
        if self.jobs > 1 and any(map(self._is_open, self.plans)):
            self._spend_in_waves()
        for plan in self.plans:
            self._spend(plan, plan.trials)
        tested = [plan for plan in self.plans if self._choose(plan)]
        if self.jobs > 1:
            finals = [self.finals[plan.name] for plan in tested]
            self._run_ahead(finals, StudySettings(self.folder))
        for plan in tested:
            self._test(plan)
        self._describe()
        if len(self.lost) == len(self.plans):
            raise ConfigError(next(iter(self.lost.values())))
        self.notes += self.lost.values()

    def _describe(self) -> list[StudyRun]:
        """Write study.json: the request, and the runs that are there or to come."""
        runs = []
        for plan in self.plans:
            done = len(self.searches[plan.name].frozen)
            count = done if plan.name in self.spent else max(done, plan.trials)
            runs += [plan.trial(number, {}) for number in range(count)]
        if self.seeds:
            left = [plan for plan in self.plans if plan.name not in self.lost]
            runs += [self.finals.get(p.name, p.test({}, self.seeds)) for p in left]
        described = [{"name": run.name, "labels": dict(run.labels)} for run in runs]
        write_about(self.folder, self.about, described)
        return runs

    def _is_open(self, plan: SearchPlan) -> bool:
        """Whether trials of a method are left to run."""
        left = len(self.searches[plan.name].frozen) < plan.trials
        return left and plan.name not in self.spent

    def _spend_in_waves(self) -> None:
        """Run trials ahead in other processes, then judge them here, until none is left."""
        first = self.plans[0]
        self.blinded(Problem.of(first.asked, self.data), first.asked.seed)
        with Crew(self.settings, self.observer, self.jobs) as crew:
            while waiting := [plan for plan in self.plans if self._is_open(plan)]:
                ahead: list[StudyRun] = []
                until = {}
                for plan in waiting:
                    search = self.searches[plan.name]
                    known, done = search.known(plan.trials), len(search.frozen)
                    watch = PruneElsewhere(search, plan, self.blinded) if len(known) == 1 else None
                    ahead += [
                        replace(plan.trial(done + n, settings), watch=watch)
                        for n, settings in enumerate(known)
                    ]
                    until[plan.name] = done + max(1, len(known))
                self._run_ahead(ahead, self.settings, crew)
                for plan in waiting:
                    self._spend(plan, until[plan.name])

    def _run_ahead(
        self, runs: Sequence[StudyRun], settings: StudySettings, crew: Crew | None = None
    ) -> None:
        """Run several unfinished runs in other processes; this one reads them afterwards."""
        open_runs = [r for r in runs if read_outcome(self.folder, r) is None]
        if len(open_runs) > 1:
            groups = [[replace(run, data=self.data)] for run in open_runs]
            heard = _Ahead(self.observer, self.seconds)
            run_parallel(groups, heard, settings, jobs=self.jobs, crew=crew)

    def _spend(self, plan: SearchPlan, trials: int) -> None:
        """Run and judge a method's trials, up to so many in all."""
        search = self.searches[plan.name]
        while len(search.frozen) < trials and plan.name not in self.spent:
            settings = search.ask()
            if settings is None:
                self.spent.add(plan.name)
                self.notes.append(f"{plan.name}: nothing untried was left in the space")
                break
            run = replace(plan.trial(len(search.frozen), settings), data=self.data)
            began = time.perf_counter()
            heard = Pruning(self.observer.run(run), search, plan, self.blinded)
            state, problem = self._try(run, heard)
            search.tell(
                state,
                heard.curve,
                value=heard.value if state == "complete" else None,
                seconds=time.perf_counter() - began + self.seconds.get(run.name, 0.0),
                problem=problem,
                metric=heard.metric,
            )
            folder = self.settings.folder_of(run)
            # Its numbers are kept; a model that is not chosen is not worth its disk space.
            for seed in folder.glob("seed-*"):
                shutil.rmtree(seed)
            summary = {"validation": heard.value} if state == "complete" else None
            self.observer.ended(RunOutcome(run, folder, summary, problem or None))

    def _try(self, run: StudyRun, heard: Pruning) -> tuple[str, str]:
        """Run a trial, or continue it: its state and its problem."""
        outcome = run_one(replace(run, watch=lambda _: heard), SilentStudy(), self.settings)
        if outcome.pruned:
            return "pruned", ""
        if outcome.cause is None:
            return "complete", ""
        if isinstance(outcome.cause, StepError | ServerDiverged | SeedFailed):
            return "diverged", str(outcome.cause)
        if isinstance(outcome.cause, DataError) or not heard.search.frozen:
            raise outcome.cause  # every other trial would meet it as well
        return "failed", outcome.error or ""

    def _choose(self, plan: SearchPlan) -> bool:
        """Choose a method's best configuration; False without a complete trial."""
        best = best_of(self.searches[plan.name].trials)
        if best is None:
            problems = [t.problem for t in self.searches[plan.name].trials if t.problem]
            # The other methods' results are not lost with it.
            self.lost[plan.name] = f"no trial of {plan.name} came to its end" + (
                f"; the first said: {problems[0]}" if problems else ""
            )
            return False
        self.chosen[plan.name] = plan.test(best.settings, max(self.seeds, 1)).config
        if not self.seeds:
            return False
        again, run = 1, plan.test(best.settings, self.seeds)
        while self._is_other_choice(run):
            again += 1
            run = plan.test(best.settings, self.seeds, again)
        if again > 1:
            self.notes.append(
                f"{plan.name}: {again - 1} earlier choice was tested as well, in cells/; say so "
                "where you report the number"
            )
        self.finals[plan.name] = run
        return True

    def _test(self, plan: SearchPlan) -> None:
        """Run the best configuration once, on the whole data with fresh seeds."""
        run = replace(self.finals[plan.name], data=self.data)
        outcome = read_outcome(self.folder, run) or run_one(
            run, self.observer, StudySettings(self.folder)
        )
        self.observer.ended(outcome)
        if outcome.error:
            self.notes.append(f"{plan.name}: the final test failed: {outcome.error}")
        self.tests[plan.name] = outcome

    def _is_other_choice(self, run: StudyRun) -> bool:
        """Whether this name's test was of another configuration, before there were more trials."""
        path = self.settings.folder_of(run) / "asked.toml"
        if not path.exists():
            return False
        asked, _, _ = path.read_text(encoding="utf-8").partition("# objects ")
        return asked != config_text(run.config)


@dataclass
class _Ahead(SilentStudy):
    """Follows runs that are judged later, and measures their time."""

    observer: StudyObserver
    seconds: dict[str, float]

    def run(self, run: StudyRun) -> Observer:
        self.seconds[run.name] = -time.perf_counter()
        return self.observer.run(run)

    def ended(self, outcome: RunOutcome) -> None:
        self.seconds[outcome.run.name] += time.perf_counter()

    def parallel(self, jobs: int, threads: int) -> None:
        if isinstance(self.observer, SeesProcesses):
            self.observer.parallel(jobs, threads)

    def should_stop(self) -> bool:
        return isinstance(self.observer, SeesProcesses) and self.observer.should_stop()


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The complete trial with the best score, the earliest of equals."""
    complete = [trial for trial in trials if trial.value is not None]
    return max(complete, key=lambda trial: (trial.value or 0.0, -trial.number), default=None)


class Blinded(FederationCache):
    """Federations without test nodes, each made once.

    Attributes:
        metric: The score that the data are judged by.
    """

    def __init__(self) -> None:
        super().__init__(make=_divide_without_test)
        self.metric = "accuracy"

    def __call__(self, problem: Problem, seed: int) -> Division:
        made = super().__call__(problem, seed)
        self.metric = made.federation.metric
        return made


def _divide_without_test(problem: Problem, seed: int) -> Division:
    made = problem.divide(seed)
    blind = without_test(made.federation)
    if not any(graph.val.sum() > 0 for graph in blind.graphs):
        raise DataError(
            f"no client of '{problem.config.data}' has validation data to tune on; choose "
            "another --split"
        )
    return replace(made, federation=blind)


class Pruning(Observer):
    """Reports the first seed's validation scores, and stops a trial that is not worth its time.

    Attributes:
        curve: Mean validation score after each round that was reported.
        value: The validation score by the protocol's rule, of a run that came to its end.
        metric: The score's name.
    """

    def __init__(
        self, observer: Observer, search: Search, plan: SearchPlan, blinded: Blinded
    ) -> None:
        self.observer, self.search, self.plan, self.blinded = observer, search, plan, blinded
        self.curve: list[float] = []
        self.value: float | None = None
        self.pruned, self.metric = False, "accuracy"

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.observer.begin(config, engine, why, notes)

    def round(self, seed: int, history: History) -> None:
        self.observer.round(seed, history)
        if seed == self.plan.asked.seed:
            self._report(history)

    def should_stop(self) -> bool:
        return self.pruned or self.observer.should_stop()

    def end(self, result: Result) -> None:
        """Report the rounds of a run that was only read."""
        self._report(result.seeds[0].history)
        self.value = float(result.metrics()[f"val_{self.metric}"]["mean"])

    def _report(self, history: History) -> None:
        """Round by round, however many are new, so that a resumed trial ends where it would."""
        scored = self.plan.config.evaluate or "deployed"
        self.metric = self.blinded.metric
        values = history.array(scored, self.metric, "val")
        if np.isnan(values).all():  # as `Result` does where no client has the data set's own
            self.metric = "accuracy"
            values = history.array(scored, self.metric, "val")
        means = mean_over_clients(values, weight_of(history, "val", self.plan.rules.weights))
        for number in range(len(self.curve), history.rounds):
            if self.pruned:
                return
            self.curve.append(float(means[number]))
            self.pruned = self.search.report(number, self.curve[-1])


@dataclass(frozen=True)
class PruneElsewhere:
    """Prunes a method's next trial in another process (`StudyRun.watch`)."""

    search: Search
    plan: SearchPlan
    blinded: Blinded

    def __call__(self, observer: Observer) -> Observer:
        self.search.ask()  # draws the trial again, to compare it with the others
        return Pruning(observer, self.search, self.plan, self.blinded)
