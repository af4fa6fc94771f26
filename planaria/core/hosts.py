"""A group moves to another node: by order (``planaria migrate GROUP --to NODE``), off a node that is drained, and off
one that is lost, if there is a standby elsewhere.

Its next life is started there, by a standby if there is one, and waits, ready, while the old one works. Then the old
one is left out after a commit, as if it were drained, and when it has ended the new one joins and heals, as any group
does that is back. So at no time are there two lives of a group of which the quorum could hold both. The agent that
prepares it remembers that, and says so to a lighthouse that was restarted.
"""

from __future__ import annotations

from dataclasses import dataclass

from planaria.core.messages import NO_QUORUM, Drain, Host, Member, Prepared
from planaria.core.roster import CERTAINLY_GONE, Effect, Group, LineageRecord
from planaria.core.wishes import Wishes


@dataclass(slots=True)
class _Move:
    agent: str  # where to
    member: Member  # the next life
    ready: bool = False
    lost: bool = False  # with its node: nobody has asked for it


class Hosts(Wishes):
    """``node``: the name of an agent, or of the host on which agents are."""

    def __init__(self, job: str, epoch: int, last: LineageRecord | None = None) -> None:
        super().__init__(job, epoch, last)
        self.closed: dict[str, frozenset[str]] = {}  # by agent: GPUs that are drained; the empty name is the node
        self._moves: dict[int, _Move] = {}  # by group
        self._homes: dict[int, str] = {}  # agents to which groups have moved

    def move(self, group: int, node: str, now: float) -> list[Effect]:
        """Have all of ``group`` go on at another node. Raises ValueError with a sentence if that cannot be."""
        self._needs_training()
        view = self._need(group)
        agents = [agent for agent in self._agents_at(node) if agent != view.agent]
        if not agents:
            raise ValueError(f"group {group} is on node {node} already")
        if view.leaving or group in self._moves:
            raise ValueError(f"group {group} is leaving already")
        if not any(g is not view and g.settled and self._usable(g) for g in self.seen.groups.values()):
            raise ValueError(
                f"group {group} is the only one that holds the state, which must not leave before another has"
            )
        if not (open := [agent for agent in agents if "" not in self._closed(agent)]):
            raise ValueError(f"node {node} is drained (planaria undrain takes it back)")
        self._begin(now)
        self._prepare(view, max(open, key=self._spare))
        return self._end()

    def _prepare(self, view: Group, agent: str, lost: bool = False, after: Member | None = None) -> None:
        """``after``: another life of the group that was prepared elsewhere."""
        group, newer = view.member.group, Member(view.member.group, (after or view.member).incarnation + 1)
        self._moves[group] = _Move(agent, newer, lost=lost)
        self._event("move", f"group {group} moves to node {agent} when it is ready there", group)
        self._send(agent, Host(newer))

    def _begun_again(self, agent: str, view: Group) -> None:
        """A group ended with the former life of its agent. That one knows only of those that it began with."""
        if self._homes.get(view.member.group) == agent and not view.draining and not self.complete:
            self._prepare(view, agent, lost=True)

    def _prepared(self, agent: str, report: Prepared) -> None:
        group = report.member.group
        move = self._moves.get(group)
        if move is not None and report.member < move.member:  # its node was away, and another prepares the next life
            if not report.trouble:
                self._send(agent, Host(report.member, off=True))
        elif not report.trouble:
            self._moves[group] = _Move(agent, report.member, True, move is not None and move.lost)
        elif move is not None and (move.agent, move.member) == (agent, report.member):
            view = self.seen.groups.get(group)
            if (view is not None and view.draining and view.moved) or self._homes.get(group) == agent:
                move.ready = True  # nobody else has it any more: this agent starts it again when it may join
                return
            self._stays(group, report.trouble)

    def _carry_on(self) -> None:
        """Whatever can be done about groups that move, or are lost with their node."""
        for lost in [g for g in self.seen.groups.values() if self._out_of_reach(g)]:
            group = lost.member.group
            if group not in self._moves and not lost.draining and (host := self._host_for(lost)) is not None:
                self._prepare(lost, host, lost=True)
        for group, move in list(self._moves.items()):
            view = self.seen.groups.get(group)
            if view is not None and view.state in CERTAINLY_GONE and not (view.draining or self._has_place(view)):
                # It died before it was told to leave. Its agent starts it no more, not even when that may be.
                view.draining = view.moved = True
                self._send(view.agent, Drain(view.member, moved=True))
            if not self.seen.agents[move.agent].connected:
                if not move.ready:
                    self._stays(group, f"node {move.agent} is out of reach")
                elif view is not None and self._has_left(group) and (host := self._host_for(view)) is not None:
                    self._prepare(view, host, lost=True, after=move.member)
            elif view is not None and self._begins_anew(view, move):
                self._send(move.agent, Host(move.member, off=True))
                self._stays(group, "it was started again meanwhile")
            elif move.ready and self._has_left(group):
                del self._moves[group]
                self._homes[group] = move.agent
                self._send(move.agent, Host(move.member, joins=True))
            elif move.ready and view is not None and not view.draining:
                self._start_draining(view, f"it moves to node {move.agent}", moved=True)

    def _start_draining(self, view: Group, reason: str = "", moved: bool = False) -> None:
        group = view.member.group
        if not moved and (move := self._moves.pop(group, None)) is not None:
            self._send(move.agent, Host(move.member, off=True))
            self._event("move", f"group {group} does not move: it leaves for good", group)
        super()._start_draining(view, reason, moved)

    def _begins_anew(self, view: Group, move: _Move) -> bool:
        """Whether its agent starts it again, for it died before it was told to leave."""
        if view.member == move.member:
            return view.agent != move.agent
        if move.lost:
            return self.seen.connected(view) and view.state not in CERTAINLY_GONE
        return view.member > move.member or (view.state in CERTAINLY_GONE and not view.draining)

    def _has_left(self, group: int) -> bool:
        view = self.seen.groups.get(group)
        if view is None:
            return all(member.group != group for member in self._members)
        return view.state in CERTAINLY_GONE or self._out_of_reach(view)

    def _out_of_reach(self, view: Group) -> bool:
        """Whether its node is gone, as far as can be seen, and the others go on without it: fenced, should it live."""
        away = not self.seen.agents[view.agent].connected and not self._in_force(view.member)
        return away and self.current is not None and view.state not in CERTAINLY_GONE and view.adopted != NO_QUORUM

    def _settle(self, owner: str, agent: str, group: int) -> bool:
        """``agent`` has a group that ``owner`` has as well. Whether that is because it has moved: then the one from
        which it has, and which has started it once more before it heard of that, is to let go of it."""
        view, home = self.seen.groups[group], self._homes.get(group)
        if home != agent or self._in_force(view.member):
            return False
        self._send(owner, Drain(view.member, moved=True))
        del self.seen.groups[group]
        return True

    def _stays(self, group: int, why: str) -> None:
        del self._moves[group]
        self._event("move", f"group {group} does not move: {why}", group)
        if (view := self.seen.groups.get(group)) is not None:
            self._leaves_with_its_node(view)

    def _leaves_with_its_node(self, view: Group) -> None:
        waits = view.draining or view.state in CERTAINLY_GONE or view.member.group in self._moves
        if not self._has_place(view) and not waits:
            self._start_draining(view, "its node is drained")

    def _has_place(self, view: Group) -> bool:
        return "" not in self._closed(view.agent)

    def _host_for(self, view: Group) -> str | None:
        """An agent that has a warm standby for a group of one rank."""
        if self.spec is None or self.spec.ranks > 1 or view.adopted == NO_QUORUM:
            return None
        agents = self.seen.agents
        able = [n for n in agents if agents[n].connected and agents[n].synced and "" not in self._closed(n)]
        best = max((n for n in able if n != view.agent), key=self._spare, default=None)
        return best if best is not None and self._spare(best) > 0 else None

    def _spare(self, agent: str) -> int:
        """Its standbys that are not promised to a group yet."""
        return self.seen.agents[agent].warm - sum(move.agent == agent for move in self._moves.values())

    def _closed(self, agent: str) -> frozenset[str]:
        return self.closed.get(agent, frozenset())

    def _agents_at(self, node: str) -> list[str]:
        """Raises ValueError if there is none, or one that is out of reach."""
        agents = self.seen.agents
        # One that has ended in peace has left its node to others.
        present = [name for name, agent in agents.items() if agent.connected or self._groups_of([name])]
        found = [name for name in present if node in (name, agents[name].host)]
        if not found:
            raise ValueError(f"job {self.job} has no node {node} (nodes: {', '.join(sorted(present)) or 'none'})")
        for name in found:
            if not agents[name].connected:
                raise ValueError(f"node {name} is out of reach (planaria evict GROUP declares its groups dead)")
        return found

    def _groups_of(self, agents: list[str]) -> list[Group]:
        return [g for g in self.seen.groups.values() if g.agent in agents and g.state not in CERTAINLY_GONE]
