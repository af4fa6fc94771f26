"""``planaria certs``: whom the services of a site believe. And the option by which others are told."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from planaria.wire import token
from planaria.wire.credentials import ENVIRONMENT
from planaria.wire.roles import Role


def _use(directory: Path | None) -> Path | None:
    """For this process and those that it starts."""
    if directory is not None:
        os.environ[ENVIRONMENT] = str(directory.absolute())
    return directory


CredentialsOption = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        envvar=ENVIRONMENT,
        show_envvar=False,
        callback=_use,
        help=f"Directory that planaria certs made; else ${ENVIRONMENT}. Needed beyond this machine.",
    ),
]


def _prove(path: Path | None) -> Path | None:
    if path is not None:
        os.environ[token.ENVIRONMENT] = str(path.absolute())
    return path


TokenOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=token.ENVIRONMENT,
        show_envvar=False,
        callback=_prove,
        help=f"File that planaria certs token made, for where TLS ends elsewhere; else ${token.ENVIRONMENT}.",
    ),
]


class Action(Enum):
    INIT = "init"
    RENEW = "renew"
    TOKEN = "token"


def certs(
    action: Annotated[
        Action, typer.Argument(help="init: an authority; renew: new certificates by it; token: secrets.")
    ],
    directory: Annotated[Path, typer.Argument(help="Where its files are. Never on a machine that runs jobs: ca.key.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long certificates hold.")] = 365,
    role: Annotated[list[Role] | None, typer.Option(help="Only these; may be repeated. Not with init.")] = None,
) -> None:
    """Make certificates, so that only those who have one reach a lighthouse, and see that it is one.

    Copy ca.pem and what a machine needs (lighthouse.pem, agent.pem, operator.pem, viewer.pem) to it, and give their
    directory as --credentials. Files that are replaced there are taken up without a restart.

    Where TLS ends before the lighthouse, token makes a file for --token-file, with a secret for each role; a machine
    needs the lines of its own roles. Made again, it has new secrets before the old ones.
    """
    if action is Action.TOKEN:
        typer.echo(token.make(directory, role or token.ROLES))
        return
    # It takes a library that nothing else needs.
    from planaria.wire import authority

    if action is Action.INIT:
        written = authority.init(directory, days)
    else:
        written = authority.renew(directory, days, role or tuple(Role))
    for path in written:
        typer.echo(path)
