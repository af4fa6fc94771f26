"""A trainer as frameworks have one: its own loop, data and checkpoint functions. Three edits make it unkillable.

planaria run --groups 4 examples/foreign_loop.py    four groups; one that dies is started again
python examples/foreign_loop.py                     alone: one group, the same weights at the end
"""

from __future__ import annotations

from typing import Any, BinaryIO

import torch
import torch.nn.functional as F

import planaria.torch as pt


class Trainer:
    def __init__(self, steps: int, micro_batches: int = 8, seed: int = 0) -> None:
        self.job = pt.init(shards=micro_batches, seed=seed)  # edit 1; it was: torch.manual_seed(seed)
        self.steps, self.micro_batches, self.step, self.best = steps, micro_batches, 0, float("inf")
        self.x = torch.randn(4096, 16)
        self.y = (self.x.sin().sum(dim=1) > 0).long()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)

    def state_dict(self) -> dict[str, Any]:
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        counts = {"step": self.step, "best": self.best, "random": torch.get_rng_state()}
        return {name: thing.state_dict() for name, thing in objects.items()} | counts

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step, self.best = state["step"], state["best"]
        torch.set_rng_state(state["random"])

    def save(self, file: BinaryIO) -> None:
        torch.save(self.state_dict(), file)

    def load(self, file: BinaryIO) -> None:
        self.load_state_dict(torch.load(file, weights_only=True))

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Micro-batch ``number`` of the run."""
        rows = torch.arange(32 * number, 32 * number + 32) % len(self.x)
        return self.x[rows], self.y[rows]

    def loss(self, number: int) -> torch.Tensor:
        x, y = self.batch(number)
        return F.cross_entropy(self.model(x), y)

    def train(self) -> None:
        # Edit 2; it was: if os.path.exists(path): self.load(open(path, "rb")). The functions that return and take a
        # state do as well: save=self.state_dict, load=self.load_state_dict.
        self.job.register(save=self.save, load=self.load, model=self.model, steps=self.steps)
        while self.step < self.steps:
            with self.job.step() as step:  # edit 3, and the loop over micro-batches is one over this group's
                for micro in step.shards():  # it was: for micro in range(self.micro_batches):
                    loss = self.loss(self.step * self.micro_batches + micro)
                    loss.backward()  # it was: (loss / self.micro_batches).backward()
                    step.record(loss=loss)  # and: total += loss / self.micro_batches
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.step, self.best = self.step + 1, min(self.best, step.metrics["loss"])


if __name__ == "__main__":
    trainer = Trainer(steps=128)
    trainer.train()
    trainer.model.eval()
    print(f"right: {(trainer.model(trainer.x).argmax(dim=1) == trainer.y).float().mean():.1%}")
