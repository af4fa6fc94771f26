"""A rank without torch: speaks frames with its agent like a real one, and "trains" by counting.

Every living rank commits on its own; nothing is exchanged. What it hears is kept in ``heard``, one order a line.
Arguments: steps, seconds between two steps, and words that change its behaviour; ``WORD@RANK`` is for one rank only.
With the word ``hold`` the second half is not begun before a file ``release`` lies where it runs: what a test does to a
job has its consequences before the end, however slow the machine is.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from pathlib import Path

from planaria.core.messages import (
    Adopted,
    Corrupted,
    Drain,
    Finished,
    Member,
    Phase,
    Present,
    Publish,
    Quorum,
    Ready,
    Refuse,
    Report,
    Stop,
)
from planaria.errors import UsageError
from planaria.wire.frames import FrameReader, send_frame
from planaria.wire.page import ProgressPage
from tests.agent.scripts.held import hold_a_thread

RANK = int(os.environ["RANK"])
STEPS, PAUSE = int(sys.argv[1]), float(sys.argv[2])
WORDS = [word.partition("@")[0] for word in sys.argv[3:] if word.partition("@")[2] in ("", str(RANK))]
ME = Member(int(os.environ["PLANARIA_GROUP"]), int(os.environ["PLANARIA_INCARNATION"]))
RELEASE = Path("release").absolute()


class Rank:
    def __init__(self) -> None:
        if "slow-death" in WORDS and ME.incarnation == 0:
            hold_a_thread()
        self.home = Path(os.environ["PLANARIA_DIR"])
        (self.home / "gpus").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        self.page = ProgressPage.create(self.home / "progress")
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.environ["PLANARIA_SOCKET"])
        self.quorum: Quorum | None = None
        self.step = 0
        self.leaving: int | None = None
        self.refused = ""
        self.news = threading.Condition()
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for order in FrameReader(self.socket):
            with (self.home / "heard").open("a") as heard:
                heard.write(f"{order}\n")
            with self.news:
                match order:
                    case Publish() if ME in order.quorum.members:
                        self.quorum = order.quorum
                        self.page.quorum = order.quorum.id
                        self.say(Adopted(ME, order.quorum.id, self.step))
                    case Publish() if self.quorum is not None:
                        self.leaving = 0
                    case Stop():
                        self.leaving = 130
                    case Refuse():
                        self.refused = order.reason
                    case Drain():
                        print("asked to leave")
                self.news.notify_all()
        os._exit(1)  # the agent is gone

    def say(self, report: Report) -> None:
        """Rank 0 speaks for its group."""
        if RANK == 0:
            send_frame(self.socket, report)

    def run(self) -> None:
        kind = "odd" if "odd" in WORDS and ME.group == 1 else "usual"
        if RANK:
            while "late" in WORDS and '"kind": "quorum"' not in (self.home.parents[2] / "events.jsonl").read_text():
                time.sleep(0.01)
            send_frame(self.socket, Present(ME, RANK))
        self.say(Ready(ME, f"127.0.0.1:{1000 + ME.group}", (("kind", kind),), "start", 8, STEPS))
        self.page.set_phase(Phase.PARKED)
        with self.news:
            self.news.wait_for(lambda: self.quorum is not None or self.leaving is not None or self.refused)
        while self.step < STEPS:
            with self.news:
                if self.refused:
                    raise UsageError(f"refused: {self.refused}")
                if self.leaving is not None:
                    self.leave()
                self.page.set_phase(Phase.COMPUTING)
                self.news.wait(PAUSE)
                self.page.control_beat()
                if self.held():
                    self.page.set_phase(Phase.APPLYING)
                    continue
                self.step += 1
                assert self.quorum is not None
                self.page.committed(self.step, self.quorum.id, 1 / self.step, time.monotonic_ns(), 4, 0)
                self.page.set_phase(Phase.APPLYING)
            self.misbehave()
        self.say(Finished(ME, self.step, f"of group {ME.group}" if "differ" in WORDS else "digest"))
        self.page.set_phase(Phase.FINISHED)
        print(f"finished {self.step} steps, {math.ceil(PAUSE)}")

    def held(self) -> bool:
        return "hold" in WORDS and self.step == STEPS // 2 and not RELEASE.exists()

    def leave(self) -> None:
        if "slow" in WORDS:
            time.sleep(0.5)
        print(f"leaves after {self.step}")
        sys.exit(self.leaving)

    def misbehave(self) -> None:
        if "linger" in WORDS and self.step == STEPS:
            time.sleep(0.5)
        if "damaged" in WORDS and ME.group == 1 and ME.incarnation == 0 and self.step % 5 == 0:
            rank = 1 if "rank-1" in WORDS else 0 if int(os.environ["WORLD_SIZE"]) == 1 else -1
            self.say(Corrupted(ME, self.step, "its state is not that of the others (weight)", rank))
        if "crash" in WORDS and self.step == 2:
            raise ValueError("boom at step 2")
        if "crash-once" in WORDS and self.step == 2 and ME.incarnation == 0 and ME.group == 1:
            raise ValueError("boom at step 2")
        if "leave" in WORDS and self.step == 5 and ME.group == 1:
            sys.exit(0)
        if "bad" in WORDS and self.step == 1:
            raise UsageError("the learning rate must be positive")


Rank().run()
