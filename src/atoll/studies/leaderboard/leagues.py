"""The leagues that `recipes/leaderboard.toml` declares, and their runs."""

from __future__ import annotations

import hashlib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import msgspec

from atoll.core.errors import ConfigError, check_name
from atoll.core.space import Real, Value
from atoll.core.task import GRAPHS
from atoll.data.load import is_own
from atoll.data.public.registry import task_of_data
from atoll.data.synthetic import built_in
from atoll.experiment.build import build_method
from atoll.experiment.config import RECIPES, RunConfig, data_header, make_config, own_files, resolve
from atoll.experiment.problem import name_configuration
from atoll.methods import METHODS
from atoll.studies.compare.plan import named_arms, parse_arm
from atoll.studies.leaderboard.rows import TRIALS, Key, Row
from atoll.studies.reproduce.recipes import absent
from atoll.studies.study_run import Json, StudyRun
from atoll.studies.tune.result import safe_name
from atoll.studies.tune.search import defaults_of

NODE, OWNERS, GRAPH = "nodes", "owners", "graphs"
GROUPS = DEVELOPMENT, FURTHER, GRAPH_SETS = "development sets", "further sets", "sets of graphs"
ANY_RATE = {"lr": Real(0.0, 1e6)}
RUN_FIRST = "run the league first (--minutes above 0), or give another --csv"


class Partition(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A way to divide data."""

    kind: str = NODE  # kind of the data sets that it applies to
    run: Json = {}  # options, as in `RunConfig`


class DataSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A data set of the leagues, or a user's own data."""

    development: bool = False  # whether its test scores were known during the design of Reef
    half: str = ""  # "homophilous" or "heterophilous"
    kind: str = NODE  # or "owners", "graphs"
    without: tuple[str, ...] = ()  # partitions that it is too small for

    @property
    def group(self) -> str:
        """The group of tables that contains the set."""
        return DEVELOPMENT if self.development else GRAPH_SETS if self.kind == GRAPH else FURTHER


class League(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A set of rules that gives all methods the same budget."""

    title: str
    about: str
    methods: tuple[str, ...]  # "*" is every method, and "*:net=duo" every method on that network
    seeds: dict[str, int]  # by partition
    grids: tuple[
        dict[str, tuple[Value, ...]], ...
    ] = ()  # settings to select from; empty: no search
    trial_seed: int = 1000
    trial_seeds: int = 2


class Recipe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All leagues, with the data sets and partitions that they share."""

    run: Json  # options of every run
    frozen: str = ""  # the last commit that changed Reef; empty: not yet
    partitions: dict[str, Partition]
    sets: dict[str, DataSet]
    leagues: dict[str, League]

    def set_of(self, data: str) -> DataSet:
        """Return a set of the recipe, or a description of other data."""
        for name, known in self.sets.items():
            if name.lower() == data.lower():
                return known
        graphs = task_of_data(data) == GRAPHS.name
        given = built_in(data) or is_own(data)  # these define their clients
        return DataSet(kind=OWNERS if given else GRAPH if graphs else NODE)


@cache
def read_leagues() -> Recipe:
    """Read `recipes/leaderboard.toml` of this package."""
    text = (RECIPES / "leaderboard.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Recipe)


@dataclass(frozen=True)
class Wanted:
    """The user's choice. An empty field means everything in the league."""

    methods: Sequence[str] = ()  # labels of the league, or other methods with settings
    data: Sequence[str] = ()  # sets of the league, or other names and paths
    partitions: Sequence[str] = ()
    seeds: int | None = None
    options: Json = field(default_factory=dict)  # of every run, as in `RunConfig`


@dataclass(frozen=True)
class Entry:
    """One planned row."""

    run: StudyRun
    recipe: str  # a hash of the configuration, and of its trials
    trials: Mapping[str, StudyRun] = field(default_factory=dict)  # by recipe

    @property
    def key(self) -> Key:
        return tuple(self.run.labels[name] for name in ("league", "data", "partition", "method"))

    def is_known(self, rows: Mapping[Key, Row]) -> bool:
        """Return whether a row of the same configuration has at least as many seeds."""
        row = rows.get(self.key)
        return row is not None and row.recipe == self.recipe and row.seeds >= self.run.config.seeds


def plan_league(name: str, wanted: Wanted) -> tuple[list[Entry], list[str]]:
    """Return the rows of a league that can run here, and a sentence for each excluded part."""
    recipe = read_leagues()
    check_name("league", name, recipe.leagues)
    league, entries, notes = recipe.leagues[name], list[Entry](), list[str]()
    unable: dict[str, list[str]] = {}  # sets by the methods that cannot run on them
    for part in wanted.partitions:
        check_name("partition of the league", part, league.seeds)
    arms = _arms(league, wanted.methods)
    for data in wanted.data or recipe.sets:
        about = recipe.set_of(data)
        fitting = [part for part in league.seeds if recipe.partitions[part].kind == about.kind]
        parts = [part for part in wanted.partitions or fitting if part not in about.without]
        here = built_in(data) or is_own(data)
        missing = "" if here or not parts else absent(data, wanted.options.get("data_root"))
        if missing and wanted.data:
            raise ConfigError(missing)
        notes += [missing] if missing else []
        for part in [] if missing else parts:
            options = {"seeds": wanted.seeds or league.seeds[part], **recipe.run}
            options |= (own := recipe.partitions[part].run) | wanted.options
            if allow := {*own.get("allow", ()), *wanted.options.get("allow", ())}:
                options["allow"] = sorted(allow)
            labels = {"league": name, "data": data, "partition": part}
            found, others = _entries(league, arms, labels, options)
            entries += found
            unable.setdefault(", ".join(others), []).append(data)
    lost = {methods: ", ".join(dict.fromkeys(sets)) for methods, sets in unable.items() if methods}
    return entries, notes + [f"{methods} cannot run on {sets}" for methods, sets in lost.items()]


def chosen_rows(rows: Sequence[Row], leagues: Sequence[str], wanted: Wanted) -> list[Row]:
    """Return the rows of these leagues that match the user's choice, for a ranking without runs.

    A name without rows is an error. Seeds and other options do not matter.
    """
    for name in leagues:
        check_name("league", name, read_leagues().leagues)
    if not (found := [row for row in rows if row.league in leagues]):
        problem = f"the CSV file has no row of the league {' or '.join(leagues)}"
        raise ConfigError(f"{problem}; {RUN_FIRST}")
    methods = named_arms(wanted.methods) if wanted.methods else ()
    choices = {"data": wanted.data, "partition": wanted.partitions, "method": methods}
    for column, names in choices.items():
        known = {str(getattr(row, column)).lower() for row in found}
        for name in (low := [name.lower() for name in names]):
            check_name(f"{column} in the CSV file", name, known)
        found = [row for row in found if not low or getattr(row, column).lower() in low]
    return found


def _entries(
    league: League, arms: Mapping[str, tuple[str, bool]], labels: Json, options: Json
) -> tuple[list[Entry], list[str]]:
    """Return the rows of one set and partition, and the methods of "*" that cannot run there."""
    entries, unable = dict[str, Entry](), list[str]()
    for label, (text, any_method) in arms.items():
        try:
            entry = _entry(league, labels | {"method": label}, text, options)
        except ConfigError:
            if not any_method:
                raise
            unable.append(label)
            continue
        if not (any_method and entry.recipe in {one.recipe for one in entries.values()}):
            entries[label] = entry  # one configuration needs only one label
    return list(entries.values()), unable


def _arms(league: League, wanted: Sequence[str]) -> dict[str, tuple[str, bool]]:
    """Return methods by label: their text, and whether they come from "*" (`League.methods`)."""
    arms: dict[str, tuple[str, bool]] = {}
    for given in league.methods:
        if given.startswith("*"):
            names = (f"{name}{given[1:]}" for name in METHODS)
            arms |= {name: (name, True) for name in names if name not in arms}
        else:
            arms |= {label: (str(text), False) for label, text in named_arms([given]).items()}
    own = {label: (str(text), False) for label, text in named_arms(wanted or ["none"]).items()}
    return {label: arms.get(label, arm) for label, arm in own.items()} if wanted else arms


def _entry(league: League, labels: Json, text: str, options: Json) -> Entry:
    arm = parse_arm(labels["method"], text)
    about = {"data": labels["data"], "method": arm.name, "set": dict(arm.settings)}
    config = make_config(**options, **about)
    recipe = _recipe(config)
    trials = _trials(league, config, labels | {"league": TRIALS}) if league.grids else {}
    if trials:
        recipe = hashlib.sha256(" ".join([recipe, *trials]).encode()).hexdigest()[:8]
    return Entry(_run(config, labels, recipe), recipe, trials)


def _trials(league: League, config: RunConfig, labels: Json) -> dict[str, StudyRun]:
    """Return the trials of the first grid that a method can run, by recipe.

    `rate` in a grid multiplies the method's default learning rate.
    """
    config = msgspec.structs.replace(config, seed=league.trial_seed, seeds=league.trial_seeds)
    rate = defaults_of(resolve(config)[0], _task(config), ANY_RATE)["lr"]
    problem = ConfigError("the league has no grid")
    for grid in league.grids:
        trials: dict[str, StudyRun] = {}
        try:
            for values in itertools.product(*grid.values()):
                point = dict(zip(grid, values, strict=True))
                if "rate" in point:
                    point["lr"] = float(f"{float(rate) * float(point.pop('rate')):.3g}")
                asked = msgspec.structs.replace(config, set={**point, **config.set})
                recipe = _recipe(asked)
                trials[recipe] = _run(asked, labels, recipe)
        except ConfigError as error:
            problem = error
        else:
            return trials
    raise problem


def _run(config: RunConfig, labels: Json, recipe: str) -> StudyRun:
    words = labels["league"], labels["data"], labels["partition"], labels["method"]
    name = safe_name("-".join(words))[:90]
    return StudyRun(f"{name}-{recipe}", config, labels | {"clients": config.clients}, light=True)


def _recipe(config: RunConfig) -> str:
    """Hash a configuration with all defaults, but without the number of seeds.

    A configuration that cannot run is an error.
    """
    full, _ = resolve(config)
    # The device does not matter, and the method knows its settings.
    plain = msgspec.structs.replace(full, device="auto", chunk=0, set={})
    name = name_configuration(plain, build_method(full, task=_task(full)))
    name += " ".join(own_files(full).values())
    return hashlib.sha256(f"{name} {config.seed}".encode()).hexdigest()[:8]


def _task(config: RunConfig) -> str:
    header = data_header(config)
    return header.task if header else task_of_data(config.data)


def tuned_run(entry: Entry, rows: Mapping[Key, Row]) -> StudyRun | None:
    """Return an entry's run with the settings of its best trial, or None if a trial is missing.

    The first trial wins ties. A diverged trial is worse than any other.
    """
    by_recipe = {row.recipe: row for row in rows.values()}
    if not all(recipe in by_recipe for recipe in entry.trials):
        return None

    def score(recipe: str) -> float:
        mean = by_recipe[recipe].mean
        return -1.0 if mean is None else mean

    best = entry.trials[max(entry.trials, key=score)].config
    config = msgspec.structs.replace(entry.run.config, set=best.set)
    return replace(entry.run, config=config)
