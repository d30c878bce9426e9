"""A problem is resolved once, runs share its federations, and single-class clients are named."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import atoll
from atoll.cli.app import main
from atoll.core.errors import ConfigError, DataError
from atoll.core.tree import named_leaves, num_bytes
from atoll.data.archive import load_federation, save_federation
from atoll.data.cache import Cache
from atoll.experiment.config import make_config
from atoll.experiment.problem import (
    CONFIG,
    TRAINING,
    Divide,
    Division,
    FederationCache,
    Problem,
    nearly_single_class,
    uneven_features,
)
from atoll.experiment.run import RunPlan
from tests.experiment.own_graphs import write_own
from tests.experiment.test_run import rings


def test_features_of_different_scale_are_warned_of():
    clients = atoll.partition(atoll.load("lagoon:nodes=60", clients=2))
    small = [torch.tensor([[0.5, 2.0, 0.0]]).repeat(g.num_nodes, 1) for g in clients.graphs]
    pairs = zip(clients.graphs, small, strict=True)
    even = replace(clients, graphs=tuple(replace(graph, x=x) for graph, x in pairs))
    assert uneven_features(even) == []
    scale = torch.tensor([1.0, 4000.0, 1.0])
    uneven = replace(even, graphs=tuple(replace(g, x=g.x * scale) for g in even.graphs))
    (said,) = uneven_features(uneven)
    assert said.startswith("feature columns differ in scale by 2e4, so that the small ones hardly")
    assert uneven_features(clients) == []  # words are 0 or 1


def test_clients_of_one_class_are_pointed_out():
    mixed = atoll.partition(atoll.load("lagoon:nodes=600"), "random", clients=2)
    assert nearly_single_class(mixed) == []
    source = atoll.load("lagoon:nodes=600,classes=2")
    skewed = atoll.partition(source, "dirichlet:alpha=0.01", clients=2, allow=["single-class"])
    (note,) = nearly_single_class(skewed)
    assert "one class dominates" in note
    assert "% of its nodes on average; compare accuracies with that number" in note
    (note,) = nearly_single_class(skewed, "average_precision", 0)
    labels = torch.cat([graph.y for graph in skewed.graphs])
    share = f"{100 * float((labels == 0).float().mean()):.2g} %"
    assert note.endswith(f"average precision of {share}, the positive class's share")
    assert nearly_single_class(skewed, "auc")[0].endswith("guessing has an AUC of 50 %")
    assert nearly_single_class(skewed, "f1")[0].endswith("is about accuracy, not about F1")


@pytest.mark.parametrize("command", [["run", "--rounds", "1", "--out", "run"], ["inspect"]])
def test_run_and_inspect_warn(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["--data", "lagoon:nodes=600,classes=2", "--allow", "single-class", "--clients", "2"]
    skewed, mixed = (["--partition", name] for name in ("dirichlet:alpha=0.01", "random"))
    done = CliRunner().invoke(main, [*command, *data, *skewed])
    assert done.exit_code == 0, done.output
    assert "one class dominates" in " ".join(done.output.split())
    command = [word.replace("run", "other") if word == "run" and i else word
               for i, word in enumerate(command)]  # fmt: skip
    done = CliRunner().invoke(main, [*command, *data, *mixed])
    assert done.exit_code == 0, done.output
    assert "single-class" not in done.output


def test_a_score_with_private_layers_is_called_personalised(tmp_path):
    result = atoll.run("fedavg", rings(200, 3, 0), clients=3, rounds=1, out=tmp_path / "run")
    assert result.scored == "personalised"
    assert "personalised_test_accuracy" in result.metrics()
    assert atoll.read_result(tmp_path / "run").summary()["scored"] == "personalised"


def test_a_problem_is_resolved_once_and_completed_by_its_data(tmp_path):
    problem = Problem.of(make_config(data=write_own(tmp_path)))
    assert problem.given.partition is None
    assert problem.config.partition == "louvain"  # nothing is loaded yet
    made = problem.divide(0)
    assert made.config.partition == "column:owner"
    assert len(problem.federation(0)) == 2


def test_a_protocol_may_fix_the_seed_of_the_data():
    assert Problem.of(make_config()).seed_of_data(3) == 3
    fixed = Problem.of(make_config(protocol="fedtad"))
    assert fixed.seed_of_data(3) == fixed.seed_of_data(4) == 2024
    for rules in ("strict", "fedtad"):
        chosen = Problem.of(make_config(protocol=rules, data_seed=2022))
        assert chosen.seed_of_data(3) == chosen.seed_of_data(4) == 2022
        assert chosen.config.data_seed == 2022


def test_a_finished_federation_is_its_own_problem():
    federation = atoll.partition(atoll.load("lagoon:nodes=300"), "random", clients=2)
    problem = Problem.of(make_config(objects=["data"]), federation)
    assert problem.federation(5) is federation
    assert problem.divide(5).config.partition == "random"


SMALL = {"data": "lagoon:nodes=150", "clients": 3, "rounds": 2}


def get(federations: Divide, seed: int = 0, **options: Any) -> Division:
    return federations(Problem.of(make_config(**{**SMALL, **options})), seed)


def test_another_method_finds_the_same_clients_and_keeps_its_own_configuration() -> None:
    shared = FederationCache()
    first = get(shared, method="fedavg", set={"hidden": 8})
    second = get(shared, method="fedprox", rounds=5, seeds=1, set={"mu": 1.0}, device="cpu")
    assert second.federation is first.federation
    assert shared.made == 1
    assert second.config == get(Problem.divide, method="fedprox", rounds=5, set={"mu": 1.0},
                            device="cpu").config  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"clients": 2}, {"data": "lagoon:nodes=160"}, {"partition": "random"}, {"split": "random"},
        {"protocol": "fedtad"}, {"ratios": (0.5, 0.2, 0.3)}, {"allow": ("no-edge",)}, {"seed": 1},
        {"data_root": "elsewhere"},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_decides_the_clients_tells_them_apart(options: dict[str, Any]) -> None:
    shared = FederationCache()
    first = get(shared).federation
    other = get(shared, **options).federation
    assert shared.made == 2
    assert other is not first
    plain = get(Problem.divide, **options).federation
    pairs = zip(plain.graphs, other.graphs, strict=True)
    assert all(torch.equal(a.ids, b.ids) and torch.equal(a.train, b.train) for a, b in pairs)


def test_a_protocol_with_fixed_data_makes_them_once_for_all_seeds() -> None:
    shared = FederationCache()
    options = {"data": "lagoon:nodes=150", "protocol": "fedtad", "partition": "column:owner"}
    assert get(shared, 0, **options).federation is get(shared, 1, **options).federation
    assert shared.made == 1


def test_only_what_trains_is_left_out_of_the_key() -> None:
    unknown = set(TRAINING) - set(make_config().__struct_fields__)
    assert not unknown


def test_full_memory_lets_other_data_go_but_keeps_the_first_seeds() -> None:
    size = sum(num_bytes(graph) for graph in get(Problem.divide).federation.graphs)
    shared = FederationCache(limit=int(2.5 * size))
    for _ in range(2):
        for seed in range(3):  # the third does not fit, and the first two stay
            get(shared, seed)
    assert shared.made == 4
    get(shared, 0, clients=2)  # makes room for itself
    get(shared, 0, clients=2)
    assert shared.made == 5
    nothing = FederationCache(limit=0)
    get(nothing)
    get(nothing)
    assert nothing.made == 2


def test_shared_clients_give_the_numbers_of_a_run_of_its_own() -> None:
    shared = FederationCache()
    for method in ("fedath", "fedgta"):
        config = make_config(**SMALL, method=method, seeds=2)
        alone, together = RunPlan(config).run(), RunPlan(config, divide=shared).run()
        assert together.metrics() == alone.metrics()
        assert together.config == alone.config
    assert shared.made == 2


def test_an_object_is_found_again_and_another_one_is_not() -> None:
    shared = FederationCache()
    one, two = (atoll.load("lagoon:nodes=150", clients=3, seed=seed) for seed in (0, 1))
    config = make_config(objects=["data"], data="lagoon")
    first = shared(Problem.of(config, one), 0)
    assert shared(Problem.of(config, one), 0).federation is first.federation
    assert shared(Problem.of(config, two), 0).federation is not first.federation
    assert shared.made == 2


def test_a_cache_may_change_what_it_keeps() -> None:
    def only_two(problem: Problem, seed: int) -> Division:
        made = problem.divide(seed)
        return replace(made, federation=made.federation.reordered([1, 0]))

    shared = FederationCache(make=only_two)
    assert get(shared).federation.numbers == (1, 0)
    smaller = shared.with_limit(0)
    assert get(smaller).federation.numbers == (1, 0)
    assert (smaller.limit, shared.limit > 0) == (0, True)


def test_another_process_gets_an_empty_cache() -> None:
    shared = FederationCache(limit=1 << 30)
    get(shared)
    other = pickle.loads(pickle.dumps(shared))
    assert (other.limit, other.made) == (1 << 30, 0)
    get(other)
    assert other.made == 1


@pytest.mark.parametrize(("own", "edges"), [({}, 228), ({"directed": "true"}, 114)])
def test_directions_reach_the_clients(tmp_path, own: dict[str, str], edges: int) -> None:
    data = write_own(tmp_path)
    federation = Problem.of(make_config(data=data, own=own)).federation(0)
    assert sum(graph.edges.shape[1] for graph in federation.graphs) == edges
    parts = atoll.partition(atoll.load(data, own=own)).graphs
    assert [graph.edges.tolist() for graph in parts] == [
        g.edges.tolist() for g in federation.graphs
    ]
    forward = {(int(u), int(v)) for graph in federation.graphs for u, v in graph.edges.T}
    assert ((1, 0) in forward) == (edges == 228)


@pytest.mark.parametrize("partition", ["louvain", "metis", "random", "dirichlet:alpha=1"])
def test_every_partition_takes_directed_edges(tmp_path, partition: str) -> None:
    config = make_config(
        data=write_own(tmp_path),
        own={"directed": "true"},
        partition=partition,
        clients=2,
        allow=["single-class"],
    )
    federation = Problem.of(config).federation(0)
    pairs = [tuple(e) for graph in federation.graphs for e in graph.ids[graph.edges].T.tolist()]
    assert all((v - u) % 60 in (1, 2) for u, v in pairs)


def test_parallel_edges_are_kept_as_counts(tmp_path) -> None:
    data = Path(write_own(tmp_path))
    edges = (data / "edges.csv").read_text()
    (data / "edges.csv").write_text(f"{edges}\n0,1\n0,1")
    config = make_config(data=str(data), own={"directed": "true", "duplicate_edges": "count"})
    (first, _) = Problem.of(config).federation(0).graphs
    weights = {
        tuple(e): float(w) for e, w in zip(first.edges.T.tolist(), first.edge_weight, strict=True)
    }
    assert weights[0, 1] == 3
    assert set(weights.values()) == {1, 3}


def test_clients_of_own_tables_measure_together_or_alone(tmp_path) -> None:
    data = write_own(tmp_path)
    together = Problem.of(make_config(data=data)).federation(0)
    alone = Problem.of(make_config(data=data, encoder="local")).federation(0)
    pooled = Problem.of(make_config(data=data, encoder="pooled")).federation(0)
    torch.testing.assert_close(together.graphs[0].x, pooled.graphs[0].x)
    means = [graph.x[:, 0].mean().abs() for graph in alone.graphs]
    torch.testing.assert_close(torch.stack(means), torch.zeros(2), atol=1e-6, rtol=0)
    with pytest.raises(ConfigError, match="--encoder local needs clients that the tables name"):
        Problem.of(make_config(data=data, encoder="local", partition="louvain")).federation(0)
    with pytest.raises(
        ConfigError, match="unknown value of --encoder 'lokal'; did you mean 'local'"
    ):
        Problem.of(make_config(data=data, encoder="lokal"))
    private = make_config(data=data, dp="clip=1,noise=1")
    with pytest.raises(ConfigError, match="a private run tells no statistics of rows"):
        Problem.of(private).federation(0)


def test_the_time_of_own_nodes_is_a_column_for_the_split_and_no_feature(tmp_path: Path) -> None:
    days = np.datetime64("2024-01-01") + np.random.default_rng(0).permutation(60)
    owner, other = ([["a", "b"][(i + i // step) % 2] for i in range(60)] for step in (7, 5))
    rows = zip(range(60), other, days, owner, strict=True)
    lines = [f"{i},{'xy'[i % 2]},{kind},{day},{who}" for i, kind, day, who in rows]
    head = "id,label,kind,joined,bank"
    (tmp_path / "nodes.csv").write_text("\n".join([head, *lines]))
    edges = [f"{i},{(i + step) % 60}" for i in range(60) for step in (1, 2)]
    (tmp_path / "edges.csv").write_text("\n".join(["source,target", *edges]))
    made = {"data": str(tmp_path), "split": "time:joined", "clients": 2, "partition": "random"}
    division = Problem.of(make_config(**made)).divide(0)
    graph = division.federation.graphs[0]
    assert division.federation.features == 4  # kind and bank, each of two values
    assert graph.since is not None
    late = days[graph.ids.numpy()] >= np.sort(days)[48]
    assert np.array_equal(graph.since.numpy() == 2, late)
    by_bank = {**made, "partition": "column:bank", "clients": None}
    division = Problem.of(make_config(**by_bank)).divide(0)
    assert division.federation.client_names == ("a", "b")
    assert division.federation.features == 2
    no_owner = {**made, "partition": None}  # the time is not taken for an owner
    assert Problem.of(make_config(**no_owner)).divide(0).config.partition == "louvain"
    with pytest.raises(ConfigError, match="option time names column 'joind', which nodes"):
        Problem.of(make_config(**{**made, "split": "time:joind"})).divide(0)


# The cache on disk.


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    monkeypatch.setenv("ATOLL_CACHE", str(tmp_path / "cache"))
    found = Cache.of_environment()
    assert found is not None
    return found


def kinds(cache: Cache) -> list[str]:
    return sorted(path.name.partition("-")[0] for _, _, path in cache.entries())


def check_same(one: Division, two: Division) -> None:
    assert one.config == two.config
    assert one.notes == two.notes
    plain = ("name", "classes", "numbers", "metric", "batching", "about", "encoder")
    for name in plain:
        assert getattr(one.federation, name) == getattr(two.federation, name), name
    for first, second in zip(one.federation.graphs, two.federation.graphs, strict=True):
        tensors, others = dict(named_leaves(first)), dict(named_leaves(second))
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == others[name].dtype, name
            assert tensor.stride() == others[name].stride(), name
            assert torch.equal(tensor, others[name]), name


@pytest.mark.parametrize(
    "options", [{}, {"split": "inductive"}, {"held_out_client": "1"}, {"protocol": "fedlog"}]
)
def test_clients_are_equal_whether_they_come_from_the_cache_or_not(cache, monkeypatch, options):
    problem = Problem.of(make_config(data="lagoon:nodes=300", clients=3, **options))
    cold, warm = problem.divide(1), problem.divide(1)
    assert kinds(cache) == ["federation"]
    monkeypatch.setenv("ATOLL_CACHE", "off")
    plain = problem.divide(1)
    check_same(plain, cold)
    check_same(plain, warm)


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cora", {"clients": 5}),
        ("cora", {"clients": 5, "protocol": "fedtad"}),
        ("MUTAG", {"clients": 3, "method": "gcfl"}),
        ("MUTAG+PTC_MR", {"method": "fedavg"}),
    ],
)
def test_runs_have_the_same_numbers_cold_warm_and_without_a_cache(
    cache, monkeypatch, real_data, name, options
):
    root = str(real_data(name.partition("+")[0]))
    for other in name.split("+"):
        real_data(other)
    config = make_config(data=name, data_root=root, rounds=2, seeds=2, **options)
    cold, warm = RunPlan(config).run(), RunPlan(config).run()
    assert "federation" in kinds(cache)
    found = Problem.of(config).divide(0)
    monkeypatch.setenv("ATOLL_CACHE", "off")
    plain = RunPlan(config).run()
    check_same(Problem.of(config).divide(0), found)
    for one in (cold, warm):
        for first, second in zip(plain.seeds, one.seeds, strict=True):
            for scored in ("deployed", "local"):
                theirs = second.history.scores[scored]
                np.testing.assert_array_equal(first.history.scores[scored], theirs)


@pytest.mark.data
def test_another_raw_file_gives_other_clients(cache, real_data, tmp_path):
    raw = Path("TUDataset/MUTAG/raw")
    copy = tmp_path / "data" / raw
    copy.mkdir(parents=True)
    for file in (real_data("MUTAG") / raw).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = make_config(method="gcfl", data="MUTAG", clients=2, data_root=str(tmp_path / "data"))
    before = Problem.of(config).federation(0)
    lines = (copy / "MUTAG_graph_labels.txt").read_text().split()
    flipped = ["1" if line == "-1" else "-1" for line in lines]
    (copy / "MUTAG_graph_labels.txt").write_text("\n".join(flipped) + "\n")
    after = Problem.of(config).federation(0)
    assert not torch.equal(before.graphs[0].y, after.graphs[0].y)
    (copy / "MUTAG_graph_labels.txt").unlink()
    with pytest.raises(DataError, match="is not in"):
        Problem.of(config).federation(0)


def test_a_damaged_entry_is_made_again(cache, caplog):
    problem = Problem.of(make_config(data="lagoon:nodes=300", clients=3))
    cold = problem.divide(0)
    ((_, _, path),) = cache.entries()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    check_same(cold, problem.divide(0))
    assert "is damaged" in caplog.text
    check_same(cold, problem.divide(0))
    assert caplog.text.count("is damaged") == 1


POISON = [
    {"partition": "louvain", "clients": 3, "method": "local", "data_root": "/evil", "rounds": 1},
    {"partition": 5, "clients": 3},
    {"partition": None, "clients": "many"},
    {"clients": 3},
    ["partition"],
    None,
]


@pytest.mark.parametrize("poison", POISON)
def test_no_option_but_partition_and_clients_comes_from_the_cache(cache, caplog, poison):
    problem = Problem.of(make_config(data="lagoon:nodes=300", clients=3))
    cold = problem.divide(0)
    ((_, _, path),) = cache.entries()
    found, key = load_federation(path), path.name.split("-")[1]
    bad = replace(found, about={**found.about, CONFIG: poison}, graphs=tuple(found.graphs))
    path.unlink()
    cache.write("federation", key, partial(save_federation, bad))
    check_same(cold, problem.divide(0))
    assert "is damaged" in caplog.text


def test_own_data_and_objects_are_never_cached(cache, tmp_path):
    (tmp_path / "own").mkdir()
    write_own(tmp_path / "own")
    problem = Problem.of(make_config(data=str(tmp_path / "own")))
    problem.divide(0)
    source = atoll.load("lagoon:nodes=300", clients=3)
    Problem.of(make_config(data="lagoon", objects=["data"]), source).divide(0)
    atoll.load(str(tmp_path / "own"))
    assert not cache.entries()


def test_a_run_from_the_cache_imports_no_package_that_only_loading_needs(cache, tmp_path):
    words = ["run", "--data", "lagoon:nodes=300", "--clients", "3", "--rounds", "1", "--device"]
    code = (
        "import sys; from click.testing import CliRunner; from atoll.cli.app import main\n"
        f"found = CliRunner().invoke(main, {[*words, 'cpu']} + ['--out', sys.argv[1]])\n"
        "assert found.exit_code == 0, found.output\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    loaded = []
    for number in range(2):
        command = [sys.executable, "-c", code, str(tmp_path / f"run-{number}")]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
        loaded.append(set(done.stdout.split()))
    assert "scipy" in loaded[0]
    assert "torch_geometric" not in loaded[0]
    heavy = {"scipy", "torch_geometric", "sklearn", "networkx", "pandas", "pyarrow", "matplotlib"}
    assert not loaded[1] & (heavy | {"transformers", "sknetwork", "pymetis", "sympy"})


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"clients": 7}, "was divided with clients 3, but 7 was asked for; remove clients, or"),
        ({"partition": "metis"}, "with partition column:owner, but metis was asked for"),
        ({"split": "random"}, "with split stratified, but random was asked for"),
        ({"ratios": "0.2/0.4/0.4"}, "ratios is for data that are still to be divided"),
        ({"allow": ["no-edge"]}, "allow is for data that are still to be divided"),
    ],
)
def test_options_that_a_federation_object_has_settled_are_refused(option, problem) -> None:
    divided = atoll.partition(atoll.load("lagoon:nodes=150", clients=3))
    with pytest.raises(ConfigError, match=problem):
        Problem.of(make_config(data=divided.name, objects=["data"], **option), divided)
    same = make_config(data=divided.name, objects=["data"], clients=3, partition="column:owner")
    assert Problem.of(same, divided).federation(0) is divided
