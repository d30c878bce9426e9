"""`atoll report`: the page, the tables, and folders that hold no run."""

from __future__ import annotations

from pathlib import Path


def test_a_page_unless_only_tables_are_wanted(cli) -> None:
    cli("run", "--data", "lagoon:nodes=150", "--clients", 2, "--rounds", 1, "--out", "r", "--quiet")
    assert cli("report", "r").stdout == "Written: report.html\n"
    Path("report.html").unlink()
    tables = ("--csv", "t.csv", "--md", "t.md")
    assert cli("report", "r", *tables).stdout == "Written: t.md, t.csv\n"
    assert not Path("report.html").exists()
    assert cli("report", "r", *tables, "-o", "p.html").stdout.startswith("Written: p.html, ")
    refused = cli("report", "nothing", code=2)
    assert refused.stdout == ""
    assert refused.stderr.startswith("error: folder 'nothing' does not exist; ")
