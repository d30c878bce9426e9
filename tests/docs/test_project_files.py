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


def test_the_results_in_the_readme_are_those_of_the_page() -> None:
    page = (ROOT / "docs" / "results" / "baselines.md").read_text().replace("**", "")
    rows = re.findall(r"^\| ([\w-]+) \| (\d+\.\d ± .*) \| (\d+\.\d) \|$", README, re.MULTILINE)
    assert len(rows) > 4
    for name, numbers, rank in rows:
        assert re.search(rf"^\| {name}( \(.*?\))? \| {re.escape(numbers)} \| {rank} \|", page, re.M)
