"""The trainer of examples/foreign_loop.py, whose steps take as long as the test wants, and which is sharded over the
ranks of a group if it has several. ACTS say what goes wrong in this rank, by words."""

import argparse
import os
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

from planaria.errors import CommunicatorError
from planaria.exchange import tree_exchange

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from foreign_loop import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("form", choices=["state", "file"])
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--pause", type=float, default=0.0, help="seconds in every shard")
parser.add_argument("--hold", type=Path, help="until this file exists, every shard of the second half takes long")
parser.add_argument("--odd", default="", help="what goes wrong, in group 1 only")
args = parser.parse_args()
acts = os.environ.get("ACTS", "").split()
if "miss-step-3" in acts:
    # The last bytes of this exchange do not reach this rank, though its peers had everything.
    finish, calls = tree_exchange.TreeExchange.finish, []

    def missing(self, interrupted=lambda: False):
        result = finish(self, interrupted)
        calls.append(result)
        if len(calls) == 4:
            raise CommunicatorError("the connection was closed by the peer")
        return result

    tree_exchange.TreeExchange.finish = missing


def note(words: str) -> None:
    if path := os.environ.get("NOTES"):
        with Path(path).open("a") as file:
            file.write(f"{words}\n")


@contextmanager
def swallowing():
    """As a script's own handlers do that go on without whatever raised an error."""
    try:
        yield
    except Exception as error:
        print(f"went on without it: {error!r}", flush=True)


class Watched(Trainer):
    def __init__(self) -> None:
        super().__init__(args.steps, micro_batches=6, seed=3)
        self.odd = args.odd if self.job.group == 1 else ""
        if args.form == "state":
            self.save, self.load = self.state_dict, self.load_state_dict
        if self.job.world_size > 1:
            fully_shard(self.model, mesh=self.job.mesh)
            self.model.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it sums
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, args.steps)
        self.optimizer.register_step_post_hook(lambda *_: note(f"step {self.step}"))

    def train(self) -> None:
        if "swallow" not in acts:
            return super().train()
        self.job.register(save=self.save, load=self.load, model=self.model, steps=self.steps)
        while self.step < self.steps:
            with self.job.step() as step, swallowing():
                for micro in step.shards():
                    loss = self.loss(self.step * self.micro_batches + micro)
                    loss.backward()
                    step.record(loss=loss)
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
                self.step, self.best = self.step + 1, min(self.best, step.metrics["loss"])
        return None

    def load_state_dict(self, state):
        if self.odd == "load":
            raise KeyError("optimizer.0")
        while self.odd == "wait" and not args.hold.exists():
            time.sleep(0.01)
        super().load_state_dict(state)
        note(f"load {self.step}")

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        index, count = self.job.part
        x, y = (whole.chunk(count)[index] for whole in super().batch(number))
        return x, y

    def loss(self, number: int) -> torch.Tensor:
        loss = super().loss(number)
        time.sleep(args.pause)
        step = number // self.micro_batches
        if (gate := os.environ.get("GATE")) and step == int(os.environ["AT"]):
            Path(f"{gate}-{self.job.group}").touch()
            while not Path(gate).exists():
                time.sleep(0.01)
        late = min(step - args.steps // 2, 30)
        held = time.monotonic() + 0.3 * 1.1**late  # slower and slower: that is no hang
        while args.hold and 2 * step >= args.steps and time.monotonic() < held and not args.hold.exists():
            time.sleep(0.01)
        return loss


Watched().train()
