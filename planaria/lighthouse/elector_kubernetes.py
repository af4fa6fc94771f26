"""An elector in a Lease of Kubernetes (coordination.k8s.io/v1), by the API server's own HTTPS.

Every write names the resourceVersion that it follows, so none is lost and none is late. As for every Lease, renewTime
is for people: the lease lapses when others have seen it unchanged for its length, each on its own clock.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import ssl
import threading
from pathlib import Path
from typing import Any

from planaria.core.leadership import Granted, Held, Lost, Renewed
from planaria.core.roster import LineageRecord
from planaria.errors import PlanariaError, UsageError
from planaria.lighthouse.elector import PATIENCE, Deposed, StoreAway, epoch_above, record_from_json, record_to_json
from planaria.lighthouse.rest import Rest, check_urls

# Where Kubernetes puts a pod's own: ca.crt and token.
IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_ADDRESS, _EPOCH = "planaria.dev/address", "planaria.dev/epoch"
_JOB = "job.planaria.dev/"  # and a hash of the job's name
# Kubernetes takes 256 KiB of annotations; jobs that have ended are forgotten before that.
MOST_BYTES = 200 << 10


class KubernetesElector:
    """``where``: NAMESPACE/NAME of the Lease, which is made if it is missing. The account needs get, create and update
    of leases there. The server is where KUBERNETES_SERVICE_HOST and _PORT say, as in every pod."""

    def __init__(self, where: str, seconds: float, name: str, credentials: Path | None) -> None:
        namespace, slash, lease = where.partition("/")
        if not (namespace and slash and lease) or "/" in lease:
            raise UsageError(f"--elector kubernetes:{where}: give kubernetes:NAMESPACE/NAME")
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise UsageError("--elector kubernetes: KUBERNETES_SERVICE_HOST is not set; is this a pod?")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        check_urls([url], "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT")
        self._credentials = credentials or IN_CLUSTER
        self._token(), self._context()
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._where, self._lease = where, lease
        self._name, self._seconds = name, seconds
        self._object: dict[str, Any] = {}  # as last read or written
        self._lock = threading.Lock()
        self.epoch = 0
        self._rest = Rest([url], "the Kubernetes API server", self._context, self._headers)

    def acquire(self, address: str, floor: int, over: str) -> Granted | Held:
        with self._lock:
            known = self._object
            found = self._get()
            if found is None:  # never made, or deleted: then what this one knew of it still counts
                found = {"metadata": {"annotations": known.get("metadata", {}).get("annotations", {})}, "spec": {}}
            spec, notes = found.setdefault("spec", {}), _notes(found)
            holder, stamp = spec.get("holderIdentity") or "", _stamp(spec)
            if holder not in ("", self._name) and stamp != over:
                return Held(notes.get(_ADDRESS, ""), stamp, float(spec.get("leaseDurationSeconds") or self._seconds))
            epoch = epoch_above(_number(notes.get(_EPOCH)), floor, self.epoch)
            notes |= {_ADDRESS: address, _EPOCH: str(epoch)}
            now = _now()
            transitions = _number(spec.get("leaseTransitions")) + int(holder != self._name)
            spec |= {"holderIdentity": self._name, "leaseTransitions": transitions, "acquireTime": now}
            spec |= {"renewTime": now, "leaseDurationSeconds": math.ceil(self._seconds)}
            if not self._put(found):
                return Held("", "", math.inf)  # somebody was faster: the next look says who
            self.epoch = epoch
            return Granted(epoch)

    def renew(self) -> Renewed | Lost:
        with self._lock:
            try:
                self._change(lambda lease: None)
            except Deposed as why:
                return Lost(str(why))
            return Renewed()

    def release(self) -> None:
        with self._lock:
            self._change(lambda lease: lease["spec"].update(holderIdentity=""))

    def append(self, record: LineageRecord) -> None:
        def keep(lease: dict[str, Any]) -> None:
            notes = _notes(lease)
            notes[_key(record.job)] = json.dumps([record.job, record_to_json(record)])
            _forget_ended(notes, keep=_key(record.job))

        with self._lock:
            self._change(keep)

    def last(self, job: str) -> LineageRecord | None:
        with self._lock:
            lease = self._get()
            if lease is None or lease.get("spec", {}).get("holderIdentity") != self._name:
                raise Deposed(f"the Lease {self._where} is another lighthouse's")
            self._object = lease
            return _job_in(_notes(lease), job)

    def bump_epoch(self) -> int:
        with self._lock:
            epoch = epoch_above(self.epoch)
            self._change(lambda lease: _notes(lease).update({_EPOCH: str(epoch)}))
            self.epoch = epoch
            return self.epoch

    def close(self) -> None:
        with self._lock:
            self._rest.close()

    # --- the object ------------------------------------------------------------------------------------------

    def _change(self, change: Any) -> None:
        """Write it with one thing changed, and renewed. Deposed if another one leads."""
        for fresh in (False, True):
            lease = self._get() if fresh else json.loads(json.dumps(self._object))
            if lease is None or lease.get("spec", {}).get("holderIdentity") != self._name:
                raise Deposed(f"the Lease {self._where} is another lighthouse's")
            change(lease)
            lease["spec"]["renewTime"] = _now()
            if self._put(lease):
                return
        raise StoreAway(f"the Lease {self._where} is changed by others all the time")

    def _get(self) -> dict[str, Any] | None:
        status, found = self._call("GET", f"{self._collection}/{self._lease}")
        return None if status == 404 else found

    def _put(self, lease: dict[str, Any]) -> bool:
        """False if it was changed by somebody else meanwhile."""
        if "resourceVersion" in lease["metadata"]:
            status, kept = self._call("PUT", f"{self._collection}/{self._lease}", lease)
        else:
            lease |= {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
            lease["metadata"]["name"] = self._lease
            status, kept = self._call("POST", self._collection, lease)
        if status == 409 or (status == 404 and "resourceVersion" in lease["metadata"]):
            return False
        if status == 404:
            raise StoreAway(
                f"the Lease {self._where} cannot be made: {kept.get('message', 'there is no such namespace')}"
            )
        self._object = kept
        return True

    def _call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        status, answer = self._rest.call(method, path, body, patience=PATIENCE * self._seconds)
        if status not in (200, 201, 404, 409) or not isinstance(answer, dict):
            said = answer.get("message", "") if isinstance(answer, dict) else str(answer)
            raise StoreAway(f"the Kubernetes API server says {status}: {said[:200]}")
        return status, answer

    def _token(self) -> str:
        """Read anew for every call: Kubernetes replaces it while it is in use."""
        try:
            return (self._credentials / "token").read_text().strip()
        except OSError as error:
            raise UsageError(f"--elector kubernetes: cannot read {error.filename}: {error.strerror}") from None

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token()}"}

    def _context(self) -> ssl.SSLContext:
        authority = self._credentials / "ca.crt"
        try:
            return ssl.create_default_context(cafile=str(authority))
        except OSError as error:
            raise UsageError(f"--elector kubernetes: {authority}: {error}") from None


def _notes(lease: dict[str, Any]) -> dict[str, str]:
    notes: dict[str, str] = lease["metadata"].setdefault("annotations", {})
    return notes


def _stamp(spec: dict[str, Any]) -> str:
    return f"{spec.get('holderIdentity')} {spec.get('renewTime')} {spec.get('leaseTransitions')}"


def _number(value: Any) -> int:
    return int(value) if str(value).isdecimal() else 0


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _key(job: str) -> str:
    """A name may hold what the key of an annotation may not, and is told in the value."""
    return _JOB + hashlib.sha256(job.encode()).hexdigest()[:40]


def _job_in(notes: dict[str, str], job: str) -> LineageRecord | None:
    if (text := notes.get(_key(job))) is None:
        return None
    name, record = json.loads(text)
    return record_from_json(job, record) if name == job else None


def _forget_ended(notes: dict[str, str], keep: str) -> None:
    """Make room. PlanariaError if there is none: a job whose newest quorum cannot be kept must not get it."""
    for key in [key for key in notes if key.startswith(_JOB) and key != keep]:
        if sum(len(k) + len(v) for k, v in notes.items()) <= MOST_BYTES:
            return
        if not json.loads(json.loads(notes[key])[1])["members"]:
            del notes[key]
    if sum(len(k) + len(v) for k, v in notes.items()) > MOST_BYTES:
        raise PlanariaError("the quorums of all jobs are more than a Lease can hold: give each job a Lease of its own")
