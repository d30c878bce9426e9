"""The list of methods: names, papers and what each module says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from atoll.core.errors import ConfigError
from atoll.experiment.config import make_config, resolve
from atoll.methods import METHODS, FedAvg, method_class, method_name, split_preset


def test_methods_are_found_by_name_whatever_the_case():
    assert method_class("FedAvg") is METHODS["fedavg"] is FedAvg
    with pytest.raises(ConfigError, match=r"unknown method 'fedporx'; did you mean 'fedprox'\?"):
        method_class("fedporx")


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("fed-pub", "fedpub"),
        ("FED_PUB", "fedpub"),
        ("FedSage-Plus", "fedsage+"),
        ("GCFL+", "gcfl+"),
        ("GCFL-plus-dWs", "gcfl+dws"),
        ("a:fed-b", "a:fed-b"),
    ],
)
def test_names_are_found_as_people_type_them(typed, name):
    assert method_name(typed) == name
    assert ":" in name or method_class(typed) is METHODS[split_preset(name)[0]]


def test_gcfl_plus_is_a_preset():
    for name, preset in (("GCFL+", "plus"), ("gcfl+dWs", "plus-dws")):
        assert split_preset(name) == ("gcfl", preset)
        config, _ = resolve(make_config(method=name, data="PROTEINS"))
        assert (
            config
            == resolve(make_config(method="gcfl", data="PROTEINS", set={"preset": preset}))[0]
        )
    assert split_preset("FedSage+") == ("fedsage+", "")
    with pytest.raises(ConfigError, match="base=gcfl\\+ is gcfl with a preset"):
        resolve(make_config(method="fedtad", set={"base": "gcfl+"}))


@pytest.mark.parametrize("server", ["adam", "yogi", "adagrad"])
def test_adaptive_methods_are_fedopt(server):
    hint = rf"'Fed{server}'; it is fedopt with --set server_optimizer={server}$"
    with pytest.raises(ConfigError, match=hint):
        method_class(f"Fed{server}")


def test_a_file_without_a_class_lists_its_methods(tmp_path):
    path = tmp_path / "unnamed_methods.py"
    code = "from atoll import Averaging\nclass A(Averaging): ...\nclass B(Averaging): ...\n"
    path.write_text(code)
    with pytest.raises(ConfigError, match=rf"no class is named; write {path}:A or {path}:B$"):
        method_class(str(path))


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_has_a_paper_and_a_wire_line(name):
    cls = METHODS[name]
    text = sys.modules[cls.__module__].__doc__ or ""
    assert cls.paper
    assert cls.deployed in ("global", "personalised")
    for line in ("Wire, per client and round:", "Private state:", "Departures from the reference"):
        assert line in text


@pytest.mark.parametrize("name", [":", "..:x", ".:x", "a..b:C", "1a:C", "a b:C", " :", "a/b:C"])
def test_a_name_that_is_no_module_is_one_sentence(name):
    with pytest.raises(ConfigError, match=r"names no file and no module; write FILE.py:CLASS"):
        method_class(name)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("x = 1 / 0", r"ZeroDivisionError in mine_\d.py line 2: division by zero"),
        ("raise SystemExit(3)", r"SystemExit in mine_\d.py line 2: 3"),
        ("assert False, 'no'", r"AssertionError in mine_\d.py line 2: no"),
        ("def", r"\(mine_\d.py, line 2\)"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
    ],
)
def test_a_file_that_raises_is_one_sentence_with_its_line(line, problem, tmp_path, request):
    number = request.node.callspec.indices["line"]
    path = Path(tmp_path, f"mine_{number}.py")
    path.write_text(f"from atoll import Method\n{line}\n")
    with pytest.raises(ConfigError, match=rf"mine_\d.py:Mine' cannot be loaded: .*{problem}"):
        method_class(f"{path}:Mine")
