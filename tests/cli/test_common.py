"""Steps that commands share: KEY=VALUE, folders, --resume, and a clean stop."""

from __future__ import annotations

import gc
import signal
import sys
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from atoll.cli import common
from atoll.core.errors import ConfigError
from atoll.experiment.run import Stopped


def test_options_that_were_left_out_are_no_part_of_a_configuration() -> None:
    given = {"rounds": 0, "data": None, "settings": ("mu=1", "lr = 0.1"), "own": ()}
    assert common.chosen_options(given) == {"rounds": 0, "set": {"mu": "1", "lr": "0.1"}}
    with pytest.raises(ConfigError, match="--set gives mu twice, 1 and 2; give it once"):
        common.chosen_options({"settings": ("mu=1", "mu=2")})
    with pytest.raises(ConfigError, match="--own takes key=value, but got '=3'"):
        common.chosen_options({"own": ("=3",)})


def test_the_command_line_replaces_a_file_and_adds_to_its_pairs(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('rounds = 5\nseeds = 2\n[set]\nmu = "1"\nhidden = "8"\n')
    found = common.over_file(path, {"rounds": 9, "set": {"mu": "3"}})
    assert found == {"rounds": 9, "seeds": 2, "set": {"mu": "3", "hidden": "8"}}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"batch_size": 0}, "--batch-size"),
        ({"method": "fedavg"}, "METHOD 'fedavg'"),
        ({"out": None, "methods": ("a",)}, "METHOD"),
    ],
)
def test_nothing_stands_beside_resume(given: dict[str, object], named: str) -> None:
    common.refuse_beside_resume("run", {"out": None, "methods": ()}, "--json")
    sentence = f"its own configuration, but {named} was given; remove all options except --json"
    with pytest.raises(ConfigError, match=sentence):
        common.refuse_beside_resume("run", given, "--json")


@pytest.mark.parametrize("stop", [Stopped(None, 0, 3), KeyboardInterrupt()])
def test_a_stop_ends_the_command_after_a_report(stop: BaseException) -> None:
    @click.command()
    def work() -> None:
        with common.stoppable(partial(print, "stopped by")):
            raise stop

    done = CliRunner().invoke(work)
    assert done.exit_code == 130
    assert done.output.startswith("stopped by ")


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_stops_like_ctrl_c_with_its_own_code(handler, monkeypatch) -> None:
    @click.command()
    def work() -> None:
        with common.stoppable(partial(print, "stopped by")):
            signal.raise_signal(signal.SIGTERM)
            raise Stopped(None, 0, 3)

    before, interrupt = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGINT, handler)
    try:
        done = CliRunner().invoke(work)
    finally:
        signal.signal(signal.SIGINT, interrupt)
    assert done.exit_code == 143
    assert done.output.startswith("stopped by ")
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_error_of_the_system_is_not_a_stop() -> None:
    @click.command()
    def work() -> None:
        with common.stoppable(partial(print, "stopped by")):
            raise PermissionError(13, "Permission denied", "x")

    done = CliRunner().invoke(work)
    assert isinstance(done.exception, PermissionError)
    assert "stopped" not in done.output


def test_fresh_folders_have_safe_names_and_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "now")
    first = common.fresh_folder("fedavg-a/b:c")
    assert first == Path("atoll-runs/now-fedavg-a-b-c")
    first.mkdir(parents=True)
    assert common.fresh_folder("fedavg-a/b:c").name == "now-fedavg-a-b-c-2"


def test_imports_wait_for_no_collection_once(monkeypatch) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(gc.isenabled()))
    with common.without_collection():  # torch is loaded: there may be garbage
        assert gc.isenabled()
    assert not frozen
    monkeypatch.delitem(sys.modules, "torch")
    with common.without_collection():
        assert not gc.isenabled()
    assert frozen == [False]
    assert gc.isenabled()
