"""Groups as steps of one allocation (``--single-allocation``), for reservations: it shrinks when nodes are lost, and
cannot grow.

The supervisor runs inside of the allocation. Slurm forgets a step as soon as it has ended, and what srun says of one
whose node was lost is 0; so what counts is what the agent in it has left: its last words, or none.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from planaria.engines import placing
from planaria.engines.keeper import Hosted, HostState
from planaria.engines.slurm import commands, scripts
from planaria.engines.slurm.scripts import Template

# How often the controller is asked for the steps: it is one allocation, and whoever has it waits for it.
LOOK_SECONDS = 2.0


class StepHost:
    """A `GroupHost` in the allocation ``job``. ``close`` it."""

    def __init__(self, template: Template, job: str) -> None:
        self._template, self._job = template, job
        self._steps: dict[tuple[int, int], subprocess.Popen[bytes]] = {}
        self._ended: dict[tuple[int, int], Hosted] = {}

    async def create(self, group: int, incarnation: int, avoid: Collection[str]) -> None:
        life = group, incarnation
        if life in self._steps or life in await self._seen():
            return
        with scripts.make_directory(self._template, *life).joinpath("slurm.log").open("ab") as log:
            self._steps[life] = subprocess.Popen(
                scripts.step(self._template, *life, avoid),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the supervisor, which has them end in order
            )

    async def delete(self, group: int, incarnation: int) -> None:
        if (found := (await self._seen()).get((group, incarnation))) is not None:
            await commands.tell(found.id)
        elif (waiting := self._steps.get((group, incarnation))) is not None:
            waiting.terminate()  # it has no place yet

    async def list(self) -> Sequence[Hosted]:
        shown, hosted = await self._seen(), dict(self._ended)
        # Slurm may show a step for long whose node is lost; its srun has ended.
        there = {x: step for x, step in shown.items() if x not in hosted and not self._is_over(x)}
        for life, step in there.items():
            hosted[life] = Hosted(*life, HostState.RUNNING, step.nodes, since=step.since)
        for life, process in list(self._steps.items()):
            if life in there:
                continue
            if process.poll() is None and not self._agent_was_there(life):
                hosted[life] = Hosted(*life, HostState.PENDING, reason="its nodes are busy or lost")
                continue
            with suppress(subprocess.TimeoutExpired):  # srun may outlive its step by a moment
                process.wait(0)
            hosted[life] = self._ended[life] = self._end_of(life, process.poll())
            if process.poll() is not None:
                del self._steps[life]
        # What Slurm shows still must be known to be over.
        self._ended = placing.newest(self._ended) | {x: seen for x, seen in self._ended.items() if x in shown}
        return tuple(hosted[life] for life in sorted(hosted))

    async def changed(self) -> None:
        await asyncio.sleep(LOOK_SECONDS)

    def close(self) -> None:
        for process in self._steps.values():
            process.kill()
            process.wait()

    async def _seen(self) -> dict[tuple[int, int], commands.SlurmJob]:
        found = {}
        for step in await commands.steps(self._job):
            if (life := placing.life_in(step.name, self._template.run)) is not None:
                found[life] = step
        return found

    def _is_over(self, life: tuple[int, int]) -> bool:
        return life in self._steps and self._steps[life].poll() is not None

    def _agent_was_there(self, life: tuple[int, int]) -> bool:
        return (self._directory(life) / "run.json").exists()

    def _end_of(self, life: tuple[int, int], code: int | None) -> Hosted:
        said = placing.last_words(self._template.directory, *life)
        exit_code, reason = said or (code or None, "its step ended, and its agent has said nothing")
        return Hosted(*life, HostState.ENDED, (), exit_code, time.time(), reason, lost=exit_code is None)

    def _directory(self, life: tuple[int, int]) -> Path:
        return placing.directory_of(self._template.directory, *life)
