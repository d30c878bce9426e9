"""A problem is resolved once, and clients of one class are pointed out."""

import numpy as np
import pytest
from click.testing import CliRunner

import atoll
from atoll.cli.app import main
from atoll.experiment.config import make_config
from atoll.experiment.problem import Problem, nearly_single_class
from tests.experiment.test_run import rings


def write_own(folder, owner="owner"):
    owners = ["a" if i < 30 else "b" for i in range(60)]
    lines = [f"{i},{'xy'[i % 2]},{i % 3},{owner}" for i, owner in enumerate(owners)]
    (folder / "nodes.csv").write_text("\n".join([f"id,label,kind,{owner}", *lines]))
    edges = [f"{i},{(i + step) % 60}" for i in range(60) for step in (1, 2)]
    (folder / "edges.csv").write_text("\n".join(["source,target", *edges]))
    return str(folder)


def ids(federation):
    return [graph.ids.tolist() for graph in federation.graphs]


def divided_by_run(folder, source, **options):
    atoll.run("fedavg", source, rounds=1, out=folder, **options)
    with np.load(folder / "seed-0" / "partition.npz") as found:
        return [found[name].tolist() for name in found.files]


def test_clients_of_one_class_are_pointed_out():
    mixed = atoll.partition(atoll.load("lagoon:nodes=600"), "random", clients=2)
    assert nearly_single_class(mixed) == []
    source = atoll.load("lagoon:nodes=600,classes=2")
    skewed = atoll.partition(source, "dirichlet:alpha=0.01", clients=2, allow=["single-class"])
    (note,) = nearly_single_class(skewed)
    assert "nearly single-class" in note
    assert "% of its nodes on average" in note


@pytest.mark.parametrize("command", [["run", "--rounds", "1", "--out", "run"], ["inspect"]])
def test_run_and_inspect_warn(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ["--data", "lagoon:nodes=600,classes=2", "--allow", "single-class", "--clients", "2"]
    skewed, mixed = (["--partition", name] for name in ("dirichlet:alpha=0.01", "random"))
    done = CliRunner().invoke(main, [*command, *data, *skewed])
    assert done.exit_code == 0, done.output
    assert "nearly single-class" in " ".join(done.output.split())
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


def test_a_finished_federation_is_its_own_problem():
    federation = atoll.partition(atoll.load("lagoon:nodes=300"), "random", clients=2)
    problem = Problem.of(make_config(objects=["data"]), federation)
    assert problem.federation(5) is federation
    assert problem.divide(5).config.partition == "random"
