"""A figure without data is not drawn, and says what it lacks."""

from __future__ import annotations

from pathlib import Path

from atoll.studies.reproduce.figures import reproduce_figure
from atoll.studies.reproduce.recipes import read_paper
from atoll.studies.reproduce.table import PaperStudy, Wanted


def test_absent_data_leave_nothing_to_draw(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    study = PaperStudy(read_paper("fedath"), Wanted(root=str(tmp_path)), folder)
    found = reproduce_figure(study, "7")
    summary = found.summary()
    assert (summary["files"], summary["runs"], summary["figure"]) == ([], 0, "7")
    assert any("atoll data fetch" in sentence for sentence in summary["left_out"])
    assert not list(folder.glob("figure-*"))
