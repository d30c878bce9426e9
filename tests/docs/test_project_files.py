"""README, CITATION.cff and the packages' files agree with the code and with the pages."""

from __future__ import annotations

import re
import tomllib

import yaml

import atoll
from tests.docs.pages import ROOT

README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_version_is_the_same_everywhere() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert {str(cited["version"]), PROJECT["version"]} == {atoll.__version__}
    assert cited["license"] == PROJECT["license"]


def test_the_speed_in_the_readme_is_that_of_the_page_of_performance() -> None:
    found = re.search(r"(\d+) to (\d+) times as fast as openfgl-lib", README)
    page = (ROOT / "docs" / "performance.md").read_text()
    last = page.partition("**Compared with openfgl-lib")[2].partition("\n\n")[0]
    ratios = [int(one) for one in re.findall(r"(\d+)x", last)]
    assert found is not None
    assert [int(one) for one in found.groups()] == [min(ratios), max(ratios)]


def test_the_results_in_the_readme_are_those_of_the_leaderboard() -> None:
    page = (ROOT / "docs" / "results" / "leaderboard.md").read_text().replace("**", "")
    first = page.partition("### Defaults: further sets")[0]  # the development sets
    ranks = dict(re.findall(r"^\| ([\w+]+) \| (\d+\.\d\d) \|", first, re.MULTILINE))
    scores = first.partition("\nlouvain-10\n")[2].partition("</div>")[0]
    table = README.replace("**", "")
    rows = re.findall(r"^\| ([\w-]+) \| (\d+\.\d ± .*) \| (\d+\.\d\d) \|$", table, re.MULTILINE)
    assert len(rows) > 4
    for name, numbers, rank in rows:
        method = name.lower().replace("-", "")
        line = re.search(rf"^\| {method} \| (.*) \|$", scores, re.MULTILINE)
        assert line is not None
        assert numbers == line[1]
        assert ranks[method] == rank
