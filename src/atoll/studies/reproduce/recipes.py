"""The papers that Atoll reproduces: their published numbers, and the runs to compare with them.

A paper has two files in `atoll/recipes`. `NAME.toml` maps its names of methods, data and settings
to options of a run. `printed/NAME.csv` contains every number of its tables. A published cell has a
run, is computed from other cells (an average), or has a sentence that explains why it has no run.
"""

from __future__ import annotations

import csv
import string
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from atoll.core.errors import ConfigError, check_name, unknown
from atoll.core.space import Value
from atoll.data.public import registry
from atoll.data.public.registry import plain_name, sets_of_group
from atoll.experiment.config import RECIPES, RunConfig, make_config, read_config, resolve
from atoll.studies.baselines import BASELINES, as_trained

PAPERS = ("fedath", "fedaux", "fediih", "fedtad", "gcfl")
STRICT = "strict"
TUNED = RECIPES / "tuned.toml"

PRINTED_METRICS = {"acc": "test_accuracy", "f1": "test_weighted_f1", "auc": "test_auc"}
"""Published metrics, and our names for them."""
AVERAGE = "avg"
GAINS = ("min_gain", "ratio_improved")  # metrics of the clients' gains over the paper's baseline

Options = dict[str, Any]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A part of a recipe. Unknown keys are errors."""


class DataRecipe(_Part, frozen=True):
    """Atoll's name of a paper's data set, its options, and options by number of clients."""

    data: str = ""
    run: Options = {}
    ratios: tuple[float, float, float] | None = None
    with_clients: dict[str, Options] = {}  # under the paper's protocol


class SettingRecipe(_Part, frozen=True):
    """Options of a setting, and the name of a file with more options.

    Under `strict`, only the budget and the hyper-parameters of `run` apply, and the options in
    `strict` are added.
    """

    run: Options = {}
    strict: Options = {}
    file: str = ""


class MethodRecipe(_Part, frozen=True):
    """Options of a method: general, only under the paper's protocol, or with a setting.

    A method without runs has a reason instead. With `settings_of_file`, the hyper-parameters of the
    setting's file apply, which belong to one method. `tuned` names a search (`PaperRecipe.search`),
    whose result for the data set applies.
    """

    run: Options = {}
    paper_only: Options = {}
    with_: dict[str, Options] = msgspec.field(default={}, name="with")
    paper_only_with: dict[str, Options] = {}  # by the setting or the data set
    settings_of_file: bool = False
    tuned: str = ""
    reason: str = ""
    note: str = ""


class Variant(_Part, frozen=True):
    """One position on an axis of a figure. `beside` names one more data set, of another client."""

    label: str | float | int
    run: Options = {}
    data: str = ""
    beside: str = ""
    methods: tuple[str, ...] = ()


class TableRecipe(_Part, frozen=True):
    """The content of a table, or why it has no runs, and additional columns next to the verdict."""

    shows: str
    reason: str = ""
    from_data: bool = False  # computed from the data, without runs
    last_round: bool = False  # in addition to the selected round
    draws: tuple[int, ...] = ()  # further seeds of the data, if the paper does not publish its seed


class FigureRecipe(_Part, frozen=True):
    """The content of a figure and the way to draw it from its runs, or why it is not drawn."""

    shows: str
    reason: str = ""
    draw: str = ""
    datasets: tuple[str, ...] = ()
    setting: str = ""
    clients: tuple[int, ...] = ()
    methods: tuple[str, ...] = ()
    x_name: str = ""
    x: tuple[Variant, ...] = (Variant(label=""),)
    y_name: str = ""
    y: tuple[Variant, ...] = (Variant(label=""),)
    note: str = ""


class SearchRecipe(_Part, frozen=True):
    """A search for a paper's tuned settings. Each grid starts from the previous grid's choice."""

    stages: tuple[dict[str, tuple[Value, ...]], ...]
    clients: int = 10


class Change(_Part, frozen=True):
    """A change to a recipe, with its source. Empty `methods` or `tables` apply to all."""

    what: str
    source: str
    methods: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()


class PaperRecipe(_Part, frozen=True):
    """A paper's whole recipe. `paper_only` applies to all methods, under the paper's protocol."""

    title: str
    protocol: str
    data: dict[str, DataRecipe]
    settings: dict[str, SettingRecipe]
    methods: dict[str, MethodRecipe]
    tables: dict[str, TableRecipe]
    figures: dict[str, FigureRecipe]
    paper_only: Options = {}
    search: dict[str, SearchRecipe] = {}
    changes: tuple[Change, ...] = ()
    printed_in: str = "percent"  # or "shares", from 0 to 1
    spread: str = "of runs"  # or "of clients": the meaning of a published deviation
    printed_runs: int = 1  # number of runs per published mean
    baseline: str = ""


@dataclass(frozen=True)
class Printed:
    """One number of a table, with the paper's names."""

    table: str
    dataset: str
    setting: str  # the partition and the varied quantities, joined by ";"
    clients: str  # a number, or "all"
    method: str
    metric: str  # "acc", "f1", "auc", "avg", "min_gain" or "ratio_improved"
    value: float  # in percent; for "ratio_improved" a number of clients
    std: float | None

    @property
    def problem(self) -> tuple[str, str, str]:
        return self.dataset, self.setting, self.clients


@dataclass(frozen=True)
class Paper:
    """A paper's recipe and its published numbers."""

    name: str
    recipe: PaperRecipe
    printed: tuple[Printed, ...]

    def cells(self, table: str) -> list[Printed]:
        """Return the published numbers of one table."""
        return [one for one in self.printed if one.table == table]

    def config(
        self,
        dataset: str,
        setting: str,
        method: str,
        *,
        clients: int | None,
        rules: str = "",
        variants: tuple[Variant, ...] = (),
        tuned: bool = True,
        **more: Any,
    ) -> RunConfig:
        """Return the configuration of a cell's run, by the paper's names.

        A setting has parts joined by ";". If `clients` is None, the protocol chooses their number.
        `rules` is `strict` or the paper's protocol, also with another data seed ("fedath:2022").
        `variants` are positions on a figure's axes. `tuned` applies the result of a search
        (`choice`). `more` are seeds, rounds, data_root and device.
        """
        own, names, data = self._method(method), setting.split(";"), self.data_name(dataset)
        parts = [self.recipe.settings[part] for part in names if part]
        options: Options = {"data": data, "protocol": self.recipe.protocol, "clients": clients}
        options["ratios"] = self.recipe.data[dataset].ratios
        options["objects"] = ("method",) if own.run.get("method") in BASELINES else ()
        layers = [*(part.run for part in parts), self.recipe.data[dataset].run]
        layers += [_of_file(part.file, data, own.settings_of_file) for part in parts]
        layers += [self.choice(dataset, method) if tuned else {}]
        layers += [own.run, *(own.with_.get(part, {}) for part in names)]
        layers += [variant.run for variant in variants]
        for layer in layers:
            options = _merged(options, layer)
        for variant in variants:
            options["data"] += f"+{variant.beside.lower()}" if variant.beside else ""
            options["data"] += f":{variant.data}" if variant.data else ""
        if sets_of_group(plain_name(options["data"])):
            options["clients"] = None  # one client per set
        options = {key: value for key, value in options.items() if value is not None}
        if rules != STRICT:
            draw = rules.partition(":")[2]
            layers = [self.recipe.paper_only, own.paper_only]
            layers += [self.recipe.data[dataset].with_clients.get(str(options.get("clients")), {})]
            layers += [own.paper_only_with.get(part, {}) for part in (*names, dataset)]
            for layer in (*layers, {"data_seed": int(draw)} if draw.isdigit() else {}):
                options = _merged(options, layer)
            return make_config(**{**options, **more})
        division = {key: value for part in parts for key, value in part.strict.items()}
        # A figure varies the partition under both protocols.
        division |= {k: v for one in variants for k, v in one.run.items() if k == "partition"}
        return _under_strict(make_config(**options), division, more)

    def choice(self, dataset: str, method: str) -> Options:
        """Return the tuned hyper-parameters of a method for a data set, if they exist."""
        search = self._method(method).tuned
        found = _tuned().get(self.name, {}).get(search, {}).get(dataset, {})
        ended = found and found["stages"] == len(self.recipe.search[search].stages)
        return {"set": found["set"]} if ended else {}

    def note(self, dataset: str, method: str) -> str:
        """Return how our runs of a method depart from the paper, or ""."""
        own = self._method(method)
        untuned = own.tuned and not self.choice(dataset, method)
        lacks = f"not tuned for {dataset} (python -m bench tune-tables); it uses its defaults."
        return " ".join(filter(None, (own.note, lacks if untuned else "")))

    def _method(self, name: str) -> MethodRecipe:
        check_name(f"method of {self.name}'s recipe", name, self.recipe.methods)
        return self.recipe.methods[name]

    def why_not(self, dataset: str, method: str, root: str | None) -> str:
        """Return why a cell has no run here, or ""."""
        return self._method(method).reason or absent(self.data_name(dataset), root)

    def data_name(self, dataset: str) -> str:
        """Return Atoll's name of the paper's data set."""
        return self.recipe.data[dataset].data or dataset.lower()


@cache
def read_paper(name: str) -> Paper:
    """Read a paper by the name of its method."""
    if name.lower() not in PAPERS:
        raise unknown("paper", name, PAPERS)
    name = name.lower()
    raw = tomllib.loads((RECIPES / f"{name}.toml").read_text(encoding="utf-8"))
    recipe = msgspec.convert(raw, PaperRecipe)
    with (RECIPES / "printed" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        scale = 100.0 if recipe.printed_in == "shares" else 1.0
        printed = tuple(_printed(row, scale) for row in csv.DictReader(file))
    return Paper(name, recipe, printed)


def _printed(row: dict[str, str], scale: float) -> Printed:
    count, slash, _ = row["mean"].partition("/")
    value = float(count) if slash else round(scale * float(row["mean"]), 6)  # 64.74, not 64.7399…
    std = round(scale * float(row["std"]), 6) if row["std"] else None
    named = {key: row[key] for key in ("table", "dataset", "setting", "clients", "method")}
    return Printed(**named, metric=row["metric"], value=value, std=std)


def absent(data: str, root: str | None) -> str:
    """Return a sentence if the data are missing, otherwise ""."""
    name = plain_name(data).lower()
    lacking = [one for one in sets_of_group(name) or (name,) if not registry.is_present(one, root)]
    if not lacking:
        return ""
    names = [registry.dataset_info(one).name for one in lacking]
    where = f"{'is' if len(names) == 1 else 'are'} not in {registry.data_root(root)}"
    return f"{', '.join(names)} {where}; get with: atoll data fetch {' '.join(names)}"


@cache
def _tuned() -> dict[str, dict[str, dict[str, Options]]]:
    """Read the choices of `python -m bench tune-tables`, by paper, search and data set."""
    return tomllib.loads(TUNED.read_text(encoding="utf-8"))


@cache
def _of_file(template: str, data: str, settings: bool) -> Options:
    """Return a setting's options from its file, with the hyper-parameters only if `settings`."""
    if not template:
        return {}
    raw = read_config(RECIPES / template.format(data=data))
    names = ("rounds", "epochs", "ratios", "allow", *(["set"] if settings else []))
    return {name: raw[name] for name in names if name in raw}


def _merged(first: Options, second: Options) -> Options:
    """Merge options. The second takes precedence, and hyper-parameters merge one by one."""
    both = {**first, **second}
    if "set" in first and "set" in second:
        both["set"] = {**first["set"], **second["set"]}
    return both


def _under_strict(given: RunConfig, division: Options, more: Options) -> RunConfig:
    """Return the same method, hyper-parameters and budget under the rules of `strict`."""
    config, _ = resolve(as_trained(given))
    names = ("data", "rounds", "epochs", "fraction", "set", "batch_size")
    options: Options = {name: getattr(config, name) for name in names}
    options |= {"method": given.method, "objects": given.objects}
    grouped = sets_of_group(plain_name(config.data))
    options["clients"] = None if grouped else given.clients or config.clients
    options |= {"ratios": given.ratios, "protocol": STRICT, **division}
    return make_config(**{**{k: v for k, v in options.items() if v is not None}, **more})


def find_item(paper: Paper, text: str) -> tuple[str, str]:
    """Parse the name of a table or figure into kind and number (1, table1, T1, fig4, F4)."""
    word = text.lower().replace(" ", "").replace(".", "").replace("-", "")
    number = word.lstrip(string.ascii_lowercase)
    short = word.removesuffix(number)
    kinds = dict.fromkeys(("", "t", "tab", "table"), "table")
    kinds |= dict.fromkeys(("f", "fig", "figure"), "figure")
    tables, figures = paper.recipe.tables, paper.recipe.figures
    kind = kinds.get(short)
    if kind and number in (tables if kind == "table" else figures):
        return kind, number
    if not short and number and number in figures:
        raise ConfigError(f"{paper.name} has no table {number}; did you mean 'fig{number}'?")
    names = [*(f"table{n}" for n in tables), *(f"fig{n}" for n in figures)]
    raise unknown(f"table or figure of {paper.name}", text, names)
