"""A site that asks the process of another one for files, over the honest server."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path


def ask(client, target, questions, out):
    from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey
    from nvflare.private.admin_defs import Message
    from nvflare.private.defs import CellChannel, new_cell_message

    found, end = [], time.monotonic() + 20
    for topic, body, head in questions:
        message = Message(topic, body)
        for key, value in head.items():
            message.set_header(key, value)
        given = {"channel": CellChannel.CLIENT_MAIN, "topic": topic, "timeout": 3}
        code = ""
        while not code or (code != "ok" and time.monotonic() < end):  # the other may start yet
            request = new_cell_message({}, message)
            reply = client.cell.send_request(target=target, request=request, **given)
            code = reply.get_header(MessageHeaderKey.RETURN_CODE)
        text = str(getattr(reply.payload, "body", reply.payload))
        found.append([code, text])
    handlers = sorted(client.cell.core_cell.req_reg.reg)
    out.write_text(json.dumps({"handlers": handlers, "answers": found}))


def main():
    from nvflare.fuel.f3.mpm import MainProcessMonitor
    from nvflare.private.fed.app.client import client_train

    target, questions, out = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    del sys.argv[1:4]
    honest = client_train.create_admin_agent

    def curious(processors, client, engine):
        agent = honest(processors, client, engine)
        threading.Thread(target=ask, args=(client, target, questions, out), daemon=True).start()
        return agent

    client_train.create_admin_agent = curious
    args = client_train.parse_arguments()
    sys.exit(MainProcessMonitor.run(client_train.main, run_dir=args.workspace, args=args))


if __name__ == "__main__":
    main()
