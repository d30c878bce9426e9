"""A study: many runs in one folder. Each run is completed once, even after interruptions.

`STUDY/study.json` describes the study. Runs that differ only in numeric hyper-parameters share one
program if this saves time, and several processes may share the work (`studies.parallel`). Each run
still has the same folder (`studies.study_run`), events and errors as a separate run.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from atoll.core.errors import ConfigError
from atoll.core.files import clear_left_over, locked, write_atomically
from atoll.experiment.config import make_config, parse_config, what_differs
from atoll.experiment.folder import check_method_files, clear_parts, read_json
from atoll.experiment.loggers import check_logs
from atoll.experiment.problem import FederationCache
from atoll.experiment.status import read_events
from atoll.studies import study_run
from atoll.studies.parallel import check_jobs, choose_jobs, run_parallel
from atoll.studies.seeds import FOLDER as SEEDS
from atoll.studies.seeds import collect_seeds, spread_seeds
from atoll.studies.study_run import Json, RunOutcome, StudyObserver, StudyRun, read_outcome

PARTS = (
    *("study.json", "events.jsonl", "cells", "compare.csv", "compare.md", "compare.json"),
    *("optuna.db*", "trials.csv", "tune.json", "history.png", SEEDS),
)
"""Files that `atoll compare` and `atoll tune` write into the folder of a study."""


def run_study(
    folder: Path,  # it may contain runs of an earlier call
    runs: Sequence[StudyRun],  # in the order of the tables
    *,
    about: Mapping[
        str, object
    ],  # content of study.json: "kind", "command" and further keys of that kind
    observer: StudyObserver | None = None,
    federations: FederationCache | None = None,  # the caller's cache of federations
    log: str | Sequence[str] = (),  # further loggers (`experiment.loggers.LOGS`)
    at_once: bool
    | None = None,  # whether consecutive runs may share one program; None: only on a GPU
    adds: bool = False,  # whether runs of earlier calls stay part of the study
    jobs: int | str = 1,  # processes; "auto" chooses; with 1, this process keeps the given order
    dearest_first: bool = True,  # whether several processes begin with the longest runs
    overwrite: bool = False,  # whether to delete an earlier study of this kind in the folder
) -> list[RunOutcome]:
    """Run all unfinished runs. Record a failed run, and continue with the others.

    Return the outcomes in the order of `runs`. Raise `Stopped` if the user stops the study. All
    finished work is saved.
    """
    check_logs(log)
    check_jobs(jobs)
    observer = observer or StudyObserver()
    settings = study_run.StudySettings(folder, federations or FederationCache(), log)
    for name, count in Counter(run.name for run in runs).items():
        if count > 1:
            raise ConfigError(f"two cells of the study are called '{name}'; give each its own name")
    with lock_folder(folder):
        finished = _prepare(folder, runs, about, adds=adds, clear=overwrite)
        observer.begin(runs, len(finished))
        collect_seeds(folder)
        unfinished = [run for run in runs if run.name not in finished]
        if not log and not at_once:
            how: Json = {"about": {"kind": "seeds"}, "federations": federations, "at_once": False}
            inner = partial(run_study, **how, adds=True, dearest_first=dearest_first)
            spread_seeds(folder, unfinished, jobs, observer, inner)
        groups = _groups(folder, runs, at_once)
        todo = [group for group in groups if group[0].name not in finished]
        waiting = [run.config for run in unfinished]
        outcomes: dict[str, RunOutcome] = {}
        if (count := min(choose_jobs(jobs, waiting), len(todo))) > 1:
            outcomes = run_parallel(todo, observer, settings, count, dearest_first=dearest_first)
        for group in groups:
            if group[0].name in outcomes:
                continue
            for outcome in study_run.run_group(group, observer.run, settings):
                observer.ended(outcome)
                outcomes[outcome.run.name] = outcome
                study_run.stop_without_device(outcome)
    return [outcomes[run.name] for run in runs]


def _prepare(
    folder: Path, runs: Sequence[StudyRun], about: Mapping[str, object], *, adds: bool, clear: bool
) -> set[str]:
    """Check the folder, write study.json and complete the events. Return finished runs' names."""
    if (folder / "config.toml").exists():
        raise ConfigError(f"'{folder}' contains a run; give the study a new folder")
    clear_left_over(folder)
    before: Json = {}
    if (folder / "study.json").exists():
        before = read_json(folder / "study.json")
        for key in ("kind", "paper"):
            if (other := before.get(key)) != about.get(key):
                raise ConfigError(
                    f"'{folder}' contains another study, with the {key} '{other}'; give this study "
                    "a new folder"
                )
        if clear:
            clear_parts(folder, PARTS)
            before = {}
    for run in runs:
        _check_same(run, folder / "cells" / run.name)
    cells: dict[str, object] = {one["name"]: one for one in before.get("cells", []) if adds}
    for run in runs:
        cells.pop(run.name, None)  # a run of this call moves to the end
        cells[run.name] = {"name": run.name, "labels": dict(run.labels), "seeds": run.config.seeds}
    write_about(folder, about, list(cells.values()))
    finished = {run.name for run in runs if read_outcome(folder, run) is not None}
    # Complete the events of a killed process. No run is active while this process has the lock.
    last = {event["cell"]: event["event"] for event in read_events(folder)}
    for run in runs:
        if last.get(run.name) in ("begin", "notes"):
            study_run.note(folder, "end" if run.name in finished else "stopped", run.name)
    return finished


def write_about(folder: Path, about: Mapping[str, object], runs: Sequence[object]) -> None:
    """Write study.json."""
    text = json.dumps({**about, "started_in": str(Path.cwd()), "cells": runs}, indent=2)
    write_atomically(folder / "study.json", text.encode())


def _groups(folder: Path, runs: Sequence[StudyRun], at_once: bool | None) -> list[list[StudyRun]]:
    """Group unfinished consecutive runs that may share one program. Other runs stay single."""
    groups: list[list[StudyRun]] = []
    alone = True
    for run in runs:
        wished = study_run.on_gpu(run.config) if at_once is None else at_once
        given = any(one is not None for one in (run.method, run.data, run.watch))
        before, alone = alone, not wished or given or read_outcome(folder, run) is not None
        if before or alone or study_run.why_apart(groups[-1][0].config, run.config):
            groups.append([run])
        else:
            groups[-1].append(run)
    return groups


def _check_same(run: StudyRun, to: Path) -> None:
    """Raise an error if a run with this name has other options. More seeds are allowed."""
    path = to / "asked.toml"
    if not path.exists():
        return
    check_method_files(to, "study")
    text = path.read_text(encoding="utf-8")
    before = make_config(**parse_config(text, f"'{path}'"))
    # The path of the data may have changed, and `allow` changes no number.
    now = msgspec.structs.replace(run.config, data_root=before.data_root, allow=before.allow)
    same_seeds = replace(run, config=msgspec.structs.replace(now, seeds=before.seeds))
    if text != study_run.asked_text(same_seeds) or before.seeds > run.config.seeds:
        raise ConfigError(
            f"'{to}' was started with other options "
            f"({what_differs(before, now) or 'different Python objects'}); give the study "
            "a new folder, or the same options (only --seeds may grow)"
        )


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a study's folder for this process. The system unlocks it if the process is killed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError(f"'{folder}' is not a folder; give another --out") from None
    with locked(folder, f"another process is running the study in '{folder}'"):
        yield
