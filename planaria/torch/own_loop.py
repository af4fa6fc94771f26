"""Steps of a loop that Planaria does not drive: ``with job.step() as step`` around the body of it.

The script's loop decides what comes next, so all that concerns others happens where it is inside of Planaria: in the
batches as always, and where the body ends. There the step is committed, and the next one begun: if the group has to
take a newer state from its peers, ``load`` is called there (or in the body's place, see ``Overtaken``), and what the
loop looks at afterwards is the state that its next body begins with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from planaria.errors import UsageError
from planaria.torch.data import ShardedSource
from planaria.torch.registered import Look, RegisteredPart
from planaria.torch.step import Step
from planaria.torch.worker import Worker


class Overtaken(BaseException):
    """Ends a body whose step was committed without it. Never leaves ``job.step()``, and is no error: a script that
    catches its errors must not catch it."""


class ShardNumbers:
    """As data, every shard's number: for loops that know themselves what to read for it."""

    micro_batches = samples_per_shard = 1

    def bind(self, shards: int, seed: int = 0, part: tuple[int, int] = (0, 1)) -> None: ...

    def batches(self, step: int, shard: int, steps: int = 1) -> Iterator[int]:
        yield shard

    def cursor_after(self, shard: int) -> int:
        return 0

    def commit(self, cursors: Mapping[int, int]) -> None: ...


class OwnStep(Step):
    """One step of a loop that the script drives itself. What it says of itself stays so when its body has ended."""

    def __init__(self, worker: Worker, loop: OwnLoop) -> None:
        super().__init__(worker)
        self._loop = loop
        self._said: tuple[int, tuple[int, ...], dict[str, float]] | None = None

    def end(self) -> None:
        self._said = self.index, self.groups, self.metrics

    @property
    def index(self) -> int:
        return super().index if self._said is None else self._said[0]

    @property
    def groups(self) -> tuple[int, ...]:
        return super().groups if self._said is None else self._said[1]

    @property
    def metrics(self) -> dict[str, float]:
        return super().metrics if self._said is None else self._said[2]

    def shards(self) -> Iterator[int]:
        """The numbers of the shards that this group is to compute: of ``job.shards`` micro-batches that make up the
        step's global batch, those that are its share; after a failure also those of the lost group.

        What shard ``s`` of step ``i`` consists of must depend on nothing but the two, for any group may be given it,
        and given it again: micro-batch number ``i * job.shards + s`` of the run, say. The rest is as for ``batches``.
        """
        return self.batches(self._loop.numbers)

    def batches(self, data: ShardedSource) -> Iterator[Any]:
        yield from super().batches(data)
        if self._loop.overtaken:
            raise Overtaken
        self._loop.went_through()


class OwnLoop:
    """The steps of a job, one after the other, entered and left by the script. ``registered``: its state."""

    def __init__(self, worker: Worker, registered: RegisteredPart) -> None:
        self.numbers = ShardNumbers()
        self._worker = worker
        self._registered = registered
        self._step: OwnStep | None = None  # asked for, and not left yet
        self._inside = False
        self._over = ""  # why there are no more steps
        self._before: Look | None = None  # the state at the beginning of this life's first step

    @property
    def index(self) -> int:
        """Of the step that is next."""
        return self._worker.step

    @property
    def overtaken(self) -> bool:
        """Whether the step was committed by others while the script was in its body."""
        return self._worker.overtaken

    def begin(self) -> None:
        """Wait until there is work on the next step, or see the job to its end. The state is that of the job then."""
        worker = self._worker
        worker.guard()  # the end of a body is one
        try:
            while not worker.begin_step():
                if worker.finish():
                    self._over = f"all {worker.step} steps are made; end the loop there"
                    return
        except BaseException:
            self._close()
            raise

    def look(self) -> None:
        """Keep the state, to see that the first step's shards leave it alone. Costs two calls of ``save``."""
        if not self._over:
            self._before = self._registered.look()

    def step(self) -> OwnLoop:
        """To be entered by ``with``."""
        where, index = self._worker.settings.where, self._worker.step
        if self._over:
            raise UsageError(f"{where}: job.step: {self._over}")
        if self._step is not None:
            self._close()
            inside = "inside of it; a step has one body" if self._inside else "before; it must be: with job.step() as …"
            raise UsageError(f"{where}, step {index}: job.step was called {inside}")
        self._step = OwnStep(self._worker, self)
        return self

    def went_through(self) -> None:
        """The shards of a step are done."""
        self._registered.check_unchanged(self._before)

    def __enter__(self) -> OwnStep:
        if self._step is None or self._inside:
            raise UsageError(f"{self._worker.settings.where}: every step needs a job.step() of its own")
        self._inside = True
        return self._step

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        worker, step = self._worker, self._step
        assert step is not None
        self._step, self._inside, self._before = None, False, None
        step.end()
        # One that was left early may have been by the script's own handler of what the loss of a rank raises.
        early = error is None and not step.exchanged and not worker.overtaken
        cause = RuntimeError("left early") if early else error
        bereaved = step.void or (isinstance(cause, Exception) and worker.void(cause))
        if error is not None and not bereaved and not isinstance(error, Overtaken):
            self._close()
            return False
        step.void = bereaved or worker.overtaken
        if not step.void and not step.exchanged:
            self._close()
            raise UsageError(
                f"{worker.settings.where}, step {worker.step}: the body of job.step must go through all of "
                "step.shards() before it ends"
            )
        if not bereaved:
            try:
                worker.commit()
            except BaseException:
                self._close()
                raise
        self.begin()
        return True

    def _close(self) -> None:
        self._over = self._over or "an error ended the step before; this process cannot go on with the job"
        self._worker.session.close()
