"""Makes what ``planaria certs`` makes: an authority for one site or job, and a certificate for each role.

Keys are of the curve P-256 (FIPS 186-5), certificates are those of RFC 5280. The authority's own key is needed to issue
others, and nowhere else: keep it where no job runs.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from planaria.errors import UsageError
from planaria.files import one_at_a_time, write_whole
from planaria.wire.credentials import AUTHORITY
from planaria.wire.roles import AGENT_NAME, LIGHTHOUSE_NAME, Role

AUTHORITY_KEY = "ca.key"
# Of the authority itself: long beyond any run. Certificates of roles are renewed without a restart.
_AUTHORITY_DAYS = 3650
# Clocks of a cluster differ by less than this.
_SKEW = datetime.timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Authority:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def init(directory: Path, days: int) -> list[Path]:
    """A new authority, and certificates of all roles. Raises UsageError if there is one, or it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"{directory} cannot be made: {error.strerror}") from None
    with _alone_in(directory):
        return [directory / AUTHORITY, *_issue(directory, _found(directory), days, tuple(Role))]


def _found(directory: Path) -> Authority:
    if any(os.path.exists(directory / name) for name in (AUTHORITY_KEY, AUTHORITY)):
        raise UsageError(
            f"{directory} has an authority; to renew the certificates say planaria certs renew {directory}, to begin "
            "anew give another directory"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Planaria authority")])
    builder = _builder(name, name, key, _AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    authority = Authority(key, builder.sign(key, hashes.SHA256()))
    _write(directory / AUTHORITY_KEY, _private(key), 0o600)
    _write(directory / AUTHORITY, authority.certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return authority


def renew(directory: Path, days: int, roles: Sequence[Role]) -> list[Path]:
    """New keys and certificates of ``roles``, by the authority in ``directory``. Whoever uses them takes them up by
    itself. Raises UsageError."""
    authority = _read(directory)
    with _alone_in(directory):
        return _issue(directory, authority, days, roles)


def _issue(directory: Path, authority: Authority, days: int, roles: Sequence[Role]) -> list[Path]:
    written = []
    for role in roles:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"planaria {role.value}")])
        builder = _builder(name, authority.certificate.subject, key, days)
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(role.uri)]
        usages = [] if role is Role.LIGHTHOUSE else [ExtendedKeyUsageOID.CLIENT_AUTH]
        if (served := {Role.LIGHTHOUSE: LIGHTHOUSE_NAME, Role.AGENT: AGENT_NAME}.get(role)) is not None:
            names.append(x509.DNSName(served))
            usages.append(ExtendedKeyUsageOID.SERVER_AUTH)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        made = builder.sign(authority.key, hashes.SHA256())
        # Both in one file, so that nobody ever reads a key with the certificate of another.
        path = directory / f"{role.value}.pem"
        _write(path, _private(key) + made.public_bytes(serialization.Encoding.PEM), 0o600)
        written.append(path)
    return written


def _read(directory: Path) -> Authority:
    try:
        key = serialization.load_pem_private_key((directory / AUTHORITY_KEY).read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((directory / AUTHORITY).read_bytes())
    except OSError as error:
        raise UsageError(
            f"{directory} has no authority to issue certificates ({error.strerror}: {error.filename}); make one with "
            f"planaria certs init {directory}"
        ) from None
    except (ValueError, TypeError):
        raise UsageError(f"{directory}: {AUTHORITY} or {AUTHORITY_KEY} is damaged") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{directory / AUTHORITY_KEY} is not a key that planaria certs init has made")
    return Authority(key, certificate)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Two that make certificates at once, of which one is a timer's, would write into each other's drafts."""
    with ExitStack() as held:
        try:
            held.enter_context(one_at_a_time(directory / ".lock", 0o600))
        except OSError as error:
            raise UsageError(f"{directory} cannot be written: {error.strerror}") from None
        yield


def _write(path: Path, data: bytes, mode: int) -> None:
    try:
        write_whole(path, data.decode(), mode=mode)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None
