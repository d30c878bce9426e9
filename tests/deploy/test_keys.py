"""Certificates: each party's key stays with it, and the root's key is encrypted."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from atoll.core.errors import AtollError
from atoll.deploy import keys
from atoll.deploy.kits import (
    ADMIN,
    CLASSES,
    about_kit,
    certificate_days,
    provision,
    write_settings,
)

PASSPHRASE = "correct horse battery"
OTHER = {"name": "x@y.org", "type": "admin", "org": "y", "role": "lead"}


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a coordinator."""
    folder = tmp_path_factory.mktemp("keys") / "federation"
    kits = keys.found(folder, PASSPHRASE, host="localhost", port=12345)
    assert set(kits) == {"server", ADMIN}
    return folder


@pytest.fixture(scope="module")
def joined(founded: Path) -> Path:
    """The kit of a site that asked, was approved and joined."""
    kit = founded.parent / "bank-a"
    request = keys.make_request(kit, "bank-a")
    with zipfile.ZipFile(request) as archive:
        assert b"PRIVATE KEY" not in b"".join(map(archive.read, archive.namelist()))
    assert keys.read_request(request).kind == "site"
    signed = keys.approve(founded, request, PASSPHRASE, days=20)
    keys.join(kit, signed, keys.read_approval(signed).fingerprint)
    return kit


def refused(problem: str, *call: object, **more: object) -> None:
    function, *given = call
    assert callable(function)
    with pytest.raises(AtollError, match=problem):
        function(*given, **more)


def private_keys(folder: Path) -> list[Path]:
    """Files with a key in clear text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if b"BEGIN RSA PRIVATE KEY" in path.read_bytes()]


def test_a_site_joins_with_a_key_that_never_left_it(founded: Path, joined: Path) -> None:
    assert private_keys(joined) == [joined / "startup" / "client.key"]
    assert (joined / "startup" / "client.key").stat().st_mode & 0o077 == 0
    assert joined.stat().st_mode & 0o077 == 0
    assert about_kit(joined) == {
        "name": "bank-a", "org": "bank_a", "host": "localhost", "port": 12345, "sites": ["bank-a"],
    }  # fmt: skip
    resources = json.loads((joined / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == CLASSES["site"]
    connection = json.loads((joined / "startup" / "fed_client.json").read_text())
    assert connection["servers"][0]["identity"] == "localhost"
    assert certificate_days(joined) == 19
    assert about_kit(founded / "admin")["sites"] == ["bank-a"]


def test_the_key_of_the_root_is_encrypted(founded: Path, joined: Path) -> None:
    key = founded / keys.ROOT / "rootCA.key"
    assert key.read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY")
    assert key.stat().st_mode & 0o077 == 0
    own = {founded / party / "startup" for party in ("server", "admin")}
    assert {path.parent for path in private_keys(founded)} == own
    refused("too short", keys.found, founded.parent / "other", "short")


def test_a_renewed_kit_has_a_new_key_and_keeps_the_rest(founded: Path, joined: Path) -> None:
    write_settings(joined, founded)
    (joined / "atoll").mkdir()
    (joined / "atoll" / "audit.jsonl").write_text("kept")
    before = (joined / "startup" / "client.key").read_bytes()
    request = keys.make_request(joined)
    refused("holds a key that waits", keys.make_request, joined)
    refused("'bank-a' is already a member .* --renew", keys.approve, founded, request, PASSPHRASE)
    wrong = keys.approve(founded, request, PASSPHRASE, renew=True)
    assert (joined / "startup" / "client.key").read_bytes() == before
    keys.join(joined, wrong)
    assert (joined / "startup" / "client.key").read_bytes() != before
    assert certificate_days(joined) == keys.DAYS - 1
    assert (joined / "atoll" / "audit.jsonl").read_text() == "kept"
    assert (joined / "local" / "atoll.json").exists()
    assert not list(joined.glob("*startup.*"))
    refused("waits for no certificate", keys.join, joined, wrong)
    assert about_kit(founded / "admin")["sites"] == ["bank-a"]


@pytest.mark.parametrize("kind", ["server", "admin"])
def test_the_coordinator_renews_server_and_administrator(
    founded: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = about_kit(founded / kind)
    request = keys.make_request(founded / kind)
    refused(f"the certificate of the {kind}", keys.approve, founded, request, PASSPHRASE)
    signed = keys.approve(founded, request, PASSPHRASE, days=100, kind=kind)
    assert keys.join(founded / kind, signed) == before
    assert certificate_days(founded / kind) == 99
    if kind == "admin":  # a second administrator cannot be smuggled in
        about = json.loads((founded / "admin" / "kit.json").read_text())
        other = shutil.copytree(founded / "admin", founded.parent / "other-admin")
        (other / "kit.json").write_text(json.dumps({**about, "name": "x"}))
        monkeypatch.setattr(keys, "_party", lambda about: OTHER)
        request = keys.make_request(other)
        refused("x@y.org' asks", keys.approve, founded, request, PASSPHRASE, kind="admin")


def test_requests_that_are_refused(founded: Path, tmp_path: Path) -> None:
    request = keys.make_request(tmp_path / "site", "bank-z")
    assert keys.read_request(request).name == "bank-z"
    refused("passphrase does not open", keys.approve, founded, request, "wrong passphrase")
    refused("holds no root", keys.approve, tmp_path, request, PASSPHRASE)
    refused("0 days", keys.approve, founded, request, PASSPHRASE, days=0)
    about = about_kit(founded / "admin")
    (founded / "admin" / "kit.json").write_text(json.dumps({**about, "removed": ["bank-z"]}))
    refused("was removed", keys.approve, founded, request, PASSPHRASE)
    (founded / "admin" / "kit.json").write_text(json.dumps(about))
    profile = founded / keys.ROOT / "profile.yaml"
    good = profile.read_text()
    profile.write_text(good.replace("localhost", "bank-z"))
    refused("cannot name a site", keys.approve, founded, request, PASSPHRASE)
    profile.write_text(good)
    # A file that changes after two people have compared its fingerprint.
    print_before = keys.read_request(request).fingerprint
    refused("has changed", keys.approve, founded, request, PASSPHRASE, fingerprint="SHA256:00")
    later = tmp_path / "later.request.zip"
    shutil.copy(request, later)
    with zipfile.ZipFile(later, "a") as archive:
        archive.writestr("more", b"")
    refused("has changed", keys.approve, founded, later, PASSPHRASE, fingerprint=print_before)
    # Another name in the letter than in the signed request inside.
    forged = tmp_path / "forged.zip"
    with zipfile.ZipFile(request) as old, zipfile.ZipFile(forged, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name).replace(b"bank-z", b"bank-y"))
    refused("could not be made", keys.approve, founded, forged, PASSPHRASE)
    refused("is not empty", keys.make_request, founded, "bank-b")
    refused("cannot name a site", keys.make_request, tmp_path / "x", "a b")


def test_files_that_are_no_letter(tmp_path: Path) -> None:
    refused("cannot be read", keys.read_request, tmp_path / "none.zip")
    (tmp_path / "text.zip").write_text("no archive")
    refused("damaged or of another kind", keys.read_request, tmp_path / "text.zip")
    escape = '{"name": "a\\u001b[2J", "kind": "site"}'
    path = '{"name": "../../a", "kind": "user"}'
    kind = '{"name": "a", "kind": ["site"]}'
    good = '{"name": "a", "kind": "site"}'  # without the files beside it
    for number, content in enumerate(("{}", "[]", "{" * 99, escape, path, kind, good)):
        file = tmp_path / f"{number}.zip"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("request.json", content)
            archive.writestr("signed.json", content)
        if content != good:
            refused("damaged or of another kind", keys.read_request, file)
        refused("damaged or of another kind", keys.read_approval, file)
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("request.json", b"0" * (keys.LARGEST + 1))
    refused("damaged or of another kind", keys.read_request, tmp_path / "bomb.zip")


def test_a_site_joins_only_the_root_it_was_told_of(
    founded: Path, joined: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    keys.found(other, PASSPHRASE)
    kit = tmp_path / "bank-b"
    request = keys.make_request(kit, "bank-b")
    right = keys.approve(founded, request, PASSPHRASE)
    wrong = keys.approve(other, request, PASSPHRASE)
    expected = keys.read_approval(right).fingerprint
    refused("do not join", keys.join, kit, wrong, expected)
    refused("do not join", keys.join, kit, right)
    # A kit that is renewed knows its root, and asks for no fingerprint.
    copy = shutil.copytree(joined, tmp_path / "copy")
    renewed = keys.make_request(copy)
    refused("do not join", keys.join, copy, keys.approve(other, renewed, PASSPHRASE))
    # One party's certificate does not fit another's key.
    refused("could not be made", keys.join, copy, right)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(keys, "finish_kit", None)
        with pytest.raises(TypeError):
            keys.join(kit, right, expected)
    refused("do not join", keys.join, kit, right)  # half a kit does not decide on its root
    assert keys.join(kit, right, expected.replace(":", "").lower())["name"] == "bank-b"
    resources = json.loads((kit / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == CLASSES["site"]
    approved = about_kit(founded / "admin")["sites"]
    assert approved == ["bank-a", "bank-b"]


def test_names_of_members_and_removed_sites_stay_with_the_root(founded, joined, tmp_path) -> None:
    """Also where the administrator's kit is on another machine."""
    home = tmp_path / "home"
    shutil.copytree(founded, home, ignore=shutil.ignore_patterns("admin"))
    other = keys.make_request(tmp_path / "thief", "bank-a")
    waiting = (home / "approved" / "bank-a.signed.zip").read_bytes()
    refused("'bank-a' is already a member", keys.approve, home, other, PASSPHRASE)
    assert (home / "approved" / "bank-a.signed.zip").read_bytes() == waiting
    assert keys.note_removed(home, "bank-a")
    refused("was removed", keys.approve, home, other, PASSPHRASE, renew=True)
    assert not keys.note_removed(tmp_path, "bank-a")


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff\xfe", b'{"server": []}'])
@pytest.mark.parametrize("name", ["profile.yaml", keys.MEMBERS])
def test_a_damaged_file_of_the_root_is_one_sentence(
    founded, joined, tmp_path, name, content
) -> None:
    root = shutil.copytree(founded / keys.ROOT, tmp_path / "home" / keys.ROOT)
    request = keys.make_request(tmp_path / "site", "bank-x")
    (root / name).write_bytes(content)
    if name == keys.MEMBERS and content.startswith(b"{") and len(content) > 1:
        return  # an empty list of members, or one with more fields
    refused(f"{name}' cannot be read", keys.approve, tmp_path / "home", request, PASSPHRASE)


@pytest.mark.parametrize("port", [0, -1, 65536, 99999])
def test_a_port_that_does_not_exist_is_refused(tmp_path, port) -> None:
    refused(f"{port} is not a port", keys.found, tmp_path / "f", PASSPHRASE, port=port)
    refused(f"{port} is not a port", provision, tmp_path / "f", ["a"], port=port)
    assert not (tmp_path / "f").exists()


def test_names_that_differ_only_in_case_are_one_name(founded: Path, joined: Path) -> None:
    founded = shutil.copytree(founded, founded.parent / "copy")
    request = keys.make_request(founded.parent / "case", "BANK-A")
    refused("'bank-a' is already a member", keys.approve, founded, request, PASSPHRASE)
    refused("'bank-a' is already", keys.approve, founded, request, PASSPHRASE, renew=True)
    keys.note_removed(founded, "bank-a")
    refused("was removed", keys.approve, founded, request, PASSPHRASE)


@pytest.mark.parametrize("text", ['{"sites": "abc"}', '{"removed": {"a": 1}}', '{"sites": [1]}'])
def test_a_list_of_members_that_is_no_list_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / keys.MEMBERS).write_text(text)
    refused("a name is no text", keys.Members.read, tmp_path / keys.MEMBERS)
