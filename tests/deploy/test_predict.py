"""A site uses its delivered model on its own data, and nothing leaves."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.core.errors import AtollError
from atoll.core.graph import with_views
from atoll.deploy import delivery
from atoll.deploy.kits import provision, write_settings
from atoll.deploy.predict import predict_at_site
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config
from atoll.experiment.model import read_model
from tests.data.own.graphs import folder
from tests.deploy.conftest import ALL
from tests.deploy.test_delivery import SMALL, Trial, made, trial

__all__ = ["made", "trial"]  # fixtures


def rows(first: int, last: int, label: bool = True) -> str:
    lines = [f"n{i},{'xy'[i % 2] if label else ''},{i * 0.37 % 1:.3f}" for i in range(first, last)]
    return "\n".join(["id,label,size", *lines, ""])


def edges(first: int, last: int, modulus: int) -> str:
    ends = [f"n{i},n{(i + step) % modulus}" for i in range(first, last) for step in (1, 2, 5)]
    return "\n".join(["source,target", *ends, ""])


class TableTrial(Trial):
    """Two sites with tables of their own, which have names and an encoder."""

    def __init__(self, kits: Path) -> None:
        self.kits, self.packets, self.sites = kits, {}, {}
        for name, size in (("site-1", 40), ("site-2", 60)):
            path = folder(kits / f"{name}-data", rows(0, size), edges(0, size, size))
            write_settings(kits / name, path)
            data = read_site_data(path)
            self.sites[name] = Site(data, ALL, kits / name / "atoll")


@pytest.fixture
def tables(tmp_path) -> TableTrial:
    provision(tmp_path / "kits", ["site-1", "site-2"])
    return TableTrial(tmp_path / "kits")


@pytest.mark.parametrize("method", ["fedavg", "fedper", "fedpub", "local", "fedath"])
def test_a_site_predicts_with_its_own_model(method, trial):
    assert trial.run(method) == {}
    for place, (name, site) in enumerate(trial.sites.items()):
        file = trial.kits / "data" / f"client-{place + 1}.atoll"
        found = predict_at_site(trial.model(name), trial.kits / name, file)
        model = read_model(trial.model(name) / "seed-0")
        sizes = site.data.graph.num_features, site.data.classes
        built = build_method(make_config(method=method, set=SMALL), *sizes)
        with torch.no_grad():
            graph = with_views(site.data.graph, built.views)
            expected = model.predict(built, graph, 0)
        np.testing.assert_allclose(found.logits, expected.numpy(), rtol=1e-5, atol=1e-6)
        assert set(found.clients) == {name}


def test_new_tables_are_read_with_the_encoder_of_the_site(tables, tmp_path, monkeypatch):
    assert tables.run("fedper") == {}
    kit, model = tables.kits / "site-2", tables.model("site-2")
    before = {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    new = folder(tmp_path / "new", rows(60, 65, label=False), edges(60, 63, 65))

    def refuse(*_):
        raise AssertionError("a prediction opens no connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    alone = predict_at_site(model, kit, folder(tmp_path / "a", rows(60, 65), "source,target\n"))
    found = predict_at_site(model, kit, new, joined=True, threshold=0.5)
    assert found.ids.tolist() == [f"n{i}" for i in range(60, 65)]
    assert found.classes == ("x", "y")
    assert found.clients.tolist() == ["site-2"] * 5
    np.testing.assert_array_equal(found.alerts, found.probabilities[:, 1] >= 0.5)
    assert not np.allclose(found.logits, alone.logits)
    again = {path: path.read_bytes() for path in kit.rglob("*") if path.is_file()}
    assert again == before  # also the audit log: it notes what leaves, and nothing does
    card = (model / "seed-0/MODEL_CARD.md").read_text()
    assert "classify nodes as `x`, `y`" in card


def test_what_a_site_cannot_use_is_refused(tables, tmp_path):
    assert tables.run("fedper") == {}
    kit, model = tables.kits / "site-1", tables.model()
    data = tables.kits / "site-1-data"
    with pytest.raises(AtollError, match="has no seed 3; it has 0"):
        predict_at_site(model, kit, data, seed=3)
    with pytest.raises(AtollError, match="lacks 1 of the 2 columns"):
        predict_at_site(model, kit, folder(tmp_path / "few", "id,label\na,x\n", "source,target\n"))
    with pytest.raises(AtollError, match="is no folder"):
        predict_at_site(model, kit, tmp_path / "nowhere")
    with pytest.raises(AtollError, match="holds no delivered model"):
        predict_at_site(tmp_path, kit, data)
    changed = json.loads((model / "manifest.json").read_text())
    (model / "manifest.json").write_text(json.dumps({**changed, "site": "site-2"}))
    with pytest.raises(AtollError, match="is not the server's"):
        predict_at_site(model, kit, data)


def test_a_model_without_its_private_part_is_refused(tables):
    assert tables.run("fedper") == {}
    site = tables.sites["site-1"]
    for path in (site.folder / "runs" / "run-0").glob("state_*"):
        path.unlink()
    shutil.rmtree(tables.model())
    assert delivery.receive(site, tables.packets["site-1"]).head == {}
    with pytest.raises(AtollError, match=r"lacks its private part: .* is not in its runs"):
        predict_at_site(tables.model(), tables.kits / "site-1", tables.kits / "site-1-data")


def test_a_kit_that_names_no_data_cannot_join(trial):
    assert trial.run() == {}
    with pytest.raises(AtollError, match="names no data to join"):
        predict_at_site(trial.model(), trial.kits / "site-1", Path("new"), joined=True)


def test_no_prediction_without_the_facts_that_the_site_wrote(trial):
    """Else the server's own description of the model would count."""
    trial.run()
    (trial.model() / "seed-0" / "own.toml").unlink()
    with pytest.raises(AtollError, match=r"lacks own.toml, which this site wrote; copy"):
        predict_at_site(trial.model(), trial.kits / "site-1", Path("new"))
