"""`atoll advise`: recommend a method for a federation after short runs on validation nodes.

No run reads a test node: we remove the roles and the labels of all test nodes. We split each
client's validation nodes into two halves. In the race, which consists of short runs of all
candidates, one half selects the round, and the other half gives the score. The worse half of the
candidates stops after the first seeds, and the best mean over all seeds wins. Then the winner and
the references run on new seeds with the halves exchanged. Only these runs estimate the gains, on
nodes that gave no score in the race. `advise` reports all gains. It recommends the winner only if
the gain passes a threshold, so a gain just above the threshold is still optimistic.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

import msgspec
import numpy as np
import torch

from atoll.core.errors import ConfigError, DataError, counted
from atoll.core.federation import Federation, LazyGraphs, each
from atoll.core.graph import Graph
from atoll.data.measure.heterogeneity import describe
from atoll.experiment.baseline import without_test
from atoll.experiment.config import make_config, resolve, run_command
from atoll.experiment.metrics import label_of
from atoll.experiment.options import RunOptions
from atoll.experiment.problem import Division, FederationCache, Problem
from atoll.methods import method_class
from atoll.present.tables import Column, Part, make_table
from atoll.studies.compare.plan import ComparisonRequest, make_runs, named_arms
from atoll.studies.compare.statistics import PairedTest, against
from atoll.studies.study import run_study
from atoll.studies.study_run import Json, StudyObserver, StudyRun
from atoll.studies.tune.result import safe_name

CANDIDATES = ("local", "fedavg", "fedprox", "fedopt", "fedpub", "reef")
"""The default candidates: the references, and good methods of the leaderboard that are fast."""
MORE = ("fedaux", "fedper", "fedgta", "fedsage", "feddc", "fedproto", "fediih")
"""Further default candidates, in this order, while there is time."""
REFERENCES = ("local", "fedavg")  # local training and plain federation, which always take part
MINUTES = 3.0
PROBE = 3  # rounds that measure the speed of a candidate
FEWEST_ROUNDS = 10  # minimum rounds of a race, unless the user wants fewer
RACE = (1, 2)  # seeds of all candidates, and additional seeds of the better half
FRESH = (3, 5)  # seeds of the estimate: the minimum, and the number that the plan assumes
SPARE = 2.0  # minimum multiple of the race's seeds that must fit with a further candidate
MOST = 4  # maximum multiple of the seeds of race and estimate, if time remains
WORTH = 0.01  # gain that suffices for a recommendation, even if its interval contains 0
LARGE = 300_000  # with more directed edges, only sizes are measured
Costs = dict[str, tuple[float, float]]  # seconds of a seed before its rounds, and of one round


@dataclass(frozen=True)
class Advice:
    """The result of `advise`."""

    data: str
    looks: Json  # sizes, and differences between clients
    metric: str
    race: tuple[
        Json, ...
    ]  # for each candidate: state (or why it is excluded), score, seeds, seconds per seed
    winner: str  # of the race
    choice: str  # the recommended method: the winner, or the better reference
    gains: tuple[PairedTest, ...]  # on new seeds: winner over references, fedavg over local
    rounds: int  # of every run
    wanted: int  # rounds of the recommended command
    settings: Json  # hyper-parameters of the recommended method
    command: str
    notes: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """Return the recommendation and its reasons as sentences."""
        of = {(test.name, test.against): test for test in self.gains}
        short = f"short runs of {self.rounds} of {self.wanted} rounds"
        runs = f"runs of {self.rounds} rounds" if self.rounds == self.wanted else short
        said = [f"Recommended: {self.choice}, after {runs}."]
        for over, meaning in zip(REFERENCES, (" training", ""), strict=True):
            if (test := of.get((self.choice, over))) is not None:
                gain = f"Expected gain over {over}{meaning}: {_points(test, self.metric)}"
                said.append(f"{gain}, from {counted(test.pairs, 'new seed')}.")
        if self.winner not in (*REFERENCES, self.choice):
            thin = _too_few(of[self.winner, self.choice], self.metric)
            said.append(f"{self.winner} had the best score in the short runs, but {thin}")
        if self.winner in REFERENCES and self.winner != self.choice:
            said.append(f"{self.winner} had the best score in the race, but not on the new seeds.")
        if self.choice not in REFERENCES:
            unsure = [test for test in self.gains if test.name == self.choice and test.low <= 0]
            said += [_too_few(test, self.metric) for test in unsure]
        plain = of["fedavg", "local"]
        if self.choice in REFERENCES and plain.low <= 0 <= plain.high:
            said.append(_too_few(plain, self.metric))
        elif self.choice == "local":
            loss = _points(plain, self.metric)
            said.append(f"Federation does not help here: fedavg's gain over local is {loss}.")
        return said

    def parts(self) -> list[Part]:
        """Return the output of `atoll advise`."""
        size = "{clients} clients of {smallest} to {largest} {items}, {classes} classes"
        known = {"homophily": "homophily {:.2f}", "label_divergence": "label divergence {:.2f}"}
        known["edges_lost"] = "{:.1%} of all edges lost between clients"
        facts = [text.format(self.looks[key]) for key, text in known.items() if key in self.looks]
        first = ", ".join([f"\n{self.data}: {size.format(**self.looks)}", *facts])
        state = Column("state", "left", wrap=True)
        names = ("method", label_of(self.metric), state, "seeds", "s/seed")
        keys = {"method": "", "score": ".1f", "state": "", "seeds": "", "seconds": ".1f"}
        rows = [
            [format(row[key], form) if key in row else None for key, form in keys.items()]
            for row in self.race
        ]
        told = "\n".join([*self.sentences(), *self.notes])
        return [f"{first}.\n", make_table(names, rows), f"\n{told}"]


def _points(test: PairedTest, metric: str) -> str:
    mean, low, high = (f"{100 * value:+.1f}" for value in (test.difference, test.low, test.high))
    return f"{mean} points of {label_of(metric)}, 95% interval {low} to {high}"


def _too_few(test: PairedTest, metric: str) -> str:
    more = f"; about {test.needed} seeds would show such a difference" if test.needed else ""
    few = f"{test.pairs} seeds are too few to distinguish {test.name} from {test.against}"
    return f"{few}: {_points(test, metric)}{more}."


def advise(
    candidates: Sequence[str] | None = None,
    data: str = "lagoon",
    *,
    minutes: float = MINUTES,
    observer: StudyObserver | None = None,
    **options: Unpack[RunOptions],
) -> Advice:
    """Compare candidate methods in short runs on a federation, and recommend one.

    Args:
        candidates: Names, also with settings: `fedprox:mu=0.1`. `REFERENCES` always take part.
            None stands for `CANDIDATES`, and those of `MORE` for which there is time.
        data: A name or path.
        minutes: Approximate time budget.
        observer: Is notified of progress.
        **options: Division, rounds, seed, metric and device, as in `atoll.run`.
    """
    if not 0 < minutes < math.inf:
        raise ConfigError(f"minutes is {minutes:g}; give a number above 0")
    with TemporaryDirectory(prefix="atoll-advise-") as folder:
        race = _Race({**options, "data": data}, minutes, Path(folder), observer or StudyObserver())
        others = CANDIDATES if candidates is None else candidates
        race.enter([*REFERENCES, *(name for name in others if name not in REFERENCES)])
        return race.run(MORE if candidates is None else ())


class _Race:
    """A race in progress: the candidates' runs, and a table row for each."""

    def __init__(
        self, options: Json, minutes: float, folder: Path, observer: StudyObserver
    ) -> None:
        self.end, self.minutes = time.monotonic() + 60 * minutes, minutes
        self.options, self.folder, self.observer = options, folder, observer
        self.problem = Problem.of(make_config(**options))
        self.seed = self.problem.config.seed
        self.wanted = self.problem.config.rounds or self.problem.rules.rounds
        self.halves = [FederationCache(make=partial(halved, swapped=way)) for way in (False, True)]
        self.first = self.halves[0](self.problem, self.seed).federation
        self.runs: dict[str, StudyRun] = {}
        self.rows: dict[str, Json] = {}

    def enter(self, names: Sequence[str]) -> None:
        """Check every candidate, and exclude those that cannot do the task, with the reason."""
        request = ComparisonRequest(
            methods={label: str(name) for label, name in named_arms(names).items()},
            data=(self.problem.config.data,),
            clients=(self.options.get("clients"),),
            options={k: v for k, v in self.options.items() if k not in ("data", "clients")},
        )
        for run in make_runs(request, {}, {}):
            name, task = run.labels["method"], self.first.task
            self.rows[name] = {"method": name, "state": ""}
            if run.method is not None:
                raise ConfigError(f"'{name}' is a baseline; give a method (see `atoll methods`)")
            if task.name not in method_class(run.config.method).tasks:
                self.rows[name]["state"] = f"excluded: it does not classify {task.plural}"
                continue
            resolve(run.config)
            self.runs[name] = run

    def run(self, more: Sequence[str] = ()) -> Advice:
        """Run the race, estimate the gains, and recommend a method.

        Candidates in `more` take part while there is time for `SPARE` times the seeds.
        """
        costs = self._probe(list(self.runs))
        for name in more:
            if self._factor(costs) < SPARE:
                break
            self.enter([name])
            found = costs | self._probe([name] if name in self.runs else [])
            if self._factor(found) >= SPARE:
                costs = found
            else:
                del self.rows[name]
        left = self.end - time.monotonic()
        rounds, times = plan(costs, self.wanted, left, self.minutes)
        winner = self._winner(list(costs), rounds, times)
        finals, fresh = list(dict.fromkeys([*REFERENCES, winner])), MOST * sum(RACE)
        one_seed = sum(_seconds(costs[name], rounds) for name in finals)
        seeds = int((self.end - time.monotonic()) / one_seed)
        seeds = min(max(seeds, FRESH[0]), MOST * FRESH[1])
        tested = self._play("fresh", finals, rounds, fresh, seeds)
        gains = gains_of(winner, {name: np.array(self._scores(tested[name])) for name in finals})
        choice, later = choose(winner, gains), self.halves[1](self.problem, self.seed + fresh)
        fixed = "every seed has the same training nodes, so the intervals cover only the randomness"
        notes = (f"Note: {fixed} of training.",) if _same(self.first, later.federation) else ()
        return Advice(
            data=self.problem.config.data,
            looks=look(self.first),
            metric=self.metric,
            race=tuple(self.rows.values()),
            winner=winner,
            choice=choice,
            gains=gains,
            rounds=rounds,
            wanted=self.wanted,
            settings=tested[choice]["hyperparameters"],
            command=run_command(self.runs[choice].config),
            notes=notes,
        )

    def _probe(self, names: list[str]) -> Costs:
        """Measure the speed of candidates in a few rounds."""
        costs: Costs = {}
        for name, found in self._play("probe", names, PROBE, 0, 1).items():
            costs[name] = found["seconds"]["setup"], found["seconds"]["per_round"]
            self.rows[name]["seconds"] = _seconds(costs[name], self.wanted)
        return costs

    def _factor(self, costs: Costs) -> float:
        """Return the multiple of the race's seeds, or 0 if the time is too short for all rounds."""
        try:
            rounds, times = plan(costs, self.wanted, self.end - time.monotonic(), self.minutes)
        except ConfigError:
            return 0.0
        return times if rounds == self.wanted else 0.0

    def _winner(self, names: list[str], rounds: int, times: float) -> str:
        """Return the method with the best mean score. Drop the worse half after the first seeds."""
        scores: dict[str, list[float]] = {name: [] for name in names}
        start, kept = 0, names
        for stage, seeds in enumerate((round(times * count) for count in RACE), 1):
            found = self._play(f"race-{stage}", kept, rounds, start, seeds)
            start += seeds
            for name, summary in found.items():
                scores[name] += self._scores(summary)
                mean = 100 * float(np.mean(scores[name]))
                self.rows[name] |= {"score": mean, "seeds": start, "state": "stopped"}
            kept = sorted(found, key=lambda name: -self.rows[name]["score"])
            kept = kept[: math.ceil(len(kept) / 2)]
        self.rows[kept[0]]["state"] = "won"
        return kept[0]

    def _play(
        self, stage: str, names: Sequence[str], rounds: int, after: int, seeds: int
    ) -> dict[str, Json]:
        """Return the results of methods that finish on `seeds` seeds, by name.

        Exclude a candidate that fails in the race. Raise the error of a reference, or of any method
        in the stage "fresh".
        """
        how: Json = {"seed": self.seed + after, "seeds": seeds, "rounds": min(rounds, self.wanted)}
        runs, found = [], {}
        for name in names:
            run = self.runs[name]
            config = msgspec.structs.replace(run.config, **how)
            runs.append(replace(run, name=f"{stage}-{safe_name(name)}", config=config, light=True))
        about, seen = {"kind": "advise"}, StudyObserver() if stage == "probe" else self.observer
        halves = self.halves[stage == "fresh"]
        for one in run_study(self.folder, runs, about=about, observer=seen, federations=halves):
            name = one.run.labels["method"]
            if one.summary is not None:
                found[name] = one.summary
            elif name in REFERENCES or stage == "fresh":
                raise one.cause or DataError(one.error)
            else:
                self.rows[name]["state"] = f"excluded: {one.error}"
        return found

    def _scores(self, summary: Json) -> list[float]:
        """Return the score of each seed, on the half that did not select the round."""
        own, metrics = summary["metric"], summary["metrics"]
        self.metric = own if f"test_{own}" in metrics else "accuracy"
        scores: list[float] = metrics[f"test_{self.metric}"]["per_seed"]
        if len(scores) < summary["seeds"]:
            few = f"there are too few validation {self.first.task.plural}"
            raise DataError(f"{few} for {self.metric} in every seed; choose another --metric")
        return scores


def _seconds(cost: tuple[float, float], rounds: int) -> float:
    return cost[0] + rounds * cost[1]


def _same(one: Federation, other: Federation) -> bool:
    """Return whether the clients of two federations have the same training nodes."""
    pairs = zip(one.graphs, other.graphs, strict=False)
    return len(one) == len(other) and all(torch.equal(a.train, b.train) for a, b in pairs)


def halved(problem: Problem, seed: int, *, swapped: bool) -> Division:
    """Make the clients of a seed. Half of the validation nodes replace the test nodes.

    A node's half depends only on its number. Therefore runs with and without exchanged halves
    (`swapped`) never score the same node, for all seeds and clients.
    """
    made = problem.divide(seed)

    def cut(graph: Graph) -> Graph:
        ids = graph.ids.long().numpy()
        drawn = np.random.default_rng(0).random(int(ids.max(initial=0)) + 1)[ids]
        scored = torch.from_numpy((drawn < 0.5) != swapped).to(graph.val)
        return replace(graph, val=graph.val * (1 - scored), test=graph.val * scored)

    blind = without_test(made.federation)
    blind = replace(blind, graphs=each(cut, blind.graphs))
    counts = [(graph.val.sum(), graph.test.sum()) for graph in blind.graphs]
    if not all(sum(half) for half in zip(*counts, strict=True)):
        few = f"'{problem.config.data}' has too few validation {blind.task.plural}"
        raise DataError(f"{few} to choose a method; choose another --split or --ratios")
    return replace(made, federation=blind, newcomer=None, whole=None)


def plan(costs: Costs, wanted: int, left: float, minutes: float) -> tuple[int, float]:
    """Return the rounds of every run, at most `wanted`, and the multiple of the race's seeds.

    Raise an error if the seconds that are `left` are too few for `FEWEST_ROUNDS`.
    """
    dear = sorted(costs.values(), key=lambda cost: -_seconds(cost, wanted))
    finals = [dear[0], *(costs[name] for name in REFERENCES)]
    seeds = [*dear * RACE[0], *dear[: math.ceil(len(dear) / 2)] * RACE[1], *finals * FRESH[1]]
    setup, per_round = (sum(part) for part in zip(*seeds, strict=True))
    rounds, least = int((left - setup) / per_round), min(FEWEST_ROUNDS, wanted)
    if rounds < least:
        needed = math.ceil(minutes + (setup + least * per_round - left) / 60)
        few = f"{minutes:g} minutes are too few for {counted(least, 'round')} of every candidate"
        raise ConfigError(f"{few}; give --minutes {needed}, or fewer --candidates")
    times = left / (setup + wanted * per_round)
    return min(rounds, wanted), min(max(times, 1.0), MOST)


def gains_of(winner: str, fresh: Mapping[str, np.ndarray]) -> tuple[PairedTest, ...]:
    """Test fedavg against local, and a winner that is not a reference against both, by seed."""
    pairs = [(winner, over) for over in REFERENCES if winner not in REFERENCES]
    pairs.append(("fedavg", "local"))
    return tuple(against(over, {name: fresh[name], over: fresh[over]})[0] for name, over in pairs)


def choose(winner: str, gains: Sequence[PairedTest]) -> str:
    """Return the winner of the race, or the better reference.

    The winner must gain at least `WORTH` over the better reference, or the whole interval of its
    gain must be above 0.
    """
    of = {(test.name, test.against): test for test in gains}
    simplest = "fedavg" if of["fedavg", "local"].difference > 0 else "local"
    if winner in REFERENCES:
        return simplest
    gain = of[winner, simplest]
    return winner if gain.low > 0 or gain.difference >= WORTH else simplest


def look(federation: Federation) -> Json:
    """Measure the clients' sizes. For one divided graph of at most `LARGE` edges, compare them.

    These numbers are the homophily, the fraction of lost edges and the divergence of the labels.
    """
    graphs, task = federation.graphs, federation.task
    sizes = [int(graph.size("nodes")) for graph in graphs]
    found: Json = {"clients": len(sizes), "smallest": min(sizes), "largest": max(sizes)}
    found |= {"items": task.plural, "classes": federation.classes}
    lazy = task.many_graphs or isinstance(graphs, LazyGraphs)
    if lazy or sum(graph.edges.shape[1] for graph in graphs) > LARGE:
        return found
    told = describe(federation, shape=False)  # it does not see the labels of test nodes
    same = np.nansum(told.homophily * told.edges) / max(told.edges.sum(), 1)
    apart = told.label_divergence[np.triu_indices(len(sizes), 1)]
    measured = {"homophily": same, "edges_lost": told.edges_lost_share}
    measured["label_divergence"] = np.nanmean(apart) if np.isfinite(apart).any() else math.nan
    return found | {k: float(v) for k, v in measured.items() if np.isfinite(v)}


def summary(found: Advice) -> Json:
    """Return the object that `--json` prints."""
    return {"kind": "advise", **asdict(found), "sentences": found.sentences()}
