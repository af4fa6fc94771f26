"""Names of pods, as a cluster's DNS knows them: in a file that the pods have in the place of /etc/hosts."""

from __future__ import annotations

import os
from pathlib import Path

# In a mount namespace of its own, as any container has: the machine's file is as it was.
_INSIDE = 'mount --bind "$0" /etc/hosts && exec "$@"'


class Names:
    """``path``: of the file. It only grows, so that whoever reads it finds it whole: no name is used twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("127.0.0.1 localhost\n")

    def tell(self, address: str, *names: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{address} {' '.join(names)}\n")

    def knowing(self, command: list[str]) -> list[str]:
        """The command for a process that knows the names, also those that are told later."""
        more = [] if os.geteuid() == 0 else ["--map-root-user"]
        words = ["unshare", "--mount", *more, "--propagation", "private", "sh", "-c", _INSIDE]
        return [*words, str(self._path), *command]
