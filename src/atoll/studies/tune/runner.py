"""A tuning under way: plans, trials on clients without test nodes, and the final test."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from atoll.core.errors import AtollError, ConfigError, DataError, StepError
from atoll.core.federation import Federation, each
from atoll.core.files import write_atomically
from atoll.core.graph import Graph
from atoll.core.space import Range, Value
from atoll.data.public.registry import task_of_data
from atoll.experiment.config import RunConfig, config_text, resolve, saved_header
from atoll.experiment.history import History
from atoll.experiment.metrics import mean_over_clients
from atoll.experiment.problem import Data, make_federation, task_of_object
from atoll.experiment.protocols import Protocol
from atoll.experiment.result import Result
from atoll.experiment.run import Observer, Stopped, run_config, selection
from atoll.experiment.selection import BEST_CACHED, weight_of
from atoll.experiment.sweep import SeedFailed
from atoll.studies.study import Cell, Outcome, StudyObserver, note, read_cell, run_cell
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
class Plan:
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

    def cell(self, number: int, settings: Mapping[str, Value]) -> Cell:
        """The cell of a trial."""
        labels = {"method": self.name, "role": "trial", "trial": number}
        return Cell(f"{_safe(self.name)}-{number:04d}", self.with_settings(settings), labels)

    def test(self, settings: Mapping[str, Value], seeds: int, again: int = 1) -> Cell:
        """The cell of the final test; its seeds are behind those of the trials."""
        fresh = {"seed": self.asked.seed + self.asked.seeds, "seeds": seeds}
        config = msgspec.structs.replace(self.with_settings(settings), **fresh)
        name = f"test-{_safe(self.name)}" + (f"-{again}" if again > 1 else "")
        return Cell(name, config, {"method": self.name, "role": "test"})

    def with_settings(self, settings: Mapping[str, Value]) -> RunConfig:
        return msgspec.structs.replace(self.asked, set={**self.asked.set, **settings})


def _safe(name: str) -> str:
    """A method's name as a folder's; one's own may be a path."""
    return "".join(c if c.isalnum() or c in "-_.+" else "-" for c in name)


def make_plan(asked: RunConfig, budget: Budget, data: Data | None) -> Plan:
    """What will be tried for a method; everything that cannot be is refused here."""
    config, rules = resolve(asked, task_of_object(data))
    if selection(config, rules) == BEST_CACHED:
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
    return Plan(asked, config, rules, space, first, whole, trials, budget.pruner, notes)


class Trials:
    """Spends every method's budget, then tests the best of each.

    Attributes:
        searches: What is known, by method.
        spent: Methods whose space had nothing left to try.
        chosen: The best configuration of each method, as it is tested.
        tests: The final test of each method.
        lost: Methods of which no trial came to its end, each with a sentence.
        notes: For the user.
    """

    def __init__(
        self,
        folder: Path,
        about: Mapping[str, Any],
        plans: Sequence[Plan],
        seeds: int,
        data: Data | None,
        observer: StudyObserver,
        blinded: Blinded,
    ) -> None:
        self.folder, self.about, self.plans, self.seeds = folder, about, plans, seeds
        self.data, self.observer = data, observer
        self.blinded = blinded
        self.spent: set[str] = set()
        self.chosen: dict[str, RunConfig] = {}
        self.tests: dict[str, Outcome] = {}
        self.finals: dict[str, Cell] = {}
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
        cells = self._describe()
        done = sum(len(search.frozen) for search in self.searches.values())
        self.observer.begin(cells, done)
        for plan in self.plans:
            self._spend(plan)
        for plan in self.plans:
            self._test(plan)
        self._describe()
        if len(self.lost) == len(self.plans):
            raise ConfigError(next(iter(self.lost.values())))
        self.notes += self.lost.values()

    def _describe(self) -> list[Cell]:
        """Write study.json: what was asked for, and the cells that are there or to come."""
        cells = []
        for plan in self.plans:
            done = len(self.searches[plan.name].frozen)
            count = done if plan.name in self.spent else max(done, plan.trials)
            cells += [plan.cell(number, {}) for number in range(count)]
        if self.seeds:
            left = [plan for plan in self.plans if plan.name not in self.lost]
            cells += [self.finals.get(p.name, p.test({}, self.seeds)) for p in left]
        described = [{"name": cell.name, "labels": dict(cell.labels)} for cell in cells]
        text = json.dumps({**self.about, "cells": described}, indent=2)
        write_atomically(self.folder / "study.json", text.encode())
        return cells

    def _spend(self, plan: Plan) -> None:
        """Run what is left of a method's trials."""
        search = self.searches[plan.name]
        while len(search.frozen) < plan.trials:
            settings = search.ask()
            if settings is None:
                self.spent.add(plan.name)
                self.notes.append(f"{plan.name}: nothing untried was left in the space")
                break
            cell = plan.cell(len(search.frozen), settings)
            began = time.perf_counter()
            heard = Pruning(self.observer.cell(cell), search, plan, self.blinded)
            state, value, problem = self._try(cell, heard)
            search.tell(
                state,
                heard.curve,
                value=value,
                seconds=time.perf_counter() - began,
                problem=problem,
                metric=heard.metric,
            )
            # Its numbers are kept; a model that is not chosen is not worth its disk space.
            for seed in (self.folder / "cells" / cell.name).glob("seed-*"):
                shutil.rmtree(seed)
            self.observer.ended(
                Outcome(
                    cell,
                    self.folder / "cells" / cell.name,
                    None if value is None else {"validation": value},
                    problem or None,
                )
            )

    def _try(self, cell: Cell, heard: Pruning) -> tuple[str, float | None, str]:
        """Run a trial, or go on with it: its state, its score, and what went wrong."""
        to = self.folder / "cells" / cell.name
        note(self.folder, "begin", cell)
        try:
            write_atomically(to / "asked.toml", config_text(cell.config).encode())
            result = run_config(
                cell.config,
                out=to,
                observer=heard,
                resuming=True,
                data=self.data,
                divide=self.blinded,
            )
        except Stopped:
            if heard.pruned:
                note(self.folder, "pruned", cell)
                return "pruned", None, ""
            note(self.folder, "stopped", cell)
            raise
        except KeyboardInterrupt:
            note(self.folder, "stopped", cell)
            raise
        except (StepError, SeedFailed) as error:
            note(self.folder, "failed", cell, error=str(error))
            return "diverged", None, str(error)
        except AtollError as error:
            note(self.folder, "failed", cell, error=str(error))
            if isinstance(error, DataError) or not heard.search.frozen:
                raise  # every other trial would meet it as well
            return "failed", None, str(error)
        # A trial that had been finished before it was stored was only read, and reported nothing.
        heard.catch_up(result)
        if heard.pruned:
            note(self.folder, "pruned", cell)
            return "pruned", None, ""
        note(self.folder, "end", cell)
        return "complete", float(result.metrics()[f"val_{heard.metric}"]["mean"]), ""

    def _test(self, plan: Plan) -> None:
        """Run the best configuration once, on the whole data with fresh seeds."""
        best = best_of(self.searches[plan.name].trials)
        if best is None:
            problems = [t.problem for t in self.searches[plan.name].trials if t.problem]
            # The other methods' results are not lost with it.
            self.lost[plan.name] = f"no trial of {plan.name} came to its end" + (
                f"; the first said: {problems[0]}" if problems else ""
            )
            return
        self.chosen[plan.name] = plan.test(best.settings, max(self.seeds, 1)).config
        if not self.seeds:
            return
        again, cell = 1, plan.test(best.settings, self.seeds)
        while self._other_choice(cell):
            again += 1
            cell = plan.test(best.settings, self.seeds, again)
        if again > 1:
            self.notes.append(
                f"{plan.name}: {again - 1} earlier choice was tested as well, in cells/; say so "
                "where you report the number"
            )
        self.finals[plan.name] = cell
        outcome = read_cell(self.folder, cell) or run_cell(
            self.folder, cell, self.observer, data=self.data
        )
        self.observer.ended(outcome)
        if outcome.error:
            self.notes.append(f"{plan.name}: the final test failed: {outcome.error}")
        self.tests[plan.name] = outcome

    def _other_choice(self, cell: Cell) -> bool:
        """Whether this name's test was of another configuration, before there were more trials."""
        path = self.folder / "cells" / cell.name / "asked.toml"
        return path.exists() and path.read_text(encoding="utf-8") != config_text(cell.config)


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The complete trial with the best score, the earliest of equals."""
    complete = [trial for trial in trials if trial.value is not None]
    return max(complete, key=lambda trial: (trial.value or 0.0, -trial.number), default=None)


class Blinded:
    """Makes federations without test nodes, once for each seed (`experiment.run.Divide`)."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[Federation, list[str], RunConfig]] = {}

    def __call__(
        self,
        config: RunConfig,
        rules: Protocol,
        seed: int,
        data: Data | None,
        asked: RunConfig,
    ) -> tuple[Federation, list[str], RunConfig]:
        if seed not in self.made:
            federation, notes, divided = make_federation(config, rules, seed, data, asked)
            blind = without_test(federation)
            if not any(graph.val.sum() > 0 for graph in blind.graphs):
                raise DataError(
                    f"no client of '{config.data}' has validation data to tune on; choose "
                    "another --split"
                )
            self.made[seed] = blind, notes, divided
        federation, notes, divided = self.made[seed]
        own = {"method": config.method, "set": config.set, "epochs": config.epochs}
        return federation, notes, msgspec.structs.replace(divided, **own)


def without_test(federation: Federation) -> Federation:
    """The federation with nobody to test on: no test role, and none of those labels."""
    return replace(federation, graphs=each(_without_test, federation.graphs))


def _without_test(graph: Graph) -> Graph:
    hidden = torch.where(graph.test > 0, torch.zeros_like(graph.y), graph.y)
    return replace(graph, y=hidden, test=torch.zeros_like(graph.test))


class Pruning:
    """Reports the first seed's validation scores, and stops a trial that is not worth its time."""

    def __init__(self, observer: Observer, search: Search, plan: Plan, blinded: Blinded) -> None:
        self.observer, self.search, self.plan, self.blinded = observer, search, plan, blinded
        self.curve: list[float] = []
        self.pruned, self.metric = False, "accuracy"

    def begin(self, config: RunConfig, engine: str, why: str, notes: list[str]) -> None:
        self.observer.begin(config, engine, why, notes)

    def round(self, seed: int, history: History) -> None:
        self.observer.round(seed, history)
        if seed == self.plan.asked.seed:
            self._report(history)

    def should_stop(self) -> bool:
        return self.pruned or self.observer.should_stop()

    def catch_up(self, result: Result) -> None:
        """Report what the run's own calls have not told."""
        self._report(result.seeds[0].history)

    def _report(self, history: History) -> None:
        """Round by round, however many are new, so that a resumed trial ends where it would."""
        scored = self.plan.config.evaluate or "deployed"
        self.metric = self.blinded.made[self.plan.asked.seed][0].metric
        values = history.array(scored, self.metric, "val")
        if np.isnan(values).all():  # as `Result` does where nobody has the data set's own
            self.metric = "accuracy"
            values = history.array(scored, self.metric, "val")
        means = mean_over_clients(values, weight_of(history, "val", self.plan.rules.weights))
        for number in range(len(self.curve), history.rounds):
            if self.pruned:
                return
            self.curve.append(float(means[number]))
            self.pruned = self.search.report(number, self.curve[-1])
