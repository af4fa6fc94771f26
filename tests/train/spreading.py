"""A few steps of the debug model by one group, without Planaria between: what its ranks see must not depend on how the
model is spread over them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.data import default_collate

from planaria.torch.clipping import clip_grad_norm_
from planaria.train.config import Config
from planaria.train.data import Mock
from planaria.train.network import Network
from planaria.train.optimizer import make_optimizer
from planaria.train.parallel import along
from planaria.train.shapes import SHAPES

STEPS = 2
CONFIG = """
[data]
mock = true
[training]
seq_len = 32
local_batch_size = 1
global_batch_size = 4
[activation_checkpoint]
mode = "{recompute}"
"""


def steps_of(config: Config, mesh: DeviceMesh | None, tied: bool = False) -> dict[str, Any]:
    """What this rank sees: hashes of the whole starting weights by name, and of every step the loss, the norm of the
    gradient, and the loss on other samples afterwards."""
    ranks = 1 if mesh is None else mesh.size()
    shape = replace(SHAPES["debug"], vocab=320, tied=tied)
    network = Network(config, shape, mesh, torch.device("cpu"), config.micro_batches(1, ranks))
    start = weights(network.module)
    optimizer = make_optimizer(config, network.module.parameters())
    samples, size = Mock(257, config.training.seq_len), network.batch_size * network.data_ranks

    def batches(step: int) -> Iterator[list[Tensor]]:
        """This rank's part of the one shard of ``step``: the same samples in every layout."""
        for batch in range(network.batches):
            first = (step * network.batches + batch) * size + network.data_rank * network.batch_size
            yield default_collate([samples[first + index] for index in range(network.batch_size)])

    seen = []
    for step in range(STEPS):
        loss = network.mean([network.train(x, y) for x, y in batches(step)])
        norm = clip_grad_norm_(network.module.parameters(), config.training.max_norm, stages=along(mesh, "pp")).item()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss, norm, network.mean([network.evaluate(x, y) for x, y in batches(100)])))
    return {"start": start, "steps": seen}


def weights(module: nn.Module) -> dict[str, str]:
    """Hashes of all whole parameters by their name in the whole model."""
    found = {}
    for name, parameter in module.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if isinstance(module, nn.ModuleList):
            name = name.partition(".")[2]
        found[name] = xxhash.xxh3_64_hexdigest(whole.detach().float().numpy().tobytes())
    return found
