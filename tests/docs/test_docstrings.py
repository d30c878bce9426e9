"""Every public name has a docstring with an example that runs, and a place on the API's page."""

from __future__ import annotations

import doctest
import inspect
import re
import sys
from collections.abc import Callable
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


def types_of(function: Callable[..., object]) -> set[type]:
    """Classes of Atoll that a function returns, or that its argument `observer` takes."""
    home, words = vars(sys.modules[inspect.unwrap(function).__module__]), function.__annotations__
    told = re.findall(r"\w+", f"{words['return']} {words.get('observer', '')}")
    found = {home[name] for name in told if isinstance(home.get(name), type)}
    return {one for one in found if one.__module__.startswith("atoll.")}


def test_the_types_of_public_functions_and_the_networks_are_on_the_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    functions = [found for found in PUBLIC.values() if inspect.isfunction(inspect.unwrap(found))]
    found = set().union(*map(types_of, functions))
    assert {"Comparison", "TuningResult", "Source", "Observer", "StudyObserver", "Result"} <= {
        one.__name__ for one in found
    }
    for one in found:
        places = f"::: {one.__module__}.{one.__name__}\n", f"::: atoll.{one.__name__}\n"
        assert any(place in page for place in places), f"docs/api.md lacks {places[0]}"
    for net in atoll.nn.NETS.values():
        assert f"\n::: atoll.nn.{net.__name__}\n" in page


@pytest.mark.parametrize("name", VOCABULARY)
def test_the_vocabulary_is_explained_and_listed(name: str) -> None:
    found = getattr(atoll, name)
    if callable(found) and hasattr(found, "__module__") and found.__module__ == atoll._HOMES[name]:
        assert found.__doc__, f"atoll.{name} has no docstring"
    assert f"`{name}`" in (ROOT / "docs" / "api.md").read_text()
    assert f"\n::: {atoll._HOMES[name]}.{name}\n" in (ROOT / "docs" / "vocabulary.md").read_text()
