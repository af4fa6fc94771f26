"""What the user's loop holds in its hands for one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from planaria.errors import UsageError
from planaria.torch.data import ShardedSource
from planaria.torch.rehearsal import Rehearsal
from planaria.torch.worker import Worker


class Step:
    """One optimizer step over the whole global batch.

    ``index`` counts from 0. If this group has to take a newer state from its peers while it is inside the body, the
    index moves on, the body ends on zero gradients, whatever it did to protected objects is taken back, and it runs
    again for the right step. So a body may run once more than there are steps.
    """

    def __init__(self, worker: Worker | Rehearsal) -> None:
        self._worker = worker
        self._begun = False
        self.exchanged = False
        self.void = False  # a guard ended it

    @property
    def index(self) -> int:
        return self._worker.step

    @property
    def metrics(self) -> dict[str, float]:
        """Means over all shards of what was recorded, the same on every group; after ``batches`` has ended."""
        return dict(self._worker.metrics)  # the script's own: what it adds is not part of the job

    @property
    def groups(self) -> tuple[int, ...]:
        """The groups that computed this step together, ascending, the same on each of them; after ``batches`` has
        ended. Empty if the body is void (see above). The first is the one to write what is to be written once."""
        return self._worker.groups

    def batches(self, data: ShardedSource) -> Iterator[Any]:
        """The batches of this group's shards, and after a failure also those of the lost group's.

        Before each shard the gradients are cleared and the random generators seeded from (seed, step, shard). Call
        ``backward`` exactly once for every batch. When the iterator ends, every ``.grad`` holds the mean over all
        shards of the step, final and equal on every group: then step the optimizer. The gradients are valid until the
        next step's batches: clone them to keep them.

        Nothing that happens to other groups is raised here. Raises UsageError for what the script itself does
        wrong, NonFiniteError if a gradient is NaN or infinite.
        """
        if self._begun:
            raise UsageError(f"step {self.index}: step.batches can be gone through once; put all of the step into it")
        self._begun = True
        yield from self._worker.batches(data)
        self.exchanged = True

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around the whole body of the loop: what it raises because another rank of this group was lost ends the body,
        but not the process. The lost rank is replaced, and the body runs again for the step that the job is at.
        Without it, or for any other error, the group ends and is started again as a whole.

        ::

            for step in job.steps(1000):
                with step.guard():
                    for batch in step.batches(data):
                        loss_fn(model(batch)).backward()
                    optimizer.step()
        """
        self._worker.guard()
        try:
            yield
        except Exception as error:
            if not self._worker.void(error):
                raise
            self.void = True

    def record(self, **values: Any) -> None:
        """Note scalars of the current shard (numbers or one-element tensors), averaged over the batches of the shard
        and then over all shards into ``metrics``. ``loss`` is shown by ``planaria status`` and the live view.

        On a GPU what is recorded before ``backward`` is on the host, and at the peers, while that still runs."""
        self._worker.record(values)
