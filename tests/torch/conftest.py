from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# No deadline per example: a busy machine is no failure. Tests assert no times anywhere.
settings.register_profile("planaria", deadline=None)
settings.load_profile("planaria")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Bits depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
