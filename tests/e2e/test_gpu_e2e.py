"""The promise on GPUs: one rank per group, each on a GPU of its own, with deterministic kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.harness import Run

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
SCRIPT = Path(__file__).parent / "scripts" / "parallel.py"


@pytest.mark.parametrize("layout", ["plain", "fsdp"])
def test_a_group_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    monkeypatch.setenv("PLANARIA_EXACT", "bits")
    words = (layout, "--device", "cuda")
    with Run(tmp_path / "quiet", *words, groups=1, script=SCRIPT) as run:
        assert run.end() == 0, run.log()
        quiet = run.digests()
    with Run(tmp_path / "run", *words, "--pause", "0.02", groups=2, script=SCRIPT) as run:
        for group in (1, 0):
            run.settled(2)
            run.step(5)
            run.signal(group)
            run.incarnation(group, 1)
        assert run.end() == 0, run.log()
        assert run.digests() == quiet, run.log()
