"""Estimates of a run's time and memory, from measured costs (`recipes/costs.toml`)."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.data.archive import memory_needed
from atoll.data.public.registry import dataset_info, plain_name, sets_of_group
from atoll.experiment.config import RECIPES, RunConfig, data_header, resolve

PROCESS = 1 << 30  # bytes of a process with a small graph; 0.6 GiB were seen with Cora
COPIES = 6  # of a graph's features in memory while clients train on it, at most


@cache
def _costs() -> dict[str, dict[str, float]]:
    return tomllib.loads((RECIPES / "costs.toml").read_text(encoding="utf-8"))


def cost_of(config: RunConfig) -> float:
    """Processor seconds of a run, roughly; 0.0 for a run that cannot run."""
    try:
        costs, (full, _) = _costs(), resolve(config)
    except AtollError:
        return 0.0  # running it gives the error
    work = (full.rounds or 1) * (full.epochs or 1) * full.seeds / 300
    base = str(full.set.get("base", ""))
    method = costs["methods"].get(full.method, 2.0) + costs["methods"].get(base, 0.0)
    name = plain_name(full.data).lower()
    sets = (name,) if name in costs["data"] else sets_of_group(name) or (name,)
    return work * method * sum(costs["data"].get(one.lower(), 5.0) for one in sets)


def memory_of(config: RunConfig) -> int:
    """Bytes that a process with such a run takes, roughly."""
    path = Path(config.data).expanduser()
    try:
        if data_header(config) is not None:
            return PROCESS + memory_needed(path)
        if path.is_dir():
            return PROCESS + COPIES * sum(one.stat().st_size for one in path.rglob("*"))
        if path.is_file():
            return PROCESS + COPIES * path.stat().st_size
        name = plain_name(config.data).lower()
        sets = [dataset_info(one) for one in sets_of_group(name) or (name,)]
    except AtollError:
        return PROCESS  # made by a generator, or given by Python
    # Features of four bytes, and two ends of eight for each edge.
    sizes = [4 * (one.nodes or 0) * (one.features or 0) + 16 * (one.edges or 0) for one in sets]
    return PROCESS + COPIES * sum(sizes)
