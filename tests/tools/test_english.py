import pytest

from tools import english


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(english, "ROOT", tmp_path)
    monkeypatch.setattr(english, "git", lambda *words: "page.md\nsmall.bin\n")
    (tmp_path / "small.bin").write_bytes(b"goes on \xff")
    return tmp_path


def test_a_phrase_is_found_with_its_place(folder):
    (folder / "page.md").write_text("The run goes on.\nPlain English.\n")
    (found,) = english.findings()
    assert found == "page.md:1: 'goes on': write 'continue'"


LONG = "one " * 25 + "two."


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        (LONG, ["1: a sentence of 26 words"]),
        ("Short one.\n" + LONG.replace("e o", "e\no", 1), ["2: a sentence of 26 words"]),
        ("- " + LONG, ["1: a sentence of 26 words"]),
        ("one " * 20 + "`a b c d e f`\n", []),
        ("one " * 20 + "\n- " + "two " * 20, []),
        ("one " * 20 + "[four words](a/very/long/target.md)\n", []),
        ("```console\n" + "x" * 200 + "\n```\n| " + "y" * 200 + " |", []),
        ("x" * 121, ["1: 121 characters"]),
        ("What clients sent is averaged.", ["1: 'What clients sent is averaged.'"]),
        ("What is averaged?", []),
        ("The client trains alone.", ["1: 'alone'"]),
    ],
)
def test_pages_have_short_lines_and_sentences(text, faults):
    found = [f"{number}: {fault}" for number, fault in english.page_faults(text.splitlines())]
    assert len(found) == len(faults), found
    assert all(one.startswith(fault) for one, fault in zip(found, faults, strict=True))


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("The content of an entry; None if it is missing.", ["';'"]),
        ("What a client sends.", ["'What'"]),
        ("Train the model.\n\n    " + LONG, []),
        ("Train the model.\n\n    " + "one " * 31, ["a sentence of 31 words"]),
        ("Train alone.", ["'alone'"]),
        ("The keys `a; b` of a run.", []),
    ],
)
def test_docstrings_have_one_statement_in_their_first_line(text, faults):
    module = f'def step():\n    """{text}"""\n'
    found = [fault for _, fault in english.docstring_faults(module.splitlines())]
    assert [one[: len(fault)] for one, fault in zip(found, faults, strict=True)] == faults


@pytest.mark.parametrize(
    ("module", "faults"),
    [
        ("x = 1  # of this site alone", [1]),
        ('"""A module."""\nwhy = f"{x}, for this site alone"', [2]),
        ('x = folder("alone")\nhint = "the option `alone` is unknown"', []),
    ],
)
def test_comments_and_texts_of_a_module_are_read(module, faults):
    assert [number for number, _ in english.text_faults(module.splitlines())] == faults


OTHERS = ("a.svg", "a.html", "b.ipynb", "c.cff", "d.sh", "e.service", "f.txt")


@pytest.mark.parametrize("name", [*OTHERS, "Makefile", "packaging/Dockerfile"])
def test_every_kind_of_text_is_read(folder, monkeypatch, name):
    monkeypatch.setattr(english, "git", lambda *words: name)
    (folder / "packaging").mkdir()
    (folder / name).write_text("# a\nIt says so.\nIt trains alone.\n")
    assert [one.split("'")[1] for one in english.findings()] == ["says so", "alone"]


def test_the_exit_code_reports_faults(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["english.py", "page.md"])
    for text, code in (("Plain English.\n", 0), ("It says so.\n", 1)):
        (folder / "page.md").write_text(text)
        assert english.main() == code
    assert "'says so'" in capsys.readouterr().out
