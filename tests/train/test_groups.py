"""``planaria train`` in groups that are killed: the weights of a quiet run, and every line of metrics."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from planaria.agent.forkserver import DEFAULT_PRELOAD, PRELOAD_VARIABLE
from planaria.chaos.watch import Watch
from planaria.rank.durable import checkpoints_in
from tests.train.harness import PATIENCE, digests, environment, lines, train, write_config

pytestmark = pytest.mark.e2e
STEPS = 30
WORDS = (
    f"--training.steps={STEPS}",
    "--fault_tolerance.shards=4",
    "--metrics.log_freq=3",
    "--metrics.enable_tensorboard",
    "--validation.enable",
    "--validation.freq=10",
    "--validation.steps=1",
    "--validation.held_out=0.1",
    "--training.local_batch_size=1",
    "--training.global_batch_size=8",
)


class Groups:
    """A ``planaria train`` in two groups, looked at and hurt from outside."""

    def __init__(self, process: subprocess.Popen[bytes], logs: Path) -> None:
        self.process, self.watch = process, Watch(logs)

    def until(self, met: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not met():
            assert self.process.poll() is None, f"the run ended before {what}"
            assert time.monotonic() < deadline, f"still waiting for {what}"
            time.sleep(0.005)
            self.watch.poll()

    def kill(self, group: int) -> None:
        life = self.watch.life(group)
        assert life is not None
        os.kill(life.view.pid, signal.SIGKILL)
        self.until(lambda: self.watch.life(group).member > life.member, f"group {group} to be started again")

    def whole(self) -> None:
        """Both groups hold the state: what is lost of one, the other gives back."""
        self.until(lambda: [life.member.group for life in self.watch.settled()] == [0, 1], "both groups at work")


def held(batches: int, release: Path) -> dict[str, str]:
    """An environment in which what trains is slow after so many batches, until ``release`` is there."""
    return environment() | {"TRAIN_HOLD": f"{batches}:{release}"}


@contextmanager
def two_groups(config: Path, out: Path, env: dict[str, str], *words: str) -> Iterator[Groups]:
    more = ["--fault_tolerance.enable", "--fault_tolerance.group_size=2", f"--job.dump_folder={out}"]
    command = [sys.executable, "-m", "planaria", "train", str(config), *more, *words]
    log = (config.parent / "run.log").open("w")
    with log, subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=config.parent) as process:
        groups = Groups(process, out / "logs")
        try:
            yield groups
        finally:
            process.terminate()  # ends its ranks too
            process.wait()
            groups.watch.close()


def told(out: Path) -> list[tuple[Any, ...]]:
    """What every line says that must not depend on who computed it."""
    return [
        tuple(line.get(key) for key in ("step", "loss", "grad_norm", "lr", "validation_loss")) for line in lines(out)
    ]


def directory_of(out: Path) -> dict[str, str]:
    """Where a run that needs no groups is to write its digest: where `planaria run` has it."""
    return {"PLANARIA_DIR": str(out / "logs" / "rg0" / "i0")}


@pytest.mark.parametrize("layout", ["alone", "pipeline"])
def test_killed_groups_leave_the_same_weights_and_every_line_of_metrics(tmp_path: Path, layout: str) -> None:
    """A group is one rank, or a pipeline of two whose last one knows the loss and whose first one writes it."""
    config, quiet, out = write_config(tmp_path), tmp_path / "quiet", tmp_path / "out"
    words = [*WORDS, *(["--parallelism.pipeline_parallel_degree=2"] if layout == "pipeline" else [])]
    done = train(config, quiet, *words, env=directory_of(quiet))
    assert done.returncode == 0, done.stderr
    release = tmp_path / "release"
    env = held(4, release) | {PRELOAD_VARIABLE: f"{DEFAULT_PRELOAD},tests.train.holding"}
    with two_groups(config, out, env, *words) as run:
        run.until(lambda: run.watch.step >= 2, "step 2")
        run.whole()
        run.kill(0)  # the one that writes
        run.whole()
        run.kill(1)
        release.touch()
        assert run.process.wait(PATIENCE) == 0, (tmp_path / "run.log").read_text()
    assert digests(out / "logs") == digests(quiet / "logs")
    assert told(out) == told(quiet)
    assert [line["step"] for line in lines(out)] == sorted({*range(0, STEPS, 3), 9, 19, 29})
    assert all(("validation_loss" in line) == (line["step"] % 10 == 9) for line in lines(out))
    board = EventAccumulator(str(out / "tb")).Reload()
    shown = {event.step: event.value for event in board.Scalars("loss")}
    assert shown == {line["step"]: pytest.approx(line["loss"], rel=1e-6) for line in lines(out)}


def test_a_run_that_is_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    config, quiet, out = write_config(tmp_path), tmp_path / "quiet", tmp_path / "out"
    words = [*WORDS, "--checkpoint.enable", "--checkpoint.interval=5", "--checkpoint.keep_latest_k=2"]
    assert train(config, quiet, *WORDS, env=directory_of(quiet)).returncode == 0
    code = "import tests.train.holding, runpy; runpy.run_module('planaria', run_name='__main__', alter_sys=True)"
    command = [sys.executable, "-c", code, "train", str(config), f"--job.dump_folder={out}", *words]
    env = held(13 * 8, tmp_path / "never")  # step 12 is the last that is quick
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, cwd=tmp_path) as process:
        deadline = time.monotonic() + PATIENCE
        # Lines up to step 12, and a checkpoint before it, which is written meanwhile.
        while len(told(out)) < 5 or not checkpoints_in(out / "checkpoint"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    done = train(config, out, *words, env=directory_of(out))
    assert done.returncode == 0, done.stderr
    assert "step 0 " not in done.stdout, "nothing is done again that a checkpoint holds"
    assert digests(out / "logs") == digests(quiet / "logs")
    assert told(out) == told(quiet)
    assert len(list((out / "checkpoint").glob("step-*"))) == 2
