"""A tuning in progress: trials on clients without test nodes, and the final test."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from atoll.core.errors import AtollError, ConfigError, DataError, ServerDiverged, StepError
from atoll.experiment.baseline import without_test
from atoll.experiment.config import RunConfig, config_text
from atoll.experiment.history import History, Selection, metric_of
from atoll.experiment.observers import Observer
from atoll.experiment.problem import Data, Division, FederationCache, Problem
from atoll.experiment.result import Result
from atoll.experiment.sweep import SeedFailed
from atoll.studies import study_run
from atoll.studies.parallel import Crew, run_parallel
from atoll.studies.study import write_about
from atoll.studies.study_run import RunOutcome, StudyObserver, StudyRun, StudySettings
from atoll.studies.tune.result import Tuned, TuningRequest, ranking
from atoll.studies.tune.search import Search, SearchPlan

DIVERGED = {error.__name__ for error in (StepError, ServerDiverged, SeedFailed)}
RAISED = {
    error.__name__: error for error in (ConfigError, DataError)
}  # classes of exceptions that another process names


@dataclass
class Trials:
    """Spends the budget of every method, then tests the best configuration of each.

    It evaluates trials in order, one after the other, so that the result does not depend on the
    number of jobs. With several jobs, other processes run ahead: first the trials whose settings
    do not depend on open results (`Search.known`), then the next trial of each method.
    """

    folder: Path
    about: Mapping[str, object]
    request: TuningRequest
    plans: Sequence[SearchPlan]
    data: Data | None
    observer: StudyObserver
    blinded: Blinded
    jobs: int = 1
    spent: set[str] = field(default_factory=set)  # methods without untried points in their space
    chosen: dict[str, RunConfig] = field(default_factory=dict)  # best configurations
    tests: dict[str, RunOutcome] = field(default_factory=dict)  # the final test of each method
    lost: dict[str, str] = field(default_factory=dict)  # the reason why a method has no result
    failed: dict[str, RunOutcome] = field(default_factory=dict)  # failed, but not evaluated yet
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.settings = StudySettings(self.folder, self.blinded)
        self.seconds: dict[str, float] = {}
        self.finals: dict[str, StudyRun] = {}
        self.searches: dict[str, Search] = {}
        for plan in self.plans:
            about = plan.name, plan.space, plan.asked.seed, plan.config.rounds or 1
            store = self.folder / "optuna.db"
            self.searches[plan.name] = Search(store, *about, self.request.pruner, plan.first)

    def run(self) -> None:
        """Run every method up to its final test."""
        runs = self._describe()
        self.observer.begin(runs, sum(len(search.frozen) for search in self.searches.values()))
        if self.jobs > 1 and any(map(self._is_open, self.plans)):
            self._spend_in_waves()
        for plan in self.plans:
            self._spend(plan, plan.trials)
        tested = [plan for plan in self.plans if self._choose(plan)]
        whole = StudySettings(self.folder)  # the tests use the whole data
        if self.jobs > 1:
            self._run_ahead(list(self.finals.values()), whole)
        for plan in tested:
            run = replace(self.finals[plan.name], data=self.data)
            outcome = study_run.read_outcome(self.folder, run) or self.failed.get(run.name)
            outcome = outcome or study_run.run_one(run, self.observer.run, whole)
            self.observer.ended(outcome)
            if outcome.error:
                self.notes.append(f"{plan.name}: the final test failed: {outcome.error}")
            self.tests[plan.name] = outcome
        self._describe()
        if len(self.lost) == len(self.plans):
            raise ConfigError(next(iter(self.lost.values())))
        self.notes += self.lost.values()

    def _describe(self) -> list[StudyRun]:
        """Write study.json: the request, and the runs that exist or will follow."""
        runs, seeds = [], self.request.seeds
        for plan in self.plans:
            done = len(self.searches[plan.name].frozen)
            count = done if plan.name in self.spent else max(done, plan.trials)
            runs += [plan.trial(number, {}) for number in range(count)]
        if seeds:
            left = [plan for plan in self.plans if plan.name not in self.lost]
            runs += [self.finals.get(plan.name, plan.test({}, seeds)) for plan in left]
        described = [{"name": run.name, "labels": dict(run.labels)} for run in runs]
        write_about(self.folder, self.about, described)
        return runs

    def _is_open(self, plan: SearchPlan) -> bool:
        """Return whether trials of a method remain."""
        left = len(self.searches[plan.name].frozen) < plan.trials
        return left and plan.name not in self.spent

    def _spend_in_waves(self) -> None:
        """Run trials ahead in other processes and evaluate them here, until no trial remains."""
        first = self.plans[0]
        self.blinded(Problem.of(first.asked, self.data), first.asked.seed)
        with Crew(self.settings, self.observer, self.jobs) as crew:
            while waiting := [plan for plan in self.plans if self._is_open(plan)]:
                ahead, until = list[StudyRun](), dict[str, int]()
                for plan in waiting:
                    search = self.searches[plan.name]
                    known, done = search.known(plan.trials), len(search.frozen)
                    prunes = search if len(known) == 1 else None
                    watch = partial(watch_ahead, plan, self.blinded, prunes)
                    trials = [plan.trial(done + n, values) for n, values in enumerate(known)]
                    ahead += [replace(trial, watch=watch) for trial in trials]
                    until[plan.name] = done + max(1, len(known))
                self._run_ahead(ahead, self.settings, crew)
                for plan in waiting:
                    self._spend(plan, until[plan.name])

    def _run_ahead(
        self, runs: Sequence[StudyRun], settings: StudySettings, crew: Crew | None = None
    ) -> None:
        """Run several unfinished runs in other processes. This process reads them afterwards."""
        open_runs = [run for run in runs if study_run.read_outcome(self.folder, run) is None]
        if len(open_runs) > 1:
            groups = [[replace(run, data=self.data)] for run in open_runs]
            observer = _Ahead(self.observer, self.seconds)
            outcomes = run_parallel(groups, observer, settings, self.jobs, crew=crew)
            self.failed |= {name: one for name, one in outcomes.items() if one.error is not None}

    def _spend(self, plan: SearchPlan, trials: int) -> None:
        """Run and evaluate a method's trials, up to `trials` in total."""
        search = self.searches[plan.name]
        while len(search.frozen) < trials and plan.name not in self.spent:
            if (settings := search.ask()) is None:
                self.spent.add(plan.name)
                self.notes.append(f"{plan.name}: the search space has no untried point left")
                break
            run = replace(plan.trial(len(search.frozen), settings), data=self.data)
            began = time.perf_counter()
            trial = TrialObserver(self.observer.run(run), plan, self.blinded, search)
            state, problem = self._try(run, trial)
            seconds = time.perf_counter() - began + self.seconds.get(run.name, 0.0)
            about = {"seconds": round(seconds, 3), "problem": problem, "metric": trial.metric}
            value = trial.value if state == "complete" else None
            search.tell(state, trial.curve, value, **about)
            folder = self.settings.folder_of(run)
            # Keep its numbers, but delete its model to save disk space.
            for seed in folder.glob("seed-*"):
                shutil.rmtree(seed)
            summary = {"validation": trial.value} if state == "complete" else None
            self.observer.ended(RunOutcome(run, folder, summary, problem or None))

    def _try(self, run: StudyRun, trial: TrialObserver) -> tuple[str, str]:
        """Run a trial, or continue it. Return its state and its problem."""
        if (outcome := self.failed.pop(run.name, None)) is None:
            outcome = study_run.run_one(run, lambda _: trial, self.settings)
        else:
            trial.extend(outcome.curve)
        if trial.pruned:
            return "pruned", ""
        if outcome.error is None:
            return "complete", ""
        if outcome.kind in DIVERGED:
            return "diverged", outcome.error
        first = not self.searches[trial.plan.name].frozen
        if outcome.kind == DataError.__name__ or (outcome.kind and first):
            # Every other trial would fail with the same error.
            raise outcome.cause or RAISED.get(outcome.kind, AtollError)(outcome.error)
        return "failed", outcome.error

    def _choose(self, plan: SearchPlan) -> bool:
        """Select a method's best configuration. Return False if there is nothing to test."""
        trials, seeds = self.searches[plan.name].trials, self.request.seeds
        if not (ranked := ranking(trials)):
            why = next((f"; the first error is: {t.problem}" for t in trials if t.problem), "")
            # Keep the results of the other methods.
            self.lost[plan.name] = f"no trial of {plan.name} is complete{why}"
            return False
        best = ranked[0].settings
        self.chosen[plan.name] = plan.test(best, max(seeds, 1)).config
        if not seeds:
            return False
        again, run = 1, plan.test(best, seeds)
        # More trials may have changed the selection; then an earlier test has this name.
        while (path := self.settings.folder_of(run) / "asked.toml").exists():
            before, _, _ = path.read_text(encoding="utf-8").partition("# objects ")
            if before == config_text(run.config):
                break
            again += 1
            run = plan.test(best, seeds, again)
        if again > 1:
            self.notes.append(
                f"{plan.name}: {again - 1} earlier choice was tested as well, in cells/; mention "
                "it if you report the number"
            )
        self.finals[plan.name] = run
        return True

    def tuned(self, plan: SearchPlan) -> Tuned:
        """Return the best configuration of a method, and its test."""
        search, tested = self.searches[plan.name], self.tests.get(plan.name)
        defaults = not plan.whole and set(plan.first[0]) == set(plan.space)
        test, redivided = None if tested is None else tested.summary, plan.redivides(self.data)
        found = search.trials, self.chosen[plan.name], test, search.importance()
        return Tuned(plan.name, plan.space, *found, redivided, defaults)


@dataclass
class _Ahead(StudyObserver):
    """Follows runs that are evaluated later, and measures their time."""

    observer: StudyObserver
    seconds: dict[str, float]

    def run(self, run: StudyRun) -> Observer:
        self.seconds[run.name] = -time.perf_counter()
        return self.observer.run(run)

    def ended(self, outcome: RunOutcome) -> None:
        self.seconds[outcome.run.name] += time.perf_counter()

    def parallel(self, jobs: int, threads: int) -> None:
        self.observer.parallel(jobs, threads)

    def should_stop(self) -> bool:
        return self.observer.should_stop()


class Blinded(FederationCache):
    """Cache of federations without test nodes. `metric` is the user's metric, or the data's."""

    def __init__(self) -> None:
        super().__init__(make=_divide_without_test)
        self.metric = "accuracy"

    def __call__(self, problem: Problem, seed: int) -> Division:
        made = super().__call__(problem, seed)
        self.metric = metric_of(problem.config, made.federation)
        return made


def _divide_without_test(problem: Problem, seed: int) -> Division:
    made = problem.divide(seed)
    blind = without_test(made.federation)
    if not any(graph.val.sum() > 0 for graph in blind.graphs):
        lacking = f"no client of '{problem.config.data}' has validation data for tuning"
        raise DataError(f"{lacking}; choose another --split")
    return replace(made, federation=blind, newcomer=None, whole=None)


@dataclass
class TrialObserver(Observer):
    """Records the first seed's validation scores. With a `search`, it prunes a bad trial."""

    observer: Observer
    plan: SearchPlan
    blinded: Blinded
    search: Search | None
    curve: list[float] = field(default_factory=list)  # mean over clients after each reported round
    value: float | None = None  # by the protocol's rule, mean over seeds; None unless complete
    pruned: bool = False
    metric: str = "accuracy"  # the score's name

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.observer.begin(config, engine, why, notes)

    def round(self, seed: int, history: History) -> None:
        self.observer.round(seed, history)
        if seed == self.plan.asked.seed:
            self._report(history)

    def should_stop(self) -> bool:
        return self.pruned or self.observer.should_stop()

    def end(self, result: Result) -> None:
        """Report the rounds that are not yet reported (all, if the run was only read)."""
        self._report(result.seeds[0].history)
        self.value = float(result.metrics()[f"val_{self.metric}"]["mean"])

    def _report(self, history: History) -> None:
        scored = self.plan.config.evaluate or "deployed"
        self.metric = self.blinded.metric
        rule = Selection(scored, self.metric, self.plan.weights, "best-val")
        self.metric = rule.picked_by(history)  # accuracy if no client has the requested metric
        means = rule.mean(history, self.metric, "val")
        self.extend(means[len(self.curve) : history.rounds])

    def extend(self, scores: Iterable[float]) -> None:
        """Report new scores round by round, so that a resumed trial ends in the same round."""
        for score in scores:
            if self.pruned:
                return
            self.curve.append(float(score))
            if self.search is not None:
                self.pruned = self.search.report(len(self.curve) - 1, self.curve[-1])


def watch_ahead(
    plan: SearchPlan, blinded: Blinded, search: Search | None, observer: Observer
) -> TrialObserver:
    """Return the observer of a trial in another process (`StudyRun.watch`)."""
    if search is not None:
        search.ask()  # draws the trial again, to compare it with the others
    return TrialObserver(observer, plan, blinded, search)
