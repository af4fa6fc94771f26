"""A communicator of a device that cannot be formed: whoever waits for it hears of that."""

from __future__ import annotations

import pytest
import torch

from planaria.errors import CommunicatorError
from planaria.exchange import nccl


def test_what_cuda_says_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "set_device", fails)
    formation = nccl._Formation(torch.device("cuda", 0), b"", 0, 2, lambda life: None)
    assert formation.over.wait(10.0)
    with pytest.raises(CommunicatorError, match="2 members failed: CUDA error: an illegal memory access"):
        formation.taken()
