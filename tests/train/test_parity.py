"""The trainer computes what a plain loop computes that knows nothing of it: the same losses, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import planaria.torch as pt
from planaria.train.config import load
from planaria.train.data import samples_of
from planaria.train.model import Llama, initialise
from planaria.train.optimizer import rate
from planaria.train.shapes import SHAPES
from planaria.train.tokens import Bytes
from tests.train.harness import lines, train, write_config


def plain(config_path: Path, out: Path, shards: int, micro_batches: int) -> list[tuple[float, float]]:
    """(loss, norm of the gradient) of every step, in plain PyTorch: the gradient of a step is the mean over the shards,
    summed in the order of the tree, that of a shard the mean over its micro-batches."""
    config = load(config_path, [f"--job.dump_folder={out}"])
    model = Llama(shape := replace(SHAPES["debug"], vocab=320))
    initialise(model, shape, config.training.seed)
    samples, _, _ = samples_of(config, Bytes())
    data = pt.ShardedDataset(samples, config.training.local_batch_size, micro_batches=micro_batches)
    data.bind(shards, config.training.seed)
    o = config.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), o.lr, (o.beta1, o.beta2), o.eps, o.weight_decay, fused=True)
    seen = []
    for step in range(config.training.steps):
        losses, sums = [], []
        for shard in range(shards):
            optimizer.zero_grad()
            means = []
            for x, y in data.batches(step, shard):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                (loss / micro_batches).backward()
                means.append(loss.item())
            losses.append(sum(means) / micro_batches)
            sums.append([p.grad.clone() for p in model.parameters()])
        while len(sums) > 1:
            sums = [[a + b for a, b in zip(*pair, strict=True)] for pair in zip(sums[::2], sums[1::2], strict=True)]
        for parameter, total in zip(model.parameters(), sums[0], strict=True):
            parameter.grad = total / shards
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(config, step)
        optimizer.step()
        seen.append((sum(losses) / shards, norm.item()))
    return seen


@pytest.mark.parametrize(("shards", "micro_batches"), [(1, 1), (4, 1), (2, 2)])
def test_losses_are_those_of_a_plain_loop(tmp_path: Path, shards: int, micro_batches: int) -> None:
    torch.set_num_threads(1)
    config, out = write_config(tmp_path), tmp_path / "out"
    batch = shards * micro_batches * 2
    done = train(config, out, f"--fault_tolerance.shards={shards}", f"--training.global_batch_size={batch}")
    assert done.returncode == 0, done.stderr
    ours = [(line["loss"], line["grad_norm"]) for line in lines(out)]
    assert ours == plain(config, tmp_path / "plain", shards, micro_batches)
    assert len(ours) == 6 and ours[-1][0] < ours[0][0]
