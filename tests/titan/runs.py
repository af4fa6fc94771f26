"""torchtitan's processes: by itself, and under Planaria."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from planaria.chaos.session import with_home
from tests.e2e import harness
from tests.e2e.harness import Run

ON_CPU = Path(__file__).parent / "on_cpu.py"
# Sequences of 64 tokens, two in a batch: the debug model in a fraction of a second. bfloat16 would only be slower.
SMALL = (
    *("--training.seq_len", "64", "--training.local_batch_size", "2", "--debug.seed", "0"),
    *("--training.mixed_precision_param", "float32", "--metrics.disable_color_printing"),
)
# What torchtitan by itself needs on an older torch; the adapter has these for defaults.
THEIRS = (
    *("--training.disable_cuda_graphs", "--parallelism.spmd_backend", "partial_dtensor"),
    *("--parallelism.data_parallel_replicate_degree", "2", "--parallelism.data_parallel_shard_degree", "1"),
)


def run(directory: Path, *args: str, groups: int = 2, ranks: int = 1) -> Run:
    """``planaria run`` of torchtitan's trainer, two shards. What torchtitan writes goes below ``directory``."""
    dump = ("--dump_folder", str(directory / "dump"))
    options = ("--shards", "2", "--nproc-per-group", str(ranks), "--device", "cpu")
    return Run(directory, *ours(), *args, *dump, groups=groups, options=options, script=ON_CPU)


def ours(model: str = "llama3") -> tuple[str, str]:
    return "--module", f"planaria.train.titan.{model}"


def alone(directory: Path, *args: str, model: str = "llama3") -> str:
    """Two shards in one process, no ``planaria run``: a job of one group, which leaves what it did in ``directory``.
    Returns its output."""
    told = {"PLANARIA_DIR": str(directory), "PLANARIA_SHARDS": "2"}
    return _finish([sys.executable, str(ON_CPU), *ours(model), *args], directory, told)


def stock(directory: Path, *args: str, model: str = "llama3") -> str:
    """torchtitan with its own trainer: two ranks, each a replica. Returns the output."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return _finish([*launch, str(ON_CPU), "--module", model, *THEIRS, *args], directory, {})


def _finish(command: list[str], directory: Path, told: dict[str, str]) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PLANARIA_")}
    env |= {**told, "TITAN_WEIGHTS": str(directory / "weights.pt")}
    done = subprocess.run(
        [*command, "--dump_folder", str(directory)],
        env=with_home(env),
        capture_output=True,
        text=True,
        timeout=harness.PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout + done.stderr


def shown(output: str) -> dict[str, float]:
    """The losses and norms of gradients that torchtitan printed."""
    lines = re.findall(r"step: +(\d+) +loss: +([\d.]+) +grad_norm: +([\d.]+)", output)
    shown = [((f"loss {step}", loss), (f"norm {step}", norm)) for step, loss, norm in lines]
    return {name: float(value) for pair in shown for name, value in pair}


def weights(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(directory / "weights.pt")
    return found


def losses(directory: Path) -> dict[int, float]:
    """Of every step that was committed here, in a life that may have ended before its first."""
    written = directory / "metrics.jsonl"
    lines = written.read_text().splitlines() if written.exists() else []
    return {entry["step"]: entry["loss"] for entry in map(json.loads, lines)}


def lives(directory: Path) -> dict[str, dict[int, float]]:
    """The losses of every life of every group."""
    return {life.parent.name + life.name: losses(life) for life in directory.glob("rg*/i*")}


def digest(directory: Path) -> str:
    return str(json.loads((directory / "result.json").read_text())["digest"])
