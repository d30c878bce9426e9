"""A configuration as the command that runs it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

import msgspec

from atoll.experiment.config import RunConfig


def option_words(options: Mapping[str, object]) -> list[str]:
    """Options as words of a command line; None, False and empty ones are left out.

    Examples:
        >>> option_words({"batch_size": 8, "allow": ["no-edge"], "set": {"lr": 0.1}, "both": True})
        ['--batch-size', '8', '--allow', 'no-edge', '--set', 'lr=0.1', '--both']
    """
    words: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif isinstance(value, Mapping):
            words += [word for key, one in value.items() for word in (option, f"{key}={one}")]
        elif isinstance(value, list | tuple):
            words += [word for one in value for word in (option, str(one))]
        elif value is not None and value is not False:
            words += [option, str(value)]
    return words


def config_options(config: RunConfig) -> dict[str, object]:
    """The options of a configuration that differ from the defaults, but for the method."""
    usual = RunConfig()
    names = [name for name in RunConfig.__struct_fields__ if name not in ("method", "objects")]
    options = {name: getattr(config, name) for name in names}
    options = {k: v for k, v in options.items() if k == "data" or v != getattr(usual, k)}
    if config.dp is not None:
        options["dp"] = ",".join(f"{k}={v}" for k, v in msgspec.to_builtins(config.dp).items())
    if config.ratios is not None:
        options["ratios"] = "/".join(map(str, config.ratios))
    return options


def run_command(config: RunConfig) -> str:
    """`atoll run ...` with everything that differs from the defaults, ready to be pasted."""
    return shlex.join(["atoll", "run", config.method, *option_words(config_options(config))])


def what_differs(before: RunConfig, now: RunConfig) -> str:
    """What was asked for otherwise the first time: `rounds 12, now 100; lr 0.01, now none`."""
    first, second = _flat(before), _flat(now)
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
