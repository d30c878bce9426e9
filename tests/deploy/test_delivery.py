"""Delivery of a run's model: the receivers, and deliveries that a site refuses."""

from __future__ import annotations

import base64
import json
import shutil
import tomllib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
import pytest
import tomli_w
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

import atoll
from atoll.core.errors import AtollError, ConfigError, WireError
from atoll.core.graph import with_views
from atoll.core.random import make_key
from atoll.core.tree import leaves
from atoll.deploy import delivery
from atoll.deploy.audit import check_audit
from atoll.deploy.coordinator import Order, coordinate
from atoll.deploy.delivery import PURPOSE, Sealed, Signer, deliver, receive, verify_model
from atoll.deploy.kits import provision
from atoll.deploy.lock import FolderLock
from atoll.deploy.policy import NOT_COUNTED, Policy
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data, write_clients
from atoll.engines.codec import decode, encode
from atoll.engines.fleet import Packet
from atoll.experiment.build import build_method
from atoll.experiment.card import data_facts
from atoll.experiment.config import config_text, make_config
from atoll.experiment.folder import RunFolder
from atoll.experiment.model import read_model
from atoll.experiment.threshold import Threshold
from atoll.methods import METHODS
from atoll.testing import small_federation
from tests.deploy.conftest import ALL, LocalFleet, two_classes
from tests.deploy.test_agreement import greeted, hospital

SMALL = {"hidden": 5}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The kits of two federations."""
    folder = tmp_path_factory.mktemp("kits")
    names = [f"site-{i + 1}" for i in range(4)]
    provision(folder / "ours", names)
    provision(folder / "theirs", ["site-1"])
    return {"ours": folder / "ours", "theirs": folder / "theirs"}


class Trial:
    """A federation in this process, each party with its kit."""

    def __init__(self, kits: Path, policy: Policy = ALL) -> None:
        self.kits, self.federation = kits, small_federation()
        files = write_clients(self.federation, kits / "data")
        self.sites = {
            f"site-{i + 1}": Site(read_site_data(file), policy, kits / f"site-{i + 1}" / "atoll")
            for i, file in enumerate(files)
        }
        self.packets: dict[str, Packet] = {}

    def order(self, method: str, run: str, **options) -> Order:
        config = config_text(make_config(method=method, set=SMALL, **options))
        return Order(run=run, config=config, sites=tuple(self.sites), quorum=1, deadline=5.0)

    def run(self, method: str = "fedavg", run: str = "run", tamper=None, **options):
        """A run, and its delivery: the sites that did not take the model, with the reason."""

        def listen(site, question, answer):
            if question.head["do"] == "deliver":
                self.packets[site] = question
            return tamper(site, question, answer) if tamper else answer

        order = self.order(method, run, **{"rounds": 2, **options})
        fleet, folder = LocalFleet(self.sites, listen), self.folder(run)
        coordinate(order, fleet, folder, lambda progress: None)
        return deliver(order, fleet, folder, Signer(self.kits / "server"))

    def folder(self, run: str = "run") -> Path:
        return self.kits / "server" / "atoll" / "runs" / run

    def model(self, site: str = "site-1", run: str = "run") -> Path:
        return self.sites[site].folder / "runs" / run / "model"

    def anew(self, packet: Packet, site: str = "site-1") -> dict[str, object]:
        """The answer to a packet at a site whose owner deleted the model."""
        shutil.rmtree(self.model(site), ignore_errors=True)
        return self.sites[site].answer(packet).head

    def refused(self, packet: Packet, site: str = "site-1") -> str:
        """Why a site refuses a packet, which leaves nothing behind."""
        shutil.rmtree(self.model(site), ignore_errors=True)
        answer = self.sites[site].answer(packet)
        assert not self.model(site).exists()
        return answer.head["reason"]


@pytest.fixture
def trial(made, tmp_path) -> Trial:
    shutil.copytree(made["ours"], tmp_path / "kits")
    return Trial(tmp_path / "kits")


def test_a_site_adds_its_own_threshold_to_the_model(made, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.deploy.test_delivery.small_federation", two_classes)
    shutil.copytree(made["ours"], tmp_path / "kits")
    trial = Trial(tmp_path / "kits")
    assert trial.run(dp="clip=1,noise=1", threshold="max_f1") == {}
    chosen = [Threshold.of(read_model(trial.model(name) / "seed-0").about) for name in trial.sites]
    assert None not in chosen
    assert len({one.value for one in chosen}) > 1
    assert (
        "chose it on validation nodes" in (trial.model() / "seed-0" / "MODEL_CARD.md").read_text()
    )


def test_a_site_learns_the_threshold_and_not_the_scores_of_all(made, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.deploy.test_delivery.small_federation", two_classes)
    shutil.copytree(made["ours"], tmp_path / "kits")
    trial = Trial(tmp_path / "kits")
    assert trial.run(threshold="max_f1") == {}
    whole = Threshold.of(RunFolder(trial.folder()).model().about)
    assert whole.precision is not None
    for name in trial.sites:
        folder = trial.model(name) / "seed-0"
        assert Threshold.of(read_model(folder).about) == Threshold(
            whole.rule, whole.value, whole.positive
        )
        card = (folder / "MODEL_CARD.md").read_text()
        assert "chose it on validation nodes." in card
        assert "its recall" not in card


def resigned(packet: Packet, kit: Path, name: str = "server", body: bytes | None = None, **changes):
    """The packet with a changed manifest, signed with a key of a kit."""
    manifest = json.loads(packet.head["manifest"]) | changes
    text = json.dumps(manifest)
    key = serialization.load_pem_private_key((kit / "startup" / f"{name}.key").read_bytes(), None)
    signature = key.sign(PURPOSE + text.encode(), delivery.PADDING, hashes.SHA256())
    sealed = Sealed(text, base64.b64encode(signature).decode(),
                    (kit / "startup" / f"{name}.crt").read_text())  # fmt: skip
    head = {**packet.head, **msgspec.to_builtins(sealed)}
    return Packet(head, packet.body if body is None else body)


def test_every_site_has_the_global_model_and_it_predicts(trial):
    assert trial.run(seeds=2) == {}
    for name, site in trial.sites.items():
        manifest = verify_model(trial.model(name), site.folder.parent)
        assert (manifest.run, manifest.site, set(manifest.rounds)) == ("run", name, {0, 1})
        for seed in (0, 1):
            mine = read_model(trial.model(name) / f"seed-{seed}")
            theirs = RunFolder(trial.folder()).model(seed)
            assert all(map(torch.equal, leaves(mine.deployed), leaves(theirs.deployed)))
            assert mine.rounds.tolist() == [manifest.rounds[seed]] == [theirs.rounds[0]]
        assert not list(trial.model(name).rglob("private.safetensors"))
        delivered = site.audit.events(event="delivered")
        assert [event["bytes"] for event in delivered] == [len(trial.packets[name].body)]
        check_audit(site.audit.path)
    log = (trial.folder() / "audit.jsonl").read_text()
    assert log.count('"event": "delivered"') == 4


@pytest.mark.parametrize(
    ("name", "protocol"),
    [
        *((name, "strict") for name in ("fedpub", "fedper", "fedproto", "fedath", "local")),
        *((name, "fediih") for name in ("gcfl", "fedper")),  # each client's own best round
    ],
)
def test_a_site_has_its_own_model_and_no_other(name, protocol, trial):
    """Its prediction is that of the model that a serial run of all clients keeps."""
    options = {"rounds": 4, "protocol": protocol}
    assert trial.run(name, **options) == {}
    out = trial.kits / "serial"
    config = {"set": SMALL, "engine": "serial", **options}
    atoll.run(name, trial.federation, out=out, **config)
    whole = RunFolder(out).model()
    method = build_method(make_config(method=name, set=SMALL), trial.federation.features,
                          trial.federation.classes)  # fmt: skip
    for place, (site, graph) in enumerate(zip(trial.sites, trial.federation.graphs, strict=True)):
        mine = read_model(trial.model(site) / "seed-0")
        assert mine.rounds.tolist() == [whole.rounds[place]]
        seen = with_views(graph, method.views)
        with torch.no_grad():
            expected = whole.predict(method, seen, place)
            assert torch.equal(mine.predict(method, seen, 0), expected)
        assert len(mine.deployed) == 1
        assert len(mine.private) == bool(whole.private)
        assert not trial.sites[site].audit.events(event="delivered")[0].get("incomplete")


def test_a_private_run_delivers_the_same_model(trial):
    assert trial.run(dp="clip=1,noise=0.5,delta=1e-5") == {}
    manifest = verify_model(trial.model(), trial.kits / "site-1")
    assert manifest.rounds == {0: 1}  # no scores leave the sites: the last round counts
    mine, theirs = read_model(trial.model() / "seed-0"), RunFolder(trial.folder()).model()
    assert all(map(torch.equal, leaves(mine.deployed), leaves(theirs.deployed)))


def test_a_site_has_the_card_with_its_own_facts_and_no_others(trial):
    assert trial.run() == {}
    server = (trial.folder() / "model/seed-0/MODEL_CARD.md").read_text()
    assert all(f"| {site} |" in server for site in trial.sites)
    for place, (name, site) in enumerate(trial.sites.items()):
        folder = trial.model(name) / "seed-0"
        card, about = (folder / "MODEL_CARD.md").read_text(), read_model(folder).about
        digest = data_facts(site.data.graph, name)["sha256"]
        assert digest in card
        assert digest not in server
        score = RunFolder(trial.folder()).model().about["client_scores"][place]
        assert about["client_scores"] == [score]
        assert "scores" not in about
        assert f"| {name} | " in card
        assert not any(other in card for other in trial.sites if other != name)
        assert "There was no differential privacy" in card
        assert "atoll federate verify" in card
        assert "part and round: counts by true and predicted class; its own mean loss." in card
        assert "for the encoder" not in card


def test_the_card_of_a_site_with_tables_says_all_that_it_sent(trial, tmp_path):
    for i, name in enumerate(trial.sites):
        data = read_site_data(hospital(tmp_path / name, i))
        trial.sites[name] = Site(data, ALL, trial.kits / name / "atoll")
    assert trial.run(metric="average_precision") == {}
    card = (trial.model() / "seed-0" / "MODEL_CARD.md").read_text()
    assert "Sent once, for the encoder: the names of columns and how they are read" in card
    assert "its own mean loss; its own AUC; positives and negatives by bin; a bin with one" in card


def test_the_card_of_a_private_run_says_that_scores_stayed(trial):
    assert trial.run(dp="clip=1,noise=0.5,delta=1e-5") == {}
    for folder in (trial.folder() / "model/seed-0", trial.model() / "seed-0"):
        card = (folder / "MODEL_CARD.md").read_text()
        assert "by the last round" in card
        assert "The scores stayed at the sites." in card
        assert "each site chooses its own threshold" in card
        assert "test accuracy" not in card
        assert "Sent for scoring" not in card


def test_the_same_model_again_changes_nothing_and_a_lost_site_gets_it_later(trial):
    away = trial.run(tamper=lambda site, q, a: (
        None if site == "site-2" and q.head["do"] == "deliver" else a))  # fmt: skip
    assert away == {"site-2": "no answer to 'deliver' within 5 s"}
    shutil.rmtree(trial.model("site-2"))
    before = (trial.model() / "manifest.sig").read_bytes()
    assert trial.run() == {}  # `run --resume` of the finished run
    assert verify_model(trial.model("site-2"), trial.kits / "site-2").site == "site-2"
    assert (trial.model() / "manifest.sig").read_bytes() == before
    assert len(trial.sites["site-1"].audit.events(event="delivered")) == 1


def test_an_excluded_site_gets_no_model(trial):
    assert trial.run() == {}
    order = msgspec.structs.replace(trial.order("fedavg", "run", rounds=2), without=("site-2",))
    fleet = LocalFleet(trial.sites)
    assert deliver(order, fleet, trial.folder(), Signer(trial.kits / "server")) == {}
    assert [site for site, step in fleet.calls] == ["site-1", "site-3", "site-4"]


def test_an_older_site_is_named(trial):
    older = Packet({"failure": "bad", "reason": "'deliver' is nothing that a site does"}, b"")
    found = trial.run(tamper=lambda site, q, a: (
        older if site == "site-3" and q.head["do"] == "deliver" else a))  # fmt: skip
    assert found == {"site-3": "its Atoll is older and takes no model"}


def test_what_a_site_refuses(trial, made):
    assert trial.run() == {}
    packet, server = trial.packets["site-1"], trial.kits / "server"
    head, body = packet
    flipped = body[:-1] + bytes([body[-1] ^ 1])
    files = json.loads(head["manifest"])["files"]
    name, file = next(iter(files.items()))
    assert "not the one that the server signed" in trial.refused(Packet(head, flipped))
    assert "more bytes" in trial.refused(Packet(head, body + b"x"))
    assert "not the one" in trial.refused(Packet(head, body[:-1]))
    edited = {**head, "manifest": head["manifest"].replace("fedavg", "fedprox")}
    assert "is not the server's" in trial.refused(Packet(edited, body))
    for signature in ("", "AAAA", "not base64", "é"):
        assert "is not the server's" in trial.refused(
            Packet({**head, "signature": signature}, body)
        )
    assert "cannot be read" in trial.refused(Packet({**head, "certificate": "x"}, body))
    assert "of this federation's root" in trial.refused(resigned(packet, made["theirs"] / "server"))
    posing = resigned(packet, trial.kits / "site-2", "client")
    assert "signed by ['site-2'], not by the server" in trial.refused(posing)
    admin = resigned(packet, trial.kits / "admin", "client")
    assert "not by the server" in trial.refused(admin)
    for bad in ("../../x.toml", "/tmp/x.toml", "seed-0/../../x.toml", "seed-0/private.safetensors",
                "seed-0\\x.toml", "manifest.json", "seed-0/x.py", "seed-0/.toml", ""):  # fmt: skip
        names = {bad: file} | {k: v for k, v in files.items() if k != name}
        assert "cannot name a file" in trial.refused(resigned(packet, server, files=names)), bad
    negative = {**files, "seed-0/more.json": {"size": -1, "sha256": ""}}
    assert "cannot name a file" in trial.refused(resigned(packet, server, files=negative))
    assert "for site-2, not for here" in trial.refused(trial.packets["site-2"])
    assert trial.sites["site-1"].answer(packet).head == {}  # the good one, after all of these


def test_a_model_of_another_run_is_refused(trial):
    assert trial.run() == {}
    first = trial.packets["site-1"]
    assert trial.run("fedprox", run="other") == {}
    server = trial.kits / "server"
    assert "of run 'run'" in trial.refused(Packet({**first.head, "run": "other"}, first.body))
    never = resigned(Packet({**first.head, "run": "new"}, first.body), server, run="new")
    assert "run 'new' was not begun here" in trial.refused(never)
    seedless = resigned(Packet({**first.head, "run": "new"}, first.body), server, run="new",
                        rounds={})  # fmt: skip
    assert "has no seed" in trial.refused(seedless)
    mixed = resigned(Packet({**first.head, "run": "other"}, first.body), server, run="other")
    shutil.rmtree(trial.model(run="other"))
    assert "with another configuration" in trial.sites["site-1"].answer(mixed).head["reason"]
    assert not trial.model(run="other").exists()


def test_a_model_larger_than_the_policy_allows_is_refused(made, tmp_path):
    shutil.copytree(made["ours"], tmp_path / "kits")
    small = Trial(tmp_path / "kits", msgspec.structs.replace(ALL, model_bytes=100))
    assert small.run().keys() == small.sites.keys()
    assert "takes models of 100 bytes" in small.refused(small.packets["site-1"])
    head = {**small.packets["site-1"].head, "manifest": "x" * (2 << 20)}
    assert "a packet was refused" in small.sites["site-1"].answer(Packet(head, b"")).head["reason"]


def certify(kits: Path, days: tuple[int, int], role: str | None = None) -> None:
    """Give the federation a new root, and the server a certificate for some days from now."""
    now, root, key = datetime.now(UTC), *(rsa.generate_private_key(65537, 2048) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "atoll")])
    connection = json.loads((kits / "site-1" / "startup" / "fed_client.json").read_text())
    server = connection["servers"][0]["identity"]
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, server)]
    parts += [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] if role else []
    for name, public, place in (
        (issuer, root, "rootCA.pem"),
        (x509.Name(parts), key, "server.crt"),
    ):
        made = (
            x509.CertificateBuilder().subject_name(name).issuer_name(issuer)
            .public_key(public.public_key()).serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(days=days[0]))
            .not_valid_after(now + timedelta(days=days[1])).sign(root, hashes.SHA256())
        )  # fmt: skip
        for kit in kits.iterdir():
            if (kit / "startup" / place).exists():
                (kit / "startup" / place).write_bytes(made.public_bytes(serialization.Encoding.PEM))
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                             serialization.NoEncryption())  # fmt: skip
    (kits / "server" / "startup" / "server.key").write_bytes(text)


@pytest.mark.parametrize(
    ("days", "role", "problem"),
    [
        ((-9, -1), None, "ended"),
        ((1, 9), None, "not valid yet"),
        ((-1, 9), "client", "not by the server"),
        ((-1, 9), "server", ""),
    ],
)
def test_the_certificate_of_the_signer_must_be_a_valid_one_of_the_server(
    days, role, problem, trial
):
    certify(trial.kits, days, role)
    found = trial.run()
    assert (set(found) == set(trial.sites)) == bool(problem)
    assert all(problem in reason for reason in found.values())


def test_a_model_is_verified_later_also_after_the_certificate_ended(trial, monkeypatch):
    assert trial.run("fedper") == {}
    kit, folder = trial.kits / "site-1", trial.model()
    assert verify_model(folder, kit).run == "run"

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=5000)

    monkeypatch.setattr("atoll.deploy.delivery.datetime", Later)
    assert verify_model(folder, kit).run == "run"  # it was noted while the certificate was valid
    with pytest.raises(WireError, match="ended"):
        verify_model(folder, trial.kits / "site-2")
    shutil.copytree(folder, trial.kits / "copy")
    with pytest.raises(ConfigError, match="is not the kit of a site"):
        verify_model(trial.kits / "copy", trial.kits / "server")
    (folder / "extra.txt").write_text("x")
    with pytest.raises(WireError, match="was not delivered"):
        verify_model(folder, kit)
    (folder / "extra.txt").unlink()
    for name in ("seed-0/model.toml", "seed-0/deployed.safetensors", "manifest.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        with pytest.raises(WireError):
            verify_model(folder, kit)
        (folder / name).unlink()
        with pytest.raises(WireError):
            verify_model(folder, kit)
        (folder / name).write_bytes(content)
    assert verify_model(folder, kit).site == "site-1"


def test_a_crash_leaves_a_whole_model_or_none(trial, monkeypatch):
    assert trial.run() == {}
    good = (trial.model() / "manifest.json").read_text()
    packet = resigned(trial.packets["site-1"], trial.kits / "server", atoll="9")
    (trial.model() / "seed-0" / "deployed.safetensors").write_bytes(b"damaged")
    real = delivery.write_atomically

    def cut(path, data):
        if path.name == "manifest.sig":
            raise OSError("No space left on device")
        real(path, data)

    monkeypatch.setattr(delivery, "write_atomically", cut)
    assert trial.sites["site-1"].answer(packet).head["failure"] == "bad"
    assert (trial.model() / "manifest.json").read_text() == good
    monkeypatch.undo()
    left = trial.model().parent / ".model.killed"  # as kill -9 leaves it
    left.mkdir()
    assert trial.sites["site-1"].answer(packet).head == {}
    assert verify_model(trial.model(), trial.kits / "site-1").atoll == "9"
    assert {path.name for path in trial.model().parent.iterdir()} == {".lock", "model"}


def test_a_site_without_the_state_of_the_selected_round_notes_it(trial):
    assert trial.run("fedper") == {}
    for path in (trial.sites["site-1"].folder / "runs" / "run-0").glob("state_*"):
        path.unlink()
    shutil.rmtree(trial.model())
    assert receive(trial.sites["site-1"], trial.packets["site-1"]).head == {}
    assert "is not in its runs" in trial.sites["site-1"].audit.events()[-1]["incomplete"]


def test_the_server_needs_its_key(trial):
    (trial.kits / "server" / "startup" / "server.key").write_text("nonsense")
    with pytest.raises(AtollError, match="the server's key in"):
        Signer(trial.kits / "server")


def test_a_damaged_model_is_replaced_and_a_file_of_the_owner_stays(trial):
    trial.run()
    file = trial.model() / "seed-0" / "deployed.safetensors"
    whole = file.read_bytes()
    for damage in (lambda: file.write_bytes(whole[:-1]), file.unlink):
        damage()
        assert trial.sites["site-1"].answer(trial.packets["site-1"]).head == {}
        assert file.read_bytes() == whole
    assert len(trial.sites["site-1"].audit.events(event="replaced")) == 2
    own = trial.model() / "notes.txt"
    own.write_text("mine")
    assert (
        "was not delivered" in trial.sites["site-1"].answer(trial.packets["site-1"]).head["reason"]
    )
    assert own.read_text() == "mine"


def test_one_delivery_at_a_time(trial, monkeypatch):
    trial.run()
    shutil.rmtree(trial.model())
    monkeypatch.setattr(delivery, "FolderLock", partial(FolderLock, wait=0.0))
    with FolderLock(trial.model().parent, ""):
        answer = trial.sites["site-1"].answer(trial.packets["site-1"])
    assert answer.head["failure"] == "lost"
    assert "another job delivers the model" in answer.head["reason"]
    assert not trial.model().exists()
    assert trial.sites["site-1"].answer(trial.packets["site-1"]).head == {}


def test_a_model_beyond_the_disk_of_the_policy_is_refused(trial):
    trial.run()
    file = trial.model() / "seed-0" / "deployed.safetensors"
    file.write_bytes(b"damaged")  # it is replaced, for which both need room
    files = [path for path in trial.model().parents[2].rglob("*.*") if path.name not in NOT_COUNTED]
    kept = sum(path.stat().st_size for path in files)
    trial.sites["site-1"].policy = Policy(kept_bytes=kept)
    assert "bytes" in trial.sites["site-1"].answer(trial.packets["site-1"]).head["reason"]
    for limit, why in ((Policy(kept_bytes=1), "keeps 1 bytes"), (Policy(runs=1), "keeps 1 runs")):
        trial.sites["site-1"].policy = limit
        (trial.sites["site-1"].folder / "runs" / "other-0").mkdir(exist_ok=True)
        assert why in trial.refused(trial.packets["site-1"])


def forged(trial, packet, instead=None, **facts):
    """A packet with other files, or other facts in model.toml, that the server signed."""
    found, start = {}, 0
    for name, file in json.loads(packet.head["manifest"])["files"].items():
        found[name] = packet.body[start : start + file["size"]]
        start += file["size"]
    about = tomllib.loads(found["seed-0/model.toml"].decode()) | facts
    found |= {"seed-0/model.toml": tomli_w.dumps(about).encode(), **(instead or {})}
    described = {name: msgspec.to_builtins(delivery._file(data)) for name, data in found.items()}
    return resigned(packet, trial.kits / "server", body=b"".join(found.values()), files=described)


def test_a_model_with_sizes_of_another_site_is_refused(trial):
    """By `classes = 1000000000` a site would make as many names."""
    assert trial.run() == {}
    names = ("classes", "features", "clients", "round", "one_per_client")
    for name, value in product(names, (10**9, -1, "3", [0])):
        reason = trial.refused(forged(trial, trial.packets["site-1"], **{name: value}))
        assert f"'{name}' of the model of seed 0 does not fit this site" in reason


def test_a_server_writes_no_file_that_is_the_sites(trial):
    assert trial.run() == {}
    for name in ("encoder.json", "own.toml", "MODEL_CARD.md", "private.safetensors"):
        reason = trial.refused(forged(trial, trial.packets["site-1"], {f"seed-0/{name}": b"{}"}))
        assert "cannot name a file of a model" in reason


def test_words_of_a_server_add_no_section_no_html_and_no_class_to_the_card(trial):
    assert trial.run() == {}
    lie = "x\n\n## Privacy\n\n<script> ![](http://evil/x.png) `<b>`"
    names = ["=cmd|' /C calc'!A0", "b", "c"]
    packet = forged(trial, trial.packets["site-1"], method=lie, data=lie, class_names=names)
    assert trial.anew(packet) == {}
    card = (trial.model() / "seed-0" / "MODEL_CARD.md").read_text()
    assert card.count("\n## Privacy\n") == 1
    assert not [part for part in ("<", " ![", "=cmd") if part in card]
    assert read_model(trial.model() / "seed-0").about["class_names"] == ["0", "1", "2"]


CHECKED = {"features", "classes", "clients", "round", "task", "one_per_client", "private_parts"}
CLAIMED = {"client_metric", "client_scores", "threshold"}


def test_a_server_writes_no_fact_that_the_site_knows(trial):
    """Every key that a card or a prediction reads, and any other, but for those of `Claim`."""
    assert trial.run("fedper") == {}
    folder = trial.model() / "seed-0"
    names = ("own.toml", "MODEL_CARD.md")
    honest = {name: (folder / name).read_text() for name in names}
    packet = trial.packets["site-1"]
    said = json.loads(packet.head["manifest"])["files"]["seed-0/model.toml"]
    known = {*tomllib.loads(packet.body[: said["size"]].decode())}
    known |= {*tomllib.loads(honest["own.toml"]), "alerts", "scores", "incomplete", "files", "new"}
    lies = {"evil": "evil"}, "evil", 5, [], True
    assert {"privacy", "wire", "federated", "measured", "bound", "site"} <= known
    for lie in lies:
        everything = dict.fromkeys(known - CHECKED - CLAIMED, lie)
        assert trial.anew(forged(trial, packet, **everything)) == {}
        assert {name: (folder / name).read_text() for name in names} == honest
        assert read_model(folder).about == tomllib.loads(honest["own.toml"])


def test_the_privacy_of_the_card_is_that_of_the_sites_own_account(trial):
    assert trial.run(dp="clip=1,noise=0.5,delta=1e-5", seeds=2) == {}
    packet, folder = trial.packets["site-1"], trial.model() / "seed-0"
    events = trial.sites["site-1"].audit.events()
    spent = [event["epsilon"] for event in events if "epsilon" in event][-1]
    lie = {"differential": True, "unit": "node", "says": "epsilon 0.001", "adjacency": "none",
           "sampling": "none", "scores": "told", "epsilon_server": 0.001}  # fmt: skip
    for facts in ({}, {"privacy": lie}, {"client_scores": [0.99], "threshold": {"value": 0.5}}):
        assert trial.anew(forged(trial, packet, **facts)) == {}
        card, about = (folder / "MODEL_CARD.md").read_text(), read_model(folder).about
        assert f"Epsilon {spent:.3g} against the server and the other sites" in card
        counted = "(clip 1, noise 0.5, 4 updates in all seeds; epsilon"
        assert f"{counted} {spent:.3g} in all runs of this site)" in card
        assert about["privacy"]["epsilon_server"] == pytest.approx(spent)
        assert "0.99" not in card
        assert not {"client_scores", "threshold"} & about.keys()


def test_the_card_counts_what_was_asked_under_the_name_of_another_run(trial):
    for run in ("run", "other"):
        assert trial.run(run=run, dp="clip=1,noise=0.5,delta=1e-5") == {}
    events = trial.sites["site-1"].audit.events()
    spent = [event["epsilon"] for event in events if "epsilon" in event]
    card = (trial.model(run="other") / "seed-0" / "MODEL_CARD.md").read_text()
    assert f"Epsilon {spent[1]:.3g} against the server" in card
    assert f"2 updates in all seeds; epsilon {spent[-1]:.3g} in all runs of this site" in card


@pytest.mark.parametrize(
    "facts",
    [
        {"client_scores": 5},
        {"client_scores": [0.5, 0.5]},
        {"client_scores": [10**400]},
        {"client_scores": ["x"]},
        {"client_metric": 5},
        {"threshold": {"value": 10**400}},
        {"threshold": {"value": -1}},
        {"threshold": {"value": "x"}},
        {"threshold": [1]},
    ],
)
def test_a_claim_of_other_types_is_refused_in_one_sentence(trial, facts):
    assert trial.run() == {}
    said = trial.refused(forged(trial, trial.packets["site-1"], **facts))
    assert said == "model.toml of the model of seed 0 cannot be read"


@pytest.mark.parametrize(
    "text",
    [b"a = " + b"[" * 100_000, b"a = " + b"9" * 100_000, b"\xff", b"a = ", b"a = 1e999999999x",
     b"a = 0x" + b"f" * 100_000, b"a = 9999-99-99", b"a.b" * 50_000],
)  # fmt: skip
def test_a_description_that_no_reader_can_read_is_refused_in_one_sentence(trial, text):
    assert trial.run() == {}
    said = trial.refused(forged(trial, trial.packets["site-1"], {"seed-0/model.toml": text}))
    assert said in (
        "model.toml of the model of seed 0 cannot be read",
        "'features' of the model of seed 0 does not fit this site",
    )


def test_scores_and_thresholds_that_nobody_asked_for_are_left_out(trial):
    assert trial.run() == {}
    lies = {
        "client_scores": [float("nan")],
        "threshold": {"value": 0.5, "rule": "x", "positive": 7},
    }
    for facts in (lies, {"client_scores": [7.0]}, {"client_metric": "auc"}):
        assert trial.anew(forged(trial, trial.packets["site-1"], **facts)) == {}
        about = read_model(trial.model() / "seed-0").about
        assert about.get("client_scores", []) == []
        assert "threshold" not in about


def test_a_server_names_no_other_file_and_no_other_seed(trial):
    assert trial.run() == {}
    packet = trial.packets["site-1"]
    for name in ("seed-77/model.toml", "seed-77/deployed.safetensors", "seed-0/notes.md",
                 "seed-00/model.toml", "seed-0/model_card.md"):  # fmt: skip
        reason = trial.refused(forged(trial, packet, {name: b""}))
        assert reason == f"'{name}' cannot name a file of a model"
    less = json.loads(packet.head["manifest"])["files"]
    del less["seed-0/deployed.safetensors"]
    reason = trial.refused(resigned(packet, trial.kits / "server", files=less))
    assert reason == "'seed-0/deployed.safetensors' of the model is missing"
    for picked in (-1, 2, 10**6):
        changed = forged(trial, packet, round=picked)
        reason = trial.refused(resigned(changed, trial.kits / "server", rounds={0: picked}))
        assert "which that run cannot select" in reason


@pytest.mark.parametrize("name", [name for name in METHODS if not METHODS[name].not_private])
def test_a_private_run_takes_no_tensors_of_another_form(trial, name):
    """Whether a tensor with a row for each node fits would tell the number of nodes."""
    assert trial.run(name, dp="clip=1,noise=0.5,delta=1e-5") == {}
    for tree in ({"x": torch.zeros(3)}, [torch.zeros(3)], torch.zeros(3)):
        content = {"seed-0/deployed.safetensors": encode(tree)}
        reason = trial.refused(forged(trial, trial.packets["site-1"], content))
        assert reason == "the model of seed 0 is not of its method's shapes and types"


def test_tensors_that_do_not_fit_are_refused_or_noted(trial):
    assert trial.run("fedper") == {}
    packet = trial.packets["site-1"]
    assert "failure" in trial.sites["site-1"].answer(
        forged(trial, packet, {"seed-0/deployed.safetensors": b"nonsense"})
    ).head  # fmt: skip
    other = {"seed-0/deployed.safetensors": encode([torch.zeros(3)])}
    assert trial.anew(forged(trial, packet, other)) == {}
    noted = trial.sites["site-1"].audit.events(event="delivered")[-1]["incomplete"]
    assert noted == "the tensors of the model of seed 0 do not fit its method"


def test_a_whole_model_stays_whatever_the_server_sends_later(trial):
    assert trial.run("fedper") == {}
    before = {path: path.read_bytes() for path in trial.model().rglob("*") if path.is_file()}
    packet = trial.packets["site-1"]
    later = resigned(packet, trial.kits / "server", states={"0": -2})  # would lose the private part
    answer = trial.sites["site-1"].answer(later).head
    assert answer["failure"] == "refused"
    assert "its owner can delete the folder runs/run/model" in answer["reason"]
    upgraded = resigned(packet, trial.kits / "server", atoll="9.9.9")
    assert trial.sites["site-1"].answer(upgraded).head == {}
    assert {p: p.read_bytes() for p in trial.model().rglob("*") if p.is_file()} == before
    assert trial.anew(later) == {}


def test_the_threshold_is_of_the_delivered_tensors(made, tmp_path, monkeypatch):
    """A site that scored other tensors last, or missed the last round, would have another one."""
    monkeypatch.setattr("tests.deploy.test_delivery.small_federation", two_classes)
    shutil.copytree(made["ours"], tmp_path / "kits")
    trial = Trial(tmp_path / "kits")
    assert trial.run(dp="clip=1,noise=1", threshold="max_f1") == {}
    honest = (trial.model() / "seed-0" / "own.toml").read_text()
    assert tomllib.loads(honest)["threshold"]
    chosen = trial.sites["site-1"].folder / "runs" / "run-0" / "threshold.toml"
    assert tomllib.loads(chosen.read_text()) == tomllib.loads(honest)["threshold"]
    chosen.write_text('rule = "max_f1"\nvalue = 0.001\npositive = 1\n')
    assert trial.anew(trial.packets["site-1"]) == {}
    assert (trial.model() / "seed-0" / "own.toml").read_text() == honest


E1 = [{"name": "age", "centre": 50.0, "spread": 10.0}, {"name": "sex", "values": ["f", "m", "x"]}]


def test_a_model_comes_with_the_encoder_that_its_run_began_with(trial, tmp_path):
    def site() -> Site:
        return Site(read_site_data(tmp_path / "h"), ALL, trial.kits / "site-1" / "atoll")

    hospital(tmp_path / "h", 1)
    text = config_text(make_config(method="fedavg", rounds=1, set=SMALL))
    first = site()
    head = {"do": "begin", "run": "r-0", "config": text}
    assert first.answer(Packet({**head, "encoder": E1}, b"")).head == {}
    data = first.data
    about = {"round": 0, "features": data.graph.num_features, "classes": data.classes}
    about |= {"clients": 1, "task": "node", "one_per_client": False, "private_parts": False}
    net = build_method(make_config(set=SMALL), data.graph.num_features, data.classes).net
    files = {"seed-0/model.toml": tomli_w.dumps(about).encode()}
    files["seed-0/deployed.safetensors"] = encode(net.init(make_key(0)))
    listed = {name: delivery._file(content) for name, content in files.items()}
    manifest = delivery.Manifest(run="r", site="site-1", config=text, rounds={0: 0},
                                 states={0: -2}, files=listed, atoll="1")  # fmt: skip
    sealed = Signer(trial.kits / "server").sealed(manifest)
    head = {"do": "deliver", "run": "r", **msgspec.to_builtins(sealed)}
    first.close()
    for change in (lambda site: None, lambda site: site.answer(
            Packet({"do": "begin", "run": "other-0", "config": text}, b""))):  # fmt: skip
        shutil.rmtree(trial.model(run="r"), ignore_errors=True)
        later = site()  # a fresh process
        change(later)
        assert later.answer(Packet(head, b"".join(files.values()))).head == {}
        later.close()
        kept = json.loads((trial.model(run="r") / "seed-0" / "encoder.json").read_text())
        assert [one["centre"] for one in kept["features"]] == [50.0, 0.0]
    card, told = trial.model(run="r") / "seed-0" / "MODEL_CARD.md", "Sent once, for the encoder"
    assert told not in card.read_text()  # the site was never asked for statistics
    later = site()
    assert greeted(later, "federated").body
    shutil.rmtree(trial.model(run="r"))
    assert later.answer(Packet(head, b"".join(files.values()))).head == {}
    assert told in card.read_text()
    later.close()
    shutil.rmtree(trial.model(run="r"))
    (trial.kits / "site-1/atoll/runs/r-0/encoder.json").write_text("[]")
    answer = site().answer(Packet(head, b"".join(files.values()))).head
    assert answer["reason"] == "the encoder of run 'r-0' is not whole in its runs/r-0"


def update(site: Site, run: str, owner: str = "method", step: str = "train", **options) -> None:
    """Have a site train, or answer another step, once in a run."""
    config = make_config(method="fedavg", rounds=2, set=SMALL, **options)
    head = {"do": "begin", "run": run, "config": config_text(config)}
    assert site.answer(Packet(head, b"")).head == {}
    net = build_method(config, site.data.graph.num_features, site.data.classes).net
    head = {"do": "step", "run": run, "owner": owner, "step": step, "flags": {}, "round": 0,
            "attempt": "a", "state": -2, "key": 7}  # fmt: skip
    assert site.answer(Packet(head, encode(net.init(make_key(0))))).head == {}


SCORE = {"owner": "evaluator", "step": "score"}


@pytest.mark.parametrize("other", [{}, {"dp": "clip=1,noise=1,randomness=seed"}, SCORE])
def test_the_card_names_updates_that_left_without_privacy(trial, other):
    assert trial.run(dp="clip=1,noise=0.5") == {}
    card = trial.model() / "seed-0" / "MODEL_CARD.md"
    assert "epsilon is infinite" not in card.read_text()
    update(trial.sites["site-1"], "clear-0", **other)
    assert trial.anew(trial.packets["site-1"]) == {}
    because = "epsilon is infinite, because other updates or scores left without privacy"
    assert because in card.read_text()


def test_a_seed_that_the_run_does_not_have_hides_no_update(trial):
    """With run `run--1` the seed of `run` would be -1, and its releases those of `run-`."""
    dp = {"dp": "clip=1,noise=1", "seeds": 2}
    assert trial.run(**dp) == {}
    update(trial.sites["site-1"], "run--1", **dp)
    packet = trial.packets["site-1"]
    rounds = json.loads(packet.head["manifest"])["rounds"]
    forged = resigned(packet, trial.kits / "server", rounds={"-1": rounds["0"]})
    assert trial.refused(forged) == "run 'run' has no seed -1"


def test_a_manifest_names_no_path_of_the_server(trial):
    assert trial.run() == {}
    saved = (trial.folder() / "config.toml").read_text()
    assert str(Path.cwd()) in saved
    sent = msgspec.json.decode(trial.packets["site-1"].head["manifest"])["config"]
    assert str(Path.cwd()) not in sent
    assert "#" not in sent
    assert tomllib.loads(sent) == tomllib.loads(saved)


def test_a_manifest_is_kept_to_the_byte(trial):
    assert trial.run() == {}
    packet = trial.packets["site-1"]
    key = serialization.load_pem_private_key(
        (trial.kits / "server" / "startup" / "server.key").read_bytes(), None
    )
    text = packet.head["manifest"].replace('","', '",\r\n"')
    signature = key.sign(PURPOSE + text.encode(), delivery.PADDING, hashes.SHA256())
    signed = {"manifest": text, "signature": base64.b64encode(signature).decode()}
    assert trial.anew(Packet({**packet.head, **signed}, packet.body)) == {}
    assert verify_model(trial.model(), trial.kits / "site-1").run == "run"


def test_no_server_loosens_the_delta_of_the_card_and_of_the_log(trial):
    """At delta 0.9999999 any update has epsilon 0."""
    assert trial.run(dp="clip=1,noise=1,delta=0.9999999") == {}
    card = (trial.model() / "seed-0" / "MODEL_CARD.md").read_text()
    noted = [e for e in trial.sites["site-1"].audit.events(event="sent") if "release" in e]
    assert {event["delta"] for event in noted} == {1e-5}
    assert f"Epsilon {noted[-1]['epsilon']:.3g} against the server and the other sites" in card
    assert "at delta 1e-05" in card
    assert "0.9999" not in card
    assert trial.run(run="strict", dp="clip=1,noise=1,delta=1e-6") == {}
    card = (trial.model(run="strict") / "seed-0" / "MODEL_CARD.md").read_text()
    assert "at delta 1e-06" in card


def test_words_of_a_configuration_are_checked_and_bring_no_link_into_the_card(trial):
    words = r"\[click](http://evil.example) https://evil.example www.evil.example a@evil.example"
    assert trial.run(data=words) == {}
    card = (trial.model() / "seed-0" / "MODEL_CARD.md").read_text()
    assert "evil" not in card
    assert card.startswith(f"# Model card: fedavg on {trial.sites['site-1'].own.name}\n")
    server = (trial.folder() / "model" / "seed-0" / "MODEL_CARD.md").read_text()
    assert "evil" in server  # its own word, which is no link either
    assert not [part for part in ("://", "www.", "@evil", r"\[") if part in
                server.replace(r"\\\[", "")]  # fmt: skip
    for given in ({"evaluate": "words"}, {"metric": "words"}, {"protocol": "words"},
                  {"compat": ("words",)}, {"encoder": "words"}):  # fmt: skip
        config = config_text(make_config(method="fedavg", rounds=2, **given))
        answer = trial.sites["site-1"].answer(
            Packet({"do": "begin", "run": "other-0", "config": config}, b"")
        )
        assert "unknown" in answer.head["reason"], given


def test_the_card_has_no_score_and_no_threshold_of_counts_that_never_left(
    made, tmp_path, monkeypatch
):
    monkeypatch.setattr("tests.deploy.test_delivery.small_federation", two_classes)
    shutil.copytree(made["ours"], tmp_path / "kits")
    trial = Trial(tmp_path / "kits")
    assert trial.run(threshold="max_f1") == {}
    first, site, server = trial.packets["site-1"], trial.sites["site-1"], trial.kits / "server"
    facts = {"client_scores": [0.99], "threshold": {"value": 0.123}}
    forgery = forged(trial, first, **facts)
    assert trial.anew(forgery) == {}
    assert facts.keys() <= read_model(trial.model() / "seed-0").about.keys()
    text = json.loads(first.head["manifest"])["config"]
    assert site.answer(Packet({"do": "begin", "run": "quiet-0", "config": text}, b"")).head == {}
    site.audit.note("sent", run="quiet-0", step="score", round=0, bytes=9, kept=True)
    quiet = Packet({**forgery.head, "run": "quiet"}, forgery.body)
    assert site.answer(resigned(quiet, server, run="quiet")).head == {}
    about = read_model(trial.model(run="quiet") / "seed-0").about
    assert not facts.keys() & about.keys()
    card = (trial.model(run="quiet") / "seed-0" / "MODEL_CARD.md").read_text()
    assert not [text for text in ("0.99", "0.123", "scoring", "counts") if text in card]


def test_the_card_has_no_score_of_a_round_whose_counts_never_left(trial):
    """The counts of the first round left, and the server tells a score of the second."""
    assert trial.run() == {}
    first, site, server = trial.packets["site-1"], trial.sites["site-1"], trial.kits / "server"
    text = json.loads(first.head["manifest"])["config"]
    assert site.answer(Packet({"do": "begin", "run": "some-0", "config": text}, b"")).head == {}
    site.audit.note("sent", run="some-0", step="score", round=0, bytes=9)
    for picked in (0, 1):
        forgery = forged(trial, first, client_scores=[0.99], round=picked)
        some = Packet({**forgery.head, "run": "some"}, forgery.body)
        shutil.rmtree(trial.model(run="some"), ignore_errors=True)
        packet = resigned(some, server, run="some", rounds={"0": picked})
        assert site.answer(packet).head == {}
        about = read_model(trial.model(run="some") / "seed-0").about
        assert ("client_scores" in about) == (picked == 0)


def test_a_begin_with_other_data_leaves_no_folder(trial):
    assert trial.run(rounds=1) == {}
    site, text = trial.sites["site-1"], json.loads(trial.packets["site-1"].head["manifest"])
    site.close()
    shutil.rmtree(site.folder / "runs")  # the owner makes room
    changed = Site(trial.sites["site-2"].own, ALL, site.folder)
    head = {"do": "begin", "run": "run-0", "config": text["config"]}
    assert "begun here with other data" in changed.answer(Packet(head, b"")).head["reason"]
    assert not list(site.folder.glob("runs/*"))


def tell_sizes(question, reply):
    """Declare sizes, and then scores that pick the first round."""
    if question.head["do"] == "hello":
        return Packet({**reply.head, "counts": [10, 10, 10], "nodes": 1 << 26}, reply.body)
    tree = decode(reply.body)
    if question.head["step"] == "train":
        return Packet({}, encode(replace(tree, weight=torch.full_like(tree.weight, 1 << 26))))
    counts = torch.zeros_like(tree.confusion)
    counts[:, 0, min(question.head["round"], 1)] = 10
    return Packet({}, encode(replace(tree, confusion=counts)))


def tell_auc(question, reply):
    """An AUC that picks the first round, though the site has no nodes."""
    if question.head.get("step") != "score":
        return reply
    tree = decode(reply.body)
    best = float(question.head["round"] == 0)
    return Packet({}, encode(replace(tree, auc=torch.full_like(tree.auc, best))))


@pytest.mark.parametrize(("lie", "by"), [(tell_sizes, "accuracy"), (tell_auc, "auc")])
@pytest.mark.parametrize("protocol", ["strict", "fediih"])
def test_no_site_picks_the_round_or_has_more_weight_where_sizes_stay_at_the_sites(
    lie, by, protocol, made, tmp_path, monkeypatch
):
    monkeypatch.setattr("tests.deploy.test_delivery.small_federation", two_classes)
    shutil.copytree(made["ours"], tmp_path / "kits")
    trial = Trial(tmp_path / "kits")

    def tamper(site, question, answer):
        lies = site == "site-4" and question.head["do"] in ("hello", "step")
        return lie(question, answer) if lies else answer

    options = {"dp": "clip=1,noise=1", "metric": by, "protocol": protocol}
    assert trial.run(tamper=tamper, **options) == {}
    manifest = json.loads(trial.packets["site-1"].head["manifest"])
    assert manifest["rounds"] == {"0": 1}
    roster = json.loads((trial.folder() / "roster.json").read_text())
    assert [(site["counts"], site["nodes"]) for site in roster.values()] == [([0, 0, 0], 0)] * 4
    log = (trial.folder() / "audit.jsonl").read_text().splitlines()
    left = [e["site"] for e in map(json.loads, log) if e["event"] == "left out"]
    assert left == ["site-4"]


def test_a_part_that_one_seed_lacks_is_noted_for_that_seed_only(trial):
    assert trial.run("fedper", seeds=2) == {}
    for path in (trial.sites["site-1"].folder / "runs" / "run-0").glob("state_*"):
        path.unlink()
    assert trial.anew(trial.packets["site-1"]) == {}
    facts = [tomllib.loads((trial.model() / f"seed-{n}" / "own.toml").read_text()) for n in (0, 1)]
    assert ["incomplete" in one for one in facts] == [True, False]
    assert (trial.model() / "seed-1" / "private.safetensors").exists()
    assert trial.sites["site-1"].audit.events(event="delivered")[-1]["incomplete"]


@pytest.mark.parametrize("protocol", ["strict", "fediih"])
def test_the_selected_round_is_the_last_without_scores_and_else_the_servers_word(trial, protocol):
    assert trial.run(protocol=protocol, dp="clip=1,noise=1") == {}
    packet = trial.packets["site-1"]
    assert json.loads(packet.head["manifest"])["rounds"] == {"0": 1}
    early = resigned(forged(trial, packet, round=0), trial.kits / "server", rounds={"0": 0})
    assert "is of round 1, which that run cannot select" in trial.refused(early)
    assert trial.run(run="open", protocol=protocol) == {}
    card = (trial.model(run="open") / "seed-0" / "MODEL_CARD.md").read_text()
    assert "selected, according to the server: round " in card


def test_a_model_whose_note_a_crash_lost_is_noted_at_the_next_delivery(trial, monkeypatch):
    class Killed(BaseException):
        pass

    assert trial.run() == {}
    site, packet = trial.sites["site-1"], trial.packets["site-1"]
    shutil.rmtree(trial.model())
    lines = site.audit.path.read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["event"] == "delivered"
    site.audit.path.write_bytes(b"".join(lines[:-1]))
    note = site.audit.note

    def killed(event, **values):
        if event == "delivered":
            raise Killed
        note(event, **values)

    monkeypatch.setattr(site.audit, "note", killed)
    with pytest.raises(Killed):
        site.answer(packet)
    monkeypatch.undo()
    for _ in range(2):
        assert site.answer(packet).head == {}
    assert [e["event"] for e in site.audit.events()][-2:] == ["delivered", "kept"]

    class Later(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(days=5000)

    monkeypatch.setattr("atoll.deploy.delivery.datetime", Later)
    assert verify_model(trial.model(), trial.kits / "site-1").run == "run"


def test_a_run_continues_and_is_delivered_with_the_data_that_it_began_with(trial):
    assert trial.run() == {}
    site, packet = trial.sites["site-1"], trial.packets["site-1"]
    noted = site.audit.events(event="begin")[0]["data"]
    assert noted == data_facts(site.data.graph, "")["sha256"]
    site.close()
    other = trial.sites["site-2"].own
    trial.sites["site-1"] = Site(other, ALL, site.folder)
    text = json.loads(packet.head["manifest"])["config"]
    head = {"do": "begin", "run": "run-0", "config": text}
    reason = "run 'run-0' was begun here with other data; start the site with those"
    assert reason in trial.sites["site-1"].answer(Packet(head, b"")).head["reason"]
    assert reason in trial.refused(packet)
    trial.sites["site-1"] = Site(site.own, ALL, site.folder)
    assert trial.sites["site-1"].answer(Packet(head, b"")).head == {}
    assert trial.anew(packet) == {}
