import pytest

from tools import english


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(english, "ROOT", tmp_path)
    monkeypatch.setattr(english, "git", lambda *words: "page.md\nsmall.bin\n")
    (tmp_path / "small.bin").write_bytes(b"goes on \xff")
    return tmp_path


def test_an_added_phrase_is_found_and_a_moved_one_is_not(folder):
    (folder / "page.md").write_text("The run goes on.\n  An old line says so.\nPlain English.\n")
    (found,) = english.findings({"An old line says so."})
    assert found == "page.md:1: 'goes on': write 'continue'"


def test_a_page_that_is_rewritten_is_checked_in_whole(folder):
    (folder / "page.md").write_text("An old line says so.\n")
    (found,) = english.findings({"An old line says so."}, later=("src/", "other.md"))
    assert found == "page.md:1: 'says so': write 'report'"


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


def test_a_clone_without_the_base_commit_is_reported(monkeypatch, capsys, tmp_path):
    (tmp_path / "base").write_text("0" * 40)
    monkeypatch.setattr(english, "BASE", tmp_path / "base")
    monkeypatch.setattr("sys.argv", ["english.py"])
    assert english.main() == 0
    assert "is not in this clone" in capsys.readouterr().out
