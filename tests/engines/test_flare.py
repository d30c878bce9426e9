"""Packets in FLARE's format. tests/deploy runs complete federations over FLARE."""

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


@pytest.mark.parametrize("lie", ["bytes", "number", "fatal", "honest"])
def test_an_update_that_flare_cannot_read_is_its_sites_failure(lie, monkeypatch):
    from types import SimpleNamespace

    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.shareable import Shareable, make_reply
    from nvflare.fuel.f3.cellnet import cell
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
    from nvflare.fuel.utils import fobs

    from atoll.engines.flare import FlareFleet, _Call, read_updates

    ended, got, cancelled = [], [], []
    monkeypatch.setattr(cell, "decode_payload", cell.decode_payload)
    monkeypatch.setattr(cell.os, "_exit", ended.append)
    fleet = FlareFleet(
        SimpleNamespace(cancel_task=cancelled.append), SimpleNamespace(get_prop=str), None
    )
    fleet.calls = {"bank-a": _Call("of a"), "bank-b": _Call("of b")}
    read_updates(fleet)
    head = {
        MessageHeaderKey.ORIGIN: "bank-a.job",
        StreamHeaderKey.CHANNEL: "server_command",
        StreamHeaderKey.TOPIC: "submit_update",
        StreamHeaderKey.PAYLOAD_ENCODING: "fobs",
    }
    content = {"fatal": make_reply(ReturnCode.UNSAFE_JOB), "honest": Shareable()}.get(lie, 3)
    body = b"\xc1 no update" if lie == "bytes" else fobs.dumps(content)
    info = SimpleNamespace(fqcn="server.job")
    context = SimpleNamespace(
        decode_pass_through_channels=(),
        decode_pass_through_topics=(),
        get_fobs_context=lambda props: props,
    )
    adapter = cell.Adapter(lambda request: got.append(request.payload), info, context)
    adapter.call(SimpleNamespace(headers=head, result=lambda: body))
    assert ended == []
    assert [type(one) for one in got] == [Shareable]
    answers = {site: call.answer and call.answer.reason for site, call in fleet.calls.items()}
    assert answers.pop("bank-b") is None
    if lie == "honest":
        assert answers == {"bank-a": None}
    else:
        assert "its answer cannot be read" in answers["bank-a"]
        assert cancelled == ["of a"]
        fleet.refuse("bank-a", "again")
        fleet.refuse("unknown", "again")
        assert cancelled == ["of a"]
