"""``init`` and ``Job``: what a training script calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from planaria.core import bitflips
from planaria.core.messages import NO_QUORUM, Phase, Policy, Ready
from planaria.errors import UsageError
from planaria.exchange.device import warm_up
from planaria.rank import promise
from planaria.rank.durable import read_schedule
from planaria.rank.fingerprint import digest_of_group, of_group
from planaria.rank.place import Place
from planaria.rank.session import Session
from planaria.rank.settings import Settings, read_settings
from planaria.torch import exactness
from planaria.torch import random as seeding
from planaria.torch.buddies import Buddies, read_every
from planaria.torch.checkpoints import Checkpoints
from planaria.torch.clipping import clip_grad_norm_
from planaria.torch.fingerprint import ALIKE, fingerprint
from planaria.torch.low_comm_settings import of_low_communication
from planaria.torch.low_comm_worker import LowCommWorker
from planaria.torch.own_loop import OwnLoop
from planaria.torch.registered import MODEL, NAME, RegisteredPart
from planaria.torch.rehearsal import Rehearsal, await_part, take
from planaria.torch.state import ProtectedState
from planaria.torch.step import Step
from planaria.torch.worker import Worker
from planaria.torch.world import GroupWorld, choose_device, local_rank
from planaria.wire.membership import Script
from planaria.wire.page import ProgressPage


class Job(Place):
    """This process's part in the job. Made by ``init``."""

    def __init__(self, settings: Settings, world: GroupWorld, exact: str) -> None:
        self.settings = settings
        self.exact = exact
        self._world = world
        self._protected: dict[str, Any] = {}
        self._overlap = True
        self._allow_unused = False
        self._started = False
        self._parameters: list[torch.nn.Parameter] = []  # of the protected modules, once the steps have begun
        self._own_loop: OwnLoop | None = None
        self._schedule = read_schedule(None, None, None)
        self._page = self._new_page()

    @property
    def device(self) -> torch.device:
        """Of this rank: put the model there."""
        return self._world.device

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks of this group, for FSDP2, TP and the like; its dimensions are those given to ``init``. Other
        groups are not in it."""
        return self._world.mesh

    @property
    def rank(self) -> int:
        """This process's number in its group."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Ranks in a group."""
        return self._world.size

    @property
    def part(self) -> tuple[int, int]:
        """(index, count): which part of every shard's samples is this rank's. For who uses ``step.shards``."""
        return self._world.part

    def protect(self, *, overlap: bool = True, allow_unused: bool = False, **objects: Any) -> None:
        """Name what makes up the state of the training: what peers give to a group that heals.

        Args:
            objects: modules, optimizers, anything with ``state_dict`` and ``load_state_dict``, lists and dictionaries
                of these, and dictionaries of plain data. The parameters of the modules that need gradients are those
                that are exchanged.
            overlap: exchange gradients while the last shard's backward goes on. Needs one ``backward`` for each
                batch; without it, several are fine.
            allow_unused: a parameter without a gradient in some shards counts as zero there, instead of an error.
        """
        self._not_yet("job.protect")
        if "planaria" in objects:
            raise UsageError("job.protect cannot name an object `planaria`: that name is taken; choose another")
        self._protected |= objects
        self._overlap, self._allow_unused = overlap, allow_unused

    def checkpoint(
        self, directory: str | os.PathLike[str] | None = None, every: int | None = None, keep: int | None = None
    ) -> None:
        """Save the protected state to ``directory`` after every ``every`` steps (default 100) and after the last one,
        and keep the ``keep`` newest (default 3). ``steps`` begins with the newest one that is there.

        Say the same in all groups, with a directory that all of them see. ``planaria run --checkpoint`` has the last
        word on the directory; the numbers that are given here count more than those of the command line.

        Raises UsageError for a number that cannot be, or if neither side names a directory.
        """
        self._not_yet("job.checkpoint")
        self._schedule = read_schedule(directory, every, keep)
        if self._schedule is None:
            raise UsageError("job.checkpoint needs a directory, here or by planaria run --checkpoint")

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale the gradients of the protected modules so that their norm is at most ``max_norm``; the norm before.

        Call it after ``step.batches``, on every rank. The norm is that of the whole model, whatever is spread over
        the ranks of the group: see :func:`planaria.torch.clipping.clip_grad_norm_`.
        """
        if not self._parameters:
            raise UsageError("job.clip_grad_norm_ must be called in the loop over the steps")
        stages = self.mesh["pp"] if "pp" in self._world.shape else None
        return clip_grad_norm_(self._parameters, max_norm, norm_type, stages)

    def register(
        self,
        *,
        save: Callable[..., Any],
        load: Callable[[Any], Any],
        model: Any,
        steps: int,
        overlap: bool = True,
        allow_unused: bool = False,
    ) -> int:
        """For a loop that exists already: its state by its own checkpoint functions, and its steps by ``job.step``.

        Call it where the loop would resume from a checkpoint. It waits until the job has a quorum; in a group that
        joins late, or comes back, ``load`` has been called then with the state of the others. Returns the step that
        the job is at, the first one that the loop has to make.

        Args:
            save: returns the state, dictionaries and lists of tensors (the living ones or copies) and plain data; or,
                if it needs an argument, writes it to the binary file that it is given, in whatever format.
            load: puts in place what ``save`` has given, or reads it from a file: then it must be safe with what other
                members of the job have written (``torch.load(file, weights_only=True)`` is).
            model: the module that is trained, or several in a list or dictionary: the gradients of its parameters are
                exchanged.
            steps: that the job makes in all.
            overlap, allow_unused: as for ``protect``.

        Each rank saves and loads its own state, without collectives, and at any step. Raises UsageError for functions,
        or a state, that cannot be.
        """
        if self._started:
            raise UsageError("job.register can be called once, and not beside job.steps")
        if steps < 1:
            raise UsageError(f"job.register needs at least one step, not {steps}")
        part = RegisteredPart(save, load, model, self.seed, self.settings.where)
        if both := sorted({NAME, MODEL} & self._protected.keys()):
            raise UsageError(f"job.protect and job.register both name `{both[0]}`; protect it by another name, or not")
        self._refuse_shared(part)
        part.pack([])  # what cannot travel is seen before anybody waits
        self._protected[NAME] = part
        self._overlap, self._allow_unused = overlap, allow_unused
        if self.settings.standby is not None:  # it cannot try a body that it does not drive
            self._wait_in_the_wings(self._state()[0], steps)
            part.where = self.settings.where
        loop = OwnLoop(self._start(steps), part)
        loop.begin()
        if self.settings.founder:  # who comes later runs what was seen to be right
            loop.look()
        self._own_loop = loop
        return loop.index

    def step(self) -> OwnLoop:
        """``with job.step() as step:`` around the body of a loop for which ``register`` was called.

        In it ``step.shards()`` (or ``step.batches(data)``) takes the place of the loop over micro-batches; then
        gradients are clipped and optimizers stepped as ever. Everything that changes the state comes after the shards
        and before the end of the ``with``, which is the end of the step: it is committed there, or, if ``step.void``,
        does not count. ``load`` was called then, and ``step.index`` of the next body says where the job is.
        """
        if self._own_loop is None:
            raise UsageError("job.step needs job.register before the loop (or the loop is: for step in job.steps(…))")
        return self._own_loop.step()

    def _not_yet(self, what: str) -> None:
        if self._started:
            raise UsageError(f"{what} must be called before job.steps (or job.register)")

    def _refuse_shared(self, part: RegisteredPart) -> None:
        protected = ProtectedState(**self._protected)
        if protected.sync is not None:
            raise UsageError("job.register cannot be combined with low communication; drive the loop by job.steps")
        theirs = {id(parameter) for _, parameter in protected.parameters()}
        for module in part.modules:
            for name, parameter in module.parameters.items():
                if id(parameter) in theirs:
                    raise UsageError(
                        f"job.protect and job.register both name the parameter {module.name}.{name}; its state would "
                        "travel twice: protect only what save does not give"
                    )

    def steps(self, total: int) -> Iterator[Step]:
        """The steps 0 to ``total`` - 1, each committed exactly once by the job; those that a checkpoint holds are not
        made again. Waits until the job has a quorum; a group that joins late, or comes back, starts at the step where
        the others are, with their state."""
        if self.settings.standby is not None:
            self._wait_in_the_wings((yield from self._try_a_step(total)), total)
        worker = self._start(total)
        ended = False
        try:
            while not ended:
                while worker.begin_step():
                    step = Step(worker)
                    yield step
                    if step.void:
                        continue
                    if not step.exchanged:
                        raise UsageError(
                            f"{self.settings.where}, step {worker.step}: the loop's body must go through all of "
                            "step.batches(data) before it ends"
                        )
                    worker.commit()
                ended = worker.finish()
        finally:
            if not ended:
                worker.session.close()

    def _try_a_step(self, total: int) -> Generator[Step, None, ProtectedState]:
        """What makes a standby warm."""
        self._check(total)
        state, _ = self._state()
        rehearsal = Rehearsal(self.settings, self._world, state, self._overlap)
        try:
            yield Step(rehearsal)
        except GeneratorExit:
            rehearsal.abandon(sys._getframe(1))
        rehearsal.end()
        return state

    def _wait_in_the_wings(self, state: ProtectedState, total: int) -> None:
        """A standby's time until it is a rank of a group."""
        prints = self._fingerprint(state, total) if state.sync is None else ()
        self.settings = take(await_part(self.settings, prints), self.settings, self._world)
        self._page = self._new_page()

    def _check(self, total: int) -> None:
        if self._started:
            raise UsageError("job.steps can be called once; put all steps into one loop")
        if total < 1:
            raise UsageError(f"job.steps needs at least one step, not {total}")

    def _state(self) -> tuple[ProtectedState, dict[str, Any]]:
        """What is protected, with what Planaria itself must know after healing."""
        facts: dict[str, Any] = {"metrics": []}
        state = ProtectedState(**self._protected, planaria=facts)
        named = state.parameters() if state.sync is None else state.sync.trained
        self._parameters = [parameter for _, parameter in named]
        if not self._parameters:
            raise UsageError("job.protect(model=...) must name the model before job.steps")
        if not any(parameter.requires_grad for parameter in self._parameters):
            raise UsageError("the protected modules have no parameters that need gradients: nothing to train")
        return state, facts

    def _fingerprint(self, state: ProtectedState, total: int) -> tuple[tuple[str, str], ...]:
        more = {"layout": self._world.layout, "steps": str(total)}
        if self.settings.check_state or self.settings.recheck:
            more["checks"] = f"{self.settings.check_state} {self.settings.recheck}"
        if state.sync is not None:
            more["sync"] = state.sync.method
        return fingerprint(state, self.settings, self.exact, **more)

    def _new_page(self) -> ProgressPage | None:
        if self.settings.directory is None:
            return None
        self.settings.directory.mkdir(parents=True, exist_ok=True)
        return ProgressPage.create(self.settings.directory / "progress")

    def _start(self, total: int) -> Worker:
        self._check(total)
        state, facts = self._state()
        self._started = True
        if bitflips.VARIABLE in os.environ and self.settings.directory is not None:
            from planaria.torch.bitflips import BitFlips

            BitFlips(self.settings.directory, state, lambda: worker.step)
        script: Script | None = None
        if state.sync is not None:
            self.settings, script = of_low_communication(self.settings, state.sync)
        if script is not None and script.syncs < total:
            total = script.syncs  # what came after was never seen
            if self.rank == 0 and self.group == 0:
                sys.stderr.write(
                    f"planaria: job {self.settings.job}: the replay ends where its record does, after "
                    f"sync {total - 1}\n"
                )
        if state.sync is None:
            session = Session(self.settings, self._world, self._page, state)
            worker: Worker = Worker(session, state, facts, self._overlap, self._allow_unused)
        else:
            session = Session(self.settings, self._world, self._page, state)
            worker = LowCommWorker(session, state, facts, state.sync, script)
        own = self._fingerprint(state, total)
        if self._schedule is not None:
            beat = self._page.beat if self._page is not None else lambda: None
            worker.checkpoints = Checkpoints(
                self._schedule,
                self.settings,
                self._world,
                state,
                total,
                lambda: session.member,
                session.gather,
                session.tell,
                beat,
            )

        if (copying := read_every()) and self._world.size > 1:
            registered = state.registered is not None
            worker.buddies = Buddies(
                copying, self.settings, self._world, state, self._page, session.gather,
                lambda: session.during(Phase.LOADING) if registered else nullcontext(), session.lost,
            )  # fmt: skip

        def introduce(address: str, joins: bool, looks: bool) -> Ready:
            """All ranks of the group do this together."""
            prints, start, initial, kept = of_group(own, session.gather, ALIKE.__contains__), 0, "", NO_QUORUM
            if worker.checkpoints is not None:
                worker.checkpoints.prints = prints
                if joins:
                    worker.checkpoints.joined()
                if self.settings.founder and not joins:
                    start = worker.checkpoints.resume()
            if looks:
                start, kept = worker.go_back()
            elif joins and worker.buddies is not None:
                worker.buddies.meet()
            if kept != NO_QUORUM:
                initial = f"{start} {kept}"  # says as much as a digest
            elif looks or (not joins and (worker.checkpoints is None or self.settings.founder)):
                initial = digest_of_group(state.digest(), session.gather)
            if isinstance(worker, LowCommWorker):
                worker.introduced(dict(prints), start, initial if kept == NO_QUORUM else "")
            saves = worker.checkpoints is not None
            report = Ready(session.member, address, prints, initial, self.shards, total, step=start, saves=saves)
            lenient = state.sync is not None and not state.sync.sync.exact and script is None
            return replace(report, keeps=worker.buddies is not None, kept=kept, lenient=lenient)

        session.start(introduce)
        return worker


def init(
    *,
    shards: int | None = None,
    seed: int = 0,
    policy: Policy | str | None = None,
    reduction: str | None = None,
    exact: str | None = None,
    check_state: int = 0,
    recheck: float = 0.0,
    mesh: Mapping[str, int] | None = None,
    device: str | None = None,
) -> Job:
    """Join the job that ``planaria run`` started; alone, be a job of one group.

    Seeds every generator from ``seed``, so that all groups build the same model. Sets torch to one thread unless
    OMP_NUM_THREADS says otherwise: the number of threads changes bits, so it must not depend on the machine. In a
    group of several ranks it makes the group's torch world (``init_process_group``) if the script has not.

    Args:
        shards: the global batch of every step is this many shards (V), whoever computes them. Part of what the
            result depends on. ``planaria run --shards`` has the last word; default: the number of groups.
        policy: what happens to a lost group's shards: "redistribute" or "shrink".
        reduction: "tree" (bit-exact), "fast" (the vendor's all-reduce: same samples, rounding may differ), or "int8" or
            "fp8" (bit-exact as well, a quarter of the bytes, gradients rounded at random: docs/quantised.md).
        exact: "bits" (the weights of a run in which nothing failed; on a GPU it makes torch use deterministic kernels)
            or "samples" (no sample is lost, rounding may differ). Default: "bits" on a CPU, "samples" on GPUs, with
            the reduction "fast" and with the policy "shrink". ``planaria run --exact`` has the last word.
        check_state: compare the groups' parameters in every step, and all that they hold every so many steps; 0: never.
            ``planaria run --check-state`` has the last word (docs/corruption.md).
        recheck: the probability with which a shard is computed by two groups, to be compared. Needs exact="bits".
            ``planaria run --recheck`` has the last word.
        mesh: dimensions of ``job.mesh`` by name, in order, as {"fsdp": 2, "tp": -1} (-1: what is left). Ranks along
            "tp", "pp" and "cp" get the same samples, along any other dimension each gets its part of a batch. Default:
            one dimension, "fsdp".
        device: "cpu" or "cuda"; default: a GPU if there are any. ``planaria run --device`` has the last word.

    Raises UsageError naming the setting that cannot be.
    """
    name = policy.value if isinstance(policy, Policy) else policy
    settings = read_settings(shards, seed, name, reduction, check_state=check_state, recheck=recheck)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    chosen = choose_device(os.environ.get("PLANARIA_DEVICE") or device, local_rank(), settings.where)
    promised = promise.choose(os.environ.get("PLANARIA_EXACT") or exact, settings, chosen.type == "cpu")
    exactness.prepare(promised, chosen)
    if settings.socket is not None:  # there may be others to exchange with
        warm_up(chosen)
    if settings.recheck and promised != promise.BITS:
        raise UsageError(f"recheck compares bits, which need exact={promise.BITS!r}, not {promised!r}")
    world = GroupWorld(settings.rank, settings.world_size, chosen, mesh, settings.where, settings.joins)
    seeding.seed_all(settings.seed)
    return Job(settings, world, promised)
