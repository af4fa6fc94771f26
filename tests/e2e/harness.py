"""A whole job with real processes, watched from outside, to be hurt on purpose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from planaria.chaos.session import LocalRun, Script, with_home
from planaria.chaos.watch import Life, Watch
from planaria.core.messages import Phase

TRAIN = Path(__file__).parent / "scripts" / "train.py"
# Hangs are what these tests look for: far beyond what anything here takes on a loaded machine.
PATIENCE = 180.0

# What a quiet run of this name ends with; made in a directory, if it is not known: the fixture ``once``.
Once = Callable[[str, Callable[[Path], str]], str]


class Run:
    """One ``planaria run`` of a script. Use as a context: whatever happens, everything ends.

    The script hardly gets on in its second half before ``end`` is called, and less and less: no job is over before what
    is to happen to it has happened, on however slow a machine.
    """

    def __init__(
        self,
        directory: Path,
        *args: str,
        groups: int = 3,
        options: tuple[str, ...] = (),
        script: Path = TRAIN,
        patience: float = PATIENCE,
    ) -> None:
        self.directory = directory
        self._patience = patience
        self._release = directory / "release"
        self.script = Script(script, (*args, "--hold", str(self._release)), groups, None)
        self._run = LocalRun(self.script, directory, options)
        self.watch = Watch(directory)

    def __enter__(self) -> Run:
        self._run.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._run.stop()
        self.watch.close()

    # --- looking ---------------------------------------------------------------------------------------------

    def until(self, met: Callable[[], Any], what: str) -> Any:
        """Wait until ``met()`` is true, and return it. Fails with the log if the run ends before."""
        deadline = time.monotonic() + self._patience
        while True:
            self.watch.poll()
            if found := met():
                return found
            assert self._run.poll() is None, f"the run ended before {what}:\n{self.log()}"
            assert time.monotonic() < deadline, f"still waiting for {what}:\n{self.log()}"
            time.sleep(0.005)

    def step(self, at_least: int) -> None:
        self.until(lambda: self.watch.step >= at_least, f"step {at_least}")

    def life(self, group: int) -> Life:
        life: Life = self.until(lambda: self.watch.life(group), f"a process of group {group}")
        return life

    def settled(self, count: int, beyond: int = 0) -> None:
        """``count`` groups at work, each of which has committed at least one step in this life beyond ``beyond``."""

        def met() -> bool:
            lives = [life for life in self.watch.settled() if life.alive]
            return len([x for x in lives if x.commits and x.commits[-1].step > beyond]) >= count

        self.until(met, f"{count} groups at work")

    def phase(self, group: int, incarnation: int, phase: Phase) -> Life:
        """Wait until the group's life is in a phase. One of milliseconds may come and go between two looks: once the
        life has committed under a quorum that was not known before, it was. What is done next then strikes at another
        moment, which is said."""
        known, began = self.watch.quorum, time.monotonic_ns()

        def met() -> Life | None:
            life = self.watch.life(group)
            if life is None or life.member.incarnation < incarnation:
                return None
            view = life.look()
            if view.phase is phase:
                return life
            if view.quorum <= known or not life.commits or life.commits[-1].at_ns < began:
                return None
            warnings.warn(f"{phase.name} of {life.member} came and went unseen", stacklevel=3)
            return life

        life: Life = self.until(met, f"group {group} incarnation {incarnation} in phase {phase.name}")
        return life

    def incarnation(self, group: int, at_least: int) -> Life:
        def met() -> Life | None:
            life = self.watch.life(group)
            return life if life is not None and life.member.incarnation >= at_least else None

        life: Life = self.until(met, f"incarnation {at_least} of group {group}")
        return life

    # --- hurting ---------------------------------------------------------------------------------------------

    def signal(self, group: int, signum: int = signal.SIGKILL, rank: int = 0) -> Life:
        def found() -> Life | None:
            life = self.watch.life(group)
            return life if life is not None and rank in life.processes else None

        life: Life = self.until(found, f"rank {rank} of group {group}")
        # Whoever is killed may be dead already: with a rank that was killed before, all of its group are ended.
        with suppress(*([ProcessLookupError] if signum == signal.SIGKILL else [])):
            os.kill(life.processes[rank].pid, signum)
        return life

    def kill_lighthouse(self) -> None:
        found = self._run.lighthouse()
        assert found is not None, "no lighthouse process was found"
        os.kill(found[0], signal.SIGKILL)

    def interrupt(self) -> None:
        process = self._run._process
        assert process is not None
        process.send_signal(signal.SIGINT)

    def operate(self, *words: str) -> subprocess.CompletedProcess[str]:
        """``planaria WORDS`` against this run."""
        command = [*self.script.command()[:1], "-m", "planaria", *words]
        env = with_home(os.environ) | {"PLANARIA_LIGHTHOUSE": self.lighthouse()}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)

    def lighthouse(self) -> str:
        return str(json.loads((self.directory / "run.json").read_text())["lighthouse"])

    # --- afterwards ------------------------------------------------------------------------------------------

    def end(self, *others: Run) -> int:
        """Let the run, and ``others`` of the same job, come to their own end, and wait for this one; its exit code."""
        for each in (self, *others):
            each._release.touch()
        deadline = time.monotonic() + self._patience
        while (code := self._run.poll()) is None:
            self.watch.poll()
            assert time.monotonic() < deadline, f"the run does not end:\n{self.log()}"
            time.sleep(0.01)
        self.watch.poll()
        return code

    def digests(self) -> set[str]:
        """Of the final states of all members that finished."""
        return {json.loads(f.read_text())["digest"] for f in self.directory.glob("rg*/i*/result.json")}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [e for e in whole_lines(self.directory / "events.jsonl") if e["kind"] == kind]

    def log(self) -> str:
        texts = [f"{e['kind']:10} {e['text']}" for e in whole_lines(self.directory / "events.jsonl")[-40:]]
        output = self._run.log.read_text(errors="replace")[-3000:] if self._run.log.exists() else ""
        return "\n".join([output, *texts])


def ended(quiet: Run) -> str:
    """The digest of a run of one group, to which nothing happens."""
    with quiet as run:
        assert run.end() == 0, run.log()
        (digest,) = run.digests()
        return digest


def whole_lines(record: Path) -> list[dict[str, Any]]:
    """Of a record that is being written, of whose last line there may be a half."""
    data = record.read_bytes() if record.exists() else b""
    return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]


def alone(directory: Path, *args: str, shards: int = 6, reduction: str = "tree", patience: float = PATIENCE) -> str:
    """The digest of the same script run by itself: the quiet reference."""
    directory.mkdir(parents=True, exist_ok=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith("PLANARIA_")}
    env |= {"PLANARIA_DIR": str(directory), "PLANARIA_SHARDS": str(shards), "OMP_NUM_THREADS": "1"}
    env["PLANARIA_REDUCTION"] = reduction
    command = Script(TRAIN, args).command()
    done = subprocess.run(command, env=with_home(env), capture_output=True, text=True, timeout=patience)
    assert done.returncode == 0, done.stderr
    return str(json.loads((directory / "result.json").read_text())["digest"])
