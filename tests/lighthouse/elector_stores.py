"""The stores of electors, as real servers of a test: etcd, and Kubernetes' API server on top of it.

Where there is no ``kube-apiserver`` (nobody packages it; it takes minutes to build), a small HTTPS server stands in for
it: the same paths and answers for Leases, and a write is taken only if it names the newest resourceVersion.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from planaria.lighthouse import elector
from planaria.lighthouse.elector import Elector, StoreAway, open_elector
from planaria.wire import authority
from tests.ports import free_ports
from tools import kube_control_plane

# Seconds. Hangs are what ends here: a real API server starts in 10 s, and in 33 s beside three busy processes.
PATIENCE = 150.0
# As by default: of a shorter one a leader that gets no processor, or waits for a disk, for less than a second may lose
# the lead, on a loaded machine.
LEASE = elector.LEASE
LONG = 600.0  # where none is to lapse: a store is also waited for by a share of the lease


class Process:
    """A server that can be paused, killed and started again with what it has on disk."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._command, self._log = command, log
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def until(self, answers: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            try:
                if answers():
                    return
            except (StoreAway, OSError):
                pass
            assert self._process.poll() is None and time.monotonic() < end, self._log.read_text()[-3000:]
            time.sleep(0.05)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def etcd(directory: Path, *options: str, scheme: str = "http") -> tuple[Process, str]:
    """(process, URL)."""
    if shutil.which("etcd") is None:
        pytest.skip("there is no etcd here (apt-get install etcd-server)")
    directory.mkdir()
    client, peer = (f"://127.0.0.1:{port}" for port in free_ports(2))
    urls = {"listen-client": scheme + client, "advertise-client": scheme + client, "listen-peer": f"http{peer}"}
    words = [f"--{name}-urls={url}" for name, url in urls.items()]
    words += [f"--initial-advertise-peer-urls=http{peer}", f"--initial-cluster=default=http{peer}"]
    process = Process(["etcd", f"--data-dir={directory / 'data'}", *words, *options], directory / "log")
    return process, scheme + client


class Store:
    """One kind of store, for any number of candidates."""

    def __init__(self, where: str, credentials: Path | None = None, process: Process | None = None) -> None:
        self.where, self.credentials, self.process = where, credentials, process
        self._opened: list[Elector] = []
        self._closing: list[Callable[[], None]] = [process.close] if process is not None else []

    def candidate(self, seconds: float = LEASE) -> Elector:
        self._opened.append(open_elector(self.where, seconds, self.credentials))
        return self._opened[-1]

    def options(self, seconds: float = LEASE) -> tuple[str, ...]:
        """Of ``planaria lighthouse``."""
        more = ("--elector-credentials", str(self.credentials)) if self.credentials else ()
        return ("--elector", self.where, "--lease", str(seconds), *more)

    def at_end(self, close: Callable[[], None]) -> None:
        self._closing.append(close)

    def close(self) -> None:
        for each in self._opened:
            each.close()
        for close in reversed(self._closing):
            close()


def file_store(directory: Path) -> Store:
    return Store(f"file:{directory / 'shared'}")


def etcd_store(directory: Path) -> Store:
    process, url = etcd(directory / "etcd", "--unsafe-no-fsync")
    store = Store(f"etcd:{url}/site", process=process)
    probe = store.candidate()
    process.until(lambda: probe.last("nobody") is None)
    return store


def etcd_tls_store(directory: Path) -> Store:
    """etcd that lets in only who has a certificate of its authority."""
    site = directory / "site"
    authority.init(site, 1)
    server, client = site / "lighthouse.pem", directory / "client"
    client.mkdir()
    shutil.copy(site / "ca.pem", client / "ca.pem")
    shutil.copy(site / "operator.pem", client / "client.pem")
    _name_loopback(site, server)
    words = [f"--cert-file={server}", f"--key-file={server}", f"--trusted-ca-file={site / 'ca.pem'}"]
    process, url = etcd(directory / "etcd", "--unsafe-no-fsync", "--client-cert-auth", *words, scheme="https")
    store = Store(f"etcd:{url}", client, process)
    probe = store.candidate()
    process.until(lambda: probe.last("nobody") is None)
    return store


def kubernetes_store(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The real API server, as PLANARIA_KUBE_APISERVER or the path name it, or as make test-k8s has built it."""
    binary = os.environ.get("PLANARIA_KUBE_APISERVER") or shutil.which("kube-apiserver")
    if binary is None and kube_control_plane.there():
        binary = str(kube_control_plane.cache() / "kube-apiserver")
    if binary is None:
        pytest.skip("there is no kube-apiserver here (PLANARIA_KUBE_APISERVER names one; make test-k8s builds one)")
    below, url = etcd(directory / "etcd", "--unsafe-no-fsync")
    (port,) = free_ports(1)
    key, tokens, certificates = directory / "sa.key", directory / "tokens.csv", directory / "certs"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    tokens.write_text('secret,lighthouse,1,"system:masters"\n')
    words = {
        "etcd-servers": url,
        "cert-dir": certificates,
        "secure-port": port,
        "bind-address": "127.0.0.1",
        "advertise-address": "127.0.0.1",
        "endpoint-reconciler-type": "none",
        "token-auth-file": tokens,
        "authorization-mode": "RBAC",
        "service-account-issuer": "https://tests",
        "service-account-signing-key-file": key,
        "service-account-key-file": key,
        "service-cluster-ip-range": "10.0.0.0/24",
        "disable-admission-plugins": "ServiceAccount",
    }
    process = Process([binary, *(f"--{name}={value}" for name, value in words.items())], directory / "log")
    process.until((certificates / "apiserver.crt").exists)
    store = Store("kubernetes:default/lighthouse", _account(directory, certificates / "apiserver.crt"), process)
    store.at_end(below.close)
    _here(monkeypatch, port)
    probe = store.candidate(60.0)
    # The namespace is there last.
    process.until(lambda: probe.acquire("x:1", 0, "") and probe.release() is None)
    return store


def stand_in_store(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    site = directory / "site"
    authority.init(site, 1)
    _name_loopback(site, site / "lighthouse.pem")
    server = LeaseServer(site / "lighthouse.pem")
    store = Store("kubernetes:default/lighthouse", _account(directory, site / "ca.pem"))
    store.at_end(server.close)
    _here(monkeypatch, server.server_address[1])
    return store


def _account(directory: Path, authority: Path) -> Path:
    account = directory / "account"
    account.mkdir()
    shutil.copy(authority, account / "ca.crt")
    (account / "token").write_text("secret\n")
    return account


def _here(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(port))


def _name_loopback(site: Path, path: Path) -> None:
    """A certificate that names 127.0.0.1, as servers which are not ours have them."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    signer = serialization.load_pem_private_key((site / "ca.key").read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((site / "ca.pem").read_bytes()).subject
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server of others")])
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).add_extension(names, critical=False)
    builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
    made = builder.not_valid_after(now + datetime.timedelta(days=1)).sign(signer, hashes.SHA256())  # type: ignore[arg-type]
    form = serialization.PrivateFormat.PKCS8
    private = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))


class LeaseServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Leases)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.leases: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Leases(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: LeaseServer

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _do(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")
        if self.headers.get("Authorization") != "Bearer secret":
            self._answer(401, {"message": "Unauthorized"})
            return
        with self.server.lock:
            self._answer(*self._decide(body))

    def _decide(self, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        leases, collection = self.server.leases, "/apis/coordination.k8s.io/v1/namespaces/default/leases"
        path = self.path if self.command != "POST" else f"{collection}/{(body or {})['metadata']['name']}"
        known = leases.get(path)
        if self.command == "GET" or body is None:
            return (404, {"message": "not found"}) if known is None else (200, known)
        if self.command == "PUT" and known is None:
            return 404, {"message": "not found"}
        if known is not None and body["metadata"].get("resourceVersion") != known["metadata"]["resourceVersion"]:
            return 409, {"message": "the object has been modified"}
        self.server.version += 1
        body["metadata"]["resourceVersion"] = str(self.server.version)
        leases[path] = json.loads(json.dumps(body))
        return 200, leases[path]

    do_GET = do_PUT = do_POST = _do
