"""What the script's loop holds in its hands for one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from jax import Array

from planaria.errors import UsageError
from planaria.jax.programs import Gradient
from planaria.jax.worker import Worker

_NONE: Mapping[str, Any] = MappingProxyType({})


class Step:
    """One update over the whole global batch.

    ``index`` counts from 0 and ``state`` is the newest state. If this group takes a newer state from its peers in
    mid-step, both move on, and the shards that follow are those of the newer step: look at them inside the body of
    ``shards``, or after it.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._begun = False
        self._done: int | None = None
        self.complete = False

    @property
    def index(self) -> int:
        """Of the step that is worked on; after ``shards`` of the one that was made."""
        return self._worker.step if self._done is None else self._done

    @property
    def state(self) -> Any:
        """The pytree; after ``shards`` with the update. The next update takes its arrays' memory: copy what is kept."""
        return self._worker.state.tree

    @property
    def metrics(self) -> dict[str, float]:
        """Means over all shards, the same on every group; after ``shards``."""
        return dict(self._worker.metrics)  # the script's own: what it adds is not part of the job

    @property
    def groups(self) -> tuple[int, ...]:
        """Those that computed this step together, ascending, the same on each of them; after ``shards``. The first is
        the one to write what is to be written once. Empty if the job was over before this group could take part."""
        return () if self._worker.void else self._worker.groups

    def shards(self) -> Iterator[int]:
        """The numbers of this group's shards, and after a failure also of those of the lost group's. When the iterator
        ends, the mean gradient of all shards is exchanged, the update made and the step committed.

        The first shard of a process's life does not count: it is there to compile, before this group is counted upon.
        Nothing that happens to other groups is raised here. Raises UsageError for what the script itself does wrong,
        NonFiniteError if a gradient is NaN or infinite.
        """
        if self._begun:
            raise UsageError(f"step {self.index}: step.shards can be gone through once; put all of the step into it")
        self._begun = True
        yield from self._worker.shards()
        self._done = max(self._worker.step - 1, 0)
        self.complete = True

    def key(self, shard: int) -> Array:
        """The random key of a shard of this step: the same on whatever group computes it."""
        return self._worker.key(shard)

    def grad(self, function: Gradient, batch: Any) -> Any:
        """Compute the gradients of the shard in hand, by ``function(state, batch, key)``, jitted, which returns
        ``(gradients, metrics)``: a pytree of real arrays, and a dict of scalars, which are averaged over all shards
        (or None). Does not wait for them. Returns the metrics."""
        return self._worker.grad(function, batch)

    def add(self, gradients: Any, metrics: Mapping[str, Any] = _NONE) -> None:
        """The gradients of the shard in hand, for scripts that compute them in their own way (several micro-batches,
        say). They must depend on ``state``, ``index`` and the shard's number alone, and be left alone (not donated)
        until the next shard's are given."""
        self._worker.add(gradients, metrics)
