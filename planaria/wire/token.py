"""A secret of each role, for where TLS ends before the lighthouse (an ingress, a mesh): callers prove they have one.

Each line of the file is a role and 32 bytes in hexadecimal digits. A lighthouse needs all of them, others the lines of
their own roles. The first line of a role is the one that is used, all are believed: so a file is replaced at the
lighthouse first. It is read for every call, so nothing is restarted for it.

The secret itself never travels. Each call carries a proof of its own, made of the role, the method that is called, the
time and a number that is used once (HMAC-SHA256, RFC 2104); what was seen on the way is worth nothing to that
lighthouse afterwards, and what was held back there is good for that method alone. What is said in the call is
protected by TLS alone.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planaria.errors import PlanariaError, UsageError
from planaria.files import one_at_a_time, write_whole
from planaria.wire.roles import Role

ENVIRONMENT = "PLANARIA_TOKEN_FILE"
HEADER = "planaria-proof"
ROLES = (Role.AGENT, Role.OPERATOR, Role.VIEWER)
# Clocks of machines that train together differ by milliseconds; a machine whose clock nobody sets, by seconds.
SKEW = 30.0  # seconds
# Of proofs that were good, so only holders of a secret can fill it: a thousand calls a second while they count.
REMEMBERED = 1 << 16
_LINE = re.compile(r"(\w+) ([0-9a-f]{64})")
_PROOF = re.compile(r"(\w{1,16}) (\d{1,13}) ([0-9a-f]{32}) ([0-9a-f]{64})")


class Denied(PlanariaError):
    """The caller has shown no proof that counts, and may with another one."""


@dataclass(frozen=True, slots=True)
class Token:
    path: Path

    @staticmethod
    def given(environ: Mapping[str, str] = os.environ) -> Token | None:
        """The file that the environment names. Raises UsageError if it holds no secret."""
        if not (name := environ.get(ENVIRONMENT)):
            return None
        token = Token(Path(name))
        token.secrets()
        return token

    def secrets(self) -> list[tuple[Role, bytes]]:
        """What the file holds now. Raises UsageError."""
        try:
            lines = self.path.read_text("ascii").splitlines()
        except OSError as error:
            raise UsageError(f"--token-file {self.path}: cannot read it ({error.strerror})") from None
        except UnicodeDecodeError:
            lines = ["?"]
        found = [_LINE.fullmatch(line.strip()) for line in lines if line.strip()]
        known = {role.value: role for role in ROLES}
        if not found or any(each is None or each[1] not in known for each in found):
            raise UsageError(
                f"--token-file {self.path}: its lines must be a role ({', '.join(known)}) and 64 digits; "
                f"planaria certs token FILE makes one"
            )
        return [(known[each[1]], bytes.fromhex(each[2])) for each in found if each is not None]

    def proof(self, method: str, roles: Sequence[Role]) -> str:
        """For one call of ``method``, in the first of ``roles`` of which there is a secret. Raises UsageError."""
        held = self.secrets()
        for role in roles:
            for other, secret in held:
                if other is role:
                    said = f"{role.value} {int(time.time() * 1000)} {secrets.token_hex(16)}"
                    return f"{said} {_sign(secret, said, method)}"
        wanted = " or ".join(role.value for role in roles)
        raise UsageError(f"--token-file {self.path} holds no secret of the role {wanted}")


def metadata(method: str, *roles: Role) -> tuple[tuple[str, str], ...]:
    """What goes with a call of ``method``, if a token is used here."""
    token = Token.given()
    return () if token is None else ((HEADER, token.proof(method, roles)),)


class Guard:
    """At the lighthouse: what was shown counts once."""

    def __init__(self, token: Token) -> None:
        self._token = token
        self._began = time.time()
        self._seen: dict[str, float] = {}  # numbers that were used, in the order of their use: when that was

    def role(self, method: str, shown: Iterable[tuple[str, str | bytes]]) -> Role:
        """Of the caller of ``method`` whose metadata this is. Raises Denied."""
        found = next((value for key, value in shown if key == HEADER), None)
        parts = _PROOF.fullmatch(found) if isinstance(found, str) and found.isascii() else None
        if parts is None:
            raise Denied("this lighthouse wants a token (--token-file)")
        name, at, number, signature = parts.groups()
        said = found[: -len(signature) - 1] if isinstance(found, str) else ""
        try:
            held = self._token.secrets()
        except UsageError:
            raise Denied("the token file of the lighthouse cannot be read now") from None
        # All are compared, in constant time each: how long it takes says nothing of them.
        matching = [role for role, secret in held if hmac.compare_digest(_sign(secret, said, method), signature)]
        good = [role for role in matching if role.value == name]
        if not good:
            raise Denied("the token is none that this lighthouse knows, or was not given for this call")
        made, now = int(at) / 1000, time.time()
        if abs(now - made) > SKEW:
            raise Denied(f"the caller's clock differs by {made - now:+.0f} s; {SKEW:.0f} s are allowed")
        if made < self._began - 0.001:
            raise Denied("the proof is older than this lighthouse, which cannot know whether it was used")
        self._forget(now)
        if number in self._seen:
            raise Denied("the proof was used before")
        if len(self._seen) >= REMEMBERED:
            raise Denied("too many calls")
        self._seen[number] = now
        return good[0]

    def _forget(self, now: float) -> None:
        """What is too old to count need not be remembered; one that was made by a clock that is ahead counts longer."""
        while self._seen and next(iter(self._seen.values())) < now - 2 * SKEW:
            del self._seen[next(iter(self._seen))]


def _sign(secret: bytes, said: str, method: str) -> str:
    return hmac.new(secret, f"planaria 2 {method} {said}".encode(), "sha256").hexdigest()


def make(path: Path, roles: Sequence[Role]) -> Path:
    """New secrets of ``roles`` into ``path``; of those before one each stays, for whoever has not the new one yet."""
    try:
        # What another one is making at the same time must not be lost: somebody may have it already.
        with one_at_a_time(path.with_name(f".{path.name}.lock"), 0o600):
            _make(path, roles)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    return path


def _make(path: Path, roles: Sequence[Role]) -> None:
    old = Token(path).secrets() if path.exists() else []
    lines = []
    for role in ROLES:
        kept = [secret.hex() for other, secret in old if other is role]
        fresh = [secrets.token_hex(32)] if role in roles else []
        lines += [f"{role.value} {secret}" for secret in (fresh + kept)[:2]]
    write_whole(path, "\n".join(lines) + "\n", mode=0o600)
