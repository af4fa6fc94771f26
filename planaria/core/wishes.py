"""What an operator may ask of a job: ``planaria drain``, ``scale``, ``evict`` and ``kill``."""

from __future__ import annotations

import signal as signals
from dataclasses import replace

from planaria.core.founding import Founding
from planaria.core.health import allowed
from planaria.core.messages import NO_QUORUM, Desired, Kill, Member, Migrate
from planaria.core.roster import CERTAINLY_GONE, Effect, Group, State


class Wishes(Founding):
    """Each verb returns effects, or raises ValueError with a sentence for people and changes nothing."""

    def drain(self, group: int, now: float, reason: str = "", share: float | None = None) -> list[Effect]:
        """Leave ``group`` out from the next commit on. Raises ValueError with a sentence if that cannot be.

        ``share``: it is not an operator who wants this, but something that may want it of every group at once; so no
        more than this share of the groups that the job should have, and at least one, may be missing then, for
        whatever reason."""
        self._needs_training()
        view = self._need(group)
        if not any(g is not view and not g.leaving and self._usable(g) for g in self.seen.groups.values()):
            raise ValueError(f"group {group} is the only one that works; draining it would end the job")
        if share is not None:
            self._may_miss(view, share)
        self._begin(now)
        self._start_draining(view, reason)
        return self._end()

    def _may_miss(self, view: Group, share: float) -> None:
        """Raises ValueError if the job cannot do without this group as well. Drained ones are missed until an operator
        says how many the job is to have (scale)."""
        spec = self.spec
        if spec is None:
            raise ValueError("no agent has told this job's size yet; try again in a second")
        at_work = [
            g
            for g in self.seen.groups.values()
            if g is not view and g.state is State.ACTIVE and not g.leaving and self._in_force(g.member)
        ]
        missing, most = spec.groups - len(at_work), allowed(share, spec.groups)
        if missing > most:
            others = f"{missing - 1} of {spec.groups} groups {'is' if missing == 2 else 'are'} missing already"
            raise ValueError(f"{others}, and at most {most} may be; planaria scale says how many the job is to have")
        if len(at_work) < spec.min_groups:
            raise ValueError(f"without it fewer than {spec.min_groups} groups would be left, as --min-groups says")

    def migrate(
        self,
        group: int,
        rank: int,
        now: float,
        reason: str = "",
        share: float | None = None,
        drains: bool = False,
        to: str = "",
    ) -> list[Effect]:
        """Have another process take the place of a rank of ``group``. Raises ValueError with a sentence if that cannot
        be. ``share``: as for a drain, for the group is left out for a moment. ``drains``: its device is to be free.
        ``to``: the node of the new process, as ``_node_of`` has it; empty: any."""
        self._needs_training()
        view = self._need(group)
        self._needs_rank(group, rank)
        if not any(g is not view and g.settled and self._usable(g) for g in self.seen.groups.values()):
            raise ValueError(
                f"group {group} is the only one that holds the state, from which a rank that moves takes its"
            )
        if view.leaving:
            raise ValueError(f"group {group} is leaving already")
        if not self.seen.agents[view.agent].connected:
            raise ValueError(f"nothing can be moved in group {group}: its agent {view.agent} is out of reach")
        node = self._node_of(view, rank, to) if to else None
        if share is not None:
            self._may_miss(view, share)
        self._begin(now)
        moved, where = f"rank {rank} of group {group}", "" if node is None else f" to node {node}"
        self._event("move", f"{moved} is to move: {reason}" if reason else f"an operator moves {moved}{where}", group)
        self._send(view.agent, Migrate(group, rank, drains, node))
        return self._end()

    def _node_of(self, view: Group, rank: int, to: str) -> int:
        """The number of a node of the group's agent: ``to`` is its --node-rank, its name or its host. Raises ValueError
        if the rank cannot go there."""
        agent = self.seen.agents[view.agent]
        names = {0: view.agent, **agent.nodes}
        found = [n for n, name in names.items() if to in (str(n), name, name.rpartition("-")[0])]
        known = ", ".join(f"{n} ({name})" for n, name in sorted(names.items()))
        if len(found) > 1:
            raise ValueError(f"several nodes are on {to}; say which by its number: {known}")
        if not found:
            raise ValueError(
                f"a rank moves alone only among the nodes that serve its group, which are {known}; {to} is none of "
                "them: start planaria run --node-rank there, or move all of the group (without --rank)"
            )
        if rank == 0 and found[0] != 0:
            raise ValueError(
                f"rank 0 of group {view.member.group} speaks for it and is where the others meet, so it stays on node 0"
            )
        return found[0]

    def scale(self, groups: int, now: float) -> list[Effect]:
        """Ask for ``groups`` groups: those without a place leave, and the highest ones, or new ones are started by the
        agents."""
        self._needs_training()
        if self.spec is None:
            raise ValueError("no agent has told this job's size yet; try again in a second")
        if groups < 1:
            raise ValueError(f"a job needs at least one group, not {groups}")
        shards = next((g.ready.shards for g in self.seen.groups.values() if g.ready), None)
        if shards is not None and groups > shards:
            raise ValueError(f"the job has {shards} shards a step, so at most {shards} groups can work, not {groups}")
        self._begin(now)
        self._scaled += 1
        self.spec = replace(self.spec, groups=groups, min_groups=min(self.spec.min_groups, groups))
        views = self.seen.groups
        working = [g for g, v in views.items() if v.state not in CERTAINLY_GONE and not v.draining]
        working.sort(key=lambda g: (not self._has_place(views[g]), g))
        for group in working[groups:]:
            self._start_draining(views[group])
        for agent in self.seen.agents:
            self._send(agent, Desired(groups))
        self._event("scale", f"{groups} groups wanted")
        return self._end()

    def evict(self, group: int, now: float) -> list[Effect]:
        """The operator says that ``group`` is dead, so no majority needs to wait for it. Raises ValueError with a
        sentence if no other group holds the job's state, and no checkpoints of it are written."""
        view, unheard = self.seen.groups.get(group), set[Member]()
        if view is None and self.current is not None:
            # A member since before a restart of the lighthouse, and its agent is gone for good.
            unheard = {member for member in self.current.members if member.group == group}
        waited_for = view is not None and view.state is State.DEAD and not self.seen.connected(view)
        if not unheard and not (waited_for and self.current is None):
            view = self._need(group)
        held = any(g is not view and g.settled and self._usable(g) for g in self.seen.groups.values())
        if self.founded and not held and not self.saves:
            raise ValueError(f"group {group} is the only one that holds the state; evicting it would end the job")
        self._begin(now)
        self.seen.buried |= unheard
        self._event("evict", f"group {group} was evicted by an operator", group)
        if view is not None:
            view.state, view.note, view.evicted = State.DEAD, "evicted by an operator", True
            self._send(view.agent, Kill(group, int(signals.SIGKILL)))
        return self._end()

    def kill(self, group: int, signal: int, now: float, rank: int | None = None) -> list[Effect]:
        """Have ``signal`` sent to the group's processes, or to one rank's. Raises ValueError with a sentence if there
        is no such rank, or nobody in reach who could send it."""
        view = self._need(group)
        if rank is not None:
            self._needs_rank(group, rank)
        if not self.seen.agents[view.agent].connected:
            raise ValueError(
                f"group {group} cannot be sent a signal: its agent {view.agent} is out of reach "
                f"(planaria evict {group} declares the group dead)"
            )
        self._begin(now)
        whom = f"group {group}" if rank is None else f"rank {rank} of group {group}"
        self._event("kill", f"an operator sent signal {signal} to {whom}", group)
        self._send(view.agent, Kill(group, signal, rank))
        return self._end()

    def _has_place(self, view: Group) -> bool:
        """Whether it could be started again where it is."""
        raise NotImplementedError

    def _need(self, group: int) -> Group:
        self._goes_on()
        view = self.seen.groups.get(group)
        if view is None or view.state in CERTAINLY_GONE:
            running = ", ".join(str(g) for g, v in sorted(self.seen.groups.items()) if v.state not in CERTAINLY_GONE)
            state = "" if view is None else f", it is {view.state.value}"
            raise ValueError(f"job {self.job} has no running group {group}{state} (running: {running or 'none'})")
        return view

    def _needs_rank(self, group: int, rank: int) -> None:
        ranks = self.spec.ranks if self.spec is not None else 1
        if not 0 <= rank < ranks:
            known = "only rank 0" if ranks == 1 else f"ranks 0 to {ranks - 1}"
            raise ValueError(f"group {group} of job {self.job} has no rank {rank}; it has {known}")

    def _goes_on(self) -> None:
        if self.stopped:
            raise ValueError(f"it is too late: {self.stopped}")

    def _needs_training(self) -> None:
        self._goes_on()
        if self.complete:
            raise ValueError(
                f"job {self.job} is complete: all its steps are committed, and its groups end by themselves"
            )
        self._needs_state()

    def _needs_state(self) -> None:
        """The newest copy is with whoever has found it until a quorum has begun with it. Groups wait for that outside
        of any quorum, and one that is to leave does so at once."""
        if self._run != NO_QUORUM and not self.founded and self.keeps:
            raise ValueError(
                f"job {self.job} is about to start again from a copy in memory, which may be lost with whatever leaves "
                "now; try again when it trains"
            )
