"""A run's configuration: typed, complete, saved with every result, and printable as a command.

`resolve` fills in open choices (None), so that a saved configuration names every choice.
Precedence: command line, file, protocol, the method's own defaults.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any

import msgspec
import tomli_w
from msgspec.structs import replace

from atoll.core.errors import ConfigError, check_name
from atoll.core.losses import parse_class_weights, parse_loss
from atoll.core.space import Value
from atoll.core.task import TASKS, task_named
from atoll.data.archive import Header, is_federation_file, read_header
from atoll.data.divide import BY_SET, DEGENERATE
from atoll.data.load import is_own
from atoll.data.own.agree import MODES
from atoll.data.own.schema import OWNERS
from atoll.data.partition import PARTITIONS
from atoll.data.public.registry import plain_name, task_of_data
from atoll.data.source import Source
from atoll.data.split import check_split, time_column
from atoll.data.synthetic import built_in
from atoll.experiment.build import KINDS, build_method
from atoll.experiment.history import SCORED
from atoll.experiment.metrics import COMPARED, find_metric
from atoll.experiment.privacy import PrivacyConfig, make_privacy, with_privacy
from atoll.experiment.protocols import COMPAT, PROTOCOLS, Protocol, protocol
from atoll.experiment.threshold import parse_rule
from atoll.methods import method_class, method_files, method_name, split_preset


class RunConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that determines a run's numbers, and its device.

    None is an open choice: the protocol, the data or a default decides.
    """

    method: str = "fedavg"
    data: str = "lagoon"
    task: str | None = None
    clients: int | None = None
    partition: str | None = None
    split: str | None = None
    ratios: tuple[float, float, float] | None = None
    protocol: str = "strict"
    data_seed: int | None = None  # of partition and split
    rounds: int | None = None
    epochs: int | None = None
    fraction: float = 1.0
    seeds: int = 1
    seed: int = 0
    engine: str = "auto"
    device: str = "auto"
    chunk: int = 0
    set: dict[str, Value] = {}
    compat: tuple[str, ...] = ()
    evaluate: str | None = None
    metric: str | None = None  # selects the round; None: the metric of the data
    class_weights: str | None = None  # in the loss: "balanced", or a number for each class
    loss: str | None = None  # "cross_entropy", "focal" or "focal:GAMMA"
    threshold: str | None = None  # the rule that chooses it (`experiment.threshold.RULES`)
    positive: str | None = None  # the positive class of metrics for two classes
    allow: tuple[str, ...] = ()
    batch_size: int | None = None
    data_root: str | None = None
    schema: str | None = None
    own: dict[str, Value] = {}
    encoder: str | None = None  # how clients with tables measure columns; None: "federated"
    dp: PrivacyConfig | None = None
    from_run: str | None = None  # the folder of a run whose model is the start
    held_out_client: str | None = None  # the name or number of a client that never trains
    objects: tuple[str, ...] = ()  # "method", "data", "engine": Python objects, not in files

    @property
    def all_seeds(self) -> range:
        """The numbers of all seeds."""
        return range(self.seed, self.seed + self.seeds)


RECIPES = Path(__file__).parents[1] / "recipes"
"""The folder of protocols, published hyper-parameters and the papers' tables."""


STARTED = "# started in "
"""The start of the last line of a saved configuration."""
METHOD_FILES = "# files of methods "
"""The start of the line before it, if the user wrote the method: SHA-256 by file, as JSON."""


def read_config(path: Path) -> dict[str, Any]:
    """Read the options in a TOML file, and check them.

    A path `recipes/...` that does not exist is read from this package.
    """
    if not path.exists() and path.parts[:1] == ("recipes",):
        path = RECIPES.joinpath(*path.parts[1:])
    what = f"configuration file {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist; give a TOML file of options") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{what} cannot be read: {error}") from error
    return parse_config(text, what, str(path))


def parse_config(text: str, what: str, where: str = "") -> dict[str, Any]:
    """Parse the options in TOML text, and check them. Errors mention `what` and `where`."""
    try:
        raw = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{what} is not valid TOML: {error}; correct it") from error
    for key in raw:
        check_name(f"key in {where or what}", key, RunConfig.__struct_fields__)
    try:
        make_config(**raw)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from error
    return raw


def make_config(**given: Any) -> RunConfig:
    """Make a configuration from plain values. Wrong types and invalid numbers are errors."""
    for key in given:
        check_name("option", key, RunConfig.__struct_fields__)
    ratios = given.get("ratios")
    if isinstance(ratios, str):  # 0.2/0.4/0.4
        try:
            given["ratios"] = [float(part) for part in ratios.split("/")]
        except ValueError:
            give = "give three shares, as in 0.2/0.4/0.4"
            raise ConfigError(f"ratios cannot be '{ratios}'; {give}") from None
    if isinstance(given.get("dp"), str | dict):
        given["dp"] = msgspec.to_builtins(make_privacy(given["dp"]))
    try:
        config: RunConfig = msgspec.convert(given, RunConfig)
    except msgspec.ValidationError as error:
        # As in "Expected `int | null`, got `str` - at `$.rounds`".
        if (found := re.search(r"Expected `([^`]*)`.* at `\$\.(\w+)", str(error))) is None:
            raise ConfigError(f"the configuration cannot be used: {error}") from error
        kinds, name = found[1].removesuffix(" | null").split(" | "), found[2]
        takes = " or ".join(KINDS.get(kind, kind) for kind in kinds)
        raise ConfigError(f"{name} cannot be {given[name]!r}; it takes {takes}") from error
    counts = {name: getattr(config, name) for name in ("clients", "rounds", "epochs", "seeds")}
    at_least_1 = "a whole number of at least 1"
    wrong = {name: (count is not None and count < 1, at_least_1) for name, count in counts.items()}
    if config.seeds >= 2**31:
        wrong["seeds"] = True, "a number below 2147483648"
    wrong |= {
        "fraction": (not 0 < config.fraction <= 1, "a number above 0 and up to 1"),
        "seed": (not 0 <= config.seed < 2**31, "a whole number from 0 to 2147483647"),
        "data_seed": (not 0 <= (config.data_seed or 0) < 2**31, "0 or a number below 2147483648"),
        "batch_size": ((config.batch_size or 0) < 0, "0 (all at once) or a number of graphs"),
        "chunk": (config.chunk < 0, "0 (choose) or a number of clients"),
    }
    for name, (holds, wanted) in wrong.items():
        if holds:
            raise ConfigError(f"{name} is {getattr(config, name)}; give {wanted}")
    divided = data_header(config)
    if divided is not None and "protocol" not in given:
        return replace(config, protocol=divided.about.get("protocol", "strict"))
    return config


def data_header(config: RunConfig) -> Header | None:
    """Return the header of a federation file, or None for other data."""
    if "data" in config.objects or not is_federation_file(config.data):
        return None
    return read_header(config.data)


def _as_divided(config: RunConfig, header: Header) -> RunConfig:
    """Return the configuration with the choices of a federation file. Refuse other choices."""
    about = header.about
    fixed = {
        "clients": header.clients,
        "partition": about.get("partition", "given"),
        "split": about.get("split", "given"),
        "protocol": about.get("protocol", config.protocol),
    }
    if TASKS[header.task].many_graphs:
        fixed["batch_size"] = about.get("batch_size", max(header.batch_sizes))
    check_divided(config, fixed)
    return replace(config, **fixed)


def check_divided(config: RunConfig, fixed: Mapping[str, object]) -> None:
    """Refuse choices that differ from `fixed`, those of an already divided federation."""
    in_python = "data" in config.objects
    again = f"divide the data again: atoll{'.' if in_python else ' '}partition"
    for name in (*fixed, "ratios", "schema", "own", "allow", "data_seed"):
        option, wanted = name.replace("_", "-"), getattr(config, name)
        shown = name if in_python else f"--{option}"
        if wanted in (None, {}, ()):
            continue
        if name not in fixed:
            why = f"is for data that are still to be divided, and '{config.data}' is"
            raise ConfigError(f"{shown} {why}; remove it")
        if wanted != fixed[name]:
            differ = f"with {option} {fixed[name]}, but {wanted} was asked for"
            hint = f"remove {shown}, or {again}"
            raise ConfigError(f"'{config.data}' was divided {differ}; {hint}")


def config_text(config: RunConfig) -> str:
    """Format a configuration as TOML. Values of None are omitted."""
    plain = {k: v for k, v in msgspec.to_builtins(config).items() if v is not None}
    return tomli_w.dumps(plain)


def saved_text(config: RunConfig) -> str:
    """Format a configuration for a run's folder, with the base folder of its relative paths."""
    files = own_files(config)
    about = f"{METHOD_FILES}{json.dumps(files)}\n" if files else ""
    return f"{config_text(config)}{about}{STARTED}{json.dumps(str(Path.cwd()))}\n"


def own_files(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of the user's files with the method and its base."""
    return method_files(config.method, str(config.set.get("base", "")))


def resolve(config: RunConfig, task: str | None = None) -> tuple[RunConfig, Protocol]:
    """Return the configuration with the choices of protocol and data, and the protocol.

    Every name is checked.
    """
    if (divided := data_header(config)) is not None:
        config = _as_divided(config, divided)
    name, preset = split_preset(config.method)
    if preset:  # of gcfl+, for example
        config = replace(config, method=name, set={"preset": preset, **config.set})
    rules = protocol(config.protocol)
    if config.data_seed is not None:
        rules = dataclass_replace(rules, data_seed=config.data_seed)
    task = task or (divided.task if divided else task_of_data(config.data))
    name = divided.name if divided else plain_name(config.data)
    many_graphs, named = TASKS[task].many_graphs, "method" not in config.objects
    _check_task(config, rules, name, task)
    settings = dict[str, Value]()
    if named:  # the protocol's hyper-parameters that the method has, then the user's
        known = {f.name for f in fields(method_class(config.method))}
        defaults = {**rules.of_methods, **rules.of_data.get(name.lower(), {})}
        defaults = {key: value for key, value in defaults.items() if key in known}
        settings = {**rules.settings, **defaults, **config.set}
    epochs = _epochs(config, settings) or rules.epochs
    generator, clients = built_in(config.data), config.clients
    usual = rules.graph_partition if many_graphs else rules.partition
    partition = config.partition or ("column:owner" if generator else usual)
    # A Python graph already has its owners. A named generator makes the requested number.
    made_for = generator is not None and "data" not in config.objects
    if clients is None and (made_for or not partition.startswith("column:")):
        clients = rules.clients_of_data.get(name.lower(), rules.clients)
        if generator and generator.owners:
            clients = generator.owners
    batch_size = config.batch_size
    if many_graphs and batch_size is None:
        batch_size = rules.batch_size
    continued, split = _in_stream(rules, partition, clients)
    filled = replace(
        config,
        method=method_name(config.method) if named else config.method.lower(),
        clients=clients,
        partition=partition if divided else continued,
        split=config.split or split,
        ratios=None if divided else config.ratios or rules.ratios,
        rounds=config.rounds or rules.rounds,
        epochs=epochs if named else None,
        evaluate=config.evaluate or rules.evaluate,
        batch_size=batch_size,
        held_out_client=config.held_out_client or rules.held_out,
        set=settings,
    )
    _check_names(filled, task)
    check_choices(filled, rules)
    return filled if divided else _with_owner(filled), rules


def _check_task(config: RunConfig, rules: Protocol, data: str, task: str) -> None:
    """Check that options and protocol agree with the data, which determine the task."""
    if config.task is not None and task_named(config.task).name != task:
        has = f"'{data}' has {TASKS[task].plural} to classify"
        hint = "remove --task, or choose other data"
        raise ConfigError(f"task is {config.task}, but {has}; {hint}")
    if task not in rules.tasks:
        others = " or ".join(name for name, other in PROTOCOLS.items() if task in other.tasks)
        kinds, hint = ("sets of graphs", "one graph"), "choose another protocol"
        if TASKS[task].many_graphs:
            kinds, hint = ("one graph", "a set of graphs"), f"use --protocol {others}"
        problem = f"is for {kinds[0]}, but '{data}' is {kinds[1]}"
        raise ConfigError(f"protocol '{rules.name}' {problem}; {hint}")


def _in_stream(rules: Protocol, partition: str, clients: int | None) -> tuple[str, str]:
    """Return partition and split, with options that skip earlier draws (`Protocol.draws`)."""
    order = rules.draws.get(partition.partition(":")[0], ())
    if clients not in order:
        return partition, rules.split
    before = order[: order.index(clients)]
    after = f":after={'/'.join(map(str, before))}"
    random = partition == "metis-overlap" and before
    return partition + (after if random else ""), f"{rules.split}:draw={len(before)}"


def _epochs(config: RunConfig, settings: dict[str, Value]) -> int | None:
    """Return the number of local epochs from `--epochs` or from `--set epochs=...`."""
    if "epochs" not in settings:
        return config.epochs
    text = settings.pop("epochs")
    if not re.fullmatch(r"0*[1-9]\d*", str(text)):
        raise ConfigError(f"epochs is {text}; give a whole number of at least 1")
    if config.epochs not in (None, int(text)):
        both = f"{config.epochs} by --epochs and {text} by --set"
        raise ConfigError(f"epochs is {both}; give one of the two")
    return int(text)


def _check_names(config: RunConfig, task: str) -> None:
    """Check every name and hyper-parameter, before data are loaded and a folder is made."""
    if not TASKS[task].many_graphs and config.batch_size is not None:
        one = f"'{plain_name(config.data)}' is one graph"
        raise ConfigError(f"batch_size is for sets of graphs, but {one}; remove it")
    if "method" not in config.objects:
        with_privacy(build_method(config, task=task), config.dp)
    # Options may follow the name: dirichlet:alpha=0.5. "given" means already partitioned data.
    partition, split = ((text or "").partition(":")[0] for text in (config.partition, config.split))
    check_split(split, TASKS[task].splits)
    for kind, names, known in (
        ("partition", [partition], (*PARTITIONS, BY_SET, "given")),
        ("value of --allow", config.allow, DEGENERATE),
    ):
        for name in names:
            check_name(kind, name, known)


def check_choices(config: RunConfig, rules: Protocol) -> None:
    """Check scoring, switches, loss and metric, as far as they do not depend on the data."""
    for kind, given, known in (
        ("value of --evaluate", [config.evaluate or SCORED[0]], SCORED),
        ("compat switch", config.compat, COMPAT),
        ("value of --encoder", [config.encoder or MODES[0]], MODES),
    ):
        for word in given:
            check_name(kind, word, known)
    if config.loss is not None:
        parse_loss(config.loss)
    if config.class_weights is not None:
        parse_class_weights(config.class_weights)
    of_all = ""  # the choice that needs one number of all clients
    if config.threshold is not None:
        of_all = "a threshold is chosen for all clients"
        parse_rule(config.threshold)
        if config.evaluate == "local":
            why = "is for the deployed model, but --evaluate local scores another"
            raise ConfigError(f"a threshold {why}; remove one of the two")
    if (name := config.metric) is not None:
        found = find_metric(name)
        if not found.higher:
            raise ConfigError(f"{name} is better when lower; choose one of: {', '.join(COMPARED)}")
        of_all = f"metric {name} is one number of all clients" if found.pooled else of_all
    if of_all and rules.select == "best-val-per-client":
        why = f"protocol {rules.name} picks a round for each client"
        raise ConfigError(f"{of_all}, but {why}; choose another metric or --protocol")
    if of_all and config.evaluate == "local" and config.fraction < 1:
        why = "not all clients have a local model in a round"
        raise ConfigError(f"{of_all}, but with --fraction {why}; choose --evaluate deployed")


def with_own_partition(config: RunConfig, source: Source, given: RunConfig) -> RunConfig:
    """Partition by the owner column, if the data have one and the user chose no partition."""
    column = owner_column(source, config.data, time_column(config.split))
    by_column = (config.partition or "").startswith("column:")  # owners of built-in data
    if given.partition is not None or by_column or column is None:
        return config
    return _with_owner(replace(config, partition=f"column:{column}", clients=given.clients))


def owner_column(source: Source, data: str, time: str | None = None) -> str | None:
    """Return the column that names the owner of each node, or None if it is missing."""
    # Columns of a user's own graph are owners, ids or times; a public set's may be anything.
    owners = [name for name in source.columns if name in OWNERS or is_own(data)]
    owners = [name for name in ("client", *owners) if name in source.columns]
    owners = [name for name in owners if name not in ("id", time)]
    return owners[0] if owners else None


def _with_owner(config: RunConfig) -> RunConfig:
    """Exclude the owner column and the time column of a user's nodes from the features."""
    if (time := time_column(config.split)) and is_own(config.data):
        config = replace(config, own={"time": time, **config.own})
    column = (config.partition or "").removeprefix("column:")
    if column == config.partition or column in ("", *OWNERS) or not is_own(config.data):
        return config
    return replace(config, own={"owner": column, **config.own})


def option_words(options: Mapping[str, object]) -> list[str]:
    """Format options as words of a command line. None, False, [] and {} are omitted.

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
    """Return the data, and the options (except the method) that differ from the defaults."""
    options = {name: getattr(config, name) for name in config.__struct_fields__}
    del options["method"], options["objects"]
    usual = RunConfig()
    options = {k: v for k, v in options.items() if k == "data" or v != getattr(usual, k)}
    if config.dp is not None:
        options["dp"] = ",".join(f"{k}={v}" for k, v in msgspec.to_builtins(config.dp).items())
    if config.ratios is not None:
        options["ratios"] = "/".join(map(str, config.ratios))
    return options


def run_command(config: RunConfig) -> str:
    """Return the command `atoll run ...` with all options that differ from the defaults."""
    return shlex.join(["atoll", "run", config.method, *option_words(config_options(config))])


def what_differs(before: RunConfig, now: RunConfig) -> str:
    """Return the changed options as text: `rounds 12, now 100; lr 0.01, now none`."""
    first, second = dict[str, object](), dict[str, object]()
    for config, options in ((before, first), (now, second)):
        for name in config.__struct_fields__:
            value = getattr(config, name)  # hyper-parameters are compared one by one
            options.update(value if isinstance(value, dict) else {name: value})
    parts = []
    for key in first | second:
        pair = first.get(key), second.get(key)
        if pair[0] != pair[1]:
            old, new = ("none" if value in (None, (), []) else str(value) for value in pair)
            parts.append(f"{key} {old}, now {new}")
    return "; ".join(parts)


def in_python(function: str, what: str, folder: Path) -> str:
    """Return a comment instead of a command: why none exists, and how to continue."""
    return (
        f"# started in Python with {what}; continue there with the same call of {function} and "
        f"out={str(folder)!r}"
    )
