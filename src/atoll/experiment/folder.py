"""The folder of one run: the names of its files, and functions to write and read each file.

- `config.toml`: every choice of the run.
- `federation.npz`: how the first seed's clients differ, by the measures of `atoll inspect`. A run
  on the user's objects or files writes it before training. For other data the first report writes
  it, because they can be loaded again. Sets of graphs and large federations (`MAX_CLIENTS`,
  `MAX_EDGES`) have no such file, because measuring them takes too long.
- `seed-N/partition.npz`: the node ids of each client. `seed-N/checkpoint.atoll`: the last round.
- `seed-N/clients.npz`, written when a seed is finished: the clients' sizes, the seconds and pooled
  counts of each round and, for methods that compare clients, their similarity, mixing weights and
  clusters.
- `model/seed-N/`: the model of the selected round (`experiment.model`).
- `metrics.csv`, `ledger.csv` (`experiment.result`) and `result.json`, which marks the end.
- `progress.json`: the state of a run that has not ended (`experiment.observers`).

Reading a result needs no data, method or checkpoints.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import msgspec
import numpy as np
from torch import Tensor

from atoll.core.errors import AtollError, ConfigError, DataError
from atoll.core.federation import Federation
from atoll.core.files import file_digest, write_atomically
from atoll.core.method import Method
from atoll.core.tree import Tree
from atoll.data.load import is_own
from atoll.engines.codec import load_checkpoint
from atoll.experiment.build import build_method
from atoll.experiment.config import (
    METHOD_FILES,
    STARTED,
    RunConfig,
    make_config,
    read_config,
    saved_text,
)
from atoll.experiment.history import History, empty_history, threshold_of
from atoll.experiment.model import SelectedModel, read_model, write_model
from atoll.experiment.newcomer import FirstDay
from atoll.experiment.problem import Data, Problem
from atoll.experiment.protocols import protocol
from atoll.experiment.result import CONFIG, RESULT, Result, SeedResult, read_history, read_table
from atoll.experiment.rounds import Run
from atoll.experiment.unseen import Unseen

CHECKPOINT, PARTITION = "checkpoint.atoll", "partition.npz"
SEED_DATA = ("clients.npz", "facts.npz")
"""The file of a seed's arrays. Earlier versions used the second name."""
MEASURES = "federation.npz"
PARTS = (CONFIG, RESULT, "progress.json", "metrics.*", "ledger.*", MEASURES, "seed-*", "model")
"""Files that a run writes into its folder, except those of other loggers."""
MAX_CLIENTS = 200  # most clients that are compared in pairs
MAX_EDGES = 300_000  # most edges of all clients that are measured, in about a second
MEASURED = (
    *("clients", "nodes", "roles", "edges", "isolated", "mean_degree", "labels", "homophily"),
    *("class_homophily", "edges_total", "edges_lost"),
    *("label_divergence", "feature_divergence", "structure_divergence"),
)
RELATIONS = ("similarity", "mixing", "cluster")
Arrays = Mapping[str, np.ndarray]


class NotFinished(ConfigError):
    """The folder contains a run that has not ended."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and the content of its files. The first write creates it."""

    path: Path

    def seed(self, seed: int) -> Path:
        """Return the folder of one seed."""
        return self.path / f"seed-{seed}"

    def checkpoint(self, seed: int) -> Path:
        """Return the file from which a seed continues."""
        return self.seed(seed) / CHECKPOINT

    def claim(self, config: RunConfig) -> None:
        """Write the configuration of a new run. Only one of several runs in a folder succeeds."""
        try:
            write_atomically(self.path / CONFIG, saved_text(config).encode(), new=True)
        except FileExistsError:
            _refuse_second(self.path)

    def clear(self) -> None:
        """Delete the run in the folder, but no other file."""
        clear_parts(self.path, PARTS)

    def begin(self, config: RunConfig, federation: Federation) -> None:
        """Write the configuration, and measure clients that later commands cannot load again."""
        file, content = self.path / CONFIG, saved_text(config).encode()
        if not file.exists() or file.read_bytes() != content:  # `claim` may have written it
            write_atomically(file, content)
        if _is_users(config) and not (self.path / MEASURES).exists():
            self._measure(federation)

    def _measure(self, federation: Federation) -> Arrays:
        """Measure and save how the clients differ.

        Return {} for sets of graphs, a single client, and federations that take too long.
        """
        graphs = federation.graphs
        if federation.task.many_graphs or not 1 < len(graphs) <= MAX_CLIENTS:
            return {}
        if sum(graph.edges.shape[1] for graph in graphs) > MAX_EDGES:
            return {}
        from atoll.data.measure.heterogeneity import describe  # SciPy, which training does not need

        made = describe(federation, shape=False)
        found = {name: np.asarray(getattr(made, name)) for name in MEASURED}
        with contextlib.suppress(OSError):  # the folder may belong to another user
            _write_arrays(self.path / MEASURES, found)
        return found

    def write_partition(self, seed: int, federation: Federation) -> None:
        """Write every client's node ids, in the whole graph's numbering."""
        ids = {f"client_{i}": one for i, one in enumerate(_ids(federation))}
        _write_arrays(self.seed(seed) / PARTITION, ids)

    def files_of_start(self, seeds: Sequence[int]) -> set[Path]:
        """Return the files that a run writes before its first round, as far as they exist."""
        files = self.path / CONFIG, self.path / MEASURES
        found = (*files, *(self.seed(seed) / PARTITION for seed in seeds))
        return {path for path in found if path.exists()}

    def withdraw(self, wrote: Collection[Path], made: bool) -> None:
        """Delete files that a refused run wrote, and its folder if the run made it."""
        for path in wrote:
            path.unlink(missing_ok=True)
        for folder in ({path.parent for path in wrote} - {self.path}, {self.path} if made else ()):
            for one in folder:
                with contextlib.suppress(OSError):  # it contains other files
                    one.rmdir()

    def partition(self, seed: int) -> list[np.ndarray]:
        """Return every client's node ids, as saved by `write_partition`."""
        return list(_read_arrays(self.seed(seed) / PARTITION).values())

    def write_seed(self, run: Run, config: RunConfig, method: Method) -> None:
        """Write a finished seed's arrays and selected model. `method` has no wrapper `Noised`."""
        wanted = run.experiment
        seed, federation = wanted.seed, wanted.federation
        self.write_clients(seed, run.history, wanted.method.diagnostics(run.server))
        if run.keeper is not None and (model := run.keeper.selected(run.history)) is not None:
            model = model.only_read(wanted.method, federation)
            found = threshold_of(config, run.keeper.rule, run.history, wanted.positive)
            write_model(self.model_folder(seed), model, config, method, federation, found)

    def write_clients(
        self, seed: int, history: History, known: Mapping[str, Tensor] = MappingProxyType({})
    ) -> None:
        """Write the clients' sizes and relations, and each round's seconds and pooled counts."""
        cached = [(i, number) for i, rounds in enumerate(history.cached) for number in rounds]
        found = {
            "nodes": history.nodes,
            "counts": history.counts,
            "seconds": np.array(history.seconds),
            "cached": np.array(cached, dtype=np.int64).reshape(-1, 2),
            **{f"pooled_{name}": np.stack(v) for name, v in history.pooled.items() if v},
        }
        if len(history.nodes) <= MAX_CLIENTS:
            names = [name for name in RELATIONS if name in known]
            found |= {name: known[name].double().cpu().numpy() for name in names}
        _write_arrays(self.seed(seed) / SEED_DATA[0], found)

    def model_folder(self, seed: int) -> Path:
        """Return the folder of a seed's model. It exists after the model was written."""
        return self.path / "model" / f"seed-{seed}"

    def model(self, seed: int | None = None) -> SelectedModel:
        """Load the model of a seed's selected round. The default is the first seed."""
        number, seeds = self.config.seed if seed is None else seed, self.config.all_seeds
        if number not in seeds:
            give = f"give one from {seeds[0]} to {seeds[-1]}"
            raise ConfigError(f"the run in '{self.path}' has no seed {number}; {give}")
        if not self.model_folder(number).exists():
            why = "it is not finished, was made by an earlier version, or selects by test scores"
            kept = f"the run in '{self.path}' kept no model of seed {number}"
            raise ConfigError(f"{kept}: {why}; run it again")
        return read_model(self.model_folder(number))

    @cached_property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return make_config(**read_config(self._config_file))

    @property
    def located_config(self) -> RunConfig:
        """The run's configuration, with paths that are valid in any folder."""
        return make_config(**located_options(self._config_file))

    @property
    def _config_file(self) -> Path:
        if not self.path.is_dir():
            give = "give the folder of a run or a study"
            raise ConfigError(f"folder '{self.path}' does not exist; {give}")
        if not (self.path / CONFIG).exists():
            raise ConfigError(f"'{self.path}' holds no run (it has no {CONFIG})")
        return self.path / CONFIG

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of result.json: the reported numbers in full precision."""
        config, again = self.config, f"continue it with: atoll run --resume {self.path}"
        if not (self.path / RESULT).exists():
            raise NotFinished(f"the run in '{self.path}' is not finished; {again}")
        found = read_json(self.path / RESULT)
        done = found.get("seeds", config.seeds)
        if done < config.seeds:
            few = f"has {done} of its {config.seeds} seeds"
            raise NotFinished(f"the run in '{self.path}' {few}; {again}")
        return found

    @cached_property
    def seed_data(self) -> tuple[Arrays, ...]:
        """The arrays of every seed. They are empty if an earlier version saved none."""
        new, old = SEED_DATA
        folders = map(self.seed, self.config.all_seeds)
        return tuple(_read_arrays(path / new) or _read_arrays(path / old) for path in folders)

    @cached_property
    def measures(self) -> Arrays:
        """How the first seed's clients differ, by the names of `MEASURED`, or {} if unmeasured."""
        known, config = _read_arrays(self.path / MEASURES), self.config
        if known or _is_users(config):
            return known
        try:
            federation = Problem.of(config).federation(config.seed)
        except AtollError:  # the data are not on this machine
            return {}
        saved = self.partition(config.seed)
        same = [np.array_equal(*pair) for pair in zip(saved, _ids(federation), strict=False)]
        return self._measure(federation) if len(saved) == len(federation) and all(same) else {}

    @property
    def relations(self) -> tuple[Arrays, ...]:
        """Each seed's similarity, mixing and cluster, if the method has them."""
        return tuple({k: one[k] for k in RELATIONS if k in one} for one in self.seed_data)

    @property
    def notes(self) -> list[str]:
        """Sentences about missing files of the folder."""
        lacking = "was saved without its clients' sizes, by an earlier version"
        so = "curves are plain means over clients and times of rounds are unknown"
        return [] if all(self.seed_data) else [f"{lacking}: {so}"]

    @cached_property
    def result(self) -> Result:
        """The result that the run returned, but scores have the six digits of metrics.csv."""
        config, about = self.config, self.summary
        metrics, ledger = (read_table(self.path, name) for name in ("metrics", "ledger"))
        same = ("weights", "select", "engine", "device", "environment", "federation")
        try:
            names = set(metrics["scored"].tolist()) - {"local"}
            pairs = zip(config.all_seeds, self.seed_data, strict=True)
            seeds = [SeedResult(k, read_history(metrics, ledger, k, arrays)) for k, arrays in pairs]
            return Result(
                config=config,
                seeds=tuple(seeds),
                deployed=names.pop() if names else about["scored"],
                setup_seconds=about["seconds"]["setup"],
                out=self.path,
                metric=about.get("metric", "accuracy"),
                privacy=about.get("privacy"),
                first_day=FirstDay(**about["first_day"]) if "first_day" in about else None,
                unseen={k: Unseen(**v) for k, v in about.get("unseen", {}).items()},
                positive=about.get("positive", 1),
                profile=about.get("profile", {}),
                hyperparameters=about["hyperparameters"],
                **{name: about[name] for name in same},
            )
        except (KeyError, ValueError, IndexError) as error:
            saved = f"the run in '{self.path}' was saved by another version of Atoll"
            changed = f"its files were changed ({type(error).__name__}: {error})"
            raise DataError(f"{saved}, or {changed}; run it again") from error


def open_run(folder: str | Path) -> RunFolder:
    """Open the folder of a finished run, and read its result. Refuse an unfinished run."""
    found = RunFolder(Path(folder))
    _ = found.result
    return found


def read_result(folder: str | Path) -> Result:
    """Read the result of a finished run from its folder, as `atoll.run` returned it.

    It needs no data, method or checkpoints. But scores have only the six digits of metrics.csv.

    Example:
        >>> import atoll
        >>> result = atoll.run("fedavg", "lagoon", rounds=2, out="my-run")
        >>> atoll.read_result("my-run").bytes() == result.bytes()
        True
    """
    return open_run(folder).result


def _is_users(config: RunConfig) -> bool:
    """Return whether a run's data are an object or a file of the user, which may be gone later."""
    return "data" in config.objects or is_own(config.data)


def _ids(federation: Federation) -> list[np.ndarray]:
    return [graph.ids.numpy() for graph in federation.graphs]


def _write_arrays(path: Path, arrays: Arrays) -> None:
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomically(path, content.getvalue())


def _read_arrays(path: Path) -> Arrays:
    """Read the arrays of a file, or return {} if it does not exist."""
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # a damaged archive may cause any error in its reader
        problem = f"{type(error).__name__}: {error}"
        raise DataError(f"'{path}' cannot be read ({problem}); run it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"'{path}' cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f"'{path}' does not hold an object; it was changed, or is another file")
    return found


def located_options(file: Path) -> dict[str, Any]:
    """Read the options of a configuration file, such as a saved run's.

    Relative paths of a saved run refer to the folder in which the user started it.
    """
    there = started_in(file.parent)
    if there is None or there == Path.cwd():
        return read_config(file)
    file = file.absolute()
    with contextlib.chdir(there):
        found = read_config(file)
        paths = {"schema": True, "data_root": True, "data": is_own(found.get("data", "lagoon"))}
        paths["method"] = ".py:" in found.get("method", "")
        for key in (key for key, is_path in paths.items() if is_path and key in found):
            found[key] = str(Path(found[key]).expanduser().absolute())
    return found


def started_in(folder: Path) -> Path | None:
    """Return the folder in which a run or a study was started, if it is known and exists."""
    config, study, where = folder / CONFIG, folder / "study.json", None
    with contextlib.suppress(ValueError):  # other readers refuse a damaged file
        if study.exists():
            where = json.loads(study.read_bytes()).get("started_in")
        elif config.exists():
            where = json.loads(config.read_bytes().rpartition(STARTED.encode())[2])
    return Path(where) if isinstance(where, str) and Path(where).is_dir() else None


def _refuse_second(out: Path) -> NoReturn:
    hint = f"continue it with --resume {out}, replace it with --overwrite, or choose another --out"
    raise ConfigError(f"'{out}' already holds a run; {hint}")


def clear_parts(folder: Path, parts: Sequence[str]) -> None:
    """Delete the files and folders that match `parts` in a folder, but nothing else."""
    for path in [path for part in parts for path in folder.glob(part)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_method_files(folder: Path, kind: str = "run") -> None:
    """Raise an error if a file of the user's method has changed since a run saved its work."""
    saved = (folder / RESULT).exists() or any(folder.glob(f"seed-*/{CHECKPOINT}"))
    if not saved or not (folder / CONFIG).exists():
        return
    text = (folder / CONFIG).read_text(encoding="utf-8")
    for line in re.findall(rf"^{METHOD_FILES}(.+)$", text, re.MULTILINE):
        try:
            files = msgspec.json.decode(line, type=dict[str, str])
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ConfigError(f"'{folder / CONFIG}' has a broken line: {line}") from error
        for path, digest in files.items():
            # The folder may come from elsewhere: a device or a pipe is no method.
            if Path(path).suffix == ".py" and file_digest(path) not in ("", digest):
                hint = "undo the change, or start again with --overwrite or another --out"
                raise ConfigError(f"'{path}' has changed since this {kind} began; {hint}")


def check_folder(out: Path, *, resuming: bool) -> None:
    """Check that the folder can be created and written, and that no run in it would be lost."""
    try:
        if (out / CONFIG).exists() and not resuming:
            _refuse_second(out)
        # The folder is created later, so that a refused run leaves no folder behind.
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    except (OSError, ValueError) as error:
        raise ConfigError(f"output folder '{out}' is not possible ({error})") from error
    problem = "" if nearest.is_dir() else f"made: '{nearest}' is a file"
    if nearest.is_dir() and not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"written: no permission for '{nearest}'"
    if problem:
        raise ConfigError(f"output folder '{out}' cannot be {problem}; choose another --out")


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A finished run with the exact scores of its checkpoints, and its clients loaded again."""

    result: Result
    servers: tuple[Tree, ...]
    federations: tuple[Federation, ...]
    method: Method | None  # None if it was a Python object

    @property
    def config(self) -> RunConfig:
        return self.result.config


def read_run(
    folder: Path, data: Data | None = None, *, like: FinishedRun | None = None
) -> FinishedRun:
    """Read a finished run and load its clients again, or share the clients of the run `like`."""
    found = RunFolder(folder)
    _ = found.summary  # an unfinished run is an error
    if "data" in found.config.objects and data is None:
        why = "was started in Python with a data object, which its folder does not hold"
        hint = "read it in Python, and give the data again"
        raise ConfigError(f"the run in '{folder}' {why}; {hint}")
    problem = Problem.of(found.config, data)
    config, rules = problem.config, problem.rules
    if like is not None:
        _check_same_clients(folder, config, like.config)
        federations = like.federations
    else:
        count = config.seeds if rules.data_seed is None else 1
        made = [problem.divide(seed) for seed in found.config.all_seeds[:count]]
        federations, config = tuple(one.federation for one in made), made[0].config
    if rules.data_seed is not None:
        federations = federations[:1] * config.seeds
    first, method = federations[0], None
    if "method" not in config.objects:
        method = build_method(config, first.features, first.classes, first.task.name)
    trees = [load_checkpoint(found.checkpoint(seed)) for seed in found.config.all_seeds]
    seeds = tuple(
        SeedResult.of_checkpoint(seed, tree, empty_history(federation), method)
        for seed, tree, federation in zip(found.config.all_seeds, trees, federations, strict=False)
    )
    result = replace(found.result, config=config, seeds=seeds)
    return FinishedRun(result, tuple(tree["server"] for tree in trees), federations, method)


def _check_same_clients(folder: Path, config: RunConfig, other: RunConfig) -> None:
    """Refuse to compare two runs client by client if their clients differ."""
    names = ["protocol", "data", "partition", "split", "ratios", "clients", "own", "schema"]
    fixed = config.data_seed is not None or protocol(config.protocol).data_seed is not None
    names += ["data_seed", *([] if fixed else ["seed", "seeds"])]
    for name in names:
        one, two = getattr(config, name), getattr(other, name)
        if one != two:
            only = "only runs on the same clients can be compared client by client"
            differ = f"has {name} {one}, but the other has {two}"
            raise ConfigError(f"the run in '{folder}' {differ}; {only}")
