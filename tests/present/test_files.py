import json
import sys

import numpy as np
import pytest

from atoll.core.errors import ConfigError
from atoll.present.chart import Axis, Chart, Line
from atoll.present.files import check_output, write_all
from atoll.present.tables import make_table


def test_each_value_is_written_by_its_kind(tmp_path):
    table = make_table(("a", "b"), [(1, None)])
    chart = Chart("", Axis(), Axis(), (Line([0, 1], [0, 1]),))
    files = {
        "x.csv": table,
        "x.md": table,
        "x.json": {"values": np.array([1.0, np.nan]), "path": tmp_path},
        "x.png": chart,
        "x.svg": chart,
        "deep/x.txt": "text",
        "x.bin": b"bytes",
    }
    paths = write_all(tmp_path / "new", files)
    assert paths == [tmp_path / "new" / name for name in files]
    assert paths[0].read_text() == "a,b\n1,\n"
    assert paths[1].read_text() == "| a | b |\n|---|---:|\n| 1 |  |\n"
    assert json.loads(paths[2].read_text()) == {"values": [1.0, None], "path": str(tmp_path)}
    assert paths[3].read_bytes().startswith(b"\x89PNG")
    assert paths[4].read_bytes().startswith(b"<?xml")
    assert [paths[5].read_text(), paths[6].read_bytes()] == ["text", b"bytes"]
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == sorted(
        ["deep", "x.bin", "x.csv", "x.json", "x.md", "x.png", "x.svg"]
    )


def test_one_value_that_cannot_be_written_leaves_no_file(tmp_path):
    with pytest.raises(TypeError, match=r"'x\.png' cannot hold a dict"):
        write_all(tmp_path, {"x.json": 1, "x.png": {}})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; choose another --out"):
        write_all(tmp_path / "file" / "out", {"x.json": 1})


def test_none_removes_an_old_file(tmp_path):
    write_all(tmp_path, {"x.csv": "a", "y.csv": "b"})
    assert write_all(tmp_path, {"x.csv": None, "y.csv": "c", "z.csv": None}) == [tmp_path / "y.csv"]
    assert [path.name for path in tmp_path.iterdir()] == ["y.csv"]


def test_output_is_checked_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; choose another --out"):
        check_output(tmp_path / "file")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'atoll-fgl\[report\]'"):
        check_output(tmp_path / "new")


def test_pictures_without_matplotlib_are_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="a plot needs the package matplotlib"):
        write_all(tmp_path, {"x.json": 1, "x.png": b""})
    assert list(tmp_path.iterdir()) == []
