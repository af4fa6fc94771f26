"""Groups as jobs of Slurm: one for every life of a group, found again by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from planaria.core.exits import EXIT_BAD_INPUT
from planaria.engines import placing
from planaria.engines.keeper import Hosted, HostState
from planaria.engines.slurm import commands, scripts
from planaria.engines.slurm.commands import NoNodes
from planaria.engines.slurm.scripts import Template
from planaria.errors import UsageError

# How often the controller is asked while nothing happens: sites ask for no more than twice a minute. What calls for
# haste is heard from the lighthouse within a second. While a job waits, begins or ends it is asked more often.
CALM_SECONDS = 30.0
BUSY_SECONDS = (1.0, 10.0)
_PROGRESS = (HostState.RUNNING, HostState.PENDING, HostState.ENDED)


async def jobs_before(run: str) -> frozenset[str]:
    """The numbers of jobs that an earlier run of this name has left in Slurm's memory: what became of them says nothing
    of a new run. UsageError if one of them has not ended; HostAway."""
    left = [job for job in await commands.jobs() if placing.life_in(job.name, run) is not None]
    if living := [job for job in left if job.state is not HostState.ENDED]:
        names, ids = ", ".join(job.name for job in living), " ".join(job.id for job in living)
        raise UsageError(f"jobs of an earlier run are still there ({names}): give another --job, or scancel {ids}")
    return frozenset(job.id for job in left)


class SlurmHost:
    """A `GroupHost`. ``note`` is told (kind, sentence, group). ``before``: numbers of jobs that are none of its."""

    def __init__(
        self, template: Template, note: Callable[[str, str, int], None], before: Collection[str] = frozenset()
    ) -> None:
        self._template, self._note, self._before = template, note, before
        self._seen: tuple[Hosted, ...] = ()
        self._pause = BUSY_SECONDS[0]
        self._said: dict[tuple[int, int], str] = {}  # by agents, at the end of lives
        self._asked = False  # `changed` said so
        self._anywhere: set[tuple[int, int]] = set()  # lives for which there are no nodes but those to be avoided

    async def create(self, group: int, incarnation: int, avoid: Collection[str]) -> None:
        name = placing.name_of(self._template.run, group, incarnation)
        if there := [job for job in await self._jobs() if job.name == name]:  # perhaps sbatch did not say so
            for job in there if (group, incarnation) not in self._anywhere else ():
                if job.state is HostState.PENDING:
                    await commands.exclude(job.id, scripts.excluded(self._template, avoid))
            return
        scripts.make_directory(self._template, group, incarnation)
        try:
            await commands.submit(scripts.render(self._template, group, incarnation, avoid))
        except NoNodes:
            if not avoid:
                raise
            self._note("avoid", f"there is no node for group {group} but {', '.join(sorted(avoid))}", group)
            self._anywhere.add((group, incarnation))
            await commands.submit(scripts.render(self._template, group, incarnation))
        self._pause = BUSY_SECONDS[0]

    async def delete(self, group: int, incarnation: int) -> None:
        name = placing.name_of(self._template.run, group, incarnation)
        ids = [job.id for job in await self._jobs() if job.name == name and job.state is not HostState.ENDED]
        if ids:
            await commands.cancel(*ids)
        self._pause = BUSY_SECONDS[0]

    async def list(self) -> Sequence[Hosted]:
        called: dict[tuple[int, int], list[commands.SlurmJob]] = {}
        for job in await self._jobs():
            if (life := placing.life_in(job.name, self._template.run)) is not None:
                called.setdefault(life, []).append(job)
        # One may have been submitted twice, for the first time in vain as it seemed: whoever has come farthest counts.
        found: dict[tuple[int, int], commands.SlurmJob] = {}
        twice: list[str] = []
        for life, jobs in called.items():
            found[life], *others = sorted(jobs, key=lambda job: (_PROGRESS.index(job.state), int(job.id)))
            twice += [job.id for job in others if job.state is not HostState.ENDED]
        if twice:
            await commands.cancel(*twice)
        hosted = tuple(
            Hosted(*life, job.state, job.nodes, job.exit_code, job.since, self._why(life, job), job.lost)
            for life, job in sorted(found.items())
        )
        # Whoever looks before it is time has heard of something that Slurm may be slow to see.
        if hosted != self._seen or not self._asked:
            self._seen, self._pause = hosted, BUSY_SECONDS[0]
        self._asked = False
        return hosted

    async def _jobs(self) -> Sequence[commands.SlurmJob]:
        return [job for job in await commands.jobs() if job.id not in self._before]

    def _why(self, life: tuple[int, int], job: commands.SlurmJob) -> str:
        if job.state is not HostState.ENDED:
            return job.reason
        if life not in self._said and (said := placing.last_words(self._template.directory, *life)) is not None:
            self._said[life] = said[1]
        own = self._said.get(life, "")
        return own if own and job.exit_code == EXIT_BAD_INPUT else ": ".join(filter(None, (job.reason, own)))

    async def changed(self) -> None:
        waits = any(each.state is HostState.PENDING for each in self._seen)
        await asyncio.sleep(self._pause if waits or self._pause < BUSY_SECONDS[1] else CALM_SECONDS)
        self._pause, self._asked = min(2 * self._pause, BUSY_SECONDS[1]), True

    def close(self) -> None:
        """Nothing is held here: Slurm has it all."""
