"""Privacy accounting: the guarantee of a differentially private run, and its source."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner

import atoll
from atoll.cli import main
from atoll.core.errors import ConfigError
from atoll.engines.codec import load_checkpoint
from atoll.engines.ledger import Ledger
from atoll.experiment.config import make_config
from atoll.experiment.privacy import epsilon, privacy_report, release, spent
from atoll.testing import small_federation

SMALL = {"hidden": 5}


def ledger(rounds, clients):
    """`clients(round)` send an update of 100 bytes in each round."""
    made = Ledger()
    for number in range(rounds):
        made.add(number, "train", clients(number), 100, 100)
        made.add(number, "score", range(10), 100, 100)
    return made


@pytest.mark.parametrize(
    ("noise", "releases", "delta", "expected"),
    # Of dp-accounting 0.6.0: the PLD accountant, with GaussianDpEvent(noise) composed.
    [(1.1, 1, 1e-5, 3.921250), (1.1, 100, 1e-5, 79.275496), (5.0, 20, 1e-6, 4.305841)],
)
def test_epsilon_is_that_of_the_accountant(noise, releases, delta, expected):
    found = epsilon(releases * release(noise), delta)
    assert found == pytest.approx(expected, rel=1e-6)


def test_epsilon_is_at_most_what_renyi_accounting_says():
    import dp_accounting

    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(2.0), 30)
    above = accountant.get_epsilon(1e-5)
    assert 0.9 * above < epsilon(30 * release(2.0), 1e-5) <= above


def test_epsilon_grows_with_rounds_and_shrinks_with_noise_and_company():
    everybody = [spent(1.0, 1e-5, [ledger(r, lambda n: range(10))]) for r in (1, 5, 25)]
    assert everybody[0].server < everybody[1].server < everybody[2].server
    assert everybody[0].peers < everybody[1].peers < everybody[2].peers
    assert all(one.peers < one.server for one in everybody)
    assert spent(2.0, 1e-5, [ledger(5, lambda n: range(10))]).server < everybody[1].server
    # Another site knows its own noise: the noise of nine others is left.
    assert everybody[1].peers == pytest.approx(epsilon(5 / 9, 1e-5))


def test_a_client_is_charged_for_the_rounds_it_was_drawn_in():
    drawn = spent(1.0, 1e-5, [ledger(6, lambda n: [0, 1 + n % 3])])
    assert (drawn.releases, drawn.least) == (6, 2)
    rare = spent(1.0, 1e-5, [ledger(6, lambda n: [n, n + 1])])
    assert rare.releases == 2
    assert rare.server == pytest.approx(epsilon(2.0, 1e-5))
    assert spent(1.0, 1e-5, [Ledger()]).server == 0


def test_no_noise_is_no_privacy_and_said():
    config = make_config(rounds=2, dp="clip=1,noise=0")
    found = privacy_report(config, [ledger(2, lambda n: range(4))], 4)
    assert found["epsilon_server"] is None
    assert found["epsilon_peers"] is None
    assert found["says"].startswith("epsilon is infinite")
    assert math.isinf(epsilon(math.inf, 1e-5))


def test_seeds_of_a_federation_add_up_and_of_a_simulation_do_not():
    config, both = make_config(rounds=3, dp="clip=1,noise=1"), [ledger(3, lambda n: range(4))] * 2
    alone = privacy_report(config, both, 4)
    together = privacy_report(config, both, 4, federated=True)
    assert (alone["releases"], together["releases"]) == (3, 6)
    assert alone["epsilon_server"] < together["epsilon_server"]
    open_noise = make_config(rounds=3, dp="clip=1,noise=1,randomness=seed")
    found = privacy_report(open_noise, both, 4, federated=True)
    assert found["epsilon_server"] is None
    assert "which the server knows" in found["says"]


def test_a_run_says_prints_and_keeps_its_epsilon(tmp_path):
    words = ["run", "fedavg", "--clients", "3", "--rounds", "2", "--set", "hidden=4",
             "--dp", "clip=1,noise=1.1,delta=1e-6", "--fraction", "0.5",
             "--out", str(tmp_path / "run")]  # fmt: skip
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "against the server" in done.output
    found = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    assert found["epsilon_server"] == pytest.approx(epsilon(found["releases"] * release(1.1), 1e-6))
    assert (found["fraction"], found["least_in_a_round"], found["clients"]) == (0.5, 2, 3)
    assert "dp-accounting" in found["accountant"]
    assert "no amplification" in found["sampling"]
    saved = load_checkpoint(tmp_path / "run" / "seed-0" / "checkpoint.atoll")["privacy"]
    assert saved["server"] == found["epsilon_server"]
    again = CliRunner().invoke(main, ["run", "--resume", str(tmp_path / "run"), "--json"])
    assert json.loads(again.output.splitlines()[-1])["privacy"] == found


def test_a_method_object_can_be_private_too(tmp_path):
    from atoll.methods import FedAvg, FedProto
    from atoll.nn import GCN

    federation = small_federation()
    net = GCN(federation.features, federation.classes, hidden=5)
    dp = {"clip": 1.0, "noise": 0.5}
    result = atoll.run(FedAvg(net), federation, rounds=1, dp=dp)
    assert result.privacy is not None
    with pytest.raises(ConfigError, match="FedProto cannot be made differentially private"):
        atoll.run(FedProto(net), federation, rounds=1, dp=dp, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("clip=1", "lacks noise"),
        ("clip=1,nois=1", "did you mean 'noise'"),
        ("clip", "takes key=value"),
        ("clip=a,noise=1", "it takes a number"),
        ("clip=0,noise=1", "above 0"),
        ("clip=1,noise=-1", "from 0 to 1e+12"),
        ("clip=1,noise=nan", "from 0 to 1e+12"),
        ("clip=1,noise=1e155", "dp: noise is 1e+155; give a number from 0 to 1e+12"),
        ("clip=1e39,noise=1", "dp: clip is 1e+39; give a number above 0, at most 1e+12"),
        ("clip=1,noise=1,delta=1", "between 0 and 1"),
        ("clip=1,noise=1,scores=some", "cannot be used"),
    ],
)
def test_options_that_cannot_be_used_get_one_sentence(text, problem):
    done = CliRunner().invoke(main, ["run", "fedavg", "--rounds", "1", "--dp", text])
    assert done.exit_code == 2
    assert problem in done.output


def test_without_the_accountant_there_is_no_private_run(monkeypatch):
    monkeypatch.setattr("atoll.experiment.privacy.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'atoll-fgl\[privacy\]'"):
        atoll.run("fedavg", small_federation(), rounds=1, set=SMALL, dp="clip=1,noise=1")
