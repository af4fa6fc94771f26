"""Training while lighthouses die, sleep and are cut off: it must not notice."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from planaria.chaos import netns
from planaria.chaos.session import Script
from planaria.chaos.watch import Watch
from planaria.errors import UsageError
from tests.e2e.harness import PATIENCE, TRAIN, Run, whole_lines
from tests.lighthouse.lighthouse_clients import Lighthouse

pytestmark = pytest.mark.e2e
Quiet = Callable[..., str]
LONG = ("--steps", "80")


@pytest.fixture
def lighthouses(tmp_path: Path) -> Iterator[list[Lighthouse]]:
    # With the usual lease: of the shortest a busy machine makes nobody sure, and the leader may change by itself.
    options = ("--elector", f"file:{tmp_path / 'leader'}")
    started = [Lighthouse(tmp_path / "none", *options) for _ in range(2)]
    yield started
    for lighthouse in started:
        lighthouse.end(signal.SIGKILL)


def test_leaders_sleep_and_die_and_a_group_dies_while_nobody_leads(
    tmp_path: Path, quiet: Quiet, lighthouses: list[Lighthouse]
) -> None:
    addresses = ",".join(lighthouse.address for lighthouse in lighthouses)
    with Run(tmp_path / "run", *LONG, options=("--lighthouse", addresses)) as run:
        run.settled(3)

        def led_by() -> str:
            texts = [event["text"] for event in run.events("link")]
            return next((t for t in reversed(texts) if t.startswith("connected")), "").rpartition(" ")[2]

        def other(address: str) -> None:
            run.until(lambda: led_by() not in ("", address), "another lighthouse to lead")

        run.until(led_by, "a lighthouse")
        first = next(each for each in lighthouses if each.address == led_by())
        second = next(each for each in lighthouses if each is not first)
        first.process.send_signal(signal.SIGSTOP)
        other(first.address)
        run.step(run.watch.step + 3)
        first.process.send_signal(signal.SIGCONT)
        run.step(run.watch.step + 3)
        assert led_by() == second.address and not run.events("stale")
        urgent = run.events("quorum")
        assert len(urgent) == 1, "only the one with which the job began"
        # Nobody leads from here until the first one's turn has come, and a group is lost just then.
        second.end(signal.SIGKILL)
        run.signal(1)
        run.incarnation(1, 1)
        other(second.address)
        run.settled(3, beyond=run.watch.step)
        assert run.end() == 0, run.log()
        assert run.digests() == {quiet(*LONG)}
        assert len(run.events("recovered")) == 1


def test_a_lighthouse_that_is_cut_from_half_of_the_members_changes_nothing(tmp_path: Path, quiet: Quiet) -> None:
    """They still reach each other, so all of them train on under the quorum that they have."""
    try:
        netns.require(4)
    except UsageError as error:
        pytest.skip(str(error))
    release = tmp_path / "release"
    run = netns.NamespacedRun(Script(TRAIN, (*LONG, "--hold", str(release)), 4, None), tmp_path / "run")
    watch = Watch(*run.directories)

    def until(met: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not met():
            assert time.monotonic() < deadline and run.poll() is None, run.log.read_text()[-3000:]
            watch.poll()
            time.sleep(0.02)

    def notes(group: int, kind: str) -> list[str]:
        events = whole_lines(run.directories[group] / "events.jsonl")
        return [event["text"] for event in events if event["kind"] == kind]

    def beyond(step: int) -> None:
        until(lambda: watch.step > step)

    try:
        run.start()
        until(lambda: len([life for life in watch.settled() if life.commits]) == 4)
        assert run.network is not None
        for group in (2, 3):
            run.network.part_from_hub(group)
        until(lambda: all("out of reach" in notes(group, "link")[-1] for group in (2, 3)))
        beyond(watch.step + 3)
        for group in (2, 3):
            run.network.mend(group)
        until(lambda: all(notes(group, "link")[-1].startswith("connected") for group in (2, 3)))
        beyond(watch.step + 2)
        assert len(notes(0, "quorum")) == 1, "only the one with which the job began"
        release.touch()
        code = None
        deadline = time.monotonic() + PATIENCE
        while (code := run.poll()) is None:
            assert time.monotonic() < deadline, run.log.read_text()[-3000:]
            time.sleep(0.05)
        assert code == 0, run.log.read_text()[-3000:]
        results = [json.loads(f.read_text()) for d in run.directories for f in d.glob("rg*/i*/result.json")]
        assert {result["digest"] for result in results} == {quiet(*LONG)} and len(results) == 4
    finally:
        run.stop()
        watch.close()
