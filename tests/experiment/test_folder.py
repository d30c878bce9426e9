"""A finished run is read from its folder only."""

import shutil

import numpy as np
import pytest

import atoll
from atoll.core.errors import AtollError, DataError
from atoll.experiment import folder as folders
from atoll.experiment import result as tables
from atoll.experiment.folder import NotFinished, RunFolder, open_run, read_result

SMALL = {"clients": 3, "rounds": 4, "seeds": 2, "seed": 5, "set": {"hidden": 8}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored") / "run"
    return folder, atoll.run("fedpub", "lagoon:nodes=300", out=folder, **SMALL)


def test_reads_what_the_run_returned(saved):
    folder, ran = saved
    found = read_result(folder)
    assert found.metrics().keys() == ran.metrics().keys()
    for name, numbers in ran.metrics().items():
        assert found.metrics()[name]["per_seed"] == pytest.approx(numbers["per_seed"], rel=1e-5)
    np.testing.assert_allclose(found.of_clients(), ran.of_clients(), rtol=1e-5)
    assert found.bytes() == ran.bytes()
    assert found.seconds() == ran.seconds()
    assert found.scored == ran.scored
    assert [s.ledger.entries for s in found.seeds] == [s.ledger.entries for s in ran.seeds]
    assert repr(found) == repr(ran)


def test_long_tables_are_read_as_parquet(saved, tmp_path, monkeypatch):
    _, ran = saved
    monkeypatch.setattr(tables, "MAX_CSV_ROWS", 5)
    shutil.copytree(saved[0], tmp_path / "run", ignore=shutil.ignore_patterns("*.csv"))
    ran.save(tmp_path / "run")
    found = read_result(tmp_path / "run")
    assert found.bytes() == ran.bytes()
    np.testing.assert_allclose(found.of_clients(), ran.of_clients(), rtol=1e-5)


def test_knows_the_federation_and_how_clients_relate(saved):
    found = open_run(saved[0])
    history = found.result.seeds[0].history
    assert found.measures["nodes"].tolist() == history.nodes.tolist()
    assert found.measures["labels"].sum() == history.nodes.sum() == 300
    assert len(found.relations) == 2
    mixing = found.relations[0]["mixing"]
    np.testing.assert_allclose(mixing.sum(-1), 1, rtol=1e-5)
    alike = found.relations[0]["similarity"]
    weight = np.exp(10 * alike)
    np.testing.assert_allclose(mixing, weight / weight.sum(-1, keepdims=True), rtol=1e-4)
    assert not found.notes


def test_a_report_measures_the_clients_that_the_run_had(saved, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(saved[0], folder, ignore=shutil.ignore_patterns("federation.npz"))
    found = RunFolder(folder).measures
    assert (folder / "federation.npz").exists()
    again = RunFolder(folder).measures  # from the file
    assert again.keys() == found.keys()
    for name, numbers in found.items():
        np.testing.assert_array_equal(again[name], numbers)
    (folder / "federation.npz").unlink()
    moved = {f"client_{k}": ids[::-1] for k, ids in enumerate(RunFolder(folder).partition(5))}
    np.savez(folder / "seed-5" / "partition.npz", **moved)
    assert not RunFolder(folder).measures  # the data give other clients than the run had
    shutil.copy(saved[0] / "seed-5" / "partition.npz", folder / "seed-5")

    def missing(config):
        raise DataError("the data are not here")

    monkeypatch.setattr(folders.Problem, "of", missing)
    assert not RunFolder(folder).measures
    monkeypatch.undo()
    assert RunFolder(folder).measures.keys() == found.keys()


def test_what_cannot_be_made_again_is_measured_when_the_run_begins(tmp_path):
    source = atoll.load("lagoon:nodes=300", clients=3)
    atoll.run("fedavg", source, out=tmp_path / "run", rounds=1)
    assert (tmp_path / "run" / "federation.npz").exists()
    assert RunFolder(tmp_path / "run").measures["nodes"].sum() == 300


def test_mixtures_of_methods_that_weigh(tmp_path):
    for method in ("fedgta", "fediih"):
        atoll.run(method, "lagoon:nodes=300", out=tmp_path / method, **{**SMALL, "seeds": 1})
        mixing = open_run(tmp_path / method).relations[0]["mixing"]
        assert mixing.shape[-2:] == (3, 3)
        np.testing.assert_allclose(mixing.sum(-1), 1, rtol=1e-5)


def test_a_plug_shows_what_its_base_publishes(tmp_path):
    settings = {**SMALL, "seeds": 1, "rounds": 2, "set": {"base": "fedgta", "hidden": 8}}
    atoll.run("fedtad", "lagoon:nodes=300", out=tmp_path / "run", **settings)
    assert open_run(tmp_path / "run").relations[0]["mixing"].shape == (3, 3)


def test_a_run_of_an_earlier_version_says_what_it_lacks(saved, tmp_path):
    patterns = shutil.ignore_patterns("clients.npz", "federation.npz", "partition.npz")
    shutil.copytree(saved[0], tmp_path / "old", ignore=patterns)
    found = open_run(tmp_path / "old")
    assert "without its clients' sizes" in found.notes[0]
    assert not found.measures
    assert np.isfinite(found.result.of_clients()).all()


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("config.toml", None, "holds no run"),
        ("result.json", None, "is not finished; continue it with: atoll run --resume"),
        ("result.json", "{", "cannot be read"),
        ("result.json", "[]", "does not hold an object"),
        ("result.json", "{}", "another version of Atoll"),
        ("metrics.csv", None, "has no metrics.csv"),
        ("ledger.csv", "", "cannot be read"),
        ("metrics.csv", "seed,round\n0,1\n", "another version of Atoll"),
        ("seed-5/clients.npz", "x", "cannot be read"),
    ],
)
def test_broken_folders_get_one_sentence(saved, tmp_path, file, content, sentence):
    folder = tmp_path / "broken"
    shutil.copytree(saved[0], folder)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(AtollError, match=sentence) as caught:
        open_run(folder)
    assert "\n" not in str(caught.value)


def test_a_missing_folder(tmp_path):
    with pytest.raises(AtollError, match="does not exist"):
        open_run(tmp_path / "nothing")
    assert issubclass(NotFinished, AtollError)


def test_large_federations_are_not_measured_in_passing(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "MAX_CLIENTS", 2)
    atoll.run("fedpub", "lagoon:nodes=300", out=tmp_path / "run", **{**SMALL, "rounds": 1})
    found = open_run(tmp_path / "run")
    assert not found.measures
    assert found.relations == ({}, {})
    assert not found.notes  # sizes are always there
    assert found.result.curve().shape == (2, 1)
