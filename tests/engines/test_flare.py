"""FLARE's packets."""

from __future__ import annotations

import pytest

from atoll.engines.fleet import Packet


def test_what_a_site_says_is_one_line_and_a_head_may_not_be_deep():
    pytest.importorskip("nvflare")
    from atoll.engines.flare import _answer, to_shareable

    said = to_shareable(Packet({"failure": "bad", "reason": "a\x1b[2J\nb" + "c" * 9999}, b""))
    answer = _answer(said)
    assert answer.reason.startswith("a [2J bc")
    assert len(answer.reason) == 1000
    said["head"] = "[" * 100_000
    assert _answer(said).reason == "a message was refused: it is not an Atoll packet"
