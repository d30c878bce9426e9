"""An owner's policy: refused runs, and unusable files."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from atoll.core.errors import ConfigError
from atoll.core.tree import leaves, tree_map
from atoll.deploy.policy import SEEDS, Policy, Refusal, read_policy
from atoll.deploy.site import Site
from atoll.engines.fleet import Packet, SitesFailed
from atoll.experiment.build import build_method, parameter_shapes
from atoll.experiment.config import config_text, make_config, parse_config
from atoll.methods import METHODS, FedAvg
from atoll.testing import small_federation
from tests.deploy.private_site import (
    DP,
    OPEN,
    OPTIONS,
    ask,
    begin,
    make_site,
    model_for,
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("method = ['fedavg']", "did you mean 'methods'"),
        ("methods = ['fedavgg']", "did you mean 'fedavg'"),
        ("rounds = 'many'", "cannot be used"),
        ("seconds = 0", "seconds is 0; give a number between 0 and inf"),
        ("epochs = -1", "epochs is -1; give a number between 0 and inf"),
        ("disclose = 'all'", "disclose takes a list"),
        ("rounds = ", "cannot be read"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused(text, problem, tmp_path):
    file = tmp_path / "policy.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_policy(file)


def test_a_policy_file_that_is_not_there_is_not_the_default(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_policy(tmp_path / "none.toml")


@pytest.mark.parametrize("round", [-2, 1])
def test_a_round_beyond_the_policy_is_refused(round):
    with pytest.raises(Refusal, match="allows 1 rounds"):
        Policy(rounds=1).check_step(FedAvg(None).train, round)


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


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"epochs": 10**12}, "allows epochs up to 1000, but epochs is 1000000000000"),
        ({"hidden": 3 * 10**8}, "allows width up to 10000, but hidden is 300000000"),
        ({"layers": 3 * 10**6}, "allows layers up to 100, but layers is 3000000"),
        ({"net": "sgc", "hops": 10**9}, "allows width up to 10000, but hops is 1000000000"),
        (
            {"hidden": 10_000, "layers": 100},
            "allows 100000000 parameters, but the method's networks have",
        ),
        ({"hidden": 10**12, "layers": 10**12}, "its policy allows"),
    ],
)
def test_absurd_work_is_refused_before_anything_is_built(settings, reason, tmp_path):
    site = make_site(tmp_path)
    config = config_text(make_config(method="fedavg", rounds=1, set=settings))
    answer = site.answer(Packet({"do": "begin", "run": "r", "config": config}, b""))
    assert answer.head["failure"] == "refused"
    assert reason in answer.head["reason"]
    assert site.job is None
    assert not site.audit.events(event="begin")


@pytest.mark.parametrize(
    ("method", "settings", "problem"),
    [
        ("adafgl", {"personal_epochs": 5}, "epochs up to 4, but personal_epochs is 5"),
        ("fedtad", {"base": "moon", "base.head": 20_000}, "width up to 10000, but head is 20000"),
    ],
)
def test_the_numbers_of_every_part_count(method, settings, problem):
    built = build_method(make_config(method=method, epochs=2, set=settings), 3, 2)
    with pytest.raises(Refusal, match=problem):
        Policy(epochs=4).check_size(built)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedavg", {"hidden": 2000}),
        ("fedsage+", {"narrow": 100, "wide": 100, "latent": 100}),
        ("moon", {"head": 2000}),
        ("fedtad", {"base": "moon", "base.head": 2000}),
        ("fedath", {"hidden": 1200}),
        ("adafgl", {"hidden": 1000}),
    ],
)
def test_the_parameters_of_every_network_count(method, settings):
    built = build_method(make_config(method=method, set=settings), 3, 2)
    known = sum(leaf.numel() for leaf in leaves(parameter_shapes(built.net)))
    assert (known < 10_000) == (method != "fedavg")
    with pytest.raises(Refusal, match="allows 10000 parameters, but the method's networks have"):
        Policy(parameters=10_000, width=10**6).check_size(built)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_default_policy_allows_every_method_with_its_own_numbers(name):
    Policy().check_size(build_method(make_config(method=name), 3, 2))


def test_questions_and_seconds_of_a_round_are_counted_over_restarts(tmp_path):
    policy = Policy(questions=3)
    site = make_site(tmp_path, policy)
    message = model_for(site)
    begin(site, dp=None)
    assert ask(site, message).head == {}
    assert ask(site, message, owner="evaluator", step="score").head == {}
    huge = tree_map(lambda leaf: leaf.sign() * 3e38, message)
    assert ask(site, huge).head["failure"] == "diverged"  # which is work too
    for again in (site, Site(site.data, policy, site.folder)):
        site.close()
        begin(again, dp=None)
        answer = ask(again, message)
        assert answer.head["failure"] == "bad"
        assert answer.head["reason"] == "over its limit: its policy allows questions = 3"
    assert ask(again, message, round=1).head == {}
    again.close()
    slow = Site(site.data, Policy(), site.folder)
    begin(slow, dp=None)
    slow.policy = Policy(round_seconds=1e-6)
    answer = ask(slow, message, round=1)
    assert answer.head["reason"] == "over its limit: its policy allows round_seconds = 1e-06"


def test_a_question_that_diverges_counts_over_restarts(tmp_path):
    site = make_site(tmp_path, Policy(questions=3))
    huge = tree_map(lambda leaf: torch.full_like(leaf, 1e38), model_for(site))
    for _ in range(3):
        begin(site, dp=None)
        assert ask(site, huge).head["failure"] == "diverged"
    begin(site, dp=None)
    assert "its policy allows questions = 3" in ask(site, huge).head["reason"]


def test_a_message_beyond_the_policy_is_refused_before_it_is_decoded(tmp_path):
    site = make_site(tmp_path, Policy(message_bytes=100))
    begin(site, dp=None)
    answer = ask(site, model_for(site))
    assert "bytes was refused; the limit is 100 bytes" in answer.head["reason"]


def test_a_server_fills_no_disk_with_runs(tmp_path):
    site = make_site(tmp_path, Policy(runs=2))
    for run in ("a-0", "a-1", "b-0", "a-2"):  # seeds of one run count once
        assert begin(site, run=run, seeds=3).head == {}
    for _ in range(2):
        refused = begin(site, run="c-0").head
        assert refused["failure"] == "refused"
        assert "its policy keeps 2 runs, and there are as many" in refused["reason"]
    assert sorted(path.name for path in site.folder.glob("runs/*")) == ["a-0", "a-1", "a-2", "b-0"]
    assert begin(site, run="b-0", seeds=3).head == {}  # it continues
    shutil.rmtree(site.folder / "runs" / "b-0")
    assert begin(site, run="c-0").head == {}


@pytest.mark.parametrize(
    "refused",
    [
        {"class_weights": "1,2"},
        {"batch_size": 3},
        {"threshold": "max_f1"},
        {"metric": "average_precision"},
        {"metric": "recall@\u0661%"},
        {"method": "fedper", "set": {"net": "sgc"}, "dp": DP},
    ],
)
def test_a_refused_begin_leaves_no_folder(refused, tmp_path):
    """A site with three classes: a metric or threshold of two could not be delivered either."""
    site = make_site(tmp_path, Policy(runs=1))
    config = config_text(make_config(**{"method": "fedavg", "rounds": 2, **refused}))
    answer = site.answer(Packet({"do": "begin", "run": "bad-0", "config": config}, b""))
    assert answer.head["failure"] == "bad"
    assert "it failed" not in answer.head["reason"]
    assert not list(site.folder.glob("runs/*"))
    assert not site.audit.events(event="begin")
    assert begin(site).head == {}


def test_a_server_fills_no_disk_with_seeds_of_a_run(tmp_path):
    site = make_site(tmp_path, Policy(runs=1))
    for seed in range(SEEDS):
        (site.folder / "runs" / f"a-{seed}").mkdir(parents=True)
    more = {"seeds": SEEDS + 1}
    assert begin(site, run="a-7", **more).head == {}
    assert "its policy keeps 1 runs" in begin(site, run=f"a-{SEEDS}", **more).head["reason"]
    for seed in ("1000", "00", "07", "9" * 90):
        assert "none of its configuration's" in begin(site, run=f"a-{seed}", **more).head["reason"]


def test_a_server_fills_no_disk_with_bytes(tmp_path):
    site = make_site(tmp_path, Policy(kept_bytes=20_000))
    assert begin(site, run="a-0").head == {}
    (site.folder / "runs" / "a-0" / "state_1.atoll").write_bytes(bytes(20_000))
    assert "keeps 20000 bytes, and they are used up" in begin(site, run="b-0").head["reason"]
    assert not (site.folder / "runs" / "b-0").exists()


def test_private_states_count_as_kept_bytes(tmp_path):
    site = make_site(tmp_path, Policy(kept_bytes=4_000))
    assert begin(site, dp=None, rounds=9).head == {}
    reasons = []
    for number in range(9):
        state = number - 1 if number else -2
        reasons.append(ask(site, model_for(site), round=number, state=state).head.get("reason"))
    refused = next(reason for reason in reasons if reason)
    assert reasons[0] is None
    assert "keeps 4000 bytes, and they are used up" in refused


def test_the_bytes_of_all_seeds_of_a_run_count(tmp_path):
    site = make_site(tmp_path, Policy(run_bytes=2_500))
    found = []
    for seed in range(4):
        assert begin(site, dp=None, run=f"a-{seed}", seeds=4).head == {}
        found.append(ask(site, model_for(site), run=f"a-{seed}"))
    assert sum(len(answer.body) for answer in found) <= 2_500
    assert "failure" not in found[0].head
    assert "2500 bytes in a run" in found[-1].head["reason"]


def test_the_file_of_scores_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("atoll.deploy.site.SCORES", 1_000)
    site = make_site(tmp_path)
    begin(site)
    for _ in range(30):
        assert ask(site, model_for(site), owner="evaluator", step="score").head == {}
    assert (site.folder / "runs" / "r-0" / "scores.csv").stat().st_size < 1_200


def test_packets_that_are_no_steps_use_up_seconds(tmp_path):
    site = make_site(tmp_path, Policy(round_seconds=0.5))
    packet = {"do": "begin", "run": "r-0", "config": "method = 3", "round": 9}
    for head in ({**packet, "do": "hello"}, {**packet, "do": "deliver"}, packet):
        assert "failure" in site.answer(Packet(head, b"")).head
    assert {event["round"] for event in site.audit.events(run="r-0")} == {-1}
    assert begin(site, dp=None).head == {}
    assert site.audit.events(event="begin")[0]["round"] == -1
    site.audit.note("begin", run="r-0", round=-1, seconds=0.5)
    for head in ({**packet, "do": "hello"}, {**packet, "do": "deliver"}, packet):
        assert "allows round_seconds = 0.5" in site.answer(Packet(head, b"")).head["reason"]
    assert begin(site, dp=None, run="other-0").head == {}


@pytest.mark.parametrize(
    "text", ["runs = " + "9" * 5000, "x = " + "[" * 3000, "a." * 3000 + "b = 1"]
)
def test_text_that_fails_the_reader_is_refused_in_one_sentence(tmp_path, text):
    (path := tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read|unknown key"):
        read_policy(path)
    site = make_site(tmp_path)
    packet = {"do": "begin", "run": "r-0", "config": text}
    reason = site.answer(Packet(packet, b"")).head["reason"]
    assert "is not valid TOML" in reason or "unknown option" in reason
    with pytest.raises(ConfigError, match=r"is not valid TOML|unknown key"):
        parse_config(text, "it")
