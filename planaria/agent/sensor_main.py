"""A sensor: ``python -m planaria.agent.sensor_main PARENT EVERY CWD gpus GPU… | command WORD…``.

Single-threaded, and started by ``planaria.agent.sensors``. Reads every EVERY seconds, and prints a line for each round.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict

from planaria.agent.amdgpu import AmdGpus
from planaria.agent.nvml import Nvml, Unreadable
from planaria.agent.parent import die_with_parent
from planaria.agent.sitecommand import SiteCommand
from planaria.core.health import Reading


def main() -> None:
    parent, every, cwd, kind, *words = sys.argv[1:]
    if kind == "gpus":
        die_with_parent(int(parent))
        _read_gpus(float(every), words)
    else:
        # In order, so that what the command has begun ends with it.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        die_with_parent(int(parent), signal.SIGTERM)
        _run_command(float(every), words, cwd)


def _read_gpus(every: float, gpus: list[str]) -> None:
    try:
        reader = AmdGpus(gpus) if AmdGpus.here() else Nvml(gpus)
    except Unreadable as error:
        _note(str(error))
        return
    for sentence in reader.missing:
        _note(sentence)
    _tell(reader.read(0.0))  # so that what is heard at once counts beside it
    while True:
        _tell(reader.read(every))


def _run_command(every: float, argv: list[str], cwd: str) -> None:
    command = SiteCommand(argv, every, cwd)
    noted = ""
    while True:
        began = time.monotonic()
        done = command.run()
        _tell(done.readings)
        if done.problem and done.kind != noted:  # the same trouble, round after round, is told once
            _note(done.problem)
        noted = done.kind
        time.sleep(max(0.0, every - (time.monotonic() - began)))


def _tell(readings: Iterable[Reading]) -> None:
    print(json.dumps({"readings": [asdict(reading) for reading in readings]}), flush=True)


def _note(sentence: str) -> None:
    print(json.dumps({"note": sentence}), flush=True)


if __name__ == "__main__":
    main()
