"""A whole federation on this machine: server and sites on loopback, each with its own kit."""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

from atoll.core.errors import ConfigError
from atoll.core.federation import Federation
from atoll.deploy.kits import ADMIN, provision, server_command, site_command, write_settings
from atoll.deploy.processes import Processes
from atoll.deploy.site_data import write_clients


class Demo:
    """Provisions and starts everything; the end of the block ends every process.

    Args:
        federation: Each client becomes a site that is given its own file alone.
        keep: Folder for kits, logs and states; None throws them away at the end.
        policy: Every site's policy, as TOML; by default what methods declare may leave.
    """

    admin = ADMIN

    def __init__(self, federation: Federation, keep: Path | None = None, policy: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="atoll-")) if keep is None else keep
        self.thrown_away = keep is None
        self.policy = policy or 'disclose = "declared"\n'
        self.sites = tuple(f"site-{i + 1}" for i in range(len(federation)))
        self.port = free_port()
        self.processes = Processes()
        if keep is not None and keep.exists() and any(keep.iterdir()):
            raise ConfigError(f"'{keep}' is not empty; choose another folder for --keep")
        made = provision(self.folder / "kits", self.sites, port=self.port)
        self.kits = {"admin" if name == ADMIN else name: kit for name, kit in made.items()}
        files = write_clients(federation, self.folder / "data")
        for name, file in zip(self.sites, files, strict=True):
            policy_file = self.folder / f"policy-{name}.toml"
            policy_file.write_text(self.policy)
            write_settings(self.kits[name], file, policy=policy_file)

    def start(self, name: str) -> None:
        """Start the server or a site, or start it again."""
        kit = self.kits[name]
        command = server_command(kit) if name == "server" else site_command(kit)
        self.processes.start(name, command, self.folder / "logs" / f"{name}.log")

    def __enter__(self) -> Demo:
        try:
            for name in ("server", *self.sites):
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process; throw the folder away."""
        self.processes.end()
        if self.thrown_away:
            shutil.rmtree(self.folder, ignore_errors=True)


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
