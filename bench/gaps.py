"""When a GPU stands still in a step, and between which kernels: from a profile of the training's stream."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise
from typing import Any

Kernel = tuple[str, int, int]  # name, start and end in ns
WORTH = 50_000  # ns: shorter gaps are what launching costs anybody


def kernels_by_stream(profile: Any) -> dict[int, list[Kernel]]:
    """Kernels, copies and fills of a ``torch.profiler.profile``, in the order of their start."""
    from torch._C._autograd import DeviceType

    streams: dict[int, list[Kernel]] = defaultdict(list)
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0:
            start = event.start_ns()
            streams[event.device_resource_id()].append((event.name(), start, start + event.duration_ns()))
    return {stream: sorted(found, key=lambda k: k[1]) for stream, found in streams.items()}


def summary(streams: dict[int, list[Kernel]], steps: int, most: int = 8) -> dict[str, Any]:
    """Milliseconds of a step. The training's stream is the one with most kernels; ``gaps`` are by the kernels before
    and after, largest first, and each counts as their median: a single long one, as when memory is fetched anew, is
    no matter of a step."""
    if not streams:
        return {}
    main = max(streams, key=lambda s: len(streams[s]))
    waits: dict[tuple[str, str], list[int]] = defaultdict(list)
    for before, after in pairwise(streams[main]):
        if (gap := after[1] - before[2]) > WORTH:
            waits[before[0][:70], after[0][:70]].append(gap)
    names: dict[str, int] = defaultdict(int)
    for name, start, end in streams[main]:
        names[name[:90]] += end - start

    def ms(nanoseconds: float) -> float:
        return round(nanoseconds / 1e6 / steps, 3)

    typical = {pair: statistics.median(found) * len(found) for pair, found in waits.items()}

    return {
        "busy": ms(sum(end - start for _, start, end in streams[main])),
        "idle": ms(sum(typical.values())),
        "others": {
            str(s): ms(sum(end - start for _, start, end in found)) for s, found in streams.items() if s != main
        },
        "gaps": [
            {"before": a, "after": b, "ms": ms(total), "times": len(waits[a, b])}
            for (a, b), total in sorted(typical.items(), key=lambda item: -item[1])[:most]
        ],
        "kernels": [[name, ms(total)] for name, total in sorted(names.items(), key=lambda item: -item[1])[: 2 * most]],
    }
