"""The papers' recipes: every printed number has a run that resolves, or says why it has none."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import msgspec
import pytest

from atoll.core.errors import ConfigError
from atoll.experiment.build import build_method
from atoll.experiment.config import resolve
from atoll.experiment.protocols import PROTOCOLS
from atoll.studies.reproduce.figures import ALONE, Figure
from atoll.studies.reproduce.recipes import (
    AVERAGE,
    GAINS,
    PAPERS,
    PRINTED_METRICS,
    RECIPES,
    STRICT,
    Variant,
    absent,
    find_item,
    read_paper,
)
from atoll.studies.reproduce.table import Wanted, averaged, named_run
from atoll.studies.study_run import cost_of

REPOSITORY = Path(__file__).resolve().parents[3]
PRINTED = {"fedath": 456, "fedaux": 72, "fediih": 852, "fedtad": 239, "gcfl": 78}


def test_all_1697_printed_numbers_are_here() -> None:
    assert {name: len(read_paper(name).printed) for name in PAPERS} == PRINTED
    assert sum(PRINTED.values()) == 1697


@pytest.mark.parametrize("name", PAPERS)
def test_every_printed_cell_has_a_run_or_says_why_not(name: str) -> None:
    paper = read_paper(name)
    seen, covered = set(), 0
    for one in paper.printed:
        assert not paper.recipe.tables[one.table].reason
        covered += 1
        if one.metric == AVERAGE:
            assert averaged(one, paper.cells(one.table))
            continue
        assert one.metric in (*PRINTED_METRICS, *GAINS)
        method = paper.recipe.methods[one.method]
        if method.reason:
            assert method.reason.endswith(".")
            assert not method.run
            continue
        # Numbers of clients change nothing about names: one of them under both protocols.
        first = (one.dataset, one.setting, one.method) not in seen
        seen.add((one.dataset, one.setting, one.method))
        key = (one.dataset, one.setting, one.method, one.clients)
        if key in seen:
            continue
        seen.add(key)
        for rules in ("", STRICT) if first else ("",):
            asked = paper.config(
                one.dataset, one.setting, one.method, clients=int(one.clients), rules=rules
            )
            config, _ = resolve(asked)
            assert config.protocol == (rules or paper.recipe.protocol)
            assert config.clients == int(one.clients) or config.data in (
                "molecules",
                "biochem",
                "mix",
            )
    assert covered == PRINTED[name]


@pytest.mark.parametrize("name", PAPERS)
def test_every_table_and_figure_is_run_or_says_why_not(name: str, monkeypatch) -> None:
    for module in ("recipes", "figures"):  # as if all data were here
        monkeypatch.setattr(f"atoll.studies.reproduce.{module}.absent", lambda data, root: "")
    paper = read_paper(name)
    for number, table in paper.recipe.tables.items():
        assert bool(table.reason) != bool(paper.cells(number))
        assert not table.reason or table.reason.endswith(".")
    for number, figure in paper.recipe.figures.items():
        assert bool(figure.reason) != bool(figure.draw)
        if figure.reason:
            assert figure.reason.endswith(".")
            continue
        for rules in ("", STRICT):
            points, reasons = Figure(paper, number, rules, Wanted(seeds=1)).plan()
            assert points
            assert not reasons
            # Every method and every place on the axes once.
            kinds = {(p.method, p.x.label, p.y.label)[i]: p for p in points for i in range(3)}
            for point in kinds.values():
                assert figure.draw in ALONE or cost_of(point.run.config) > 0


def test_numbers_of_tables_run_from_one_without_gaps() -> None:
    counts = {
        "fedath": (9, 7),
        "fedaux": (1, 0),
        "fediih": (5, 4),
        "fedtad": (4, 5),
        "gcfl": (5, 8),
    }
    for name, (tables, figures) in counts.items():
        recipe = read_paper(name).recipe
        assert list(recipe.tables) == [str(n) for n in range(1, tables + 1)]
        assert list(recipe.figures) == [str(n) for n in range(1, figures + 1)]
        assert recipe.protocol in PROTOCOLS


def test_printed_values_are_in_percent_and_clients_are_counted() -> None:
    def value(paper: str, table: str, *key: str) -> float:
        cells = [
            one for one in read_paper(paper).cells(table)
            if (one.dataset, one.clients, one.method, one.metric) == key
        ]  # fmt: skip
        assert len(cells) == 1
        return cells[0].value

    assert value("fedath", "1", "Cora", "10", "FedATH", "acc") == 77.90
    assert value("fediih", "3", "Minesweeper", "5", "FedIIH", "auc") == pytest.approx(74.3, abs=0.1)
    assert value("gcfl", "3", "NCI1", "30", "FedAvg", "acc") == pytest.approx(64.74)
    assert value("gcfl", "3", "NCI1", "30", "FedAvg", "min_gain") == pytest.approx(-13.33)
    assert value("gcfl", "3", "NCI1", "30", "FedAvg", "ratio_improved") == 14


def test_settings_are_those_of_the_results_pages() -> None:
    ath = read_paper("fedath").config("Cora", "louvain-nonoverlap", "FedATH", clients=15)
    config, rules = resolve(ath)
    chosen = read_paper("fedath").choice("Cora", "FedATH").get("set", {})
    assert config.set == {"lr": 1e-3, "preset": "paper", "hsic": "trace/N", **chosen}
    assert (rules.evaluate, config.rounds, config.epochs) == ("local", 100, 3)
    iih = read_paper("fediih")
    own = resolve(iih.config("Amazon-Photo", "metis-overlap", "FedIIH", clients=30))[0]
    assert (own.rounds, own.epochs, own.set["factors"], own.set["preset"]) == (
        200,
        2,
        10,
        "reference",
    )
    plain = resolve(iih.config("Amazon-Photo", "metis-overlap", "FedAvg", clients=30))[0]
    assert (plain.rounds, plain.epochs) == (200, 2)
    assert plain.set == {"hidden": 128, "weight_decay": 1e-6, "layers": 3, "head": "linear"}
    pub = iih.config("Cora", "metis-overlap", "FED-PUB", clients=10)
    method = build_method(resolve(pub)[0], features=10, classes=3)
    assert (method.tau, method.epochs, method.net.layers, method.net.hidden) == (5, 1, 3, 128)
    aux = read_paper("fedaux")
    for dataset, budget in (("Cora", (100, 1)), ("Photo", (200, 2))):
        for rules in ("", STRICT):
            own = aux.config(dataset, "metis-nonoverlap", "FedAux", clients=10, rules=rules)
            method = build_method(resolve(own)[0], features=10, classes=3)
            assert (own.rounds, method.epochs) == budget
            assert (method.score, method.sigma, method.alpha) == ("maxnorm", 1.0, 10.0)
            assert (method.net.layers, method.net.hidden) == (3, 256)
            assert method.optimizer.weight_decay == 1e-6
    arxiv = iih.config("ogbn-arxiv", "metis-nonoverlap", "Local", clients=5)
    assert arxiv.ratios == (0.05, 0.475, 0.475)


def test_recipes_follow_their_sources() -> None:
    """Network, budget, faults of public codes and seeds of the data, each as its source has it."""
    ath, tad, iih = (read_paper(name) for name in ("fedath", "fedtad", "fediih"))
    for paper, dataset in ((ath, "Photo"), (tad, "Cora")):
        own = paper.config(dataset, "louvain-nonoverlap", "FedAvg", clients=10)
        strict = paper.config(dataset, "louvain-nonoverlap", "FedAvg", clients=10, rules=STRICT)
        assert (own.compat, strict.compat) == (("dropout-at-eval",), ())
        assert strict.data_seed is None
    seeds = {
        (data, clients): ath.config(data, "louvain-nonoverlap", "FedAvg", clients=clients).data_seed
        for data in ("Cora", "PubMed")
        for clients in (10, 15)
    }
    assert seeds.pop(("Cora", 10)) == 2024
    assert set(seeds.values()) == {2022}
    ten = (Variant(label=10, run={"clients": 10}),)  # as on the axis of Fig. 6
    drawn = ath.config("Cora", "louvain-nonoverlap", "FedAvg", clients=None, variants=ten)
    assert drawn.data_seed == 2024
    other = ath.config("Cora", "louvain-nonoverlap", "FedAvg", clients=10, rules="fedath:2022")
    assert (other.data_seed, other.protocol) == (2022, "fedath")
    for name in ("Local", "FedAvg", "FedProx", "FedPer", "GCFL", "FedGNN"):
        config = resolve(iih.config("Cora", "metis-nonoverlap", name, clients=10))[0]
        net = build_method(config, features=10, classes=3).net
        assert (net.layers, net.head, net.hidden) == (3, "linear", 128)
    ada = iih.config("Cora", "metis-nonoverlap", "AdaFGL", clients=10)
    method = build_method(resolve(ada)[0], features=10, classes=3)
    assert (ada.rounds, method.federated_rounds, method.epochs) == (150, 100, 3)
    assert (ada.rounds - 100) * method.personal_epochs == 200
    assert method.optimizer.weight_decay == 5e-4
    strict = iih.config("Cora", "metis-nonoverlap", "AdaFGL", clients=10, rules=STRICT)
    assert (strict.rounds, strict.set["weight_decay"]) == (100, 1e-6)


@pytest.mark.parametrize(
    ("data", "setting", "rounds"),
    [("PROTEINS", "oneDS", 50), ("MOLECULES", "multiDS", 100), ("MOLECULES", "oneDS", 100)],
)
def test_self_training_is_as_long_as_in_the_public_code(data, setting, rounds) -> None:
    paper = read_paper("gcfl")
    for rules, wanted in (("", rounds), (STRICT, 200)):
        config = resolve(paper.config(data, setting, "self-train", clients=10, rules=rules))[0]
        assert config.rounds == wanted
    assert paper.config(data, setting, "self-train", clients=10, rounds=3).rounds == 3


def test_a_search_has_at_most_forty_trials_and_its_choice_enters_the_runs(monkeypatch) -> None:
    for name in PAPERS:
        recipe = read_paper(name).recipe
        for search in recipe.search.values():
            grids = [math.prod(map(len, stage.values())) for stage in search.stages]
            assert sum(grids) <= 40
        named = {method.tuned for method in recipe.methods.values()} - {""}
        assert named == set(recipe.search)
    paper, cell = read_paper("fedtad"), ("Cora", "louvain-nonoverlap")
    entry = {"set": {"lam_sem": 0.1, "hidden": 128}, "stages": 6}
    tuned = {"fedtad": {"FedTAD": {"Cora": entry, "CS": entry | {"stages": 5}}}}
    monkeypatch.setattr("atoll.studies.reproduce.recipes._tuned", lambda: tuned)
    assert paper.config(*cell, "FedTAD", clients=5).set == {"lam_sem": 0.1, "hidden": 128}
    assert paper.config(*cell, "FedTAD", clients=5, tuned=False).set == {}
    assert paper.config(*cell, "w/o L_sem", clients=5).set == {"lam_sem": 0, "hidden": 128}
    assert paper.config(*cell, "FedAvg", clients=5).set == {}
    assert not paper.note("Cora", "FedTAD")
    assert "not tuned for CS" in paper.note("CS", "FedTAD")  # a note of its row


def test_every_change_of_a_recipe_has_its_source() -> None:
    for name in PAPERS:
        paper = read_paper(name)
        for change in paper.recipe.changes:
            assert change.what
            assert change.source
            assert set(change.methods) <= set(paper.recipe.methods)
            assert set(change.tables) <= set(paper.recipe.tables)


def test_clients_of_a_single_class_are_accepted_where_the_paper_has_them() -> None:
    config = read_paper("fediih").config("Amazon-Photo", "metis-nonoverlap", "FedAvg", clients=20)
    assert config.allow == ("single-class",)
    # What is accepted changes no number, hence no name.
    strictly = msgspec.structs.replace(config, allow=())
    assert named_run(config, {}).name == named_run(strictly, {}).name


def test_strict_keeps_method_and_budget_and_changes_the_rules() -> None:
    paper = read_paper("gcfl")
    own = paper.config("PROTEINS", "oneDS", "GCFL", clients=10)
    strict = paper.config("PROTEINS", "oneDS", "GCFL", clients=10, rules=STRICT)
    assert own.compat == ("test-selection",)
    assert strict.compat == ()
    one, two = resolve(own)[0], resolve(strict)[0]
    assert (one.set, one.rounds, one.epochs) == (two.set, two.rounds, two.epochs)
    assert one.set["eps1"] == 0.03
    assert (two.protocol, two.evaluate, two.rounds) == ("strict", "deployed", 200)
    part = read_paper("fedtad").config(
        "Cora", "louvain-nonoverlap;participation=40%", "FedAvg", clients=20, rules=STRICT
    )
    assert (part.fraction, part.partition) == (0.4, "louvain")


def test_recipes_are_in_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["atoll"]
    package = RECIPES.parent
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    assert {path for path in RECIPES.rglob("*") if path.is_file()} <= shipped


@pytest.mark.parametrize(
    ("text", "found"),
    [("1", ("table", "1")), ("table1", ("table", "1")), ("T2", ("table", "2")),
     ("Table 3", ("table", "3")), ("fig4", ("figure", "4")), ("Fig. 4", ("figure", "4"))],
)  # fmt: skip
def test_names_of_tables_and_figures(text: str, found: tuple[str, str]) -> None:
    assert find_item(read_paper("fedath"), text) == found


@pytest.mark.parametrize(
    ("paper", "text", "sentence"),
    [("fedath", "tabel1", "did you mean 'table1'"), ("gcfl", "6", "did you mean 'fig6'"),
     ("fedath", "fig12", "choose one of: fig"), ("fedath", "x", "choose one of")],
)  # fmt: skip
def test_unknown_tables_get_a_suggestion(paper: str, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        find_item(read_paper(paper), text)
    with pytest.raises(ConfigError, match="did you mean 'fedath'"):
        read_paper("fedaht")


def test_absent_data_are_named_with_what_to_do(tmp_path: Path) -> None:
    sentence = absent("biochem", str(tmp_path))
    assert sentence.startswith("MUTAG, BZR")
    assert "atoll data fetch" in sentence
