"""Similarity, mixtures and clusters come from the run's folder."""

import shutil

import atoll
from atoll.report import collect
from atoll.report.page import page


def test_the_report_needs_no_checkpoint_and_no_data(study, tmp_path):
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns("checkpoint.atoll", "partition.npz")
    shutil.copytree(study / "cells" / "fedpub-3", copy, ignore=ignore)
    assert "fedpub: mixture" in page(collect([copy]))
    assert atoll.read_result(copy).clients == 3
