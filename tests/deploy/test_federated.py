"""The rounds of a federated run on real sites. `test_coordinator` tests whole runs."""

from __future__ import annotations

from atoll.deploy.federated import Returns

SITE = "site-3"


def test_a_site_that_stayed_long_enough_returns_at_once():
    returns = Returns()
    for number, wait in enumerate([1, 1, 1, 2, 4, 8]):
        returns.lost(SITE, 100 * number)
        assert returns.next[SITE] == 100 * number + wait
        returns.back(SITE, 100 * (number + 1) - 1)
    returns.lost(SITE, 700)
    assert returns.next[SITE] == 701
