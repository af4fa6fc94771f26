"""``planaria operator``: keep the groups of FaultTolerantJobs alive in a Kubernetes cluster."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Annotated

import typer

from planaria.cli.certs import CredentialsOption, TokenOption
from planaria.cli.options import LogFormatOption
from planaria.cli.pod_args import check
from planaria.errors import UsageError
from planaria.logs import LogFormat, configure


def operator(
    namespace: Annotated[
        str | None, typer.Option(help="Whose jobs it keeps; default: the pod's own, or the kubeconfig's.")
    ] = None,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Default: the pod's own account, else $KUBECONFIG, else ~/.kube/config.")
    ] = None,
    nodes: Annotated[
        bool, typer.Option("--nodes/--no-nodes", help="Watch nodes, for cordons and losses; needs a ClusterRole.")
    ] = True,
    lease: Annotated[float, typer.Option(min=2.0, help="Seconds after which another operator takes over.")] = 15.0,
    log_format: LogFormatOption = LogFormat.TEXT,
    credentials: CredentialsOption = None,
    token_file: TokenOption = None,
) -> None:
    """Run the operator until it is told to stop. Of several in a namespace one works, the others stand by. What it has
    started goes on without it."""
    try:
        from planaria.engines.kubernetes.access import find_access
        from planaria.engines.kubernetes.leader import operate
    except ModuleNotFoundError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'planaria[k8s]'") from None
    configure(log_format)
    for noisy in ("httpx2", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    access = find_access(kubeconfig)

    async def main() -> None:
        task = asyncio.ensure_future(operate(access, namespace or access.namespace, nodes, lease, check))
        for signum in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            logging.getLogger("planaria.operator").info("stopped; jobs go on")

    asyncio.run(main())
