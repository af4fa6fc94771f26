"""Who may do what at a lighthouse. A certificate names its holder's role in a URI of its own."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

_SCHEME = "planaria:role:"
# The name in the certificate of a lighthouse, whatever its address is: who may be one is for the authority to say.
LIGHTHOUSE_NAME = "lighthouse.planaria"


class Role(Enum):
    """``VIEWER`` reads; ``OPERATOR`` also changes jobs; an ``AGENT`` speaks for groups, and asks for what their health
    wants."""

    LIGHTHOUSE = "lighthouse"
    AGENT = "agent"
    OPERATOR = "operator"
    VIEWER = "viewer"

    @property
    def uri(self) -> str:
        return _SCHEME + self.value


READ = frozenset({Role.AGENT, Role.OPERATOR, Role.VIEWER})
CHANGE = frozenset({Role.AGENT, Role.OPERATOR})
ATTEND = frozenset({Role.AGENT})


def roles_of(names: Iterable[bytes]) -> frozenset[Role]:
    """Those that the alternative names of a certificate grant."""
    uris = {name.decode(errors="replace") for name in names}
    return frozenset(role for role in Role if role.uri in uris)
