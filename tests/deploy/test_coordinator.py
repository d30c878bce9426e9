"""A federated run against the serial engine: equal numbers, whatever happens on the way."""

from __future__ import annotations

import itertools
import json
import tomllib
from dataclasses import replace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch

import atoll
from atoll.core.errors import AtollError, DataError
from atoll.core.method import declared_step
from atoll.core.tree import leaves, tree_map
from atoll.deploy.audit import check_audit
from atoll.deploy.coordinator import Order, outcome, read_federated_result
from atoll.deploy.federated import Diverged, TooFew
from atoll.deploy.noise import SECRET
from atoll.deploy.policy import Policy, Refusal
from atoll.deploy.site import Site
from atoll.deploy.site_data import read_site_data
from atoll.engines.clients import Participants, Simulation
from atoll.engines.codec import decode, encode, load_checkpoint
from atoll.engines.fleet import BAD, LOST, Aborted, Failure, Packet, SitesFailed
from atoll.experiment.build import build_method
from atoll.experiment.config import make_config
from atoll.experiment.folder import RunFolder
from atoll.experiment.metrics import Evaluator
from atoll.experiment.privacy import epsilon, release
from atoll.experiment.result import Result
from atoll.experiment.threshold import Threshold
from atoll.methods import METHODS, FedProto
from atoll.present.terminal import alert_line
from atoll.testing import small_federation, small_graph_federation
from tests.deploy.conftest import two_classes
from tests.deploy.private_site import (
    DP,
    NOISE,
    OPEN,
    OPTIONS,
)

SMALL = {"hidden": 5}
SHORTER = {"fedsage+": {"generator_epochs": 2, "exchanges": 2, "wide": 8}}


def same(result, reference):
    """Whether two results have the same scores in every round, the same metrics and traffic."""
    for one, other in zip(result.seeds, reference.seeds, strict=True):
        for scored, scores in other.history.scores.items():
            np.testing.assert_array_equal(np.stack(one.history.scores[scored]), np.stack(scores))
        assert one.ledger.by_step() == other.ledger.by_step()
    assert result.metrics() == reference.metrics()


@pytest.mark.parametrize("name", METHODS)
def test_every_method_equals_the_serial_run(name, make_room):
    federation = small_federation()
    options = {"rounds": 2, "set": {**SMALL, **SHORTER.get(name, {})}}
    room = make_room(federation)
    same(
        room.run(room.order(name, **options)),
        atoll.run(name, federation, engine="serial", **options),
    )


@pytest.mark.parametrize("name", ["fedavg", "gcfl"])
def test_sites_with_many_graphs_equal_the_serial_run(name, make_room):
    federation = small_graph_federation()
    options = {"rounds": 2, "set": SMALL, "protocol": "gcfl", "batch_size": 3}
    room = make_room(federation)
    result = room.run(room.order(name, **options))
    same(result, atoll.run(name, federation, engine="serial", **options))
    assert result.federation["graphs"] == [6, 9, 7, 5]


def test_seeds_and_a_share_of_the_sites_equal_the_serial_run(make_room):
    federation = small_federation()
    options = {"rounds": 3, "seeds": 2, "fraction": 0.5, "set": SMALL}
    room = make_room(federation)
    same(
        room.run(room.order("feddc", **options)),
        atoll.run("feddc", federation, engine="serial", **options),
    )


class Killed(BaseException):
    """Stands for kill -9: nothing gets the chance to clean up."""


@pytest.mark.parametrize("name", ["fedath", pytest.param("fedtad", marks=pytest.mark.long)])
def test_a_run_killed_at_any_moment_resumes_to_the_same_numbers(name, make_room):
    federation = small_federation((13, 9))
    options = {"rounds": 2, "set": SMALL, "epochs": 1}
    reference = atoll.run(name, federation, engine="serial", **options)
    for moment in itertools.count():
        room, left = make_room(federation, f"killed-{moment}"), itertools.count()

        def kill(site, question, answer, moment=moment, left=left):
            # The site has answered and written its state, but the server never receives the answer.
            if question.head["do"] == "step" and next(left) == moment:
                raise Killed
            return answer

        try:
            result = room.run(room.order(name, **options), room.fleet(kill))
        except Killed:
            result = room.run(room.order(name, **options))
            same(result, reference)
            continue
        same(result, reference)
        assert moment > 10
        return


def lose(site_lost, first_round, step="train"):
    """A tamper: a site is silent from a round on."""
    return lambda site, question, answer: (
        None
        if site == site_lost
        and question.head.get("round", -9) >= first_round
        and question.head.get("step") == step
        else answer
    )


def audit(room):
    return (room.folder / "server" / "audit.jsonl").read_text()


def without(federation, name, rounds, out, settings=SMALL):
    """The server's tree of a serial run in which positions `out[round]` take no part."""
    config = make_config(method=name, set=settings, epochs=3)
    method = build_method(config, federation.features, federation.classes, federation.task.name)
    simulation = Simulation(federation, method, engine="serial", seed=0)
    server = method.init(simulation.clients(-1))
    for number in range(rounds):
        there = [i for i in range(len(federation)) if i not in out.get(number, ())]
        server = method.round(server, Participants(simulation, number, torch.tensor(there)))
    return server


@pytest.mark.parametrize("name", ["fedath", "gcfl"])
@pytest.mark.parametrize("step", ["train", "score"])
def test_a_lost_site_is_left_out_as_if_it_had_not_taken_part(name, step, make_room):
    federation = small_federation()
    room = make_room(federation)
    fleet = room.fleet(lose("site-2", 1, step))
    result = room.run(room.order(name, rounds=3, set=SMALL), fleet)
    expected = without(federation, name, 3, {1: [1], 2: [1]})
    saved = load_checkpoint(room.folder / "server" / "seed-0" / "checkpoint.atoll")
    for one, other in zip(leaves(saved["server"]), leaves(expected), strict=True):
        torch.testing.assert_close(one, other)
    # After one timeout it is not called again.
    assert fleet.calls.count(("site-2", step)) == (2 if step == "train" else 3)
    scores = np.stack(result.seeds[0].history.scores["deployed"])
    assert np.isnan(scores[1:, 1]).all()
    assert not np.isnan(scores[:, 0, 1, 0]).any()
    events = [json.loads(line) for line in audit(room).splitlines()]
    left_out = [event for event in events if event["event"] == "left out"]
    assert [(event["site"], event["round"]) for event in left_out] == [("site-2", 1)]
    assert len(check_audit(room.folder / "server" / "audit.jsonl")) == len(events)


def test_a_site_that_is_back_continues_from_the_last_round_it_was_part_of(make_room):
    federation = small_federation()
    room = make_room(federation)
    fleet = room.fleet()

    def silent_in_round_one(site, question, answer):
        lost = site == "site-2" and question.head.get("round") == 1
        if question.head.get("round") == 2:
            return answer
        if lost:
            fleet.returned.add("site-2")
        return None if lost else answer

    fleet.tamper = silent_in_round_one
    room.run(room.order("fedath", rounds=4, set=SMALL), fleet)
    expected = without(federation, "fedath", 4, {1: [1]})
    saved = load_checkpoint(room.folder / "server" / "seed-0" / "checkpoint.atoll")
    for one, other in zip(leaves(saved["server"]), leaves(expected), strict=True):
        torch.testing.assert_close(one, other)
    assert saved["states"]["committed"] == [3, 3, 3, 3]


def test_below_the_quorum_the_run_stops_and_a_resumed_one_finishes(make_room):
    federation = small_federation()
    room = make_room(federation)
    order = room.order("fedath", rounds=3, set=SMALL, quorum=4)
    with pytest.raises(TooFew, match="3 of 4 sites answer, but the quorum is 4"):
        room.run(order, room.fleet(lose("site-3", 2)))
    reference = atoll.run("fedath", federation, engine="serial", rounds=3, set=SMALL)
    same(room.run(order), reference)


def nan(reply):
    return tree_map(lambda leaf: torch.full_like(leaf, torch.nan), reply)


def wider(reply):
    return tree_map(lambda leaf: torch.cat([leaf, leaf]) if leaf.dim() else leaf, reply)


def tiny(reply):
    return tree_map(lambda leaf: leaf.to(torch.float8_e4m3fn), reply)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda body: encode(nan(decode(body))), "NaN"),
        (lambda body: encode(wider(decode(body))), "has shape"),
        (lambda body: encode({"model": torch.zeros(3)}), "but the method declares"),
        (lambda body: body[: len(body) // 2], "not an Atoll message"),
        (lambda body: b"\x80\x04." + body, "not an Atoll message"),
        (lambda body: bytes(len(body)), "not an Atoll message"),
        (lambda body: encode(tiny(decode(body))), "is torch.float8_e4m3fn"),
    ],
    ids=["nan", "shape", "names", "cut", "pickle", "zeros", "tiny"],
)
def test_bad_data_are_refused_and_their_site_left_out(spoil, reason, make_room):
    federation = small_federation()
    room = make_room(federation)

    def tamper(site, question, answer):
        bad = site == "site-4" and question.head.get("step") == "train"
        return Packet(answer.head, spoil(answer.body)) if bad else answer

    room.run(room.order("fedavg", rounds=2, set=SMALL), room.fleet(tamper))
    expected = without(federation, "fedavg", 2, {0: [3], 1: [3]})
    saved = load_checkpoint(room.folder / "server" / "seed-0" / "checkpoint.atoll")
    for one, other in zip(leaves(saved["server"]), leaves(expected), strict=True):
        torch.testing.assert_close(one, other)
    assert reason in audit(room)


@pytest.mark.parametrize("change", [{"counts": "many"}, {"nodes": None}, {"more": 1}])
def test_a_site_that_joins_with_nonsense_is_named(change, make_room):
    room = make_room(small_federation())

    def tamper(site, question, answer):
        odd = site == "site-2" and question.head["do"] == "hello"
        return Packet({**answer.head, **change}, b"") if odd else answer

    with pytest.raises(SitesFailed, match=r"^site-2: its summary of the data cannot be used"):
        room.run(room.order("fedavg", rounds=1, set=SMALL), room.fleet(tamper))


def test_sites_of_other_versions_take_part_and_the_log_names_them(make_room):
    room = make_room(small_federation())

    def tamper(site, question, answer):
        names = {"site-1": {}, "site-2": {"atoll": "0.2.0" * 100}, "site-3": {"atoll": ["odd"]}}
        if question.head["do"] != "hello" or site not in names:
            return answer
        older = {key: value for key, value in answer.head.items() if key != "atoll"}
        return Packet({**older, **names[site]}, b"")

    order = room.order("fedavg", rounds=1, set=SMALL)
    room.run(order, room.fleet(tamper))
    room.run(order)  # the site was upgraded: its data are the same
    events = [json.loads(line) for line in audit(room).splitlines()]
    first, again = (event["sites"] for event in events if event["event"] == "versions")
    assert first["site-1"] == "older"
    assert len(first["site-2"]) == 40
    assert again == dict.fromkeys(room.names, atoll.__version__)


def test_an_oversized_reply_is_refused(make_room):
    room = make_room(small_federation())
    fleet = room.fleet(lambda site, question, answer: (
        Packet(answer.head, answer.body + bytes(1 << 20)) if site == "site-1" and answer.body
        else answer))  # fmt: skip
    room.run(room.order("fedavg", rounds=1, set=SMALL), fleet)
    # What a reply may weigh follows from what the method declares: here 316 bytes in five arrays.
    assert "the limit is 37180 bytes" in audit(room)


@pytest.mark.parametrize(
    ("policy", "method", "reason"),
    [
        (Policy(methods=("local",)), "fedavg", "does not allow method 'fedavg'; it allows: local"),
        (Policy(rounds=2), "fedavg", "allows 2 rounds, but the run has 3"),
    ],
)
def test_a_run_that_an_owner_does_not_allow_is_refused_in_one_sentence(
    policy, method, reason, make_room
):
    room = make_room(small_federation())
    sites = {**room.sites(), "site-2": room.sites(policy)["site-2"]}
    order = room.order(method, rounds=3, set=SMALL)
    with pytest.raises(SitesFailed) as error:
        room.run(order, room.fleet(sites=sites))
    assert str(error.value).startswith("site-2: ")
    assert reason in str(error.value)
    assert "refused" in (room.folder / "site-2" / "audit.jsonl").read_text()


@pytest.mark.parametrize(
    ("policy", "method", "reason"),
    [
        (Policy(steps=("score",)), "fedavg", "does not allow step 'train'"),
        (Policy(reply_bytes=100), "fedavg", "allows replies of 100 bytes"),
        (Policy(run_bytes=3000), "fedavg", "allows 3000 bytes in a run"),
        (Policy(), "moon", "disclose 'model'"),
    ],
)
@pytest.mark.parametrize("quorum", [3, 4])
def test_a_site_that_refuses_a_step_is_left_out(policy, method, reason, quorum, make_room):
    room = make_room(small_federation())
    sites = {**room.sites(), "site-2": room.sites(policy)["site-2"]}
    order = room.order(method, rounds=2, set=SMALL, quorum=quorum)
    if quorum == 3:
        room.run(order, room.fleet(sites=sites))
        assert '"left out", "site": "site-2"' in audit(room)
        assert reason in audit(room)
        return
    with pytest.raises(SitesFailed, match=r"^site-2: "):  # another job would not help
        room.run(order, room.fleet(sites=sites))
    assert "refused" in (room.folder / "site-2" / "audit.jsonl").read_text()


def test_code_of_the_submitters_choice_is_refused(make_room):
    room = make_room(small_federation())
    with pytest.raises(SitesFailed, match=r"'my\.py:Mine' does not come with Atoll"):
        room.run(room.order("my.py:Mine", rounds=1))


def test_an_outcome_is_one_sentence(make_room):
    room = make_room(small_federation())
    fleet = room.fleet(sites=room.sites(Policy(methods=())))
    ended = outcome(lambda: room.run(room.order("fedavg", rounds=1), fleet))
    assert ended["status"] == "failed"
    assert "site-1: its policy does not allow method 'fedavg'" in ended["reason"]


def test_an_outcome_knows_the_kinds_of_errors_that_derive_from_others():
    class Cancelled(Aborted):
        pass

    class NoneLeft(TooFew):
        pass

    def end(error: AtollError) -> str:
        def action() -> Result:
            raise error

        return outcome(action)["status"]

    order = Order(run="r", config="", sites=("a", "b"), quorum=2)
    short = {kind: end(kind(order, {"b": Failure(LOST, "gone")})) for kind in (TooFew, NoneLeft)}
    assert short == {TooFew: "short", NoneLeft: "short"}
    assert [end(kind("x")) for kind in (Aborted, Cancelled)] == ["stopped", "stopped"]
    assert end(AtollError("x")) == "failed"


def test_other_data_than_the_run_began_with_are_refused(make_room):
    room = make_room(small_federation())
    order = room.order("fedavg", rounds=2, set=SMALL, quorum=4)
    with pytest.raises(TooFew):
        room.run(order, room.fleet(lose("site-1", 1)))
    room.files = [room.files[1], *room.files[1:]]
    with pytest.raises(SitesFailed, match="site-1: its data are not those that the run began"):
        room.run(order)
    room.run(msgspec.structs.replace(order, quorum=3))
    assert "its data are not those" in audit(room)


def test_nobody_may_be_missing_at_the_start(make_room):
    room = make_room(small_federation())
    fleet = room.fleet(lambda site, q, a: None if site == "site-2" else a)
    with pytest.raises(SitesFailed, match="site-2: no answer to 'hello'"):
        room.run(room.order("fedavg", rounds=1), fleet)


def owners(room, tables, folder, *columns):
    """Two owners with their own tables, of whom the second has no node of class y."""
    classes = ["x", "y", "z"]
    wanted = zip(("xyz", "xz"), columns, strict=True)
    paths = [tables(folder / str(i), *one) for i, one in enumerate(wanted)]
    room.names = ("bank-a", "bank-b")
    return {
        name: Site(read_site_data(path, classes=classes), Policy(), folder / name)
        for name, path in zip(room.names, paths, strict=True)
    }


def test_owners_with_tables_of_their_own_equal_the_serial_run(make_room, tables, tmp_path):
    room = make_room(small_federation())
    sites = owners(room, tables, tmp_path, "b", "b")
    result = room.run(room.order("fedath", rounds=2, set=SMALL), room.fleet(sites=sites))
    graphs = tuple(site.data.graph for site in sites.values())
    federation = atoll.Federation(graphs, classes=3, name="lagoon")
    same(result, atoll.run("fedath", federation, engine="serial", rounds=2, set=SMALL))


def test_owners_whose_columns_differ_are_refused(make_room, tables, tmp_path):
    room = make_room(small_federation())
    sites = owners(room, tables, tmp_path, "b", "amount")
    with pytest.raises(DataError, match="'bank-a' and 'bank-b' differ in the column 'amount'"):
        room.run(room.order("fedath", rounds=2), room.fleet(sites=sites))
    order = room.order("fedath", rounds=2, encoder="local")
    with pytest.raises(DataError, match=r"do not fit together: words \['column b'\] and"):
        room.run(order, room.fleet(sites=sites))


@pytest.mark.parametrize("name", ["fedavg", "fedath", "fedper", "fedopt", "moon", "adafgl"])
def test_with_noise_from_the_seed_sites_equal_the_serial_run(name, make_room):
    federation = small_federation()
    room = make_room(federation)
    options = {**OPTIONS, "dp": OPEN, "fraction": 0.5}
    result = room.run(room.order(name, **options))
    same(result, atoll.run(name, federation, engine="serial", **options))
    assert result.privacy["epsilon_server"] is None
    assert "which the server knows" in result.privacy["says"]


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
    assert len(scores) == 1  # the same from each site, in every round
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


def test_in_a_private_run_each_site_chooses_and_keeps_its_own_threshold(make_room):
    room, heard = make_room(two_classes()), []

    def listen(site, question, answer):
        if question.head.get("step") == "score":
            heard.append(answer.body)
        return answer

    order = room.order("fedavg", **OPTIONS, dp=DP, threshold="max_f1", positive="0")
    result = room.run(order, room.fleet(listen))
    assert len(set(heard)) == 1
    assert not decode(heard[0]).bins.any()
    chosen = {}
    for name in room.names:
        text = (room.folder / name / "runs" / "run-0" / "threshold.toml").read_text()
        chosen[name] = Threshold(**tomllib.loads(text))
    assert {one.positive for one in chosen.values()} == {0}
    assert len({one.value for one in chosen.values()}) > 1
    about = RunFolder(room.folder / "server").model().about
    assert Threshold.of(about) is None
    assert about["round"] == 1  # the last
    assert alert_line(result) == [
        "the scores stayed at the sites, so this is the model of the last round, and each site "
        "chose its own threshold (max_f1) and does not send it"
    ]


def test_counts_by_bin_leave_a_site_only_if_its_owner_allows_it(make_room):
    federation = two_classes()
    options = {**OPTIONS, "metric": "average_precision", "threshold": "max_f1"}
    room = make_room(federation)
    result = room.run(room.order("fedavg", **options))
    simulated = atoll.run("fedavg", federation, engine="serial", **options).metrics()
    for name in ("test_average_precision", "threshold"):
        assert result.metrics()[name]["mean"] == pytest.approx(simulated[name]["mean"])
    assert Threshold.of(RunFolder(room.folder / "server").model().about) is not None
    plain, strict = make_room(federation, "plain"), Policy()
    order = plain.order("fedavg", **OPTIONS, metric="auc")  # which needs no bins
    assert "test_auc" in plain.run(order, plain.fleet(sites=plain.sites(strict))).metrics()
    site = Site(read_site_data(room.files[0]), Policy(), room.folder / "strict")
    with pytest.raises(Refusal, match=r'its owner can allow it with disclose = \["score.bins"\]'):
        site.policy.check_reply(declared_step(Evaluator(None), "score"), {"confusion", "bins"})


def test_a_second_job_of_a_run_is_refused(make_room, monkeypatch):
    monkeypatch.setattr("atoll.deploy.lock.FolderLock.__init__.__defaults__", (0.0,))
    room, ended = make_room(small_federation()), []

    def start_another(site, question, answer):
        if question.head.get("step") == "train" and not ended:
            ended.append(outcome(lambda: room.run(order, fleet)))
        return answer

    order, fleet = room.order("fedavg", rounds=2, set=SMALL), room.fleet(start_another)
    room.run(order, fleet)
    reason = "another job of run 'run' is still active on the server"
    assert ended == [{"status": "busy", "reason": reason}]
    assert outcome(lambda: room.run(order, room.fleet()))["status"] == "finished"


def poison(site, question, answer):
    """One site's update of round 1 is large but accepted, and training on the mean diverges."""
    if question.head.get("step") != "train":
        return answer
    if max(float(leaf.abs().max()) for leaf in leaves(decode(question.body))) > 100:
        return Packet({"failure": "diverged", "reason": "training diverged"}, b"")
    if site != "site-3" or question.head["round"] != 1:
        return answer
    reply = decode(answer.body)
    return Packet({}, encode(type(reply)(tree_map(lambda x: x + 1e4, reply.model), reply.weight)))


@pytest.mark.parametrize(("name", "links"), [("fedath", True), ("fedtad", False)])
def test_a_run_that_diverges_everywhere_continues_from_before_without_a_site(
    name, links, make_room, monkeypatch
):
    if not links:
        monkeypatch.setattr("os.link", Mock(side_effect=PermissionError("no hard links here")))
    federation, options = small_federation(), {"rounds": 4, "set": SMALL}
    room = make_room(federation)
    order = room.order(name, **options)
    order = msgspec.structs.replace(order, update_limit=1e9)
    with pytest.raises(Diverged, match=r"round 2: training diverged at .*--resume DIR --without"):
        room.run(order, room.fleet(poison))
    ended = outcome(lambda: room.run(order, room.fleet(poison)))  # it is not mended by itself
    assert ended["status"] == "failed"
    again = msgspec.structs.replace(order, without=("site-3",))
    room.run(again, room.fleet(poison))
    assert "back before divergence" in audit(room)
    expected = without(federation, name, 4, {1: [2], 2: [2], 3: [2]})
    saved = load_checkpoint(room.folder / "server" / "seed-0" / "checkpoint.atoll")
    for one, other in zip(leaves(saved["server"]), leaves(expected), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("content", [None, b"", b"junk"])
def test_a_damaged_earlier_checkpoint_replaces_nothing(content, make_room):
    room = make_room(small_federation())
    order = room.order("fedavg", rounds=4, set=SMALL)
    order = msgspec.structs.replace(order, update_limit=1e9)
    with pytest.raises(Diverged):
        room.run(order, room.fleet(poison))
    earlier = room.folder / "server" / "earlier" / "0.atoll"
    earlier.unlink()
    if content is not None:
        earlier.write_bytes(content)
    room.run(msgspec.structs.replace(order, without=("site-3",)), room.fleet())
    events = [json.loads(line) for line in audit(room).splitlines()]
    found = [event for event in events if "back" in event["event"]]
    assert [event["event"] for event in found] == ["not back before divergence"]
    assert "0.atoll" in found[0]["reason"]
    assert [e["round"] for e in events if e["event"] == "round"] == [1, 2, 3, 4]


@pytest.mark.parametrize("quorum", [1, 2, 3])
def test_training_that_diverges_at_most_sites_ends_the_run_whatever_the_quorum(quorum, make_room):
    """Else the run continues with the site that spoilt the model."""
    room = make_room(small_federation())

    def diverge(site, question, answer):
        late = question.head.get("step") == "train" and question.head["round"] == 1
        failed = Packet({"failure": "diverged", "reason": "training diverged"}, b"")
        return failed if late and site != "site-3" else answer

    with pytest.raises(Diverged, match="round 1: training diverged at 3 of 4 sites"):
        room.run(room.order("fedavg", rounds=3, set=SMALL, quorum=quorum), room.fleet(diverge))
    assert (room.folder / "server" / "earlier" / "0.diverged").exists()


def test_a_model_that_a_round_before_spoilt_ends_the_run_once_and_is_taken_back(
    make_room, monkeypatch
):
    """The prototypes of round 1 are not finite, which shows when round 2 sends them."""
    honest = FedProto.round

    def spoilt(self, server, clients):
        new = honest(self, server, clients)
        lies = clients.round == 1 and 2 in clients.positions.tolist()
        return replace(new, prototypes=new.prototypes * torch.nan) if lies else new

    monkeypatch.setattr(FedProto, "round", spoilt)
    room = make_room(small_federation())
    order = room.order("fedproto", rounds=3, set={**SMALL, "inference": "head"})
    with pytest.raises(Diverged, match="round 2: the server's model is not finite"):
        room.run(order, room.fleet())
    assert "left out" not in audit(room)
    room.run(msgspec.structs.replace(order, without=("site-3",)), room.fleet())
    assert "back before divergence" in audit(room)


def test_sites_that_are_out_already_cannot_fail_for_ever(make_room, monkeypatch):
    honest = FedProto.round

    def fail(self, server, clients):
        if isinstance(clients.simulation, Simulation):  # a site plays on synthetic clients
            return honest(self, server, clients)
        raise SitesFailed({"site-3": Failure(BAD, "again")})

    monkeypatch.setattr(FedProto, "round", fail)
    room = make_room(small_federation())
    with pytest.raises(Diverged, match="site-3: again"):
        room.run(room.order("fedproto", rounds=1, set=SMALL), room.fleet())
    assert audit(room).count("left out") == 1


def test_a_run_continues_without_a_site_from_where_it_is(make_room):
    federation = small_federation()
    room = make_room(federation)
    order = room.order("fedavg", rounds=3, set=SMALL, quorum=4)
    with pytest.raises(TooFew):
        room.run(order, room.fleet(lose("site-3", 2)))
    fleet = room.fleet()
    room.run(msgspec.structs.replace(order, quorum=3, without=("site-3",)), fleet)
    assert not [call for call in fleet.calls if call[0] == "site-3"]
    expected = without(federation, "fedavg", 3, {2: [2]})
    saved = load_checkpoint(room.folder / "server" / "seed-0" / "checkpoint.atoll")
    for one, other in zip(leaves(saved["server"]), leaves(expected), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("roster.json", text) for text in (b"{", b"[]", b"{}", b'{"other": 3}')),
        *(("result.json", text) for text in (b"{", b"[]", b"{}", b'{"seconds": 3}')),
    ],
)
def test_a_damaged_file_of_the_server_is_named_in_one_sentence(make_room, name, content):
    room = make_room(small_federation())
    order = room.order("fedavg", rounds=1, set={"hidden": 4})
    room.run(order)
    (room.folder / "server" / name).write_bytes(content)
    with pytest.raises(DataError, match=name):
        read_federated_result(order, room.folder / "server")


def _lacks(text):
    return json.dumps({k: v for k, v in json.loads(text).items() if k != "site-3"}).encode()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("roster.json", _lacks),
        *(("encoder.json", lambda _, text=text: text) for text in (b"{", b"{}", b"\xff", b"[3]")),
    ],
)
def test_a_damaged_file_of_a_resumed_run_is_named_in_one_sentence(make_room, name, change):
    room = make_room(small_federation())
    order = room.order("fedavg", rounds=1, set={"hidden": 4})
    room.run(order)
    file = room.folder / "server" / name
    file.write_bytes(change(file.read_bytes() if file.exists() else b""))
    with pytest.raises(DataError, match=rf"{name}.* restore it from a backup"):
        room.run(order)
