"""``planaria lighthouse``: run the coordinator by itself, for several agents or several jobs."""

from __future__ import annotations

from typing import Annotated

import typer

from planaria.cli.certs import CredentialsOption, TokenOption
from planaria.lighthouse import server
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
        str | None, typer.Option(help="host:port of /status.json, /metrics and /healthz; none unless given.")
    ] = None,
    epoch_floor: Annotated[int, typer.Option(min=0, help="Take an epoch above this one, where a store was lost.")] = 0,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Run the lighthouse until it is told to stop. Prints one line of JSON with its address when it
    listens."""
    server.run(bind, store, http, epoch_floor)
