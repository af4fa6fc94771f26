"""``planaria lighthouse``: run the coordinator by itself, for several agents or several jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planaria.cli.certs import CredentialsOption, TokenOption
from planaria.cli.options import LogFormatOption
from planaria.errors import UsageError
from planaria.lighthouse import server
from planaria.lighthouse.elector import LEASE
from planaria.logs import LogFormat
from planaria.wire.channel import DEFAULT_BIND


def lighthouse(
    bind: Annotated[
        str,
        typer.Option(
            help="host:port to listen on; port 0 takes any. Beyond this machine: with --credentials or --token-file."
        ),
    ] = DEFAULT_BIND,
    store: Annotated[
        str, typer.Option(help="File that keeps the epoch and the lineage of quorums; made if missing.")
    ] = "lighthouse.db",
    http: Annotated[
        str | None,
        typer.Option(help="host:port of the web pages, /status.json, /metrics and /healthz; none unless given."),
    ] = None,
    elector: Annotated[
        str | None,
        typer.Option(
            help="Where several lighthouses agree on who leads: file:DIRECTORY, etcd:URL[,URL] or "
            "kubernetes:NAMESPACE/NAME. The leader keeps there what --store keeps otherwise."
        ),
    ] = None,
    lease: Annotated[float, typer.Option(help="Seconds after which another one leads, at the latest.")] = LEASE,
    advertise: Annotated[
        str | None, typer.Option(help="host:port at which agents reach this one; default: as --bind has it.")
    ] = None,
    elector_credentials: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the elector: ca.pem and client.pem for etcd; ca.crt and token for Kubernetes, "
            "by default the pod's own."
        ),
    ] = None,
    epoch_floor: Annotated[int, typer.Option(min=0, help="Take an epoch above this one, where a store was lost.")] = 0,
    log_format: LogFormatOption = LogFormat.TEXT,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Run the lighthouse until it is told to stop. Prints one line of JSON with its address when it
    listens."""
    if elector is not None and epoch_floor:
        raise UsageError("--epoch-floor is for a --store; with --elector the agents tell the epoch that they have seen")
    server.run(
        server.Options(bind, store, http, epoch_floor, elector, lease, advertise, elector_credentials, log_format)
    )
