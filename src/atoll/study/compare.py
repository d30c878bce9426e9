"""Several methods on the same clients and seeds: what is run, and whether that is possible.

A *problem* is one data set divided among so many clients; an *arm* is one method with its settings.
Every arm is run on every problem with the same seeds, and so with the same partitions, splits and
noise. An arm with a grid has one cell per point; its winner is chosen by validation scores alone
(`study.compare_table`).

`study.json` of such a study holds, beside what `study.cells` writes:

    kind     "compare"
    command  the command that makes it again
    request  methods (label: text), data, clients, grid, options (as for `atoll run`), against,
             metric, alpha, and objects: what Python gave that no file can hold

Each cell's labels are data, clients (null: the data or the protocol decide), method (the arm's
label) and point (of the grid; {} without one). `compare.json` beside it holds the tables.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from atoll.core.errors import AtollError, ConfigError, unknown
from atoll.core.federation import Federation
from atoll.core.method import Method
from atoll.data.datasets import task_of_data
from atoll.data.source import GraphGroup, GraphSet, Source
from atoll.study.cells import Cell, Outcome, StudyObserver, read_cell, run_cells
from atoll.study.compare_table import METRICS, Comparison, make_comparison
from atoll.study.config import Value, build_method, config_text, make_config, resolve
from atoll.study.federations import Federations
from atoll.study.machine import choose_device, choose_engine
from atoll.study.run import Data, check_folder, task_of_object
from atoll.study.statistics import ALPHA

SEEDS = 5
Grid = Mapping[str, Sequence[Value]]
Methods = Iterable[str | Method] | Mapping[str, str | Method]
Several = str | Data | Iterable[str | Data]


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
    options: dict[str, Any] = {}
    against: str | None = None
    metric: str | None = None
    alpha: float = ALPHA
    objects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arm:
    """One method with its settings, and the values of a grid that it has."""

    label: str
    name: str
    settings: Mapping[str, Value]
    method: Method | None = None
    grid: Mapping[str, Sequence[Value]] = field(default_factory=dict)

    def points(self) -> list[dict[str, Value]]:
        """All combinations of the grid's values; one empty point without a grid."""
        combined = itertools.product(*self.grid.values())
        return [dict(zip(self.grid, values, strict=True)) for values in combined]


def compare(
    methods: Methods,
    data: Several = "lagoon",
    *,
    clients: int | Sequence[int] | None = None,
    seeds: int = SEEDS,
    grid: Grid | None = None,
    against: str | None = None,
    metric: str | None = None,
    alpha: float = ALPHA,
    out: str | Path | None = None,
    observer: StudyObserver | None = None,
    **options: Any,
) -> Comparison:
    """Run methods on the same partitions and seeds, and test whether they differ.

    Args:
        methods: Names, with settings if wanted (`fedprox:mu=0.1`), or method objects; a mapping
            gives them labels of their own.
        data: Names or paths, what `atoll.load` gave, or finished federations; one or several.
        clients: Numbers of clients; one or several.
        seeds: How many, the same for all.
        grid: Values to try by hyper-parameter, for every method that has it, or for one alone
            (`"fedprox:mu"`); the winner is chosen by validation scores.
        against: Label of the method to test the others against; None takes the best.
        metric: "accuracy", "macro_f1", "weighted_f1" or "auc"; None takes the data's own.
        alpha: Chance of a false alarm that the tests allow.
        out: Folder of the study, which continues what it holds; None saves nothing.
        observer: Hears about progress.
        **options: The same for all, as in `atoll.run`: protocol, rounds, epochs, set, ...
    """
    arms, sources = _arms(methods), _unique("data set", _named_data(data))
    request = make_request(
        arms, sources.values(), clients=clients, options={"seeds": seeds, **options}, grid=grid,
        against=against, metric=metric, alpha=alpha,
    )  # fmt: skip
    given = {k: v for k, v in arms.items() if not isinstance(v, str)}
    objects = {k: v for k, v in sources.items() if not isinstance(v, str)}
    if out is not None:
        return run_request(request, Path(out), observer, given, objects)
    with TemporaryDirectory(prefix="atoll-compare-") as folder:
        return run_request(request, Path(folder), observer, given, objects, keep=False)


def make_request(
    methods: Methods,
    data: Several = "lagoon",
    *,
    clients: int | Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    grid: Grid | None = None,
    against: str | None = None,
    metric: str | None = None,
    alpha: float = ALPHA,
) -> Request:
    """A request from what a user gave: nothing twice, nothing missing."""
    arms, sources = _arms(methods), _unique("data set", _named_data(data))
    numbers = [clients] if clients is None or isinstance(clients, int) else list(clients)
    named = [*arms.items(), *sources.items()]
    return Request(
        methods={k: v if isinstance(v, str) else type(v).__name__ for k, v in arms.items()},
        data=tuple(sources), clients=tuple(_unique("number of clients", ((n, n) for n in numbers))),
        grid={key: tuple(values) for key, values in (grid or {}).items()},
        options={"seeds": SEEDS, **(options or {})}, against=against, metric=metric, alpha=alpha,
        objects=tuple(name for name, value in named if not isinstance(value, str)),
    )  # fmt: skip


def run_request(
    request: Request,
    folder: Path,
    observer: StudyObserver | None = None,
    methods: Mapping[str, Method] | None = None,
    data: Mapping[str, Data] | None = None,
    *,
    keep: bool = True,
) -> Comparison:
    """Run what is not finished in the folder, and compare."""
    cells = make_cells(request, methods or {}, data or {})
    federations = Federations()
    check_folder(folder, resuming=True)
    check(request, cells, folder, federations)
    about = {
        "kind": "compare", "command": command(request, folder),
        "request": msgspec.to_builtins(request),
    }  # fmt: skip
    outcomes = run_cells(
        folder, cells, about=about, observer=observer, federations=federations
    )  # fmt: skip
    return _compared(request, outcomes, folder if keep else None)


def read_request(folder: Path, **changes: Any) -> Request:
    """What the study in a folder is; how it is tested may be changed."""
    try:
        about = json.loads((folder / "study.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(
            f"'{folder}' holds no study to resume (it has no study.json); give the folder of one"
        ) from None
    if about.get("kind") != "compare":
        kind = about.get("kind")
        raise ConfigError(f"the study in '{folder}' is of the kind '{kind}', not 'compare'")
    try:
        request = msgspec.convert(about["request"], Request)
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(f"study.json in '{folder}' cannot be used: {error}") from error
    if request.objects:
        raise ConfigError(
            f"the study in '{folder}' was started in Python with objects "
            f"({', '.join(request.objects)}), which its folder cannot hold; continue it with the "
            "same call of atoll.compare"
        )
    return msgspec.structs.replace(request, **changes)


def command(request: Request, folder: Path) -> str:
    """The command line that runs this study; repeated, it goes on where it was stopped."""
    words = ["atoll", "compare", *request.methods.values(), "--data", ",".join(request.data)]
    known = [str(number) for number in request.clients if number is not None]
    words += ["--clients", ",".join(known)] if known else []
    for key, values in request.grid.items():
        words += ["--grid", f"{key}={','.join(map(str, values))}"]
    for key, value in request.options.items():
        option = "--" + key.replace("_", "-")
        if isinstance(value, Mapping):
            words += [w for k, v in value.items() for w in (option, f"{k}={v}")]
        elif isinstance(value, list | tuple):
            words += [word for item in value for word in (option, str(item))]
        else:
            words += [option, str(value)]
    for option, value in (("--against", request.against), ("--metric", request.metric)):
        words += [option, value] if value else []
    words += ["--alpha", str(request.alpha)] if request.alpha != ALPHA else []
    return shlex.join([*words, "--out", str(folder)])


def make_cells(
    request: Request, methods: Mapping[str, Method], data: Mapping[str, Data]
) -> list[Cell]:
    """Every arm and grid point on every problem, in the order of the tables."""
    shared = dict(request.options.get("set", {}))
    options = {key: value for key, value in request.options.items() if key != "set"}
    arms = [parse_arm(label, text, methods.get(label)) for label, text in request.methods.items()]
    cells: list[Cell] = []
    used: set[str] = set()
    for name, clients in itertools.product(request.data, request.clients):
        given = data.get(name)
        for arm in arms:
            objects = [k for k, v in (("method", arm.method), ("data", given)) if v is not None]
            base = {
                **options, "method": arm.name, "data": name if given is None else given.name,
                "clients": clients, "objects": objects,
            }  # fmt: skip
            settings = {**shared, **arm.settings}
            if arm.method is not None and settings:
                raise ConfigError(
                    f"'{arm.label}' is a method object with its own hyper-parameters; leave out "
                    f"{next(iter(settings))}, or give the method by name"
                )
            gridded = _with_grid(arm, request, base, settings, given)
            for point in gridded.points():
                config = make_config(**base, set={**settings, **point})
                labels = {"data": name, "clients": clients, "method": arm.label, "point": point}
                parts = [name, *([f"{clients}c"] if clients else []), arm.label]
                parts += [f"{key}={value}" for key, value in point.items()]
                folder = _folder_name("-".join(parts), config_text(config), used)
                cells.append(Cell(folder, config, labels, arm.method, given))
    return cells


def parse_arm(label: str, text: str, method: Method | None = None) -> Arm:
    """`fedprox`, `fedprox:mu=0.1,lr=0.01`, `my_method.py:Mine` or `my_method.py:Mine:mu=0.1`."""
    before = text.partition("=")[0]
    if method is not None or before == text:
        return Arm(label, text, {}, method)
    name, colon, _ = before.rpartition(":")
    settings: dict[str, Value] = {}
    for item in text[len(name) + 1 :].split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (name and colon and key and equals and value) or key in settings:
            raise ConfigError(
                f"method '{text}' cannot be read; settings follow the name as "
                f"{name or 'fedprox'}:key=value,key=value"
            )
        settings[key] = value
    return Arm(label, name, settings)


def check(request: Request, cells: Sequence[Cell], folder: Path, federations: Federations) -> None:
    """Everything that can be known to be wrong before the first cell is run.

    Each problem's first federation is made, and every method for it; cells find it again.
    """
    if not 0 < request.alpha < 1:
        raise ConfigError(f"alpha is {request.alpha}; give a number between 0 and 1")
    if request.metric is not None and request.metric not in METRICS:
        raise unknown("metric", request.metric, METRICS)
    if request.against is not None and request.against not in request.methods:
        raise unknown("method to compare against", request.against, request.methods)
    _check_grid_used(request, cells)
    for cell in cells:
        resolve(cell.config, task_of_object(cell.data))
        choose_engine(cell.config.engine)
        choose_device(cell.config.device)
    for problem, members in itertools.groupby(cells, _problem):
        group = list(members)
        if all(read_cell(folder, cell) is not None for cell in group):
            continue
        try:
            _check_problem(request, group, federations)
        except AtollError as error:
            if len(request.data) * len(request.clients) == 1:
                raise
            name, clients = problem
            where = name if clients is None else f"{name} with {clients} clients"
            raise type(error)(f"{where}: {error}") from error


def _check_grid_used(request: Request, cells: Sequence[Cell]) -> None:
    used = {key for cell in cells for key in cell.labels["point"]}
    for text in request.grid:
        key = text.rpartition(":")[2]
        if key not in used:
            raise ConfigError(
                f"no method of this study has a hyper-parameter '{key}' for --grid; `atoll methods "
                "NAME` lists those of a method"
            )


def _check_problem(request: Request, cells: list[Cell], federations: Federations) -> None:
    for cell in cells:
        config, rules = resolve(cell.config, task_of_object(cell.data))
        federation, _, config = federations(config, rules, config.seed, cell.data, cell.config)
        if cell.method is None:
            build_method(config, federation.features, federation.classes, federation.task)
        if request.metric == "auc" and federation.classes != 2:
            raise ConfigError(
                f"auc is computed for two classes, but '{federation.name}' has "
                f"{federation.classes}; choose another --metric"
            )


def _problem(cell: Cell) -> tuple[str, int | None]:
    return cell.labels["data"], cell.labels["clients"]


def _with_grid(
    arm: Arm, request: Request, base: Mapping[str, Any], settings: Mapping[str, Value],
    data: Data | None,
) -> Arm:  # fmt: skip
    """The arm with the part of the grid that is for it."""
    if not request.grid or arm.method is not None:
        return arm
    config, _ = resolve(make_config(**base, set=dict(settings)), task_of_object(data))
    task = task_of_object(data) or task_of_data(config.data)
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
    return Arm(arm.label, arm.name, arm.settings, None, grid)


def _names(request: Request) -> list[str]:
    return [parse_arm(label, text).name for label, text in request.methods.items()]


def _has(method: Any, key: str) -> bool:
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


def _compared(request: Request, outcomes: list[Outcome], folder: Path | None) -> Comparison:
    return make_comparison(
        outcomes, methods=list(request.methods), against=request.against, metric=request.metric,
        alpha=request.alpha, folder=folder, asked=msgspec.to_builtins(request),
    )  # fmt: skip


def _arms(methods: Methods) -> dict[str, str | Method]:
    if isinstance(methods, Mapping):
        return _unique("method", methods.items())
    return _unique("method", ((_label(method), method) for method in methods))


def _label(method: str | Method) -> str:
    return method if isinstance(method, str) else type(method).__name__


def _named_data(data: Several) -> list[tuple[str, str | Data]]:
    if isinstance(data, str):
        return [(name, name) for name in split_names(data)]
    if isinstance(data, Source | GraphSet | GraphGroup | Federation):
        return [(data.name, data)]
    return [pair for one in data for pair in _named_data(one)]


def split_names(text: str) -> list[str]:
    """`cora,pubmed`, also with options, which have commas of their own: `lagoon:a=1,b=2,cora`."""
    if Path(text).expanduser().exists():
        return [text]
    names: list[str] = []
    for part in text.split(","):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += f",{part}"
        else:
            names.append(part.strip())
    return [name for name in names if name]


def _unique(what: str, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{what} '{key}' is given twice; give each once")
        found[key] = value
    if not found:
        raise ConfigError(f"no {what} is given; give one or several")
    return found


def _folder_name(text: str, config: str, used: set[str]) -> str:
    """A folder's name from words; two that look alike are told apart by their configuration."""
    safe = "".join(c if c.isalnum() or c in "-_.=" else "-" for c in text).strip("-.")
    name = safe[:100]
    if name in used or len(safe) > 100:
        name = f"{name[:90]}-{hashlib.sha256(config.encode()).hexdigest()[:8]}"
    used.add(name)
    return name
