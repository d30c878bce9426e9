"""Points of a grid at once: configurations that differ only in numbers are one program."""

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
from atoll.experiment.run import SAVE_EVERY, RunPlan, Stopped
from atoll.experiment.sweep import Parted, run_together, why_one_by_one


def on_gpu(config: RunConfig) -> bool:
    """Whether a configuration runs on a GPU, where points at once cost little more than one."""
    try:
        return choose_device(config.device).type == "cuda"
    except ConfigError:
        return False  # running it gives the error


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
    outs: Sequence[Path],
    observers: Sequence[Observer],
    *,
    log: str | Sequence[str] = (),
    divide: Divide | None = None,
) -> list[Result]:
    """Run all seeds of configurations that differ only in numbers, in one program.

    Each has the results, files and checkpoints that `RunPlan.run` would give it in its folder, and
    its own observer. A folder may contain a stopped run, which continues.

    Raises:
        Parted: They cannot be one program; `RunPlan.run` continues from the saved state.
        SeedFailed: One failed, the run at its `place`, where each configuration has as many
            places as seeds. The others are saved.
        Stopped: An observer stopped them.
    """
    # The runs are in memory together, so their federations need no limit.
    shared = FederationCache(sys.maxsize, make=divide or Problem.divide)
    plans = [
        RunPlan(config, out, observer, resuming=True, log=log, divide=shared)
        for config, out, observer in zip(configs, outs, observers, strict=True)
    ]
    rows = [(plan, experiment) for plan in plans for experiment in plan.experiments()]
    experiments = [experiment for _, experiment in rows]
    if reason := why_one_by_one(experiments):
        raise Parted(reason)
    runs = run_together(
        experiments,
        checkpoints=[plan.checkpoint(experiment) for plan, experiment in rows],
        every_seconds=SAVE_EVERY,
        on_round=lambda at, history: rows[at][0].observers.round(experiments[at].seed, history),
        should_stop=lambda: True in [plan.observers.should_stop() for plan in plans],  # all note it
        or_not_at_all=True,
    )
    results = []
    for plan in plans:
        own = [run for run, (owner, _) in zip(runs, rows, strict=False) if owner is plan]
        if len(own) < plan.config.seeds:  # they were stopped before its turn came
            raise Stopped(plan.out, plan.config.seed, 0)
        results.append(plan.result([plan.seed_result(run) for run in own]))
    return results
