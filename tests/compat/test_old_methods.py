"""Files with methods that users wrote for an older Atoll run, or get one sentence."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

OLD = Path(__file__).parent / "old"
SMALL = ("--data", "lagoon:nodes=200", "--clients", 3, "--rounds", 1, "--set", "hidden=8")


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Unload the method files, because other tests may use their names."""
    yield
    for name in ("fedmedian", "fedplain", "newer"):
        sys.modules.pop(name, None)


def says(cli, file: str) -> str:
    """Return the error that the command line prints instead of running the file."""
    found = cli("run", f"{OLD / file}", *SMALL, "--quiet", code=2).stderr
    assert "Traceback" not in found
    return " ".join(found.replace("│", " ").split())


def test_a_loss_without_a_graph_gets_the_new_signature(cli) -> None:
    found = says(cli, "fedmedian.py:FedMedian")
    assert "fit now takes the client's graph and a loss of it" in found
    assert "loss(params, graph, key)" in found


def test_a_module_that_moved_gets_the_new_import(cli) -> None:
    found = says(cli, "fedplain.py:FedPlain")
    assert "imports a name from atoll.core.layers that does not exist" in found
    assert "from atoll import" in found


def test_a_name_that_moved_gets_the_new_import(cli, tmp_path: Path) -> None:
    (tmp_path / "newer.py").write_text("from atoll.core.private_layers import kept\n")
    found = cli("run", "newer.py:Newer", *SMALL, code=2).stderr
    assert "imports a name from atoll.core.private_layers" in " ".join(found.split())


def test_the_sentences_of_another_package_stay(cli, tmp_path: Path) -> None:
    (tmp_path / "newer.py").write_text("import no_such_package\n")
    found = " ".join(cli("run", "newer.py:Newer", *SMALL, code=2).stderr.split())
    assert "cannot be loaded: No module named 'no_such_package'" in found
