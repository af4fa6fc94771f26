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
    short = frozenset((group, draw(st.integers(1, 3))) for group in draw(groups) if group in counted)
    return Sync(counted, anew, draw(groups) - counted, short)


# Most syncs are like the one before.
runs = st.lists(st.tuples(syncs(), st.integers(1, 4)), min_size=1).map(
    lambda items: [
        s if i == 0 else Sync(s.counted, frozenset(), frozenset(), s.short) for s, n in items for i in range(n)
    ]
)


@given(runs)
def test_every_sync_is_found_again_and_few_have_a_line(run: list[Sync]) -> None:
    record = Membership()
    lines = [record.add(number, sync) for number, sync in enumerate(run)]
    assert [record.of(number) for number in range(len(run))] == run
    assert sum(lines) == len(record.changes) <= len(run)
    assert record.of(len(run) + 5).counted == run[-1].counted
    assert record.groups() == frozenset().union(*(sync.counted | sync.left_out for sync in run))


IDENTITY = {"sync": "DiLoCo every=4", "shards": "3", "seed": "7", "reduction": "tree", "steps": "9", "torch": "2.13"}


def script(directory: Path, *syncs: Sync, made: int = 3) -> Script:
    record = Membership()
    for number, sync in enumerate(syncs):
        record.add(number, sync)
    return Script(directory, IDENTITY, record, made, "a", "b", "c")


def everybody(*groups: int) -> Sync:
    return Sync(frozenset(groups), frozenset(groups), frozenset())


def test_of_a_run_the_newest_record_counts(tmp_path: Path) -> None:
    for life, quorum, last in (("rg0/i0", 3, 0), ("rg1/i0", 2, 1), ("node1/rg2/i4", 3, 2)):
        (directory := tmp_path / life).mkdir(parents=True)
        made = script(directory, everybody(0, 1), everybody(last), made=10 + last)
        write(directory, made, QuorumId(1, quorum))
    found = read(tmp_path)
    assert found.path == tmp_path / "node1" / "rg2" / "i4" / FILE
    assert found.absent(1, 0) and not found.absent(1, 2)
    assert (found.syncs, found.origin, found.first, found.final) == (12, "a", "b", "c")
    found.path.write_text("{")  # the others know of all that is left
    assert read(tmp_path).path == tmp_path / "rg0" / "i0" / FILE


def test_a_job_that_cannot_have_the_same_bits_is_no_replay(tmp_path: Path) -> None:
    found = script(tmp_path, everybody(0, 1, 2))
    found.check({**IDENTITY, "steps": "100"})  # it ends where the record does
    found.check_groups(3)
    for entries, sentence in (
        ({"sync": "DiLoCo every=8"}, "method was DiLoCo every=4, this one's is DiLoCo every=8"),
        ({"shards": "2"}, "shards was 3"),
        ({"seed": "8"}, "seed was 7"),
        ({"reduction": "int8"}, "reduction was tree, this one's is int8"),
        ({"torch": "2.14"}, "torch was 2.13"),
        ({"nccl": "2.28"}, "nccl was absent"),
    ):
        with pytest.raises(UsageError, match=sentence):
            found.check({**IDENTITY, **entries})
    with pytest.raises(UsageError, match="3 groups took part in that run; start --groups 3, not 2"):
        found.check_groups(2)
    found.compare("the state", "", "x")  # not known
    with pytest.raises(UsageError, match="the state is not that run's"):
        found.compare("the state", "a", "x")


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    write(tmp_path, script(tmp_path, everybody(0, 1)), QuorumId(1, 1))
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
        (
            json.dumps({**good, "changes": [[1, [0], [0], [], []]]}),
            "or a damaged one",
        ),  # does not begin at the beginning
        (json.dumps({**good, "changes": [[0, [0], ["x"], [], []]]}), "or a damaged one"),
        (json.dumps({**good, "changes": [[0, [], [], [], []]]}), "or a damaged one"),  # nobody's sync
        (json.dumps({**good, "changes": [[float("inf"), [0], [], [], []]]}), "or a damaged one"),
        (json.dumps({**good, "changes": [[0, [0], [1], [], []]]}), "or a damaged one"),  # begins anew, but is not there
        (json.dumps({**good, "changes": [[0, [0], [], [0], []]]}), "or a damaged one"),
        (json.dumps({**good, "changes": [[0, [0, 3], [], [], []]]}), "or a damaged one"),  # of three shards
        (
            json.dumps({**good, "changes": [[0, [0], [], [], []], [4, [1], [], [], []], [2, [0], [], [], []]]}),
            "or a damaged one",
        ),
        (json.dumps({**good, "changes": [[0, [0], [], [], [[1, 2]]]]}), "or a damaged one"),  # short, but not there
        (json.dumps({**good, "changes": [[0, [0], [], [], [[0, 0]]]]}), "or a damaged one"),
        (json.dumps({**good, "identity": {**IDENTITY, "shards": "0"}}), "or a damaged one"),
        (json.dumps({**good, "syncs": 0}), "or a damaged one"),
        (json.dumps({**good, "identity": []}), "or a damaged one"),
    ):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UsageError, match=sentence):
            read(tmp_path / FILE)
