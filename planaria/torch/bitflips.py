"""Flips single bits in this rank's memory when ``planaria chaos --kinds bitflip`` says so.

Loaded only where PLANARIA_CHAOS is in the environment. Nobody outside could do it: memory of a GPU is reached from its
own process alone, and the moment matters. An order is a file in the rank's directory; the script's own passes look for
it, through hooks of torch. Versions of tensors do not change, as they do not when memory fails.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planaria.core.bitflips import DONE, GRADIENT, ORDER, PARAMETER
from planaria.torch.buckets import local
from planaria.torch.parts import wire_form
from planaria.torch.state import ProtectedState


class BitFlips:
    """Registers its hooks on the modules of ``state``; must be there before gradients are collected. ``step`` tells
    which one is being worked on."""

    def __init__(self, directory: Path, state: ProtectedState, step: Callable[[], int]) -> None:
        self._directory = directory
        self._state = state
        self._step = step
        self._parameters = [(name, p) for name, p in state.parameters() if p.requires_grad]
        # With low communication the parameters that groups share get no gradients by a backward pass.
        self._trained = self._parameters if state.sync is None else state.sync.trained
        self._armed: tuple[str, int] | None = None  # the parameter whose next gradient is hit, and the number
        for module in state.modules:
            module.register_forward_pre_hook(self._before_forward)
        for name, parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._after_gradient(name))  # type: ignore[no-untyped-call]

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        try:
            order = (self._directory / ORDER).read_text()
            (self._directory / ORDER).unlink()
        except FileNotFoundError:
            return
        target, number = order.split()[0], int(order.split()[1])
        draw = random.Random(number)
        if target == GRADIENT:
            self._armed = draw.choice(self._trained)[0], number
            return
        whole = self._state.checked(whole=True)
        parameters = {name: local(p.detach()) for name, p in self._parameters}
        moments = {name: t for name, t in whole.items() if name not in self._state.checked(whole=False)}
        self._flip(target, (parameters if target == PARAMETER else moments) or parameters, draw, number)

    def _after_gradient(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if self._armed is not None and self._armed[0] == name and parameter.grad is not None:
                number, self._armed = self._armed[1], None
                self._flip(GRADIENT, {name: local(parameter.grad.detach())}, random.Random(number), number)

        return hook

    def _flip(self, target: str, among: Mapping[str, Tensor], draw: random.Random, number: int) -> None:
        name, tensor = draw.choice([(name, each) for name, each in among.items() if each.numel()])
        data = wire_form(tensor).reshape(-1).view(torch.uint8)
        place, bit = draw.randrange(data.numel()), draw.randrange(8)
        byte = data[place : place + 1]
        byte.copy_(byte ^ 1 << bit)
        facts = {"target": target, "tensor": name, "byte": place, "bit": bit, "step": self._step(), "number": number}
        facts["at_ns"] = time.monotonic_ns()
        with (self._directory / DONE).open("a") as file:
            file.write(json.dumps(facts) + "\n")
