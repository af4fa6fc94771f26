"""Every way of spreading the model over the ranks of a group gives what one rank alone gives: the same weights at the
start, bit for bit, and the same losses, up to the rounding of sums that are taken in another order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.engines.local import hold_port
from planaria.train.config import load
from tests.train.harness import PATIENCE, environment
from tests.train.spreading import CONFIG, steps_of

SCRIPT = Path(__file__).parent / "scripts" / "spread_rank.py"
PIPE, TENSOR, CONTEXT = (f"--parallelism.{name}_parallel_degree=2" for name in ("pipeline", "tensor", "context"))
INTERLEAVED = "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
GPIPE = "--parallelism.pipeline_parallel_schedule=GPipe"
TIED = True
CASES: dict[int, list[tuple[dict[str, int], bool, list[str]]]] = {
    2: [
        ({"fsdp": 2}, False, []),
        ({"fsdp": 2}, TIED, []),
        ({"tp": 2}, False, [TENSOR]),
        ({"pp": 2}, False, [PIPE]),
        ({"pp": 2}, False, [PIPE, GPIPE]),
        ({"pp": 2}, False, [PIPE, INTERLEAVED]),
        ({"cp": 2}, False, [CONTEXT]),
    ],
    4: [
        ({"fsdp": 2, "tp": 2}, False, [TENSOR]),
        ({"fsdp": 2, "tp": 2}, TIED, [TENSOR]),
        ({"fsdp": 2, "cp": 2}, False, [CONTEXT]),
        ({"pp": 2, "fsdp": 2}, False, [PIPE]),
        ({"pp": 2, "tp": 2}, False, [PIPE, TENSOR]),
        # Compiled without generating code, which takes a minute: what is traced is the same.
        ({"cp": 2, "tp": 2}, False, [CONTEXT, TENSOR, "--compile.enable", "--compile.backend=aot_eager"]),
    ],
}
# Sums in another order differ in their last bits (1e-7), and Adam's first step makes more of it: it moves a weight by
# the whole learning rate whichever sign a gradient near zero has.
CLOSE = 1e-5


def config_of(directory: Path, recompute: str = "none") -> Path:
    path = directory / "config.toml"
    path.write_text(CONFIG.format(recompute=recompute))
    return path


def alone(directory: Path, *words: str, recompute: str = "none", tied: bool = False) -> dict[str, Any]:
    torch.set_num_threads(1)
    return steps_of(load(config_of(directory, recompute), words), None, tied)


def group(directory: Path, ranks: int, cases: list[Any], recompute: str = "none") -> list[list[dict[str, Any]]]:
    """What each rank saw in each case, by rank."""
    config, listed, out = config_of(directory, recompute), directory / "cases.json", directory / "seen"
    listed.write_text(json.dumps(cases))
    held = hold_port()
    port = held.getsockname()[1]
    shared = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[3]), shared.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPT), str(config), str(listed), str(out)]
    processes = [subprocess.Popen(command, env=shared | {"RANK": str(rank)}) for rank in range(ranks)]
    try:
        assert [process.wait(PATIENCE) for process in processes] == [0] * ranks
    finally:
        held.close()
        for process in processes:
            process.kill()
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], what: str = "") -> None:
    for step, (mine, other) in enumerate(zip(ours["steps"], theirs["steps"], strict=True)):
        assert mine == pytest.approx(other, rel=CLOSE), f"{what}, step {step}"


@pytest.mark.parametrize("ranks", CASES)
def test_every_layout_computes_what_one_rank_computes(tmp_path: Path, ranks: int) -> None:
    truth = {tied: alone(tmp_path, tied=tied) for tied in (False, True)}
    seen = group(tmp_path, ranks, CASES[ranks])
    for index, (degrees, tied, words) in enumerate(CASES[ranks]):
        expected = truth[tied]
        mine = [rank[index] for rank in seen]
        assert {name: hash for rank in mine for name, hash in rank["start"].items()} == expected["start"], degrees
        for rank in mine:
            assert rank["steps"] == mine[0]["steps"], f"{degrees}: ranks of a group must see the same"
            assert_close(rank, expected, f"{degrees} {words}")
        if degrees == {"pp": 2}:
            # Nothing is summed in another order until the norm of the gradient, which is that of two stages.
            assert mine[0]["steps"][0][0] == expected["steps"][0][0]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_no_bit(tmp_path: Path, mode: str) -> None:
    assert alone(tmp_path, recompute=mode) == alone(tmp_path)


def test_compiled_blocks(tmp_path: Path) -> None:
    assert_close(alone(tmp_path, "--compile.enable", recompute="selective"), alone(tmp_path))


@pytest.mark.parametrize("what", ["mixed_precision_param", "dtype"])
def test_bfloat16_stays_near(tmp_path: Path, what: str) -> None:
    whole, half = alone(tmp_path), alone(tmp_path, f"--training.{what}=bfloat16")
    assert (half["start"] == whole["start"]) == (what == "mixed_precision_param")
    for ours, theirs in zip(half["steps"], whole["steps"], strict=True):
        assert ours != theirs and ours == pytest.approx(theirs, rel=2e-2)
