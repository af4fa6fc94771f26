"""One simulated job: builds everything, lets the faults happen, and says how the run ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from planaria.core.founding import RESUMES
from planaria.core.leadership import Leadership
from planaria.core.liveness import GENEROUS
from planaria.core.messages import NO_QUORUM, NOTHING, Finished, Member, Policy, Quorum, QuorumId, Standing
from planaria.core.quorum import Lighthouse
from planaria.core.stepper import Stepper
from planaria.sim.coordinator import LIGHTHOUSE, Coordinator, Store
from planaria.sim.disk import Disk
from planaria.sim.fabric import Fabric
from planaria.sim.faults import APPLY
from planaria.sim.flips import Unseen, Witness
from planaria.sim.invariants import Checker, Violation
from planaria.sim.kernel import Kernel, Process
from planaria.sim.lighthouses import Candidate, Electoral
from planaria.sim.memory import Copied
from planaria.sim.network import Links
from planaria.sim.scenario import CONTROL_FAULTS, PLANNED, Fault, Scenario
from planaria.sim.supervisor import Supervisor
from planaria.sim.trace import Trace
from planaria.sim.trainer import Trainer

# Virtual seconds that a job may take to go on and finish once nothing goes wrong any more: the sum of the longest
# waits of the protocol (founding 10, a silent agent 12, a stall 4, replanning 8, fail-over 5), once more for safety.
PATIENCE = 80.0
LONGEST = 600.0  # for runs in which the trouble does not end by itself
RESTART_TIME = 0.3  # of a lighthouse that was killed and is not held down by the fault


@dataclass(frozen=True, slots=True)
class Outcome:
    seed: int
    verdict: str  # "finished", "stopped", "unseen" (see flips.py), or what was violated
    failed: bool
    seconds: float  # virtual
    commits: int
    quorums: int
    lines: list[str]


class World:
    """``stepper``, ``lighthouse`` and ``leadership`` build the state machines: tests put broken ones in to see them
    found out."""

    def __init__(
        self,
        config: Scenario,
        stepper: type[Stepper] = Stepper,
        lighthouse: type[Lighthouse] = Lighthouse,
        keep_trace: bool = False,
        leadership: type[Leadership] = Leadership,
    ) -> None:
        self.leadership = leadership
        self.keep_trace = keep_trace
        self.config = config
        self.stepper = stepper
        self.lighthouse = lighthouse
        self.kernel = Kernel(config.seed)
        self.trace = Trace()
        self.links = Links()
        self.checker = Checker(
            config.shards,
            config.steps,
            config.policy,
            calm=all(f.kind in PLANNED for f in config.faults),
            steady=all(f.kind in CONTROL_FAULTS for f in config.faults),
            parting=config.policy is Policy.SHRINK
            and (config.save_every > 0 or config.copy_every > 0 or any(f.kind in PLANNED for f in config.faults)),
            copies=config.copy_every > 0,
        )
        self.witness = Witness(self.checker.reference)
        self.checker.on_roll = self.witness.called
        self.fabric = Fabric(self.links, self.checker, lambda pair: self.kernel.between(*pair), self.kernel.chance)
        several = config.lighthouses > 1
        self.store = Electoral(ends_leases=config.seed % 2 == 0) if several else Store()
        self.candidates: dict[str, Candidate] = {}
        self._lives = 0  # of lighthouses
        self.flips = 0  # bits that have flipped
        self.frozen = False  # some lighthouse's clock has stood still
        self.restart_time = RESTART_TIME
        self.clock_offset = 1000.0
        self.coordinator: Coordinator | None = None
        self.coordinator_down = RESTART_TIME
        self.trainers: dict[Member, Trainer] = {}
        self.supervisors: dict[int, Supervisor] = {}
        self.speeds: dict[int, float] = {}
        self.evicted = self.checker.evicted
        self.homes: dict[int, str] = {}  # nodes to which groups have moved
        self.kept: dict[tuple[str, int], Copied] = {}  # in the memory of a group's place: its node and number
        self._disks: dict[str, Disk] = {}
        self.last_fault_at = 0.0
        self.left = 0  # step of the newest checkpoint when the last holder of the state died
        self._incarnations: dict[int, int] = {}
        self._waiting: list[Fault] = []  # faults that wait for an event
        self._seen: dict[tuple[str, int], int] = {}
        self._over = False
        for fault in config.faults:
            if fault.on:
                self._waiting.append(fault)
            else:
                self.kernel.after(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        if several:
            for number in range(config.lighthouses):
                self.start_candidate(f"{LIGHTHOUSE} {number}")
        else:
            self.start_coordinator()
        for node in range(config.nodes):
            self.start_supervisor(node)

    # --- parts -----------------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        last = self.store.records[-1] if self.store.records else None
        process, epoch = Process(self.kernel, LIGHTHOUSE), self.store.take_epoch()
        coordinator = self.coordinator = Coordinator(self, process, LIGHTHOUSE, epoch, last)

        def died() -> None:
            if self.coordinator is coordinator:
                self.emit("lighthouse down", -1, "the lighthouse is down")
                self.lasting(self.coordinator_down, self.start_coordinator)
                self.coordinator_down = RESTART_TIME

        coordinator.process.on_death.append(died)
        self.emit("lighthouse up", -1, "a lighthouse of epoch {} serves", coordinator.core.epoch)

    def start_candidate(self, place: str) -> None:
        assert isinstance(self.store, Electoral)
        self._lives += 1
        self.candidates[place] = Candidate(self, self.store, place, self._lives)

    def start_supervisor(self, node: int) -> None:
        groups = [g for g in range(self.config.groups) if self.node_number(g) == node]
        self.supervisors[node] = Supervisor(self, f"node {node}", groups)

    def node_number(self, group: int) -> int:
        home = self.homes.get(group)
        return group % self.config.nodes if home is None else int(home.removeprefix("node "))

    def node_of(self, group: int) -> str:
        return f"node {self.node_number(group)}"

    def disk_of(self, node: str) -> Disk:
        return self._disks.setdefault("" if self.config.shared else node, Disk())

    def supervisor_of(self, group: int) -> Supervisor:
        return self.supervisors[self.node_number(group)]

    def supervisor_at(self, node: str) -> Supervisor:
        return self.supervisors[int(node.removeprefix("node "))]

    def speed_of(self, group: int) -> float:
        return self.speeds.get(group, 1.0)

    def next_incarnation(self, group: int) -> Member:
        self._incarnations[group] = self._incarnations.get(group, -1) + 1
        return Member(group, self._incarnations[group])

    def takes(self, member: Member) -> None:
        """A node begins a life of a group from elsewhere."""
        self._incarnations[member.group] = max(self._incarnations.get(member.group, -1), member.incarnation)

    def at_work(self, group: int) -> Trainer | None:
        """The living incarnation of a group. While it moves to another node the next one lives as well."""
        return next(iter(self._living(group)), None)

    def victim(self, group: int) -> Trainer | None:
        """A living incarnation of a group, for something to happen to it."""
        living = self._living(group)
        return self.kernel.random.choice(living) if len(living) > 1 else next(iter(living), None)

    def _living(self, group: int) -> list[Trainer]:
        return [t for member, t in self.trainers.items() if member.group == group and t.process.alive]

    # --- faults ----------------------------------------------------------------------------------------------

    def lasting(self, seconds: float, end: Callable[[], None]) -> None:
        """``end`` undoes a fault after ``seconds``."""

        def over() -> None:
            self.last_fault_at = self.kernel.now
            end()

        self.kernel.after(seconds, over)

    def _strike(self, fault: Fault) -> None:
        self.last_fault_at = self.kernel.now
        self.emit("fault", -1, "*** {} {} {} for {} s", fault.kind, fault.target, fault.other, fault.seconds)
        APPLY[fault.kind](self, fault)

    def emit(self, name: str, group: int, text: str, *values: object) -> None:
        """Something happened: for the trace, and for faults that wait for it."""
        who = f"group {group}: " if group >= 0 else ""
        self.trace.add(self.kernel.now, f"{who}{name}: {text}", *values)
        if name in ("report", "stop", "exit"):
            if values and isinstance(values[0], Finished):
                self._count("finish", group)
            self._over = self._is_over()
        if self._waiting:
            self._count(name, group)

    def _count(self, name: str, group: int) -> None:
        for key in ((name, -1), (name, group)):
            self._seen[key] = self._seen.get(key, 0) + 1
        for fault in list(self._waiting):
            if fault.on == name and fault.whose in (-1, group) and self._seen[name, fault.whose] >= fault.nth:
                self._waiting.remove(fault)
                self.lasting(fault.at, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    # --- the run ---------------------------------------------------------------------------------------------

    def holders(self) -> list[Trainer]:
        """Members whose state counts, as nobody inside can know: alive, settled, and not left out by a quorum."""
        return [t for t in self.trainers.values() if t.process.alive and t.stepper.settled and self._included(t)]

    def _included(self, trainer: Trainer) -> bool:
        """It may have heard of a planned quorum with it, and never of an urgent one before that, without it."""
        stepper = trainer.stepper
        heard = stepper.newest if stepper.target is None else min(stepper.newest, stepper.target.id)
        return self.checker.included(trainer.member, heard)

    def veterans(self) -> list[Trainer]:
        """Members whose state is right, if perhaps old: fenced ones too."""
        return [
            t
            for t in self.trainers.values()
            if t.process.alive and (t.stepper.settled or t.stepper.step) and t.member not in self.evicted
        ]

    def founders(self) -> list[Trainer]:
        """Members of every quorum so far: while they have committed nothing, nobody has."""
        return [t for t in self.trainers.values() if t.process.alive and self.checker.included(t.member, NO_QUORUM)]

    def _is_over(self) -> bool:
        """Every agent has come to its end, also those that had no part in the last step."""
        agents = self.supervisors.values()
        stopped = any(s.stopped for s in agents) and all(s.stopped or s.deserted for s in agents)
        over = self.checker.finishers or stopped
        return bool(over) and all(s.at_rest for s in self.supervisors.values())

    def run(self) -> Outcome:
        try:
            verdict, failed = self._run(), False
            if self.config.expect and verdict != self.config.expect:
                verdict, failed = f"ended as {verdict!r}, but {self.config.expect!r} is expected", True
            there = tuple(sorted(f"{m.group}.{m.incarnation}" for m in self.checker.finishers))
            if self.config.finishers and there != self.config.finishers:
                verdict, failed = f"{there} finished, but {self.config.finishers} is expected", True
        except Unseen as why:
            verdict, failed = "unseen", bool(self.config.expect) and self.config.expect != "unseen"
            self.trace.add(self.kernel.now, "!!! {}", why)
        except Violation as broken:
            verdict, failed = str(broken), True
            self.trace.add(self.kernel.now, "!!! {}", broken)
        return Outcome(
            self.config.seed,
            verdict,
            failed,
            self.kernel.now,
            self.checker.commits,
            len(self.store.records),
            self.trace.lines() if failed or self.keep_trace else [],
        )

    def _run(self) -> str:
        lost = sum(fault.kind == "lose message" for fault in self.config.faults)
        # Each is waited for twice as long as the one before, and a new lighthouse begins to wait anew.
        patience = PATIENCE + 3 * GENEROUS * (2**lost - 1)
        limit = patience
        while not self.kernel.run(limit, lambda: self._over):
            if self.last_fault_at + patience <= limit or limit > max(LONGEST, patience):
                raise Violation(f"no end {patience:.0f} s after the last fault: {self._states()}")
            limit = self.last_fault_at + patience
        return "finished" if self.checker.finishers else "stopped"

    def check_publish(self, quorum: Quorum) -> None:
        self.checker.published(quorum, {record.id for record in self.store.records[-9:]})
        if quorum.urgent and not quorum.founding and self.checker.calm:
            self.checker.fail(f"only planned changes were asked for, but {quorum.id} is urgent: {quorum.reason}")
        if quorum.urgent and self.checker.steady:
            for trainer in self.trainers.values():
                if trainer.process.alive and trainer.stepper.step and trainer.member not in quorum.members:
                    self.checker.fail(f"no member failed, but {quorum.id} leaves {trainer.describe()} out")

    def check_leads(self, coordinator: Coordinator) -> None:
        """It is about to decide something. Of several lighthouses only the one that the store knows may do so."""
        leads, candidate = getattr(self.store, "holder", ""), coordinator.candidate
        if candidate is not None and not self.frozen and leads != candidate.name:
            self.checker.fail(f"{candidate.name} takes itself for the leader, but {leads} leads")

    def check_founding(self, quorum: Quorum, standings: list[Standing]) -> None:
        """Members are about to begin with the newest complete states among them."""
        top = max(s.step for s in standings)
        if top == NOTHING:
            return  # they end instead
        if not any(s.settled for s in standings):
            self.checker.starts(quorum, top)
            # A member that was fenced may hold an older state. It is right too, and needs no disk.
            if top < self.left and not any(self.trainers[m].veteran for m in quorum.members):
                self.checker.fail(f"{quorum.id} begins at step {top}, but the last to die left step {self.left}")
        latest = quorum.id == self.checker.quorums[-1].id  # or else who was stopped just ends an old roll call
        if latest and not any(s.settled or s.step > 0 for s in standings):
            for veteran in self.veterans():
                if veteran.stepper.step and veteran.member not in quorum.members:
                    self.checker.fail(f"{quorum.id} starts afresh, but {veteran.describe()} has a state")

    def died(self, trainer: Trainer) -> None:
        if self.config.shared and trainer.stepper.settled and not self.holders():
            self.left = self._newest_checkpoint()

    def begins(self, run: QuorumId) -> None:
        """All is lost, and the job is to begin again."""
        # With a directory for each node, one that nobody has heard of may be found too late.
        newest = self._newest_checkpoint() if self.config.shared else 0
        self.checker.begins(run, newest)
        self.emit("begin", -1, "run {}: the newest checkpoint is of step {}", run, newest)

    def _newest_checkpoint(self) -> int:
        return max((disk.newest for disk in self._disks.values()), default=0)

    def check_stop(self, reason: str) -> None:
        """Somebody says that the job cannot go on."""
        if any(s.stopped for s in self.supervisors.values()):
            return  # the first to hear of it has ended its groups
        if self.config.save_every:
            if self.checker.began < RESUMES or "it did not get from" not in reason:
                self.checker.fail(f"the job could begin again from step {self._newest_checkpoint()}, but: {reason}")
            return
        copies = [s.node for s in self.supervisors.values() if s.keeps_copies]
        if copies and (self.checker.began < RESUMES or "it did not get from" not in reason):
            self.checker.fail(f"there are copies in memory at {copies}, but: {reason}")
        if holders := ", ".join(t.describe() for t in self.veterans()):
            self.checker.fail(f"{holders}, but: {reason}")
        if not self.checker.exchanged and (fresh := [str(t.member) for t in self.founders()]):
            self.checker.fail(f"no step was exchanged, and {fresh} could start, but: {reason}")

    def check_complete(self, node: str) -> None:
        """Somebody says to ``node`` that the job is complete and needs none of its groups."""
        if not self.checker.finishers:
            self.checker.fail(f"{node} is told that the job is complete, but nobody has finished")
        for trainer in self.holders():
            if trainer.node == node and trainer.member in self.checker.quorums[-1].members:
                self.checker.fail(f"{node} is told that the job is complete without it, but has {trainer.describe()}")

    def _states(self) -> str:
        alive = [t for t in self.trainers.values() if t.process.alive]
        return "; ".join(t.describe() for t in alive) or "no member is alive"
