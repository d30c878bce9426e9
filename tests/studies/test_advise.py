"""The race of `atoll advise`: its inputs, its plan and its recommendations."""

from __future__ import annotations

import shlex

import numpy as np
import pytest

from atoll.core.errors import ConfigError, DataError
from atoll.data.archive import save_federation
from atoll.data.divide import federate
from atoll.data.source import GraphGroup
from atoll.experiment.config import make_config
from atoll.experiment.problem import Problem
from atoll.studies import advise as study
from atoll.studies.advise import REFERENCES, advise, choose, gains_of, halved, look, plan
from tests.data.test_archive import graph_set

BROKEN = "fedprox:optimizer=sgd,lr=9e5,mu=1e9"
TINY = {"data": "lagoon:nodes=200", "clients": 2, "rounds": 2}


def test_a_race_sees_no_test_node_and_halves_the_validation_nodes() -> None:
    problem = Problem.of(make_config(**TINY))
    whole = problem.federation(0)
    first, second = (halved(problem, 0, swapped=way).federation for way in (False, True))
    for graph, one, two in zip(whole.graphs, first.graphs, second.graphs, strict=True):
        assert not one.y[graph.test > 0].any()  # labels are hidden, and have no role
        assert not (graph.test * (one.train + one.val + one.test)).any()
        assert (one.val + one.test == graph.val).all()
        assert one.val.sum() > 0
        assert one.test.sum() > 0
        assert (one.val == two.test).all()
        assert (one.test == two.val).all()
        assert (one.train == graph.train).all()
    scored = [_scored(problem, seed, swapped=seed > 1) for seed in range(4)]
    assert not (scored[0] | scored[1]) & (scored[2] | scored[3])  # of other seeds, other nodes
    assert scored[0] != scored[1]


def _scored(problem: Problem, seed: int, *, swapped: bool) -> set[int]:
    graphs = halved(problem, seed, swapped=swapped).federation.graphs
    return {int(node) for graph in graphs for node in graph.ids[graph.test > 0]}


def test_clients_that_share_a_node_agree_on_its_half() -> None:
    options = TINY | {"partition": "metis-overlap", "clients": 10}
    graphs = halved(Problem.of(make_config(**options)), 0, swapped=False).federation.graphs
    halves: dict[int, set[tuple[float, float]]] = {}
    for graph in graphs:
        for node, *roles in zip(graph.ids, graph.val, graph.test, strict=True):
            halves.setdefault(int(node), set()).add((float(roles[0]), float(roles[1])))
    assert len(halves) < sum(graph.num_nodes for graph in graphs)
    assert all(len(found) == 1 for found in halves.values())


def test_data_without_validation_nodes_are_refused() -> None:
    with pytest.raises(DataError, match="too few validation nodes to choose a method"):
        advise(**TINY, ratios=(0.5, 0.0, 0.5))


def test_the_plan_fits_into_the_time() -> None:
    costs = {"local": (1.0, 0.1), "fedavg": (1.0, 0.1), "reef": (1.0, 0.8)}
    # Seeds: 3 of all, 2 x 2 of the dearer half, 5 x (reef, local, fedavg).
    setup, per_round = 3 + 4 + 15, 1.0 + 2 * 0.9 + 5 * 1.0
    assert plan(costs, 100, setup + 40 * per_round + 0.1, 3) == (40, 1.0)
    assert plan(costs, 100, 2 * (setup + 100 * per_round), 3) == pytest.approx((100, 2.0))
    assert plan(costs, 100, 1e6, 3) == (100, study.MOST)
    with pytest.raises(ConfigError, match=r"1 minutes are too few for 10 rounds .* --minutes 2"):
        plan(costs, 100, 60.0, 1)


LOCAL = np.array([0.70, 0.72, 0.71])
NOISE = np.array([0.001, -0.001, 0.0])


@pytest.mark.parametrize(
    ("fedavg", "reef", "choice"),
    [
        (LOCAL + 0.02 + NOISE, LOCAL + 0.05 + NOISE, "reef"),
        (LOCAL + 0.02 + NOISE, LOCAL + 0.021 + 9 * NOISE, "fedavg"),  # too thin
        (LOCAL - 0.02 + NOISE, LOCAL + 0.05 + NOISE, "reef"),  # only plain federation hurts
        (LOCAL - 0.02 + NOISE, LOCAL - 0.01 + NOISE, "local"),
        (LOCAL, LOCAL, "local"),
        (LOCAL, LOCAL + 0.03 + 90 * NOISE, "reef"),  # unsure, but the best guess
        (LOCAL, LOCAL + 0.009 + 90 * NOISE, "local"),
    ],
)
def test_the_winner_must_gain_a_point_or_beat_the_better_reference_beyond_noise(
    fedavg, reef, choice
) -> None:
    gains = gains_of("reef", {"local": LOCAL, "fedavg": fedavg, "reef": reef})
    assert [(one.name, one.against) for one in gains] == [
        *(("reef", "local"), ("reef", "fedavg"), ("fedavg", "local")),
    ]
    assert choose("reef", gains) == choice
    assert gains[0].difference == pytest.approx(float((reef - LOCAL).mean()))


def test_a_race_ends_with_a_command_and_its_estimate_has_fresh_seeds(monkeypatch) -> None:
    played = []
    plain = study.run_study

    def noted(folder, runs, **more):
        played.extend((run.name, run.config.seed, run.config.seeds) for run in runs)
        return plain(folder, runs, **more)

    monkeypatch.setattr(study, "run_study", noted)
    found = advise(["fedprox:mu=0.1", BROKEN, "reef"], minutes=0.3, **TINY)
    of = {row["method"]: row for row in found.race}
    assert list(of) == ["local", "fedavg", "fedprox:mu=0.1", BROKEN, "reef"]
    assert of[BROKEN]["state"].startswith("excluded: client ")
    longest = [row for row in of.values() if row.get("seeds") == of[found.winner]["seeds"]]
    assert of[found.winner]["score"] == max(row["score"] for row in longest)
    raced = {s for name, start, n in played if name[:5] != "fresh" for s in range(start, start + n)}
    fresh = {s for name, start, n in played if name[:5] == "fresh" for s in range(start, start + n)}
    assert not raced & fresh
    assert len(fresh) >= study.FRESH[0]
    assert all(test.pairs == len(fresh) for test in found.gains)
    assert found.choice in (*REFERENCES, found.winner)
    words = shlex.split(found.command)
    assert words[:2] == ["atoll", "run"]
    assert words[3:7] == ["--data", "lagoon:nodes=200", "--clients", "2"]
    assert found.settings["optimizer"]["lr"] > 0
    assert found.looks["clients"] == 2
    assert 0 < found.looks["homophily"] <= 1
    assert found.notes == ()


def test_sets_of_graphs_race_with_the_methods_that_can(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(study, "MOST", 1)
    group = GraphGroup("pair", (graph_set("few", 3, 2, 90), graph_set("many", 9, 3, 90)))
    file = save_federation(federate(group, batch_size=32), tmp_path / "pair.atoll")
    found = advise(["fedprox", "reef"], data=str(file), rounds=1, epochs=1, minutes=0.3)
    of = {row["method"]: row["state"] for row in found.race}
    assert of["reef"] == "excluded: it does not classify graphs"
    assert of["fedprox"] in ("stopped", "won")
    assert found.looks["items"] == "graphs"
    assert "homophily" not in found.looks


def test_seeds_that_share_their_data_are_noted() -> None:
    found = advise(["local"], minutes=0.3, data_seed=3, **TINY)
    assert "cover only the randomness of training" in found.notes[0]


def test_homophily_is_measured_without_the_labels_of_test_nodes() -> None:
    problem = Problem.of(make_config(**TINY, ratios=(0.2, 0.4, 0.4)))
    blind = look(halved(problem, 0, swapped=False).federation)
    whole = look(problem.federation(0))
    assert blind["homophily"] != whole["homophily"]
    assert abs(blind["homophily"] - whole["homophily"]) < 0.2


@pytest.mark.parametrize(("spare", "more"), [(0.0, True), (1e9, False)])
def test_further_methods_take_part_while_there_is_time(monkeypatch, spare, more) -> None:
    monkeypatch.setattr(study, "CANDIDATES", ("fedprox",))
    monkeypatch.setattr(study, "MORE", ("fedper",))
    monkeypatch.setattr(study, "SPARE", spare)
    found = advise(minutes=0.3, **TINY)
    assert [row["method"] for row in found.race] == [
        *("local", "fedavg", "fedprox"), *(["fedper"] if more else []),
    ]  # fmt: skip
    assert all("score" in row for row in found.race)
