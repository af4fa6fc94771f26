"""Processes that a session starts: they are found, end in every case, and what they leave is judged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pretend import Cluster, until

from planaria.agent.proc import state_of
from planaria.chaos import session
from planaria.chaos.inject import Injected
from planaria.chaos.schedule import Fault, Kind
from planaria.chaos.session import Script, quiet_run, run_command, shards_of, spawn, trouble, with_home
from planaria.chaos.verify import Line, Record
from planaria.chaos.watch import Watch
from planaria.core.messages import Event
from planaria.errors import PlanariaError

TRAINS = """
    import os
    import torch
    import planaria.torch as pt

    job = pt.init()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    data = pt.ShardedDataset(torch.arange(60.0).reshape(20, 3) / 60, batch_size=2)
    for step in job.steps(3):
        for x in step.batches(data):
            loss = model(x).square().mean()
            loss.backward()
            step.record(loss=loss)
        optimizer.step()
    print(sorted(name for name in os.environ if name.startswith("PLANARIA")), os.environ["OMP_NUM_THREADS"])
"""


def script(directory: Path, text: str) -> Script:
    path = directory / "script.py"
    path.write_text(textwrap.dedent(text))
    return Script(path)


def test_a_quiet_run_is_a_job_of_one_with_the_same_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANARIA_SOCKET", "/that/of/another/job")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ticks = []
    record = quiet_run(replace(script(tmp_path, TRAINS), device="cpu"), 4, tmp_path / "quiet", lambda: ticks.append(1))
    assert (record.steps, [line.step for line in record.lines]) == (3, [0, 1, 2])
    assert all(line.shards == 4 and line.loss is not None for line in record.lines)
    assert record.digest and ticks
    assert "['PLANARIA_DEVICE', 'PLANARIA_DIR', 'PLANARIA_SHARDS'] 1" in (tmp_path / "quiet" / "run.log").read_text()


def test_a_quiet_run_of_groups_of_several_processes_is_a_run_of_one_group(tmp_path: Path) -> None:
    text = TRAINS.replace("pt.init()", "pt.init(mesh={'tp': -1})")
    what = replace(script(tmp_path, text), device="cpu", groups=3, nproc=2)
    record = quiet_run(what, 4, tmp_path / "quiet", lambda: None)
    assert (record.steps, [line.shards for line in record.lines]) == (3, [4, 4, 4])
    assert record.digest
    ranks = {str(page.parent.relative_to(tmp_path / "quiet")) for page in (tmp_path / "quiet").rglob("progress")}
    assert ranks == {"rg0/i0", "rg0/i0/rank1"}


def test_a_quiet_run_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(PlanariaError, match=r"(?s)exited with code 1.*ValueError: of all things"):
        quiet_run(script(tmp_path, "raise ValueError('of all things')"), 1, tmp_path / "q", lambda: None)


def test_an_interrupted_quiet_run_leaves_no_process(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def tick() -> None:
        if pid.exists():
            raise KeyboardInterrupt

    sleeps = f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    with pytest.raises(KeyboardInterrupt):
        quiet_run(script(tmp_path, sleeps), 1, tmp_path / "q", tick)
    assert state_of(int(pid.read_text() or "0")) == ""


def test_what_was_spawned_ends_with_us_whatever_ends_us(tmp_path: Path) -> None:
    parent = f"""
        import os, time
        from pathlib import Path
        from planaria.chaos.session import spawn
        child = spawn(["sleep", "600"], dict(os.environ), Path({str(tmp_path / "log")!r}))
        Path({str(tmp_path / "pid.new")!r}).write_text(str(child.pid))
        os.rename({str(tmp_path / "pid.new")!r}, {str(tmp_path / "pid")!r})
        time.sleep(600)
    """
    path = tmp_path / "parent.py"
    path.write_text(textwrap.dedent(parent))
    with subprocess.Popen([sys.executable, str(path)], env=with_home(os.environ)) as process:
        until((tmp_path / "pid").exists)
        child = int((tmp_path / "pid").read_text())
        until(lambda: state_of(child) == "S")
        process.kill()
    until(lambda: state_of(child) in ("", "Z"))


def test_a_process_that_does_not_leave_when_asked_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LEAVE_SECONDS", 0.1)
    deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', flush=True); signal.pause()"
    process = spawn([sys.executable, "-c", deaf], dict(os.environ), tmp_path / "log")
    until(lambda: "deaf" in (tmp_path / "log").read_text())
    session.end(process)
    session.end(process)
    assert process.returncode == -signal.SIGKILL


def test_planaria_is_found_by_children_and_hides_nothing() -> None:
    home = str(Path(session.__file__).resolve().parents[2])
    if Path(home).name == "site-packages":
        pytest.skip("installed: there is nothing to add")
    paths = with_home({"PYTHONPATH": os.pathsep.join(["/a", "/b"])})["PYTHONPATH"].split(os.pathsep)
    assert paths == ["/a", "/b", home]
    assert with_home(with_home({})) == {"PYTHONPATH": home}


def test_the_command_line_of_a_run() -> None:
    what = Script(Path("train.py"), ("--lr", "1"), groups=3, shards=6)
    command = run_command(what, Path("/logs"), ["--job", "x"])
    assert command[1:4] == ["-m", "planaria", "run"]
    assert command[-3:] == ["train.py", "--lr", "1"]
    for option, value in (("--groups", "3"), ("--shards", "6"), ("--log-dir", "/logs"), ("--job", "x")):
        assert command[command.index(option) + 1] == value
    assert not {"--shards", "--device"} & set(run_command(Script(Path("t.py")), Path("/logs"), []))
    command = run_command(Script(Path("t.py"), device="cpu"), Path("/logs"), [])
    assert command[command.index("--device") + 1] == "cpu" and "--nproc-per-group" not in command
    command = run_command(Script(Path("t.py"), nproc=2), Path("/logs"), [])
    assert command[command.index("--nproc-per-group") + 1] == "2"


def test_shards_are_those_of_full_strength() -> None:
    records = [Record((Line(0, 6, None), Line(1, 8, None))), Record(())]
    assert shards_of(records) == 8
    assert shards_of([]) == 0


class PretendRun:
    """Pretend ranks as a deployment: over when ``faults`` faults were seen to be done."""

    network = None

    def __init__(self, cluster: Cluster, code: int | None) -> None:
        self.cluster = cluster
        self.code = code
        self.stops = 0

    @property
    def directories(self) -> Sequence[Path]:
        return (self.cluster.directory,)

    @property
    def log(self) -> Path:
        return self.cluster.directory / "run.log"

    def start(self) -> None:
        for group in range(3):
            self.cluster.rank(group)

    def poll(self) -> int | None:
        dead = sum(1 for process in self.cluster.processes if process.poll() is not None)
        return self.code if dead == 1 else None

    def lighthouse(self) -> tuple[int, int] | None:
        return None

    def stop(self) -> None:
        self.stops += 1
        self.cluster.close()


def test_trouble_tells_all_and_ends_all(cluster: Cluster) -> None:
    shown: list[int] = []
    texts: list[str] = []
    line = {"at": 1.0, "kind": "join", "text": "hello"}
    (cluster.directory / "events.jsonl").write_text(json.dumps(line) + "\n")

    def show(watch: Watch, injected: Sequence[Injected], events: Sequence[Event]) -> None:
        shown.append(len(injected))
        texts.extend(event.text for event in events)

    run = PretendRun(cluster, code=7)
    troubled = trouble(run, [Fault(Kind.KILL, group=1), Fault(Kind.KILL, after=3600)], 3, show)
    troubled.watch.close()
    assert troubled.exit_code == 7 and troubled.left == 1 and run.stops == 1
    assert [done.member.group for done in troubled.injected] == [1]
    assert shown == sorted(shown) and shown[-1] == 1 and texts == ["hello"]
    assert all(process.returncode is not None for process in cluster.processes)


def test_trouble_that_is_interrupted_wakes_the_stopped_and_ends_all(cluster: Cluster) -> None:
    def show(watch: Watch, injected: Sequence[Injected], events: Sequence[Event]) -> None:
        if injected:
            raise KeyboardInterrupt

    run = PretendRun(cluster, code=None)
    with pytest.raises(KeyboardInterrupt):
        trouble(run, [Fault(Kind.STOP, group=1, duration=3600)], 3, show)
    assert run.stops == 1
    assert all(process.returncode is not None for process in cluster.processes)
