"""Differential privacy at real sites: whose noise it is, what it costs, what an owner demands."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

import atoll
from atoll.core.dp import keyed_noise
from atoll.core.errors import DataError
from atoll.core.method import Step, declared_step, declared_steps
from atoll.core.random import fold, make_key
from atoll.core.tree import leaves, tree_map
from atoll.deploy.audit import check_audit
from atoll.deploy.disclosure import disclosure
from atoll.deploy.noise import SECRET, normals, site_secret
from atoll.deploy.policy import Policy
from atoll.deploy.site import Site, owners
from atoll.deploy.site_data import read_site_data, write_clients
from atoll.engines.checkpoint import load_checkpoint
from atoll.engines.codec import decode, encode
from atoll.engines.fleet import Packet, SitesFailed
from atoll.experiment.build import build_method
from atoll.experiment.config import config_text, make_config
from atoll.experiment.privacy import epsilon, make_privacy, release, with_privacy
from atoll.methods import METHODS
from atoll.testing import small_federation
from tests.deploy.test_coordinator import Killed, lose, same

CLIP, NOISE = 0.5, 2.0
DP = f"clip={CLIP},noise={NOISE}"
OPEN = f"{DP},scores=told,randomness=seed"
INDEPENDENT = 0.7
"""Differences of two drawings have deviation 1.41; of 78 numbers, six deviations more than this."""
OPTIONS = {"rounds": 2, "set": {"hidden": 5}}


@pytest.mark.parametrize("name", ["fedavg", "fedath", "fedper", "fedopt", "moon", "adafgl"])
def test_with_noise_from_the_seed_sites_equal_the_serial_run(name, make_room):
    federation = small_federation()
    room = make_room(federation)
    options = {**OPTIONS, "dp": OPEN, "fraction": 0.5}
    result = room.run(room.order(name, **options))
    same(result, atoll.run(name, federation, engine="serial", **options))
    assert result.privacy["epsilon_server"] is None
    assert "which the server knows" in result.privacy["says"]


def make_site(folder, policy=None):
    file = write_clients(small_federation(), folder / "data")[0]
    return Site(read_site_data(file), policy or Policy(), folder / "site")


def begin(site, dp=DP, rounds=9, run="r-0", **more):
    config = config_text(make_config(method="fedavg", rounds=rounds, dp=dp, set={"hidden": 5}))
    return site.answer(Packet({"do": "begin", "run": run, "config": config, **more}, b""))


def model_for(site):
    """A message: the first model of a run."""
    from atoll.experiment.build import build_method

    data = site.data
    config = make_config(method="fedavg", set={"hidden": 5})
    net = build_method(config, data.graph.num_features, data.classes).net
    return net.init(make_key(0))


ATTEMPTS = itertools.count()


def ask(site, message, *, key=77, round=0, run="r-0", **change):
    """A question, each in an attempt of its own: private states of others do not count."""
    head = {"do": "step", "run": run, "owner": "method", "step": "train", "flags": {},
            "round": round, "attempt": str(next(ATTEMPTS)), "state": -2, "key": key,
            **change}  # fmt: skip
    return site.answer(Packet(head, encode(message)))


def numbers(packet):
    return torch.cat([leaf.flatten() for leaf in leaves(decode(packet.body).model)]).double()


def test_nobody_but_the_site_can_make_its_noise(tmp_path):
    sites = [make_site(tmp_path / name) for name in ("a", "b")]
    bare = make_site(tmp_path / "c")
    message = model_for(bare)
    begin(bare, dp=f"clip={CLIP},noise=0")
    quiet = numbers(ask(bare, message))
    answers = []
    for site in sites:
        assert begin(site).head == {}
        answers.append(numbers(ask(site, message)))
    noise = [(answer - quiet) / (CLIP * NOISE) for answer in answers]
    # The server knows message, key and seed: all that the noise of a simulation comes from.
    zeros = tree_map(torch.zeros_like, message)
    known = torch.cat(
        [n.flatten() for n in leaves(keyed_noise(zeros, fold(torch.tensor(77), "dp")))]
    )
    count = len(quiet)
    for mine in noise:
        assert abs(mine.std() - 1) < 4 / (2 * count) ** 0.5
        assert abs((mine * known).mean()) < 4 / count**0.5
        assert (mine - known).std() > INDEPENDENT  # to take the known noise off only adds more
    assert abs((noise[0] * noise[1]).mean()) < 4 / count**0.5
    # The same check finds noise that does come from the seed.
    seeded = make_site(tmp_path / "d")
    begin(seeded, dp=OPEN)
    told = (numbers(ask(seeded, message)) - quiet) / (CLIP * NOISE)
    assert (told - known).std() < 1e-3


def test_a_question_that_is_asked_again_gets_the_same_answer(tmp_path):
    site = make_site(tmp_path)
    message = model_for(site)
    begin(site)
    first = ask(site, message)
    assert ask(site, message).body == first.body
    fresh = Site(site.data, site.policy, site.folder)  # a new process, with its files alone
    begin(fresh)
    assert ask(fresh, message).body == first.body
    assert len(fresh.account.releases) == 1
    sent = fresh.audit.events(event="sent")
    assert [event["epsilon"] for event in sent] == [epsilon(release(NOISE), 1e-5)] * 3
    (site.folder / "runs" / "r-0" / SECRET).unlink()
    other = Site(site.data, site.policy, site.folder)
    begin(other)
    assert ask(other, message).body != first.body
    assert len(other.account.releases) == 2  # another answer: paid for


def test_questions_that_differ_a_little_do_not_cancel_the_noise(tmp_path):
    site, bare = make_site(tmp_path / "a"), make_site(tmp_path / "b")
    message = model_for(site)
    near = tree_map(lambda leaf: leaf * (1 + 1e-6), message)
    begin(site)
    begin(bare, dp=f"clip={CLIP},noise=0")
    for change in ({"message": near}, {"key": 78}, {"round": 1}):
        other = {"message": message, **change}
        moved = numbers(ask(site, **other)) - numbers(ask(site, message))
        true = numbers(ask(bare, **other)) - numbers(ask(bare, message))
        assert ((moved - true) / (CLIP * NOISE)).std() > INDEPENDENT
    assert len(site.account.releases) == 4


@pytest.mark.parametrize("change", [{"noise": 2 * NOISE}, {"clip": 2e6}])
def test_the_same_numbers_never_come_at_two_scales(change, tmp_path):
    """Two answers u + s n and u + t n would give u."""
    site = make_site(tmp_path)
    message = model_for(site)
    first = {"clip": 1e6, "noise": NOISE}  # nothing is clipped, whatever the clip
    other = {**first, **change}
    drawn = []
    for one in (first, other):
        dp = f"clip={one['clip']},noise={one['noise']}"
        if drawn:
            assert "with another configuration" in begin(site, dp=dp).head["reason"]
            site.audit.path.unlink()  # not even where an owner lost the log of the first time
            site = Site(site.data, site.policy, site.folder)
        assert begin(site, dp=dp).head == {}
        drawn.append(numbers(ask(site, message)) / (one["clip"] * one["noise"]))
        assert len(site.account.releases) == 1
    assert (drawn[0] - drawn[1]).std() > INDEPENDENT


def test_the_secret_is_for_the_owner_alone(tmp_path):
    secret = site_secret(tmp_path)
    assert len(secret) == 32
    assert site_secret(tmp_path) == secret
    assert (tmp_path / SECRET).stat().st_mode & 0o077 == 0
    assert make_site(tmp_path / "a").folder.stat().st_mode & 0o077 == 0  # states and scores too
    (tmp_path / SECRET).write_bytes(b"")
    with pytest.raises(DataError, match="is damaged"):
        site_secret(tmp_path)


def test_a_sites_numbers_are_standard_normal():
    drawn = normals(b"seed", 100_001)
    assert len(drawn) == 100_001
    assert stats.kstest(drawn, "norm").pvalue > 0.01
    assert abs(np.corrcoef(drawn[:50_000], drawn[50_000:100_000])[0, 1]) < 4 / 50_000**0.5
    assert not np.array_equal(normals(b"other", 9), normals(b"seed", 9))


def with_secrets(room):
    """Rooms whose sites have the same secrets, so that their runs can be compared."""
    for name in room.names:
        folder = room.folder / name / "runs" / "run-0"
        folder.mkdir(parents=True)
        (folder / SECRET).write_bytes(name.encode().ljust(32))
    return room


def test_a_private_run_killed_at_any_moment_resumes_and_pays_once(make_room):
    federation = small_federation((13, 9))
    options = {**OPTIONS, "epochs": 1, "dp": f"{DP},scores=told"}
    whole = with_secrets(make_room(federation, "whole"))
    reference = whole.run(whole.order("fedath", **options))
    for moment in itertools.count():
        room, left = with_secrets(make_room(federation, f"killed-{moment}")), itertools.count()

        def kill(site, question, answer, moment=moment, left=left):
            if question.head["do"] == "step" and next(left) == moment:
                raise Killed
            return answer

        ended = False
        try:
            result = room.run(room.order("fedath", **options), room.fleet(kill))
            ended = True
        except Killed:
            result = room.run(room.order("fedath", **options))
        same(result, reference)
        assert all(len(site.account.releases) == 2 for site in room.sites().values())
        if ended:
            assert moment > 10
            return


def test_a_round_that_is_tried_again_is_paid_once(make_room):
    room = make_room(small_federation())
    seen = {}

    def tamper(site, question, answer):
        if question.head.get("step") == "train" and question.head["round"] == 1:
            seen.setdefault(site, set()).add(answer.body)
        return lose("site-2", 1)(site, question, answer)

    room.run(room.order("fedavg", **OPTIONS, dp=DP), room.fleet(tamper))
    assert all(len(bodies) == 1 for bodies in seen.values())
    assert all(len(site.account.releases) == 2 for site in room.sites().values())


def test_scores_and_sizes_stay_at_the_sites(make_room):
    room = make_room(small_federation())
    heard = []

    def listen(site, question, answer):
        heard.append((question.head, answer))
        return answer

    result = room.run(room.order("fedavg", **OPTIONS, dp=DP), room.fleet(listen))
    hello = [answer.head for head, answer in heard if head["do"] == "hello"]
    assert all(told["counts"] == [0, 0, 0] and told["nodes"] == 0 for told in hello)
    scores = {answer.body for head, answer in heard if head.get("step") == "score"}
    assert len(scores) == 1  # the same from everybody, in every round
    assert not decode(scores.pop()).confusion.any()
    weights = {float(decode(answer.body).weight) for head, answer in heard
               if head.get("step") == "train"}  # fmt: skip
    assert weights == {1.0}
    assert "test_accuracy" not in result.metrics()
    lines = (room.folder / "site-3" / "runs" / "run-0" / "scores.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 2 * 3  # rounds, models, parts
    assert lines[1].startswith("0,deployed,train,0.")
    saved = json.loads((room.folder / "server" / "result.json").read_text())["privacy"]
    assert saved["epsilon_server"] == pytest.approx(epsilon(2 * release(NOISE), 1e-5))
    tree = load_checkpoint(room.folder / "server" / "seed-0" / "checkpoint.atoll")
    assert tree["privacy"]["server"] == saved["epsilon_server"]
    assert '"epsilon_server"' in (room.folder / "server" / "audit.jsonl").read_text()


@pytest.mark.parametrize(
    ("policy", "dp", "reason"),
    [
        (Policy(noise=1.0), None, "demands differential privacy, but the run has none"),
        (Policy(epsilon=9.0), None, "demands differential privacy, but the run has none"),
        (Policy(noise=2.5), DP, "demands noise of at least 2.5, but the run has 2"),
        (Policy(noise=1.0), OPEN, "the noise would come from the seed"),
        (Policy(noise=1.0), f"{DP},scores=told", "scores would be told in the clear"),
        (
            Policy(epsilon=1.0),
            DP,
            "allows epsilon 1 at delta 1e-05 over all its runs, but this run",
        ),
        (Policy(epsilon=99.0), "clip=1,noise=0", "would make it inf"),
    ],
)
def test_an_owner_can_demand_privacy(policy, dp, reason, make_room):
    room = make_room(small_federation())
    sites = {**room.sites(), "site-2": room.sites(policy)["site-2"]}
    order = room.order("fedavg", **OPTIONS, **({} if dp is None else {"dp": dp}))
    with pytest.raises(SitesFailed) as error:
        room.run(order, room.fleet(sites=sites))
    assert str(error.value).startswith("site-2: its policy ")
    assert reason in str(error.value)
    sent = [json.loads(line) for line in sites["site-2"].audit.path.read_text().splitlines()]
    assert not [event for event in sent if event["event"] == "sent"]


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


def test_nothing_is_sent_that_cannot_be_noted(tmp_path, monkeypatch):
    site = make_site(tmp_path)
    begin(site)
    monkeypatch.setattr("os.write", lambda handle, line: len(line) // 2)  # a disk that is full
    with pytest.raises(DataError, match="its disk is full"):
        ask(site, model_for(site))


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
    assert check_audit(one.audit.path) == 6  # and the log of both is one chain


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


def test_equal_updates_on_two_private_states_get_independent_noise(tmp_path):
    """Equal answers would show that the private state made no difference, at no epsilon."""
    site = make_site(tmp_path)
    # Without training nodes no state changes the update: both updates are zero.
    empty = site.data.graph.train * 0
    site.data = replace(site.data, graph=replace(site.data.graph, train=empty))
    still = {"hidden": 5, "weight_decay": 0.0, "dropout": 0.0}
    config = config_text(make_config(method="fedavg", rounds=9, dp=DP, set=still))
    assert site.answer(Packet({"do": "begin", "run": "r-0", "config": config}, b"")).head == {}
    message = model_for(site)
    first, again = (ask(site, message, attempt="same") for _ in range(2))
    other = ask(site, message, state=0)
    retried = ask(site, message)
    assert len({first.body, again.body, other.body}) == 3
    assert retried.body == first.body  # the same question on the same state: a true retry
    assert len(site.account.releases) == 3


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
    assert ("do not fit the parameters" if dp is None else "own shapes") in answer.head["reason"]


def crafted(message, change):
    """The message with its first tensor changed."""
    first = leaves(message)[0]
    return tree_map(lambda leaf: change(leaf) if leaf is first else leaf, message)


@pytest.mark.parametrize("name", ["train", "score"])
def test_no_message_makes_a_site_tell_its_size(name, tmp_path):
    site = make_site(tmp_path)
    message, nodes = model_for(site), int(site.data.graph.size("nodes"))
    begin(site)
    owner = "method" if name == "train" else "evaluator"
    heard = []
    for rows in (nodes - 1, nodes, nodes + 1):
        # Added to every node's row, a bias of many rows fits one number of nodes alone.
        wide = tree_map(lambda b, n=rows: b.expand(n, *b.shape) if b.dim() == 1 else b, message)
        heard.append(ask(site, wide, step=name, owner=owner).head)
        heard.append(ask(site, crafted(message, lambda w: w[1:]), step=name, owner=owner).head)
    assert {head["reason"] for head in heard} == {
        "a private run has messages of its model's own shapes and types alone"
    }


def test_what_an_error_quotes_stays_at_the_site(tmp_path):
    site = make_site(tmp_path)
    begin(site, dp=None)
    nodes = f"x{int(site.data.graph.size('nodes'))})"  # in the shape of a matrix
    answer = ask(site, crafted(model_for(site), lambda w: w[1:]))
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
    assert {event["step"] for event in site.audit.events(event="diverged")} == {"train", "score"}


def test_a_dry_run_shows_what_a_private_run_sends(tmp_path):
    data = make_site(tmp_path).data
    found = disclosure(make_config(method="moon", dp=DP), data, Policy(noise=1.0))
    assert found["run"] == "allowed"
    assert found["told_when_joining"]["nodes"] == 0
    assert {row["verdict"] for row in found["fields"]} == {"allowed"}
    found = disclosure(make_config(method="moon"), data, Policy(noise=1.0))
    assert found["run"].startswith("refused: its policy demands differential privacy")
