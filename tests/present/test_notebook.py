"""HTML forms and progress in a notebook, with a stand-in for IPython, which tests do not need."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import atoll
from atoll.experiment.observers import Observer
from atoll.present import notebook

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


class Formatter:
    """The part of IPython's formatter that `register` calls, with the same lookup."""

    def __init__(self):
        self.forms = {}

    def for_type_by_name(self, module, name, form):
        self.forms[module, name] = form

    def __call__(self, value):
        for kind in type(value).__mro__:
            if (form := self.forms.get((kind.__module__, kind.__qualname__))) is not None:
                return form(value)
        return None


class Handle:
    def __init__(self, shown):
        self.shown = shown

    def update(self, html):
        self.shown.append(html)


@pytest.fixture
def jupyter(monkeypatch):
    """A notebook: its formatter, and every drawing of a bar."""
    shown, html = [], Formatter()
    display = SimpleNamespace(
        HTML=str, display=lambda first, display_id: shown.append(first) or Handle(shown)
    )
    formatters = SimpleNamespace(formatters={"text/html": html})
    shell = SimpleNamespace(display_formatter=formatters, kernel=object())
    ipython = SimpleNamespace(get_ipython=lambda: shell, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(notebook, "EVERY", 0.0)
    notebook.register()
    return SimpleNamespace(form=html, shown=shown, shell=shell)


def test_the_example_runs_and_every_object_has_its_form(jupyter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names, forms = {}, {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")  # outputs in the repository would go stale
        if cell["cell_type"] != "code":
            continue
        *lines, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module([*lines], []), "cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            forms[ast.unparse(last)] = jupyter.form(value)
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
    assert "3,000 (3,000 with a label)" in forms["source"]
    assert "lagoon: 5 clients" in forms["federation"]
    assert "10 rounds" in forms["result"]
    assert "fedavg" in forms["result"]
    assert all(name in forms["found"] for name in ("local", "fedavg", "<table>"))
    assert forms["net"] is None
    assert "round 10 of 10" in "".join(jupyter.shown)
    assert jupyter.shown[-1].startswith("<progress value=1.0000 max=1></progress> 2 of 2 runs")


def test_progress_counts_rounds_of_all_seeds(jupyter):
    options = {"clients": 2, "rounds": 2, "seeds": 2}
    atoll.run("fedavg", "lagoon:nodes=200", **options)
    values = [float(text.split()[1].removeprefix("value=")) for text in jupyter.shown]
    assert values == [0.0, 0.25, 0.5, 0.75, 1.0]
    jupyter.shown.clear()
    atoll.run("fedavg", "lagoon:nodes=200", observer=Observer(), **options)
    assert jupyter.shown == []  # the user's own observer replaces it


def test_a_terminal_has_no_bar(jupyter):
    del jupyter.shell.kernel
    atoll.run("fedavg", "lagoon:nodes=200", clients=2, rounds=1)
    assert jupyter.shown == []


def test_resume_shows_progress_and_takes_an_observer_by_place(jupyter, tmp_path):
    atoll.run("fedavg", "lagoon:nodes=200", clients=2, rounds=1, out=tmp_path / "run")
    jupyter.shown.clear()
    atoll.resume(tmp_path / "run", rounds=2)
    assert "round 2 of 2" in jupyter.shown[-1]
    jupyter.shown.clear()
    atoll.resume(tmp_path / "run", Observer())
    assert jupyter.shown == []


def test_names_are_escaped_and_many_clients_are_cut():
    federation = atoll.partition(
        atoll.load("lagoon:nodes=2000"), "random", clients=40, allow=["no-edge"]
    )
    text = notebook.federation_html(federation)
    assert "10 more clients." in text
    graph = atoll.load("lagoon:nodes=200")
    object.__setattr__(graph, "name", "<b>")
    assert "&lt;b&gt;" in notebook.source_html(graph)


def test_importing_atoll_registers_the_forms_and_loads_nothing_heavy():
    code = """
import sys, types
seen = []
formatter = types.SimpleNamespace(for_type_by_name=lambda *words: seen.append(words[:2]))
formatters = types.SimpleNamespace(formatters={"text/html": formatter})
shell = types.SimpleNamespace(display_formatter=formatters)
sys.modules["IPython"] = types.SimpleNamespace(get_ipython=lambda: shell)
import atoll
assert ("atoll.data.source", "Source") in seen, seen
assert len(seen) == 4
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_the_forms_are_of_types_that_exist():
    for place in notebook.FORMS:
        module, name = place.rsplit(".", 1)
        assert hasattr(__import__(module, fromlist=[name]), name)
