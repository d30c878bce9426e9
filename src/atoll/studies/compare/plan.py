"""The request and the runs of a comparison: every arm and grid point on every problem.

A *problem* is one data set divided among a number of clients. An *arm* is one method with its
settings. The plan checks everything before the first run.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from atoll.core.errors import ConfigError, DataError, unknown
from atoll.core.method import Method
from atoll.core.space import Value
from atoll.data.public.registry import task_of_data
from atoll.engines.base import choose_engine
from atoll.experiment.baseline import AnyBaseline, Baseline
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig, config_text, data_header, make_config, resolve
from atoll.experiment.hardware import choose_device
from atoll.experiment.history import metric_of, positive_of
from atoll.experiment.metrics import COMPARED, find_metric
from atoll.experiment.problem import Data, FederationCache, Problem, data_object, task_of_object
from atoll.methods import METHODS, method_name, split_preset
from atoll.studies.baselines import BASELINES, SHORTHANDS, as_method, make_baseline
from atoll.studies.compare.statistics import ALPHA
from atoll.studies.study_run import Json, StudyRun, read_outcome

SEEDS = 5
Grid = Mapping[str, Sequence[Value]]
Methods = Iterable[str | Method] | Mapping[str, str | Method]
Key = TypeVar("Key")
Given = TypeVar("Given")
Several = str | Data | Iterable[str | Data]


class ComparisonRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of a comparison, as stored in `study.json`."""

    methods: dict[str, str]  # methods by the labels of the arms: `fedprox:mu=0.1`
    data: tuple[str, ...] = ("lagoon",)  # names or paths
    clients: tuple[int | None, ...] = (None,)  # None: chosen by data and protocol
    grid: dict[str, tuple[Value, ...]] = {}  # by key: `mu`, or `fedprox:mu` for one arm
    options: Json = {}  # as in `RunConfig`, the same for all runs
    against: str | None = None  # label of the reference; None takes the best method
    metric: str | None = None  # the metric of the tests; None takes the metric of the data
    alpha: float = ALPHA  # significance level of the tests
    objects: tuple[str, ...] = ()  # labels of methods and names of data that are Python objects


def make_request(
    methods: Methods,
    data: Several = "lagoon",
    *,
    clients: int | Sequence[int] | None = None,
    options: Json | None = None,
    grid: Grid | None = None,
    **tested: Any,
) -> ComparisonRequest:
    """Make a request from the user's values. Raise an error for duplicate or missing values."""
    arms, sources = named_arms(methods), named_data(data)
    numbers = [clients] if clients is None or isinstance(clients, int) else list(clients)
    given = [*arms.items(), *sources.items()]
    chosen = {"metric": tested["metric"]} if tested.get("metric") is not None else {}
    if tested.get("against") is not None:
        tested["against"] = plain_arm(tested["against"], arms)
    return ComparisonRequest(
        methods={k: v if isinstance(v, str) else type(v).__name__ for k, v in arms.items()},
        data=tuple(sources),
        clients=tuple(_unique("number of clients", ((n, n) for n in numbers))),
        grid={key: tuple(values) for key, values in (grid or {}).items()},
        options={"seeds": SEEDS, **(options or {}), **chosen},
        objects=tuple(name for name, value in given if not isinstance(value, str)),
        **tested,
    )


def named_arms(methods: Methods) -> dict[str, str | Method]:
    """Return methods by their labels."""
    pairs = methods.items() if isinstance(methods, Mapping) else map(_labelled, methods)
    return _unique("method", pairs)


def _labelled(method: str | Method) -> tuple[str, str | Method]:
    """Return a label and its method: `strong` in `strong=fedprox:mu=1`, otherwise the whole text.

    The label of an object is the name of its class.
    """
    if not isinstance(method, str):
        return type(method).__name__, method
    label, _, text = (part.strip() for part in method.partition("="))
    # The "=" of a setting follows a colon, and the "=" of a path follows a slash. A number is not a
    # method, but the value of a setting whose colon is missing.
    own = label and not set(label) & set(":/\\") and text and not text[0].isdigit()
    return (label, plain_arm(text)) if own else (plain_arm(method), plain_arm(method))


def plain_arm(text: str, labels: Iterable[str] = ()) -> str:
    """Return an arm with its method's usual name: `fedpub:k=1` for `FED-PUB:k=1`. Keep `labels`."""
    name, colon, settings = text.partition(":")
    return text if text in labels else f"{method_name(name)}{colon}{settings}"


def named_data(data: Several) -> dict[str, str | Data]:
    """Return data by their names."""
    return _unique("data set", _named(data))


def _named(data: Several) -> Iterator[tuple[str, str | Data]]:
    if isinstance(data, str):
        yield from ((name, name) for name in split_names(data))
    elif isinstance(data, Iterable):
        yield from (pair for one in data for pair in _named(one))
    else:
        data_object(data)  # refuses other objects
        yield data.name, data


def split_names(text: str) -> list[str]:
    """Split a list like `cora,pubmed`. Options may contain commas: `lagoon:a=1,b=2,cora`."""
    if Path(text).expanduser().exists():
        return [text]
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    return [name for name in names if name]


def _unique(what: str, pairs: Iterable[tuple[Key, Given]]) -> dict[Key, Given]:
    found: dict[Key, Given] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{what} '{key}' is given twice; give each once")
        found[key] = value
    if not found:
        raise ConfigError(f"no {what} is given; give one or several")
    return found


@dataclass(frozen=True)
class Arm:
    """One method or baseline with its settings."""

    label: str
    name: str
    settings: Mapping[str, Value]
    method: Method | AnyBaseline | None = None


def make_runs(
    request: ComparisonRequest, methods: Mapping[str, Method], data: Mapping[str, Data]
) -> list[StudyRun]:
    """Return every arm and grid point on every problem, in the order of the tables."""
    arms = [parse_arm(label, text, methods.get(label)) for label, text in request.methods.items()]
    problems = itertools.product(request.data, request.clients, arms)
    found = [_runs_of(arm, request, (name, n), data.get(name)) for name, n, arm in problems]
    runs: list[StudyRun] = []
    for run in itertools.chain(*found):
        safe = "".join(c if c.isalnum() or c in "-_.=" else "-" for c in run.name).strip("-.")
        name = safe[:100]
        if len(safe) > 100 or name in {one.name for one in runs}:  # similar names
            own = hashlib.sha256(config_text(run.config).encode()).hexdigest()[:8]
            name = f"{name[:90]}-{own}"
        runs.append(replace(run, name=name))
    return runs


def _runs_of(
    arm: Arm, request: ComparisonRequest, problem: tuple[str, int | None], given: Data | None
) -> Iterator[StudyRun]:
    """Return the runs of one arm on one problem, one for each point of its grid."""
    name, clients = problem
    shared = dict(request.options.get("set", {}))
    base = {key: value for key, value in request.options.items() if key != "set"}
    if arm.name.lower() in BASELINES and arm.method is None:
        trains = BASELINES[arm.name.lower()].trains  # then it takes the settings of that method
        arm = replace(arm, method=make_baseline(arm.name, {} if trains else arm.settings))
        shared = shared if trains else {}  # hyper-parameters of methods
    elif arm.method is not None and (shared or arm.settings):
        hint = f"remove {next(iter({**shared, **arm.settings}))}, or give the method by name"
        raise ConfigError(f"'{arm.label}' is a method object with its own hyper-parameters; {hint}")
    objects = {"method": arm.method, "data": given}
    base |= {"method": arm.name, "data": name if given is None else given.name, "clients": clients}
    base["objects"] = [key for key, value in objects.items() if value is not None]
    settings = {**shared, **arm.settings}
    grid = _grid_of(arm, request, make_config(**base, set=settings), given)
    for values in itertools.product(*grid.values()):
        point = dict(zip(grid, values, strict=True))
        config = make_config(**base, set={**settings, **point})
        labels = {"data": name, "clients": clients, "method": arm.label, "point": point}
        parts = [name, *([f"{clients}c"] if clients else []), arm.label]
        parts += [f"{key}={value}" for key, value in point.items()]
        yield StudyRun("-".join(parts), config, labels, arm.method, given)


def parse_arm(label: str, text: str, method: Method | AnyBaseline | None = None) -> Arm:
    """Parse an arm: `fedprox` or `my_method.py:Mine`, also with settings (`fedprox:mu=1,lr=1`)."""
    before, others = text.partition("=")[0], {*BASELINES, *SHORTHANDS}
    name, colon, _ = before.rpartition(":")
    known = split_preset(name)[0] in METHODS or name.lower() in others
    if method is not None or text.lower() in others or (before == text and not known):
        return _plain_arm(label, text, {}, method)
    settings: dict[str, Value] = {}
    for item in text[len(name) + 1 :].split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (name and colon and key and equals and value) or key in settings:
            hint = f"settings follow the name as {name or 'fedprox'}:key=value,key=value"
            raise ConfigError(f"method '{text}' cannot be read; {hint}")
        settings[key] = value
    return _plain_arm(label, name, settings)


def _plain_arm(
    label: str, name: str, settings: Mapping[str, Value], method: Method | AnyBaseline | None = None
) -> Arm:
    """Make an arm. Expand a shorthand."""
    if method is None and name.lower() in SHORTHANDS:
        name, meant = SHORTHANDS[name.lower()]
        settings = {**meant, **settings}
    return Arm(label, name, settings, method)


def check(
    request: ComparisonRequest,
    runs: Sequence[StudyRun],
    folder: Path | None,
    federations: FederationCache,
) -> None:
    """Raise an error for everything that is known to fail, before the first run.

    This makes and caches the first federation of each unfinished problem, and makes every method
    for it. `folder` may contain finished runs.
    """
    if not 0 < request.alpha < 1:
        raise ConfigError(f"alpha is {request.alpha}; give a number between 0 and 1")
    if request.metric is not None and not find_metric(request.metric).higher:
        known = ", ".join(COMPARED)
        raise ConfigError(f"{request.metric} is better when lower; choose one of: {known}")
    if request.against is not None and request.against not in request.methods:
        raise unknown("method to compare against", request.against, request.methods)
    used = {key for run in runs for key in run.labels["point"]}
    for key in (text.rpartition(":")[2] for text in request.grid):
        if key not in used:
            problem = f"no method of this study has a hyper-parameter '{key}' for --grid"
            raise ConfigError(f"{problem}; see `atoll methods NAME`")
    for run in runs:
        resolve(run.config, task_of_object(run.data))
        choose_engine(run.config.engine)
        choose_device(run.config.device)
    for (name, clients), members in itertools.groupby(runs, problem_of):
        try:
            _check_problem(request, list(members), folder, federations)
        except (ConfigError, DataError) as error:
            if len(request.data) * len(request.clients) == 1:
                raise
            where = name if clients is None else f"{name} with {clients} clients"
            raise type(error)(f"{where}: {error}") from error


def _check_problem(
    request: ComparisonRequest,
    runs: Sequence[StudyRun],
    folder: Path | None,
    federations: FederationCache,
) -> None:
    first, metric = runs[0], request.metric
    finished = [None if folder is None else read_outcome(folder, run) for run in runs]
    # Refuse a metric that finished runs lack, instead of showing all runs as failed.
    for outcome in finished if metric is not None else ():
        if outcome and outcome.summary and f"test_{metric}" not in outcome.summary["metrics"]:
            lacks = f"the finished cell '{outcome.run.name}' has no test {metric}"
            raise ConfigError(f"{lacks}; choose another --metric")
    if None not in finished:
        return
    problem = Problem.of(first.config, first.data)
    federation = federations(problem, problem.config.seed).federation
    metric_of(msgspec.structs.replace(problem.config, metric=metric), federation)
    positive_of(problem.config, federation)
    for run in runs:
        trains = run.method.trains if isinstance(run.method, Baseline) else ""
        if run.method is None or trains:
            given = as_method(trains, run.config) if trains else run.config
            config, _ = resolve(given, task_of_object(run.data))
            build_method(config, federation.features, federation.classes, federation.task.name)


def problem_of(run: StudyRun) -> tuple[str, int | None]:
    """Return a run's data set and its number of clients, as requested."""
    return run.labels["data"], run.labels["clients"]


def _grid_of(
    arm: Arm, request: ComparisonRequest, given: RunConfig, data: Data | None
) -> dict[str, Sequence[Value]]:
    """Return the part of the request's grid that applies to this arm."""
    grid: dict[str, Sequence[Value]] = {}
    if not request.grid or arm.method is not None:
        return grid
    settings, (config, _) = given.set, resolve(given, task_of_object(data))
    header = data_header(config)
    task = task_of_object(data) or (header.task if header else task_of_data(config.data))
    method = build_method(config, task=task)
    names = [parse_arm(label, text).name for label, text in request.methods.items()]
    for text, values in request.grid.items():
        owner, colon, key = text.rpartition(":")
        if colon and owner not in (*request.methods, *names):
            raise unknown("method of a grid", owner, request.methods)
        if not values or len(set(map(str, values))) < len(values):
            raise ConfigError(f"the grid of {text} needs values, each once; write {text}=0.1,1")
        if (colon and owner not in (arm.label, arm.name)) or not (colon or _has(method, key)):
            continue
        if key in settings or key in grid:
            both = f"{key} of {arm.label} is set to {settings.get(key, 'a grid')} and has a grid"
            raise ConfigError(f"{both}; give one of the two")
        grid[key] = values
    return grid


def _has(method: Method, key: str) -> bool:
    """Return whether a method, its network, optimizer or base has this hyper-parameter."""
    parts = {name: getattr(method, name, None) for name in ("net", "optimizer", "base")}
    words = [name for name, part in parts.items() if part]
    words += ["preset"] if method.presets else []
    for name, part in {"method": method, **parts}.items():
        if part is not None:
            words += [w for f in fields(part) for w in (f.name, f"{name}.{f.name}")]
    return key in words and key not in ("features", "classes")
