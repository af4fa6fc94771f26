"""Kills itself in the midst of a save, at one moment after the other, and sees each time what is left.

Prints the number of moments at which a save was killed. An audit hook sees every file that the save opens, makes,
renames or removes; a limit on the size of files ends the process between two bytes of one.
"""

import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from planaria.rank.durable import checkpoints_in
from tests.torch.checkpointing import Thing, names

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")
directory = Path(sys.argv[1])
digests = {10: Thing(seed=10).state.digest(), 20: Thing(seed=20).state.digest()}


def at_event(number: int) -> Callable[[], None]:
    count = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if event in EVENTS and str(directory) in str(args[0]):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(hook)


def at_byte(number: int) -> Callable[[], None]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))

    return limit


def save(arm: Callable[[], None]) -> bool:
    """Save step 20 in a child that is armed; whether it lived."""
    pid = os.fork()
    if pid == 0:
        desk = Thing(seed=20).checkpoints(directory, keep=1)
        arm()
        os._exit(len(desk.save(20)))
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return not os.WIFSIGNALED(status)


def check() -> int:
    """The newest checkpoint is whole, whatever was left beside it; its step."""
    fresh = Thing(seed=1)
    step = fresh.checkpoints(directory, keep=1).resume()
    assert fresh.state.digest() == digests[step], step
    return step


def again() -> None:
    """As it was before the save, but for what a death has left."""
    for path in checkpoints_in(directory):
        shutil.rmtree(path)
    fresh = Path(f"{directory}-10")
    shutil.copytree(fresh / "step-00000010", directory / "step-00000010")


Thing(seed=10).checkpoints(Path(f"{directory}-10"), keep=1).save(10)
directory.mkdir()
again()
moments, seen = 0, set()
while not save(at_event(moments + 1)):
    moments += 1
    seen.add(check())
    again()
assert check() == 20 and names(directory) == ["step-00000020"], names(directory)
assert seen == {10, 20}, "some before it counted, some after"
largest = max(path.stat().st_size for path in (directory / "step-00000020").iterdir())
for byte in (1, largest // 3, largest - 1):
    again()
    assert not save(at_byte(byte))
    moments += 1
    assert check() == 10
print(moments)
