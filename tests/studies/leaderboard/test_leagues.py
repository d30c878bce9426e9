"""The leagues are data: what they declare, which runs follow, and when a row counts as known."""

from __future__ import annotations

import math
from dataclasses import make_dataclass
from pathlib import Path

import msgspec
import pytest

from atoll.core.errors import ConfigError
from atoll.methods import METHODS, FedProx
from atoll.studies.leaderboard.leagues import Entry, Wanted, plan_league, read_leagues, tuned_run
from atoll.studies.leaderboard.rows import Row

SMALL = "lagoon:nodes=150"


@pytest.fixture
def everything_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.studies.leaderboard.leagues.absent", lambda data, root: "")


def labels(entries: list[Entry], **which: str) -> list[str]:
    chosen = [e.run.labels for e in entries if which.items() <= e.run.labels.items()]
    return [one["method"] for one in chosen]


def row(entry: Entry, recipe: str, mean: float | None = 0.5, seeds: int = 2) -> Row:
    about = {name: entry.run.labels[name] for name in ("league", "data", "partition", "method")}
    return Row(**about, mean=mean, seeds=seeds, recipe=recipe, command="atoll run")


def test_the_defaults_league_has_every_method_on_every_set(everything_here) -> None:
    entries, notes = plan_league("defaults", Wanted())
    assert labels(entries, data="cora", partition="louvain-10") == [*METHODS, "gcfl+"]
    seeds = {e.run.labels["partition"]: e.run.config.seeds for e in entries}
    assert seeds == {
        "louvain-10": 10, "metis-10": 5, "dirichlet-10": 5, "louvain-20": 5, "owners": 5,
        "graphs-10": 5,
    }  # fmt: skip
    assert not labels(entries, data="cornell", partition="louvain-20")
    assert labels(entries, data="cornell", partition="metis-10")
    parts = {e.run.labels["partition"] for e in entries if e.run.labels["data"] == "twitch"}
    assert parts == {"owners"}
    assert {(e.run.config.rounds, e.run.config.epochs) for e in entries} == {(100, 3)}
    able = [name for name, cls in METHODS.items() if "graph" in cls.tasks]
    assert labels(entries, data="NCI1") == [*able, "gcfl+"]
    assert "PROTEINS, NCI1, IMDB-BINARY" in notes[0]  # with the methods that classify only nodes
    assert len({entry.run.name for entry in entries}) == len(entries)


def test_users_accept_degenerate_clients_in_addition_to_the_partitions(everything_here) -> None:
    def allowed(**options: list[str]) -> dict[str, tuple[str, ...]]:
        wanted = Wanted(["reef"], ["texas"], ["louvain-10", "dirichlet-10"], options=options)
        entries, _ = plan_league("defaults", wanted)
        return {e.run.labels["partition"]: e.run.config.allow for e in entries}

    both = ("no-edge", "single-class")
    assert allowed() == {"louvain-10": (), "dirichlet-10": both}
    assert allowed(allow=["no-edge"]) == {"louvain-10": ("no-edge",), "dirichlet-10": both}


def test_sets_that_are_not_here_are_left_out_unless_they_are_asked_for(tmp_path: Path) -> None:
    wanted = Wanted(data=["cora"], options={"data_root": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"cora is not in .*; get with: atoll data fetch cora"):
        plan_league("defaults", wanted)
    entries, notes = plan_league("defaults", Wanted(options={"data_root": str(tmp_path)}))
    assert not entries
    assert len(notes) == len(read_leagues().sets)


def test_every_method_has_twelve_trials_on_seeds_that_are_not_scored(everything_here) -> None:
    entries, _ = plan_league("tuned", Wanted(data=["cora"]))
    assert labels(entries) == [*METHODS, "gcfl+"]
    for entry in entries:
        trials = [run.config for run in entry.trials.values()]
        assert len(trials) == 12
        assert not {s for t in trials for s in t.all_seeds} & set(entry.run.config.all_seeds)
    settings = {e.key[-1]: [t.config.set for t in e.trials.values()] for e in entries}
    assert settings["fedavg"][:3] == [
        {"net": "gcn", "hidden": 64, "lr": lr} for lr in (0.003, 0.01, 0.03)
    ]  # neighbours differ in the rate only, and train at once on a GPU
    assert settings["scaffold"][0]["lr"] == 0.15  # its own is 0.5
    assert settings["fedath"][0] == {"hidden": 32, "lr": 0.0003}  # it is bound to a GCN
    assert settings["gcfl+"][0]["preset"] == "plus"


def test_the_ablation_has_every_method_that_can_use_the_network_of_reef(everything_here) -> None:
    entries, notes = plan_league("ablation", Wanted(data=["cora"]))
    found = labels(entries)
    assert {"reef", "reef without the server's step", "fedavg:net=duo", "local:net=duo"} <= set(
        found
    )
    assert "reef:net=duo" not in found  # this is reef itself
    assert "fedath:net=duo" in notes[0]
    assert all(entry.run.config.seeds == 5 for entry in entries)
    by_label = {entry.key[-1]: entry.run.config for entry in entries}
    assert by_label["reef without the server's step"].set == {"aggregate": "mean"}
    assert by_label["only the GCN"].method == "fedopt"


def test_a_choice_of_methods_data_partitions_and_budget(everything_here) -> None:
    wanted = Wanted(
        methods=["gcfl+", "fedprox:mu=1"],
        data=["cora"],
        partitions=["metis-10"],
        seeds=3,
        options={"rounds": 2},
    )
    entries, _ = plan_league("defaults", wanted)
    assert labels(entries) == ["gcfl+", "fedprox:mu=1"]
    config = entries[0].run.config
    assert (config.method, config.set, config.partition) == ("gcfl", {"preset": "plus"}, "metis")
    assert (config.seeds, config.rounds, config.epochs) == (3, 2, 3)


def test_other_data_are_further_sets(everything_here, tmp_path: Path) -> None:
    recipe = read_leagues()
    for data, kind in ((SMALL, "owners"), ("my/folder", "owners"), ("texas", "nodes")):
        assert (recipe.set_of(data).kind, recipe.set_of(data).group) == (kind, "further sets")
    assert recipe.set_of("MUTAG").group == "sets of graphs"
    assert recipe.set_of("CORA").development
    parts = {e.run.labels["partition"] for e in plan_league("defaults", Wanted(data=["texas"]))[0]}
    assert parts == {"louvain-10", "metis-10", "dirichlet-10", "louvain-20"}
    (entry,), _ = plan_league("defaults", Wanted(data=[SMALL], methods=["fedavg"]))
    assert (entry.run.config.partition, entry.run.config.clients) == (None, None)
    own = Wanted(data=[SMALL], methods=["fedavg"], partitions=["louvain-10"])
    (entry,), _ = plan_league("defaults", own)
    assert entry.run.config.partition == "louvain"


@pytest.mark.parametrize(
    ("league", "given", "problem"),
    [
        ("best", {}, "unknown league 'best'"),
        ("defaults", {"data": ["coraa"]}, "unknown data set 'coraa'; did you mean 'cora'"),
        ("defaults", {"data": [SMALL], "methods": ["reff"]}, "unknown method 'reff'"),
        ("tuned", {"partitions": ["metis-10"]}, "unknown partition of the league 'metis-10'"),
        ("defaults", {"data": [SMALL], "methods": ["fedath:net=sage"]}, "cannot use net=sage"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(league: str, given: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        plan_league(league, Wanted(**given))
    assert len(str(error.value).splitlines()) == 1


def test_a_recipe_knows_every_default_but_not_the_place(monkeypatch) -> None:
    def recipe(**options: object) -> str:
        wanted = Wanted(data=[SMALL], methods=["fedprox"], options=options)
        return plan_league("defaults", wanted)[0][0].recipe

    first = recipe()
    assert recipe(data_root="/elsewhere") == recipe(device="cpu") == recipe(seeds=3) == first
    assert recipe(rounds=99) != first
    kind = METHODS["fedprox"].__annotations__["mu"]
    other = make_dataclass("FedProx", [("mu", kind, 0.5)], bases=(FedProx,), frozen=True)
    monkeypatch.setitem(METHODS, "fedprox", other)  # its default has changed since
    assert recipe() != first


def test_a_row_is_known_with_enough_seeds_and_the_same_recipe() -> None:
    (entry,), _ = plan_league("defaults", Wanted(data=[SMALL], methods=["fedavg"], seeds=2))
    known = row(entry, entry.recipe)
    assert known.key == entry.key
    assert entry.is_known({known.key: known})
    assert not entry.is_known({})
    few = msgspec.structs.replace(known, seeds=1)
    assert not entry.is_known({known.key: few})
    other = msgspec.structs.replace(known, recipe="00000000")
    assert not entry.is_known({known.key: other})


def test_the_best_trial_by_validation_is_run_and_the_first_of_equals(everything_here) -> None:
    (entry,), _ = plan_league("tuned", Wanted(data=["cora"], methods=["fedavg"]))
    means: list[float | None] = [0.4, None, 0.7, 0.7, *[0.1] * 8]
    pairs = zip(entry.trials, means, strict=True)
    rows = {(*one.key, one.recipe): one for one in (row(entry, *pair) for pair in pairs)}
    assert tuned_run(entry, dict(list(rows.items())[:-1])) is None  # a trial lacks
    chosen = tuned_run(entry, rows)
    assert chosen is not None
    assert chosen.config.set == {"net": "gcn", "hidden": 64, "lr": 0.03}
    assert (chosen.config.seed, chosen.config.seeds) == (0, 10)
    lost = {key: msgspec.structs.replace(one, mean=None) for key, one in rows.items()}
    assert tuned_run(entry, lost) is not None
    assert (
        math.prod(len(values) for values in read_leagues().leagues["tuned"].grids[0].values()) == 12
    )
