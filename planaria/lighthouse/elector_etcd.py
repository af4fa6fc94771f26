"""An elector in etcd (3.4 and newer), by its JSON gateway: five kinds of calls, and no client library to keep up with.

::

    /planaria/leader      who leads, bound to a lease of etcd's, which ends by itself; its create_revision is the proof
    /planaria/epoch       the newest epoch
    /planaria/jobs/NAME   the newest quorum of a job
"""

from __future__ import annotations

import base64
import json
import math
import ssl
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from planaria.core.leadership import Granted, Held, Lost, Renewed
from planaria.core.roster import LineageRecord
from planaria.errors import UsageError
from planaria.lighthouse.elector import PATIENCE, Deposed, StoreAway, epoch_above, record_from_json, record_to_json
from planaria.lighthouse.rest import Rest, check_urls

_DEFAULT_PREFIX = "/planaria"


class EtcdElector:
    """``where``: URLs of the members of one etcd; a path of the last one is the prefix of our keys there."""

    def __init__(self, where: str, seconds: float, name: str, credentials: Path | None) -> None:
        *urls, last = where.split(",")
        try:
            path = urlsplit(last).path
        except ValueError:
            path = ""
        urls.append(last.removesuffix(path) if path else last)
        check_urls(urls, "--elector etcd")
        self._prefix = path.rstrip("/") or _DEFAULT_PREFIX
        self._name, self._seconds, self._credentials = name, seconds, credentials
        self._lease, self._proof = "0", ""  # etcd's number of our lease; create_revision of our key
        self._lock = threading.Lock()
        self.epoch = 0
        if credentials is not None:
            self._context()
        self._rest = Rest(urls, "etcd", self._context)

    def acquire(self, address: str, floor: int, over: str) -> Granted | Held:
        """``over`` is not needed: etcd itself ends a lease that has lapsed."""
        with self._lock:
            leader, newest = self._read("leader"), self._read("epoch")
            if leader is not None:
                known = json.loads(leader[0])
                if known.get("name") != self._name:
                    return Held(str(known.get("address", "")), "", math.inf)
            epoch = epoch_above(int(newest[0]) if newest else 0, floor, self.epoch)
            # Rounded up: the lease must not lapse before we think it does.
            granted = self._call("/v3/lease/grant", {"TTL": math.ceil(self._seconds)})
            lease = str(granted["ID"])
            value = json.dumps({"name": self._name, "address": address})
            done = self._txn(
                [
                    _compare(self._key("leader"), "CREATE", "create_revision", leader[1] if leader else "0"),
                    _compare(self._key("epoch"), "MOD", "mod_revision", newest[2] if newest else "0"),
                ],
                [self._put("leader", value, lease), self._put("epoch", str(epoch))],
            )
            held = self._read("leader") if done else None
            if held is None or json.loads(held[0]).get("name") != self._name:
                self._call("/v3/lease/revoke", {"ID": lease})
                return Held("", "", math.inf)  # somebody was faster: the next look says who
            self._lease, self._proof, self.epoch = lease, held[1], epoch
            return Granted(epoch)

    def renew(self) -> Renewed | Lost:
        with self._lock:
            answer = self._call("/v3/lease/keepalive", {"ID": self._lease})
            if int(answer.get("result", {}).get("TTL", 0)) <= 0:
                return Lost("its lease has ended in etcd")
            held = self._read("leader")
            return (
                Renewed() if held is not None and held[1] == self._proof else Lost("etcd holds that another one leads")
            )

    def release(self) -> None:
        with self._lock:
            self._call("/v3/lease/revoke", {"ID": self._lease})

    def append(self, record: LineageRecord) -> None:
        with self._lock:
            self._keep(f"jobs/{record.job}", record_to_json(record))

    def last(self, job: str) -> LineageRecord | None:
        with self._lock:
            found = self._read(f"jobs/{job}")
            return None if found is None else record_from_json(job, found[0])

    def bump_epoch(self) -> int:
        with self._lock:
            epoch = epoch_above(self.epoch)
            self._keep("epoch", str(epoch))
            self.epoch = epoch
            return self.epoch

    def close(self) -> None:
        with self._lock:
            self._rest.close()

    # --- etcd's calls ----------------------------------------------------------------------------------------

    def _keep(self, name: str, value: str) -> None:
        if not self._txn(
            [_compare(self._key("leader"), "CREATE", "create_revision", self._proof)], [self._put(name, value)]
        ):
            raise Deposed("etcd holds that another lighthouse leads")

    def _read(self, name: str) -> tuple[bytes, str, str] | None:
        """(value, create_revision, mod_revision)."""
        found = self._call("/v3/kv/range", {"key": self._key(name)}).get("kvs", [])
        if not found:
            return None
        return base64.b64decode(found[0].get("value", "")), found[0]["create_revision"], found[0]["mod_revision"]

    def _txn(self, compare: list[Any], success: list[Any]) -> bool:
        return bool(self._call("/v3/kv/txn", {"compare": compare, "success": success}).get("succeeded", False))

    def _put(self, name: str, value: str, lease: str = "0") -> dict[str, Any]:
        put = {"key": self._key(name), "value": _encoded(value), "lease": lease}
        return {"request_put": put}

    def _key(self, name: str) -> str:
        return _encoded(f"{self._prefix}/{name}")

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, answer = self._rest.call("POST", path, body, patience=PATIENCE * self._seconds)
        if status == 404 and path.startswith("/v3/lease"):
            return {}  # there is no such lease any more
        if status != 200 or not isinstance(answer, dict):
            raise StoreAway(f"etcd says {status} to {path}: {str(answer)[:200]}")
        return answer

    def _context(self) -> ssl.SSLContext:
        """The system's authorities, or those of ``credentials``/ca.pem; and its client.pem, if there is one."""
        context = ssl.create_default_context()
        if self._credentials is None:
            return context
        authority, client = self._credentials / "ca.pem", self._credentials / "client.pem"
        try:
            context = ssl.create_default_context(cafile=str(authority))
            if client.exists():
                context.load_cert_chain(client)
        except OSError as error:  # ssl.SSLError is one
            raise UsageError(f"--elector-credentials {self._credentials}: ca.pem or client.pem: {error}") from None
        return context


def _compare(key: str, target: str, field: str, revision: str) -> dict[str, str]:
    return {"key": key, "target": target, "result": "EQUAL", field: revision}


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
