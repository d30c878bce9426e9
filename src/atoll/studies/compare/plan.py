"""The cells of a comparison: every arm and grid point on every problem, checked before the first.

A *problem* is one data set divided among so many clients; an *arm* is one method with its settings.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import msgspec

from atoll.core.errors import ConfigError, DataError, unknown
from atoll.core.federation import Federation
from atoll.core.method import Method
from atoll.core.space import Value
from atoll.data.public.registry import task_of_data
from atoll.engines.base import choose_engine
from atoll.experiment.baseline import AnyBaseline
from atoll.experiment.build import build_method
from atoll.experiment.config import config_text, make_config, resolve, saved_header
from atoll.experiment.federation_cache import FederationCache
from atoll.experiment.hardware import choose_device
from atoll.experiment.metrics import COMPARED
from atoll.experiment.problem import Data, Problem, task_of_object
from atoll.methods import METHODS
from atoll.studies.baselines import BASELINES, make_baseline
from atoll.studies.compare.statistics import ALPHA
from atoll.studies.study_run import Json, RunOutcome, StudyRun, read_outcome


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A study as it was asked for; `study.json` holds it whole.

    Attributes:
        methods: Labels of the arms and what they stand for: `fedprox:mu=0.1`.
        data: Names or paths.
        clients: Numbers of clients; None leaves it to data and protocol.
        grid: Values to try by hyper-parameter, `mu` or, for one arm, `fedprox:mu`.
        options: As in `RunConfig`, the same for all cells.
        against: Label of the arm that the others are tested against; None takes the best.
        metric: What is compared; None takes the data's own.
        alpha: Chance of a false alarm that the tests allow.
        objects: Labels and names of data that stand for Python objects.
    """

    methods: dict[str, str]
    data: tuple[str, ...] = ("lagoon",)
    clients: tuple[int | None, ...] = (None,)
    grid: dict[str, tuple[Value, ...]] = {}
    options: Json = {}
    against: str | None = None
    metric: str | None = None
    alpha: float = ALPHA
    objects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contender:
    """One method or baseline with its settings, and the values of a grid that it has."""

    label: str
    name: str
    settings: Mapping[str, Value]
    method: Method | AnyBaseline | None = None
    grid: Mapping[str, Sequence[Value]] = field(default_factory=dict)

    def points(self) -> list[dict[str, Value]]:
        """All combinations of the grid's values; one empty point without a grid."""
        combined = itertools.product(*self.grid.values())
        return [dict(zip(self.grid, values, strict=True)) for values in combined]


def make_runs(
    request: Request, methods: Mapping[str, Method | AnyBaseline], data: Mapping[str, Data]
) -> list[StudyRun]:
    """Every arm and grid point on every problem, in the order of the tables."""
    arms = [parse_arm(label, text, methods.get(label)) for label, text in request.methods.items()]
    runs: list[StudyRun] = []
    used: set[str] = set()
    for name, clients in itertools.product(request.data, request.clients):
        for arm in arms:
            runs += _runs_of(arm, request, name, clients, data.get(name), used)
    return runs


def _runs_of(
    arm: Contender,
    request: Request,
    name: str,
    clients: int | None,
    given: Data | None,
    used: set[str],
) -> Iterator[StudyRun]:
    """The runs of one arm on one problem, one for each point of its grid."""
    shared = dict(request.options.get("set", {}))
    base = {key: value for key, value in request.options.items() if key != "set"}
    if arm.name.lower() in BASELINES and arm.method is None:
        arm = replace(arm, method=make_baseline(arm.name, arm.settings))
        shared = {}  # hyper-parameters of methods
    elif arm.method is not None and (shared or arm.settings):
        raise ConfigError(
            f"'{arm.label}' is a method object with its own hyper-parameters; leave out "
            f"{next(iter({**shared, **arm.settings}))}, or give the method by name"
        )
    objects = {"method": arm.method, "data": given}
    base |= {
        "method": arm.name,
        "data": name if given is None else given.name,
        "clients": clients,
        "objects": [key for key, value in objects.items() if value is not None],
    }
    settings = {**shared, **arm.settings}
    for point in _with_grid(arm, request, base, settings, given).points():
        config = make_config(**base, set={**settings, **point})
        labels = {"data": name, "clients": clients, "method": arm.label, "point": point}
        parts = [name, *([f"{clients}c"] if clients else []), arm.label]
        parts += [f"{key}={value}" for key, value in point.items()]
        folder = _folder_name("-".join(parts), config_text(config), used)
        yield StudyRun(folder, config, labels, arm.method, given)


def parse_arm(label: str, text: str, method: Method | AnyBaseline | None = None) -> Contender:
    """`fedprox`, `fedprox:mu=0.1,lr=0.01`, `my_method.py:Mine` or `my_method.py:Mine:mu=0.1`."""
    before = text.partition("=")[0]
    name, colon, _ = before.rpartition(":")
    known = name.lower() in METHODS or name.lower() in BASELINES
    if method is not None or (before == text and not known):
        return Contender(label, text, {}, method)
    settings: dict[str, Value] = {}
    for item in text[len(name) + 1 :].split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (name and colon and key and equals and value) or key in settings:
            raise ConfigError(
                f"method '{text}' cannot be read; settings follow the name as "
                f"{name or 'fedprox'}:key=value,key=value"
            )
        settings[key] = value
    return Contender(label, name, settings)


def check(
    request: Request, cells: Sequence[StudyRun], folder: Path, federations: FederationCache
) -> None:
    """Everything that can be known to be wrong before the first cell is run.

    Each problem's first federation is made, and every method for it; cells find it again.
    """
    if not 0 < request.alpha < 1:
        raise ConfigError(f"alpha is {request.alpha}; give a number between 0 and 1")
    if request.metric is not None and request.metric not in COMPARED:
        raise unknown("metric", request.metric, COMPARED)
    if request.against is not None and request.against not in request.methods:
        raise unknown("method to compare against", request.against, request.methods)
    _check_grid_used(request, cells)
    for cell in cells:
        resolve(cell.config, task_of_object(cell.data))
        choose_engine(cell.config.engine)
        choose_device(cell.config.device)
    for (name, clients), members in itertools.groupby(cells, _problem):
        group = list(members)
        finished = [read_outcome(folder, cell) for cell in group]
        try:
            _check_scored(request, finished)
            if None in finished:
                _check_problem(request, group, federations)
        except (ConfigError, DataError) as error:
            if len(request.data) * len(request.clients) == 1:
                raise
            where = name if clients is None else f"{name} with {clients} clients"
            raise type(error)(f"{where}: {error}") from error


def _check_grid_used(request: Request, cells: Sequence[StudyRun]) -> None:
    used = {key for cell in cells for key in cell.labels["point"]}
    for text in request.grid:
        key = text.rpartition(":")[2]
        if key not in used:
            raise ConfigError(
                f"no method of this study has a hyper-parameter '{key}' for --grid; `atoll methods "
                "NAME` lists those of a method"
            )


def _check_scored(request: Request, finished: Sequence[RunOutcome | None]) -> None:
    """Refuse a metric that finished cells do not have, rather than show them all as failed."""
    for outcome in finished:
        if request.metric is None or outcome is None or outcome.summary is None:
            continue
        if f"test_{request.metric}" not in outcome.summary["metrics"]:
            raise ConfigError(
                f"the finished cell '{outcome.run.name}' has no test {request.metric}; choose "
                "another --metric"
            )


def _check_problem(
    request: Request, cells: Sequence[StudyRun], federations: FederationCache
) -> None:
    first = cells[0]
    if isinstance(first.data, Federation) and first.config.clients is not None:
        raise ConfigError(f"'{first.data.name}' is divided already; leave clients out")
    problem = Problem.of(first.config, first.data)
    federation = federations(problem, problem.config.seed).federation
    if request.metric == "auc" and federation.classes != 2:
        raise ConfigError(
            f"auc is computed for two classes, but '{federation.name}' has {federation.classes}; "
            "choose another --metric"
        )
    for cell in cells:
        if cell.method is None:
            config, _ = resolve(cell.config, task_of_object(cell.data))
            build_method(config, federation.features, federation.classes, federation.task.name)


def _problem(cell: StudyRun) -> tuple[str, int | None]:
    return cell.labels["data"], cell.labels["clients"]


def _with_grid(
    arm: Contender,
    request: Request,
    base: Json,
    settings: Mapping[str, Value],
    data: Data | None,
) -> Contender:
    """The arm with the part of the grid that is for it."""
    if not request.grid or arm.method is not None:
        return arm
    config, _ = resolve(make_config(**base, set=dict(settings)), task_of_object(data))
    header = saved_header(config)
    task = task_of_object(data) or (header.task if header else task_of_data(config.data))
    method = build_method(config, features=1, classes=2, task=task)
    grid: dict[str, Sequence[Value]] = {}
    for text, values in request.grid.items():
        owner, colon, key = text.rpartition(":")
        if colon and owner not in request.methods and owner not in _names(request):
            raise unknown("method of a grid", owner, request.methods)
        if not values or len(set(map(str, values))) < len(values):
            raise ConfigError(f"the grid of {text} needs values, each once; write {text}=0.1,1")
        if (colon and owner not in (arm.label, arm.name)) or not (colon or _has(method, key)):
            continue
        if key in settings or key in grid:
            raise ConfigError(
                f"{key} of {arm.label} is set to {settings.get(key, 'a grid')} and has a grid; "
                "give one of the two"
            )
        grid[key] = values
    return Contender(arm.label, arm.name, arm.settings, None, grid)


def _names(request: Request) -> list[str]:
    return [parse_arm(label, text).name for label, text in request.methods.items()]


def _has(method: Method, key: str) -> bool:
    """Whether a method, its network, optimizer or base has a hyper-parameter of this name."""
    parts = {name: getattr(method, name, None) for name in ("net", "optimizer", "base")}
    words = [
        *(name for name, part in parts.items() if part),
        *(["preset"] if method.presets else []),
    ]
    for name, part in {"method": method, **parts}.items():
        if part is not None:
            words += [w for f in fields(part) for w in (f.name, f"{name}.{f.name}")]
    return key in words and key not in ("features", "classes")


def _folder_name(text: str, config: str, used: set[str]) -> str:
    """A folder's name from words; two that look alike are told apart by their configuration."""
    safe = "".join(c if c.isalnum() or c in "-_.=" else "-" for c in text).strip("-.")
    name = safe[:100]
    if name in used or len(safe) > 100:
        name = f"{name[:90]}-{hashlib.sha256(config.encode()).hexdigest()[:8]}"
    used.add(name)
    return name
