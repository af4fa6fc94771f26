"""Imported into processes that train: after some batches every batch takes long, until a test says that all is done
that it wants to do to the run. However slow a machine is, and however quick a step, the run does not end before.

TRAIN_HOLD: ``batches:path``, of the file that ends it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor

from planaria.train.network import Network

SECONDS = 1.0  # far below what is taken for a hang

_after, _, _path = os.environ["TRAIN_HOLD"].partition(":")
_release, _train, _batches = Path(_path), Network.train, 0


def _slowly(network: Network, tokens: Tensor, labels: Tensor) -> Tensor | None:
    global _batches
    _batches += 1
    until = time.monotonic() + SECONDS
    while _batches > int(_after) and time.monotonic() < until and not _release.exists():
        time.sleep(0.01)
    return _train(network, tokens, labels)


Network.train = _slowly  # type: ignore[method-assign]
