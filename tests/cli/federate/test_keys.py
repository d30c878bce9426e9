"""Commands for keys: output and refusals."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from atoll.cli.federate import keys as commands
from atoll.deploy import keys, kits

PASSPHRASE = "correct horse battery"


def last(text: str) -> str:
    """The fingerprint that a command prints last."""
    return text.strip().splitlines()[-1].removeprefix("fingerprint to read out: ")


def test_a_site_asks_and_joins(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "words").write_text(f"{PASSPHRASE}\n")
    where = ("--host", "server.example.org", "--out", "federation")
    said = cli("federate", "init", *where, "--passphrase-file", "words").stdout
    assert "valid for 3650 days" in said
    monkeypatch.setenv(kits.PASSPHRASE, PASSPHRASE)
    asked = last(cli("federate", "request", "--name", "bank-a", "--out", "bank-a").stdout)
    file = "bank-a/pending/bank-a.request.zip"
    approve = ("federate", "approve", file, "--federation", "federation", "--fingerprint")
    assert "do not use this file" in cli(*approve, "SHA256:00", code=2).stderr
    root = last(cli(*approve, asked, "--days", 20).stdout)
    join = ("federate", "join", "federation/approved/bank-a.signed.zip", "--kit", "bank-a")
    assert "give --fingerprint, as the coordinator read" in cli(*join, code=2).stderr
    assert "do not use this file" in cli(*join, "--fingerprint", asked, code=2).stderr
    said = cli(*join, "--fingerprint", root).stdout
    assert said.splitlines()[-1] == "bank-a: certificate valid for 19 days in bank-a"
    # A renewal needs no fingerprint of the root, which the kit knows.
    asked = last(cli("federate", "renew", "--kit", "bank-a").stdout)
    assert "'bank-a' is already a member" in cli(*approve, asked, code=2).stderr
    assert last(cli(*approve, asked, "--renew").stdout) == root
    assert "certificate valid for 359 days" in cli(*join).stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_leaves_no_key_in_clear_text(
    number: signal.Signals, cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def interrupted(*_: object, **__: object) -> None:
        with keys._secret_folder() as work:
            seen.append(work)
            os.kill(os.getpid(), number)
            time.sleep(1)  # the signal ends it

    monkeypatch.setenv(kits.PASSPHRASE, PASSPHRASE)
    monkeypatch.setattr(keys, "found", interrupted)
    before = signal.getsignal(number)
    # A handler of the test, should the command have none: the default would end all tests.
    signal.signal(number, lambda *_: None)
    try:
        cli("federate", "init", "--host", "h", "--out", "f", code=130)
    finally:
        signal.signal(number, before)
    (work,) = seen
    assert not work.exists()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["init", "--host", "h", "--out", "f"], "needs a passphrase; give a file or set ATOLL_"),
        (["init", "--host", "h", "--out", "f", "--passphrase-file", "."], "no readable passphrase"),
        (["renew", "--kit", "."], "is not a kit"),
        (["approve", "no.zip", "--federation", "."], "cannot be read"),
        (["join", "no.zip", "--kit", "site"], "cannot be read"),
        (["request", "--name", "a/b", "--out", "k"], "cannot name a site"),
        (["remove", "x", "--kit", "site"], "needs the administrator's kit"),
    ],
)
def test_bad_input_gets_one_sentence(refusal, words: list[str], problem: str) -> None:
    assert problem in refusal(*words)


class Desk:
    """An administrator's session that only notes what it was asked."""

    removed: list[str]

    def __init__(self, *kit: object) -> None:
        Desk.removed = []

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connected(self) -> dict[str, str]:
        return {"new": "token"}

    def remove(self, site: str) -> None:
        self.removed.append(site)

    def jobs(self) -> list[dict[str, str]]:
        ended = {"job_id": "1", "job_name": "one", "status": "FINISHED:COMPLETED"}
        return [ended, {"job_id": "2", "job_name": "two", "status": "RUNNING"}]

    def abort(self, job: str) -> None:
        assert self.removed == keys.about_kit(Path("admin"))["removed"]  # an open `run` reads it
        self.removed.append(job)


@pytest.mark.parametrize("site", ["site", "new"])
def test_a_removed_site_leaves_the_list(
    refusal, cli, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    monkeypatch.setattr(commands, "open_admin", Desk)
    assert "did you mean 'site'?" in refusal("remove", "sita", "--kit", "admin", "--yes")
    assert Desk.removed == []
    said = cli("federate", "remove", site, "--kit", "admin", "--yes").stdout
    assert "it keeps its data" in said
    assert "stopped two; " in said
    assert Desk.removed == [site, "2"]  # a job that runs would keep its sites
    about = keys.about_kit(Path("admin"))
    assert about["removed"] == [site]
    assert site not in about["sites"]
