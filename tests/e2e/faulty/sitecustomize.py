"""A lying site: its job process starts with this folder in PYTHONPATH and spoils its answers.

Python runs this file when it starts. The file `fault` of the site's kit names the fault, so that
one site can have a different fault in each run. Without the file the site is honest.
"""

from __future__ import annotations

import sys

FIRST = 1
"""The round in which a site begins to lie."""


def spoil(kind, body):
    import torch

    from atoll.core.tree import tree_map
    from atoll.engines.codec import decode, encode

    def each(change):
        return encode(tree_map(change, decode(body)))

    return {
        "cut": lambda: body[: len(body) // 2],
        "nan": lambda: each(lambda leaf: torch.full_like(leaf, torch.nan)),
        "shape": lambda: each(lambda leaf: torch.cat([leaf, leaf]) if leaf.dim() else leaf),
        "oversized": lambda: body + bytes(64 << 20),
        "text": body.hex,
    }[kind]()


def undecodable():
    """Send bytes that FLARE cannot decode instead of the next answers."""
    from nvflare.fuel.f3.cellnet.cell import Cell

    send = Cell._send_one_request

    def garbage(self, channel, target, topic, request, *more):
        if topic == "submit_update":
            request.payload = b"\xc1 no update"
        return send(self, channel, target, topic, request, *more)

    Cell._send_one_request = garbage


def fatal():
    """Give a return code for which FLARE ends the whole job."""
    from nvflare.apis.fl_constant import ReturnCode
    from nvflare.apis.shareable import make_reply

    from atoll.engines.flare import SiteExecutor

    SiteExecutor.execute = lambda *_: make_reply(ReturnCode.UNSAFE_JOB)


ACTIONS = {"undecodable": undecodable, "fatal": fatal}


def install():
    from atoll.deploy import jobs
    from atoll.engines.fleet import Packet

    honest = jobs.Participant.open

    def lying(self, kit):
        answer, file = honest(self, kit), kit / "fault"
        kind = file.read_text().strip() if file.exists() else ""

        def spoiled(packet):
            found, head = answer(packet), packet.head
            if kind and head.get("step") == "train" and head["round"] >= FIRST:
                if kind in ACTIONS:
                    ACTIONS[kind]()
                    return found
                return Packet(found.head, spoil(kind, found.body))
            return found

        return spoiled

    jobs.Participant.open = lying


if "worker_process" in " ".join(sys.orig_argv):
    install()
