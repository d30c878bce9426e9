"""A site's noise: secret, repeatable, and never at two scales."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from atoll.core.dp import keyed_noise
from atoll.core.errors import DataError
from atoll.core.random import fold
from atoll.core.tree import leaves, tree_map
from atoll.deploy.noise import SECRET, normals, site_secret
from atoll.deploy.site import Site
from atoll.engines.fleet import Packet
from atoll.experiment.config import config_text, make_config
from atoll.experiment.privacy import epsilon, release
from tests.deploy.private_site import (
    CLIP,
    DP,
    INDEPENDENT,
    NOISE,
    OPEN,
    ask,
    begin,
    make_site,
    model_for,
    numbers,
)


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
    site.close()
    fresh = Site(site.data, site.policy, site.folder)  # a new process, with only its files
    begin(fresh)
    assert ask(fresh, message).body == first.body
    assert len(fresh.account.releases) == 1
    sent = fresh.audit.events(event="sent")
    assert [event["epsilon"] for event in sent] == [epsilon(release(NOISE), 1e-5)] * 3
    (site.folder / "runs" / "r-0" / SECRET).unlink()
    fresh.close()
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
            site.close()
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
