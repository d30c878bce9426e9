"""Similarity, mixtures and clusters come from the run's folder."""

import shutil

import numpy as np

import atoll
from atoll.report import collect
from atoll.report.maps import _MEASURES, _sizes
from atoll.report.page import page
from tests.experiment.own_graphs import write_own


def test_the_page_names_clients_and_classes(tmp_path):
    path = write_own(tmp_path, "client")
    atoll.run("fedgta", path, out=tmp_path / "run", rounds=1)
    text = page(collect([tmp_path / "run"]))
    for row in ("a", "b"):
        assert text.count(f'<th scope="row">{row}</th>') >= 3  # classes, divergences, mixture
        assert f"client {row}: " in text
    assert '<th scope="col">x</th><th scope="col">y</th>' in text


def test_the_report_needs_no_checkpoint_and_no_data(study, tmp_path):
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns("checkpoint.atoll", "partition.npz")
    shutil.copytree(study / "cells" / "fedpub-3", copy, ignore=ignore)
    assert "fedpub: mixture" in page(collect([copy]))
    assert atoll.read_result(copy).clients == 3


def test_the_legend_names_every_part_of_a_bar():
    measured = {name: np.array([3]) for name in _MEASURES} | {"roles": np.array([[1, 1, 1]])}
    assert "in no split" not in _sizes(measured, ["a"])
    assert "in no split" in _sizes(measured | {"nodes": np.array([4])}, ["a"])
