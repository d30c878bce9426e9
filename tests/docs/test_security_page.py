"""The page on security: every promise of it names a test that exists."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
ENFORCED = PAGE.partition("## What is enforced")[2].partition("\n## ")[0]
PROMISES = [part.strip() for part in re.split(r"^- ", ENFORCED, flags=re.MULTILINE)[1:]]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_every_promise_names_a_test():
    assert len(PROMISES) > 20
    for promise in PROMISES:
        assert re.search(r"^  Test: `tests/[\w/]+\.py::test_\w+`$", promise, re.MULTILINE), promise


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_every_named_test_exists(file, name):
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_key_is_in_the_table_of_policy_keys():
    from atoll.deploy.policy import Policy

    table = (ROOT / "docs" / "policy.md").read_text()
    for key in Policy.__struct_fields__:
        assert re.search(rf"^\| .*`{key}`.* \|", table, re.MULTILINE), key


TABLES = {"privacy": "| method | the server learns of a site", "federation": "| method | `--dp` |"}


@pytest.mark.parametrize("page", TABLES)
def test_every_method_is_in_both_tables_of_what_leaves(page):
    from atoll.methods import METHODS

    text = (ROOT / "docs" / f"{page}.md").read_text()
    _, found, rest = text.partition(f"\n{TABLES[page]}")
    assert found
    rows = [line.split("|")[1] for line in rest.partition("\n\n")[0].splitlines()[2:]]
    names = (name.partition("(")[0] for row in rows for name in row.split(","))
    assert {re.sub("[^a-z+]", "", name.lower()) for name in names} - {"gcfl+"} == set(METHODS)
