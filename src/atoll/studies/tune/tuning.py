"""Search hyper-parameters on validation scores only: `atoll tune`.

A tuning is a study. Each trial is a run on clients without test nodes and test labels, so that no
choice can depend on them. By default, a trial below the median of the others' scores stops early.
At the end, the best configuration of each method runs once on the whole data with new seeds. Report
the score of this final test.
"""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import msgspec

from atoll.core.errors import ConfigError, check_name, unknown
from atoll.core.files import folder_of
from atoll.core.space import Range
from atoll.experiment import config as configs
from atoll.experiment.folder import check_method_files, clear_parts, read_json
from atoll.experiment.options import TuneOptions
from atoll.experiment.problem import Data, Problem, data_object
from atoll.methods import method_name
from atoll.studies.parallel import check_jobs, choose_jobs
from atoll.studies.study import PARTS, lock_folder
from atoll.studies.study_run import Json, StudyObserver
from atoll.studies.tune.result import (
    SEEDS,
    TRIALS,
    TuningRequest,
    TuningResult,
    safe_name,
    write_tuning,
)
from atoll.studies.tune.runner import Blinded, Trials
from atoll.studies.tune.search import PRUNERS, make_plan, need_optuna


def tune(
    methods: str | Sequence[str] = "fedavg",
    data: str | Data = "lagoon",
    *,
    trials: int = TRIALS,
    seeds: int = SEEDS,
    trial_seeds: int = 1,
    preset: str | None = None,
    search: Mapping[str, str | Range] | None = None,
    pruner: str = "median",
    out: str | Path | None = None,
    observer: StudyObserver | None = None,
    jobs: int | str = 1,
    **options: Unpack[TuneOptions],
) -> TuningResult:
    """Search for the best hyper-parameters on validation scores, then test them once.

    Args:
        methods: One or several names. Each method gets the same budget.
        data: A name, a path, a result of `atoll.load`, or a `Federation`.
        trials: Maximum number of configurations to try per method.
        seeds: Number of new seeds for the final test. 0 skips the test.
        trial_seeds: Number of seeds per trial. More seeds reduce noise and take longer.
        preset: "paper" searches the values that the method's paper tried.
        search: Ranges that replace or extend the method's: {"lr": "1e-4..1e-1:log"}.
        pruner: "median" stops bad trials early, and "none" runs all to their end.
        out: Folder. The same tuning in it continues. None saves nothing.
        observer: Is notified of progress.
        jobs: Number of parallel processes, or "auto". It does not change the result.
        **options: Other options of `atoll.run`: clients, partition, rounds, metric, ...

    Example:
        >>> import atoll
        >>> search = {"mu": "0.01,0.1,1"}
        >>> found = atoll.tune("fedprox", "lagoon:nodes=200", rounds=2, trials=2, search=search)
        >>> tuned = found.methods["fedprox"]
        >>> sorted(tuned.best.settings)
        ['dropout', 'hidden', 'lr', 'mu', 'weight_decay']
        >>> tuned.test["seeds"]  # new seeds, only for the best configuration
        5
    """
    if taken := [name for name in ("seeds", "method") if name in options]:
        raise unknown("option", taken[0], ("methods", "trial_seeds"))
    names = (methods,) if isinstance(methods, str) else tuple(methods)
    if not all(isinstance(name, str) for name in names) or not names:
        raise ConfigError("give at least one method by name: atoll.tune(['fedavg'], ...)")
    names = tuple(map(method_name, names))
    given = data_object(data)
    about = {"data": data} if given is None else {"data": given.name, "objects": ["data"]}
    config = configs.make_config(method=names[0], seeds=trial_seeds, **about, **options)
    ranges = {key: str(wanted) for key, wanted in (search or {}).items()}
    budget: Json = {"trials": trials, "seeds": seeds, "preset": preset, "pruner": pruner}
    request = TuningRequest(methods=names, config=config, search=ranges, **budget)
    folder = folder_of(out)
    with contextlib.ExitStack() as stack:
        where = folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = run_tuning(request, where, data=given, observer=observer, jobs=jobs)
    if folder is not None:
        write_tuning(found, folder)
    return replace(found, folder=folder)


def read_request(folder: Path) -> TuningRequest:
    """Read the request of the tuning in a folder."""
    path = folder / "study.json"
    if not path.exists():
        raise ConfigError(f"'{folder}' contains no tuning to resume (study.json is missing)")
    about = read_json(path)
    if about.get("kind") != "tune":
        raise ConfigError(f"the study in '{folder}' is not a tuning, but a '{about.get('kind')}'")
    try:
        return msgspec.convert(about["asked"], TuningRequest)
    except (KeyError, msgspec.ValidationError) as error:
        raise ConfigError(f"study.json in '{folder}' cannot be used: {error}") from error


def run_tuning(
    request: TuningRequest,
    folder: Path,
    *,
    data: Data | None = None,
    observer: StudyObserver | None = None,
    jobs: int | str = 1,
    overwrite: bool = False,
) -> TuningResult:
    """Complete a tuning from its current state, or `overwrite` it. `Stopped`: the user stops it."""
    need_optuna()
    check_jobs(jobs)
    if request.trials < 1:
        raise ConfigError(f"trials is {request.trials}; give at least 1")
    if request.seeds < 0:
        raise ConfigError(f"seeds is {request.seeds}; give the seeds of the final test, or 0")
    check_name("pruner", request.pruner, PRUNERS)
    for name in request.methods:
        if "=" in name and not Path(name.rpartition(":")[0] or name).exists():
            hint = "give only the name, and fix values with --set KEY=VALUE"
            raise ConfigError(f"tuning takes no labels and settings as in '{name}'; {hint}")
    for name in (name for name, count in Counter(request.methods).items() if count > 1):
        raise ConfigError(f"method '{name}' is named twice; name it once")
    if "data" in request.config.objects and data is None:
        raise ConfigError(
            "this tuning was started in Python with a data object, which its folder does not "
            f"contain; continue in Python with atoll.tune(..., out='{folder}')"
        )
    plans = [make_plan(name, request, data) for name in request.methods]
    blinded, first = Blinded(), plans[0]
    if overwrite or not folder.exists():  # unusable data must not cost or leave a folder
        blinded(Problem.of(first.asked, data), first.asked.seed)
    with lock_folder(folder):
        _check_same(request, folder, overwrite=overwrite)
        about = {"kind": "tune", "command": tune_command(request, folder)}
        about["asked"] = msgspec.to_builtins(request)
        count = choose_jobs(jobs, [plan.asked for plan in plans for _ in range(plan.trials)])
        observer = observer or StudyObserver()
        trials = Trials(folder, about, request, plans, data, observer, blinded, count)
        trials.run()
        found = {plan.name: trials.tuned(plan) for plan in plans if plan.name in trials.chosen}
        notes = [note for plan in plans for note in plan.notes]
        return TuningResult(request, found, [*notes, *trials.notes], folder)


def tune_command(request: TuningRequest, folder: Path) -> str:
    """Return the command that repeats a request, or a comment if only Python can continue."""
    if request.config.objects:
        return configs.in_python("atoll.tune", "a data object, which no file contains", folder)
    one_seed = msgspec.structs.replace(request.config, seeds=1)
    words = configs.option_words(configs.config_options(one_seed))
    usual = {"trial_seeds": 1, "pruner": "median"}
    more: dict[str, object] = {"trials": request.trials, "seeds": request.seeds}
    more |= {"trial_seeds": request.config.seeds, "preset": request.preset}
    more |= {"pruner": request.pruner, "search": request.search}
    words += configs.option_words({k: v for k, v in more.items() if v != usual.get(k)})
    return shlex.join(["atoll", "tune", *request.methods, *words])


def _check_same(request: TuningRequest, folder: Path, *, overwrite: bool) -> None:
    """Refuse to continue a search with other options, except for more trials, or delete it."""
    if (folder / "config.toml").exists():
        raise ConfigError(f"'{folder}' contains a run; give the tuning a new folder")
    if not (folder / "study.json").exists():
        return
    before = read_request(folder)
    if overwrite:
        best = (f"best-{safe_name(name)}.toml" for name in before.methods)
        clear_parts(folder, (*PARTS, *best))
        return
    for cell in sorted(folder.glob("cells/*")):
        check_method_files(cell, "study")
    for name in TuningRequest.__struct_fields__:
        one, two = getattr(before, name), getattr(request, name)
        if name != "trials" and one != two:
            how = configs.what_differs(one, two) if name == "config" else f"{name} {one}, now {two}"
            raise ConfigError(
                f"the tuning in '{folder}' was started with other options ({how}); continue with "
                f"--resume {folder}, or choose another --out"
            )
    if request.trials < before.trials:
        has = f"the tuning in '{folder}' has {before.trials} trials for each method"
        raise ConfigError(f"{has}, and {request.trials} are fewer; give more, or another --out")
