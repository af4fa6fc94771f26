from __future__ import annotations

import pytest

from planaria.core.messages import Member, Policy
from planaria.errors import UsageError
from planaria.rank.settings import read_settings

RUN = {
    "PLANARIA_JOB": "j",
    "PLANARIA_GROUP": "2",
    "PLANARIA_INCARNATION": "5",
    "PLANARIA_GROUPS": "4",
    "PLANARIA_SHARDS": "8",
    "PLANARIA_SOCKET": "/tmp/agent",
    "PLANARIA_DIR": "/tmp/rank",
    "PLANARIA_POLICY": "shrink",
    "PLANARIA_REDUCTION": "fast",
    "PLANARIA_HOST": "10.0.0.1",
}


def test_alone_is_a_job_of_one_group() -> None:
    settings = read_settings(None, 0, None, None, {})
    assert settings.socket is None and settings.directory is None
    assert (settings.groups, settings.shards, settings.born) == (1, 1, Member(0, 0))
    assert (settings.policy, settings.reduction) == (Policy.REDISTRIBUTE, "tree")


def test_what_a_run_says() -> None:
    settings = read_settings(None, 7, None, None, RUN)
    assert settings.born == Member(2, 5)
    assert (settings.groups, settings.shards, settings.seed) == (4, 8, 7)
    assert (settings.policy, settings.reduction, settings.host) == (Policy.SHRINK, "fast", "10.0.0.1")
    assert settings.where == "job j, group 2"


def test_the_run_has_the_last_word() -> None:
    settings = read_settings(16, 0, "redistribute", "tree", RUN)
    assert (settings.shards, settings.policy, settings.reduction) == (8, Policy.SHRINK, "fast")


def test_the_script_decides_what_the_run_leaves_open() -> None:
    settings = read_settings(16, 0, "shrink", "fast", {"PLANARIA_GROUPS": "4"})
    assert (settings.shards, settings.policy, settings.reduction) == (16, Policy.SHRINK, "fast")


def test_one_shard_for_each_group_if_nobody_says() -> None:
    assert read_settings(None, 0, None, None, {"PLANARIA_GROUPS": "4"}).shards == 4


@pytest.mark.parametrize(
    ("environ", "arguments", "named"),
    [
        ({"PLANARIA_SHARDS": "many"}, {}, "shards"),
        ({"PLANARIA_SHARDS": "0"}, {}, "shards"),
        ({"PLANARIA_GROUP": "-1"}, {}, "PLANARIA_GROUP"),
        ({"PLANARIA_GROUPS": "8", "PLANARIA_SHARDS": "4"}, {}, "8 groups cannot share 4 shards"),
        ({"PLANARIA_POLICY": "hope"}, {}, "redistribute, spare, shrink"),
        ({"PLANARIA_REDUCTION": "slow"}, {}, "tree, fast"),
        ({}, {"shards": 0}, "shards"),
        ({}, {"shards": 2.5}, "shards"),
        ({}, {"shards": True}, "shards"),
        ({}, {"seed": -1}, "seed"),
        ({}, {"policy": "hope"}, "hope"),
        ({}, {"reduction": "slow"}, "slow"),
    ],
)
def test_what_cannot_be_is_named(environ: dict[str, str], arguments: dict[str, object], named: str) -> None:
    given = {"shards": None, "seed": 0, "policy": None, "reduction": None} | arguments
    with pytest.raises(UsageError, match=named):
        read_settings(**given, environ=environ)  # type: ignore[arg-type]
