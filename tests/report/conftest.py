"""A real browser for the page: headless Chromium behind chromedriver, spoken to in plain HTTP."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.core.files import write_atomically
from atoll.experiment.config import make_config
from atoll.report import collect
from atoll.report.page import page
from atoll.studies.reproduce.recipes import read_paper
from atoll.studies.reproduce.table import Wanted, about_study, needed, plan_table
from atoll.studies.study import run_study
from atoll.studies.study_run import StudyRun

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip


class Browser:
    """The few commands of W3C WebDriver, and of Chromium's own, that the tests need."""

    def __init__(self, driver: str, binary: str, profile: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen([driver, f"--port={port}"], **quiet)
        self.base = f"http://127.0.0.1:{port}"
        self._await()
        options = {"binary": binary, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        wanted = {
            "browserName": "chrome", "goog:chromeOptions": options,
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }  # fmt: skip
        answer = self._send("/session", {"capabilities": {"alwaysMatch": wanted}})
        self.base += f"/session/{answer['sessionId']}"

    def _await(self) -> None:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"{self.base}/status", timeout=1).read()
                return
            except OSError:
                time.sleep(0.05)
        raise TimeoutError("chromedriver does not answer")

    def _send(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.base}{path}", data, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def cdp(self, command: str, **params: Any) -> Any:
        return self._send("/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, path: Path, section: str = "") -> None:
        """Load a file again, through a link if a section is given."""
        self._send("/url", {"url": "about:blank"})
        link = f"#{section}" if section else ""
        self._send("/url", {"url": path.absolute().as_uri() + link})

    def run(self, script: str) -> Any:
        """Return the result of a script."""
        return self._send("/execute/sync", {"script": script, "args": []})

    def log(self, kind: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._send("/se/log", {"type": kind})
        return found

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """A window of this width, and a wish for light or dark."""
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height,
                 deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.cdp("Emulation.setEmulatedMedia", features=scheme)

    def picture(self) -> bytes:
        """The whole page as PNG."""
        shot = self.cdp("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def close(self) -> None:
        request = urllib.request.Request(self.base, method="DELETE")
        try:
            urllib.request.urlopen(request, timeout=10).read()
        finally:
            self.process.terminate()
            self.process.wait(10)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    binary = shutil.which("chromium") or shutil.which("google-chrome")
    if not driver or not binary:
        pytest.skip("no Chromium with its chromedriver on this machine")
    found = Browser(driver, binary, tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six methods, three of them on a second federation, with a failed and a stopped cell."""
    folder = tmp_path_factory.mktemp("report") / "study"
    cells = []
    methods = ("local", "fedavg", "fedprox", "fedpub", "fedgta", "gcfl")
    other = ("local", "fedavg", "gcfl")
    problems = {"lagoon:nodes=160": methods, "lagoon:nodes=200,homophily=0.3": other}
    for data, chosen in problems.items():
        for method in chosen:
            config = make_config(method=method, data=data, clients=3, rounds=3, seeds=2,
                                 set={"hidden": 8})  # fmt: skip
            cells.append(
                StudyRun(f"{method}-{len(cells)}", config, {"method": method, "data": data})
            )
    lost = make_config(method="fedavg", data="nowhere.csv", rounds=1)
    cells.append(StudyRun("lost", lost, {"method": "fedavg", "data": "nowhere.csv"}))
    about = {"kind": "compare", "command": "atoll compare <all> & more"}
    outcomes = run_study(folder, cells, about=about)
    assert [one.run.name for one in outcomes if one.error] == ["lost"]
    (folder / "cells" / "gcfl-8" / "result.json").unlink()
    return folder


@pytest.fixture(scope="session")
def reproduced(study: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the study in the place of a paper's: two tables, one with gains and fewer rounds."""
    folder = tmp_path_factory.mktemp("report") / "paper"
    only = (("dataset", "IMDB-BINARY"), ("method", "self-train"), ("method", "FedAvg"))
    looks = {
        "table3": Wanted(only, both=True, seeds=2),
        "table4": Wanted((("dataset", "MOLECULES"),), seeds=2, rounds=2),
    }
    paper, described = read_paper("gcfl"), {}
    patch = pytest.MonkeyPatch()
    patch.setattr("atoll.studies.reproduce.recipes.absent", lambda data, root: "")
    for item, wanted in looks.items():
        about = about_study(paper, item, wanted, folder)
        rows = plan_table(paper, item.removeprefix("table"), wanted)
        for row in rows:
            for cell in needed(row):
                described[cell.name] = {"name": cell.name, "labels": dict(cell.labels), "seeds": 2}
        write_atomically(folder / "study.json", json.dumps({**about, "cells": []}).encode())
    patch.undo()
    text = json.dumps({**about, "cells": list(described.values())})
    write_atomically(folder / "study.json", text.encode())
    sources = ("local-0", "fedavg-1", "fedprox-2", "gcfl-5")
    for number, name in enumerate(described):
        shutil.copytree(study / "cells" / sources[number % 4], folder / "cells" / name)
    return folder


@pytest.fixture(scope="session")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, some trials of which are pruned."""
    folder = tmp_path_factory.mktemp("report") / "tuned"
    atoll.tune(
        ["fedavg", "fedprox"], "lagoon:nodes=150", clients=2, rounds=6, epochs=1, trials=8, seeds=2,
        search={"lr": "1e-3..0.3:log", "dropout": "0,0.5"}, set={"hidden": 8},
        out=folder,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def found(study):
    return collect([study])


@pytest.fixture(scope="module")
def html(found):
    return page(found)
