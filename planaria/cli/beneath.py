"""``python -m planaria.cli.beneath PARENT WORD…``: the command line in a process that ends when its parent does."""

from __future__ import annotations

import signal
import sys

from planaria.agent.parent import die_with_parent


def start() -> None:
    """Begin with what the command line expects of its surroundings."""
    parent, *words = sys.argv[1:]
    die_with_parent(int(parent))
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # threads of Ray's workers do not heed SIGINT
    sys.argv = ["planaria", *words]


if __name__ == "__main__":
    start()
    from planaria.cli.main import main

    main()
