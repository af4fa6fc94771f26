"""Where the Kubernetes API server is, and how to show who one is: from within a pod, or by a kubeconfig file."""

from __future__ import annotations

import base64
import json
import os
import ssl
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from planaria.errors import UsageError

# Where Kubernetes puts a pod's own: ca.crt, token and namespace.
IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# A plugin may ask an identity service on another continent, not a person.
_PLUGIN_SECONDS = 30.0
# A plugin that says no end of its token gave it for this call; to ask it a hundred times a second helps nobody.
_PLUGIN_KEEPS = 60.0


@dataclass(frozen=True, slots=True)
class Access:
    """``headers`` is asked for every call: tokens are replaced while they are in use. ``slow``: it may take seconds."""

    server: str
    context: ssl.SSLContext | bool
    headers: Callable[[], dict[str, str]]
    namespace: str
    slow: bool = False


def find_access(kubeconfig: Path | None, environ: Mapping[str, str] = os.environ) -> Access:
    """By the file if one is given, else the pod's own, else $KUBECONFIG or ~/.kube/config. UsageError."""
    if kubeconfig is None and environ.get("KUBERNETES_SERVICE_HOST") and (IN_CLUSTER / "token").exists():
        return _of_pod(environ)
    given = kubeconfig or Path(environ.get("KUBECONFIG", "").split(os.pathsep)[0] or Path.home() / ".kube" / "config")
    try:
        found = yaml.safe_load(given.read_text())
    except OSError as error:
        raise UsageError(
            f"no access to Kubernetes: cannot read {given} ({error.strerror}); give --kubeconfig"
        ) from None
    except yaml.YAMLError as error:
        raise UsageError(f"{given} is no kubeconfig: {error}") from None
    try:
        return _of_config(found, given)
    except (OSError, KeyError, TypeError, AttributeError, StopIteration, ValueError) as error:
        raise UsageError(f"{given} is no kubeconfig that can be used ({error!r})") from None


def _of_pod(environ: Mapping[str, str]) -> Access:
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    context = ssl.create_default_context(cafile=str(IN_CLUSTER / "ca.crt"))
    namespace = (IN_CLUSTER / "namespace").read_text().strip()
    return Access(server, context, lambda: _bearer((IN_CLUSTER / "token").read_text()), namespace)


def _of_config(config: dict[str, Any], path: Path) -> Access:
    def named(kind: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = next(e for e in config[kind + "s"] if e["name"] == name)[kind]
        return found

    current = named("context", config["current-context"])
    cluster, user = named("cluster", current["cluster"]), named("user", current["user"])
    server = str(cluster["server"])
    context: ssl.SSLContext | bool = server.startswith("https:")
    if context:
        context = _context(cluster, user, path.parent)
    return Access(server, context, _headers(user, path.parent), current.get("namespace", "default"), "exec" in user)


def _context(cluster: dict[str, Any], user: dict[str, Any], base: Path) -> ssl.SSLContext:
    authority = _content(cluster, "certificate-authority", base)
    context = ssl.create_default_context(cadata=authority.decode() if authority else None)
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    certificate, key = _content(user, "client-certificate", base), _content(user, "client-key", base)
    if certificate and key:
        with tempfile.NamedTemporaryFile() as pem:  # ssl takes them from a file only; no one else may read it
            pem.write(certificate + b"\n" + key)
            pem.flush()
            context.load_cert_chain(pem.name)
    return context


def _content(entry: dict[str, Any], field: str, base: Path) -> bytes:
    if data := entry.get(field + "-data"):
        return base64.b64decode(data)
    return (base / entry[field]).read_bytes() if entry.get(field) else b""


def _headers(user: dict[str, Any], base: Path) -> Callable[[], dict[str, str]]:
    if user.get("token"):
        return lambda: _bearer(user["token"])
    if user.get("tokenFile"):
        return lambda: _bearer((base / user["tokenFile"]).read_text())
    if user.get("exec"):
        return _Plugin(user["exec"]).headers
    return dict


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token.strip()}"}


class _Plugin:
    """A program that gives tokens (client.authentication.k8s.io), as clouds have them."""

    def __init__(self, how: dict[str, Any]) -> None:
        self._command = [how["command"], *(how.get("args") or ())]
        self._environ = {e["name"]: e["value"] for e in how.get("env") or ()}
        self._version = how["apiVersion"]
        self._token, self._until = "", 0.0

    def headers(self) -> dict[str, str]:
        if time.monotonic() >= self._until:
            info = json.dumps({"apiVersion": self._version, "kind": "ExecCredential", "spec": {"interactive": False}})
            environ = {**os.environ, **self._environ, "KUBERNETES_EXEC_INFO": info}
            try:
                done = subprocess.run(
                    self._command, env=environ, capture_output=True, timeout=_PLUGIN_SECONDS, check=True
                )
                self._token = json.loads(done.stdout)["status"]["token"]
            except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
                raise UsageError(f"{self._command[0]} gives no token for Kubernetes: {error}") from None
            self._until = time.monotonic() + _PLUGIN_KEEPS
        return _bearer(self._token)
