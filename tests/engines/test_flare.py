"""Packets as FLARE carries them; tests/deploy runs whole federations over it."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import pytest

from atoll.core.errors import ClientLost, WireError
from atoll.engines.fleet import Packet

pytest.importorskip("nvflare")


def test_what_a_site_says_is_one_line_and_a_head_may_not_be_deep():
    from nvflare.apis.shareable import make_reply

    from atoll.engines.flare import HEAD, _answer, to_shareable

    said = to_shareable(Packet({"failure": "bad", "reason": "a\x1b[2J\nb" + "c" * 9999}, b""))
    answer = _answer(said)
    assert answer.reason.startswith("a [2J bc")
    assert len(answer.reason) == 1000
    answered = make_reply("\x1b[2J\n" + "c" * 9999)
    assert _answer(answered).reason.startswith("it answered with  [2J c")
    assert _answer(answered).reason.isprintable()
    assert len(_answer(answered).reason) < 200
    said["head"] = " " * (HEAD + 1)
    assert _answer(said).reason == "a message was refused: it is not an Atoll packet"
    said["head"] = "[" * 100_000
    assert _answer(said).reason == "a message was refused: it is not an Atoll packet"


def test_a_packet_arrives_as_it_was_sent():
    from atoll.engines.flare import from_shareable, to_shareable

    packet = Packet({"do": "step", "round": 3}, b"\x00arrays")
    assert from_shareable(to_shareable(packet)) == packet


@pytest.mark.parametrize(
    ("head", "body"),
    [
        ("{", b""),
        ("[1]", b""),
        ('{"do": "ping"}', "text"),
        (None, b""),
        (r'{"do": "\ud800"}', b""),  # no text that could be written to a file
    ],
)
def test_anything_else_is_refused(head, body):
    from atoll.engines.flare import from_shareable

    with pytest.raises(WireError, match="it is not an Atoll packet"):
        from_shareable({"head": head, "body": body})
    with pytest.raises(WireError, match="it is not an Atoll packet"):
        from_shareable({"body": body})


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        ("error:client_registration", "the server refuses the kit k (error:client_registration)"),
        ("cannot connect", "the server does not answer the kit k (cannot connect); start it"),
    ],
)
def test_an_administrator_sees_one_sentence_and_no_traceback(
    problem, sentence, monkeypatch, capsys
):
    from atoll.engines.flare import AdminSession

    def connect(*_args, **_options):
        print("connecting")
        try:
            raise RuntimeError(problem)
        except RuntimeError:
            traceback.print_exc()
            raise

    monkeypatch.setattr("nvflare.fuel.flare_api.flare_api.new_secure_session", connect)
    monkeypatch.setattr(logging.getLogger(), "setLevel", lambda level: None)
    with pytest.raises(ClientLost) as error:
        AdminSession(Path("k"), "admin")
    assert str(error.value).startswith(sentence)
    assert capsys.readouterr() == ("", "")
