"""The releases of a site, counted from its audit log."""

from __future__ import annotations

from atoll.deploy.account import Account
from atoll.deploy.audit import Audit
from atoll.experiment.privacy import release


def test_releases_and_clear_replies_are_counted_over_all_runs(tmp_path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    sent = {"step": "train", "round": 0, "bytes": 100, "array_bytes": 80}
    audit.note("sent", run="a-0", **sent, release="one", noise=2.0)
    audit.note("sent", run="a-1", **sent, release="two", noise=2.0)
    audit.note("sent", run="a-1", **sent, release="two", noise=2.0)  # the same answer again
    audit.note("sent", run="b-0", **sent | {"step": "score"}, kept=True)  # zeros left
    audit.note("sent", run="b-0", **sent | {"array_bytes": 0})  # no tensor left
    account = Account(audit)
    assert account.noises("a") == [2.0, 2.0]
    assert account.precision() == 2 * release(2.0)
    assert account.precision(but="a") == 0
    assert (account.sent("a-1"), account.sent("b-0")) == (300, 200)
    assert account.clear == 0
    audit.note("sent", run="c-0", **sent | {"step": "score"})
    audit.note("sent", run="c-0", **sent)
    assert Account(audit).clear == 2
