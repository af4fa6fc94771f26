"""The optimizer, and the learning rate as a function of the step alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from planaria.train.config import Config


def make_optimizer(config: Config, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    o = config.optimizer
    kind = torch.optim.AdamW if o.name == "AdamW" else torch.optim.Adam
    how = {"fused": o.implementation == "fused", "foreach": o.implementation == "foreach"}
    return kind(parameters, o.lr, (o.beta1, o.beta2), o.eps, o.weight_decay, **how)


def rate(config: Config, step: int) -> float:
    """The learning rate of ``step``, counted from 0: it rises linearly over the warm-up, stays, and decays over the
    last ``decay_ratio`` of the steps, to ``min_lr_factor`` of itself at their end. With decay_ratio 1 it is the usual
    cosine or linear schedule, with less the warm-up-stable-decay one (Hu et al. 2024, arXiv 2404.06395)."""
    s, total = config.lr_scheduler, config.training.steps
    decay = max(0, min(round(total * s.decay_ratio), total - s.warmup_steps))
    if step < s.warmup_steps:
        return config.optimizer.lr * (step + 1) / s.warmup_steps
    left = (total - step) / decay if decay else 1.0  # share of the decay that is still to come
    if left >= 1:
        return config.optimizer.lr
    shapes = {"linear": left, "sqrt": 1 - math.sqrt(1 - left), "cosine": (1 - math.cos(math.pi * left)) / 2}
    return config.optimizer.lr * (s.min_lr_factor + (1 - s.min_lr_factor) * shapes[s.decay_type])
