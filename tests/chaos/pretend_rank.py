"""``pretend_rank.py DIRECTORY COMMITS PHASE``: keeps a real progress page like a rank, and does nothing
else."""

import sys
import time
from pathlib import Path

from planaria.core.messages import Phase, QuorumId
from planaria.wire.page import ProgressPage


def main(directory: Path, commits: int, phase: str) -> None:
    page = ProgressPage.create(directory / "progress")
    page.quorum = QuorumId(1, 1)
    for step in range(1, commits + 1):
        page.committed(step, QuorumId(1, 1), 1.0 / step, time.monotonic_ns(), 2 * step, 0)
    cycle = [Phase.COMPUTING, Phase.EXCHANGING, Phase.APPLYING]
    if phase != "cycle":
        cycle = [Phase[phase.upper()]]
    page.set_phase(cycle[0])
    (directory / "up").touch()
    while True:
        for each in cycle:
            page.set_phase(each)
            time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
