"""Kits: one folder for each party of a federation, with its key and the root's certificate.

FLARE's provisioning makes the keys, certificates and signed start-up files. Atoll restricts server
and sites: a job may run only Atoll's class for the party and no sent code, and neither has a shell.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NotRequired, TypedDict

from atoll.core.errors import AtollError, ConfigError, not_installed
from atoll.core.files import finish_replacing, write_atomically
from atoll.deploy.audit import Json

ADMIN = "admin@atoll.federation"
PROJECT = "atoll"
PORT = 8102
SCHEME = "http"
ROOT_DAYS = 3650
WARN_DAYS, WARN_ROOT_DAYS = 30, 180  # earlier for a root, because every party must act
LOG_BYTES = 1 << 20
CONNECTIONS = ("conn_manager", "sfm_endpoint")  # FLARE's loggers of connections
CLASSES = {"server": ["atoll.deploy.jobs.Coordinator"], "site": ["atoll.deploy.jobs.Participant"]}
"""The only class that a job may run on the server, and at a site."""
OLD_CLASSES = {path.replace("deploy", "federate"): path for (path,) in CLASSES.values()}
"""Class paths in the allow-lists of older kits, and their current paths."""
PASSPHRASE = "ATOLL_PASSPHRASE"
PENDING = "pending"  # in a kit: a key that waits for its certificate
SETTINGS = "atoll.json"  # in a site's `local` folder: the paths of its data and its policy
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
GATES = {"server": "atoll.engines.gate.ServerGate", "site": "atoll.engines.gate.SiteGate"}
COMM = {"allow_adhoc_conns": False, "streaming_retry_timeout": 10, "streaming_retry_wait": 2}
"""Transport settings. After each message, FLARE keeps a thread for the sum of both times."""


def need_nvflare() -> None:
    """Raise a one-sentence error if nvflare (the extra `federation`) is not installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise not_installed("a federation", "nvflare", "federation")


def provision(
    folder: Path, sites: Sequence[str], *, host: str = "localhost", port: int = PORT
) -> dict[str, Path]:
    """Make the kits of a federation in a new folder. Sites reach the server at `host`.

    Return the kits by party. All keys are made here, and the root's key is deleted. `keys.found`
    makes a federation that keeps the root's key.
    """
    if not sites:
        raise ConfigError("a federation needs at least one site")
    with tempfile.TemporaryDirectory() as work:
        return make_kits(folder, sites, host, port, Path(work))


def make_kits(
    folder: Path, sites: Sequence[str], host: str, port: int, work: Path
) -> dict[str, Path]:
    """Make the kits of server, administrator and sites. The root's key stays in `work`."""
    need_nvflare()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"'{folder}' is not empty; kits are made once, in a new folder")
    if not 0 < port < 1 << 16:
        raise ConfigError(f"{port} is not a port; give one from 1 to 65535")
    if len(host) > 63:
        raise ConfigError(f"the host '{host}' has {len(host)} letters; a certificate allows 63")
    for name in sites:
        check_site_name(name, host)
        if sites.count(name) > 1:
            raise ConfigError(f"'{name}' is named twice; give each site its own name")
    made = _provision(work, sites, host, port)
    folder.mkdir(parents=True, exist_ok=True)
    kits = {}
    for name in ("server", ADMIN, *sites):
        kits[name] = folder / ("admin" if name == ADMIN else name)
        shutil.copytree(made / (host if name == "server" else name), kits[name])
        about = AboutKit(name=name, org=org_of(name), host=host, port=port, sites=list(sites))
        finish_kit(kits[name], about)
    return kits


def check_site_name(name: str, host: str = "localhost") -> None:
    """Refuse a name that FLARE cannot use, or that would let a site pose as the server."""
    taken = name.lower() in ("server", "admin", host.lower())  # host names are case-insensitive
    if not NAME.fullmatch(name) or len(name) > 60 or taken:
        hint = f"use letters, digits, '-' and '_', at most 60, not 'server', 'admin' or '{host}'"
        raise ConfigError(f"'{name}' cannot name a site; {hint}")


def org_of(name: str) -> str:
    """Return a party's organisation. FLARE allows fewer characters there than in site names."""
    return PROJECT if name in ("server", ADMIN) else re.sub(r"\W", "_", name)


def finish_kit(kit: Path, about: AboutKit) -> None:
    """Turn a folder of FLARE's provisioning into a kit of Atoll that only its owner can read."""
    kit.chmod(0o700)
    if about["name"] != ADMIN:
        kind = "server" if about["name"] == "server" else "site"
        _narrow(kit, CLASSES[kind])
        _write_gate(kit, kind)
    write_about(kit, about)


def _provision(work: Path, sites: Sequence[str], host: str, port: int) -> Path:
    """Let FLARE provision all parties in `work`. Return the folder with one kit per party."""
    # A kit that is made from a request expects the server's name to be its host.
    server = {"name": host, "type": "server", "org": PROJECT, "default_host": host}
    ports = {"fed_learn_port": port, "admin_port": port}
    admin = {"name": ADMIN, "type": "admin", "org": PROJECT, "role": "project_admin"}
    clients = [{"name": name, "type": "client", "org": org_of(name)} for name in sites]
    builders: dict[str, dict[str, object]] = {
        "workspace.WorkspaceBuilder": {"args": {"template_file": ["master_template.yml"]}},
        "static_file.StaticFileBuilder": {"args": {"config_folder": "config", "scheme": SCHEME}},
        "cert.CertBuilder": {"args": {"root_valid_days": ROOT_DAYS}},
        "signature.SignatureBuilder": {},
    }
    project = {
        "api_version": 3,
        "name": PROJECT,
        "description": "Atoll",
        "participants": [{**server, **ports}, admin, *clients],
        "builders": [{"path": f"nvflare.lighter.impl.{k}", **v} for k, v in builders.items()],
    }
    file = work / "project.yml"
    file.write_text(json.dumps(project))  # JSON is YAML
    nvflare(work, "provision", "-p", str(file), "-w", str(work))
    return work / PROJECT / "prod_00"


def own_environment() -> dict[str, str]:
    """Return the environment for a child process, without the passphrase of the root's key."""
    return {name: value for name, value in os.environ.items() if name != PASSPHRASE}


def nvflare(work: Path, *words: str) -> None:
    """Run FLARE's command in a separate process, because it prints, prompts and writes to HOME."""
    done = subprocess.run(
        [sys.executable, "-m", "nvflare.cli", *words],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=work,
        env={**own_environment(), "HOME": str(work)},
        check=False,
    )
    if done.returncode:
        tail = (done.stdout + done.stderr).strip().splitlines()[-12:]
        raise AtollError(f"the kit could not be made: {' '.join(tail)}")


def _narrow(kit: Path, classes: Sequence[str]) -> None:
    """Allow only `classes`, no code in jobs, and no shell. Log only warnings and connections."""
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_allow_list"] = list(classes)
    resources["class_list_enforcement_mode"] = "enforce"
    resources["allow_log_streaming"] = False
    # Sites must not send their logs to the server.
    resources["components"] = [p for p in resources["components"] if "log" not in p["id"]]
    for server in resources.get("servers", ()):
        server["heart_beat_timeout"] = 35  # sites send a heartbeat every 10 s
        server["check_engine_frequency"] = 0.5  # seconds to notice a job's end (default: 3)
    # `nvflare deploy prepare` deletes the first and uses the second.
    for name in ("resources.json", "resources.json.default"):
        (local / name).write_text(json.dumps(resources, indent=1))
    allowed = ("submit_job", "manage_job", "download_job", "view", "operate", "app_command")
    rights = dict.fromkeys(allowed, "any")
    denied = dict.fromkeys(("clone_job", "shell_commands", "byoc"), "none")
    # An administrator's certificate has the second role after its renewal.
    roles = {role: {**rights, **denied} for role in ("project_admin", "lead")}
    rules = {"format_version": "1.0", "permissions": roles}
    (local / "authorization.json").write_text(json.dumps(rules, indent=1))
    fields = ("asctime", "levelname", "fullName", "fl_ctx", "message", "exc_text")
    formatter = {
        "()": "nvflare.fuel.utils.log_utils.JsonFormatter",
        "fmt": " ".join(f"%({field})s" for field in fields),
    }
    handler = {
        "class": "logging.handlers.RotatingFileHandler",
        "formatter": "json",
        "filename": "log.json",
        "maxBytes": LOG_BYTES,
        "backupCount": 2,
    }
    log = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": formatter},
        "handlers": {"file": handler},
        # Repeatedly closed connections reveal that two processes use one kit.
        "loggers": {f"nvflare.fuel.f3.sfm.{n}": {"level": "INFO"} for n in CONNECTIONS},
        "root": {"level": "WARNING", "handlers": ["file"]},
    }
    (local / "log_config.json").write_text(json.dumps(log, indent=1))


class AboutKit(TypedDict):
    """The content of `kit.json`: the party, the server's address, and the known sites."""

    name: str
    org: str
    host: str
    port: int
    sites: list[str]
    removed: NotRequired[list[str]]


def write_about(kit: Path, about: AboutKit) -> None:
    """Replace the content of `kit.json`."""
    write_atomically(kit / "kit.json", json.dumps(about, indent=1).encode())


def about_kit(kit: Path) -> AboutKit:
    """Read the description of a kit's party."""
    import msgspec  # late: `atoll --help` needs no kit

    file = kit / "kit.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=AboutKit)
    except OSError:
        if (kit / PENDING).exists():
            hint = f"then join: atoll federate join SIGNED.zip --kit {kit}"
            raise ConfigError(f"'{kit}' waits for the coordinator's approval; {hint}") from None
        hint = "make one with `atoll federate request`, or `provision` for a trial"
        raise ConfigError(f"'{kit}' is not a kit; {hint}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{file}' is damaged ({error}); restore it from a backup") from None


def certificate_days(kit: Path) -> int:
    """Return the whole days until the certificate or the root expires, below 0 afterwards."""
    return (certificate_end(kit) - datetime.now(UTC)).days


def certificate_end(kit: Path) -> datetime:
    """Return when the kit's certificate or the federation's root expires, whichever is first."""
    return min(end for _, _, end in _certificates(kit))


def check_certificates(kit: Path) -> str:
    """Refuse an expired or not yet valid certificate. Return a warning if it ends soon, else ""."""
    renew = f"renew it: atoll federate renew --kit {kit}"
    anew = "the coordinator has to found a new federation: atoll federate init"
    now, soon = datetime.now(UTC), ""
    if not (kit / "startup").exists():  # a renewal was killed
        finish_replacing(kit / "startup")
    for name, start, end in _certificates(kit):
        root = name == "rootCA.pem"
        what = f"the {'root' if root else 'certificate'} of '{kit}'"
        if now < start:
            clock = f"the clock of this machine says {now:%Y-%m-%d %H:%M} UTC; set the clock"
            raise ConfigError(f"{what} is valid from {start:%Y-%m-%d %H:%M} UTC on, but {clock}")
        if end < now:
            raise ConfigError(f"{what} ended on {end:%Y-%m-%d}; {anew if root else renew}")
        if (end - now).days < (WARN_ROOT_DAYS if root else WARN_DAYS):
            soon = soon or f"{what} ends in {(end - now).days} days; {anew if root else renew}"
    return soon


def _certificates(kit: Path) -> list[tuple[str, datetime, datetime]]:
    """Return the file names of the kit's certificates, each with start and end of validity."""
    from cryptography import x509

    found = [*(kit / "startup").glob("*.crt"), kit / "startup" / "rootCA.pem"]
    try:
        read = [(file.name, x509.load_pem_x509_certificate(file.read_bytes())) for file in found]
    except (OSError, ValueError):
        hint = "copy it again, or ask for a new one with `atoll federate request`"
        raise ConfigError(f"'{kit}' lacks a readable certificate; {hint}") from None
    return [(name, cert.not_valid_before_utc, cert.not_valid_after_utc) for name, cert in read]


def server_command(kit: Path) -> list[str]:
    """Update the settings of a server's kit. Return the command that starts the server."""
    _rename_classes(kit)
    _write_comm(kit)
    _write_gate(kit, "server")
    # The server's store is in the kit. All servers share FLARE's default, /tmp/nvflare.
    file, text = kit / "local" / "resources.json", json.dumps(_resources(kit), indent=1)
    store = str(kit.resolve() / "atoll" / "store")
    # A kit that was restored elsewhere still names its old store.
    old = r'"(?:/tmp/nvflare|[^"]*/atoll/store)/'
    write_atomically(file, re.sub(old, lambda _: f'"{store}/', text).encode())
    _end_jobs(Path(store))
    # The server listens on other addresses only if it serves other machines.
    more = ["host=127.0.0.1"] if on_loopback(about_kit(kit)) else []
    return _command("server.server_train", kit, "fed_server.json", more)


def on_loopback(about: AboutKit) -> bool:
    """Return whether the server's address is loopback, so all parties are on one machine."""
    return about["host"] in ("localhost", "127.0.0.1")


def _end_jobs(store: Path) -> None:
    """Mark jobs as abandoned if the server ended during them. FLARE would list them forever."""
    for file in store.glob("jobs-storage/*/meta"):
        try:
            meta = json.loads(file.read_text())
        except ValueError:  # the server was killed while it wrote; FLARE reports such a job itself
            continue
        if meta.get("status") in ("DISPATCHED", "RUNNING"):
            write_atomically(file, json.dumps({**meta, "status": "FINISHED:ABANDONED"}).encode())


def site_command(kit: Path) -> list[str]:
    """Update the settings of a site's kit. Return the command that starts the site."""
    _rename_classes(kit)
    _write_comm(kit)
    _write_gate(kit, "site")
    name = about_kit(kit)["name"]
    return _command("client.client_train", kit, "fed_client.json", [f"uid={name}"])


def _write_comm(kit: Path) -> None:
    """Write the transport settings into a kit that lacks them, such as an older kit."""
    file = kit / "local" / "comm_config.json"
    if not file.exists():
        write_atomically(file, json.dumps(COMM, indent=1).encode())


def _write_gate(kit: Path, kind: str) -> None:
    """Write the setting by which a party's FLARE process loads its gate (`engines.gate`)."""
    gate = {"id": "atoll_gate", "path": GATES[kind], "args": {}}
    file = kit / "local" / "atoll__p_resources.json"
    write_atomically(file, json.dumps({"components": [gate]}, indent=1).encode())


def _rename_classes(kit: Path) -> None:
    """Update old paths of Atoll's classes in a kit's allow-list. No entry is added."""
    file, resources = kit / "local" / "resources.json", _resources(kit)
    allowed = resources.get("class_allow_list", [])
    renamed = [OLD_CLASSES.get(name, name) for name in allowed]
    if renamed != allowed:
        resources["class_allow_list"] = renamed
        write_atomically(file, json.dumps(resources, indent=1).encode())


def _command(module: str, kit: Path, config: str, more: list[str]) -> list[str]:
    python = [sys.executable, "-u", "-m", f"nvflare.private.fed.app.{module}"]
    settings = ["secure_train=true", *more, f"org={about_kit(kit)['org']}", "config_folder=config"]
    return [*python, "-m", str(kit.resolve()), "-s", config, "--set", *settings]


def write_settings(kit: Path, data: Path, *, policy: Path | None = None, **more: object) -> None:
    """Replace the settings of a site: data, policy and `more`. Keep `state` (`state_folder`)."""
    state = read_settings(kit).get("state")
    given = {"state": state, "data": data, "policy": policy, **more}
    plain = {name: value for name, value in given.items() if value is not None}
    text = json.dumps(plain, default=lambda path: str(path.resolve()))
    write_atomically(kit / "local" / SETTINGS, text.encode())


def read_settings(kit: Path) -> Json:
    """Read the settings of a site (`write_settings`). They are empty before its first start."""
    return _read_local(kit, SETTINGS)


def _read_local(kit: Path, name: str) -> Json:
    file = kit / "local" / name
    try:
        found: Json = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{file}' cannot be read ({error}); restore it from a backup") from error
    return found


def _resources(kit: Path) -> Json:
    """Read FLARE's settings of a party. A kit cannot start without them."""
    if found := _read_local(kit, "resources.json"):
        return found
    file = kit / "local" / "resources.json"
    raise ConfigError(f"'{file}' is missing or empty; restore it from a backup")


def state_folder(kit: Path) -> Path:
    """Return the folder of a party's runs and audit log, which must outlive every job.

    In the runtimes of `nvflare deploy prepare` a job sees a copy of the kit and loses the files
    that it writes there. A lost audit log would reset the site's privacy budget. Such a kit must
    name a persistent folder, as `state` in its settings.
    """
    settings = read_settings(kit)
    if "state" in settings:
        return Path(settings["state"])
    resources = _read_local(kit, "resources.json") or _read_local(kit, "resources.json.default")
    try:
        launchers = {part["id"] for part in resources.get("components", ())}
    except (LookupError, TypeError) as error:
        why = f"'{kit / 'local' / 'resources.json'}' is damaged ({type(error).__name__}: {error})"
        raise ConfigError(f"{why}; restore it from a backup") from error
    if launchers & {"docker_launcher", "k8s_launcher", "slurm_launcher"}:
        hint = f'name a folder that outlives a job: "state" in local/{SETTINGS}'
        raise ConfigError(f"'{kit}' was made by `nvflare deploy prepare`; {hint}")
    return kit / "atoll"
