"""Kits allow two classes and no code, and their certificates are watched."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.core.errors import ConfigError
from atoll.deploy.kits import (
    ADMIN,
    CLASSES,
    COMM,
    GATES,
    about_kit,
    certificate_days,
    check_certificates,
    check_site_name,
    provision,
    read_settings,
    server_command,
    site_command,
    state_folder,
    write_settings,
)


def test_kits_allow_our_classes_alone_and_no_code(tmp_path):
    kits = provision(tmp_path / "kits", ["bank-a", "bank-b"], port=12345)
    assert set(kits) == {"server", ADMIN, "bank-a", "bank-b"}
    resources = json.loads((kits["bank-a"] / "local" / "resources.json").read_text())
    assert resources["class_allow_list"] == CLASSES["site"]
    assert resources["class_list_enforcement_mode"] == "enforce"
    rules = json.loads((kits["bank-a"] / "local" / "authorization.json").read_text())
    for role in ("project_admin", "lead"):
        assert rules["permissions"][role]["byoc"] == "none"
        assert rules["permissions"][role]["shell_commands"] == "none"
    connection = json.loads((kits["bank-a"] / "startup" / "fed_client.json").read_text())
    assert connection["client"]["connection_security"] == "mtls"
    assert connection["servers"][0]["service"]["target"] == "localhost:12345"
    assert kits["bank-a"].stat().st_mode & 0o077 == 0
    assert {certificate_days(kit) for kit in kits.values()} == {359}  # of 360, the hours round down
    assert check_certificates(kits["bank-a"]) == ""
    for name, command in (("server", server_command), ("bank-a", site_command)):
        settings = kits[name] / "local" / "comm_config.json"
        command(kits[name])
        assert json.loads(settings.read_text()) == COMM
        settings.write_text("{}")  # the owner's own settings stay
        command(kits[name])
        assert settings.read_text() == "{}"


def test_every_start_of_a_party_has_its_gate(tmp_path):
    kits = provision(tmp_path / "kits", ["bank-a"])
    for kit, kind, command in (
        (kits["bank-a"], "site", site_command),
        (kits["server"], "server", server_command),
    ):
        file = kit / "local" / "atoll__p_resources.json"
        made = json.loads(file.read_text())
        assert [part["path"] for part in made["components"]] == [GATES[kind]]
        file.unlink()  # a kit of an earlier version
        command(kit)
        assert json.loads(file.read_text()) == made
        module, _, name = GATES[kind].rpartition(".")
        assert hasattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", ["Alpha", "alpha", "ALPHA", "Server", "ADMIN", "", "a.b", "-a"])
def test_no_site_has_the_name_of_the_server(name):
    with pytest.raises(ConfigError, match="cannot name a site"):
        check_site_name(name, "Alpha")


def test_logs_are_lines_of_json_in_few_small_files(tmp_path):
    kit = provision(tmp_path / "kits", ["a"])["a"]
    config = json.loads((kit / "local" / "log_config.json").read_text())
    (handler,) = config["handlers"].values()
    assert handler["maxBytes"] * (handler["backupCount"] + 1) <= 4 << 20
    maker = config["formatters"][handler["formatter"]]
    module, _, name = maker["()"].rpartition(".")
    __import__(module)
    formatter = getattr(sys.modules[module], name)(maker["fmt"])
    try:
        raise ValueError("broken")
    except ValueError:
        why = sys.exc_info()
    record = logging.LogRecord("a.b", logging.ERROR, "f", 1, "it %s", ("failed",), why)
    line = formatter.format(record)
    assert "\n" not in line
    found = json.loads(line)
    assert (found["levelname"], found["fullName"], found["message"]) == (
        "ERROR", "a.b", "it failed",
    )  # fmt: skip
    assert "ValueError: broken" in found["exc_text"]


def kit_with(folder: Path, **days: tuple[float, float]) -> Path:
    """A kit with certificates that start and end a number of days from now."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([])
    for file, (start, end) in {"rootCA": (-9, 999), **days}.items():
        cert = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now + timedelta(start))
            .not_valid_after(now + timedelta(end))
            .sign(key, hashes.SHA256())
        )
        path = folder / "startup" / f"{file}.{'pem' if file == 'rootCA' else 'crt'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    return folder


def test_a_certificate_that_ends_soon_is_warned_of(tmp_path):
    kit = kit_with(tmp_path, client=(-300, 20.5))
    assert certificate_days(kit) == 20
    command = f"renew it: atoll federate renew --kit {kit}"
    assert check_certificates(kit) == f"the certificate of '{kit}' ends in 20 days; {command}"
    kit_with(tmp_path, client=(-300, 30.5))
    assert check_certificates(kit) == ""
    kit_with(tmp_path, client=(-300, 150), rootCA=(-300, 179.5))
    assert check_certificates(kit).startswith(f"the root of '{kit}' ends in 179 days; ")
    assert "found a new federation: atoll federate init" in check_certificates(kit)
    assert certificate_days(kit) == 149


def test_a_certificate_that_cannot_be_used_is_refused_in_one_sentence(tmp_path):
    kit = kit_with(tmp_path, server=(-300, -1.5))
    assert certificate_days(kit) == -2
    with pytest.raises(ConfigError, match=r"ended on .* atoll federate renew --kit"):
        check_certificates(kit)
    kit_with(tmp_path, server=(1, 300))
    with pytest.raises(ConfigError, match=r"is valid from .* UTC on, but the clock of this"):
        check_certificates(kit)
    kit_with(tmp_path, server=(-1, 300), rootCA=(-300, -1))
    with pytest.raises(ConfigError, match=r"the root of .* ended on .* atoll federate init"):
        check_certificates(kit)
    (kit / "startup" / "server.crt").write_text("damaged")
    with pytest.raises(ConfigError, match="lacks a readable certificate"):
        check_certificates(kit)


@pytest.mark.parametrize(
    ("status", "after"),
    [
        ("RUNNING", "FINISHED:ABANDONED"),
        ("DISPATCHED", "FINISHED:ABANDONED"),
        ("SUBMITTED", "SUBMITTED"),
        ("FINISHED:COMPLETED", "FINISHED:COMPLETED"),
    ],
)
def test_a_job_that_died_with_its_server_is_over(status, after, tmp_path):
    """Resuming its run would follow it for ever."""
    kit = provision(tmp_path / "kits", ["bank-a"])["server"]
    jobs = kit / "atoll" / "store" / "jobs-storage"
    for name, text in (("one", json.dumps({"name": "x", "status": status})), ("cut", '{"na')):
        (jobs / name).mkdir(parents=True)
        (jobs / name / "meta").write_text(text)
    server_command(kit)
    assert json.loads((jobs / "one" / "meta").read_text()) == {"name": "x", "status": after}
    assert (jobs / "cut" / "meta").read_text() == '{"na'


def test_a_restored_server_stores_into_its_new_place(tmp_path):
    kit = provision(tmp_path / "kits", ["bank-a"])["server"]
    server_command(kit)
    copy = kit.rename(tmp_path / "copy")
    server_command(copy)
    text = (copy / "local" / "resources.json").read_text()
    assert text.count(f'"{copy}/atoll/store/') == 2
    assert str(kit) not in text
    assert "/tmp/nvflare" not in text


def test_a_kit_without_its_certificate_waits_for_it(tmp_path):
    with pytest.raises(ConfigError, match="is not a kit; make one with `atoll federate request`"):
        about_kit(tmp_path)
    (tmp_path / "pending").mkdir()
    with pytest.raises(ConfigError, match=r"waits for .* federate join SIGNED.zip --kit"):
        about_kit(tmp_path)


def test_a_start_with_other_data_does_not_move_the_audit_log(tmp_path):
    write_settings(tmp_path, tmp_path / "old", policy=tmp_path / "policy.toml")
    assert state_folder(tmp_path) == tmp_path / "atoll"
    file = tmp_path / "local" / "atoll.json"
    file.write_text(json.dumps({**read_settings(tmp_path), "state": "/persistent"}))
    write_settings(tmp_path, tmp_path / "new")
    assert read_settings(tmp_path) == {"state": "/persistent", "data": str(tmp_path / "new")}
    assert state_folder(tmp_path) == Path("/persistent")
    file.write_text("{")
    with pytest.raises(ConfigError, match=r"atoll\.json' cannot be read"):
        state_folder(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b"\xff\xfe\x00", b'{"components": [3]}'])
@pytest.mark.parametrize("name", ["kit.json", "local/resources.json"])
def test_a_damaged_file_of_a_kit_is_named_in_one_sentence(tmp_path, name, content):
    kit = provision(tmp_path / "kits", ["a"], port=12345)["server"]
    (kit / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}' .*; restore it from a backup"):
        state_folder(kit) and server_command(kit)
