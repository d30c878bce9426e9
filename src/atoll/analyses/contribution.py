"""The effect of one client on each class (FedTAD, Section 3): `atoll contribution`.

We train a method twice, on all clients and on all except one, and compare the two global models by
class. Both trainings share everything except the client: partition, split, initial model and the
others' noise, which depends on a client's number (`Federation.numbers`) and not on its position.

We evaluate both models on the test nodes of *all* clients, including the absent client:

- The selected round has the best accuracy over the validation nodes of the clients that trained.
  The earliest round wins ties. The absent client's nodes have no influence. Test nodes are read
  once.
- The deployed model of that round then predicts on every client's graph *without any private state*
  (`state=None`), as for a new client. The absent client has no state, and states only for the
  others would compare two kinds of model. (This excludes FedATH's private edge weights.)
- We sum counts over clients. The accuracy of a class is its recall.

With several seeds, the partition and the draws of `vary` (`atoll.data.isolate`) belong to the first
seed, because client 3 must stay client 3. Split, initial model and dropout change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from atoll.analyses.similarity import rank_correlation
from atoll.core.errors import ConfigError, check_name
from atoll.core.federation import Federation
from atoll.core.message import Message, ToAll
from atoll.core.method import Method
from atoll.core.task import ROLES
from atoll.data.divide import federate
from atoll.data.isolate import RATIO, VARY, check_client_number, vary_federation
from atoll.data.load import as_one_graph
from atoll.data.measure.heterogeneity import describe
from atoll.engines.base import choose_engine
from atoll.engines.clients import Simulation
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig
from atoll.experiment.hardware import choose_device, tuned_process
from atoll.experiment.metrics import Evaluator, mean_over_clients
from atoll.experiment.problem import Problem, need_one_graph
from atoll.experiment.rounds import Experiment, Run
from atoll.present import chart as plot
from atoll.present.chart import Axis, Bars, Chart, Panels, named, number_text, number_words
from atoll.present.tables import Part, Table, heading, make_table, quiet
from atoll.present.terminal import last_validation

OnRound = Callable[[int, bool, int], None]
"""Called with the seed, whether the client trains, and the number of finished rounds."""
_VARIED = {"nodes": "node", "topology": "topology", "class-topology": "class-wise topology"}
_MEASURES = ("train", "train_all", "test", "homophily", "homophily_others")


@dataclass(frozen=True, eq=False)
class Effect:
    """Accuracy with and without one client, for a class or a group. S seeds, NaN if undefined."""

    name: str  # the class's number, or the group of clients
    train: float  # training nodes of the measured client, mean over seeds
    train_all: float  # training nodes of all clients
    test: float  # test nodes of the accuracies
    homophily: float  # of the measured client, for the class (FedTAD, Eq. 2) or all its edges
    homophily_others: float  # mean over the other clients
    present: np.ndarray  # accuracy with the client, (S,)
    absent: np.ndarray  # accuracy without the client, (S,)

    @property
    def gain(self) -> np.ndarray:
        """The gain by the client's participation for each seed, (S,)."""
        return np.asarray(self.present - self.absent)


@dataclass(frozen=True, eq=False)
class Contribution:
    """The result of `contribution`. S seeds, K clients, C classes."""

    config: RunConfig  # resolved, with all defaults
    client: int  # the number of the measured client
    vary: str  # one of `atoll.data.isolate.VARY`
    ratio: float  # fraction of random edges, if `vary` changes the topology
    train: np.ndarray  # training nodes, (S, K, C)
    homophily: np.ndarray  # edge homophily, (K,); NaN if a client has no edge
    class_homophily: np.ndarray  # FedTAD's Eq. 2, (K, C); NaN if no edge touches the class
    present: np.ndarray  # test nodes by true and predicted class, (S, K, C, C)
    absent: np.ndarray  # the same for the model that was trained without the client
    best: np.ndarray  # the selected round with and without the client, (S, 2)
    about: dict[str, Any]  # description of the federation
    notes: tuple[str, ...] = ()  # notes of the loader about the user's own data

    @property
    def clients(self) -> int:
        return int(self.train.shape[1])

    def classes(self) -> list[Effect]:
        """Return a row for each class, over the test nodes of all clients."""
        own, others = _own_and_others(self.class_homophily, self.client)
        train = self.train.mean(0)
        test = self.present.sum((1, 3)).mean(0)
        arms = [arm.sum(1) for arm in (self.present, self.absent)]
        hits = [np.diagonal(counts, axis1=-2, axis2=-1) for counts in arms]
        present, absent = (_share(hit, arm.sum(-1)) for hit, arm in zip(hits, arms, strict=True))
        totals = zip(train[self.client], train.sum(0), test, own, others, strict=True)
        scores = zip(present.T, absent.T, strict=True)
        rows = enumerate(zip(totals, scores, strict=True))
        return [Effect(str(number), *counts, *both) for number, (counts, both) in rows]

    def groups(self) -> list[Effect]:
        """Return rows for the test nodes of all clients, of the client, and of the others."""
        own, others = _own_and_others(self.homophily[:, None], self.client)
        mine = np.arange(self.clients) == self.client
        train = self.train.mean(0).sum(1)
        rows = []
        for name, who in (("all", mine | True), (f"client {self.client}", mine), ("others", ~mine)):
            counts = [arm[:, who].sum(1) for arm in (self.present, self.absent)]
            sizes = [arm.sum((1, 2)) for arm in counts]
            hits = [np.trace(arm, axis1=1, axis2=2) for arm in counts]
            phi = (own[0], others[0]) if who.all() else (np.nan, np.nan)
            total = (train[mine & who].sum(), train[who].sum())
            accuracies = map(_share, hits, sizes)
            rows.append(Effect(name, *total, sizes[0].mean(), *phi, *accuracies))
        return rows

    def correlations(self) -> dict[str, dict[str, float]]:
        """Return Spearman's ρ and its p-value between the classes' mean gains and three causes.

        "labels" is the client's share of a class's training nodes. "homophily" is the client's
        homophily in the class, and "homophily_advantage" this number minus the others' mean.
        """
        rows = self.classes()
        gain = np.array([mean(row.gain) for row in rows])
        share = [row.train / row.train_all if row.train_all else np.nan for row in rows]
        own = np.array([row.homophily for row in rows])
        others = np.array([row.homophily_others for row in rows])
        causes = {"labels": share, "homophily": own, "homophily_advantage": own - others}
        # Equal fractions differ in the last digit.
        found = {k: rank_correlation(gain, np.round(cause, 12)) for k, cause in causes.items()}
        return {name: {"rho": rho, "p": p} for name, (rho, p) in found.items()}


def _own_and_others(values: np.ndarray, client: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the client's row, (C,), and the mean of the others' defined values, (C,)."""
    others = np.delete(values, client, axis=0).T
    return values[client], mean_over_clients(others, np.ones(others.shape[1]))


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Divide the part by the whole. The result is NaN if the whole is zero."""
    nothing = np.full(whole.shape, np.nan)
    return np.asarray(np.divide(part, whole, out=nothing, where=whole > 0))


def mean(values: np.ndarray) -> float:
    """Return the mean of the finite values, one per seed, or NaN if none is finite."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def std(values: np.ndarray) -> float | None:
    """Return the standard deviation of the finite values, or None if fewer than two are finite."""
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) if known.size > 1 else None


@tuned_process()
def contribution(
    request: RunConfig,
    *,
    client: int = 0,
    vary: str = "none",
    ratio: float | None = None,
    on_round: OnRound | None = None,
) -> Contribution:
    """Train with and without a client, for every seed, and evaluate both models by class.

    `evaluate` and `compat` of the request have no effect. `vary` is one of `VARY`. If it varies the
    topology, `ratio` is the fraction of random edges, with the default `RATIO`.
    """
    problem = Problem.of(request)
    ratio = _check_question(problem.config, vary, ratio)
    first = problem.seed_of_data(problem.config.seed)
    divide, config, notes = _divider(problem, first)
    train, present, absent, best = [], [], [], []
    for seed in config.all_seeds:
        whole = divide(problem.seed_of_data(seed))
        federation = vary_federation(whole, vary, client=client, ratio=ratio, seed=first)
        method = build_method(config, federation.features, federation.classes)
        rounds = config.rounds or problem.rules.rounds
        arms = with_and_without(
            method, federation, client, rounds=rounds, seed=seed, config=config, on_round=on_round
        )
        labels = [graph.y[graph.train > 0].numpy() for graph in federation.graphs]
        train.append([np.bincount(own, minlength=federation.classes) for own in labels])
        present.append(arms[0].confusion)
        absent.append(arms[1].confusion)
        best.append([arm.best for arm in arms])
    # Partition and edges do not change with the seed. Walks and random graphs are not shown.
    measured = describe(federation, walks=1, shape=False)
    homophily = measured.homophily, measured.class_homophily
    counts = np.stack(present), np.stack(absent), np.array(best)
    about = dict(federation.about), tuple(notes)
    return Contribution(config, client, vary, ratio, np.array(train), *homophily, *counts, *about)


def _divider(
    problem: Problem, first: int
) -> tuple[Callable[[int], Federation], RunConfig, list[str]]:
    """Return a function from a split's seed to clients, the full configuration, and notes."""
    # The partition is always that of the first seed; a federation file has only one.
    if problem.divided is not None:
        made = problem.divide(first)
        need_one_graph(made.federation)
        return lambda seed: made.federation, made.config, made.notes
    loaded, notes = problem.load(first)
    source, config = problem.prepare(as_one_graph(loaded))
    rules = problem.rules

    def divide(seed: int) -> Federation:
        made = {name: getattr(config, name) for name in ("clients", "ratios", "allow")}
        made["partition"] = config.partition or rules.partition
        made["split"] = config.split or rules.split
        return federate(source, seed=seed, partition_seed=first, **made)

    return divide, config, notes


def _check_question(config: RunConfig, vary: str, ratio: float | None) -> float:
    """Raise an error for invalid options before loading data. Return the ratio."""
    check_name("value of --vary", vary, VARY)
    if build_method(config, features=1, classes=2).scored_as() != "global":
        raise ConfigError(
            f"{config.method} trains a separate model for every client, so there is no global "
            "model to evaluate with and without a client; choose another --method"
        )
    if ratio is None:
        return RATIO
    if not vary.endswith("topology"):
        why = f"--ratio is for random edges, but --vary is {vary}"
        raise ConfigError(f"{why}; remove it or vary the topology")
    return ratio


class ScoredTraining(NamedTuple):
    """One of the two trainings."""

    confusion: np.ndarray  # counts of the selected model on each client's test nodes, (K, C, C)
    best: int  # the selected round


def with_and_without(
    method: Method,
    federation: Federation,
    client: int,
    *,
    rounds: int,
    seed: int = 0,
    config: RunConfig | None = None,
    on_round: OnRound | None = None,
) -> tuple[ScoredTraining, ScoredTraining]:
    """Train on all clients and on all except one. Evaluate both models on all clients' test nodes.

    The method must deploy one model for all. Both trainings have the same `seed`. `config` provides
    engine, device, chunk and fraction of clients per round.
    """
    check_client_number(federation, client)
    config = config or RunConfig()
    engine, device = choose_engine(config.engine)[0], choose_device(config.device)
    how: dict[str, Any] = {"engine": engine, "device": device, "chunk": config.chunk, "seed": seed}
    others = [place for place, number in enumerate(federation.numbers) if number != client]
    everyone = Simulation(federation, method, **how).clients(rounds)
    arms = []
    for roster in (federation, federation.reordered(others)):
        takes_part = client in roster.numbers
        tell = None if on_round is None else lambda n, t=takes_part: on_round(seed, t, n)
        experiment = Experiment(method, roster, rounds, config.fraction, auc=False, **how)
        model, best = _best_model(experiment, tell)
        counts = everyone.map(Evaluator(method).score, model).confusion
        arms.append(ScoredTraining(counts[:, ROLES.index("test")].cpu().numpy(), best))
    return arms[0], arms[1]


def _best_model(
    experiment: Experiment, on_round: Callable[[int], None] | None
) -> tuple[Message, int]:
    """Return the deployed model of the best validation round, and that round."""
    run = Run(experiment)
    run.start()
    best, score, model = 0, float("nan"), None
    while not run.finished:
        run.one_round()
        now = last_validation(run.history, RunConfig())
        # Without validation nodes every score is NaN, and the last round is selected.
        if model is None or np.isnan(score) or now > score:
            best, score = run.history.rounds - 1, now
            model = experiment.method.deploy(run.server)
        if on_round is not None:
            on_round(run.history.rounds)
    if not isinstance(model, ToAll):
        problem = f"{type(experiment.method).__name__} sends different models to the clients"
        none = "there is no global model to evaluate"
        raise ConfigError(f"{problem}, so {none}; choose another method")
    return model, best


def contribution_parts(found: Contribution) -> list[Part]:
    """Return the table and its interpretation, for the terminal."""
    several = "; mean ± standard deviation over seeds, differences by seed"
    caption = (
        "Correct test nodes of all clients by the global model, in percent (a class: its "
        "recall), at the best validation round of the clients that trained"
        + (several if found.config.seeds > 1 else "")
        + f". train: training nodes of client {found.client} | of all clients; φ: homophily of the "
        f"class (row all: of all edges) at client {found.client} | mean of the others."
    )
    return [heading(title(found)), "", _table(found), "", reading_of(found), quiet(caption)]


def title(found: Contribution) -> str:
    """Describe the question."""
    config = found.config
    extra = f", {_VARIED[found.vary]} variation only" if found.vary != "none" else ""
    return (
        f"Effect of client {found.client} of {found.clients} on each class: {config.data}, "
        f"{config.partition}{extra}, {config.method}, rounds {config.rounds}, seeds {config.seeds}"
    )


def reading_of(found: Contribution) -> str:
    """State the rank correlations of the gains with labels and homophily."""
    names = ("its share of the labels", "its homophily", "its homophily minus the others'")
    parts = []
    for name, values in zip(names, found.correlations().values(), strict=True):
        rho, p = values["rho"], values["p"]
        chance = f"p = {p:.2f}" if p >= 0.01 else "p < 0.01"
        value = f"{rho:+.2f} ({chance})" if np.isfinite(rho) else "– (not defined)"
        parts.append(f"{name} {value}")
    who = f"Do classes gain where client {found.client} is strong? Spearman's ρ of the gain with "
    return who + ", ".join(parts) + "."


def _table(found: Contribution) -> Table:
    edges = np.isfinite(found.class_homophily).any()
    names = ["class", "train\nown | all", "test", "φ\nown | others", "with", "without"]
    rows = []
    for row in (*found.classes(), *found.groups()):
        both = f"{number_text(row.homophily, 2)} | {number_text(row.homophily_others, 2)}"
        cells = [row.name, f"{row.train:.0f} | {row.train_all:.0f}", f"{row.test:.0f}"]
        cells += [both.replace("– | –", "")] if edges else []
        cells += [_percent(row.present), _percent(row.absent), _percent(row.gain, sign="+")]
        rows.append(cells)
    columns = [name for name in (*names, "difference") if edges or not name.startswith("φ")]
    return make_table(columns, rows, left=0, sections=[len(found.classes())])


def _percent(values: np.ndarray, *, sign: str = "", spread: bool = True) -> str:
    value, deviation = 100 * mean(values), std(values)
    if not np.isfinite(value):
        return "–"
    # Rounding first avoids "-0.0".
    text = f"{round(value, 1) + 0.0:{sign}.1f}"
    return text if deviation is None or not spread else f"{text} ± {100 * deviation:.1f}"


def contribution_files(found: Contribution) -> dict[str, object]:
    """Return contribution.csv (by seed), contribution.json and .png, for `write_all`."""
    lines = []
    for place in range(found.config.seeds):
        for row in (*found.classes(), *found.groups()):
            scores = [row.present[place], row.absent[place], row.gain[place]]
            numbers = [getattr(row, name) for name in _MEASURES] + scores
            cells = [f"{value:.6g}" if np.isfinite(value) else "" for value in numbers]
            lines.append([found.config.seed + place, row.name, *cells])
    names = ["seed", "class", *_MEASURES, "with", "without", "difference"]
    more = {"about": found.about, "config": msgspec.to_builtins(found.config)}
    return {
        "contribution.csv": make_table(names, lines),
        "contribution.json": summary(found) | more,
        "contribution.png": chart(found),
    }


def summary(found: Contribution) -> dict[str, object]:
    """Return the object of `--json` and `contribution.json`, with null for undefined."""
    config = found.config
    names = ("partition", "split", "protocol", "rounds", "seeds", "seed")
    return {
        "method": config.method,
        "data": config.data,
        "clients": found.clients,
        **{name: getattr(config, name) for name in names},
        "client": found.client,
        "vary": found.vary,
        "ratio": found.ratio,
        "classes": [_row_summary(row) for row in found.classes()],
        "groups": [_row_summary(row) for row in found.groups()],
        "correlations": found.correlations(),
        "best_round": found.best,
    }


def _row_summary(row: Effect) -> dict[str, object]:
    scores = {"with": row.present, "without": row.absent, "difference": row.gain}
    return {
        "name": row.name,
        **{name: getattr(row, name) for name in _MEASURES},
        **{k: {"mean": mean(v), "std": std(v), "per_seed": v} for k, v in scores.items()},
    }


def chart(found: Contribution) -> Panels:
    """Plot labels and homophily of each client, and the client's effect on each class."""
    classes = found.train.shape[2]
    maps = 1.4 + 0.36 * min(max(found.clients, 3), plot.MAX_ROWS)
    frame = (found.client, 0, 1, classes)  # around the measured client
    x, y = named("class", range(classes)), named("client", range(found.clients), down=True)
    counts, phi = found.train.mean(0), found.class_homophily
    heat = plot.Heat(counts, number_words(counts, 0), frame=frame)
    above = [Chart("Training nodes", x, y, (heat,))]
    if np.isfinite(phi).any():
        heat = plot.Heat(phi, number_words(phi, 2), high=1.0, frame=frame)
        text = "Class-wise homophily (grey: no edge touches the class)"
        above.append(Chart(text, x, y, (heat,)))
    rows, size = (tuple(above), (_bars(found),)), (min(max(11, 5 + 0.9 * classes), 20), maps + 4.6)
    return Panels(title(found).replace(": ", "\n", 1), rows, size, heights=(maps, 4))


def _bars(found: Contribution) -> Chart:
    rows = [*found.classes(), found.groups()[0]]
    at = np.arange(len(rows), dtype=float)
    at[-1] += 0.4  # the last pair is not a class
    several = found.config.seeds > 1
    top = np.zeros(len(rows))
    marks: list[plot.Mark] = []
    sides = ((-0.2, "present", plot.BLUE, "with"), (0.2, "absent", plot.ORANGE, "without"))
    for side, name, colour, word in sides:
        scores = [getattr(row, name) for row in rows]
        height = np.nan_to_num([100 * mean(values) for values in scores])
        spread = np.array([100 * (std(values) or 0.0) for values in scores])
        label, whiskers = f"{word} client {found.client}", spread if several else None
        marks.append(Bars(at + side, height, 0.0, 0.38, colour, label, whiskers))
        top = np.maximum(top, height + spread)
    for x, y, row in zip(at, top, rows, strict=True):
        text = _percent(row.gain, sign="+", spread=False)
        usual = plot.SOFT if text in ("+0.0", "–") else plot.GREEN
        colour = plot.RED if text.startswith("-") else usual
        size = 7 if len(rows) > 16 else 10
        marks.append(plot.Texts([x], [y], [text], colour=colour, size=size, bold=True))
    over = "; whiskers: standard deviation over seeds" if several else ""
    ticks = [(float(x), row.name) for x, row in zip(at, rows, strict=True)]
    words = "Accuracy of the global model on all clients' test nodes (numbers: points gained"
    wide = Axis("class", at[0] - 0.6, at[-1] + 0.6, ticks=ticks)
    high = Axis("correct test nodes, %", 0, max(float(top.max()), 1.0) * 1.12)
    return Chart(f"{words}{over})", wide, high, tuple(marks), legend="above")
