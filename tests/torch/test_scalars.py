"""Recorded values become numbers when they are asked for, and are what they were when they were recorded."""

import pytest
import torch

from planaria.torch.scalars import Scalar, recorded


def test_what_is_on_the_host_is_kept_as_it_is() -> None:
    loss = torch.ones(1, requires_grad=True) * 2
    kept = recorded(loss)
    assert not kept.requires_grad
    assert [float(each) for each in (kept, recorded(3), recorded(torch.tensor(0.5)))] == [2.0, 3.0, 0.5]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_what_a_gpu_has_yet_to_compute_is_copied_in_its_turn(dtype: torch.dtype) -> None:
    value = torch.zeros(1, 1, dtype=dtype, device="cuda")
    torch.cuda._sleep(20_000_000)  # cycles: some 10 ms
    value += 3
    kept = recorded(value)
    torch.cuda._sleep(20_000_000)
    value.zero_()
    assert isinstance(kept, Scalar)
    assert float(kept) == 3.0
