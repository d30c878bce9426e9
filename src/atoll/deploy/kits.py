"""Kits: one folder for each party of a federation, with its own key and the federation's root.

FLARE's provisioning makes the keys, certificates and signed start-up files. Atoll narrows them: two
classes may run, no code may be sent, no party gets a shell.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypedDict

from atoll.core.errors import AtollError, ConfigError
from atoll.core.files import write_atomically

ADMIN = "admin@atoll.federation"
PROJECT = "atoll"
PORT = 8102
CLASSES = {"server": ["atoll.deploy.jobs.Coordinator"], "site": ["atoll.deploy.jobs.Participant"]}
"""All that a job may run: on the server, and at a site."""
OLD_CLASSES = {path.replace("deploy", "federate"): path for (path,) in CLASSES.values()}
"""Paths in the allow-lists of older kits, and the same classes today."""
SETTINGS = "atoll.json"  # in a site's `local` folder: where its data and its policy are
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def need_nvflare() -> None:
    """One sentence where the extra is missing."""
    if importlib.util.find_spec("nvflare") is None:
        hint = "install it: pip install 'atoll-fgl[federation]'"
        raise ConfigError(f"a federation needs nvflare; {hint}")


def provision(
    folder: Path, sites: Sequence[str], *, host: str = "localhost", port: int = PORT
) -> dict[str, Path]:
    """Make the kits of a federation in a new folder, by party; sites reach the server at `host`."""
    need_nvflare()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"'{folder}' is not empty; kits are made once, in a new folder")
    if not sites:
        raise ConfigError("a federation needs at least one site")
    for name in sites:
        if not NAME.fullmatch(name) or name in ("server", "admin") or sites.count(name) > 1:
            hint = "use letters, digits, '-' and '_', each name once, not 'server' or 'admin'"
            raise ConfigError(f"'{name}' cannot name a site; {hint}")
    with tempfile.TemporaryDirectory() as work:
        made = _provision(Path(work), sites, host, port)
        folder.mkdir(parents=True, exist_ok=True)
        kits = {}
        for name in ("server", ADMIN, *sites):
            kits[name] = folder / ("admin" if name == ADMIN else name)
            shutil.copytree(made / name, kits[name])
            kits[name].chmod(0o700)
    for name, kit in kits.items():
        if name != ADMIN:
            _narrow(kit, CLASSES["server" if name == "server" else "site"])
        about = AboutKit(name=name, org=_org(name, sites), host=host, port=port, sites=list(sites))
        (kit / "kit.json").write_text(json.dumps(about, indent=1))
    return kits


def _org(name: str, sites: Sequence[str]) -> str:
    """FLARE's names of organisations have fewer letters than its names of sites."""
    return re.sub(r"\W", "_", name.replace("-", "_")) if name in sites else PROJECT


def _provision(work: Path, sites: Sequence[str], host: str, port: int) -> Path:
    """FLARE's own provisioning, in a separate process: it prints, and asks on errors."""
    server = {"name": "server", "type": "server", "org": PROJECT, "default_host": host}
    ports = {"fed_learn_port": port, "admin_port": port}
    admin = {"name": ADMIN, "type": "admin", "org": PROJECT, "role": "project_admin"}
    clients = [{"name": name, "type": "client", "org": _org(name, sites)} for name in sites]
    builders: dict[str, dict[str, object]] = {
        "workspace.WorkspaceBuilder": {"args": {"template_file": ["master_template.yml"]}},
        "static_file.StaticFileBuilder": {"args": {"config_folder": "config"}},
        "cert.CertBuilder": {},
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
    command = [sys.executable, "-m", "nvflare.cli", "provision", "-p", str(file), "-w", str(work)]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=work, check=False
    )
    made = work / PROJECT / "prod_00"
    if done.returncode or not made.is_dir():
        tail = (done.stdout + done.stderr).strip().splitlines()[-12:]
        raise AtollError(f"the kits could not be made: {' '.join(tail)}")
    return made


def _narrow(kit: Path, classes: Sequence[str]) -> None:
    """Allow only our classes, no code in jobs, no shell; log only warnings."""
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text())
    resources["class_allow_list"] = list(classes)
    resources["class_list_enforcement_mode"] = "enforce"
    resources["allow_log_streaming"] = False
    # No site sends its logs to the server.
    resources["components"] = [p for p in resources["components"] if "log" not in p["id"]]
    for server in resources.get("servers", ()):
        server["heart_beat_timeout"] = 35  # sites give a sign of life every 10 s
    (local / "resources.json").write_text(json.dumps(resources, indent=1))
    allowed = ("submit_job", "manage_job", "download_job", "view", "operate", "app_command")
    rights = dict.fromkeys(allowed, "any")
    denied = dict.fromkeys(("clone_job", "shell_commands", "byoc"), "none")
    rules = {"format_version": "1.0", "permissions": {"project_admin": {**rights, **denied}}}
    (local / "authorization.json").write_text(json.dumps(rules, indent=1))
    log = json.loads((local / "log_config.json.default").read_text())
    for name in ("logFileHandler", "errorFileHandler"):
        log["handlers"][name]["maxBytes"] = 1 << 20
    log["loggers"] = {"root": {"level": "WARNING", "handlers": ["logFileHandler"]}}
    (local / "log_config.json").write_text(json.dumps(log, indent=1))


class AboutKit(TypedDict):
    """The content of `kit.json`: the party, and where the server is."""

    name: str
    org: str
    host: str
    port: int
    sites: list[str]


def about_kit(kit: Path) -> AboutKit:
    """Whose kit it is."""
    try:
        found: AboutKit = json.loads((kit / "kit.json").read_text())
    except (OSError, ValueError):
        hint = "make kits with `atoll federate provision`"
        raise ConfigError(f"'{kit}' is not a kit; {hint}") from None
    return found


def certificate_end(kit: Path) -> datetime:
    """When the kit's certificate or the federation's root ends, whichever is first."""
    from cryptography import x509

    found = [*(kit / "startup").glob("*.crt"), kit / "startup" / "rootCA.pem"]
    return min(x509.load_pem_x509_certificate(f.read_bytes()).not_valid_after_utc for f in found)


def certificate_days(kit: Path) -> int:
    """Whole days until the kit's certificate or the federation's root ends; below 0: it ended."""
    return (certificate_end(kit) - datetime.now(UTC)).days


def server_command(kit: Path) -> list[str]:
    """The command that starts the server of a kit."""
    _rename_classes(kit)
    # The server stores into the kit; /tmp/nvflare, FLARE's default, is shared by all servers.
    file = kit / "local" / "resources.json"
    store = str(kit.resolve() / "atoll" / "store")
    file.write_text(re.sub(r'"/tmp/nvflare/', f'"{store}/', file.read_text()))
    loopback = about_kit(kit)["host"] in ("localhost", "127.0.0.1")
    # It listens on other addresses only if it serves other machines.
    more = ["host=127.0.0.1"] if loopback else []
    return _command("server.server_train", kit, "fed_server.json", more)


def site_command(kit: Path) -> list[str]:
    """The command that starts the site of a kit."""
    _rename_classes(kit)
    name = about_kit(kit)["name"]
    return _command("client.client_train", kit, "fed_client.json", [f"uid={name}"])


def _rename_classes(kit: Path) -> None:
    """Give our classes in an older kit's allow-list today's paths; the list gets no new entry."""
    file = kit / "local" / "resources.json"
    resources = json.loads(file.read_text())
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
    """Note in a site's kit where its data and its policy are."""
    given = {"data": data, "policy": policy, **more}
    plain = {name: value for name, value in given.items() if value is not None}
    text = json.dumps(plain, default=lambda path: str(path.resolve()))
    (kit / "local" / SETTINGS).write_text(text)
