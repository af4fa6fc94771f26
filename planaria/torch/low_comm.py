"""Low communication: groups train on their own for a *round* of inner steps and exchange what has become of their
parameters, not gradients.

- Local SGD (Stich 2018, arXiv 1805.09767): the parameters' mean is everybody's next.
- DiLoCo (Douillard et al. 2023, arXiv 2311.08105): the mean change is a gradient for an outer optimizer.
- Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512): a fragment of the parameters at a time, while training
  goes on.

::

    sync = pt.DiLoCo(model, inner, every=40)
    job.protect(sync=sync, scheduler=scheduler)
    for step in job.steps(rounds):
        for batch in step.batches(data):
            loss_fn(model(batch)).backward()
            inner.step()
            inner.zero_grad()
            scheduler.step()

A step of the job is a round. What is exchanged is each shard's change since the last exchange (old minus new, the
pseudo-gradient), through the same fixed tree as gradients. docs/low-communication.md has the whole story.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from planaria.errors import UsageError
from planaria.torch.optimizers import attributes_of

if TYPE_CHECKING:
    from planaria.torch.sync_part import SyncPart

OuterFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

# Of the DiLoCo paper, section 3.1.
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9


class LowCommunication:
    """What the methods have in common. Not for use by itself."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        inner: Optimizer | Sequence[Optimizer],
        *,
        every: int,
        outer: OuterFactory,
        exact: bool = False,
        fragments: int | Sequence[Any] = 1,
        delay: int = 0,
        mix: float = 0.0,
        paced: bool = False,
    ) -> None:
        method = f"pt.{type(self).__name__}"
        self.models = [model] if isinstance(model, nn.Module) else list(model)
        self.inner = [inner] if isinstance(inner, Optimizer) else list(inner)
        if not self.models or not all(isinstance(each, nn.Module) for each in self.models):
            raise UsageError(f"{method} needs the module that is trained, or a list of modules, first")
        if not self.inner or not all(isinstance(each, Optimizer) for each in self.inner):
            raise UsageError(f"{method} needs the inner optimizer, or a list of optimizers, second")
        count = fragments if isinstance(fragments, int) else len(fragments)
        for name, value, least in (("every", every, 1), ("fragments", count, 1), ("delay", delay, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{method}: {name} must be a whole number of at least {least}, not {value!r}")
        if every % count:
            raise UsageError(
                f"{method}: every={every} inner steps cannot be divided by {count} fragments, one of which is "
                f"exchanged every {every}/{count} steps; make every a multiple of {count}"
            )
        if delay >= every // count:
            raise UsageError(
                f"{method}: delay={delay} must be less than the {every // count} inner steps of a round (every divided "
                "by the fragments)"
            )
        if not 0.0 <= mix < 1.0:
            raise UsageError(f"{method}: mix={mix} must be at least 0 and below 1 (1 would keep groups apart for ever)")
        if exact and (count > 1 or delay or mix):
            raise UsageError(
                f"{method}: exact=True needs fragments=1, delay=0 and mix=0: whoever takes a lost group's place can "
                "compute again only what began with parameters that all groups share"
            )
        if exact and paced:
            raise UsageError(
                f"{method}: exact=True and paced=True rule each other out: speeds would decide the result. "
                "With exact=True faster groups compute more shards, if there are more shards than groups"
            )
        self.every, self.fragments, self.delay, self.mix, self.exact = every, fragments, delay, float(mix), exact
        self.paced = paced
        self.rounds_per_exchange = count  # of a parameter
        self.steps = every // count  # inner steps of a round
        self.outer = outer
        # What a fresh inner optimizer looks like. Most have no state before their first step.
        self.pristine = [copy.deepcopy(each.state_dict()["state"]) for each in self.inner]
        self.attributes = [attributes_of(each) for each in self.inner]
        self.part: SyncPart | None = None  # in use, once the steps have begun

    @property
    def inner_step(self) -> int:
        """The number, from 0, of the inner step that comes next: for learning rates that are a function of it. A group
        that makes fewer steps in a round (``paced``) goes through it in larger strides."""
        return 0 if self.part is None else self.part.inner_step

    def count(self, tokens: float) -> None:
        """Have this round's change weigh as many tokens (or samples, any unit). Call it in the loop over the batches,
        for each of them, on all groups. Without it all groups weigh the same. Batches of the last ``delay`` inner steps
        do not count: what they change is exchanged with the next round's."""
        if self.part is None:
            raise UsageError("count belongs into the loop over step.batches")
        if not 0 <= tokens < float("inf"):
            raise UsageError(f"count needs a number of tokens, not {tokens}")
        self.part.tokens += float(tokens)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """In it the model has the shared parameters, not this group's own: to evaluate or to save them. Between
        ``step.batches`` and the end of the loop's body, where the two differ only if fragments or ``mix`` make them."""
        if self.part is None:
            raise UsageError("shared belongs into the loop over job.steps, after step.batches")
        with self.part.swapped():
            yield


class LocalSGD(LowCommunication):
    """Every ``every`` inner steps all groups go on with the mean of their parameters (arXiv 1805.09767).

    Args:
        model: the module that is trained, or a list of modules.
        inner: the optimizer (or several) that the loop steps. Its state stays with its group.
        every: inner steps between two exchanges, H.
        exact: a lost group's inner steps are done again by others, so that the result is that of a run in which nothing
            failed. The inner optimizer then begins anew after every exchange. Without it, a group that is lost between
            two exchanges, or much later than it ever was, is left out of the next one.
        paced: groups make inner steps in proportion to their speeds, the fastest ``every``, so that nobody waits for a
            slow one; what they learn weighs as many steps. Learning rates must follow ``inner_step``.

    Raises UsageError for numbers that cannot be.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        inner: Optimizer | Sequence[Optimizer],
        *,
        every: int,
        exact: bool = False,
        paced: bool = False,
    ) -> None:
        # Parameters minus the mean change are the mean of the parameters.
        super().__init__(model, inner, every=every, outer=partial(torch.optim.SGD, lr=1.0), exact=exact, paced=paced)


class DiLoCo(LowCommunication):
    """Every ``every`` inner steps the mean change of all groups' parameters is a gradient for the outer optimizer, and
    what that makes of the shared parameters is where all groups go on (arXiv 2311.08105).

    Args:
        outer: makes the outer optimizer of the shared parameters; default: SGD with Nesterov momentum, as in the paper,
            with ``outer_lr`` and ``outer_momentum``.
        model, inner, every, exact, paced: as for :class:`LocalSGD`.

    Raises UsageError for numbers that cannot be.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        inner: Optimizer | Sequence[Optimizer],
        *,
        every: int,
        outer: OuterFactory | None = None,
        outer_lr: float = OUTER_LR,
        outer_momentum: float = OUTER_MOMENTUM,
        exact: bool = False,
        paced: bool = False,
    ) -> None:
        made = outer or _nesterov(outer_lr, outer_momentum)
        super().__init__(model, inner, every=every, outer=made, exact=exact, paced=paced)


class StreamingDiLoCo(LowCommunication):
    """DiLoCo, a fragment at a time, while training goes on (arXiv 2501.18512). A round is ``every / fragments`` inner
    steps; one fragment is exchanged in each, in turn.

    Args:
        fragments: how many (block ``i`` of the model goes to fragment ``i`` modulo that), or the fragments themselves,
            each a module, a parameter, or a list of such. Every parameter that is trained must be in exactly one.
        delay: for so many inner steps, the last of a round, the exchange goes on beside them (tau).
        mix: share of a group's own value in what its parameter is after the exchange (alpha): the rest is the shared
            one.
        model, inner, every, outer, outer_lr, outer_momentum, paced: as for :class:`DiLoCo`.

    There is no ``exact=True``: a group's parameters are never wholly shared. Raises UsageError for numbers that cannot
    be, or fragments that miss or repeat a parameter (when the steps begin).
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        inner: Optimizer | Sequence[Optimizer],
        *,
        every: int,
        fragments: int | Sequence[Any],
        delay: int = 1,
        mix: float = 0.5,
        outer: OuterFactory | None = None,
        outer_lr: float = OUTER_LR,
        outer_momentum: float = OUTER_MOMENTUM,
        paced: bool = False,
    ) -> None:
        made = outer or _nesterov(outer_lr, outer_momentum)
        super().__init__(model, inner, every=every, outer=made, fragments=fragments, delay=delay, mix=mix, paced=paced)


def _nesterov(lr: float, momentum: float) -> OuterFactory:
    if not lr > 0 or not 0 <= momentum < 1:
        raise UsageError(f"outer_lr={lr} must be above 0, and outer_momentum={momentum} at least 0 and below 1")
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, nesterov=momentum > 0)
