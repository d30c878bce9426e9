"""A configuration as the command that runs it."""

from __future__ import annotations

import shlex
from pathlib import Path

from atoll.experiment.config import RunConfig

_PLAIN = (
    "data",
    "clients",
    "partition",
    "split",
    "protocol",
    "rounds",
    "epochs",
    "fraction",
    "seeds",
    "seed",
    "evaluate",
    "batch_size",
    "schema",
    "data_root",
    "engine",
    "device",
    "chunk",
)


def run_command(config: RunConfig) -> str:
    """`atoll run ...` with everything that differs from the defaults, ready to be pasted."""
    usual = RunConfig()
    words = ["atoll", "run", config.method, "--data", config.data]
    for name in _PLAIN[1:]:
        value = getattr(config, name)
        if value is not None and value != getattr(usual, name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    for option, names in (("--allow", config.allow), ("--compat", config.compat)):
        words += [word for name in names for word in (option, name)]
    for option, pairs in (("--own", config.own), ("--set", config.set)):
        words += [word for key, value in pairs.items() for word in (option, f"{key}={value}")]
    return shlex.join(words)


def what_differs(before: RunConfig, now: RunConfig) -> str:
    """What was asked for otherwise the first time: `rounds 12, now 100; lr 0.01, now none`."""
    first, second = (_flat(config) for config in (before, now))
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    return "; ".join(f"{key} {_word(first.get(key))}, now {_word(second.get(key))}" for key in keys)


def _flat(config: RunConfig) -> dict[str, object]:
    """Every option, hyper-parameters one by one."""
    found: dict[str, object] = {}
    for name in config.__struct_fields__:
        value = getattr(config, name)
        found |= dict(value) if isinstance(value, dict) else {name: value}
    return found


def _word(value: object) -> str:
    return "none" if value in (None, (), []) else str(value)


def in_python(function: str, what: str, folder: Path) -> str:
    """In the place of a command: why there is none, and how to go on."""
    return (
        f"# started in Python with {what}; go on there with the same call of {function} and "
        f"out={str(folder)!r}"
    )
