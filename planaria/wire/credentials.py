"""What a process shows to others and whom it believes: files of a directory that ``planaria certs`` made.

::

    DIRECTORY/ca.pem           whom to believe
    DIRECTORY/lighthouse.pem   key and certificate of a role; a machine needs those of its own roles only
    DIRECTORY/agent.pem
    DIRECTORY/operator.pem
    DIRECTORY/viewer.pem

Files that are replaced are taken up at the next handshake (RFC 8446 for TLS 1.3), without a restart.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from planaria.errors import UsageError
from planaria.wire.roles import LIGHTHOUSE_NAME, Role

ENVIRONMENT = "PLANARIA_CREDENTIALS"
AUTHORITY = "ca.pem"
_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----\n?", re.DOTALL)
_CERTIFICATES = re.compile(rb"-----BEGIN CERTIFICATE-----.*-----END CERTIFICATE-----\n?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pem:
    key: bytes
    certificates: bytes
    authority: bytes


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of one role in a directory."""

    directory: Path
    role: Role

    @staticmethod
    def given(roles: Sequence[Role], environ: Mapping[str, str] = os.environ) -> Credentials | None:
        """In the directory that the environment names, of the first of ``roles`` of which it has any; None without a
        directory. Raises UsageError if it has none, or one that is damaged or has expired, of which gRPC would only say
        that it failed."""
        if not (name := environ.get(ENVIRONMENT)):
            return None
        directory = Path(name)
        for role in roles:
            found = Credentials(directory, role)
            try:
                found.path.stat()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                pass  # reading it says the same in a sentence
            found.context()
            found.demand_valid()
            return found
        wanted = " or ".join(f"{role.value}.pem" for role in roles)
        raise UsageError(f"--credentials {directory} has no {wanted}; planaria certs init makes them")

    @property
    def path(self) -> Path:
        return self.directory / f"{self.role.value}.pem"

    def read(self) -> Pem:
        """What the files hold now. Raises UsageError."""
        try:
            own, authority = self.path.read_bytes(), (self.directory / AUTHORITY).read_bytes()
        except OSError as error:
            what = f"cannot read {error.filename}: {error.strerror}"
            raise UsageError(f"--credentials {self.directory}: {what}") from None
        key, certificates = _KEY.search(own), _CERTIFICATES.search(own)
        if key is None or certificates is None:
            raise UsageError(f"--credentials {self.directory}: {self.path} does not hold a key and a certificate")
        if b"ENCRYPTED" in key[0]:  # OpenSSL would ask for it at the terminal, of a service that has none
            raise UsageError(
                f"--credentials {self.directory}: the key in {self.path} is locked with a password; store it without"
            )
        return Pem(key[0], certificates[0], authority)

    def demand_valid(self) -> None:
        """Raises UsageError if nobody believes the certificate any more, or not yet."""
        from cryptography import x509  # not for those who have no credentials

        certificate = x509.load_pem_x509_certificate(self.read().certificates)
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not begins <= datetime.datetime.now(datetime.UTC) <= ends:
            raise UsageError(
                f"--credentials {self.directory}: {self.path.name} is valid from {begins:%Y-%m-%d %H:%M} to "
                f"{ends:%Y-%m-%d %H:%M} UTC, and not now; planaria certs renew makes a new one"
            )

    # --- for gRPC --------------------------------------------------------------------------------------------

    def channel(self) -> tuple[grpc.ChannelCredentials, list[tuple[str, str]]]:
        """Credentials, and options that go with them, for a channel to a lighthouse."""
        pem = self.read()
        made = grpc.ssl_channel_credentials(pem.authority, pem.key, pem.certificates)
        return made, [("grpc.ssl_target_name_override", LIGHTHOUSE_NAME)]

    def server(self) -> Any:
        """For a server that lets in only whom the authority has vouched for, with the files as they are at the time."""
        known = self.read()

        def latest() -> Any:
            nonlocal known
            try:
                if (found := self.read()) == known:
                    return None
                self.context()
            except UsageError:
                return None  # half replaced: what was there before still holds
            known = found
            return _configuration(found)

        return grpc.dynamic_ssl_server_credentials(_configuration(known), latest, require_client_authentication=True)

    # --- without gRPC ----------------------------------------------------------------------------------------

    def serving(self) -> ssl.SSLContext:
        """For a server of ours that does without gRPC: each handshake takes the files as they are at the time."""
        known, latest = self.read(), self.context()

        def take_up(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            nonlocal known, latest
            with suppress(UsageError):  # half replaced: what was there before still holds
                if (found := self.read()) != known:
                    known, latest = found, self.context()
            connection.context = latest

        first = self.context()
        first.sni_callback = take_up  # called for every handshake, also if no name is asked for
        return first

    def context(self, serves: bool = True) -> ssl.SSLContext:
        """For connections of ours that do without gRPC: of a server, with the files as they are now, or to one, whose
        name must be given there."""
        pem = self.read()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
        # Every handshake is a whole one: none rests on a certificate that was shown before, perhaps one of an authority
        # that is believed no more. In 1.2 sessions are taken up without tickets too (seen).
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if serves:
            context.num_tickets = 0
        try:
            context.load_cert_chain(self.path)
            context.load_verify_locations(cadata=pem.authority.decode("ascii"))
        except (ssl.SSLError, UnicodeDecodeError) as error:
            what = f"{self.path.name} or {AUTHORITY} is damaged, or its key is another certificate's ({error})"
            raise UsageError(f"--credentials {self.directory}: {what}") from None
        return context


def _configuration(pem: Pem) -> Any:
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificates)], pem.authority)


def is_loopback(host: str) -> bool:
    """Whether nobody beyond this machine can reach ``host``, a name or an address to listen on."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: who knows where it leads


def demand_for(host: str, what: str, credentials: Credentials | None, token: object | None = None) -> None:
    """Raises UsageError if ``what`` would listen to strangers. ``token``: what else keeps them out."""
    if credentials is None and token is None and not is_loopback(host):
        raise UsageError(
            f"{what} would listen on {host}, which other machines reach, without credentials: whoever reaches it "
            "controls the jobs. Make some with planaria certs init DIR and give --credentials DIR"
        )
