"""What the web pages can have done to a job, and who may.

A browser sends what any page tells it to, with the certificate of whoever sits before it. So an action takes all this:

- TLS, and a certificate of an operator;
- the name that the lighthouse's certificate has as the Host: under any other name, which may be one that somebody
  else's page was loaded from (DNS rebinding), nothing can be changed;
- that the browser says that a page from here asks (Origin, Sec-Fetch-Site), and a header that a page of another origin
  may not send without having been allowed to (CORS), which nobody is.
"""

from __future__ import annotations

import json
import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from planaria.errors import PlanariaError, UsageError
from planaria.lighthouse import verbs
from planaria.lighthouse.jobs import Job
from planaria.lighthouse.seat import Seat, who_leads
from planaria.wire import control_pb2 as pb
from planaria.wire.roles import LIGHTHOUSE_NAME, Role, roles_of

log = logging.getLogger("planaria.lighthouse")

MAX_BODY = 1024  # bytes; a verb takes a number or two
HEADER = "x-planaria-action"

_PREFIX, _PARTS = "/jobs/", 2
_VERBS: dict[str, tuple[Any, Callable[[Any, Job], verbs.Chosen], dict[str, type]]] = {
    "drain": (pb.GroupRequest, verbs.drain, {"group": int}),
    "evict": (pb.GroupRequest, verbs.evict, {"group": int}),
    "kill": (pb.KillRequest, verbs.kill, {"group": int, "signal": int}),
    "scale": (pb.ScaleRequest, verbs.scale, {"groups": int}),
    "undrain": (partial(pb.NodeRequest, undrain=True), verbs.drain_node, {"node": str, "device": str}),
}


@dataclass(frozen=True, slots=True)
class Action:
    """Asked for by somebody who may, and still to be read: ``length`` bytes follow the head."""

    job: str
    verb: str
    length: int
    who: str  # for the log


class Refused(PlanariaError):
    """Why an action is not done."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


def verbs_for(caller: ssl.SSLObject | None, headers: Mapping[str, str]) -> list[str]:
    """Those that the caller could have done: the page has buttons for them, and for no others."""
    may = caller is not None and Role.OPERATOR in _roles(caller) and _own_name(headers)
    return list(_VERBS) if may else []


def asked(path: str, headers: Mapping[str, str], caller: ssl.SSLObject | None) -> Action:
    """The action that a POST asks for. Raises Refused."""
    if caller is None:
        raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "only GET")
    if Role.OPERATOR not in _roles(caller):
        raise Refused(HTTPStatus.FORBIDDEN, "this takes the certificate of an operator")
    if not _own_name(headers):
        raise Refused(HTTPStatus.MISDIRECTED_REQUEST, f"nothing is changed under another name than {LIGHTHOUSE_NAME}")
    if headers.get("origin") != f"https://{headers['host']}" or headers.get("sec-fetch-site") != "same-origin":
        raise Refused(HTTPStatus.FORBIDDEN, "only a page of this lighthouse may ask this")
    if headers.get(HEADER) != "1" or headers.get("content-type") != "application/json":
        raise Refused(HTTPStatus.FORBIDDEN, f"this takes {HEADER}: 1 and JSON")
    parts = path.removeprefix(_PREFIX).split("/")
    if not path.startswith(_PREFIX) or len(parts) != _PARTS or parts[1] not in _VERBS:
        raise Refused(HTTPStatus.NOT_FOUND, f"there is /jobs/NAME/VERB, with the verbs {', '.join(_VERBS)}")
    length = headers.get("content-length", "")
    if not (length.isascii() and length.isdecimal() and len(length) < 8 and "transfer-encoding" not in headers):
        raise Refused(HTTPStatus.LENGTH_REQUIRED, "say how long it is")
    if int(length) > MAX_BODY:
        raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {MAX_BODY} bytes")
    return Action(unquote(parts[0]), parts[1], int(length), _subject(caller))


def perform(action: Action, body: bytes, seat: Seat) -> str:
    """What will happen, as a sentence. Raises Refused."""
    make, choose, fields = _VERBS[action.verb]
    jobs = seat.jobs
    if jobs is None or not seat.may_act():
        raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, f"this lighthouse stands by: {who_leads(seat.status())}")
    try:
        request = make(**_fields(body, fields))
        if not action.job:
            raise UsageError("say which job")
        text = verbs.perform(jobs.find(action.job), partial(choose, request))
    except (ValueError, RecursionError) as error:  # no JSON, or a number that does not fit into the message
        raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from None
    except PlanariaError as error:
        raise Refused(HTTPStatus.CONFLICT, str(error)) from None
    log.info("%s by the pages: %s", action.who, text)
    return text


def _fields(body: bytes, wanted: Mapping[str, type]) -> dict[str, Any]:
    """ValueError if it is something else."""
    found = json.loads(body)
    if not isinstance(found, dict) or found.keys() != wanted.keys():
        raise ValueError(f"the fields are {', '.join(wanted)}")
    if any(type(found[name]) is not kind for name, kind in wanted.items()):  # True is no number
        raise ValueError("a field is of another type")
    return found


def _own_name(headers: Mapping[str, str]) -> bool:
    return headers.get("host", "").partition(":")[0] == LIGHTHOUSE_NAME


def _roles(caller: ssl.SSLObject) -> frozenset[Role]:
    certificate: dict[str, Any] = caller.getpeercert() or {}
    return roles_of(str(value).encode() for kind, value in certificate.get("subjectAltName", ()) if kind == "URI")


def _subject(caller: ssl.SSLObject) -> str:
    certificate: dict[str, Any] = caller.getpeercert() or {}
    return ", ".join(str(value) for part in certificate.get("subject", ()) for _, value in part) or "an operator"
