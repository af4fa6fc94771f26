"""What an operator may have emptied: a node, or one GPU of it (``planaria drain --node``, ``--gpu``, ``undrain``).

Groups move to standbys of other nodes, or leave as for any drain, after a commit. Nothing is started there until it is
undrained; then what left comes back. Agents remember it beside the lighthouse, so that it outlives either of them.
"""

from __future__ import annotations

from dataclasses import replace

from planaria.core.hosts import Hosts
from planaria.core.messages import Close, Hello
from planaria.core.roster import Effect, Group, JobStatus, named


class Drains(Hosts):
    """Each verb returns effects, or raises ValueError with a sentence for people and changes nothing."""

    def drain_node(self, node: str, device: str, now: float) -> list[Effect]:
        """Empty the node, or only its GPU ``device`` if that is not empty. Raises ValueError if the job could not go on
        without what is there, or nobody is in reach who could do it."""
        self._goes_on()
        self._needs_state()
        agents = self._having(node, device)
        what = _called(node, device)
        if all(device in self._closed(agent) for agent in agents):
            raise ValueError(f"{what} is drained already (planaria undrain takes it back)")
        there = [g for g in self._groups_of(agents) if not device or _has(g, device)]
        # Whoever waits for a place elsewhere, off a node that is drained, is as good as leaving: it may not find one.
        stay = [g for g in self.seen.groups.values() if not g.leaving and "" not in self._closed(g.agent)]
        others = [g for g in stay if g not in there and self._usable(g)]
        if self.founded:
            others = [g for g in others if g.settled]  # whoever moves or comes back takes the state from them
        if (there or not device) and not self.complete and not others:
            held = "holds the state" if self.founded else "works"
            raise ValueError(f"no group elsewhere {held}; draining {what} would end the job")
        self._begin(now)
        self._event("drain", f"an operator drains {what}" + (f", with {named(g.member for g in there)}" * bool(there)))
        for agent in agents:
            self.closed[agent] = self._closed(agent) | {device}
            self._send(agent, Close(device))
        for view in () if device else sorted(there, key=lambda view: view.member):
            if (host := self._host_for(view)) is not None and not view.leaving and view.member.group not in self._moves:
                self._prepare(view, host)
            self._leaves_with_its_node(view)
        return self._end()

    def drain_rank(
        self, group: int, rank: int, now: float, reason: str = "", share: float | None = None
    ) -> list[Effect]:
        """Have a rank move, and nobody come to its GPU after it. ``reason`` and ``share`` as for ``migrate``, and it
        raises ValueError as that does."""
        effects = self.migrate(group, rank, now, reason, share, drains=True)
        view = self.seen.groups[group]
        if view.pulse is not None and rank < len(view.pulse.devices) and (device := view.pulse.devices[rank]):
            self.closed[view.agent] = self._closed(view.agent) | {device}
        return effects

    def undrain_node(self, node: str, device: str, now: float) -> list[Effect]:
        """Take it back. Raises ValueError if it was not drained."""
        self._goes_on()
        agents = [agent for agent in self._having(node, device) if device in self._closed(agent)]
        what = _called(node, device)
        if not agents:
            raise ValueError(f"{what} is not drained (drained: {', '.join(self.drained()) or 'nothing'})")
        self._begin(now)
        self._event("drain", f"an operator takes {what} back")
        for agent in agents:
            self.closed[agent] = self._closed(agent) - {device}
            self._send(agent, Close(device, opens=True))
        return self._end()

    def drained(self) -> tuple[str, ...]:
        """Agents, and GPUs of agents, in the words of the command line."""
        each = ((agent, device) for agent, closed in self.closed.items() for device in sorted(closed))
        return tuple(f"{agent}:{device}" if device else agent for agent, device in each)

    def snapshot(self) -> JobStatus:
        return replace(super().snapshot(), drained=self.drained())

    def _introduced(self, agent: str, hello: Hello) -> None:
        """An agent is there, or there again. What an earlier life of the lighthouse was told, it says itself."""
        for group in hello.hosted:
            self._homes.setdefault(group, agent)
        if agent not in self.closed:
            self.closed[agent] = frozenset(hello.closed)
        for device in sorted(self._closed(agent) - set(hello.closed)):
            self._send(agent, Close(device))
        for device in sorted(set(hello.closed) - self._closed(agent)):
            self._send(agent, Close(device, opens=True))
        for name in self.seen.forget({move.agent for move in self._moves.values()}):
            self.closed.pop(name, None)

    def _having(self, node: str, device: str) -> list[str]:
        """The agents there, or those that have the GPU. Raises ValueError if there are none, or one is out of reach."""
        found, agents = self._agents_at(node), self.seen.agents
        if device and not (having := [name for name in found if device in agents[name].devices]):
            gpus = sorted({gpu for name in found for gpu in agents[name].devices})
            raise ValueError(f"node {node} has no GPU {device} of this job (GPUs: {', '.join(gpus) or 'none'})")
        return having if device else found


def _called(node: str, device: str) -> str:
    return f"GPU {device} of node {node}" if device else f"node {node}"


def _has(view: Group, device: str) -> bool:
    """One of which no heartbeat has told yet may have any."""
    return view.pulse is None or not view.pulse.devices or device in view.pulse.devices
