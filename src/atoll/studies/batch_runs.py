"""Points of a grid at once: configurations that differ in numbers alone are one program."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from atoll.core.errors import ConfigError
from atoll.core.task import GRAPHS, NODES
from atoll.core.vmap.varied import Undecided, points
from atoll.experiment.build import build_method
from atoll.experiment.config import RunConfig, resolve
from atoll.experiment.federation_cache import FederationCache
from atoll.experiment.hardware import choose_device, tuned_process
from atoll.experiment.observers import Observer
from atoll.experiment.problem import Divide, Problem
from atoll.experiment.result import Result
from atoll.experiment.rounds import Experiment, Run
from atoll.experiment.run import SAVE_EVERY, RunPlan, Stopped
from atoll.experiment.sweep import Parted, can_be_one, run_together


def on_gpu(config: RunConfig) -> bool:
    """Whether a configuration runs on a GPU, where points at once cost little more than one."""
    try:
        return choose_device(config.device).type == "cuda"
    except ConfigError:
        return False  # whoever runs it says so


def why_apart(one: RunConfig, other: RunConfig) -> str:
    """Why two configurations cannot be one program; "" if nothing is known against it yet."""
    if one.objects:
        return "they are made of Python objects"
    try:
        one, other = resolve(one)[0], resolve(other)[0]
        if msgspec.structs.replace(other, set=one.set) != one:
            return "they differ in more than hyper-parameters"
        task = (NODES if one.batch_size is None else GRAPHS).name
        points([build_method(config, task=task) for config in (one, other)])
    except (ConfigError, Undecided) as reason:
        return str(reason)
    return ""


@tuned_process()
def run_configs(
    configs: Sequence[RunConfig],
    *,
    outs: Sequence[Path | None] | None = None,
    observers: Sequence[Observer] | None = None,
    resuming: bool = False,
    save_every: float = SAVE_EVERY,
    log: str | Sequence[str] = (),
    divide: Divide | None = None,
) -> list[Result]:
    """Run all seeds of configurations that differ in numbers alone, in one program.

    Each has the results, files and checkpoints that `RunPlan.run` would give it.

    Args:
        configs: What to run.
        outs: A folder for each.
        observers: Each hears about its own.
        resuming: Whether the folders may hold runs that go on.
        save_every: Least seconds between two checkpoints.
        log: Where else the numbers of every round go (`experiment.loggers.LOGS`).
        divide: Makes the clients of a seed, as `Problem.divide` does.

    Raises:
        Parted: They cannot be one program; the rounds so far are saved for `RunPlan.run`.
        SeedFailed: One went wrong, the run at its `place`, where each configuration has as many
            places as seeds. The others are saved.
        Stopped: An observer stopped them.
    """
    # The runs are in memory together, so their federations need no limit.
    shared = FederationCache(sys.maxsize, make=divide or Problem.divide)
    folders = outs or [None] * len(configs)
    watchers = observers or [Observer() for _ in configs]
    plans = [
        RunPlan(
            config,
            out=out,
            observer=observer,
            resuming=resuming,
            save_every=save_every,
            log=log,
            divide=shared,
        )
        for config, out, observer in zip(configs, folders, watchers, strict=True)
    ]
    rows = [(plan, experiment) for plan in plans for experiment in plan.experiments()]
    experiments = [experiment for _, experiment in rows]
    reason = can_be_one(experiments)
    if reason:
        raise Parted(reason)
    runs = run_together(
        experiments,
        checkpoints=[plan.checkpoint(experiment) for plan, experiment in rows],
        every_seconds=save_every,
        on_round=lambda at, history: rows[at][0].observers.round(experiments[at].seed, history),
        should_stop=lambda: True in [plan.observers.should_stop() for plan in plans],  # all note it
        or_not_at_all=True,
    )
    return _results(plans, rows, runs)


def _results(
    plans: Sequence[RunPlan], rows: Sequence[tuple[RunPlan, Experiment]], runs: Sequence[Run]
) -> list[Result]:
    """The result of each plan from the runs of its seeds."""
    results = []
    for plan in plans:
        mine = [run for run, (owner, _) in zip(runs, rows, strict=False) if owner is plan]
        if len(mine) < plan.config.seeds:  # they were stopped before its turn came
            raise Stopped(plan.out, plan.config.seed, 0)
        results.append(plan.result([plan.seed_result(run) for run in mine]))
    return results
