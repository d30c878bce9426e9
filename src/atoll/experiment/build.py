"""Build a method, its network and its optimizer from a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import msgspec

from atoll.core.aggregate import RULES, Rule
from atoll.core.errors import ConfigError, check_name, unknown
from atoll.core.hyper import hypers
from atoll.core.method import Method, Net
from atoll.core.optim import OPTIMIZERS
from atoll.core.random import make_key
from atoll.core.space import Settings, Value
from atoll.core.task import NODES, TASKS
from atoll.core.tree import Tree, num_bytes
from atoll.data.public.registry import plain_name
from atoll.data.spec import parse_recipe
from atoll.experiment.hardware import available_memory
from atoll.methods import METHODS, method_class, split_preset
from atoll.nn import NETS, nets_for

if TYPE_CHECKING:
    from atoll.experiment.config import RunConfig

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "float | None": "a number or none",
    "bool": "true or false",
    "str": "a text",
    "object": "a table of keys and values",
    "array": "a list",
}
"""Names of types in error messages."""
LOOPS = ("layers", "heads", "factors")  # sizes that count parts of a network
WIDE = 4096  # networks with matrices up to WIDE² entries are not checked against the memory
COPIES = 4  # copies of the parameters in training: values, gradients, two moments of Adam
_FIXED = ("features", "classes", "net", "optimizer", "base")


def build_method(
    config: RunConfig, features: int = 1, classes: int = 2, task: str = NODES.name
) -> Method:
    """Build the method of a resolved configuration. The default sizes are enough to check it."""
    cls = method_class(config.method)
    if task not in cls.tasks:
        able = ", ".join(name for name, other in METHODS.items() if task in other.tasks)
        what = " and ".join(f"{known}s" for known in cls.tasks)
        has = f"'{plain_name(config.data)}' has {task}s to classify"
        raise ConfigError(f"{config.method} classifies {what}, but {has}; methods for that: {able}")
    settings = dict(config.set)
    if preset := str(settings.pop("preset", "")):
        if not cls.presets:
            raise ConfigError(f"{config.method} has no presets; remove --set preset={preset}")
        check_name(f"preset of {config.method}", preset, cls.presets)
        settings = {**_preset(cls, preset, settings.get("net", "")), **settings}
    if TASKS[task].many_graphs:
        settings = {**cls.for_graphs, **settings}
    base = _base(settings.pop("base", ""), cls, config.method)
    wanted = cls.nets or (base.nets if base is not None else ())
    net_name = _net_name(settings.pop("net", ""), config, wanted, task)
    if optimizer_name := str(settings.pop("optimizer", "")).lower():
        check_name("optimizer", optimizer_name, OPTIMIZERS)
    net = NETS[net_name](features=features, classes=classes)
    method: Any = cls(net=net)
    parts: dict[str, Any] = {"method": method, "net": net}
    if base is not None:
        parts["base"] = base(net=net)
    if "optimizer" in _names(method):
        # A method may use another default learning rate than its optimizer.
        first = parts.get("base", method)
        default = getattr(first, "optimizer", method.optimizer)
        kind = OPTIMIZERS.get(optimizer_name, type(default))
        parts["optimizer"] = default if type(default) is kind else kind()
    if "epochs" in _names(method):
        settings.setdefault("epochs", config.epochs or 3)
    chosen: dict[str, dict[str, Any]] = {owner: {} for owner in parts}
    for key, value in settings.items():
        for owner, name in _owners(key, parts, config.method):
            chosen[owner][name] = _converted(parts[owner], name, value)
    # Set all values of a part at once, because some are checked together.
    parts = {owner: replace(part, **chosen[owner]) for owner, part in parts.items()}
    shared = {name: part for name, part in parts.items() if name in ("net", "optimizer")}
    if base is not None:
        given = {name: part for name, part in shared.items() if name in _names(base)}
        shared["base"] = replace(parts["base"], **given)
    built: Method = replace(parts["method"], **shared)
    return built


def _preset(cls: type[Method], name: str, net: Value) -> Settings:
    """Return a preset's values, without its network's values if the user chose another network."""
    values = cls.presets[name]
    own = str(values.get("net", ""))
    if not own or net in ("", own):
        return values
    dropped = hypers(NETS[own]).keys() - hypers(cls).keys()
    return {key: value for key, value in values.items() if key not in dropped}


def check_memory(net: Net) -> None:
    """Refuse a network with too large a size, or whose training would not fit into memory."""
    sizes = {name: value for name, value in vars(net).items() if type(value) is int}
    for name, value in sizes.items():
        most = 1000 if name in LOOPS else 10**6
        if name not in _FIXED and value > most:
            raise ConfigError(f"{name} is {value}; give at most {most}")
    inner = max(size for name, size in sizes.items() if name not in ("features", *LOOPS))
    if inner * max(sizes.values()) <= WIDE**2:  # torch takes a second for the first shape
        return
    size = num_bytes(parameter_shapes(net))
    if COPIES * size > (free := available_memory()):
        needs = f"{COPIES * size / 2**30:.3g} GiB to train ({size // 4} parameters)"
        hint = "choose smaller widths or fewer layers"
        raise ConfigError(f"the network needs {needs}, but {free / 2**30:.3g} GiB are free; {hint}")


def parameter_shapes(net: Net) -> Tree:
    """Return a network's parameters as tensors on the meta device, which take no memory."""
    return net.init(make_key(0).to("meta"))


def _net_name(wish: Value, config: RunConfig, wanted: tuple[str, ...], task: str) -> str:
    """Return the network's name. A method, or the method that it wraps, may allow only some."""
    nets = nets_for(task)
    fitting = [name for name in wanted if name in nets]
    name = str(wish).lower() or (*fitting, *nets)[0]
    check_name("net", name, NETS)
    if fitting and name not in fitting:
        works = " or ".join(fitting)
        raise ConfigError(f"{config.method} cannot use net={name}; use --set net={works}")
    if name not in nets:
        why = f"does not classify {task}s, as '{plain_name(config.data)}' needs"
        raise ConfigError(f"net={name} {why}; use --set net={' or '.join(nets)}")
    return name


def _base(name: Value, cls: type[Method], method: str) -> type[Method] | None:
    """Return the method to wrap (`--set base=fedprox`), or None if none is named."""
    if not name:
        return None
    if "base" not in _names(cls):
        raise ConfigError(f"{method} does not wrap other methods; remove --set base={name}")
    base, (plain, preset) = method_class(str(name)), split_preset(str(name))
    if preset:
        raise ConfigError(f"base={name} is {plain} with a preset, which a base cannot have")
    if base is cls:
        raise ConfigError(f"{method} cannot be its own base; name another method")
    return base


def _names(part: Any) -> list[str]:
    return [f.name for f in fields(part)]


def _owners(key: str, parts: Mapping[str, Any], method: str) -> list[tuple[str, str]]:
    """Return the pairs of part and field that a key such as `hidden` or `net.hidden` sets.

    A field of both the method and its base is set in both.
    """
    part, dot, name = key.partition(".")
    if dot and part in parts and name in _names(parts[part]) and name not in _FIXED:
        return [(part, name)]
    owners = [owner for owner, candidate in parts.items() if key in _names(candidate)]
    if owners and key not in _FIXED:
        both = [owner for owner in owners if owner in ("method", "base")]
        return [(owner, key) for owner in both or owners[:1]]
    if key == "aggregate":
        why = parts["method"].not_averaging
        raise ConfigError(f"{method} takes no aggregation rule: {why}; remove --set aggregate")
    keys = [n for part in parts.values() for n in _names(part) if n not in _FIXED]
    more = ["net", "optimizer", *(["preset"] if parts["method"].presets else [])]
    raise unknown(f"hyper-parameter of {method}", key, [*keys, *more])


def _converted(part: Any, name: str, value: object) -> Any:
    """Convert a hyper-parameter's value to its type, and check its limits."""
    hyper = hypers(type(part))[name]
    if hyper.kind is Rule:  # an aggregation rule: `median`, or `trimmed:f=2` with its parameters
        kind, options = parse_recipe(str(value))
        check_name("aggregation rule", kind, RULES)
        default = getattr(part, name)  # its own parameters stay, if it is a rule of this kind
        rule: Any = default if type(default) is RULES[kind] else RULES[kind]()
        for key in options:
            check_name(f"parameter of aggregate={kind}", key, _names(rule))
        return replace(rule, **{key: _converted(rule, key, options[key]) for key in options})
    try:
        nothing = value == "none" and type(None) in get_args(hyper.kind)
        converted = None if nothing else msgspec.convert(value, hyper.kind, strict=False)
    except msgspec.ValidationError:
        word = getattr(hyper.kind, "__name__", str(hyper.kind))
        wanted = hyper.allowed if get_origin(hyper.kind) is Literal else KINDS.get(word, word)
        raise ConfigError(f"{name} cannot be '{value}'; it takes {wanted}") from None
    hyper.check(converted)
    return converted
