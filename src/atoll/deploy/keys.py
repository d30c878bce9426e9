"""Keys of a federation: its root, and how a party gets, renews and stores a certificate.

A new site, or a party that renews, creates its own key and sends a request. The coordinator signs
it with the root's key, which is stored encrypted. FLARE's distributed provisioning does the work.
No request and no approval contains a private key.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from atoll.core.errors import AtollError, ConfigError
from atoll.core.files import finish_replacing, replacing, write_atomically
from atoll.deploy.kits import (
    ADMIN,
    PENDING,
    PORT,
    PROJECT,
    SCHEME,
    AboutKit,
    about_kit,
    check_site_name,
    finish_kit,
    make_kits,
    need_nvflare,
    nvflare,
    org_of,
    write_about,
)
from atoll.deploy.lock import FolderLock

ROOT = "root"  # in the coordinator's folder: the root's certificate, and its encrypted key
BUSY = "another approval or removal is in progress; try again"
MEMBERS = "members.json"  # next to the root's key: the names of approved and of removed sites
DAYS = 360
"""Days that a certificate is valid by default. `approve --days` sets another number."""
KINDS = {"site": "site", "server": "server", "user": "admin"}  # FLARE's names and Atoll's names
LARGEST = 1 << 20  # bytes of one file in a request or an approval


@dataclass(frozen=True)
class Letter:
    """The content of a request or an approval, before it is trusted."""

    name: str
    kind: str
    fingerprint: str
    """The hash of a request's file, or of an approval's root. Two people compare it."""


def found(
    folder: Path,
    passphrase: str,
    *,
    host: str = "localhost",
    port: int = PORT,
) -> dict[str, Path]:
    """Create a root with an encrypted key. Return the kits of server and administrator by party."""
    if len(passphrase) < 8:
        raise ConfigError("the passphrase is too short; use at least 8 characters")
    with _secret_folder() as work:
        kits = make_kits(folder, (), host, port, work)
        state = json.loads((work / PROJECT / "state" / "cert.json").read_text())
    root = folder / ROOT
    root.mkdir(mode=0o700)
    server = {"host": host, "fed_learn_port": port, "admin_port": port}
    profile = {"scheme": SCHEME, "connection_security": "mtls", "server": server}
    pem = state["root_cert"].encode()
    about = {"project": PROJECT, "provision_version": "00"}
    about["rootca_fingerprint_sha256"] = _fingerprint_of(pem)
    files = {
        "rootCA.pem": pem,
        "rootCA.key": _encrypt(state["root_pri_key"].encode(), passphrase),
        "profile.yaml": json.dumps({"name": PROJECT, **profile}).encode(),  # JSON is YAML
        "ca.json": json.dumps(about).encode(),
    }
    for name, content in files.items():
        write_atomically(root / name, content, mode=0o600)
    return kits


def make_request(kit: Path, name: str | None = None) -> Path:
    """Create a new key in a kit's folder. Return the file with the request for its certificate.

    `name` is the name of a new site. Without it, the request renews the kit's own certificate.
    """
    need_nvflare()
    pending = kit / PENDING
    if pending.exists():
        hint = f"send the request in it, or delete '{pending}' and ask again"
        raise ConfigError(f"'{pending}' holds a key that waits for its certificate; {hint}")
    if name is None:
        party = _party(about_kit(kit))
    else:
        check_site_name(name)
        if kit.exists() and any(kit.iterdir()):
            raise ConfigError(f"'{kit}' is not empty; a new site's kit needs a new folder")
        kit.mkdir(parents=True, exist_ok=True)
        kit.chmod(0o700)
        party = {"name": name, "type": "client", "org": org_of(name)}
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / "party.yaml"
        file.write_text(json.dumps({"name": PROJECT, "participants": [party]}))
        made = (kit / f".{PENDING}").resolve()
        shutil.rmtree(made, ignore_errors=True)  # left over from an interrupted attempt
        nvflare(Path(work), "cert", "request", "-p", str(file), "--out", str(made))
    made.rename(pending)
    return pending / f"{party['name']}.request.zip"


def _party(about: AboutKit) -> dict[str, str]:
    """Return the entry of a party in FLARE's request for a certificate."""
    if about["name"] == "server":
        return {"name": about["host"], "type": "server", "org": PROJECT}
    if about["name"] == ADMIN:
        return {"name": ADMIN, "type": "admin", "org": PROJECT, "role": "lead"}
    return {"name": about["name"], "type": "client", "org": about["org"]}


def read_request(file: Path) -> Letter:
    """Read a request: the party that sent it, and the fingerprint of the file."""
    name, kind, _ = _read(file, "a request of `atoll federate request` or `renew`", "request.json")
    return Letter(name, kind, _fingerprint(hashlib.sha256(file.read_bytes()).digest()))


def read_approval(file: Path) -> Letter:
    """Read an approval: the party of the certificate, and the fingerprint of its root."""
    what = "an approval of `atoll federate approve`"
    name, kind, (pem,) = _read(file, what, "signed.json", "rootCA.pem")
    return Letter(name, kind, _fingerprint_of(pem))


def _read(file: Path, what: str, about: str, *more: str) -> tuple[str, str, list[bytes]]:
    """Return name and kind of the party, which are safe to print, and the files `more`."""
    try:
        with zipfile.ZipFile(file) as archive:
            if any(part.file_size > LARGEST for part in archive.infolist()):
                raise ValueError("a letter is small")
            content, rest = json.loads(archive.read(about)), [archive.read(name) for name in more]
        name, kind = str(content["name"]), KINDS[content["kind"]]
        if not re.fullmatch(r"[\w@.-]{1,255}", name, re.ASCII):
            raise ValueError("not a name")
    except OSError as error:
        raise ConfigError(f"'{file}' cannot be read ({error.strerror}); give {what}") from None
    except Exception:  # the archive reader raises many kinds of errors
        raise ConfigError(f"'{file}' is damaged or of another kind; give {what}") from None
    return name, kind, rest


def approve(
    federation: Path,
    file: Path,
    passphrase: str,
    *,
    days: int = DAYS,
    kind: str = "site",
    fingerprint: str | None = None,
    renew: bool = False,
) -> Path:
    """Sign a request with the federation's root. Return the file for the party that asked.

    `fingerprint` belongs to the file that two people compared. No other file is signed. To sign
    a certificate of the server or the administrator, `kind` must name it, because a site could
    ask for one. A second key for the name of a member needs `renew`, because another party could
    ask for it.
    """
    root, asked = federation / ROOT, read_request(file)
    if not (root / "rootCA.key").exists():
        hint = "give the folder of `atoll federate init`"
        raise ConfigError(f"'{federation}' holds no root of a federation; {hint}")
    if days < 1:
        raise ConfigError(f"a certificate cannot be valid for {days} days; give 1 or more")
    if asked.kind != kind or (kind == "admin" and asked.name != ADMIN):
        hint = f"approve it with --kind {asked.kind} only if it is your own kit's"
        raise ConfigError(f"'{asked.name}' asks for the certificate of the {asked.kind}; {hint}")
    desk = federation / "admin"
    about = about_kit(desk) if (desk / "kit.json").exists() else None  # it may be elsewhere
    with FolderLock(federation, BUSY):  # until the names are written
        members = _members(federation, about)
        if asked.kind == "site":
            _check_asked(asked.name, root, members, renew=renew)
        key = _decrypt((root / "rootCA.key").read_bytes(), passphrase)
        signed = federation / "approved" / f"{asked.name}.signed.zip"
        signed.parent.mkdir(mode=0o700, exist_ok=True)
        with _secret_folder() as work:
            copy = work / f"{asked.name}.request.zip"
            shutil.copyfile(file, copy)
            if read_request(copy).fingerprint != (fingerprint or asked.fingerprint):
                raise ConfigError(f"'{file}' has changed since it was read; compare it again")
            shutil.copytree(root, work / ROOT)
            (work / ROOT / "rootCA.key").write_bytes(key)
            shape = ["-c", str(work / ROOT), "--profile", str(work / ROOT / "profile.yaml")]
            where = [*shape, "--out", str(signed.resolve())]
            lasting = ["--valid-days", str(days), "--force"]
            nvflare(work, "cert", "approve", str(copy), *where, *lasting)
        if asked.kind == "site":
            members.sites = sorted({*members.sites, asked.name})
        members.write(root / MEMBERS)
        if about and asked.kind == "site" and asked.name not in about["sites"]:
            about["sites"].append(asked.name)
            write_about(desk, about)
    return signed


@dataclass
class Members:
    """The names of approved sites, and of removed sites, which no site may have again."""

    sites: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Members:
        """Read the names, or none if there is no file yet."""
        try:
            found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            members = cls(**found)
            for names in (members.sites, members.removed):
                if type(names) is not list or any(type(name) is not str for name in names):
                    raise TypeError("a name is no text")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            hint = "restore it from a backup"
            raise ConfigError(f"'{file}' cannot be read ({error}); {hint}") from None
        return members

    def write(self, file: Path) -> None:
        """Replace the content of the file by these names."""
        write_atomically(file, json.dumps(asdict(self)).encode(), mode=0o600)


def _members(federation: Path, about: AboutKit | None) -> Members:
    """Read the names next to the root's key, with those that only the administrator's kit has."""
    found = Members.read(federation / ROOT / MEMBERS)
    if about:
        found.sites = sorted({*found.sites, *about["sites"]})
        found.removed = sorted({*found.removed, *about.get("removed", ())})
    return found


def _check_asked(name: str, root: Path, members: Members, *, renew: bool) -> None:
    """Refuse an invalid or removed name, and, unless `renew` is set, a member's name."""
    file = root / "profile.yaml"
    try:
        host = json.loads(file.read_text())["server"]["host"]
        check_site_name(name, str(host))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"'{file}' cannot be read ({error}); restore it from a backup") from None
    # Some disks and people do not distinguish upper and lower case.
    same = [one for one in members.sites if one.casefold() == name.casefold()]
    if name.casefold() in map(str.casefold, members.removed):
        hint = "its old key would count again; the site needs another name"
        raise ConfigError(f"'{name}' was removed from the federation; {hint}")
    if same and not (renew and name in same):
        hint = "if the member itself asks for a new key, approve it with --renew"
        raise ConfigError(f"'{same[0]}' is already a member of the federation; {hint}")


def note_removed(federation: Path, name: str) -> bool:
    """Note a removed name next to the root's key. Return whether the root is there."""
    if not (federation / ROOT).is_dir():
        return False
    with FolderLock(federation, BUSY):
        members = _members(federation, None)
        members.removed = sorted({*members.removed, name})
        members.write(federation / ROOT / MEMBERS)
    return True


def join(kit: Path, file: Path, fingerprint: str | None = None) -> AboutKit:
    """Put the certificate into the kit that asked for it. Return the kit's description.

    A new site must give the root's fingerprint, as the coordinator named it. A renewed kit already
    knows its root, and keeps all files outside of `startup`.
    """
    need_nvflare()
    finish_replacing(kit / "startup")
    pending, given = kit / PENDING, read_approval(file)
    renewed = (kit / "kit.json").exists()  # a new kit gets this file last
    if renewed:
        fingerprint = _fingerprint_of((kit / "startup" / "rootCA.pem").read_bytes())
    if not pending.exists():
        hint = "ask with `atoll federate request` or `renew` first"
        raise ConfigError(f"'{kit}' waits for no certificate; {hint}")
    if fingerprint is None or not same_fingerprint(fingerprint, given.fingerprint):
        hint = f"'{file}' is signed by {given.fingerprint}"
        raise ConfigError(f"the fingerprint of the root is not {fingerprint}: {hint}; do not join")
    with tempfile.TemporaryDirectory() as work:
        where = ["--request-dir", str(pending.resolve()), "-w", work]
        words = [str(file.resolve()), *where, "--fingerprint", given.fingerprint]
        nvflare(Path(work), "package", *words)
        made = Path(work) / PROJECT / "prod_00" / given.name
        if renewed:
            with replacing(kit / "startup") as new:
                shutil.copytree(made / "startup", new)
        else:
            shutil.copytree(made, kit, dirs_exist_ok=True)
            finish_kit(kit, _about_joined(kit, given.name))
    shutil.rmtree(pending)
    return about_kit(kit)


def _about_joined(kit: Path, name: str) -> AboutKit:
    """Describe a new site's kit. The approval names the server."""
    config = json.loads((kit / "startup" / "fed_client.json").read_text())
    host, _, port = config["servers"][0]["service"]["target"].rpartition(":")
    return AboutKit(name=name, org=org_of(name), host=host, port=int(port), sites=[name])


def same_fingerprint(one: str, other: str) -> bool:
    """Return whether two fingerprints are equal, apart from case, colons and prefix."""
    plain = [text.upper().replace(":", "").removeprefix("SHA256") for text in (one, other)]
    return plain[0] == plain[1]


def _fingerprint(digest: bytes) -> str:
    return "SHA256:" + digest.hex(":").upper()


def _fingerprint_of(pem: bytes) -> str:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    try:
        return _fingerprint(x509.load_pem_x509_certificate(pem).fingerprint(hashes.SHA256()))
    except ValueError:
        why = "the certificate of the root cannot be read; the file is damaged"
        raise ConfigError(why) from None


def _encrypt(key: bytes, passphrase: str) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    how = form.BestAvailableEncryption(passphrase.encode())
    loaded = form.load_pem_private_key(key, None)
    return loaded.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, how)


def _decrypt(key: bytes, passphrase: str) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    try:
        loaded = form.load_pem_private_key(key, passphrase.encode())
    except ValueError:
        hint = "without the passphrase nothing can be signed"
        raise AtollError(f"the passphrase does not open the root's key; {hint}") from None
    plain = form.NoEncryption()
    return loaded.private_bytes(form.Encoding.PEM, form.PrivateFormat.TraditionalOpenSSL, plain)


@contextmanager
def _secret_folder() -> Iterator[Path]:
    """Yield a temporary folder for a key in clear text, in memory if the system supports it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as work:
        yield Path(work)
