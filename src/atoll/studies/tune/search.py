"""The search of one method with Optuna: its space, its first points, and its trials.

Each finished trial is stored, in one transaction, in the SQLite file of the study's folder, which
Optuna's own tools can also read. The next settings depend only on the stored trials and on (seed,
number of the trial), so a killed search continues as if it had not been interrupted.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import msgspec

from atoll.core.aggregate import RULES, Rule
from atoll.core.errors import ConfigError, not_installed, unknown
from atoll.core.federation import Federation
from atoll.core.hyper import hypers
from atoll.core.method import Method
from atoll.core.space import OneOf, Range, Real, Space, Value, Whole, values_of
from atoll.data.public.registry import task_of_data
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig, data_header, resolve
from atoll.experiment.history import BEST_CACHED, select_rule
from atoll.experiment.problem import Data, task_of_object
from atoll.methods import METHODS, method_class
from atoll.studies.study_run import StudyRun
from atoll.studies.tune.result import Trial, TuningRequest, safe_name

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

PRUNERS = ("median", "none")
STARTUP = 10  # random trials before the sampler learns from them
PRUNE_AFTER = 5  # minimum number of finished trials for a median
TRIES = 50  # maximum draws to find an untried point


@dataclass(frozen=True)
class SearchPlan:
    """One method's part of a tuning, checked before any run."""

    asked: RunConfig  # the user's options, for this method
    config: RunConfig  # the same, resolved
    weights: str  # the protocol's weights of clients (a `Protocol` cannot be pickled)
    data_seed: int | None  # the protocol's fixed seed of the data
    space: dict[str, Range]  # the ranges to search
    first: list[dict[str, Value]]  # the method's own defaults, or all points
    whole: bool  # whether all points of the space are tried
    trials: int
    notes: list[str]

    @property
    def name(self) -> str:
        return self.asked.method

    def redivides(self, data: Data | None) -> bool:
        """Return whether new seeds partition the data again and so have other test nodes."""
        fixed = isinstance(data, Federation) or data_header(self.asked) is not None
        return not fixed and self.data_seed is None and self.config.split != "given"

    def trial(self, number: int, settings: Mapping[str, Value]) -> StudyRun:
        """Return the run of a trial."""
        labels = {"method": self.name, "role": "trial", "trial": number}
        return StudyRun(f"{safe_name(self.name)}-{number:04d}", self._with(settings), labels)

    def test(self, settings: Mapping[str, Value], seeds: int, again: int = 1) -> StudyRun:
        """Return the run of the final test. Its seeds follow the seeds of the trials."""
        fresh = {"seed": self.asked.seed + self.asked.seeds, "seeds": seeds}
        config = msgspec.structs.replace(self._with(settings), **fresh)
        name = f"test-{safe_name(self.name)}" + (f"-{again}" if again > 1 else "")
        return StudyRun(name, config, {"method": self.name, "role": "test"})

    def _with(self, settings: Mapping[str, Value]) -> RunConfig:
        return msgspec.structs.replace(self.asked, set={**self.asked.set, **settings})


def make_plan(method: str, request: TuningRequest, data: Data | None) -> SearchPlan:
    """Plan the trials of a method. Raise an error for everything that cannot run."""
    asked = msgspec.structs.replace(request.config, method=method)
    config, rules = resolve(asked, task_of_object(data))
    if select_rule(config, rules) == BEST_CACHED:
        picks = "compat test-selection selects by test scores, which tuning must not see"
        raise ConfigError(f"{picks}; remove it")
    header = data_header(config) if data is None else None
    task = task_of_object(data) or (header.task if header else task_of_data(config.data))
    search = {key: parse_range(key, text) for key, text in request.search.items()}
    space, notes = space_of(asked, config, task, request.preset, search)
    points = grid_of(space, request.trials)
    trials = request.trials if points is None else len(points)
    if trials < request.trials:
        notes.append(f"{method}: the space has {trials} points, so each is tried once")
    first = [defaults_of(config, task, space)] if points is None else points
    scoring = rules.weights, rules.data_seed
    return SearchPlan(asked, config, *scoring, space, first, points is not None, trials, notes)


def parse_range(key: str, text: str) -> Range:
    """Parse a range: `1e-4..1e-1:log`, `1..5` or `32,64,128`."""
    ends, _, scale = text.partition(":")
    low, dots, high = ends.partition("..")
    ways = f"{key}=LOW..HIGH, {key}=LOW..HIGH:log or {key}=A,B,C"
    unreadable = ConfigError(f"--search {key} cannot be '{text}'; write {ways}")
    if not dots:
        values = tuple(_value(part) for part in text.split(","))
        if "" in values:
            raise unreadable
        return OneOf(values)
    first, last = _value(low), _value(high)
    if isinstance(first, str | bool) or isinstance(last, str | bool) or scale not in ("", "log"):
        raise unreadable
    if isinstance(first, int) and isinstance(last, int):
        return Whole(first, last, log=scale == "log")
    return Real(first, last, log=scale == "log")


def _value(text: str) -> Value:
    text = text.strip()
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def space_of(
    asked: RunConfig,
    config: RunConfig,
    task: str,
    preset: str | None = None,
    search: Mapping[str, Range] | None = None,
) -> tuple[dict[str, Range], list[str]]:
    """Return the space of one method, and a note on each hyper-parameter that it cannot search.

    The search skips hyper-parameters that `asked` sets. `config` is `asked` with all defaults.
    `preset` names one of the method's `grids`. The user's ranges in `search` replace or extend the
    method's.
    """
    cls, name = method_class(config.method), config.method
    declared: Space = cls.space if preset is None else _grid(cls, name, preset)
    parts = _parts(build_method(config, task=task))
    known = {key for part in parts for key in _names(part)}
    search = {key: _as_typed(parts, key, wanted) for key, wanted in (search or {}).items()}
    fixed = {key.rpartition(".")[2] for key in asked.set}
    fixed |= {"epochs"} if asked.epochs is not None else set()
    chose = {"net", "optimizer"} & fixed
    space: dict[str, Range] = {}
    notes = []
    for key, values in {**declared, **search}.items():
        if key in fixed and key not in search:
            continue  # the user has set it
        if key in fixed:
            raise ConfigError(f"{key} is both fixed and in --search; give one of the two")
        if key in known:
            space[key] = values
        elif key in search or not chose:
            raise unknown(f"hyper-parameter of {name}", key, known)
        else:
            notes.append(f"{name}: {key} is not searched, because {' and '.join(chose)} lacks it")
    own = vars(cls).get("__annotations__", {}) if "space" not in vars(cls) and ":" in name else {}
    for key in (key for key in own if key in known - fixed and key not in space):
        if not (example := _example_of(hypers(cls)[key].kind)):
            continue  # it has no values that `--search` could name
        why = f"is not searched, because `space` has no range for it; add --search {key}={example}"
        notes.append(f"{name}: {key} {why}")
        logging.getLogger(__name__).warning(notes[-1])  # a search may take hours
    if not space:
        raise ConfigError(f"{name} has nothing left to search; remove a --set, or add --search")
    _check_values(config, task, space)
    return space, notes


def _example_of(kind: object) -> str:
    """Return an example of the values in `--search` for a field's type, or "" if it takes none."""
    if get_origin(kind) is Literal:
        return ",".join(map(str, get_args(kind)))
    if kind in (int, float, int | None, float | None):
        return "LOW..HIGH"
    named: dict[object, str] = {bool: "true,false", str: "A,B", Rule: ",".join(RULES)}
    return named.get(kind, "")


def _as_typed(parts: Sequence[Any], key: str, wanted: Range) -> Range:
    """Return the range, with real instead of whole numbers if the field takes real numbers."""
    kinds = [hypers(type(part))[key].kind for part in parts if key in _names(part)]
    if not isinstance(wanted, Whole) or not kinds or float not in (kinds[0], *get_args(kinds[0])):
        return wanted
    return Real(wanted.low, wanted.high, log=wanted.log)


def _grid(cls: type[Method], name: str, preset: str) -> Space:
    if preset in cls.grids:
        return cls.grids[preset]
    if cls.grids:
        raise unknown(f"preset of the search for {name}", preset, cls.grids)
    able = ", ".join(other for other, found in METHODS.items() if preset in found.grids)
    hint = f"remove --preset {preset}, which only these methods have: {able}"
    raise ConfigError(f"{name} has no published grid to search; {hint}")


def _check_values(config: RunConfig, task: str, space: Mapping[str, Range]) -> None:
    """Check that every value of a choice and both ends of a range are valid, before any run."""
    for key, wanted in space.items():
        ends = wanted.values if isinstance(wanted, OneOf) else (wanted.low, wanted.high)
        for value in ends:
            changed = msgspec.structs.replace(config, set={**config.set, key: value})
            try:
                build_method(changed, task=task)
            except ConfigError as error:
                problem = f"{config.method} cannot search {key}={wanted}: {error}"
                raise ConfigError(problem) from None


def defaults_of(config: RunConfig, task: str, space: Mapping[str, Range]) -> dict[str, Value]:
    """Return the method's default values that are in the space."""
    parts = _parts(build_method(config, task=task))
    owners = {key: next(part for part in parts if key in _names(part)) for key in space}
    values = {key: getattr(owner, key) for key, owner in owners.items()}
    return {key: value for key, value in values.items() if value in space[key]}


def grid_of(space: Mapping[str, Range], most: int) -> list[dict[str, Value]] | None:
    """Return all points of a space with at most `most` points, or None for a larger space."""
    axes = [values_of(wanted) for wanted in space.values()]
    values = [axis for axis in axes if axis is not None]
    if len(values) < len(axes) or math.prod(map(len, values)) > most:
        return None
    return [dict(zip(space, point, strict=True)) for point in itertools.product(*values)]


def _parts(method: Any) -> list[Any]:
    """Return method, network, base and optimizer, in the order in which `--set` searches a key."""
    inner = [getattr(method, name, None) for name in ("net", "base", "optimizer")]
    return [method, *(part for part in inner if is_dataclass(part))]


def _names(part: Any) -> set[str]:
    return {f.name for f in fields(part)} - {"net", "optimizer", "base", "features", "classes"}


def need_optuna() -> None:
    """Raise an error before the work if Optuna is not installed."""
    try:
        import optuna  # noqa: F401  # only checks whether it is installed
    except ImportError as error:
        raise not_installed("tuning", "optuna", "tune") from error


@dataclass
class Search:
    """The search of one method: it draws settings and stores the trials."""

    file: Path  # Optuna's SQLite file
    name: str  # the study's name in the file
    space: Mapping[str, Range]  # the ranges to search
    seed: int  # of the sampler
    rounds: int  # of a whole trial, for the pruner
    pruner: str  # one of `PRUNERS`
    first: Sequence[
        Mapping[str, Value]
    ] = ()  # points to try before random ones; missing keys are drawn

    def __post_init__(self) -> None:
        import optuna

        # Optuna has its own logs; here the command line reports.
        logging.getLogger("optuna").setLevel(logging.WARNING)
        self.distributions = {key: _distribution(wanted) for key, wanted in self.space.items()}
        storage = optuna.storages.RDBStorage(f"sqlite:///{self.file.absolute()}")
        self.storage = optuna.create_study(
            study_name=self.name, storage=storage, direction="maximize", load_if_exists=True
        )
        self.frozen: list[FrozenTrial] = self.storage.get_trials(deepcopy=False)
        self.live: Any = None  # the current trial, in a separate study in memory

    def __getstate__(self) -> dict[str, object]:
        """Return the state for another process, which asks and reports but stores nothing."""
        return {k: v for k, v in self.__dict__.items() if k not in ("storage", "live")}

    @property
    def trials(self) -> list[Trial]:
        found = []
        for number, frozen in enumerate(self.frozen):
            curve = [value for _, value in sorted(frozen.intermediate_values.items())]
            about = frozen.user_attrs  # the other fields
            value = frozen.value if about["state"] == "complete" else None
            found.append(Trial(number, dict(frozen.params), value=value, curve=curve, **about))
        return found

    def ask(self) -> dict[str, Value] | None:
        """Return the next settings, or None if `TRIES` draws give no untried point."""
        import optuna

        number, tried = len(self.frozen), [trial.params for trial in self.frozen]
        warmup = max(self.rounds // 5, 1)
        median = optuna.pruners.MedianPruner(n_startup_trials=PRUNE_AFTER, n_warmup_steps=warmup)
        pruner = median if self.pruner == "median" else optuna.pruners.NopPruner()
        memory = optuna.create_study(direction="maximize", pruner=pruner)
        memory.add_trials(self.frozen)
        for attempt in range(TRIES):
            seed = (self.seed * 1_000_003 + number * 1009 + attempt) % 2**32
            # TPE may repeat itself, so a random sampler replaces it after five attempts.
            blind = optuna.samplers.RandomSampler(seed=seed)
            learned = optuna.samplers.TPESampler(seed=seed, n_startup_trials=STARTUP)
            memory.sampler = learned if attempt < 5 else blind
            if attempt == 0 and number < len(self.first):
                memory.enqueue_trial(dict(self.first[number]))
            self.live = memory.ask(self.distributions)
            settings = {key: _rounded(self.space[key], v) for key, v in self.live.params.items()}
            if settings not in tried:
                self.settings = settings
                return settings
            memory.tell(self.live, state=optuna.trial.TrialState.FAIL)
        return None

    def known(self, trials: int) -> list[dict[str, Value]]:
        """Return settings of the next trials that depend on no open result, up to `trials` in all.

        These are the given first points and the random draws; after them, only the next trial.
        """
        before, found = self.frozen, []
        free = max(STARTUP, len(self.first), len(before) + 1)
        self.frozen = list(before)
        try:
            while len(self.frozen) < min(free, trials) and (settings := self.ask()) is not None:
                found.append(settings)
                self.frozen.append(self._freeze("failed"))
        finally:
            self.frozen = before
        return found

    def report(self, step: int, value: float) -> bool:
        """Report the score after a round. Return True if the trial should be pruned."""
        if math.isnan(value):
            return False
        self.live.report(value, step)
        return bool(self.live.should_prune())

    def tell(
        self, state: str, curve: Sequence[float], value: float | None = None, **about: object
    ) -> None:
        """Store the outcome of the trial. `about` contains further fields of its `Trial`."""
        frozen = self._freeze(state, curve, value, **about)
        self.storage.add_trial(frozen)
        self.frozen.append(frozen)

    def _freeze(
        self, state: str, curve: Sequence[float] = (), value: float | None = None, **about: object
    ) -> FrozenTrial:
        """Return the current trial as Optuna stores it."""
        from optuna.trial import TrialState, create_trial

        # A diverged trial counts as pruned, so that the sampler learns to avoid its settings.
        states = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL}
        return create_trial(
            state=states.get(state, TrialState.PRUNED),
            value=value,
            params=self.settings,
            distributions=self.distributions,
            intermediate_values={i: v for i, v in enumerate(curve) if not math.isnan(v)},
            user_attrs={"state": state, **about},
        )

    def importance(self) -> dict[str, float]:
        """Return the share of each hyper-parameter in the variance of scores, or {} if unknown."""
        import optuna

        complete = [t for t in self.frozen if t.state == optuna.trial.TrialState.COMPLETE]
        varied = [k for k in self.space if len({t.params[k] for t in complete}) > 1]
        if len(complete) < STARTUP or not varied or len({t.value for t in complete}) < 2:
            return {}
        memory = optuna.create_study(direction="maximize")
        memory.add_trials(complete)
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(memory, evaluator=evaluator, params=varied)
        return {key: float(share) for key, share in found.items()}


def _distribution(wanted: Range) -> BaseDistribution:
    from optuna import distributions

    if isinstance(wanted, OneOf):
        return distributions.CategoricalDistribution(wanted.values)
    if isinstance(wanted, Whole):
        return distributions.IntDistribution(wanted.low, wanted.high, log=wanted.log)
    return distributions.FloatDistribution(wanted.low, wanted.high, log=wanted.log)


def _rounded(wanted: Range, value: Value) -> Value:
    """Round a real number to three significant digits, which fit on a command line."""
    if isinstance(value, float) and not isinstance(wanted, OneOf):
        short = float(f"{value:.3g}")
        value = short if short in wanted else value
    return value
