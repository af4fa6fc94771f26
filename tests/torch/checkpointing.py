"""A state with one of everything, and the checkpoints of a job of one group that holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from planaria.core.messages import Saved
from planaria.rank.durable import Schedule
from planaria.rank.promise import BITS
from planaria.rank.settings import read_settings
from planaria.torch.checkpoints import Checkpoints
from planaria.torch.fingerprint import fingerprint
from planaria.torch.state import ProtectedState
from planaria.torch.world import GroupWorld


class Ledger:
    """An object with a state of plain data and tensors."""

    def __init__(self, seed: int) -> None:
        self.rows: dict[Any, Any] = {"seen": (seed, float("nan")), 3: [torch.arange(seed), torch.tensor(True)]}

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]


class Thing:
    """What a script would make; ``seed`` changes every value in it."""

    def __init__(self, seed: int = 0, width: int = 5, steps: int = 3, kind: Any = torch.optim.AdamW) -> None:
        torch.manual_seed(seed)
        conv = nn.Conv2d(2, width, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model = nn.Sequential(conv, nn.Flatten(), nn.Linear(width * 4, 2), nn.BatchNorm1d(2))
        self.model[2].to(torch.bfloat16)
        self.model.register_buffer("empty", torch.zeros(0, 3))
        self.optimizer = kind(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.ledger = Ledger(seed)
        self.facts: dict[str, Any] = {"seed": seed}
        for _ in range(steps):
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter)
            self.optimizer.step()
            self.scheduler.step()
        self.state = ProtectedState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            ledger=self.ledger,
            facts=self.facts,
        )

    def checkpoints(
        self, directory: Path, every: int = 10, keep: int = 3, seed: int = 0, shards: int = 4, total: int = 1000
    ) -> Desk:
        settings = read_settings(shards, seed, None, None, {"PLANARIA_JOB": "test"})
        told: list[Saved] = []
        prints = fingerprint(self.state, settings, BITS)
        schedule, world = Schedule(directory, every, keep), GroupWorld(0, 1, torch.device("cpu"), None, "here")
        tell, beat = told.append, lambda: None
        made = Checkpoints(
            schedule, settings, world, self.state, total, lambda: settings.born, world.gather, tell, beat
        )
        made.prints = prints
        return Desk(made, told)


class Desk:
    def __init__(self, checkpoints: Checkpoints, told: list[Saved]) -> None:
        self.checkpoints, self.told = checkpoints, told

    def resume(self) -> int:
        return self.checkpoints.resume()

    def save(self, *steps: int) -> list[str]:
        """Save after these steps, one after the other. What went wrong with the last."""
        for step in steps:
            self.checkpoints.committed(step, True)
            self.checkpoints.wait()
        return [saved.trouble for saved in self.told[-1:] if saved.trouble]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())
