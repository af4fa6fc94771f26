"""``planaria run --engine slurm`` on a cluster, watched from outside."""

from __future__ import annotations

from pathlib import Path

from tests.placed import Placed
from tests.slurm.cluster import Cluster


class Supervised(Placed):
    """Use as a context. ``start`` it, perhaps again."""

    def __init__(self, cluster: Cluster, directory: Path, job: str, *args: str, options: tuple[str, ...] = ()) -> None:
        super().__init__(
            cluster.env, directory, job, *args, options=("--engine", "slurm", "--host", "127.0.0.1", *options)
        )
        self.cluster = cluster

    def __enter__(self) -> Supervised:
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for name, number in self.cluster.jobs().items():
            if name.startswith(f"{self.job}-"):
                self.cluster.run("scancel", "--signal=KILL", "--full", number)
        self.until(lambda: not self.jobs(), "all jobs are gone")

    def jobs(self) -> dict[str, str]:
        """Ours that have not ended, and their numbers."""
        return {name: id for name, id in self.cluster.jobs().items() if name.startswith(f"{self.job}-")}

    def job_of(self, group: int, least: int = 0) -> tuple[str, str]:
        """(name, number) of the job of a group, of this life or a later one."""

        def found() -> tuple[str, str] | None:
            for name, number in self.jobs().items():
                group_there, life = name.removeprefix(f"{self.job}-rg").split("-i")
                if int(group_there) == group and int(life) >= least:
                    return name, number
            return None

        each: tuple[str, str] = self.until(found, f"a job of group {group}")
        return each

    def agent_of(self, name: str) -> int:
        """The pid of the agent in a job."""
        return self.agent(name.removeprefix(f"{self.job}-"))
