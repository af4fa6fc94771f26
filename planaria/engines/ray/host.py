"""Groups as actors of Ray Core: a placement group for every life of a group, with an actor on each of its nodes.

They are detached and have names, so the next supervisor finds them when one is killed. Ray starts none of them again.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from planaria.engines import placing
from planaria.engines.keeper import HostAway, Hosted, HostState
from planaria.engines.placing import Template
from planaria.engines.ray.actor import NodeAgent, Place, short_name
from planaria.errors import UsageError

NAMESPACE = "planaria"
# Ray says nothing of what waits for a place, so it is asked: a worker starts in less.
LOOK_SECONDS = 5.0
# When one node's agent has ended, those of the group's other nodes may end in order within this time.
TOGETHER_SECONDS = 10.0
_NODE_ID = "ray.io/node-id"
# What is raised by a cluster that does not answer.
AWAY = (ray.exceptions.RayError, ConnectionError, TimeoutError, RuntimeError)
Life = tuple[int, int]  # (group, incarnation)
T = TypeVar("T")


@dataclass(slots=True)
class _Actors:
    """Of one life, by node of the group."""

    handles: list[Any]
    places: list[asyncio.Future[Place]]
    ends: list[asyncio.Future[int]]
    born: float = field(default_factory=time.time)
    torn: float | None = None  # when the first of them was seen to have ended
    asked: bool = False  # to end
    ended: Hosted | None = None

    @property
    def placed(self) -> bool:
        return all(place.done() and place.exception() is None for place in self.places)

    def awaited(self) -> tuple[asyncio.Future[Any], ...]:
        """What is yet to be heard of it."""
        futures: list[asyncio.Future[Any]] = [*self.places, *self.ends]
        return tuple(future for future in futures if not future.done())


class RayHost:
    """A `GroupHost` on the cluster to which this process is connected. ``needs``: what every node of a group takes, in
    Ray's words. ``note`` is told (kind, sentence, group). ``close`` it."""

    def __init__(self, template: Template, needs: Mapping[str, float], note: Callable[[str, str, int], None]) -> None:
        self._template, self._needs, self._note = template, dict(needs), note
        self._lives: dict[Life, _Actors] = {}
        self._gone: dict[Life, Hosted] = {}
        self._begun = set[Life]()  # of which it is not known yet whether they are there
        self._adopted = False
        self._away = False

    async def create(self, group: int, incarnation: int, avoid: Collection[str]) -> None:
        life = group, incarnation
        if life in self._lives:
            return
        self._begun.add(life)
        asked = asyncio.ensure_future(self._ask(self._begin, life, avoid))
        try:
            self._follow(life, await asyncio.shield(asked))
        except asyncio.CancelledError:
            # Ray goes on with it, and what comes of it outlives this process: it has to be known, so as to be ended.
            with suppress(HostAway, ValueError):
                self._follow(life, await asked)
            raise
        except ValueError as error:
            await self._ask(remove, self._template, life)
            self._begun.discard(life)
            raise UsageError(f"Ray takes no such group: {error}") from None

    async def delete(self, group: int, incarnation: int) -> None:
        actors = self._lives.get((group, incarnation))
        if actors is None:
            return
        if actors.asked or not actors.placed:
            await self._ask(remove, self._template, (group, incarnation))
        else:
            actors.asked = True
            for handle in actors.handles:
                handle.stop.remote()

    async def list(self) -> Sequence[Hosted]:
        if not self._adopted:
            for life, handles in (await self._ask(living, self._template)).items():
                self._follow(life, handles)
            self._adopted = True
            # Those that run say so at once; else they would seem to wait for a place.
            if places := [place for actors in self._lives.values() for place in actors.places]:
                await asyncio.wait(places, timeout=LOOK_SECONDS)
        # What had ended at the last look is known by now, and remembered: its place is free.
        for life, actors in [(life, actors) for life, actors in self._lives.items() if actors.ended is not None]:
            await self._ask(remove, self._template, life)
            assert actors.ended is not None
            self._gone[life] = actors.ended
            del self._lives[life]
        self._gone = placing.newest(self._gone)
        seen = {life: await self._look(life, actors) for life, actors in self._lives.items()} | self._gone
        return tuple(seen[life] for life in sorted(seen))

    async def changed(self) -> None:
        lives = self._lives.values()
        if self._away:
            await asyncio.sleep(LOOK_SECONDS)
            return
        if any(actors.ended is not None for actors in lives):
            return
        waiting = [future for actors in lives for future in actors.awaited()]
        soon = any(not actors.placed or actors.torn is not None for actors in lives)
        if waiting:
            await asyncio.wait(waiting, timeout=LOOK_SECONDS if soon else None, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Whatever has ended, or was to end and is not waited for any more, leaves nothing behind in the cluster."""
        over = [x for x, actors in self._lives.items() if actors.asked or all(end.done() for end in actors.ends)]
        with suppress(*AWAY):  # then all of them have ended with Ray's head
            for life in [*over, *self._begun]:
                remove(self._template, life)
        for actors in self._lives.values():
            for future in actors.awaited():
                future.cancel()

    def _follow(self, life: Life, handles: Sequence[Any]) -> None:
        places = [asyncio.wrap_future(handle.place.remote().future()) for handle in handles]
        ends = [asyncio.wrap_future(handle.end.remote().future()) for handle in handles]
        self._lives[life] = _Actors([*handles], places, ends)
        self._begun.discard(life)

    def _begin(self, life: Life, avoid: Collection[str]) -> Sequence[Any]:
        """The actors of this life, which are created unless they are there."""
        template, name = self._template, placing.name_of(self._template.run, *life)
        bundles = [self._needs] * template.nodes
        hindered = [node["NodeID"] for node in ray.nodes() if short_name(node) in avoid]
        if hindered and not self._fits_without(hindered):
            self._note("avoid", f"there is no node for group {life[0]} but {', '.join(sorted(avoid))}", life[0])
            hindered = []
        place = _placement(name) or placement_group(
            bundles,
            strategy="STRICT_PACK" if template.nodes == 1 else "STRICT_SPREAD",
            name=name,
            lifetime="detached",
            bundle_label_selector=[{_NODE_ID: f"!in({','.join(hindered)})"}] * template.nodes if hindered else None,
        )
        environ = {k: os.environ[k] for k in ("OMP_NUM_THREADS",) if k in os.environ}
        handles: list[Any] = []
        for node in range(template.nodes):
            custom = {k: v for k, v in self._needs.items() if k not in ("CPU", "GPU", "memory")}
            options = {
                "name": f"{name}-n{node}",
                "namespace": NAMESPACE,
                "get_if_exists": True,
                "lifetime": "detached",
                "max_restarts": 0,
                "num_cpus": self._needs.get("CPU", 0),
                "num_gpus": self._needs.get("GPU", 0),
                "memory": self._needs.get("memory"),
                "resources": custom,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(place, placement_group_bundle_index=node),
            }
            first = handles[0] if handles else None
            handles.append(ray.remote(NodeAgent).options(**options).remote(template, life, node, first, environ))
        return handles

    def _fits_without(self, ids: Collection[str]) -> bool:
        others = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in ids]
        able = [n for n in others if all(n["Resources"].get(k, 0) >= v for k, v in self._needs.items())]
        return len(able) >= self._template.nodes

    async def _look(self, life: Life, actors: _Actors) -> Hosted:
        over = [end for end in actors.ends if end.done()]
        if over and actors.torn is None:
            actors.torn = time.time()
        late = actors.torn is not None and time.time() >= actors.torn + TOGETHER_SECONDS
        nodes = tuple(p.result().node for p in actors.places if p.done() and p.exception() is None)
        if len(over) == len(actors.ends) or late:
            actors.ended = await self._end_of(life, actors, nodes)
            return actors.ended
        if actors.placed:
            return Hosted(*life, HostState.RUNNING, nodes, since=actors.places[0].result().since)
        why = await self._ask(self._why_waiting, life) if time.time() > actors.born + LOOK_SECONDS else ""
        return Hosted(*life, HostState.PENDING, reason=why)

    async def _end_of(self, life: Life, actors: _Actors, nodes: tuple[str, ...]) -> Hosted:
        """The first node speaks for the group, if it can."""
        now = actors.torn
        first = actors.ends[0]
        if first.done() and first.exception() is None:
            said = placing.last_words(self._template.directory, *life)
            code = first.result()
            return Hosted(*life, HostState.ENDED, nodes, code, now, said[1] if said else f"exit code {code}")
        errors = [error for end in actors.ends if end.done() and (error := end.exception()) is not None]
        there = {short_name(node) for node in await self._ask(ray.nodes) if node["Alive"]}
        lost = [node for node in nodes if node not in there]
        if lost:
            return Hosted(*life, HostState.ENDED, tuple(lost), None, now, f"node {', '.join(lost)} is lost", True)
        why = _sentence(errors[0]) if errors else "the agent of another of its nodes has ended"
        return Hosted(*life, HostState.ENDED, nodes, None, now, why)

    def _why_waiting(self, life: Life) -> str:
        place = _placement(placing.name_of(self._template.run, *life))
        if place is None or ray.util.placement_group_table(place)["state"] == "CREATED":
            return ""
        count = f"{self._template.nodes} nodes have" if self._template.nodes > 1 else "no node has"
        needs = ", ".join(f"{key} {amount:g}" for key, amount in sorted(self._needs.items()))
        return f"{'not ' if self._template.nodes > 1 else ''}{count} {needs} free for it"

    async def _ask(self, call: Callable[..., T], *args: Any) -> T:
        """Ray's calls block."""
        try:
            answer = await asyncio.to_thread(call, *args)
        except AWAY as error:
            self._away = True
            raise HostAway(f"Ray: {_sentence(error)}") from None
        self._away = False
        return answer


def living(template: Template) -> dict[Life, list[Any]]:
    """The actors of every life of this run that is there as a whole. What is left of others is removed."""
    found: dict[Life, dict[int, str]] = {}
    for name in ray.util.list_named_actors():
        head, _, node = name.rpartition("-n")
        if node.isdecimal() and (life := placing.life_in(head, template.run)) is not None:
            found.setdefault(life, {})[int(node)] = name
    for each in ray.util.placement_group_table().values():
        life = placing.life_in(each["name"], template.run)
        if life is not None and each["state"] != "REMOVED":
            found.setdefault(life, {})
    whole = {}
    for life, names in found.items():
        handles = [handle for node in sorted(names) if (handle := _actor(names[node])) is not None]
        if len(handles) == template.nodes:
            whole[life] = handles
        else:
            remove(template, life, names.values())
    return whole


def refuse_earlier(template: Template) -> None:
    """UsageError if groups of an earlier run of this name live on; what is left of those that have ended is removed."""
    for life, handles in living(template).items():
        done, _ = ray.wait([handle.end.remote() for handle in handles], num_returns=len(handles), timeout=LOOK_SECONDS)
        if len(done) < len(handles):
            name = placing.name_of(template.run, *life)
            raise UsageError(
                f"groups of an earlier run are still there ({name}): give another --job, or the --log-dir of that run, "
                "which is gone on with"
            )
        remove(template, life)


def remove(template: Template, life: Life, names: Collection[str] | None = None) -> None:
    """Kill whatever is left of it, and give its place back."""
    name = placing.name_of(template.run, *life)
    for each in names if names is not None else [f"{name}-n{node}" for node in range(template.nodes)]:
        if (handle := _actor(each)) is not None:
            ray.kill(handle)
    if (place := _placement(name)) is not None:
        ray.util.remove_placement_group(place)


def _actor(name: str) -> Any | None:
    """None if there is none, or none any more."""
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def _placement(name: str) -> PlacementGroup | None:
    try:
        return ray.util.get_placement_group(name)
    except ValueError:
        return None


def _sentence(error: BaseException) -> str:
    """Ray's words run over many lines; the last is the cause, as a rule."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
    if match := re.search(r"Worker exit type: (\w+)", text):
        return f"its actor died ({match[1]})"
    return text.splitlines()[-1].strip() if text else type(error).__name__
