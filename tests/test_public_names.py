"""`import atoll` offers everything that a method's file needs, and a type checker sees the same."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import atoll

ROOT = Path(__file__).parents[1]


def test_all_names_can_be_imported() -> None:
    for name in atoll.__all__:
        assert getattr(atoll, name) is not None
    assert len(atoll.__all__) == len(set(atoll.__all__))
    assert {*atoll.__all__} <= {*dir(atoll)}


def test_a_type_checker_sees_the_same_names() -> None:
    tree = ast.parse((ROOT / "src" / "atoll" / "__init__.py").read_text())
    checked = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {alias.name for node in checked.body for alias in node.names}
    assert typed == {*atoll.__all__}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        _ = atoll.fitt


def test_importing_atoll_costs_nothing() -> None:
    code = "import atoll, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_page_lists_every_name_of_the_vocabulary() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    shown = set(re.findall(r"`(\w+)", page))
    assert {*atoll.__all__} <= shown


def test_the_method_of_the_docs_is_short_and_needs_no_deep_import() -> None:
    page = (ROOT / "docs" / "own-method.md").read_text()
    file = re.search(r'```python title="fedcalm.py"\n(.*?)```', page, re.DOTALL)
    assert file is not None
    assert len(file[1].splitlines()) <= 45
    assert "atoll." not in "\n".join(re.findall(r"^from .*", file[1], re.MULTILINE))
