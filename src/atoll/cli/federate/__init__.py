"""`atoll federate ...`: run methods on real sites over the network."""

from __future__ import annotations

import click

from atoll.cli.common import AtollSubgroup
from atoll.cli.federate.audit import audit
from atoll.cli.federate.jobs import demo, run, stop
from atoll.cli.federate.keys import approve, init, join, remove, renew, request
from atoll.cli.federate.parties import predict, provision, server, site, split, verify
from atoll.cli.federate.status import status

__all__ = ["federate"]


@click.group(cls=AtollSubgroup, short_help="Run methods on real sites over the network.")
def federate() -> None:
    """Run methods on real sites with NVIDIA FLARE and mutual TLS.

    Each site has its own policy and its own audit log.
    """


KEYS = (init, request, approve, join, renew, remove)
PARTIES = (provision, split, server, site, run, status, stop, audit, verify, predict, demo)
for _command in (*KEYS, *PARTIES):
    federate.add_command(_command)
