"""Gradients of shards as flat fp32 sums of subtrees, collected while backward runs.

Every trainable parameter has a place in one of a few flat *buckets*. The hook that autograd calls when a parameter's
gradient is complete puts it there; the last parameter of a bucket completes the bucket, which is merged at once with
the sums of finished sibling shards (``core.tree``), so that a group holds only its maximal subtrees. The bits of a
sum depend on the tree alone, not on who computes which shards nor in what order.

Sums are fp32 whatever the parameters' dtype (float64 gradients are rounded). With one shard per group this costs one
copy per gradient: results are assigned as views, where DDP copies back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from planaria.core.tree import Merge, Node, leaves, maximal_nodes, merge_plan
from planaria.errors import ProtocolError, UsageError
from planaria.exchange.checksum import lane_sum
from planaria.exchange.layout import Layout
from planaria.rank.records import pack_presence
from planaria.torch.buckets import Bucket, Slab, local_numel
from planaria.torch.parts import wrapped

OnBucket = Callable[[int, list[Tensor]], None]


def trainable(named_parameters: Sequence[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
    """The parameters that need gradients, tied ones once, in the given order: the order of the layout.

    Raises UsageError if there are none, if they are complex, or if they are on several devices.
    """
    seen: set[int] = set()
    chosen: list[tuple[str, Parameter]] = []
    for name, parameter in named_parameters:
        if parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            chosen.append((name, parameter))
    if not chosen:
        raise UsageError(
            f"none of the model's {len(named_parameters)} parameters needs gradients; there is nothing to train. "
            "Protect the model after requires_grad is set on its parameters"
        )
    first, at = chosen[0][0], chosen[0][1].device
    for name, parameter in chosen:
        if parameter.is_complex():
            raise UsageError(f"parameter {name} is complex; keep real and imaginary parts in real parameters")
        if parameter.device != at:
            raise UsageError(
                f"parameter {name} is on {parameter.device} but {first} is on {at}; a rank trains on one device"
            )
    return chosen


class GradientStore:
    """The gradients of the shards that this rank has computed for the current step.

    ``named_parameters`` as the model gives them; ``layout`` is made from ``local_numel`` of ``trainable(...)``.
    ``overlap=False`` collects in ``end_shard`` instead of in hooks, for scripts with several ``backward()`` per batch.
    ``merge=False`` keeps every shard's gradients apart, for reductions that encode each of them for itself.

    All methods are for the training thread; hooks run in the thread that autograd uses for the device while that
    thread waits.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, Parameter]],
        shards: int,
        layout: Layout,
        overlap: bool = True,
        merge: bool = True,
    ) -> None:
        chosen = trainable(named_parameters)
        self.names = [name for name, _ in chosen]
        self.parameters = [parameter for _, parameter in chosen]
        self.shards = shards
        self._spread = any(isinstance(parameter, DTensor) for parameter in self.parameters)
        self._overlap = overlap
        self._merge = merge
        self._buckets = _buckets(self.parameters, self.names, layout)
        self._held: tuple[Node, ...] = ()
        self._have: frozenset[int] = frozenset()
        self._all_present = pack_presence(b"\x01" * len(chosen))
        # The shard in hand.
        self._shard: int | None = None
        self._leaf = Node(0, 1)
        self._merges: tuple[Merge, ...] = ()
        self._next_nodes: tuple[Node, ...] = ()
        self._on_bucket: OnBucket | None = None
        self._summed = self._apart = False
        self._sums: dict[int, Tensor] = {}  # by bucket
        self._emitted = 0  # buckets given to on_bucket
        self._micro_left = 0
        # Hooks share these objects: they are changed in place, never replaced.
        self._open = [False]  # do hooks collect now?
        self._fired = bytearray(len(chosen))
        self._waiting = [0] * len(self._buckets)  # parameters of a bucket that have not fired
        self._adding = [False] * len(self._buckets)  # gradients are added to the sibling's sum, not copied
        self._slabs: list[Slab | None] = [None] * len(self._buckets)  # None: the bucket is complete
        self._targets: list[list[Tensor]] = [[] for _ in self._buckets]
        # What expect() made last.
        self._results: list[Tensor] = []
        self._grads: list[Tensor] = []
        self._casts: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._cast_buffers: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        if overlap:
            for bucket in self._buckets:
                self._handles += [
                    parameter.register_post_accumulate_grad_hook(self._hook(bucket, position))  # type: ignore[no-untyped-call]
                    for position, parameter in enumerate(bucket.parameters)
                ]

    # --- a step and its shards ------------------------------------------------------------------------------

    def begin_step(self, recycle: bool = False) -> None:
        """Forget all sums. ``recycle=True`` says that no exchange reads handed-out buffers any more (the last one
        was completed by all peers): they are used again. Frozen ones never are."""
        for bucket in self._buckets:
            slab = self._slabs[bucket.index]
            if slab is not None:  # a shard that was given up half-way
                bucket.free.append(slab)
                self._slabs[bucket.index] = None
            bucket.reset(recycle)
        self._held, self._have, self._shard = (), frozenset(), None
        self._open[0] = False

    def begin_shard(
        self,
        shard: int,
        on_bucket: OnBucket | None = None,
        micro_batches: int = 1,
        summed: bool = False,
        apart: bool = False,
    ) -> None:
        """Set every gradient to None and collect those of ``shard`` from now on.

        ``on_bucket(bucket, parts)`` is given for the last shard of an exchange: it is called once per bucket, in
        ascending order of buckets (all groups must exchange in one order), during backward or end_shard, with what
        ``parts(bucket)`` is after this shard. What it raises comes out of the user's ``backward()``.

        ``summed``: ``checksum`` is asked for afterwards. ``apart``: only for that; the shard is not held.
        """
        if self._shard is not None:
            raise ProtocolError(f"shard {shard} was begun before shard {self._shard} ended")
        self._summed, self._apart = summed, apart
        self._sums.clear()
        if apart:
            self._merges, self._next_nodes = (), self._held
        else:
            merges = merge_plan(self._held, shard, self.shards)  # refuses a shard that is held
            self._next_nodes = (maximal_nodes if self._merge else leaves)(self._have | {shard}, self.shards)
            self._merges = merges if self._merge else ()
        self._shard, self._leaf, self._on_bucket = shard, Node(shard, shard + 1), on_bucket
        self._emitted = 0
        for bucket in self._buckets:
            self._aim(bucket, self._merges)
        for parameter in self.parameters:
            parameter.grad = None
        self._fired[:] = bytes(len(self._fired))
        self._micro_left = micro_batches - 1
        self._open[0] = self._overlap and micro_batches == 1

    def micro_batch_done(self) -> None:
        """A micro-batch's backward is over. Hooks collect in the last one's only; until then ``.grad`` adds up."""
        self._micro_left -= 1
        self._open[0] = self._overlap and self._micro_left == 0

    def end_shard(self) -> bytes:
        """Complete the shard: parameters without a gradient count as zeros. The shard is held from now on.

        Returns the bitmap of the parameters that had a gradient (see ``records.pack_presence``).
        """
        if self._shard is None:
            raise ProtocolError("a shard was ended that was not begun")
        self._open[0] = False
        for bucket in self._buckets:
            if self._slabs[bucket.index] is not None:
                self._collect_rest(bucket)
        if not self._apart:
            self._have |= {self._shard}
        self._held, self._shard, self._on_bucket = self._next_nodes, None, None
        return pack_presence(self._fired) if 0 in self._fired else self._all_present

    def checksum(self) -> Tensor:
        """Of the gradients of the shard that was ``summed`` last: a number for each bucket, on the device."""
        return torch.stack([self._sums[bucket.index] for bucket in self._buckets])

    @property
    def bucket_numels(self) -> list[int]:
        """Elements of every bucket."""
        return [bucket.numel for bucket in self._buckets]

    # --- what is held ---------------------------------------------------------------------------------------

    @property
    def have(self) -> frozenset[int]:
        """Shards whose gradients are held, complete ones only."""
        return self._have

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The subtrees whose sums are held, ascending."""
        return self._held

    @property
    def coming(self) -> tuple[Node, ...]:
        """The subtrees whose sums are held once the shard that was begun last is complete."""
        return self._next_nodes

    def parts(self, bucket: int) -> list[Tensor]:
        """This rank's subtree sums of a bucket, in the order of ``nodes``: flat, fp32. Handing them out lends them:
        they are not written again until a ``begin_step(recycle=True)``. Not while a shard is in hand."""
        return self._lend(self._buckets[bucket], self._held)

    def keep(self, shards: frozenset[int]) -> frozenset[int]:
        """Forget what is held of all other shards (another member's count). A sum cannot be taken apart, so one that
        holds others too is forgotten whole. Returns the shards held then. Not while a shard is in hand."""
        kept = tuple(n for n in self._held if all(s in shards for s in range(n.start, n.stop)))
        for bucket in self._buckets:
            for node in [n for n in bucket.sums if n not in kept]:
                slab = bucket.sums.pop(node)
                (bucket.retired if slab.lent else bucket.free).append(slab)
        self._held = kept
        self._have = frozenset(s for n in kept for s in range(n.start, n.stop))
        return self._have

    def freeze(self) -> None:
        """An exchange was interrupted: what was handed out may be read by an old communicator at any later time.
        Such buffers are never written again, not in this step nor in any other."""
        for bucket in self._buckets:
            bucket.retired.clear()  # all lent, and of no more use
            for slab in bucket.sums.values():
                slab.frozen = slab.lent

    # --- results --------------------------------------------------------------------------------------------

    def assign(self, results: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Set every parameter's ``.grad`` from the result buckets (flat, fp32, one per bucket, as the layout says)."""
        self.expect(results, present)
        self.fulfil()

    def expect(self, results: Sequence[Tensor], present: Sequence[bool]) -> None:
        """Do all of ``assign`` that can be done before the results are there.

        fp32 gradients are views of ``results``; others are cast into buffers that live as long as the store.
        ``present[i]`` False (no shard had a gradient for parameter ``i``): None, as plain PyTorch would have it.
        """
        same = len(self._results) == len(results) and all(map(_is, self._results, results))
        if not same:
            self._prepare(list(results))
        for parameter, grad, there in zip(self.parameters, self._grads, present, strict=True):
            parameter.grad = grad if there else None

    def fulfil(self) -> None:
        """The results are there."""
        if self._casts[0]:
            torch._foreach_copy_(*self._casts)

    def withdraw(self) -> None:
        """The results did not come: no ``.grad`` is left that promises them."""
        for parameter in self.parameters:
            parameter.grad = None

    def release(self) -> None:
        """Remove the hooks. The store cannot be used any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # --- inside ---------------------------------------------------------------------------------------------

    def _hook(self, bucket: Bucket, position: int) -> Callable[[Tensor], None]:
        index, number = bucket.members[position], bucket.index
        eager = position not in set(bucket.small)
        opened, fired, waiting = self._open, self._fired, self._waiting
        adding, targets = self._adding, self._targets

        def hook(parameter: Tensor) -> None:  # runs for every parameter in every backward: keep it short
            if not opened[0]:
                return
            if fired[index]:
                raise self._twice(index)
            fired[index] = 1
            if eager:
                self._put(index, targets[number][position], parameter, adding[number])
            waiting[number] -= 1
            if not waiting[number]:
                self._complete(bucket)

        return hook

    def _aim(self, bucket: Bucket, merges: Sequence[Merge]) -> None:
        """Choose where the shard's gradients of the bucket go: onto the sibling leaf's sum if that is there and may
        be written (one pass over memory less), else into a slab of their own."""
        sibling = None
        if merges and not self._summed:  # or else it never lies anywhere by itself
            first = merges[0]
            key = first.right if first.left == self._leaf else first.left
            if not bucket.sums[key].lent:
                sibling = bucket.sums.pop(key)
        number = bucket.index
        slab = bucket.take() if sibling is None else sibling
        self._slabs[number], self._targets[number] = slab, slab.views
        self._adding[number] = sibling is not None
        self._waiting[number] = len(bucket.members)

    def _put(self, index: int, target: Tensor, parameter: Tensor, adding: bool) -> None:
        """Copy or add a parameter's gradient, which is there."""
        grad = parameter.grad
        if grad is None or self._spread or grad.requires_grad or grad.layout != torch.strided:
            grad = self._plain(index)
        if adding:
            target.add_(grad)
        else:
            target.copy_(grad)

    def _plain(self, index: int) -> Tensor:
        """The gradient as a dense local tensor without a history. Raises UsageError if it is sparse or gone."""
        parameter, name = self.parameters[index], self.names[index]
        if parameter.grad is None:
            raise UsageError(
                f"the gradient of parameter {name} was taken away during backward (by another hook?); step the "
                "optimizer after the step's batches have ended"
            )
        grad = parameter.grad.detach()  # create_graph=True gives it a history
        if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
            if grad.placements != parameter.placements:
                grad = grad.redistribute(placements=parameter.placements)
            grad = grad.to_local()
        if grad.layout != torch.strided:
            raise UsageError(
                f"parameter {name} has a sparse gradient, whose sums need not be bit-exact; build its module without "
                "sparse=True"
            )
        return grad

    def _put_small(self, bucket: Bucket, slab: Slab) -> None:
        """The small gradients of the bucket, all there, in one call."""
        grads: list[Any] = [parameter.grad for parameter in bucket.small_parameters]
        simple = not self._spread and not torch.is_grad_enabled()  # it is enabled for create_graph=True
        if not simple or any(grad is None or grad.is_sparse for grad in grads):
            grads = [self._plain(bucket.members[position]) for position in bucket.small]
        if self._adding[bucket.index]:
            torch._foreach_add_(slab.small, grads)
        else:
            torch._foreach_copy_(slab.small, grads)

    def _complete(self, bucket: Bucket) -> None:
        """All gradients of the bucket are there: put the small ones in place, merge, hand out."""
        number = bucket.index
        slab = self._slabs[number]
        assert slab is not None and self._shard is not None
        if bucket.small:
            self._put_small(bucket, slab)
        self._store(bucket, slab)

    def _store(self, bucket: Bucket, slab: Slab) -> None:
        leaf, merges = self._leaf, self._merges
        if self._summed:
            self._sums[bucket.index] = lane_sum(slab.flat)
        if self._apart:
            bucket.free.append(slab)
            self._slabs[bucket.index] = None
            return
        if self._adding[bucket.index]:  # the first merge was done by adding
            leaf, merges = merges[0].parent, merges[1:]
        bucket.merge(slab, leaf, merges)
        self._slabs[bucket.index] = None
        if self._on_bucket is not None:
            while self._emitted < len(self._buckets) and self._slabs[self._emitted] is None:
                ready = self._emitted
                self._emitted += 1
                self._on_bucket(ready, self._lend(self._buckets[ready], self._next_nodes))

    def _collect_rest(self, bucket: Bucket) -> None:
        """What hooks did not do: everything without overlap; else small gradients of an incomplete bucket, those
        that came in an earlier micro-batch only or were set by hand, and zeros."""
        slab = self._slabs[bucket.index]
        assert slab is not None
        small = set(bucket.small)
        for position, index in enumerate(bucket.members):
            if self._fired[index] and position not in small:
                continue  # its hook put it in place
            parameter, target, adding = self.parameters[index], slab.views[position], self._adding[bucket.index]
            self._fired[index] = parameter.grad is not None
            if parameter.grad is not None:
                self._put(index, target, parameter, adding)
            elif adding:
                target.add_(0.0)  # not skipped: -0.0 + 0.0 is 0.0
            else:
                target.zero_()
        self._store(bucket, slab)

    def _lend(self, bucket: Bucket, nodes: Sequence[Node]) -> list[Tensor]:
        slabs = [bucket.sums[node] for node in nodes]
        for slab in slabs:
            slab.lent = True
        return [slab.flat for slab in slabs]

    def _prepare(self, results: list[Tensor]) -> None:
        """Views of new result buffers; as a rule once per communicator."""
        grads: list[Tensor | None] = [None] * len(self.parameters)
        casts: tuple[list[Tensor], list[Tensor]] = ([], [])
        for bucket, flat in zip(self._buckets, results, strict=True):
            for index, view in zip(bucket.members, bucket.views(flat), strict=True):
                parameter = self.parameters[index]
                made = view
                if parameter.dtype != torch.float32:
                    if index not in self._cast_buffers:
                        self._cast_buffers[index] = torch.empty_like(view, dtype=parameter.dtype)
                    made = self._cast_buffers[index]
                    casts[0].append(made)
                    casts[1].append(view)
                grads[index] = wrapped(made, parameter)
        self._grads = [grad for grad in grads if grad is not None]
        self._casts = casts
        self._results = results

    def _twice(self, index: int) -> UsageError:
        return UsageError(
            f"the gradient of parameter {self.names[index]} was completed twice in shard {self._shard}: backward() "
            "ran more than once for one batch (or a module is checkpointed with use_reentrant=True). Call backward() "
            "once on the sum of the losses, or say overlap=False to job.protect (or job.register)"
        )


def _buckets(parameters: list[Parameter], names: list[str], layout: Layout) -> list[Bucket]:
    if len(layout.slots) != len(parameters):
        raise ProtocolError(f"a layout of {len(layout.slots)} parameters was given for {len(parameters)}")
    for slot, parameter, name in zip(layout.slots, parameters, names, strict=True):
        if slot.numel != local_numel(parameter):
            raise ProtocolError(f"the layout has {slot.numel} elements for parameter {name}")
    return [Bucket(number, layout, parameters) for number in range(len(layout.buckets))]


def _is(first: object, second: object) -> bool:
    return first is second
