import pytest

from tools import sizes

PASSAGE = """
def first(rows, names):
    found = {name: row for name, row in zip(names, rows)}
    total = sum(len(row) for row in found.values())
    if total > 10 and not names:
        raise ValueError(f"too many: {total}")
    for name in sorted(found):
        print(name, found[name], total / len(found))
    return found
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setattr(sizes, "SOURCE", tmp_path)
    monkeypatch.setattr("sys.argv", ["sizes.py"])
    return tmp_path


def test_a_copied_passage_is_found_with_other_names(source):
    (source / "one.py").write_text(PASSAGE)
    (source / "two.py").write_text(PASSAGE.replace("found", "seen").replace("10", "20"))
    text = {path: path.read_text() for path in sorted(source.glob("*.py"))}
    assert sizes._pairs(text) == ["one.py:2 ~ two.py:2"]


def test_an_exceeded_limit_fails(source, capsys):
    (source / "room").mkdir()
    (source / "room" / "long.py").write_text("x = 1\n" * 501)
    assert sizes.main() == 1
    assert "modules above 500 lines                        1   limit       0   EXCEEDED" in (
        capsys.readouterr().out
    )
    (source / "room" / "long.py").write_text("x = 1\n")
    assert sizes.main() == 0


def test_switched_off_formatting_and_any_are_counted(source, capsys):
    (source / "one.py").write_text("from typing import Any\nx: Any = 1  # fmt: skip\n")
    sizes.main()
    out = capsys.readouterr().out
    assert "places where the formatter is off              1" in out
    assert "uses of the name Any                           1" in out
