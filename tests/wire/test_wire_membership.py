"""The membership record: what was added is what is found, and nothing else is taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.core.messages import QuorumId
from planaria.errors import UsageError
from planaria.wire.membership import FILE, Membership, Script, Sync, read, write

groups = st.frozensets(st.integers(0, 4))


@st.composite
def syncs(draw: st.DrawFn) -> Sync:
    counted = draw(groups)
    anew = frozenset(group for group in draw(groups) if group in counted)
    return Sync(counted, anew, draw(groups) - counted)


# Most syncs are like the one before.
runs = st.lists(st.tuples(syncs(), st.integers(1, 4)), min_size=1).map(
    lambda items: [s if i == 0 else Sync(s.counted, frozenset(), frozenset()) for s, n in items for i in range(n)]
)


@given(runs)
def test_every_sync_is_found_again_and_few_have_a_line(run: list[Sync]) -> None:
    record = Membership()
    lines = [record.add(number, sync) for number, sync in enumerate(run)]
    assert [record.of(number) for number in range(len(run))] == run
    assert sum(lines) == len(record.changes) <= len(run)
    assert record.of(len(run) + 5).counted == run[-1].counted
    assert record.groups() == frozenset().union(*(sync.counted | sync.left_out for sync in run))


def script(directory: Path, *syncs: Sync) -> Script:
    record = Membership()
    for number, sync in enumerate(syncs):
        record.add(number, sync)
    return Script(directory, "DiLoCo every=4", 3, 7, record)


def everybody(*groups: int) -> Sync:
    return Sync(frozenset(groups), frozenset(groups), frozenset())


def test_of_a_run_the_newest_record_counts(tmp_path: Path) -> None:
    for life, quorum, last in (("rg0/i0", 3, 0), ("rg1/i0", 2, 1), ("node1/rg2/i4", 3, 2)):
        (directory := tmp_path / life).mkdir(parents=True)
        write(directory, script(directory, everybody(0, 1), everybody(last)), QuorumId(1, quorum), 10 + last)
    found = read(tmp_path)
    assert found.path == tmp_path / "node1" / "rg2" / "i4" / FILE
    assert found.absent(1, 0) and not found.absent(1, 2)
    found.check("DiLoCo every=4", 3, 7, groups=3)
    for arguments, sentence in (
        (("DiLoCo every=8", 3, 7, 3), "method was DiLoCo every=4, this one's is DiLoCo every=8"),
        (("DiLoCo every=4", 2, 7, 3), "shards was 3"),
        (("DiLoCo every=4", 3, 8, 3), "seed was 7"),
        (("DiLoCo every=4", 3, 7, 2), "3 groups took part in that run; start --groups 3, not 2"),
    ):
        with pytest.raises(UsageError, match=sentence):
            found.check(*arguments)


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    write(tmp_path, script(tmp_path, everybody(0, 1)), QuorumId(1, 1), 3)
    good = json.loads((tmp_path / FILE).read_text())
    with pytest.raises(UsageError, match=f"no {FILE} is in the directories of its groups"):
        read(tmp_path)  # not where a group has it
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path / "nothing")
    for text, sentence in (
        ("{", "is no membership.json"),
        ("[" * 100_000, "is no membership.json"),
        ("[]", "or a damaged one"),
        (json.dumps({**good, "version": 9}), "is of version 9"),
        (json.dumps({**good, "changes": []}), "or a damaged one"),
        (json.dumps({**good, "changes": [[1, [0], [0], []]]}), "or a damaged one"),  # does not begin at the beginning
        (json.dumps({**good, "changes": [[0, [0], ["x"], []]]}), "or a damaged one"),
        (json.dumps({**good, "changes": [[0, [], [], []]]}), "or a damaged one"),  # nobody's sync
        (json.dumps({**good, "changes": [[float("inf"), [0], [], []]]}), "or a damaged one"),
        (json.dumps({**good, "changes": [[0, [0], [1], []]]}), "or a damaged one"),  # begins anew, but is not there
        (json.dumps({**good, "changes": [[0, [0], [], [0]]]}), "or a damaged one"),
        (json.dumps({**good, "changes": [[0, [0, 3], [], []]]}), "or a damaged one"),  # of three shards
        (json.dumps({**good, "changes": [[0, [0], [], []], [4, [1], [], []], [2, [0], [], []]]}), "or a damaged one"),
    ):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UsageError, match=sentence):
            read(tmp_path / FILE)
