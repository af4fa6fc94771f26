"""A small API server in memory, for what needs no real one: objects, versions, watches and conflicts, as Kubernetes has
them. Nothing is checked, and nothing runs: pods are what ``kubelet`` makes of them."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.kubernetes.loopback import Loopback

Object = dict[str, Any]
_PATH = re.compile(
    r"(?P<kind>/apis?/(?:[^/]+/)?v[^/]+(?:/namespaces/[^/]+(?=/))?/[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?"
)


class SmallApi(Loopback):
    """Objects are put and removed as the server's own clients would see it."""

    def __init__(self) -> None:
        self.lacks: set[str] = set()  # versions of the API
        self.unhooked: set[str] = set()  # kinds, in the plural, whose admission webhook is away
        self.mirror = ""  # where a webhook lets images of Deployments come from
        self.objects: dict[tuple[str, str], Object] = {}  # by (path of the kind, name)
        self._history: list[tuple[str, str, Object]] = []  # (kind, what, object); versions are its lengths
        self._news = asyncio.Event()  # of the next change; another one after it

    def of(self, plural: str) -> list[Object]:
        return [found for (kind, _), found in self.objects.items() if kind.endswith(f"/{plural}")]

    async def put(self, kind: str, body: Object, what: str = "MODIFIED") -> Object:
        """As it is from now on."""
        if self.mirror and kind.endswith("/deployments"):
            for container in body["spec"]["template"]["spec"]["containers"]:
                container["image"] = f"{self.mirror}/{container['image'].removeprefix(self.mirror + '/')}"
        body["metadata"]["resourceVersion"] = str(len(self._history) + 1)
        self.objects[kind, body["metadata"]["name"]] = body
        return await self._tell(kind, what, body)

    async def remove(self, kind: str, name: str) -> None:
        body = self.objects.pop((kind, name))
        body["metadata"]["resourceVersion"] = str(len(self._history) + 1)
        await self._tell(kind, "DELETED", body)

    async def kubelet(self) -> None:
        """All pods: they run at once, and end when they are deleted."""
        for (kind, name), pod in list(self.objects.items()):
            if kind.endswith("/pods"):
                if pod["metadata"].get("deletionTimestamp"):
                    await self.remove(kind, name)
                elif pod.get("status", {}).get("phase") in (None, "Pending"):
                    await self.put(kind, {**pod, "status": {"phase": "Running"}})

    async def _tell(self, kind: str, what: str, body: Object) -> Object:
        self._history.append((kind, what, json.loads(json.dumps(body))))
        self._news.set()
        self._news = asyncio.Event()
        return body

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            method, target, _ = head[0].split(" ", 2)
            fields = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
            data = await reader.readexactly(int(fields.get("content-length", 0)))
            where = urlsplit(target)
            asked = {key: values[0] for key, values in parse_qs(where.query).items()}
            if "watch" in asked:
                await self._watch(where.path, asked, writer)
                return
            code, body = await self._answer(method, where.path, asked, json.loads(data) if data else {})
            _write(writer, code, body, fields.get("connection") == "close")
            await writer.drain()
            if fields.get("connection") == "close":
                return

    async def _watch(self, kind: str, asked: dict[str, str], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n")
        seen, ends = int(asked["resourceVersion"]), asyncio.get_running_loop().time() + int(asked["timeoutSeconds"])
        while (left := ends - asyncio.get_running_loop().time()) > 0:
            for of, what, body in self._history[seen:]:
                if of == kind and _selected(body, asked.get("labelSelector", "")):
                    writer.write(_encoded({"type": what, "object": body}) + b"\n")
            seen = len(self._history)
            await writer.drain()
            if len(self._history) == seen:
                try:
                    async with asyncio.timeout(left):
                        await self._news.wait()
                except TimeoutError:
                    return

    async def _answer(self, method: str, path: str, asked: dict[str, str], body: Object) -> tuple[int, Object]:
        if path.startswith("/apis/") and path.count("/") == 3:
            if path.removeprefix("/apis/") in self.lacks:
                return 404, {"reason": "NotFound", "message": f"{path} is not there"}
            return 200, {}
        found = _PATH.fullmatch(path)
        assert found is not None, path
        kind, name, sub = found["kind"], found["name"] or "", found["sub"] or ""
        there = self.objects.get((kind, name))
        if method == "GET" and not name:
            items = [
                o for (of, _), o in self.objects.items() if of == kind and _selected(o, asked.get("labelSelector", ""))
            ]
            return 200, {"items": items, "metadata": {"resourceVersion": str(len(self._history))}}
        if method == "POST" and kind.rsplit("/", 1)[1] in self.unhooked:
            return 500, {"reason": "InternalError", "message": 'failed calling webhook "mesh.example.com": refused'}
        if method == "POST":
            return await self._create(kind, body)
        if there is None:
            return 404, {"reason": "NotFound", "message": f"{path} is not there"}
        if method == "DELETE":
            if body.get("preconditions", {}).get("uid", there["metadata"]["uid"]) != there["metadata"]["uid"]:
                return 409, {"reason": "Conflict", "message": "another object"}
            if kind.endswith("/pods"):
                there["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
                await self.put(kind, there)
            else:
                await self.remove(kind, name)
            return 200, there
        if method in ("PUT", "PATCH"):
            version = body.get("metadata", {}).get("resourceVersion", there["metadata"]["resourceVersion"])
            if version != there["metadata"]["resourceVersion"]:
                return 409, {"reason": "Conflict", "message": "it was changed meanwhile"}
            if method == "PATCH":
                body = _merged(there, {"status": body.get("status")} if sub == "status" else body)
            return 200, await self.put(kind, body)
        return 200, there

    async def _create(self, kind: str, body: Object) -> tuple[int, Object]:
        meta = body["metadata"]
        if "generateName" in meta:
            meta["name"] = meta.pop("generateName") + uuid.uuid4().hex[:8]
        if (kind, meta["name"]) in self.objects:
            return 409, {"reason": "AlreadyExists", "message": f"{meta['name']} is there"}
        meta |= {"uid": str(uuid.uuid4()), "generation": 1, "creationTimestamp": "2026-01-01T00:00:00Z"}
        meta.setdefault("namespace", "n")
        if kind.endswith("/pods"):
            body["status"] = {"phase": "Pending"}
        if kind.endswith("/services") and body["spec"].get("clusterIP") != "None":
            body["spec"]["clusterIP"] = "127.0.0.1"
        return 201, await self.put(kind, body, "ADDED")


def _selected(body: Object, selector: str) -> bool:
    labels = body["metadata"].get("labels") or {}
    return all(
        (w.split("=")[1] == labels.get(w.split("=")[0])) if "=" in w else w in labels for w in selector.split(",") if w
    )


def _merged(old: Any, change: Any) -> Any:
    """RFC 7396."""
    if not isinstance(change, dict):
        return change
    made = dict(old) if isinstance(old, dict) else {}
    for key, value in change.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = _merged(made.get(key), value)
    return made


def _encoded(body: Object) -> bytes:
    """As servers do, which write all letters as they are."""
    return json.dumps(body, ensure_ascii=False).encode()


def _write(writer: asyncio.StreamWriter, code: int, body: Object, close: bool) -> None:
    data = _encoded(body)
    more = "Connection: close\r\n" if close else ""
    writer.write(f"HTTP/1.1 {code} x\r\nContent-Length: {len(data)}\r\n{more}\r\n".encode() + data)
