from tools import english


def test_an_added_phrase_is_found_and_a_moved_one_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(english, "ROOT", tmp_path)
    monkeypatch.setattr(english, "git", lambda *words: "page.md\nsmall.bin\n")
    (tmp_path / "page.md").write_text("The run goes on.\n  An old line says so.\nPlain English.\n")
    (tmp_path / "small.bin").write_bytes(b"goes on \xff")
    (found,) = english.findings({"An old line says so."})
    assert found == "page.md:1: 'goes on': write 'continue'"


def test_a_clone_without_the_base_commit_is_reported(monkeypatch, capsys, tmp_path):
    (tmp_path / "base").write_text("0" * 40)
    monkeypatch.setattr(english, "BASE", tmp_path / "base")
    assert english.main() == 0
    assert "is not in this clone" in capsys.readouterr().out
