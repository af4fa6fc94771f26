"""The two commands: what they refuse before anything is started, and what they print at the end."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pretend import Cluster, until
from rich.console import Console

from planaria.chaos import plot, report
from planaria.chaos.inject import NOBODY, Injected
from planaria.chaos.schedule import Fault, Kind, Moment, Victim
from planaria.chaos.session import Script, Troubled, with_home
from planaria.chaos.verify import Cost, Record, Verdict
from planaria.chaos.watch import Watch
from planaria.cli import chaos as command
from planaria.cli.chaos import chaos, deployment, ending_in_order, failed, new_directory
from planaria.cli.chaos_view import View, Waiting
from planaria.cli.demo import demo
from planaria.core.messages import Event, Member, Phase
from planaria.errors import PlanariaError, UsageError

MEMBER = Member(2, 1)


def here(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text("")
    return path


# --- bad input ------------------------------------------------------------------------------------------------


def test_bad_input_is_refused_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = here(tmp_path)
    with pytest.raises(UsageError, match=r"no script nowhere\.py"):
        chaos(Path("nowhere.py"))
    with pytest.raises(UsageError, match="at least 2 groups"):
        chaos(script, groups=1)
    with pytest.raises(UsageError, match="--kills"):
        chaos(script, kills=-1)
    with pytest.raises(UsageError, match="unknown kind"):
        chaos(script, kinds="flood")
    with pytest.raises(UsageError, match="not a time"):
        chaos(script, every="often")
    with pytest.raises(UsageError, match="no bits flip in 'weights'"):
        chaos(script, flips="weights")
    with pytest.raises(UsageError, match="60 steps"):
        demo(steps=10)
    nowhere = tmp_path / "no" / "x.json"
    for command_line in (lambda: chaos(script, json_file=nowhere), lambda: demo(json_file=nowhere)):
        with pytest.raises(UsageError, match=r"--json .*x\.json: there is no directory"):
            command_line()
    with pytest.raises(UsageError, match="that is a directory"):
        chaos(script, json_file=tmp_path)
    with pytest.raises(UsageError, match="no file matches"):
        demo(data=str(tmp_path / "no" / "*.py"))
    with pytest.raises(UsageError, match="0 bytes of text; a sample needs 65"):
        demo(data=str(script))
    assert list(tmp_path.iterdir()) == [script]


@pytest.mark.parametrize(
    ("visible", "groups", "partitions", "device"),
    [
        ("", 4, False, None),
        ("0", 4, False, "cpu"),
        ("0,1,2", 4, False, "cpu"),
        ("0,1,2,3", 4, False, None),
        ("", 4, True, None),
        ("0,1,2,3", 4, True, "cpu"),
    ],
)
def test_whatever_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch, visible: str, groups: int, partitions: bool, device: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    console = Console(record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    assert command.device_for(console, groups, partitions) == device
    assert len(console.export_text().splitlines()) == (device is not None)
    monkeypatch.setenv("PLANARIA_RUN_DEVICE", "cuda")
    assert command.device_for(console, groups, partitions) == "cuda", "said so"


def test_groups_of_so_many_processes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--nproc-per-group 0: a group has between 1 and"):
        chaos(here(tmp_path), nproc_per_group=0)
    with pytest.raises(UsageError, match="networks are cut for groups of one process only"):
        chaos(here(tmp_path), nproc_per_group=2, kinds="kill,partition")


def test_partitions_without_root_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match="partitions need root"):
        chaos(here(tmp_path), kinds="kill,partition")


def test_a_plot_without_matplotlib_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"planaria\[plot\]"):
        demo(plot=tmp_path / "out.png", log_dir=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def test_a_plot_into_nowhere_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(UsageError, match="no directory"):
        plot.require(tmp_path / "no" / "out.png")


def test_a_log_directory_with_traces_is_refused(tmp_path: Path) -> None:
    assert new_directory(tmp_path / "new", "chaos") == tmp_path / "new"
    (tmp_path / "rg0").mkdir()
    with pytest.raises(UsageError, match="not empty"):
        new_directory(tmp_path, "chaos")
    assert new_directory(None, "demo").is_absolute()


def test_the_command_line_ends_with_2_and_a_sentence(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "planaria", "chaos", "nowhere.py", "--kills", "3"]
    done = subprocess.run(words, env=with_home(os.environ), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip() == "planaria: there is no script nowhere.py"


def test_a_failed_run_is_told_in_its_own_words(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    error = failed(1, log)
    assert type(error) is PlanariaError and "line 99" in str(error) and "line 50" not in str(error)
    assert isinstance(failed(2, log), UsageError)
    assert "code 3" in str(failed(3, tmp_path / "none"))


def test_partitions_get_namespaces_and_the_rest_one_run(tmp_path: Path) -> None:
    what = Script(tmp_path / "s.py", groups=3)
    assert len(deployment(what, tmp_path, (Fault(Kind.KILL),)).directories) == 1
    apart = deployment(what, tmp_path, (Fault(Kind.KILL), Fault(Kind.PARTITION)))
    assert len(apart.directories) == 3 and apart.network is not None


def test_sigterm_ends_in_order_and_only_while_it_is_asked_to() -> None:
    code = """
        import os, signal
        from planaria.cli.chaos import ending_in_order
        with ending_in_order():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                print("in order")
    """
    lines = [line[8:] for line in code.splitlines()]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=with_home(os.environ), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (143, b"in order\n")
    with ending_in_order():
        pass


def test_an_interrupt_says_that_all_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_prove", interrupted)
    console = Console(record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    proof = command.Proof(False, None, {})
    assert command.prove(console, Script(tmp_path), (), tmp_path, proof) == 130
    assert "ended" in console.export_text()


# --- what is printed --------------------------------------------------------------------------------------------


def blow(kind: Kind, **more: object) -> Injected:
    member = NOBODY if kind is Kind.LIGHTHOUSE else MEMBER
    phase = None if kind is Kind.LIGHTHOUSE else Phase.COMPUTING
    return Injected(Fault(kind, **more), member, 5_000_000_000, 17, phase)  # type: ignore[arg-type]


def verdict(**more: object) -> Verdict:
    kill = blow(Kind.KILL, moment=Moment.EXCHANGING, note="in mid-exchange")
    costs = (
        Cost(kill, True, 0.125, 0.75),
        Cost(blow(Kind.STOP, duration=1.5), True, 0.5, 2.0),
        Cost(blow(Kind.STOP, duration=0.1), False, 0.1, None),
        Cost(blow(Kind.LIGHTHOUSE), False, 0.0625, None),
    )
    facts: dict[str, object] = {
        "steps": 60,
        "committed": 60,
        "discarded": 0,
        "shards_lost": 0,
        "contradictions": (),
        "costs": costs,
        "digests": ("abc",),
        "curve": ((58, 2.5), (59, 2.25)),
        "quiet_loss": 2.25,
        "quiet_digest": "abc",
        "verified": True,
    }
    return Verdict(**{**facts, **more})  # type: ignore[arg-type]


def troubled(tmp_path: Path, left: int = 0) -> Troubled:
    return Troubled(0, 12.5, Watch(tmp_path), tuple(cost.fault for cost in verdict().costs), left)


def printed(*what: object) -> str:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=200, file=nowhere)
        for each in what:
            console.print(each)
        return console.export_text()


def test_the_table_has_every_figure(tmp_path: Path) -> None:
    text = printed(report.verdict_table(verdict(), troubled(tmp_path)))
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if "│" in line]
    found = {row[0]: row[1] for row in rows}
    assert found["faults"] == "1 kill, 2 stop, 1 lighthouse"
    assert found["steps committed"] == "60 of 60"
    assert found["steps discarded"] == found["samples lost"] == "0"
    assert found["recovery from a kill, median"] == found["recovery from a kill, worst"] == "0.125 s"
    assert found["recovery from a hang, worst"] == "0.500 s"
    assert found["next commit without a lighthouse, worst"] == "0.062 s"
    assert found["killed group takes part again, median"] == "0.750 s"
    assert found["loss at the end"] == found["loss of the quiet run"] == "2.25"
    assert found["bit-identical"] == "yes"


def test_the_table_says_what_is_wrong(tmp_path: Path) -> None:
    bad = verdict(quiet_differences=3, digests=("abd",), shards_lost=4, contradictions=("group 1 lies",))
    text = printed(report.verdict_table(bad, troubled(tmp_path, left=2)))
    assert "NO (loss differs at 3 steps)" in text
    assert "those of 4 shards" in text and "group 1 lies" in text
    assert "2 more did not come to pass" in text
    assert not bad.good and not bad.identical


def test_the_table_of_an_unverified_run_does_not_claim_more(tmp_path: Path) -> None:
    text = printed(report.verdict_table(verdict(verified=False), troubled(tmp_path)))
    assert "not asked" in text and "yes" not in text


def test_each_fault_is_a_row() -> None:
    text = printed(report.faults_table(verdict().costs))
    assert "SIGKILL: group 2 (incarnation 1), in mid-exchange" in text
    assert "missed that moment: struck while computing" in text
    assert "SIGSTOP: group 2 (incarnation 1), for 1.5 s" in text
    assert "SIGKILL: the lighthouse" in text and "network" not in text
    assert "network cut" in report.sentence(blow(Kind.PARTITION, duration=2.0))


def test_the_record_holds_everything_and_is_json(tmp_path: Path) -> None:
    body = json.loads(json.dumps(report.record(verdict(), troubled(tmp_path), {"seed": 7})))
    assert body["asked"] == {"seed": 7} and body["good"] and body["bit_identical"]
    assert (body["steps_discarded"], body["shards_lost"], body["recovery_worst"]) == (0, 0, 0.125)
    kill, hang, blink, lighthouse = body["faults"]
    assert (kill["moment"], kill["struck_as_planned"], kill["back"]) == ("exchanging", False, 0.75)
    assert hang["duration"] == 1.5 and not blink["lost"] and lighthouse["group"] is None
    assert report.record(verdict(verified=False), troubled(tmp_path), {})["bit_identical"] is None


def test_both_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(tmp_path / "out.png", verdict(), Record(()), [blow(Kind.KILL)])
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_without_a_terminal_the_story_is_told_in_lines(
    cluster: Cluster, watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.rank(0)
    watch.poll()
    events = [Event(1.0, "quorum", "quorum 1.1: groups 0"), Event(1.0, "ready", "of no interest")]
    with View(Console(force_terminal=False), "title") as view, Waiting(Console(force_terminal=False), "x") as wait:
        view.show(watch, [], events)
        view.show(watch, [blow(Kind.KILL, victim=Victim.HOST)], events)
        wait.tick()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("step     3  ")[2] for line in lines] == [
        "quorum 1.1: groups 0",
        "loss 0.3333",
        "SIGKILL: group 2 (incarnation 1)",
    ]


def test_on_a_terminal_groups_and_faults_are_drawn(
    cluster: Cluster, watch: Watch, capsys: pytest.CaptureFixture[str]
) -> None:
    process = cluster.rank(0)
    cluster.rank(1, phase="exchanging")
    watch.poll()
    process.kill()
    until(lambda: not watch.newest()[0].alive)
    with View(Console(force_terminal=True, width=150), "title") as view:
        view.show(watch, [blow(Kind.KILL)], [])
    drawn = capsys.readouterr().out
    assert "dead" in drawn and "exchanging" in drawn and "SIGKILL: group" in drawn and "quorum 1.1" in drawn
    started = time.monotonic()
    with Waiting(Console(force_terminal=True), "training quietly") as wait:
        wait.tick()
    assert "training quietly" in capsys.readouterr().out and time.monotonic() > started
