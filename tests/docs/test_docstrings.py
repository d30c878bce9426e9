"""Every public name has a docstring with an example that runs, and a place on the API's page."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

import atoll
from atoll.testing import check_method
from tests.docs.pages import ROOT

MODULES = ("data", "testing")
"""Rooms whose parts have their own pages."""
VERBS = ("Federation", "Method", "client_step")
"""Names of `atoll.core` with a section on the page; the rest is the vocabulary of a method."""
VOCABULARY = [
    name
    for name, home in atoll._HOMES.items()
    if home.startswith("atoll.core") and name not in VERBS
]
PUBLIC = {
    name: getattr(atoll, name) for name in atoll.__all__ if name not in (*VOCABULARY, *MODULES)
}
EXAMPLES = {"atoll": atoll, **PUBLIC, "testing.check_method": check_method}


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(EXAMPLES[name], name, globs={})
    assert test.examples, f"atoll.{name} has no example in its docstring (>>> ...)"
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert not said, "".join(said)


def test_every_public_name_is_on_the_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for name in (*PUBLIC, "testing.check_method"):
        assert f"\n::: atoll.{name}\n" in page, f"docs/api.md lacks ::: atoll.{name}"


@pytest.mark.parametrize("name", VOCABULARY)
def test_the_vocabulary_is_explained_and_listed(name: str) -> None:
    found = getattr(atoll, name)
    if callable(found) and hasattr(found, "__module__") and found.__module__ == atoll._HOMES[name]:
        assert found.__doc__, f"atoll.{name} has no docstring"
    assert f"`{name}`" in (ROOT / "docs" / "api.md").read_text()
    assert f"\n::: {atoll._HOMES[name]}.{name}\n" in (ROOT / "docs" / "vocabulary.md").read_text()
