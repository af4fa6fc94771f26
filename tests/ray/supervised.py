"""``planaria run --engine ray`` on a cluster, watched from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.harness import TRAIN
from tests.placed import Placed

if TYPE_CHECKING:
    from tests.ray.cluster import Cluster


class Supervised(Placed):
    """Use as a context, with the cluster around it: that one ends what is left."""

    def __init__(
        self,
        cluster: Cluster,
        directory: Path,
        job: str,
        *args: str,
        options: tuple[str, ...] = (),
        script: Path = TRAIN,
    ) -> None:
        super().__init__(cluster.env, directory, job, *args, options=("--engine", "ray", *options), script=script)

    def __enter__(self) -> Supervised:
        return self

    def life(self, group: int, least: int = 0) -> str:
        """The directory's name of the group's newest life, once it is this one or a later one and has an agent."""

        def found() -> str | None:
            lives = [path.parent.name for path in self.directory.glob(f"rg{group}-i*/run.json")]
            newest = max(lives, key=lambda name: int(name.partition("-i")[2]), default="")
            return newest if newest and int(newest.partition("-i")[2]) >= least else None

        name: str = self.until(found, f"life {least} of group {group}")
        return name

    def node_of(self, life: str) -> str:
        group, _, number = life.removeprefix("rg").partition("-i")
        words = f"group {group} (life {number}) runs on "
        lines = (self.directory / "events.jsonl").read_text().splitlines(keepends=True)
        events = [json.loads(line)["text"] for line in lines if line.endswith("\n")]  # one may be half written
        where = next(text.removeprefix(words) for text in reversed(events) if text.startswith(words))
        return where.partition("/")[0]

    def rank(self, group: int) -> int:
        """The pid of the group's rank."""

        def found() -> int:
            status = self.status()
            return next((g.pid for g in status.groups if g.member.group == group), 0) if status is not None else 0

        pid: int = self.until(found, f"a rank of group {group}")
        return pid
