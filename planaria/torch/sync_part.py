"""The state of a low-communication job: what all groups share, and what each has of its own.

Shared: the parameters as of the last exchange, the outer optimizer's state, what else the modules hold, the options of
the inner optimizers (learning rates) and the record of who took part. It is what is healed, compared and saved.
Local: the modules' living parameters and the inner optimizers' state. It does not travel: a group that takes the shared
state *begins anew*, with the shared parameters and a fresh inner optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from planaria.errors import ProtocolError, UsageError
from planaria.torch import plain
from planaria.torch.fragments import Fragments, cut
from planaria.torch.low_comm import LowCommunication
from planaria.torch.optimizers import OptimizerPart
from planaria.torch.parts import ModulePart, Part, Received, TensorSpec, live, wrapped
from planaria.wire.membership import Membership


class SharedModule(ModulePart):
    """A module whose ``parameters`` are the shared ones; ``local`` are those that the module lives with. Parameters
    that are not trained, and buffers, are the same."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        self.local = {key: p for key, p in self.parameters.items() if p.requires_grad}
        self.parameters = {key: _shared(p) if p.requires_grad else p for key, p in self.parameters.items()}


class InnerPart(OptimizerPart):
    """Of an inner optimizer: its options, without its state, which is fresh wherever they are put in place."""

    def __init__(self, name: str, optimizer: Optimizer, pristine: dict[int, Any], attributes: dict[str, Any]) -> None:
        super().__init__(name, optimizer, {})
        self._pristine, self._attributes = pristine, attributes
        self.steps = 0  # since they were last counted from 0
        self._hook = optimizer.register_step_post_hook(self._stepped)
        self.mark()

    def _stepped(self, *_: Any) -> None:
        self.steps += 1

    def mark(self) -> None:
        # A rate may be a tensor, which a scheduler writes in place.
        kept = [{key: v.clone() if isinstance(v, Tensor) else v for key, v in g.items()} for g in self._groups()]
        self._marked = kept

    def _pack(self, hyperparameters: list[dict[str, Any]], tensors: list[Tensor]) -> Any:
        path = f"{self.name}.param_groups"
        return {"groups": [plain.pack(g, tensors, f"{path}[{i}]") for i, g in enumerate(hyperparameters)], "state": []}

    def renew(self, options: bool) -> None:
        """A fresh optimizer, with the options of the last mark if so wanted."""
        if options:
            for group, marked in zip(self._optimizer.param_groups, self._marked, strict=True):
                for key, value in marked.items():
                    if isinstance(value, Tensor) and isinstance(group[key], Tensor):
                        group[key].copy_(value)
                    elif key != "params":
                        group[key] = value
        self._optimizer.state.clear()
        vars(self._optimizer).update(copy.deepcopy(self._attributes))
        if self._pristine:
            options_now = self._optimizer.state_dict()["param_groups"]
            self._optimizer.load_state_dict({"state": copy.deepcopy(self._pristine), "param_groups": options_now})

    def release(self) -> None:
        self._hook.remove()


class SyncPart(Part):
    """One per start of the steps. Raises UsageError for fragments or an outer optimizer that cannot be."""

    def __init__(self, name: str, sync: LowCommunication) -> None:
        super().__init__(name, type(sync).__name__)
        self.sync = sync
        many = len(sync.models) > 1
        self.modules = [SharedModule(f"{name}[{i}]" if many else name, each) for i, each in enumerate(sync.models)]
        pairs: dict[int, tuple[str, nn.Parameter, nn.Parameter]] = {}
        for module in self.modules:
            for key, local in module.local.items():  # tied ones once
                shared = pairs.setdefault(id(local), (f"{module.name}.{key}", module.parameters[key], local))[1]
                module.parameters[key] = shared
        self._names = [each for each, _, _ in pairs.values()]
        self._pairs = [(shared, local) for _, shared, local in pairs.values()]
        self.fragments: Fragments = cut(self.trained, sync.fragments)
        shared_ones = [shared for shared, _ in self._pairs]
        self._optimizer = _made(sync, shared_ones)
        self._outer = OptimizerPart(f"{name}.outer", self._optimizer, self._names_by_id())
        self._inner = [
            InnerPart(f"{name}.inner[{i}]", *each)
            for i, each in enumerate(zip(sync.inner, sync.pristine, sync.attributes, strict=True))
        ]
        self.membership = Membership()
        self.origin = ""  # digest of the shared state in which the job began; travels with the membership
        self.first = ""  # likewise: after its first sync
        self.steps = sync.steps  # inner steps of the shard in hand
        self.tokens = 0.0  # of what was not exchanged yet, as far as the script counts them
        self.kept: tuple[int, int] | None = None  # the step and shard that this group's own state is the beginning of
        self._round = 0  # of the shard in hand
        if sync.part is not None:
            sync.part.release()
        sync.part = self

    # --- what it is ------------------------------------------------------------------------------------------

    @property
    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that the inner optimizer steps."""
        return [(name, local) for name, (_, local) in zip(self._names, self._pairs, strict=True)]

    def shared_of(self, fragment: int) -> list[tuple[str, nn.Parameter]]:
        return [(self._names[index], self._pairs[index][0]) for index in self.fragments[fragment]]

    @property
    def method(self) -> str:
        """What must be alike on all groups beside the model, for people and to be compared."""
        sync = self.sync
        inner = ", ".join(type(each).__name__ for each in sync.inner)
        outer = "; ".join(map(_said, self._optimizer.param_groups))
        cut = f" ({xxhash.xxh3_64_hexdigest(repr(self.fragments).encode())[:8]})" if len(self.fragments) > 1 else ""
        return (
            f"{self.kind} every={sync.every} fragments={len(self.fragments)}{cut} delay={sync.delay} mix={sync.mix} "
            f"exact={sync.exact} paced={sync.paced} inner={inner} outer={type(self._optimizer).__name__}({outer})"
        )

    @property
    def inner_steps(self) -> list[int]:
        """That each inner optimizer has made of the shard in hand."""
        return [inner.steps for inner in self._inner]

    @property
    def inner_step(self) -> int:
        made, whole = max(self.inner_steps), self.sync.steps
        # Who makes fewer steps in a round goes through its numbers in larger strides: all end at the same one.
        return self._round * whole + (whole if made >= self.steps else (made + 1) * whole // self.steps - 1)

    def _names_by_id(self) -> dict[int, str]:
        return {id(shared): name for name, (shared, _) in zip(self._names, self._pairs, strict=True)}

    # --- a shard ---------------------------------------------------------------------------------------------

    def begin(self, step: int, steps: int) -> None:
        """The inner steps of a shard of round ``step`` begin, ``steps`` of them."""
        self._round, self.steps = step, steps
        for inner in self._inner:
            inner.steps = 0
        for _, local in self._pairs:
            local.grad = None

    def check_steps(self, steps: int, batches: int, where: str) -> None:
        """After ``steps`` steps' batches. A gradient scaler may leave some out, but not all. Raises UsageError."""
        for inner in self._inner:
            if not 0 < inner.steps <= steps:
                each = "each batch" if batches == 1 else f"every {batches} batches"
                raise UsageError(
                    f"{where}: the inner optimizer has made {inner.steps} steps where {steps} are due; call its step "
                    f"once for {each}, in the loop over step.batches"
                )

    @torch.no_grad()
    def renew(self, options: bool = True) -> None:
        """Begin anew: with the shared parameters and fresh inner optimizers, with their options of the last mark."""
        self.kept, self.tokens = None, 0.0
        self._reshard()
        for shared, local in self._pairs:
            live(local).copy_(live(shared))
        for inner in self._inner:
            inner.renew(options)

    @torch.no_grad()
    def changes(self, fragment: int) -> list[Tensor]:
        """This group's pseudo-gradients: the shared parameters minus its own."""
        self._reshard()
        # Of what they began with: where they are of a lower precision those are the shared ones rounded, and what is
        # lost by that is no change. Never -0.0: what is left out then adds the same bits as a zero.
        return [
            (live(shared).to(local.dtype).to(shared.dtype) - live(local)).add_(0.0)
            for shared, local in self._of(fragment)
        ]

    def put(self, fragment: int, changes: Sequence[Tensor], weight: float) -> None:
        """As the gradients of the shared parameters, times their weight."""
        for (shared, _), change in zip(self._of(fragment), changes, strict=True):
            shared.grad = wrapped(change if weight == 1.0 else change.mul_(weight).add_(0.0), shared)

    def clear(self, fragment: int) -> None:
        for shared, _ in self._of(fragment):
            shared.grad = None

    # --- after the exchange ----------------------------------------------------------------------------------

    @torch.no_grad()
    def outer_step(self, fragment: int, total: float, keeps: bool) -> None:
        """Step the outer optimizer, the gradients of the shared parameters being sums of ``total`` weight. ``keeps``:
        this group goes on with its own state, else it begins anew."""
        chosen = set(self.fragments[fragment])
        for index, (shared, _) in enumerate(self._pairs):
            if index not in chosen:
                shared.grad = None  # a body that was void may have left some: momentum would move them
        for shared, _ in self._of(fragment):
            assert shared.grad is not None
            shared.grad = wrapped(live(shared.grad) / total, shared)  # not in place: it is the exchange's
        with torch.enable_grad():
            self._optimizer.step()
        self.clear(fragment)
        if not keeps:
            self.renew(options=False)
            return
        self._reshard()
        for shared, local in self._of(fragment):
            if self.sync.mix:
                live(local).copy_(torch.lerp(live(shared), live(local).to(shared.dtype), self.sync.mix))
            else:
                live(local).copy_(live(shared))

    @torch.no_grad()
    def settle(self) -> None:
        """The end: the shared parameters are the result."""
        self._reshard()
        for shared, local in self._pairs:
            live(local).copy_(live(shared))
        self.release()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        with torch.no_grad():
            self._reshard()
            kept = [live(local).clone() for _, local in self._pairs]
            for shared, local in self._pairs:
                live(local).copy_(live(shared))
        try:
            yield
        finally:
            with torch.no_grad():
                self._reshard()
                for (_, local), own in zip(self._pairs, kept, strict=True):
                    live(local).copy_(own)

    def release(self) -> None:
        for inner in self._inner:
            inner.release()

    def _of(self, fragment: int) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return [self._pairs[index] for index in self.fragments[fragment]]

    def _reshard(self) -> None:
        for module in self.modules:
            module.reshard()

    # --- as a part of the protected state --------------------------------------------------------------------

    def pack(self, tensors: list[Tensor]) -> Any:
        return self._pack(tensors, lambda inner: inner.pack(tensors))

    def moments(self) -> dict[str, Tensor]:
        # Of the outer optimizer: it is stepped with the same sums everywhere. What inner ones keep is each group's own.
        return self._outer.moments()

    def mark(self) -> None:
        for inner in self._inner:
            inner.mark()

    def pack_marked(self, tensors: list[Tensor]) -> Any:
        return self._pack(tensors, lambda inner: inner.pack_marked(tensors))

    def pack_compared(self, tensors: list[Tensor]) -> Any:
        # How a result came about is no part of it.
        return {**self.pack(tensors), "membership": None, "origin": None, "first": None}

    def _pack(self, tensors: list[Tensor], pack_inner: Callable[[InnerPart], Any]) -> Any:
        return {
            "modules": [module.pack(tensors) for module in self.modules],
            "outer": self._outer.pack(tensors),
            "inner": [pack_inner(inner) for inner in self._inner],
            "membership": copy.deepcopy(self.membership.changes),
            "origin": self.origin,
            "first": self.first,
        }

    def _each(self, body: Any) -> list[tuple[Part, Any]]:
        """The parts that this one consists of, with their bodies. Raises ProtocolError."""
        try:
            parts: list[Part] = [*self.modules, self._outer, *self._inner]
            bodies = [*body["modules"], body["outer"], *body["inner"]]
            if any(len(line) != 5 for line in body["membership"]) or not isinstance(
                body["origin"] + body["first"], str
            ):
                raise ValueError
            return list(zip(parts, bodies, strict=True))
        except (KeyError, TypeError, ValueError):
            raise ProtocolError(f"a peer's state of {self.name} is malformed") from None

    def places(self, body: Any) -> Iterator[tuple[int, str]]:
        return (place for part, inner in self._each(body) for place in part.places(inner))

    def models(self, body: Any) -> dict[int, Tensor]:
        return {index: model for part, inner in self._each(body) for index, model in part.models(inner).items()}

    def check(self, body: Any, sources: Sequence[Tensor]) -> list[str]:
        return [line for part, inner in self._each(body) for line in part.check(inner, sources)]

    def apply(self, body: Any, received: Received) -> None:
        for part, inner in self._each(body):
            part.apply(inner, received)
        self.membership.changes = [list(line) for line in body["membership"]]
        self.origin, self.first = body["origin"], body["first"]
        self.renew(options=False)

    # --- what syncs make of it: the shared parameters and the outer optimizer's state -------------------------

    def pack_synced(self, tensors: list[Tensor]) -> Any:
        shared = []
        for name, (parameter, _) in zip(self._names, self._pairs, strict=True):
            shared.append([name, len(tensors)])
            tensors.append(parameter)
        return {"shared": shared, "outer": self._outer.pack(tensors), "origin": self.origin}

    def apply_synced(self, body: Any, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
        """Put in place what ``pack_synced`` gave, in a process that runs the same script. Raises UsageError, with
        nothing written, if it does not fit."""
        theirs = {name: tensors[index] for name, index in body["shared"]}
        problems = self._outer.check(body["outer"], tensors)
        if theirs.keys() != set(self._names) or problems:
            raise UsageError(f"a copy of {self.name} does not fit: {'; '.join(problems) or 'other parameters'}")
        for name, (shared, _) in zip(self._names, self._pairs, strict=True):
            live(shared).copy_(theirs[name])
        self._outer.apply(body["outer"], Received(tensors, specs, self._outer.models(body["outer"])))

    def synced_places(self, body: Any) -> dict[int, str]:
        """By index, the names of those tensors in a packed body that syncs alone change."""
        of_modules = [
            (index, f"{module.name}.{key}")
            for module, packed in zip(self.modules, body["modules"], strict=True)
            for key, index in packed
            if key in module.local
        ]
        return dict([*of_modules, *self._outer.state_places(body["outer"])])

    @property
    def copies(self) -> int:
        """Numbers that syncs change for each number of a parameter: 2 for an outer optimizer with momentum."""
        state = self._optimizer.state
        each = [[v for v in state[p].values() if isinstance(v, Tensor) and v.shape == p.shape] for p in state]
        return 1 + max(map(len, each), default=0)

    def outer_options(self) -> Any:
        """Of the outer optimizer, packed; None if they are not plain data alone."""
        tensors: list[Tensor] = []
        packed = plain.pack([{**g, "params": 0} for g in self._optimizer.param_groups], tensors, self.name)
        return None if tensors else packed

    def set_outer_options(self, packed: Any) -> None:
        """Raises ProtocolError if they are none of this optimizer."""
        theirs, groups = plain.unpack(packed, ()), self._optimizer.param_groups
        if type(theirs) is not list or [set(each) for each in theirs if type(each) is dict] != [*map(set, groups)]:
            raise ProtocolError(f"a peer tells of other options of {self.name}'s outer optimizer")
        for group, each in zip(groups, theirs, strict=True):
            group.update({key: value for key, value in each.items() if key != "params"})

    def describe(self) -> list[str]:
        return [line for module in self.modules for line in module.describe()]

    def devices(self) -> Iterator[torch.device]:
        return (device for module in self.modules for device in module.devices())


def _shared(parameter: nn.Parameter) -> nn.Parameter:
    """A copy that adds up many small changes: at least fp32."""
    made = parameter.detach().clone()
    return nn.Parameter(made.float() if made.element_size() < 4 else made)


def _said(group: dict[str, Any]) -> str:
    """A parameter group's options, and what it holds, for people and to be compared."""
    plainly = {key: v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for key, v in group.items()}
    known = {key: v for key, v in plainly.items() if isinstance(v, int | float | str | tuple) and v}
    return ", ".join([f"{len(group['params'])} tensors", *(f"{key}={v}" for key, v in sorted(known.items()))])


def _made(sync: LowCommunication, parameters: list[nn.Parameter]) -> Optimizer:
    made = sync.outer(parameters)
    if not isinstance(made, Optimizer):
        raise UsageError(f"outer made a {type(made).__name__}; it must make an optimizer of the parameters it is given")
    given = {id(each) for group in made.param_groups for each in group["params"]}
    if given != {id(each) for each in parameters}:
        raise UsageError("outer must make an optimizer of exactly the parameters that it is given")
    return made
