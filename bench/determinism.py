"""What deterministic kernels cost in forward and backward of a transformer, which kernels it is, and what to choose.

    python bench/determinism.py --size llm-0.8B --json determinism.json

One process, one GPU (or a CPU, to try it). All choices take turns on the same model and batch; ratios are taken
within a round. Whether a choice really gives the same bits twice is looked at, not believed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if "--plain" not in sys.argv:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before torch: cuBLAS reads it once

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import report
from bench.transformer import EMBEDDINGS, SHAPES, Transformer, loss_of

ATTENTION = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PROFILED = 3  # passes


@dataclass(frozen=True)
class Choice:
    """``fill``: NaN into all new memory, as torch does by default when algorithms are deterministic."""

    deterministic: bool
    fill: bool = False
    attention: str = "auto"
    embedding: str = EMBEDDINGS[0]

    @property
    def name(self) -> str:
        words = ["deterministic" if self.deterministic else "default"]
        words += ["filled"] if self.fill else []
        words += [f"{self.attention} attention"] if self.attention != "auto" else []
        words += [f"embedding by {self.embedding}"] if self.embedding != EMBEDDINGS[0] else []
        return ", ".join(words)


BASE = Choice(False)
AS_IT_IS = Choice(True, fill=True)
UNFILLED = Choice(True)


def all_choices() -> list[Choice]:
    return [
        BASE,
        AS_IT_IS,
        UNFILLED,
        *(Choice(deterministic, attention=name) for name in ATTENTION for deterministic in (False, True)),
        *(Choice(True, embedding=name) for name in EMBEDDINGS[1:]),
    ]


class Bench:
    """A model and a batch; ``one`` is one forward and backward."""

    def __init__(self, size: str, device: torch.device, batch: int) -> None:
        shape = SHAPES[size]
        self.device = device
        torch.manual_seed(0)
        with device:
            self.net = Transformer(shape)
            text = torch.randint(0, shape.vocab, (batch or shape.batch, shape.length + 1))
        self.batch = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    def one(self) -> None:
        self.net.zero_grad(set_to_none=True)
        loss_of(self.net, self.batch).backward()  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def chosen(self, choice: Choice) -> Any:
        torch.use_deterministic_algorithms(choice.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = choice.fill  # type: ignore[attr-defined]
        self.net.embedding = choice.embedding
        only = ATTENTION.get(choice.attention)
        try:
            with contextlib.nullcontext() if only is None else sdpa_kernel(only):
                yield
        finally:
            torch.use_deterministic_algorithms(False)

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, choice: Choice, passes: int) -> float:
        """Of one pass, on the host's clock around several, the first of which is not counted."""
        with self.chosen(choice):
            self.one()
            self.sync()
            began = time.perf_counter()
            for _ in range(passes):
                self.one()
            self.sync()
            return (time.perf_counter() - began) / passes

    def repeats(self, choice: Choice) -> bool:
        """Whether all gradients are the same bits twice."""
        found = []
        with self.chosen(choice):
            for _ in range(2):
                self.one()
                found.append([p.grad.detach().clone() for p in self.net.parameters() if p.grad is not None])
        return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def tried(bench: Bench, choices: Sequence[Choice]) -> tuple[list[Choice], dict[str, bool], dict[str, str]]:
    """(those that run, whether they repeat, why others do not run)."""
    works: list[Choice] = []
    repeats: dict[str, bool] = {}
    refused: dict[str, str] = {}
    for choice in choices:
        try:
            repeats[choice.name] = bench.repeats(choice)
            works.append(choice)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            refused[choice.name] = " ".join(str(error).split())[:200]
    return works, repeats, refused


def measured(bench: Bench, choices: Sequence[Choice], rounds: int, passes: int) -> dict[str, list[float]]:
    """Seconds by round. Who begins changes every round."""
    by_name = {choice.name: choice for choice in choices}
    found: dict[str, list[float]] = {name: [] for name in by_name}
    for number in range(rounds):
        for name in report.rotated(list(by_name), number):
            found[name].append(bench.seconds(by_name[name], passes))
    return found


def ratio(seconds: dict[str, list[float]], name: str) -> report.Spread:
    return report.spread([a / b for a, b in zip(seconds[name], seconds[BASE.name], strict=True)])


def best(works: Sequence[Choice], repeats: dict[str, bool], seconds: dict[str, list[float]]) -> Choice:
    """The fastest attention with the fastest embedding, of what repeats."""
    good = [c for c in works if c.deterministic and not c.fill and repeats[c.name]]

    def fastest(of: list[Choice]) -> Choice:
        return min(of, key=lambda c: ratio(seconds, c.name).median)

    attention = fastest([c for c in good if c.embedding == EMBEDDINGS[0]])
    embedding = fastest([c for c in good if c.attention == "auto"])
    return replace(attention, embedding=embedding.embedding)


def profiled(bench: Bench, choice: Choice) -> tuple[dict[str, float], dict[str, float]]:
    """(ms of a pass by kernel, by operator), on the device."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    gpu = bench.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with bench.chosen(choice):
        bench.one()
        bench.sync()
        with profile(activities=activities) as seen:
            for _ in range(PROFILED):
                bench.one()
            bench.sync()
    kernels: dict[str, float] = {}
    operators: dict[str, float] = {}
    for event in seen.key_averages():
        micros = event.self_device_time_total if gpu else event.self_cpu_time_total
        into = kernels if event.device_type == DeviceType.CUDA else operators
        into[event.key] = into.get(event.key, 0.0) + micros / 1e3 / PROFILED
    return kernels, operators


def differences(before: dict[str, float], after: dict[str, float], most: int = 10) -> list[dict[str, Any]]:
    """Where the time goes: ms more or less, largest first."""
    rows: list[dict[str, Any]] = [
        {"name": key[:110], "default_ms": before.get(key, 0.0), "deterministic_ms": after.get(key, 0.0)}
        for key in before.keys() | after.keys()
    ]
    rows.sort(key=lambda r: -abs(r["deterministic_ms"] - r["default_ms"]))
    return rows[:most]


def measure(size: str, device: torch.device, batch: int, rounds: int, passes: int) -> dict[str, Any]:
    bench = Bench(size, device, batch)
    works, repeats, refused = tried(bench, all_choices())
    seconds = measured(bench, works, rounds, passes)
    chosen = best(works, repeats, seconds)
    final_repeats = bench.repeats(chosen)
    names = list(dict.fromkeys([BASE, AS_IT_IS, UNFILLED, chosen]))
    final = measured(bench, names, rounds + 2, passes)
    result: dict[str, Any] = {
        "size": size,
        "batch": list(bench.batch[0].shape),
        "refused": refused,
        "choices": [
            {
                **asdict(c),
                "name": c.name,
                "ms": statistics.median(seconds[c.name]) * 1e3,
                "ratio": asdict(ratio(seconds, c.name)),
                "same_bits_twice": repeats[c.name],
            }
            for c in works
        ],
        "best": {**asdict(chosen), "name": chosen.name, "same_bits_twice": final_repeats},
        "final": {
            c.name: {"ms": statistics.median(final[c.name]) * 1e3, "ratio": asdict(ratio(final, c.name))} for c in names
        },
    }
    profiles = {c.name: profiled(bench, c) for c in names}
    for kind, index in (("kernels", 0), ("operators", 1)):
        result[kind] = {
            c.name: differences(profiles[BASE.name][index], profiles[c.name][index]) for c in names if c != BASE
        }
    result["device_ms"] = {c.name: sum(profiles[c.name][0 if device.type == "cuda" else 1].values()) for c in names}
    return result


def plain(size: str, device: torch.device, batch: int, rounds: int, passes: int) -> dict[str, Any]:
    """torch's defaults without CUBLAS_WORKSPACE_CONFIG, which only a new process can have."""
    bench = Bench(size, device, batch)
    bench.seconds(BASE, 1)
    return {"ms": statistics.median(bench.seconds(BASE, passes) for _ in range(rounds)) * 1e3}


def printed(result: dict[str, Any]) -> str:
    rows = [
        [c["name"], f"{c['ms']:.2f}", report.Spread(**c["ratio"]).text(3), "yes" if c["same_bits_twice"] else "NO"]
        for c in result["choices"]
    ]
    rows += [[name, "-", why[:60], "-"] for name, why in result["refused"].items()]
    lines = [report.table(("choice", "forward+backward ms", "x default", "same bits twice"), rows), ""]
    lines += [f"best: {result['best']['name']}, once more beside the others:"]
    final = [[name, f"{f['ms']:.2f}", report.Spread(**f["ratio"]).text(3)] for name, f in result["final"].items()]
    lines += [report.table(("choice", "ms", "x default"), final)]
    for kind in ("kernels", "operators"):
        for name, found in result[kind].items():
            body = [[f"{d['default_ms']:.2f}", f"{d['deterministic_ms']:.2f}", d["name"]] for d in found[:8]]
            lines += ["", report.table(("default ms", f"{name} ms", kind[:-1]), body)] if body else []
    return "\n".join(lines)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--size", default="llm-0.8B", choices=SHAPES)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    p.add_argument("--batch", type=int, default=0, help="sequences (default: by size)")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--passes", type=int, default=4)
    p.add_argument("--plain", action="store_true", help="only torch's defaults, without CUBLAS_WORKSPACE_CONFIG")
    p.add_argument("--json", metavar="FILE")
    args = p.parse_args()
    work: Callable[..., dict[str, Any]] = plain if args.plain else measure
    result = work(args.size, torch.device(args.device), args.batch, args.rounds, args.passes)
    print(result if args.plain else printed(result), flush=True)
    if args.json:
        report.write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
