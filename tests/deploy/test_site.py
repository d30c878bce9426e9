"""A site against a server that asks for too much."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from atoll.core.aggregate import Update
from atoll.core.dp import Noised
from atoll.core.errors import AtollError, ConfigError, DataError, WireError
from atoll.core.method import Step, declared_step, declared_steps
from atoll.core.random import make_key
from atoll.core.tree import Empty, leaves, tree_map
from atoll.deploy.account import Account
from atoll.deploy.audit import Audit, check_audit
from atoll.deploy.coordinator import Order, order_text, read_order
from atoll.deploy.disclosure import disclosure
from atoll.deploy.heads import Question
from atoll.deploy.policy import Policy
from atoll.deploy.site import Job, Site, owners
from atoll.deploy.site_data import read_site_data, write_clients
from atoll.deploy.states import States
from atoll.engines.codec import decode, encode, save_checkpoint
from atoll.engines.fleet import Packet
from atoll.engines.prepare import prepared
from atoll.experiment.build import build_method
from atoll.experiment.config import config_text, make_config
from atoll.experiment.metrics import Evaluator
from atoll.experiment.privacy import epsilon, make_privacy, release, with_privacy
from atoll.methods import METHODS
from atoll.methods.adafgl import Start
from atoll.testing import small_federation
from tests.deploy.conftest import two_classes
from tests.deploy.private_site import (
    DP,
    NOISE,
    OPEN,
    ask,
    begin,
    make_site,
    model_for,
    numbers,
)

OTHER_FORM = (
    "a message of step '{}' was refused: it does not have the structure, shapes and types of its "
    "method"
)


def site(tmp_path: Path, policy: Policy | None = None) -> Site:
    file = write_clients(small_federation(), tmp_path / "data")[0]
    return Site(read_site_data(file), policy or Policy(), tmp_path / "site")


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ({}, "is nothing that a site does"),
        ({"do": "delete"}, "is nothing that a site does"),
        ({"do": "step", "run": "x"}, "missing required field `owner`"),
        (
            {
                "do": "step",
                "run": "x",
                "owner": "method",
                "step": "train",
                "flags": {},
                "round": 0,
                "attempt": "",
                "state": -2,
                "key": 0,
            },
            "was not begun here",
        ),
        ({"do": "hello"}, "it speaks protocol 0.1.0"),
        ({"do": "begin"}, "missing required field `run`"),
        ({"do": "hello", "version": "9.9"}, "it speaks protocol 0.1.0"),
    ],
)
def test_a_site_answers_nonsense_with_a_reason_and_lives_on(head, problem, tmp_path):
    one = site(tmp_path)
    answer = one.answer(Packet(head, b""))
    assert problem in answer.head["reason"]
    assert one.answer(Packet({"do": "ping"}, b"")).head == {}


def test_a_site_names_its_version_only_to_a_server_that_asks(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.deploy.site.__version__", "7.1")  # packages may differ
    one = site(tmp_path)
    old = {"do": "hello", "run": "r", "method": "fedavg", "rounds": 1, "version": "0.1.0"}
    old["dp"] = None
    assert one.answer(Packet(old, b"")).head == one.data.summary()
    told = one.answer(Packet({**old, "atoll": "8.0"}, b"")).head
    assert told == {**one.data.summary(), "atoll": "7.1"}
    noted = one.audit.events(event="hello")
    assert [event["server"] for event in noted] == ["older", "8.0"]
    assert noted[1]["bytes"] == len(json.dumps(told, separators=(",", ":")))


@pytest.mark.parametrize("run", ["", "../r", "r/../..", "/tmp/r", "r.0", "r" * 101, 3, None])
def test_a_run_cannot_name_any_folder(run, tmp_path):
    one = site(tmp_path)
    config = config_text(make_config(method="fedavg", rounds=1))
    answer = one.answer(Packet({"do": "begin", "run": run, "config": config}, b""))
    problem = "a run's name" if isinstance(run, str) else "Expected `str`"
    assert problem in answer.head["reason"]
    if isinstance(run, str):
        order = Order(run=run, config=config, sites=("a",), quorum=1)
        with pytest.raises(ConfigError, match="a run's name"):
            read_order(order_text(order))


@pytest.mark.parametrize(
    ("policy", "base", "problem"),
    [
        (Policy(), "BASE", "does not come with Atoll"),
        (Policy(methods=("fedtad",)), "fedavg", "does not allow method 'fedavg'"),
    ],
)
def test_a_policy_counts_for_the_method_inside_a_plug(policy, base, problem, tmp_path):
    code, ran = tmp_path / "mine_too.py", tmp_path / "ran"
    code.write_text(f"open({str(ran)!r}, 'w')")
    one = site(tmp_path, policy)
    base = base.replace("BASE", f"{code}:Mine")
    config = config_text(make_config(method="fedtad", rounds=1, set={"base": base}))
    answer = one.answer(Packet({"do": "begin", "run": "r", "config": config}, b""))
    assert problem in answer.head["reason"]
    assert not ran.exists()
    if not base.endswith("Mine"):
        assert problem in disclosure(
            make_config(method="fedtad", rounds=1, set={"base": base}), one.data, policy
        )["run"]  # fmt: skip


def test_a_server_cannot_have_a_site_open_its_files(tmp_path):
    one = site(tmp_path)
    federation = tmp_path / "other.atoll"  # opening it would reveal that it exists
    config = config_text(make_config(method="fedavg", rounds=1)).replace(
        'data = "lagoon"', f'data = "{federation}"'
    )
    assert str(federation) in config
    assert one.answer(Packet({"do": "begin", "run": "r", "config": config}, b"")).head == {}


@pytest.mark.parametrize(
    "change",
    [
        {"step": "__init__"},
        {"step": "net"},
        {"owner": "method.net"},
        {"owner": "method", "flags": {"epochs": True}},
        {"owner": "evaluator", "step": "score", "flags": {"method": True}},
    ],
)
def test_a_packet_can_name_declared_steps_alone(change, tmp_path):
    one = site(tmp_path)
    config = config_text(make_config(method="fedavg", rounds=1))
    assert one.answer(Packet({"do": "begin", "run": "r", "config": config}, b"")).head == {}
    head = {"do": "step", "run": "r", "owner": "method", "step": "train", "flags": {}, "round": 0,
            "attempt": "a", "state": -2, "key": 1, **change}  # fmt: skip
    answer = one.answer(Packet(head, encode(None)))
    assert answer.head["failure"] == "bad"
    assert not list((tmp_path / "site" / "runs").glob("*/state_*"))


def test_a_site_counts_what_it_sent_over_restarts(tmp_path):
    log = Audit(tmp_path / "site" / "audit.jsonl")
    log.note("sent", run="r", bytes=70)
    log.note("sent", run="other", bytes=500)
    one = site(tmp_path, Policy(run_bytes=100))
    config = config_text(make_config(method="fedavg", rounds=1))
    one.answer(Packet({"do": "begin", "run": "r", "config": config}, b""))
    assert one.job.sent == 70


def test_the_budget_is_for_all_runs_and_a_resumed_run_is_not_paid_twice(tmp_path):
    three = epsilon(3 * release(NOISE), 1e-5)
    policy = Policy(epsilon=three + 1e-6)
    site = make_site(tmp_path, policy)
    message = model_for(site)
    assert begin(site, rounds=2, run="one-0").head == {}
    for number in range(2):
        assert "failure" not in ask(site, message, round=number, run="one-0").head
    assert begin(site, rounds=2, run="one-0").head == {}  # the same run again: nothing new
    assert "this run would make it" in begin(site, rounds=2, run="two-0").head["reason"]
    # A server that asks for more than it announced is stopped when the budget is gone.
    assert begin(site, rounds=1, run="two-0").head == {}
    assert "failure" not in ask(site, message, round=0, run="two-0").head
    answer = ask(site, message, round=0, key=78, run="two-0")
    assert answer.head["failure"] == "refused"
    assert "this update would make it" in answer.head["reason"]
    assert len(Site(site.data, policy, site.folder).account.releases) == 3


def test_jobs_at_the_same_time_share_one_budget(tmp_path):
    policy = Policy(epsilon=epsilon(2 * release(NOISE), 1e-5) + 1e-6)
    one = make_site(tmp_path, policy)
    two = Site(one.data, policy, one.folder)  # another process, which began before the first spent
    message = model_for(one)
    for site, run in ((one, "one-0"), (two, "two-0")):
        assert begin(site, rounds=2, run=run).head == {}
    assert ask(one, message, run="one-0").head == {}
    assert ask(two, message, run="two-0").head == {}
    for site, run in ((one, "one-0"), (two, "two-0")):
        answer = ask(site, message, round=1, run=run)
        assert "this update would make it" in answer.head["reason"]
    assert len(check_audit(one.audit.path)) == 6  # and the log of both is one chain


@pytest.mark.parametrize("between", ["a refused packet", "an update that is not finite", "hello"])
def test_a_note_between_two_jobs_hides_no_release(between, tmp_path):
    """Each note of a job reads only the end of the log, but earlier releases still count."""
    policy = Policy(epsilon=epsilon(2 * release(NOISE), 1e-5) + 1e-6)
    one = make_site(tmp_path, policy)
    two = Site(one.data, policy, one.folder)
    message = model_for(one)
    for site, run in ((one, "one-0"), (two, "two-0")):
        assert begin(site, rounds=2, run=run).head == {}
    for number in range(2):
        assert ask(one, message, round=number, run="one-0").head == {}
    if between == "a refused packet":
        assert two.answer(Packet({"do": "dance"}, b"")).head["failure"] == "bad"
    elif between == "hello":
        two.audit.note("hello")
    else:
        message = crafted(message, lambda w: torch.full_like(w, 3e38))
    answer = ask(two, message, run="two-0")
    assert "this update would make it" in answer.head["reason"]
    assert len(Account(one.audit).releases) == 2


@pytest.mark.parametrize("dp", [None, DP])
def test_the_models_tensors_in_other_places_are_refused(dp, tmp_path):
    """A square matrix as a bias, say, is answered only where there are as many nodes as columns."""
    site = make_site(tmp_path)
    begin(site, dp=dp)
    model = model_for(site)
    tensors = leaves(model)
    others = [
        tensors,
        tuple(tensors),
        [model],
        {"model": model},
        Update(model, tensors[0]),
        None,
        3,
    ]
    for step, owner in (("train", "method"), ("score", "evaluator")):
        for other in others:
            answer = ask(site, other, step=step, owner=owner)
            assert OTHER_FORM.format(step) in answer.head["reason"], other
    assert not site.account.releases
    assert ask(site, model).head == {}


def test_a_private_adafgl_opens_its_second_step_with_the_model_in_a_record(tmp_path):
    site = make_site(tmp_path)
    settings = {"hidden": 5, "keep": "last", "federated_rounds": 1}
    config = config_text(make_config(method="adafgl", rounds=4, dp=DP, set=settings))
    assert site.answer(Packet({"do": "begin", "run": "r-0", "config": config}, b"")).head == {}
    model = site.job.owners["method"].base.net.init(make_key(0))
    for number, message in enumerate((model, Start(model), Empty())):
        state = number - 1 if number else -2
        assert ask(site, message, round=number, state=state).head == {}
    refused = ask(site, Start([model]), round=1, state=0)
    assert refused.head["reason"] == OTHER_FORM.format("train")


@pytest.mark.parametrize("depth", [1, 500, 985, 990, 995])
def test_no_packet_makes_the_log_unreadable_or_long(depth, tmp_path):
    site = make_site(tmp_path)
    nested: object = []
    for _ in range(depth):
        nested = [nested]
    for value in (nested, "x" * 10_000_000, 10**4000, {"a": "x" * 10_000}):
        for do in ("step", "begin", "hello", value):
            head = {"do": do, "run": value, "step": value, "round": value, "version": value}
            assert site.answer(Packet(head, b"")).head["failure"] in ("bad", "refused")
    assert site.audit.path.stat().st_size < 100_000
    assert len(check_audit(site.audit.path)) == len(
        Site(site.data, Policy(), site.folder).audit.events()
    )


def test_a_private_run_does_not_tell_how_a_step_failed(tmp_path, monkeypatch):
    site = make_site(tmp_path)
    begin(site)
    monkeypatch.setattr(site.job.states, "load", lambda _: 1 / 0)
    assert ask(site, model_for(site)).head["reason"] == "it failed; its audit log says more"
    assert "ZeroDivisionError" in site.audit.events(event="bad")[0]["detail"]


@pytest.mark.parametrize("owner", ["method.base", "base", "method.net"])
def test_a_packet_cannot_reach_the_step_without_noise(owner, tmp_path):
    site = make_site(tmp_path)
    begin(site)
    answer = ask(site, model_for(site), owner=owner)
    assert answer.head["failure"] == "bad"
    assert not site.account.releases


def names_of(*objects):
    """Every attribute name of the objects and of their classes, and of what they are made of."""
    found = set()
    for one in objects:
        found |= set(dir(one)) | set(vars(one))
    return sorted(found | {"own", "base", "base.train", "train.owner", "__dict__", "", "method"})


def test_a_packet_reaches_no_step_but_the_declared_ones(tmp_path):
    """Every attribute name of the wrapper, the base, its net and the evaluator is tried."""
    site = make_site(tmp_path)
    begin(site)
    message, job = model_for(site), site.job
    private = job.owners["method"]
    answered = set()
    for owner in (*job.owners, "method.base", "base"):
        for name in names_of(private, private.base, private.base.net, job.owners["evaluator"]):
            before = len(site.account.releases)
            answer = ask(site, message, owner=owner, step=name, key=len(answered))
            if "failure" in answer.head:
                assert answer.head["failure"] == "bad"
                continue
            answered.add((owner, name))
            event = site.audit.events(event="sent")[-1]
            if owner == "method":  # clipped, noised, charged and logged
                assert len(site.account.releases) == before + 1
                assert event["release"] in site.account.releases
                assert float(decode(answer.body).weight) == 1.0
            else:
                assert not any(bool(leaf.gt(0).any()) for leaf in leaves(decode(answer.body)))
    assert answered == {("method", "train"), ("evaluator", "score")}


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("private", [False, True])
def test_only_steps_of_a_class_can_be_named(name, private):
    """Of every method, wrapped and bare: a name gives the object's own declared step or nothing."""
    federation = small_federation()
    config = make_config(method=name)
    method = build_method(config, federation.features, federation.classes)
    if private:
        if method.why_not_private():
            pytest.skip(f"{name} cannot be private: {method.why_not_private()}")
        method = with_privacy(method, make_privacy(DP))
    for owner in owners(method).values():
        for attribute in names_of(owner, method, method.net):
            step = declared_step(owner, attribute)
            if step is not None:
                assert step.owner is owner
                assert step.name == attribute
                assert attribute in {one.name for one in declared_steps(owner)}
    if private:
        assert [step.name for step in declared_steps(method)] == ["train"]
        assert not any(isinstance(getattr(method, n, None), Step) for n in dir(method)
                       if n != "train")  # fmt: skip


PLUGS = [name for name, cls in METHODS.items() if "base" in {f.name for f in fields(cls)}]
PATHS = ("method.base", "method.base.base", "method.net", "method.optimizer", "evaluator.method",
         "base", "net", "", "__class__", "method.__class__")  # fmt: skip


@pytest.mark.parametrize("plug", [*PLUGS, ""])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_name_of_any_part_is_another_objects_step(name, plug):
    """Every name under every owner, as packets give them, of every method and plug."""
    federation = small_federation()
    config = make_config(method=plug or name, set={"base": name} if plug else {})
    try:
        method = build_method(config, federation.features, federation.classes)
    except ConfigError as error:
        pytest.skip(f"{plug} cannot be plugged on {name}: {error}")
    made = [method]
    if not method.why_not_private():
        made.append(with_privacy(method, make_privacy(DP)))
    inside = [
        getattr(method, f.name) for f in fields(method) if is_dataclass(getattr(method, f.name))
    ]
    for one in made:
        job = SimpleNamespace(owners=owners(one))
        names, reached = names_of(*made, *inside, Evaluator(method)), set()
        for owner, step in product({*job.owners, *PATHS}, names):
            head = Question("r-0", owner, step, {}, 0, "a", -2, 7)
            try:
                found = Job._named(job, head)
            except WireError:
                continue
            assert found.owner is job.owners[owner]
            assert found.name == step
            reached.add((owner, step))
        declared = {(o, s.name) for o, part in job.owners.items() for s in declared_steps(part)}
        assert reached == declared
        if one is not method:
            assert reached == {("method", "train"), ("evaluator", "score")}


@pytest.mark.parametrize("run", ["r", "r-0", "a-b", "7"])
def test_every_release_is_charged_whatever_the_run_is_called(run, tmp_path):
    allowed = 3
    policy = Policy(epsilon=epsilon(allowed * release(NOISE), 1e-5) + 1e-6)
    site = make_site(tmp_path, policy)
    message = model_for(site)
    assert begin(site, rounds=1, run=run).head == {}
    answers = [ask(site, message, run=run, key=key) for key in range(allowed + 2)]
    assert ["failure" in answer.head for answer in answers] == [False] * allowed + [True] * 2
    assert site.account.precision() == pytest.approx(allowed * release(NOISE))
    assert "this run would make it" in begin(site, rounds=1, run="other-0").head["reason"]


@pytest.mark.parametrize("dp", [None, DP])
def test_a_message_of_other_shapes_cannot_reach_the_kept_moments(dp, tmp_path):
    site = make_site(tmp_path)
    begin(site, dp=dp)
    assert ask(site, model_for(site), attempt="a").head == {}
    wide = [
        {"weight": torch.zeros(site.data.graph.num_features, 30), "bias": torch.zeros(30)},
        {"weight": torch.zeros(30, site.data.classes), "bias": torch.zeros(site.data.classes)},
    ]
    answer = ask(site, wide, attempt="a")
    assert answer.head["failure"] == "bad"
    assert OTHER_FORM.format("train") in answer.head["reason"]


def crafted(message, change):
    """The message with its first tensor changed."""
    first = leaves(message)[0]
    return tree_map(lambda leaf: change(leaf) if leaf is first else leaf, message)


@pytest.mark.parametrize("dp", [None, DP])
@pytest.mark.parametrize("name", ["train", "score"])
def test_no_message_makes_a_site_tell_its_size(name, dp, tmp_path):
    site = make_site(tmp_path)
    message, nodes = model_for(site), int(site.data.graph.size("nodes"))
    begin(site, dp=dp)
    owner = "method" if name == "train" else "evaluator"
    heard = []
    for rows in (nodes - 1, nodes, nodes + 1):
        # Added to every node's row, a bias of many rows fits only one number of nodes.
        wide = tree_map(lambda b, n=rows: b.expand(n, *b.shape) if b.dim() == 1 else b, message)
        heard.append(ask(site, wide, step=name, owner=owner).head)
        heard.append(ask(site, crafted(message, lambda w: w[1:]), step=name, owner=owner).head)
    assert {head["reason"] for head in heard} == {OTHER_FORM.format(name)}


def test_what_an_error_quotes_stays_at_the_site(tmp_path):
    site = make_site(tmp_path)
    begin(site, dp=None)
    nodes = f"x{int(site.data.graph.size('nodes'))})"  # in the shape of a matrix

    def failing(*_):
        raise RuntimeError(f"shapes do not fit (5{nodes}")

    site.job._run = failing
    answer = ask(site, model_for(site))
    assert answer.head["reason"] == "it failed (RuntimeError); its audit log says more"
    assert nodes in site.audit.events(event="bad")[0]["detail"]


@pytest.mark.parametrize("dp", [None, OPEN, DP])
def test_only_the_owner_learns_that_training_diverged(dp, tmp_path):
    site = make_site(tmp_path)
    begin(site, dp=dp)
    huge = tree_map(lambda leaf: leaf.sign() * 3e38, model_for(site))
    trained = ask(site, huge)
    scored = ask(site, huge, owner="evaluator", step="score")
    if dp != DP:
        assert "training diverged" in trained.head["reason"]
        assert "training diverged" in scored.head["reason"]
        return
    assert trained.head == scored.head == {}
    assert torch.isfinite(numbers(trained)).all()
    assert len(site.account.releases) == 1
    assert {event["step"] for event in site.audit.events(diverged=1)} == {"train", "score"}


def test_the_size_of_the_log_does_not_show_that_training_diverged(tmp_path):
    sizes = set()
    for name, factor in (("fine", 1.0), ("huge", 3e38)):
        site = make_site(tmp_path / name)
        begin(site)
        before = site.audit.path.stat().st_size
        ask(site, tree_map(lambda leaf, by=factor: leaf.sign() * by, model_for(site)))
        (event,) = site.audit.events(event="sent")
        told = site.audit.path.stat().st_size - before
        sizes.add(told - len(repr(event["seconds"])) - len(repr(event["noise"])))
    assert len(sizes) == 1


def test_state_and_lineage_are_one_file_and_the_last_ones_stay(tmp_path):
    states = States(tmp_path)
    assert states.load(-2) == (None, "")
    for number in range(-1, 6):
        states.save(number, torch.tensor(number), f"line {number}", max(number - 1, -2))
    assert states.rounds() == [2, 3, 4, 5]
    assert {path.name for path in tmp_path.iterdir()} == {f"state_{n}.atoll" for n in range(2, 6)}
    assert states.load(3) == (torch.tensor(3), "line 3")
    states.save(3, torch.tensor(9), "another attempt", 2)  # a server that went back
    assert states.rounds() == [2, 3]
    with pytest.raises(WireError, match="the private state after round 5 is not in its runs/"):
        states.load(5)


def test_a_server_that_lets_no_state_count_does_not_fill_the_disk(tmp_path):
    states = States(tmp_path)
    for number in range(50):
        states.save(number, torch.zeros(3), "", -2)
    assert len(states.rounds()) == 3


@pytest.mark.parametrize("lineage", ["abc", None])
def test_states_of_earlier_versions_are_read(lineage, tmp_path):
    save_checkpoint(tmp_path / "state_4.atoll", {"moments": torch.ones(2)})
    if lineage is not None:
        (tmp_path / "state_4.lineage").write_text(lineage)
    states = States(tmp_path)
    state, found = states.load(4)
    assert torch.equal(state["moments"], torch.ones(2))
    assert found == (lineage or "after 4")
    for number in range(5, 9):
        states.save(number, state, "new", number - 1)
    assert not list(tmp_path.glob("*.lineage"))


def test_a_crash_between_two_writes_never_pairs_a_state_with_another_lineage(tmp_path, monkeypatch):
    states = States(tmp_path)
    states.save(0, torch.tensor(0), "first", -2)
    writes = []

    def crash(source, target):
        writes.append(target)
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(KeyboardInterrupt):
        states.save(0, torch.tensor(1), "second", -2)
    assert len(writes) == 1  # there is no second write that could be missing
    assert states.load(0) == (torch.tensor(0), "first")


def test_an_error_after_the_data_were_touched_says_nothing_in_a_private_run(tmp_path, monkeypatch):
    site = make_site(tmp_path)
    begin(site)
    for kind in (WireError, ConfigError, DataError, AtollError, ValueError):

        def fail(*_, kind=kind):
            raise kind("the site has 1013 nodes")

        monkeypatch.setattr(Noised, "release", fail)
        answer = ask(site, model_for(site))
        assert answer.head == {"failure": "bad", "reason": "it failed; its audit log says more"}
        assert "1013 nodes" in site.audit.events(event="bad")[-1]["detail"]
    assert not site.account.releases


def test_two_jobs_of_a_run_do_not_use_its_folder_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.deploy.lock.FolderLock.__init__.__defaults__", (0.0,))
    one, config = site(tmp_path), config_text(make_config(method="fedavg", rounds=1))
    two = Site(one.data, one.policy, one.folder)  # the process of another job
    first, other = (Packet({"do": "begin", "run": run, "config": config}, b"") for run in "rs")
    assert one.answer(first).head == one.answer(first).head == {}
    refused = two.answer(first).head
    assert refused["failure"] == "lost"  # it is asked again later
    assert "another job of this run is still active" in refused["reason"]
    assert two.answer(other).head == {}
    one.close()
    assert two.answer(first).head == {}


def places(tree):
    return {leaf.device.type for leaf in leaves(tree)}


@pytest.mark.parametrize("dp", [None, DP])
def test_a_step_runs_on_the_owners_device_and_its_reply_is_on_the_cpu(dp, tmp_path, monkeypatch):
    """No GPU is needed: the place of every tensor is that which the site asked for."""
    site = make_site(tmp_path)
    asked = []
    monkeypatch.setattr("atoll.deploy.site.prepared", lambda graphs, views, device, **more: (
        asked.append(device) or prepared(graphs, views, **more)))  # fmt: skip
    site.device = torch.device("cuda")
    begin(site, dp=dp)
    assert asked == [torch.device("cuda")]
    moved, real = [], torch.Tensor.to

    def to(leaf, place, *more):
        moved.append((leaf.shape, place))
        return leaf if place == torch.device("cuda") else real(leaf, place, *more)

    message = model_for(site)
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert ask(site, message).head == {}
    monkeypatch.undo()
    there = [shape for shape, place in moved if place == torch.device("cuda")]
    assert there[: len(leaves(message))] == [leaf.shape for leaf in leaves(message)]
    assert there[-1] == torch.Size([])  # the key
    assert places(site.job.state) <= {"cpu"}


def test_a_server_cannot_choose_the_device(tmp_path):
    site = make_site(tmp_path)
    config = config_text(make_config(method="fedavg", rounds=1, device="cuda"))
    assert site.answer(Packet({"do": "begin", "run": "r", "config": config}, b"")).head == {}
    assert places(list(site.job.graph.views.values())) == {"cpu"}


def test_a_server_learns_no_name_of_a_file_by_a_positive_class(tmp_path):
    site = make_site(tmp_path)
    config = config_text(make_config(method="fedavg", positive="x", threshold="max_f1"))
    reply = site.answer(Packet({"do": "begin", "run": "r-0", "config": config}, b""))
    assert "--positive is for two classes" in reply.head["reason"]
    assert site.data.name not in reply.head["reason"]


KEPT = {"clip": 1.0, "noise": 1.0, "randomness": "site", "scores": "kept"}


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"threshold": "max_f1"}, True),
        ({"metric": "average_precision"}, True),
        ({"metric": "auc"}, False),
        ({"threshold": "max_f1", "dp": KEPT}, False),  # bins stay at the site
    ],
)
def test_a_run_that_needs_refused_bins_does_not_begin(options, refused, tmp_path):
    data = read_site_data(write_clients(two_classes(), tmp_path / "data")[0])
    one = Site(data, Policy(), tmp_path / "site")
    config = config_text(make_config(method="fedavg", rounds=9, set={"hidden": 5}, **options))
    reply = one.answer(Packet({"do": "begin", "run": "r-0", "config": config}, b""))
    assert ('disclose = ["score.bins"]' in reply.head.get("reason", "")) == refused
    assert (one.job is None) == refused


@pytest.mark.parametrize(
    ("classes", "options", "allowed"),
    [
        (3, {}, {"with_train"}),
        (3, {"compat": ("dropout-at-eval",)}, {"with_train", "with_dropout"}),
        (2, {}, {"with_train", "with_auc"}),
        (2, {"threshold": "max_f1"}, {"with_train", "with_auc", "with_bins"}),
        (2, {"metric": "average_precision"}, {"with_train", "with_auc", "with_bins"}),
    ],
)
def test_a_packet_asks_for_no_score_that_the_configuration_does_not_need(
    classes, options, allowed, tmp_path
):
    """Every field of a score that left is in the log, from which the card takes it."""
    federation = small_federation() if classes == 3 else two_classes()
    data = read_site_data(write_clients(federation, tmp_path / "data")[0])
    one = Site(data, Policy(disclose=("score.bins",)), tmp_path / "site")
    config = config_text(make_config(method="fedavg", rounds=9, set={"hidden": 5}, **options))
    assert one.answer(Packet({"do": "begin", "run": "r-0", "config": config}, b"")).head == {}
    score = {"owner": "evaluator", "step": "score"}
    for flag in ("with_train", "with_auc", "with_bins", "with_dropout"):
        answer = ask(one, model_for(one), **score, flags={flag: True})
        refused = f"'evaluator' takes no flags ['{flag}'] in this run"
        assert answer.head.get("reason") == (None if flag in allowed else refused)
    asked = dict.fromkeys(allowed, True)
    assert ask(one, model_for(one), **score, flags=asked).head == {}
    more = [name for name in ("auc", "bins") if f"with_{name}" in allowed]
    assert one.audit.events(event="sent")[-1]["scores"] == ["confusion", "loss", *more]


def test_a_packet_names_no_attribute_that_returns_a_step(tmp_path, monkeypatch):
    """Also if a later change adds one: a site looks up declared steps, not attributes."""
    monkeypatch.setattr(Noised, "own", property(lambda self: self.base.train), raising=False)
    site = make_site(tmp_path)
    begin(site)
    assert isinstance(site.job.owners["method"].own, Step)
    answer = ask(site, model_for(site), step="own")
    assert answer.body == b""
    assert "'own'" in answer.head["reason"]
