"""A rank without torch: speaks frames with its agent like a real one, and "trains" by counting.

Every living member commits on its own; nothing is exchanged. Arguments: steps, seconds between two steps, and
words that change its behaviour.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from pathlib import Path

from planaria.core.messages import Adopted, Drain, Finished, Member, Phase, Publish, Quorum, Ready, Refuse, Stop
from planaria.errors import UsageError
from planaria.wire.frames import FrameReader, send_frame
from planaria.wire.page import ProgressPage

STEPS, PAUSE, WORDS = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
ME = Member(int(os.environ["PLANARIA_GROUP"]), int(os.environ["PLANARIA_INCARNATION"]))


class Rank:
    def __init__(self) -> None:
        self.page = ProgressPage.create(Path(os.environ["PLANARIA_DIR"]) / "progress")
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
            with self.news:
                match order:
                    case Publish() if ME in order.quorum.members:
                        self.quorum = order.quorum
                        self.page.quorum = order.quorum.id
                        send_frame(self.socket, Adopted(ME, order.quorum.id, self.step))
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

    def run(self) -> None:
        kind = "odd" if "odd" in WORDS and ME.group == 1 else "usual"
        send_frame(self.socket, Ready(ME, f"127.0.0.1:{1000 + ME.group}", (("kind", kind),), "start", 8, STEPS))
        self.page.set_phase(Phase.PARKED)
        with self.news:
            self.news.wait_for(lambda: self.quorum is not None or self.leaving is not None or self.refused)
        while self.step < STEPS:
            with self.news:
                if self.refused:
                    raise UsageError(f"refused: {self.refused}")
                if self.leaving is not None:
                    sys.exit(self.leaving)
                self.page.set_phase(Phase.COMPUTING)
                self.news.wait(PAUSE)
                self.step += 1
                assert self.quorum is not None
                self.page.committed(self.step, self.quorum.id, 1 / self.step, time.monotonic_ns(), 4, 0)
                self.page.control_beat()
                self.page.set_phase(Phase.APPLYING)
            self.misbehave()
        send_frame(self.socket, Finished(ME, self.step, "digest"))
        self.page.set_phase(Phase.FINISHED)
        print(f"finished {self.step} steps, {math.ceil(PAUSE)}")

    def misbehave(self) -> None:
        if "crash" in WORDS and self.step == 2:
            raise ValueError("boom at step 2")
        if "crash-once" in WORDS and self.step == 2 and ME.incarnation == 0 and ME.group == 1:
            raise ValueError("boom at step 2")
        if "leave" in WORDS and self.step == 5 and ME.group == 1:
            sys.exit(0)
        if "bad" in WORDS and self.step == 1:
            raise UsageError("the learning rate must be positive")


Rank().run()
