"""What can be seen of a run from outside, with real pages and real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from pretend import Cluster, until

from planaria.chaos.watch import Watch, agent_pid, children_of, command_of, open_child, parent_of
from planaria.core.messages import Member, Phase, QuorumId
from planaria.wire.page import KEPT, ProgressPage

ONE = QuorumId(1, 1)


def test_incarnations_are_found_as_they_come(cluster: Cluster, watch: Watch) -> None:
    cluster.rank(0)
    watch.poll()
    cluster.rank(1)
    cluster.rank(0, 1)
    watch.poll()
    assert sorted(watch.lives) == [Member(0, 0), Member(0, 1), Member(1, 0)]
    assert [life.member for life in watch.newest()] == [Member(0, 1), Member(1, 0)]
    assert watch.step == 3 and watch.quorum == ONE


def test_what_is_moved_aside_meanwhile_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"pid": os.getpid()}))
    watch, aside, over = Watch(tmp_path), tmp_path / "earlier-1", threading.Event()

    def move() -> None:
        while not over.is_set():
            (tmp_path / "rg0" / "i0").mkdir(parents=True)
            (tmp_path / "rg0").rename(aside)
            shutil.rmtree(aside)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(3000):
            watch.poll()
    finally:
        over.set()
        mover.join()
    assert not watch.lives


def test_all_commits_are_kept_though_the_page_keeps_few(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"pid": os.getpid()}))
    where = tmp_path / "rg0" / "i0"
    where.mkdir(parents=True)
    page = ProgressPage.create(where / "progress")
    watch = Watch(tmp_path)
    total = 3 * KEPT
    for step in range(1, total + 1):
        page.committed(step, ONE, 0.5, step, step, 0)
        if step % (KEPT // 2) == 0:
            watch.poll()
            life = watch.lives[Member(0, 0)]
            life.over = False  # the writer is this very process, which is not its own child and so counts as gone
    watch.poll()
    assert [commit.step for commit in watch.lives[Member(0, 0)].commits] == list(range(1, total + 1))
    watch.close()


def test_a_dead_rank_is_dead_and_what_it_wrote_last_is_seen(cluster: Cluster, watch: Watch) -> None:
    process = cluster.rank(0, commits=5)
    watch.poll()
    life = watch.lives[Member(0, 0)]
    assert life.alive and not life.stopped
    process.kill()  # not reaped yet: a zombie is dead too
    until(lambda: not life.alive)
    watch.poll()
    watch.poll()
    assert life.over and not life.stopped
    assert [commit.step for commit in life.commits] == [1, 2, 3, 4, 5]
    process.wait()
    assert not life.alive


def test_a_stopped_rank_is_alive_and_stopped(cluster: Cluster, watch: Watch) -> None:
    process = cluster.rank(0)
    watch.poll()
    life = watch.lives[Member(0, 0)]
    process.send_signal(signal.SIGSTOP)
    until(lambda: life.stopped)
    assert life.alive
    process.send_signal(signal.SIGCONT)
    until(lambda: not life.stopped)


def test_a_group_is_all_its_ranks(cluster: Cluster, watch: Watch) -> None:
    first, second = cluster.rank(0, commits=5), cluster.rank(0, rank=1, commits=4)
    watch.poll()
    watch.poll()
    life = watch.lives[Member(0, 0)]
    assert {rank: process.pid for rank, process in life.processes.items()} == {0: first.pid, 1: second.pid}
    assert life.alive and life.view.step == 5, "what it does is what rank 0 does"
    second.send_signal(signal.SIGSTOP)
    until(lambda: life.stopped)
    life.processes[1].signal(signal.SIGKILL)
    until(lambda: not life.alive)
    assert life.processes[0].alive and not watch.settled()
    watch.poll()
    assert not life.over, "rank 0 may still write"
    first.kill()
    until(lambda: not life.processes[0].alive)
    watch.poll()
    assert life.over


def test_settled_are_those_at_work_who_keep_up(cluster: Cluster, watch: Watch) -> None:
    cluster.rank(0, commits=5)
    cluster.rank(1, commits=4)  # one commit behind: it happens between any two looks
    cluster.rank(2, commits=3)  # two behind: healing, or stuck
    cluster.rank(3, commits=0)  # has just come
    cluster.rank(4, commits=5, phase="parked")
    dead = cluster.rank(5, commits=5)
    stopped = cluster.rank(6, commits=5)
    watch.poll()
    dead.kill()
    stopped.send_signal(signal.SIGSTOP)
    until(lambda: not watch.lives[Member(5, 0)].alive and watch.lives[Member(6, 0)].stopped)
    watch.poll()
    assert [life.member.group for life in watch.settled()] == [0, 1]


def test_a_member_of_an_older_quorum_does_not_count(cluster: Cluster, watch: Watch) -> None:
    cluster.rank(0)
    cluster.rank(1)
    watch.poll()
    assert len(watch.settled()) == 2
    newer = ProgressPage.create(cluster.directory / "rg0" / "i0" / "elsewhere")
    newer.committed(4, QuorumId(1, 2), 0.1, time.monotonic_ns(), 8, 0)
    newer.set_phase(Phase.COMPUTING)
    life = watch.lives[Member(0, 0)]
    life.page.close()
    life.processes[0].page = newer
    watch.poll()
    assert [each.member.group for each in watch.settled()] == [0]
    life.processes[0].page = ProgressPage.open(cluster.directory / "rg0" / "i0" / "progress")


def test_nothing_is_read_before_the_agent_has_said_who_it_is(cluster: Cluster, watch: Watch) -> None:
    cluster.rank(0)
    run = cluster.directory / "run.json"
    said = run.read_text()
    run.unlink()
    watch.poll()
    assert not watch.lives and agent_pid(cluster.directory) is None
    run.write_text(said[: len(said) // 2])
    watch.poll()
    assert not watch.lives
    run.write_text(said)
    watch.poll()
    assert list(watch.lives) == [Member(0, 0)]


def test_a_stranger_with_the_pid_of_a_page_is_left_alone(cluster: Cluster, watch: Watch) -> None:
    where = cluster.directory / "rg0" / "i0"
    where.mkdir(parents=True)
    ProgressPage.create(where / "progress", pid=1)
    watch.poll()
    life = watch.lives[Member(0, 0)]
    assert life.processes[0].pidfd == -1 and not life.alive and not watch.settled()


def test_open_child_takes_children_only() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        descriptor = open_child(child.pid, os.getpid())
        assert descriptor >= 0
        os.close(descriptor)
        assert open_child(child.pid, os.getppid()) == -1
        assert parent_of(child.pid) == os.getpid()
        assert child.pid in children_of(os.getpid())
        until(lambda: command_of(child.pid)[-2:] == ["-c", "input()"])
    assert open_child(child.pid, os.getpid()) == -1
    assert parent_of(child.pid) == 0 and command_of(child.pid) == [] and children_of(child.pid) == []


def test_events_are_read_once_and_whole(tmp_path: Path) -> None:
    one, two = tmp_path / "a", tmp_path / "b"
    for directory in (one, two):
        directory.mkdir()
    watch = Watch(one, two)
    assert watch.events() == []
    later = json.dumps({"at": 2.0, "kind": "lost", "text": "gone", "group": 1, "data": {}})
    (one / "events.jsonl").write_text(later + "\nnot json\n" + later[:10])
    (two / "events.jsonl").write_text(json.dumps({"at": 1.0, "kind": "join", "text": "come"}) + "\n")
    assert [(event.kind, event.group) for event in watch.events()] == [("join", -1), ("lost", 1)]
    with (one / "events.jsonl").open("a") as file:
        file.write(later[10:] + "\n")
    assert [event.text for event in watch.events()] == ["gone"]
    assert watch.events() == []
