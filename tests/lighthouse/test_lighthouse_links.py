"""What operators see of the links between groups."""

from __future__ import annotations

from planaria.cli.operate import LINKS_SHOWN, links
from planaria.core.messages import NO_QUORUM, Link, Member, Phase
from planaria.core.roster import GroupStatus, JobStatus


def test_the_slowest_links_come_first_and_the_others_are_counted() -> None:
    def group(number: int, *found: Link) -> GroupStatus:
        member = Member(number, 0)
        return GroupStatus(member, "active", 3, NO_QUORUM, Phase.COMPUTING, 0.0, 0.1, 7, "a", True, links=found)

    many = [Link(number, 1e9 + number, 0.0002, 0.0) for number in range(2, 16)]
    groups = (group(0, Link(1, 2e7, 0.05, 0.035), *many), group(1, Link(0, 3e6, 0.2, 0.0)))
    told = links(JobStatus("job", 1, None, None, 2, False, groups))
    assert told.startswith(
        "links: 1 to 0 3 Mbit/s, 200 ms; 0 to 1 20 Mbit/s, 50 ms, 3.5% sent again; 0 to 2 1e+03 Mbit/s"
    )
    assert told.endswith(f"; and {16 - LINKS_SHOWN} faster")
    assert links(JobStatus("job", 1, None, None, 2, False, (group(0),))) == ""
