"""``init`` and ``Job``: what a training script calls."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from typing import Any

import jax

from planaria.core.messages import Policy, Ready
from planaria.errors import UsageError
from planaria.exchange.device import warm_up
from planaria.jax.backend import fingerprint, prepare, strict
from planaria.jax.checkpoint import Checkpoints
from planaria.jax.programs import Programs, Update
from planaria.jax.state import State, said
from planaria.jax.step import Step
from planaria.jax.worker import Worker
from planaria.jax.world import Sameness, SoleWorld
from planaria.rank import promise
from planaria.rank.durable import read_schedule
from planaria.rank.fingerprint import Prints, digest_of_group, of_group
from planaria.rank.place import Place
from planaria.rank.session import Session
from planaria.rank.settings import Settings, read_settings
from planaria.wire.page import ProgressPage

MOST_SEED = 1 << 63
# What `planaria run` can ask of a PyTorch script, and not of this front.
_UNKNOWN = {
    "PLANARIA_BUDDY": "--buddy",
    "PLANARIA_STANDBY": "--standbys",
    "PLANARIA_REPLAY": "--replay",
}


class Job(Place):
    """This process's part in the job. Made by ``init``."""

    def __init__(self, settings: Settings, device: jax.Device, world: SoleWorld, exact: str) -> None:
        self.settings = settings
        self._world = world
        self.device = device
        self.exact = exact
        self._state: State | None = None
        self._schedule = read_schedule(None, None, None)
        self._page: ProgressPage | None = None
        if settings.directory is not None:
            settings.directory.mkdir(parents=True, exist_ok=True)
            self._page = ProgressPage.create(settings.directory / "progress")

    @property
    def rank(self) -> int:
        """This process's number in its group."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Processes in a group."""
        return self._world.size

    @property
    def state(self) -> Any:
        """The newest state: after the loop, the result."""
        if self._state is None:
            raise UsageError("job.state is there once job.steps has been given a state")
        return self._state.tree

    def checkpoint(
        self, directory: str | os.PathLike[str] | None = None, every: int | None = None, keep: int | None = None
    ) -> None:
        """Save the state after every ``every`` steps (default 100) and after the last one, keep the ``keep`` newest
        (default 3), and have ``steps`` begin with the newest that is in the directory.

        Say the same in all groups, with a directory that all of them see, before ``steps``. ``planaria run
        --checkpoint`` has the last word on the directory, and its numbers are defaults. Needs Orbax.

        Raises UsageError for values that cannot be.
        """
        if self._state is not None:
            raise UsageError("job.checkpoint must be called before job.steps")
        self._schedule = read_schedule(directory, every, keep)
        if self._schedule is None:
            raise UsageError("job.checkpoint needs a directory, here or by planaria run --checkpoint")

    def steps(self, total: int, state: Any, update: Update) -> Iterator[Step]:
        """The steps 0 to ``total`` - 1, each committed exactly once by the job. A group that joins late, or comes back,
        compiles first and then starts at the step where the others are, with their state.

        Args:
            state: any pytree of arrays and numbers, built alike on all groups: what peers give back. It is copied, so
                the script may keep it. Arrays that are spread over devices (``NamedSharding``) stay so; in a group of
                several processes what is not is the same on all of them.
            update: ``update(state, gradients)``, the next state: jitted, with the old state's memory for the new one,
                and called only when no failure can take the step back. ``gradients`` are the mean over all shards.

        Raises UsageError for a state that cannot be, before anything starts.
        """
        if self._state is not None:
            raise UsageError("job.steps can be called once; put all steps into one loop")
        if not callable(update):
            raise UsageError(f"job.steps was given {said(update)} as its update; it needs update(state, gradients)")
        try:
            total = operator.index(total)
        except TypeError:
            raise UsageError(f"job.steps needs a whole number of steps, not {total!r}") from None
        if total < 1:
            raise UsageError(f"job.steps needs at least one step, not {total}")
        if self._schedule is not None and jax.process_count() > self.world_size:  # Orbax would wait for all of them
            raise UsageError(
                f"{self.settings.where}: in a larger JAX world of the script's own no checkpoints are saved; leave out "
                "jax.distributed.initialize(), or the checkpoint"
            )
        self._state = held = State(state, self.device, self.world_size)
        session = Session(self.settings, self._world, self._page, held)
        same = Sameness(self.settings, session.gather)
        programs = Programs(held, update, same.programs)

        def prints(**more: str) -> Prints:
            """Of the group: all its ranks do this together."""
            layout = held.layout if self.world_size == 1 else f"{self.world_size} processes, {held.layout}"
            more |= {"layout": layout, "steps": str(total), **held.describe()}
            if self.settings.check_state:
                more["checks"] = str(self.settings.check_state)
            return of_group(fingerprint(self.settings, self.exact, self.device, **more), session.gather, strict)

        def introduce(address: str, joins: bool, looks: bool) -> Ready:
            mine = prints(program=programs.digest, metrics=", ".join(worker.names))
            start, saves = 0, worker.checkpoints is not None
            if worker.checkpoints is not None:
                worker.checkpoints.prints = mine
                if self.settings.founder:
                    start, metrics = worker.checkpoints.resume()
                    worker.metrics = dict(metrics)
            initial = ""
            if self.settings.founder or not saves:
                initial = digest_of_group(held.digest(), session.gather)
            damaged = worker.checkpoints.damaged if worker.checkpoints is not None else 0
            return Ready(
                session.member, address, mine, initial, self.shards, total,
                step=start, saves=saves, damaged=damaged,
            )  # fmt: skip

        if self.world_size > 1:  # before any of them waits for another in a program
            prints()
            same.states(held.shared())

        worker = Worker(session, held, programs, lambda: session.start(introduce), self._world.end)
        if self._schedule is not None:
            worker.checkpoints = Checkpoints(
                self._schedule, self.settings, self._world, held, total, lambda: session.member, session.gather,
                session.tell, lambda: worker.metrics,
            )  # fmt: skip
        return self._loop(worker)

    def _loop(self, worker: Worker) -> Iterator[Step]:
        ended = False
        try:
            while worker.goes_on():
                step = Step(worker)
                yield step
                if not step.complete:
                    raise UsageError(
                        f"{self.settings.where}, step {worker.step}: the loop's body must go through all of "
                        "step.shards() before it ends"
                    )
            worker.finish()
            ended = True
        finally:
            if not ended:
                worker.session.close()


def init(
    *,
    shards: int | None = None,
    seed: int = 0,
    policy: Policy | str | None = None,
    reduction: str | None = None,
    exact: str | None = None,
    check_state: int = 0,
    device: str | None = None,
) -> Job:
    """Join the job that ``planaria run`` started; alone, be a job of one group. Call it before JAX makes an array: XLA
    is pinned to one thread, unless NPROC says otherwise, because bits depend on the number of its threads. And if a
    group has several processes they become one JAX world (``jax.distributed``), of which ``jax.devices()`` has all.

    Args:
        shards: the global batch of every step is this many shards (V), whoever computes them. Part of what the
            result depends on. ``planaria run --shards`` has the last word; default: the number of groups.
        seed: of ``step.key``. Build the state from it too: all groups must begin with the same one.
        policy: what happens to a lost group's shards: "redistribute" or "shrink".
        reduction: "tree" (bit-exact), "fast" (same samples, rounding may differ), or "int8" or "fp8".
        exact: "bits" (the weights of a run in which nothing failed) or "samples" (no sample is lost, rounding may
            differ). Default: "bits" on a CPU, "samples" on GPUs, with "fast" and with the policy "shrink".
        check_state: compare the groups' states in every step; 0: never.
        device: "cpu" or "cuda"; default: what JAX takes. ``planaria run --device`` has the last word.

    Raises UsageError naming the setting that cannot be.
    """
    name = policy.value if isinstance(policy, Policy) else policy
    settings = read_settings(shards, seed, name, reduction, check_state=check_state)
    for variable, option in _UNKNOWN.items():
        if os.environ.get(variable):
            raise UsageError(f"{settings.where}: planaria.jax cannot do {option}; leave it out")
    if settings.recheck:
        raise UsageError(f"{settings.where}: planaria.jax cannot do --recheck; leave it out")
    if settings.seed >= MOST_SEED:
        raise UsageError(f"{settings.where}: seed must be below 2**63, of which JAX makes keys, not {settings.seed}")
    chosen, world = prepare(os.environ.get("PLANARIA_DEVICE") or device, settings)
    promised = promise.choose(os.environ.get("PLANARIA_EXACT") or exact, settings, chosen.platform == "cpu")
    job = Job(settings, chosen, world, promised)
    if settings.socket is not None and chosen.platform != "cpu":
        import torch

        warm_up(torch.device("cuda", chosen.local_hardware_id or 0))
    return job
