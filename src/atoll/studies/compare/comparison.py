"""Several methods on the same clients and seeds: `atoll.compare`, and its study's files.

Every arm (a method with its settings) is run on every problem (a data set and a number of clients)
with the same seeds, and so with the same partitions, splits and noise: `compare_cells`. An arm with
a grid has one cell per point; its winner is chosen by validation scores alone: `compare_table`.

`study.json` of such a study holds, beside what `studies.study` writes:

    kind     "compare"
    command  the command that makes it again; a comment where only Python can
    request  methods (label: text), data, clients, grid, options (as for `atoll run`), against,
             metric, alpha, and objects: what Python gave that no file can hold

Each cell's labels are data, clients (null: the data or the protocol decide), method (the arm's
label) and point (of the grid; {} without one). `compare.json`, `compare.csv` and `compare.md`
beside it hold the tables; they appear when all cells have ended.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.core.files import write_atomically
from atoll.core.method import Method
from atoll.core.space import Value
from atoll.data.source import GraphGroup, GraphSet, Source
from atoll.experiment.command import in_python, option_words
from atoll.experiment.federation_cache import FederationCache
from atoll.experiment.folder import check_folder, read_json
from atoll.experiment.loggers import open_logs
from atoll.experiment.problem import Data
from atoll.studies.compare.plan import Request, check, make_runs
from atoll.studies.compare.result import Comparison, make_comparison
from atoll.studies.compare.statistics import ALPHA
from atoll.studies.study import run_study
from atoll.studies.study_run import Json, RunOutcome, StudyObserver

SEEDS = 5
Grid = Mapping[str, Sequence[Value]]
Methods = Iterable[str | Method] | Mapping[str, str | Method]
Key = TypeVar("Key")
Given = TypeVar("Given")
Several = str | Data | Iterable[str | Data]


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
    log: str | Sequence[str] = (),
    jobs: int | str = 1,
    **options: Any,
) -> Comparison:
    """Run methods on the same partitions and seeds, and test whether they differ.

    Args:
        methods: Names of methods or baselines, with settings (`fedprox:mu=0.1`) and labels
            (`strong=fedprox:mu=1`), or objects; a mapping gives them labels, too.
        data: Names or paths, what `atoll.load` gave, or finished federations; one or several.
        clients: Numbers of clients; one or several.
        seeds: How many.
        grid: Values by hyper-parameter (`"mu"`, or `"fedprox:mu"` for one); validation chooses.
        against: Label of the method to test the others against; None takes the best.
        metric: One of `experiment.metrics.COMPARED`; None takes the data's own.
        alpha: Chance of a false alarm that the tests allow.
        out: Folder of the study, which may contain a stopped one; None saves nothing.
        observer: Is notified of progress.
        log: Further loggers: "tensorboard", "mlflow", or both.
        jobs: Number of processes; "auto" chooses by cores and memory.
        **options: The same for all, as in `atoll.run`: protocol, rounds, epochs, set, ...

    Example:
        >>> import atoll
        >>> found = atoll.compare(["local", "fedavg"], "lagoon:nodes=200", rounds=3, seeds=3)
        >>> [test["pairs"] for test in found.tests()]  # one for each seed
        [3]
    """
    arms, sources = _arms(methods), _unique("data set", _named_data(data))
    request = make_request(
        arms,
        sources.values(),
        clients=clients,
        options={"seeds": seeds, **options},
        grid=grid,
        against=against,
        metric=metric,
        alpha=alpha,
    )
    given = {k: v for k, v in arms.items() if not isinstance(v, str)}
    objects = {k: v for k, v in sources.items() if not isinstance(v, str)}
    if out is not None:
        return run_request(request, Path(out), observer, given, objects, log=log, jobs=jobs)
    open_logs(log, None)  # refuses what would be lost with the folder
    with TemporaryDirectory(prefix="atoll-compare-") as folder:
        return run_request(
            request, Path(folder), observer, given, objects, log=log, jobs=jobs, keep=False
        )


def make_request(
    methods: Methods,
    data: Several = "lagoon",
    *,
    clients: int | Sequence[int] | None = None,
    options: Json | None = None,
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
        data=tuple(sources),
        clients=tuple(_unique("number of clients", ((n, n) for n in numbers))),
        grid={key: tuple(values) for key, values in (grid or {}).items()},
        options={"seeds": SEEDS, **(options or {})},
        against=against,
        metric=metric,
        alpha=alpha,
        objects=tuple(name for name, value in named if not isinstance(value, str)),
    )


def run_request(
    request: Request,
    folder: Path,
    observer: StudyObserver | None = None,
    methods: Mapping[str, Method] | None = None,
    data: Mapping[str, Data] | None = None,
    *,
    log: str | Sequence[str] = (),
    jobs: int | str = 1,
    keep: bool = True,
    tested: Json | None = None,
) -> Comparison:
    """Run what is not finished in the folder, compare, and write the tables beside it.

    `tested` is how to test for once: against, metric, alpha. Study and tables keep their own.
    """
    shown = msgspec.structs.replace(request, **(tested or {}))
    runs = make_runs(request, methods or {}, data or {})
    federations = FederationCache()
    check_folder(folder, resuming=True)
    check(shown, runs, folder, federations)
    about = {
        "kind": "compare",
        "command": command(request, folder),
        "request": msgspec.to_builtins(request),
    }
    outcomes = run_study(
        folder, runs, about=about, observer=observer, federations=federations, log=log, jobs=jobs
    )
    where = folder if keep else None
    found = _compared(outcomes, request, where)
    if keep:
        found.to_csv(folder / "compare.csv")
        found.to_markdown(folder / "compare.md")
        content = json.dumps(found.summary(), indent=2, allow_nan=False) + "\n"
        write_atomically(folder / "compare.json", content.encode())
    return found if shown == request else _compared(outcomes, shown, where)


def _compared(outcomes: Sequence[RunOutcome], request: Request, folder: Path | None) -> Comparison:
    return make_comparison(
        outcomes,
        methods=list(request.methods),
        against=request.against,
        metric=request.metric,
        alpha=request.alpha,
        folder=folder,
        asked=msgspec.to_builtins(request),
    )


def read_request(folder: Path) -> Request:
    """What the study in a folder is."""
    if not (folder / "study.json").exists():
        raise ConfigError(
            f"'{folder}' holds no study to resume (it has no study.json); give the folder of one"
        )
    about = read_json(folder / "study.json")
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
    return request


def command(request: Request, folder: Path) -> str:
    """The command line that runs this study; repeated, it goes on where it was stopped.

    What no command line can say is said in a comment, which a shell takes as well.
    """
    arms = [text if label == text else f"{label}={text}" for label, text in request.methods.items()]
    if request.objects:
        return in_python(
            "atoll.compare", f"objects ({', '.join(request.objects)}), which no file holds", folder
        )
    if _arms(arms) != request.methods:
        return in_python("atoll.compare", "labels that a command line cannot have", folder)
    words = ["atoll", "compare", *arms, "--data", ",".join(request.data)]
    known = [str(number) for number in request.clients if number is not None]
    words += ["--clients", ",".join(known)] if known else []
    for key, values in request.grid.items():
        words += ["--grid", f"{key}={','.join(map(str, values))}"]
    more = {"against": request.against or None, "metric": request.metric or None}
    words += option_words({**request.options, **more})
    words += ["--alpha", str(request.alpha)] if request.alpha != ALPHA else []
    return shlex.join([*words, "--out", str(folder)])


def _arms(methods: Methods) -> dict[str, str | Method]:
    if isinstance(methods, Mapping):
        return _unique("method", methods.items())
    return _unique("method", map(_labelled, methods))


def _labelled(method: str | Method) -> tuple[str, str | Method]:
    """A method and what to call it: `fedprox:mu=0.1` by itself, `strong=fedprox:mu=1` by a word."""
    if not isinstance(method, str):
        return type(method).__name__, method
    label, _, text = (part.strip() for part in method.partition("="))
    # The "=" of a setting comes behind a colon, that of a path behind a slash; no method is a
    # number, as the value of a setting is whose colon was forgotten.
    own = label and not set(label) & set(":/\\") and text and not text[0].isdigit()
    return (label, text) if own else (method, method)


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


def _unique(what: str, pairs: Iterable[tuple[Key, Given]]) -> dict[Key, Given]:
    found: dict[Key, Given] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{what} '{key}' is given twice; give each once")
        found[key] = value
    if not found:
        raise ConfigError(f"no {what} is given; give one or several")
    return found
