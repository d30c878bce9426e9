"""Delivery of the model of a finished run to its sites, signed by the server.

A site stores it in `runs/RUN/model` in its state folder (by default `atoll` in its kit):

- `seed-N/model.toml`, `seed-N/deployed.safetensors`: the model for this site. It is the global
  model or the site's own, never another site's (`experiment.model`).
- added by the site: `seed-N/private.safetensors` from its state, if predictions need it;
  `seed-N/encoder.json` for tables; `seed-N/own.toml` with all facts for the card and predictions;
  and `seed-N/MODEL_CARD.md`. From model.toml the site uses only a `Claim` and checked facts.
- `manifest.json`: run, site, configuration, selected rounds, size and SHA-256 of each server file.
- `manifest.sig`, `server.crt`: the server's signature of the manifest, and its certificate.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import tomli_w
import torch
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from atoll import __version__
from atoll.core.batching import batching_of
from atoll.core.errors import ConfigError, WireError
from atoll.core.federation import Federation
from atoll.core.files import replacing, write_atomically
from atoll.core.method import Method
from atoll.core.random import make_key
from atoll.core.task import ROLES
from atoll.data.own.agree import MODES
from atoll.deploy.account import Account
from atoll.deploy.audit import Audit, Json
from atoll.deploy.begun import Begun, ordered
from atoll.deploy.coordinator import Order
from atoll.deploy.forms import Form, first_model
from atoll.deploy.heads import Delivery, Sealed, read_head
from atoll.deploy.kits import about_kit, state_folder
from atoll.deploy.lock import FolderLock
from atoll.deploy.policy import Refusal
from atoll.deploy.site import Site
from atoll.deploy.site_data import SiteData
from atoll.deploy.states import States
from atoll.engines.codec import decode, encode, load_checkpoint
from atoll.engines.fleet import NEVER, Fleet, Packet
from atoll.engines.prepare import prepared
from atoll.experiment.build import build_method
from atoll.experiment.card import ABOUT, CARD, OWN, data_facts, privacy_facts, write_card
from atoll.experiment.config import RunConfig, config_text
from atoll.experiment.folder import RunFolder
from atoll.experiment.history import positive_of, select_rule
from atoll.experiment.metrics import SENT as TOLD
from atoll.experiment.metrics import Evaluator, find_metric, toward
from atoll.experiment.model import (
    described,
    encode_private,
    read_model,
    reads_states,
    write_encoder,
)
from atoll.experiment.privacy import keeps_scores, site_report, with_privacy
from atoll.experiment.protocols import protocol
from atoll.experiment.threshold import Threshold, choose, parse_rule

MANIFEST = "manifest.json"
SEAL = (MANIFEST, "manifest.sig", "server.crt")  # files with the parts of `heads.Sealed`
PRIVATE = "private.safetensors"
ADDED = (PRIVATE, "encoder.json", OWN, CARD)  # files that a site adds
SENT = (ABOUT, "deployed.safetensors")  # files that the server sends
PURPOSE = b"atoll model\n"  # a signed prefix, because the key has other uses too
HASH = hashes.SHA256()
Claimed = TypeVar("Claimed")
PADDING = padding.PSS(padding.MGF1(HASH), padding.PSS.DIGEST_LENGTH)


class Foreign(WireError):
    """A file in the folder of a delivered model that neither the server nor the site wrote."""


class File(msgspec.Struct, frozen=True):
    """Size and hash of a file that the server sent."""

    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The signed content of `manifest.json`. A later version may add fields."""

    run: str
    site: str
    config: str  # as TOML
    rounds: dict[int, int]  # the selected round of each seed
    states: dict[int, int]  # the round of the private state that belongs to each seed's model
    files: dict[str, File]
    atoll: str  # the server's version

    def check_names(self) -> None:
        """Refuse files other than `SENT` of each seed, or missing ones: names become paths."""
        wanted = {f"seed-{seed}/{name}" for seed in self.rounds for name in SENT}
        for name in sorted(self.files.keys() - wanted):
            raise WireError(f"'{name[:100]}' cannot name a file of a model")
        for name in sorted(wanted - self.files.keys()):
            raise WireError(f"'{name}' of the model is missing")


class Chosen(msgspec.Struct, frozen=True):
    """The server's part of a threshold. The configuration contains the rule and the class."""

    value: Annotated[float, msgspec.Meta(ge=0, le=1)]


class Claim(msgspec.Struct, frozen=True):
    """The facts that a site reads from a delivered model.toml: only the server knows them."""

    client_metric: str = "accuracy"
    client_scores: Annotated[list[float], msgspec.Meta(max_length=1)] = []
    threshold: Chosen | None = None


def open_sealed(sealed: Sealed, kit: Path, audit: Audit | None = None) -> Manifest:
    """Return the manifest if the server of the kit's federation signed it.

    An expired certificate is accepted if the audit log already contains the manifest.
    """
    certificate = _server_certificate(sealed.certificate.encode(), kit)
    noted = audit is not None and audit.events(**_delivered(sealed.manifest))
    now, end = datetime.now(UTC), certificate.not_valid_after_utc
    if not noted and now < certificate.not_valid_before_utc:
        raise WireError("the certificate of the server is not valid yet; check the clocks")
    if not noted and now > end:
        raise WireError(f"the certificate of the server ended {end}")
    key = certificate.public_key()
    try:
        if not isinstance(key, RSAPublicKey):
            raise WireError("the server's key is not an RSA key; no other can sign a model")
        signature = base64.b64decode(sealed.signature, validate=True)
        key.verify(signature, PURPOSE + sealed.manifest.encode(), PADDING, HASH)
        return msgspec.json.decode(sealed.manifest, type=Manifest)
    except (InvalidSignature, ValueError, msgspec.DecodeError) as error:
        raise WireError("the signature of the model's manifest is not the server's") from error


def _delivered(manifest: str) -> dict[str, str]:
    """Return the values by which the audit log identifies a delivered model."""
    return {"event": "delivered", "manifest": hashlib.sha256(manifest.encode()).hexdigest()}


def _server_certificate(pem: bytes, kit: Path) -> x509.Certificate:
    """Return the certificate if the kit's root issued it to the kit's server."""
    try:
        root = x509.load_pem_x509_certificate((kit / "startup" / "rootCA.pem").read_bytes())
        about = json.loads((kit / "startup" / "fed_client.json").read_text())
        server = about["servers"][0]["identity"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"'{kit}' is not the kit of a site ({error})") from error
    try:
        certificate = x509.load_pem_x509_certificate(pem)
    except ValueError as error:
        raise WireError("the certificate of the model's signer cannot be read") from error
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature) as error:
        why = "the certificate of the model's signer is not of this federation's root"
        raise WireError(why) from error
    subject = certificate.subject
    name = [part.value for part in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    role = [part.value for part in subject.get_attributes_for_oid(NameOID.UNSTRUCTURED_NAME)]
    if name != [server] or role not in ([], ["server"]):
        raise WireError(f"the model was signed by {name}, not by the server of the federation")
    return certificate


class Signer:
    """The server's key and certificate."""

    def __init__(self, kit: Path) -> None:
        try:
            self.certificate = (kit / "startup" / "server.crt").read_text()
            key = load_pem_private_key((kit / "startup" / "server.key").read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"the server's key in '{kit}' cannot be read: {error}") from error
        if not isinstance(key, RSAPrivateKey):
            raise ConfigError(f"the server's key in '{kit}' is not an RSA key; make a new kit")
        self.key = key

    def sealed(self, manifest: Manifest) -> Sealed:
        text = msgspec.json.encode(manifest)
        signature = self.key.sign(PURPOSE + text, PADDING, HASH)
        return Sealed(text.decode(), base64.b64encode(signature).decode(), self.certificate)


def deliver(order: Order, fleet: Fleet, folder: Path, signer: Signer) -> dict[str, str]:
    """Send every site its model of a finished run. Return the reasons of failed sites."""
    audit, run = Audit(folder / "audit.jsonl"), RunFolder(folder)
    seeds = [seed for seed in run.config.all_seeds if run.model_folder(seed).exists()]
    if not seeds:
        audit.note("not delivered", reason="the run kept no model")
        return {}
    states = {seed: load_checkpoint(run.checkpoint(seed))["states"] for seed in seeds}
    packets = {}
    for place, site in order.members.items():
        files, rounds, kept = dict[str, bytes](), dict[int, int](), dict[int, int]()
        for seed in seeds:
            part, rounds[seed] = site_model(run.model_folder(seed), place)
            files |= {f"seed-{seed}/{name}": data for name, data in part.items()}
            # In earlier versions, sites did not keep the state of the selected round.
            kept[seed] = states[seed]["kept"][place] if "kept" in states[seed] else NEVER
        manifest = Manifest(
            run=order.run,
            site=site,
            config=config_text(run.config),  # without the comments, which name local paths
            rounds=rounds,
            states=kept,
            files={name: _file(data) for name, data in files.items()},
            atoll=__version__,
        )
        head = {"do": "deliver", "run": order.run}
        head |= msgspec.to_builtins(signer.sealed(manifest))
        packets[site] = Packet(head, b"".join(files.values()))
    replies, failures = fleet.map("deliver", packets, order.deadline)
    for site in replies:
        audit.note("delivered", site=site, bytes=len(packets[site].body))
    for site, why in failures.items():
        audit.note("not delivered", site=site, kind=why.kind, reason=why.reason)
    older = "'deliver' is nothing that a site does"
    instead = "its Atoll is older and takes no model"
    return {s: instead if older in why.reason else why.reason for s, why in failures.items()}


def _file(data: bytes) -> File:
    return File(len(data), hashlib.sha256(data).hexdigest())


def site_model(folder: Path, place: int) -> tuple[dict[str, bytes], int]:
    """Return the files of a site's model (a model of one client), and its selected round."""
    model = read_model(folder)
    (tree, _), picked = model.of_client(place), int(model.rounds[place])
    about: Json = dict(model.about or {})
    one = {name: about.get(name, [])[place:][:1] for name in ("client_names", "client_scores")}
    about |= {"round": picked, "clients": 1, "one_per_client": False, "private_parts": False, **one}
    # Scores of the whole federation would disclose the other sites' scores.
    about |= {"files": {}, "scores": {}, "alerts": {}}
    if chosen := Threshold.of(about):
        alone = replace(chosen, precision=None, recall=None, alerts=None)
        about["threshold"] = alone.plain()
    text = tomli_w.dumps(about).encode()
    return {"model.toml": text, "deployed.safetensors": encode(tree)}, picked


def receive(site: Site, packet: Packet) -> Packet:
    """Check a model that the server sent, and store it. An identical model changes nothing."""
    head, kit = read_head(Delivery, packet.head), site.kit
    site.policy.check_model(len(packet.body))
    manifest = open_sealed(head, kit)
    if (manifest.run, manifest.site) != (head.run, about_kit(kit)["name"]):
        raise WireError(f"the model is of run '{manifest.run}' for {manifest.site}, not for here")
    _check_begun(site.audit, manifest)
    files = _cut(packet.body, manifest)
    parts = [Part.of(site, manifest, seed, files) for seed in manifest.rounds]
    for part in parts:
        _check_facts(part, manifest)
        _check_form(site, part)
    folder = site.folder / "runs" / head.run / "model"
    with FolderLock(folder.parent, "another job delivers the model of this run to the site"):
        _keep(site, head, manifest, parts, folder)
    return Packet({}, b"")


def _keep(site: Site, head: Delivery, manifest: Manifest, parts: list[Part], folder: Path) -> None:
    """Write a model to its folder. An intact model stays there until its owner deletes it."""
    if (folder / MANIFEST).exists():
        try:
            there = verify_model(folder, site.kit)
        except WireError as error:
            if isinstance(error, Foreign):
                raise
            site.audit.note("replaced", run=head.run, reason="its delivered model was damaged")
        else:
            if msgspec.structs.replace(there, atoll=manifest.atoll) == manifest:
                event = _delivered((folder / MANIFEST).read_bytes().decode())
                noted = site.audit.events(**event)  # a crash may have prevented the entry
                event = {"event": "kept"} if noted else event
                site.audit.note(**event, run=head.run, **site.cost())
                return
            hint = f"its owner can delete the folder runs/{head.run}/model"
            raise Refusal(f"another model of run '{head.run}' is at the site already; {hint}")
    size = sum(len(data) for part in parts for data in part.files.values())
    site.policy.check_disk(site.folder, head.run, size)  # the old model stays until the end
    texts, notes = (head.manifest, head.signature, head.certificate), dict[str, Any]()
    seal = dict(zip(SEAL, map(str.encode, texts), strict=True))
    with replacing(folder) as new:
        for name, data in seal.items():
            write_atomically(new / name, data)
        for part in parts:
            place = new / f"seed-{part.seed}"
            for name, data in part.files.items():
                write_atomically(place / name, data)
            lacks: Json = {}  # of this seed only
            try:
                _add_own_part(site, manifest, part, place)
            except WireError as error:  # the rest of the model is useful without the private part
                lacks = {"incomplete": str(error)}
            _add_card(site, manifest, part, place, lacks)
            notes |= lacks
    notes |= {"bytes": size, **_delivered(head.manifest), **site.cost()}
    site.audit.note(run=head.run, **notes)


def _check_begun(audit: Audit, manifest: Manifest) -> None:
    """Refuse a model whose run, seeds or selected rounds do not fit a run that began here."""
    if not manifest.rounds:
        raise WireError(f"the model of run '{manifest.run}' has no seed")
    config = ordered(manifest.config)
    for seed, picked in manifest.rounds.items():
        if seed not in config.all_seeds:
            raise WireError(f"run '{manifest.run}' has no seed {seed}")
        last = (config.rounds or 0) - 1  # without scores, only this round can be selected
        if not (last if keeps_scores(config.dp) else 0) <= picked <= last:
            what = f"the model of run '{manifest.run}' is of round {picked + 1}"
            raise WireError(f"{what}, which that run cannot select")
        begun = Begun(audit, f"{manifest.run}-{seed}")
        if not begun.configs:
            raise Refusal(f"run '{manifest.run}' was not begun here")
        begun.check(config)


def _cut(body: bytes, manifest: Manifest) -> dict[str, bytes]:
    """Split a packet's body into the files of the manifest, and check each file."""
    files, start = dict[str, bytes](), 0
    manifest.check_names()
    for name, file in manifest.files.items():
        files[name] = body[start : start + file.size]
        start += file.size
        if _file(files[name]) != file:
            raise WireError(f"file '{name}' of the model is not the one that the server signed")
    if start != len(body):
        raise WireError("the model has more bytes than the server signed")
    return files


class Part(NamedTuple):
    """The model of one seed, with the configuration and the data of this seed at this site."""

    seed: int
    files: dict[str, bytes]  # as sent, by name
    config: RunConfig
    method: Method  # without added privacy
    data: SiteData

    @staticmethod
    def of(site: Site, manifest: Manifest, seed: int, files: dict[str, bytes]) -> Part:
        data, config = site.data_of(f"{manifest.run}-{seed}"), ordered(manifest.config)
        sizes = data.graph.num_features, data.classes, data.graph.task.name
        own = {name: files[f"seed-{seed}/{name}"] for name in SENT}
        return Part(seed, own, config, build_method(config, *sizes), data)

    def claim(self, kind: type[Claimed]) -> Claimed:
        """Parse the delivered model.toml as `kind`."""
        try:
            return msgspec.convert(tomllib.loads(self.files[ABOUT].decode()), kind)
        except Exception as error:  # the server's text may cause any error in the reader
            raise WireError(f"{ABOUT} of the model of seed {self.seed} cannot be read") from error


def _check_facts(part: Part, manifest: Manifest) -> None:
    """Refuse a model whose sizes differ from the site's: readers allocate memory by them."""
    data, about = part.data, part.claim(dict)
    own: Json = {"features": data.graph.num_features, "classes": data.classes, "clients": 1}
    own |= {"task": data.graph.task.name, "one_per_client": False, "private_parts": False}
    for name, value in {**own, "round": manifest.rounds[part.seed]}.items():
        if type(about.get(name)) is not type(value) or about[name] != value:
            raise WireError(f"'{name}' of the model of seed {part.seed} does not fit this site")


def _check_form(site: Site, part: Part) -> None:
    """Refuse data that are not tensors. In a private run, also refuse forms unlike the method's.

    Otherwise a server could find out the size of the graph by sending tensors that may fit it.
    """
    site.private |= part.config.dp is not None
    tree = decode(part.files[SENT[1]], limit=site.policy.model_bytes, finite=False)
    if part.config.dp is not None:
        like = Federation((part.data.graph,), part.data.classes)
        if Form.of(tree) != first_model(with_privacy(part.method, part.config.dp), like):
            form = "not of its method's shapes and types"
            raise WireError(f"the model of seed {part.seed} is {form}")


def _add_own_part(site: Site, manifest: Manifest, part: Part, folder: Path) -> None:
    """Add the tensors that only this site has, if predictions need them."""
    seed, data, method = part.seed, part.data, part.method
    counts = manifest.states.get(seed, NEVER)
    if not reads_states(method):
        return
    if counts == NEVER:
        raise WireError("this site has no private state of the selected round")
    state, _ = States(site.folder / "runs" / f"{manifest.run}-{seed}").load(counts)
    whole = replace(read_model(folder), private=[state])
    try:
        own = whole.only_read(method, Federation((data.graph,), data.classes))
    except Exception as error:  # tensors of other shapes may cause any error in a network
        raise WireError(f"the tensors of the model of seed {seed} do not fit its method") from error
    if own.private:
        write_atomically(folder / PRIVATE, encode_private(own.private))


def _add_card(site: Site, manifest: Manifest, part: Part, folder: Path, lacks: Json) -> None:
    """Write all facts of the model, as this site knows them, and the model card."""
    data, config, method, claim = part.data, part.config, part.method, part.claim(Claim)
    own, tables = Federation((data.graph,), data.classes, metric=data.metric), data.encoder
    told = any(e.get("told", {}).get("columns") for e in site.audit.events(event="hello"))
    account, run = Account(site.audit), f"{manifest.run}-{part.seed}"
    left, sent = account.scores[run], account.of_round[run, manifest.rounds[part.seed]]
    total = math.inf if account.clear else account.precision()
    spent = site_report(config.dp, account.noises(manifest.run), total, site.policy.delta)
    facts: Json = {
        "site": True,
        "federated": True,
        "round": manifest.rounds[part.seed],
        "clients": 1,
        "one_per_client": False,
        "private_parts": False,
        **described(config, method, own),
        "data": data.name,  # the server may use any name for them
        "encoder": tables is not None,
        "measured": MODES[0] if told else "",
        "class_names": list(data.class_names),
        "client_names": [manifest.site],
        "fingerprints": [data_facts(data.graph, manifest.site)],
        "rounds": config.rounds,
        "select": select_rule(config, protocol(config.protocol)),
        "scoring": [name for name in TOLD if name in left],
        "privacy": privacy_facts(spent),
        **lacks,
    }
    facts |= _threshold(part, claim if "bins" in sent else Claim(), folder)
    by = claim.client_metric
    if by in (facts["metric"], "accuracy") and find_metric(by).sends in map(TOLD.get, sent):
        scores = [one for one in claim.client_scores if 0 <= one <= 1]  # never NaN
        facts |= {"client_metric": by, "client_scores": scores}
    write_atomically(folder / OWN, tomli_w.dumps(facts).encode())
    if tables is not None:
        write_encoder(folder, tables)
    write_card(folder)


def _threshold(part: Part, claim: Claim, folder: Path) -> Json:
    """Choose the threshold at this site if its scores stay here, else use the server's."""
    config, positive = part.config, positive_of(part.config, replace(part.data, name="its data"))
    if config.threshold is None:
        return {}
    if not keeps_scores(config.dp):
        found = claim.threshold and Threshold(config.threshold, claim.threshold.value, positive)
        return {"threshold": found.plain()} if found else {}
    evaluator, model = Evaluator(part.method, with_bins=True), read_model(folder)
    views, batching = dict(part.method.views), batching_of(config.batch_size or 0)
    (graph,) = prepared([part.data.graph], views, batching=batching)
    try:
        with torch.no_grad():
            scores, _ = evaluator.score(graph, *model.of_client(0), make_key(0))
        bins = toward(scores, positive).bins
    except Exception:  # the server chose the tensors, and must not learn whether they fail
        return {}
    counts = None if bins is None else bins[ROLES.index("val")].numpy()
    chosen = None if counts is None else choose(parse_rule(config.threshold), counts, positive)
    return {"threshold": chosen.plain()} if chosen else {}


def verify_model(folder: Path, kit: Path) -> Manifest:
    """Check signature and files of a delivered model with its site's kit. Return its manifest."""
    try:
        texts = [(folder / name).read_bytes().decode() for name in SEAL]  # each byte matters
    except (OSError, UnicodeDecodeError) as error:
        raise WireError(f"'{folder}' holds no delivered model ({error})") from error
    manifest = open_sealed(Sealed(*texts), kit, Audit(state_folder(kit) / "audit.jsonl"))
    manifest.check_names()
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file() or _file(path.read_bytes()) != file:
            raise WireError(f"file '{name}' of '{folder}' is missing, or was changed")
    known = {*SEAL, *manifest.files, *(f"seed-{s}/{n}" for s in manifest.rounds for n in ADDED)}
    for path in folder.rglob("*"):
        if path.is_file() and str(path.relative_to(folder)) not in known:
            raise Foreign(f"'{path}' was not delivered; remove it from the model's folder")
    return manifest
