"""The operator and an API server in trouble: everything that can go wrong with a request does, and it goes on."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from planaria.cli.pod_args import check
from planaria.engines.kubernetes import cache, keeper
from planaria.engines.kubernetes.access import Access
from planaria.engines.kubernetes.api import DEPLOYMENTS, JOBS, LEASES, NODES, PODS, Api
from planaria.engines.kubernetes.cache import Cache
from planaria.engines.kubernetes.controller import Controller
from planaria.engines.kubernetes.crd import read
from planaria.engines.kubernetes.leader import NAME, operate
from planaria.engines.kubernetes.observe import Memory, Seen
from planaria.engines.kubernetes.reconcile import Decision, Evict
from tests.kubernetes.fault_proxy import FaultProxy, kind_of
from tests.kubernetes.small_api import SmallApi
from tests.kubernetes.world import job

PATIENCE = 60.0
JOBS_PATH, PODS_PATH = JOBS.path("n"), PODS.path("n")


class Place:
    """An operator behind a proxy, and a server behind that."""

    def __init__(self, seed: int) -> None:
        self.server = SmallApi()
        self.seed = seed

    @asynccontextmanager
    async def operated(self, run: Callable[[Place], Awaitable[None]]) -> AsyncIterator[Place]:
        await self.server.start()
        self.proxy = FaultProxy(self.server.url, random.Random(self.seed))
        await self.proxy.start()
        kubelet, task = asyncio.ensure_future(self._kubelet()), asyncio.ensure_future(run(self))
        try:
            yield self
            assert not task.done(), task.exception()
        finally:
            for each in (task, kubelet):
                each.cancel()
            await asyncio.gather(task, kubelet, return_exceptions=True)
            await self.proxy.close()
            await self.server.close()

    async def _kubelet(self) -> None:
        while True:
            await self.server.kubelet()
            await asyncio.sleep(0.05)

    @property
    def access(self) -> Access:
        return Access(self.proxy.url, False, dict, "n")

    async def submit(self, name: str, groups: int, **spec: Any) -> None:
        body = job(groups, **spec)
        body["metadata"] = {"name": name}
        await self.server._create(JOBS_PATH, body)

    def running(self, name: str = "") -> list[str]:
        pods = [p for p in self.server.of("pods") if p["metadata"]["name"].startswith(f"{name}-rg")]
        living = [p for p in pods if p["status"]["phase"] == "Running" and "deletionTimestamp" not in p["metadata"]]
        return sorted(p["metadata"]["name"] for p in living)

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.server.objects[JOBS_PATH, name].get("status") or {}
        return found

    async def renewal(self) -> None:
        """Of the operators' Lease, by one that works from then on if it did not."""
        at = lambda: self.server.objects[LEASES.path("n"), NAME]["spec"]["renewTime"]  # noqa: E731
        before = at()
        await self.until(lambda: at() != before, "a renewal")

    async def until(self, met: Callable[[], Any], what: str) -> None:
        try:
            async with asyncio.timeout(PATIENCE):
                while not met():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"still waiting for {what}: {[*self.server.objects]}, {self.proxy.faults}") from None


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between attempts are for a server's sake, and so is it that watches which nothing happens to last."""
    monkeypatch.setattr(keeper, "_PAUSE", (0.05, 0.2))
    monkeypatch.setattr(cache, "_PAUSE", (0.05, 0.2))
    monkeypatch.setattr("planaria.engines.kubernetes.api.WATCH_SECONDS", 2)


async def controlled(place: Place) -> None:
    api = Api(place.access)
    try:
        await Controller(api, "n", False, check).run()
    finally:
        await api.close()


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_fails_every_group_has_one_pod_and_each_end_leads_to_one_more(seed: int) -> None:
    async with Place(seed).operated(controlled) as place:
        rng = random.Random(seed)
        place.proxy.refused = place.proxy.lost = place.proxy.gone = 0.25
        place.proxy.cut = 0.9
        await place.submit("j", 3)
        await place.until(lambda: len(place.running("j")) == 3, "three groups")
        attempts = {group: 0 for group in range(3)}
        for _ in range(4):
            group = rng.randrange(3)
            name = f"j-rg{group}-{attempts[group]}"
            over = {"name": "trainer", "state": {"terminated": {"exitCode": 75}}}
            pod = place.server.objects[PODS_PATH, name]
            await place.server.put(PODS_PATH, {**pod, "status": {"phase": "Failed", "containerStatuses": [over]}})
            attempts[group] += 1
            expected = sorted(f"j-rg{group}-{attempt}" for group, attempt in attempts.items())
            await place.until(lambda expected=expected: place.running("j") == expected, f"{expected}")  # type: ignore[misc]
        place.server.objects[JOBS_PATH, "j"]["spec"]["replicaGroups"]["desired"] = 2
        await place.server.put(JOBS_PATH, place.server.objects[JOBS_PATH, "j"])
        await place.until(lambda: len(place.running("j")) == 2, "two groups")
        faults = place.proxy.faults
        # Watches end in any case, if nothing else then by the server, so what has not come yet will.
        await place.until(
            lambda: all(faults[each] for each in ("lost answer", "410", "cut watch")), "faults of all kinds"
        )
        assert len(place.running("j")) == 2
        place.proxy.refused = place.proxy.lost = place.proxy.gone = place.proxy.cut = 0.0
        await place.until(lambda: place.status("j").get("replaced") == 4, "the status to be true")
        assert [d["metadata"]["name"] for d in place.server.of("deployments")] == ["j-lighthouse"]


async def test_a_server_that_is_away_and_back_finds_the_operator_where_it_was() -> None:
    async with Place(1).operated(controlled) as place:
        await place.submit("j", 2)
        phases = lambda: [group["phase"] for group in place.status("j").get("groups", ())]  # noqa: E731
        await place.until(lambda: phases() == ["running", "running"], "two groups that the operator has seen")
        place.proxy.down = True
        await place.submit("k", 1)  # by somebody who can reach it
        await place.server.remove(PODS_PATH, "j-rg1-0")
        await asyncio.sleep(0.5)
        assert len(place.running("j")) == 1 and not place.running("k")
        # Watches that stand do not notice; a request tells.
        place.proxy.down = False
        await place.until(lambda: place.running("k") == ["k-rg0-0"], "the job that was submitted meanwhile")
        await place.until(lambda: place.running("j") == ["j-rg0-0", "j-rg1-1"], "another attempt at group 1")


async def test_a_webhook_that_is_away_is_named_and_what_needs_none_of_it_is_done() -> None:
    """The server says 500 of every pod, and is well."""
    async with Place(1).operated(controlled) as place:
        place.server.unhooked = {"pods"}
        await place.submit("j", 2)
        said = "Kubernetes says 500: failed calling webhook"
        await place.until(lambda: said in place.status("j").get("message", ""), "what is in the way")
        await place.until(lambda: [e for e in place.server.of("events") if e["reason"] == "Refused"], "an event")
        assert place.server.of("deployments") and place.server.of("poddisruptionbudgets")
        place.server.unhooked = set()
        await place.until(lambda: len(place.running("j")) == 2, "two groups")
        await place.until(lambda: place.status("j")["message"] == "", "nothing to be in the way")


async def test_what_a_webhook_makes_of_a_deployment_is_not_fought_over() -> None:
    async with Place(1).operated(controlled) as place:
        place.server.mirror = "mirror.example.com"
        await place.submit("j", 1)
        await place.until(lambda: place.running("j"), "work")
        await asyncio.sleep(2.5)  # looks come every second
        assert place.proxy.counts["PATCH deployments"] == 0
        body = place.server.objects[JOBS_PATH, "j"]
        body["spec"]["lighthouse"] = {"image": "newer", "replicas": 3}
        await place.server.put(JOBS_PATH, body)
        deployment = lambda: place.server.of("deployments")[0]["spec"]  # noqa: E731
        image = lambda: deployment()["template"]["spec"]["containers"][0]["image"]  # noqa: E731
        await place.until(lambda: image() == "mirror.example.com/newer" and deployment()["replicas"] == 3, "both")
        await asyncio.sleep(1.5)
        assert place.proxy.counts["PATCH deployments"] == 1


async def test_what_cannot_be_done_is_told_once_however_many_wait_for_it() -> None:
    """Several groups that cannot be replaced have a reason each, and all are looked at every second."""
    async with Place(1).operated(controlled) as place:
        await place.submit("j", 3)
        await place.until(lambda: len(place.running("j")) == 3, "work")
        place.server.unhooked = {"pods"}
        for name in ("j-rg0-0", "j-rg1-0"):
            pod, code = place.server.objects[PODS_PATH, name], int(name[4]) + 10
            over = {"name": "trainer", "state": {"terminated": {"exitCode": code}}}
            await place.server.put(PODS_PATH, {**pod, "status": {"phase": "Failed", "containerStatuses": [over]}})
        told = lambda: sorted(e["reason"] for e in place.server.of("events"))  # noqa: E731
        await place.until(lambda: told() == ["Refused"], "what is in the way")
        await asyncio.sleep(3.5)
        assert told() == ["Refused"]
        place.server.unhooked = set()
        await place.until(lambda: len(place.running("j")) == 3, "three groups")
        await place.until(lambda: told() == ["GroupReplaced", "GroupReplaced", "Refused"], "what was done")


async def test_who_is_not_given_up_is_not_said_to_be() -> None:
    """While the lighthouse refuses it is asked every second, and the reason counts the seconds."""
    server = SmallApi()
    await server.start()
    api = Api(Access(server.url, False, dict, "n"))
    try:
        jobs, pods, memory = Cache(api, JOBS, "n", lambda _: None), Cache(api, PODS, "n", lambda _: None), Memory()
        kept = keeper.JobKeeper(api, jobs, pods, "n", "j", lambda *_: Seen(), check)
        for second in range(3):
            decision = Decision([Evict(1, f"group 1 (incarnation 0) has been suspected for {second} s")])
            trouble = await kept._carry_out(decision, read(job()), job(), memory)
            assert trouble == "the lighthouse is not there yet"
        assert not server.of("events") and not memory.groups[1].given_up
    finally:
        await api.close()
        await server.close()


async def test_lines_of_a_watch_end_where_the_server_ends_them(caplog: pytest.LogCaptureFixture) -> None:
    """What pods and people say may hold all that Python takes for the end of a line."""
    async with Place(1).operated(controlled) as place:
        await place.submit("j", 1)
        await place.until(lambda: place.running("j"), "work")
        caplog.clear()
        strange = "a\x85b\u2028c\u2029d\x0be\x0cf\x1cg"
        body = place.server.objects[JOBS_PATH, "j"]
        for number in range(3):
            body["metadata"]["annotations"] = {"note": f"{strange}{number}"}
            body["spec"]["replicaGroups"]["desired"] = number + 2
            await place.server.put(JOBS_PATH, body)
            await place.until(lambda number=number: len(place.running("j")) == number + 2, "more groups")  # type: ignore[misc]
        assert "the watch of" not in caplog.text


async def test_nodes_that_are_gone_are_forgotten_with_their_pods() -> None:
    """A cluster that grows and shrinks has new names every day."""

    seen: list[Controller] = []

    async def run(place: Place) -> None:
        api = Api(place.access)
        try:
            seen.append(Controller(api, "n", True, check))
            await seen[0].run()
        finally:
            await api.close()

    def node(name: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "uid": name}, "spec": {}, "status": {}}

    async with Place(1).operated(run) as place:
        await place.server._create(NODES.path(""), node("home"))
        await place.submit("j", 1)
        await place.until(lambda: place.running("j"), "work")
        pod = place.server.objects[PODS_PATH, "j-rg0-0"]
        await place.server.put(PODS_PATH, {**pod, "spec": {**pod["spec"], "nodeName": "home"}})
        for number in range(20):
            await place.server._create(NODES.path(""), node(f"spot-{number}"))
            await place.until(lambda number=number: f"spot-{number}" in seen[0]._nodes.objects, "the node")  # type: ignore[misc, union-attr]
            await place.server.remove(NODES.path(""), f"spot-{number}")
        await place.server.remove(NODES.path(""), "home")
        await place.until(lambda: "home" in seen[0]._lost, "home to be lost")
        assert len(seen[0]._lost) <= 2 and len(seen[0]._marks) <= 2


async def test_who_gets_no_answer_about_the_lease_stops_in_time(caplog: pytest.LogCaptureFixture) -> None:
    """Not when the request has been given up: others take the Lease before that."""

    async def run(place: Place) -> None:
        await operate(place.access, "n", False, 2.0, check)

    async with Place(3).operated(run) as place:
        await place.submit("j", 1)
        await place.until(lambda: place.running("j"), "work")
        place.proxy.silent = True
        async with asyncio.timeout(10.0):  # a request has 15 s
            while "another one may work" not in caplog.text:
                await asyncio.sleep(0.02)
        place.proxy.silent = False


async def test_arguments_that_no_pod_would_take_are_said_in_the_status_and_start_nothing() -> None:
    async with Place(1).operated(controlled) as place:
        bad = {
            "spec": {"containers": [{"name": "t", "image": "i", "args": ["--reduction", "int8", "--groups", "2", "x"]}]}
        }
        await place.submit("j", 2, template=bad)
        await place.until(lambda: place.status("j").get("phase") == "Invalid", "a status")
        assert "--groups is what the operator says itself" in place.status("j")["message"]
        assert [e["reason"] for e in place.server.of("events")] == ["InvalidSpec"] and not place.server.of("pods")


async def test_a_lease_is_kept_through_refusals_and_given_up_when_nobody_answers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Who cannot renew it stops working before another may begin, and works again when it can."""

    async def run(place: Place) -> None:
        await operate(place.access, "n", False, 2.0, check)

    async with Place(3).operated(run) as place:
        lease = LEASES.path("n"), NAME
        await place.submit("j", 1)
        await place.until(lambda: place.running("j"), "work")
        place.proxy.refused = 0.2
        await asyncio.sleep(4.0)
        changes = place.server.objects[lease]["spec"]["leaseTransitions"]
        place.proxy.refused = 0.0
        await place.renewal()  # among so many refusals it may have been given up, and is taken again now
        caplog.clear()
        place.proxy.down = True
        await place.until(lambda: "another one may work" in caplog.text, "the end of its work")
        stolen = place.server.objects[lease]
        stolen["spec"] |= {"holderIdentity": "another", "leaseDurationSeconds": 2}
        await place.server.put(lease[0], stolen)
        place.proxy.down = False
        await place.server.remove(PODS_PATH, "j-rg0-0")
        await asyncio.sleep(1.0)
        assert not place.running("j"), "another operator works"
        await place.until(lambda: place.running("j") == ["j-rg0-1"], "work after the other one's Lease lapsed")
        assert place.server.objects[lease]["spec"]["leaseTransitions"] > changes


class Annotated(SmallApi):
    """The Lease is written by others too, who have nothing to do with it."""

    others = 0  # writes that come between a look at it and its renewal

    async def _answer(
        self, method: str, path: str, asked: dict[str, str], body: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        if method == "PUT" and path == LEASES.path("n", NAME) and self.others:
            self.others -= 1
            found = self.objects[LEASES.path("n"), NAME]
            await self.put(LEASES.path("n"), {**found, "metadata": {**found["metadata"], "annotations": {"x": "y"}}})
        return await super()._answer(method, path, asked, body)


async def test_a_lease_that_others_annotate_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    async def run(place: Place) -> None:
        await operate(place.access, "n", False, 6.0, check)

    place = Place(3)
    place.server = server = Annotated()
    async with place.operated(run):
        await place.submit("j", 1)
        await place.until(lambda: place.running("j"), "work")
        server.others = 1
        await place.until(lambda: not server.others, "a write that comes between")
        await place.renewal()
        await place.renewal()
        assert "works now" not in caplog.text and "another one may work" not in caplog.text
        assert server.objects[LEASES.path("n"), NAME]["spec"]["leaseTransitions"] == 1


@pytest.mark.k8s
def test_a_job_behind_a_server_in_trouble_comes_to_its_end(troubled: Any) -> None:
    """A real API server: the operator sees it through the proxy alone."""
    space, proxy = troubled
    space.job("train", groups=2)
    status = space.at_work("train", 2)
    pod = space.pod_of("train", 1)
    space.cluster.call("DELETE", PODS.path(space.name, pod["metadata"]["name"]))
    space.until(lambda: space.status("train")["replaced"] == 1, "another attempt")
    status = space.at_work("train", 2, status["step"])
    space.cluster.merge(JOBS.path(space.name, "train", "scale"), {"spec": {"replicas": 3}})
    space.at_work("train", 3, status["step"])
    space.release.touch()
    status = space.phase("train", "Complete")
    assert status["replaced"] == 1 and len(space.digests("train")) == 1
    assert proxy.faults["lost answer"] and proxy.faults["cut watch"] and sum(proxy.faults.values()) > 20, proxy.faults
    space.until(lambda: not space.list(DEPLOYMENTS), "the lighthouses to be gone")


def test_requests_are_counted_by_what_they_are_about() -> None:
    assert kind_of("/api/v1/namespaces/n/pods/p") == kind_of("/api/v1/pods?watch=1") == "pods"
    assert kind_of("/apis/planaria.dev/v1alpha1/namespaces/n/faulttolerantjobs/j/status") == "faulttolerantjobs/status"
    assert kind_of("/api/v1/namespaces/n") == "namespaces"


@pytest.fixture
def troubled(cluster: Any) -> Any:
    """A namespace whose operator has a hard time."""
    import threading

    loop, space = asyncio.new_event_loop(), cluster.space("troubled")
    context = ssl.create_default_context(cafile=str(cluster.authority))
    proxy = FaultProxy(cluster.server, random.Random(5), context, refused=0.1, lost=0.1, cut=0.7, gone=0.2)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(proxy.start(), loop).result(30)
    text = space.kubeconfig.read_text()
    space.kubeconfig.write_text(text.replace(cluster.server, proxy.url))
    try:
        space.operate()
        yield space, proxy
        space.close()
    finally:
        asyncio.run_coroutine_threadsafe(proxy.close(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
