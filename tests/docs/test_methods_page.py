"""docs/methods.md says of every method what the method says of itself."""

from __future__ import annotations

import re

import pytest
from tools.methods_page import page_with_tables

from atoll.experiment.config import make_config, resolve
from atoll.methods import METHODS
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "methods.md").read_text()
ROWS = re.findall(
    r"^\| \[`([\w+]+)`\]\(#([\w-]+)\) \| (.*) \| (.*) \| (.*) \|$", PAGE, re.MULTILINE
)
SECTIONS = dict(re.findall(r"^### (.*)\n((?:(?!^##).*\n)*)", PAGE, re.MULTILINE))
SCORED = {"global": "one global model", "personalised": "each client its own"}


def anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def section_of(name: str) -> str:
    wanted = next(row[1] for row in ROWS if row[0] == name)
    return next(text for title, text in SECTIONS.items() if anchor(title) == wanted)


def test_the_table_has_every_method_as_it_is() -> None:
    assert [row[0] for row in ROWS] == [*METHODS]
    for name, _, _, tasks, scored in ROWS:
        method = METHODS[name]
        assert tasks == " and ".join(f"{task}s" for task in method.tasks), name
        assert scored == SCORED[method.deployed], name


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_paper_and_a_link_to_it(name: str) -> None:
    words = " ".join(section_of(name).split())
    plain = re.sub(r"\[\*(.*?)\*\]\(https://[^)]+\)", r"\1", words)
    if "no paper" in METHODS[name].paper:
        assert "no paper" in words
    else:
        assert METHODS[name].paper in plain
        assert plain != words, "the title is no link"


SETTINGS = [
    (title, pair)
    for title, text in SECTIONS.items()
    for pair in re.findall(r"`(\w+=[\w.+-]+)`", text)
]


@pytest.mark.parametrize(("title", "pair"), SETTINGS)
def test_settings_exist(title: str, pair: str) -> None:
    name = next(row[0] for row in reversed(ROWS) if row[1] == anchor(title))
    key, value = pair.split("=")
    resolve(make_config(method=name, set={key: value}))


def test_the_tables_of_hyper_parameters_are_those_of_the_fields() -> None:
    assert page_with_tables(PAGE) == PAGE, "run: python tools/methods_page.py"
    assert "| `mu` | 0.01 | μ: weight of the pull towards the received model |" in PAGE
