"""The training thread's side of a step: shards in, gradients out, whatever happens to the other groups.

``Worker`` follows the stepper: it computes the shards that it is given, exchanges their gradients, and moves the
protected state when a member heals. Everything that another group could change goes through ``Session``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch

from planaria.core import actions as core
from planaria.core.exits import EXIT_INTERRUPTED, EXIT_OK
from planaria.core.messages import NO_QUORUM, Phase, QuorumId
from planaria.errors import CommunicatorError, PlanariaError, UsageError
from planaria.exchange.layout import Layout
from planaria.exchange.tree_exchange import Announcement, TreeExchange
from planaria.rank.fingerprint import digest_of_group
from planaria.rank.gauges import Gauges, smoothed
from planaria.rank.journal import Journal
from planaria.rank.nonfinite import stop_on_nonfinite
from planaria.rank.records import (
    METRICS,
    Exchanged,
    ShardRecord,
    cursors,
    encode_tail,
    mean_metrics,
    open_tails,
    tail_bytes,
    union_presence,
)
from planaria.rank.rounds import Note
from planaria.rank.session import Bereaved, Session
from planaria.rank.statechecks import disputed
from planaria.torch import random as seeding
from planaria.torch.buckets import local_numel
from planaria.torch.buddies import Buddies
from planaria.torch.checkpoints import Checkpoints
from planaria.torch.checks import BufferWatch, TrainableWatch, check_presence, check_spread
from planaria.torch.data import ShardedSource
from planaria.torch.gradients import GradientStore
from planaria.torch.rechecks import Rechecks
from planaria.torch.scalars import check_names, recorded
from planaria.torch.state import ProtectedState
from planaria.torch.transfer import Transfer
from planaria.torch.unwinding import Pipelines, unwind


class Worker:
    """One per job. ``facts`` is a part of ``state``: what Planaria itself must know after healing."""

    def __init__(
        self, session: Session, state: ProtectedState, facts: dict[str, Any], overlap: bool, allow_unused: bool
    ) -> None:
        self.session = session
        self.settings = session.settings
        self.state = state
        parameters = state.parameters()
        self.named = named = [(name, p) for name, p in parameters if p.requires_grad]
        self.digest = ""  # of the final state, once all steps are committed
        self.metrics: dict[str, float] = {}  # means over the shards of the newest committed step
        self.groups: tuple[int, ...] = ()  # that took part in this step's exchange; none before it is complete
        self._facts = facts
        self.seconds_per_shard = 0.0  # of the group
        self._mean_seconds = 0.0  # of this rank
        self.shards_computed = 0
        self.checkpoints: Checkpoints | None = None  # set before the first step, if any are wanted
        self.buddies: Buddies | None = None  # likewise
        self.journal = Journal(session.settings.directory)
        self._layout = Layout([local_numel(p) for _, p in named])
        self._store = GradientStore(named, self.settings.shards, self._layout, overlap, self.settings.merges)
        self._overlap = overlap
        self._allow_unused = allow_unused
        self._buffers = BufferWatch(state.buffers())
        self.rechecks = Rechecks(session)
        self._exchange: tuple[QuorumId, TreeExchange] | None = None
        self._begun: core.Exchange | None = None  # the exchange that hooks feed while the last shard computes
        self._partners: tuple[int, ...] = ()  # the groups of the exchange that was begun last
        self._tail_bytes = 0  # of the exchange that was begun last
        self._records: dict[int, ShardRecord] = {}
        self._raw: dict[int, dict[str, list[Any]]] = {}  # recorded values of shards, still on their device
        self._recorded: dict[str, list[Any]] = {}  # of the shard in hand
        self._data: ShardedSource | None = None
        self._store_of: tuple[int, int] | None = None
        self._present = self.settings.shards  # shards in the newest sum
        self._named = NO_QUORUM  # the planned quorum in this rank's newest control word
        self._gauges = Gauges(session)
        self._transfer = Transfer(session, state, self.journal)
        self._settled = TrainableWatch(parameters)
        self._pipelines: Pipelines | None = None  # once the script has said that it outlives the loss of a rank

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Of the recorded metrics, in the order of their values. A group that heals may commit a step without having
        computed a shard, so the names travel with the state."""
        return tuple(self._facts["metrics"])

    @property
    def step(self) -> int:
        """Steps committed: the index of the step being worked on."""
        return self.session.stepper.step

    @property
    def _now(self) -> tuple[int, int]:
        """Which state, taken from peers or made here, gradients are computed from."""
        return self._transfer.taken, self.step

    @property
    def _first(self) -> bool:
        """Whether this group was the first of the members that made the newest commit."""
        return self.session.stepper.first == self.session.member

    @property
    def overtaken(self) -> bool:
        """Whether this group took a newer state while the script was in the loop's body, which is void therefore."""
        return self._transfer.healed is not None

    # --- between steps ---------------------------------------------------------------------------------------

    def begin_step(self) -> bool:
        """Wait until there is work on a step. False: all steps are committed."""
        self._transfer.inside = False
        self.groups = ()
        goes_on = self._goes_on(self._advance())
        if goes_on:
            self.state.reshard()  # what an evaluation before the optimizer's step gathered is not what it made of it
            self._settled.check(self.settings.where, self.step)
            if not self.session.alone:
                self.state.mark()
            seeding.seed_begin(self.settings.seed, self.step)
        self._transfer.inside = True
        return goes_on

    def _advance(self) -> core.Action:
        while True:
            try:
                action = self.session.advance(self._transfer)
                if not (isinstance(action, core.Leave) and action.drained and self.session.stays):
                    return action
                if not self.session.await_move():
                    return action
                raise Bereaved
            except Bereaved:
                # Between steps, where nothing of user code is under way: a rank that is new takes no part in that.
                self._give_up()
                if self._pipelines is not None:
                    self._pipelines.rewind()
                if self.checkpoints is not None:
                    with self.session.during(Phase.LOADING):  # which may take long, and is no hang
                        self.checkpoints.wait()
                if self.buddies is not None:
                    self.buddies.wait()
                self.seconds_per_shard = 0.0  # nothing that decides who does what may differ from what a new rank knows
                self.session.rejoin()

    def _goes_on(self, action: core.Action) -> bool:
        match action:
            case core.Finish():
                return False
            case core.Leave():
                self._leave(action)
            case core.Disputed():
                raise disputed(self.session.checks, action, self.settings.where)
        return True

    def _leave(self, action: core.Leave) -> NoReturn:
        if self.checkpoints is not None:
            stepper = self.session.stepper
            self.checkpoints.end(stepper.step, stepper.settled and not action.drained and self._first)
        self.journal.close()
        self.session.close()
        # The user's loop ends here, in order, at a step boundary: `finally` blocks run, what follows the loop does
        # not, for it would take a half-trained model for the result.
        raise SystemExit(EXIT_OK if action.drained else EXIT_INTERRUPTED)

    def commit(self) -> None:
        """The user's code has applied the step."""
        if self._transfer.healed is not None:
            # Healed inside the body: whatever its code did, before (for another step) or since, must not stand.
            with self.session.during(self._transfer.phase):
                self.state.restore(*self._transfer.healed)
            self._transfer.healed = None
            return
        stepper = self.session.stepper
        step, quorum = stepper.step, stepper.target.id if stepper.target else NO_QUORUM
        self.session.change(lambda s: s.applied())
        if self.checkpoints is not None:
            with suppress(Bereaved):  # told again by the next question to the session
                self.checkpoints.committed(stepper.step, self._first)
        if self.buddies is not None and stepper.step < stepper.total:
            with suppress(Bereaved):
                self.buddies.committed(stepper.step, stepper.under)
        self._records.clear()
        self._gauges.committed(step + 1, quorum, self.metrics, self.shards_computed)
        self.journal.commit(step, self._present, self.metrics)

    def finish(self) -> bool:
        """All steps are committed everywhere: tell the digest of the final state. False if a rank of the group was lost
        at the last moment: then it has to be asked again whether there is work."""
        try:
            digest = digest_of_group(self.state.digest(), self.session.gather)
        except Bereaved:
            return False
        self.digest = digest
        self.journal.result(self.step, digest, self.metrics)
        self.journal.close()
        self._store.release()
        self.session.show(Phase.FINISHED)
        self.session.change(lambda s: s.finished(digest))
        if self.checkpoints is not None:
            self.checkpoints.end(self.step, self._first)
        self.session.close()
        return True

    def void(self, error: Exception) -> bool:
        """Whether ``error`` came out of user code because a rank of this group was lost and is replaced. Then nothing
        is left of what that code did: the group takes the state of its peers."""
        collective = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        if not (collective or self.session.bereaved):  # numbers of a GPU whose collectives were ended mean nothing
            return False
        if not (isinstance(error, Bereaved) or self.session.await_regroup()):
            return False
        unwind(self.state.modules)
        self._give_up()
        return True

    def go_back(self) -> tuple[int, QuorumId]:
        """Nobody has the state any more: take the newest that is left, of the copies in memory and those on the disk.
        Its step, and, if it was in memory, the quorum under which it was committed."""
        best = self.buddies.meet() if self.buddies is not None else None
        seen = self.checkpoints.newest() if self.checkpoints is not None else 0
        if self.checkpoints is not None and seen > (best[0] if best is not None else 0):
            return self.checkpoints.resume(), NO_QUORUM
        if self.buddies is None or best is None:
            raise PlanariaError(
                f"{self.settings.where}: no whole copy of the group's state is left in memory; it is started again"
            )
        with self.session.during(self._transfer.phase):
            self.state.restore(*self.buddies.take_back(best), f"the copy of step {best[0]}")
        return best

    def guard(self) -> None:
        """The script keeps what the loss of a rank raises from ending this process."""
        if self._pipelines is None:
            self._pipelines = Pipelines()
            # What a pipeline of the script's own making leaves behind is not known.
            if self._pipelines or self.session.world.shape.get("pp", 1) == 1:
                self.session.guard()

    def _give_up(self) -> None:
        """Nothing of the step counts any more."""
        self._abandon()
        self._transfer.healed = None
        self._records.clear()
        self._raw.clear()
        self._store_of = None

    # --- inside a step ---------------------------------------------------------------------------------------

    def batches(self, data: ShardedSource) -> Iterator[Any]:
        """Yield the batches of every shard that this group has to compute, then exchange. See Step.batches."""
        self._bind(data)
        while True:
            action = self.session.advance(self._transfer)
            if self._transfer.healed is not None or not self._goes_on(action):
                self._void()
                return
            if not self._reconcile():
                continue
            match action:
                case core.Compute():
                    yield from self._shard(action, data)
                case core.Exchange():
                    yield from self._before_exchange(action, data)
                    if self._reduce(action):
                        return

    def _bind(self, data: ShardedSource) -> None:
        if self._data is None:
            if hasattr(data, "state_dict") and not self.state.protects(data):
                raise UsageError(
                    f"{self.settings.where}: the position of this {type(data).__name__} is part of the job's state; "
                    "add it to what is protected: job.protect(..., data=data)"
                )
            check_spread(self.named, self.session.world, self.settings.where)
            data.bind(self.settings.shards, self.settings.seed, self.session.world.part)
            self._data = data
        elif self._data is not data:
            raise UsageError(
                f"{self.settings.where}, step {self.step}: one job reads one dataset; combine them into one"
            )

    def _void(self) -> None:
        """This group took another step's state from its peers while the user's code was in the body: what that code
        did so far was for a step that is past. The body ends on zero gradients, its effects are taken back, and it
        runs again for the right step."""
        for _, parameter in self.named:
            parameter.grad = torch.zeros_like(parameter)

    def _reconcile(self) -> bool:
        """Hold exactly the shards that the roll call counted for this member. False if fewer are left: then there is
        something else to do."""
        self._fresh_step()
        counted = frozenset(self.session.stepper.have)
        if self._store.have != counted:
            held = self._store.keep(counted)
            self._records = {shard: record for shard, record in self._records.items() if shard in held}
            self.session.stepper.have &= held
            return held == counted
        return True

    def _fresh_step(self) -> None:
        if self._store_of != self._now:
            # Every member of the quorum in force has left older communicators (it answered the roll call or took
            # part in the last exchange), so nobody reads the old buffers any more.
            self._store.begin_step(recycle=True)
            self._records.clear()
            self.rechecks.clear()
            self._store_of = self._now

    def _shard(self, action: core.Compute, data: ShardedSource) -> Iterator[Any]:
        exchange = self._begin(self.session.stepper.work()) if action.last and self._overlap else None
        watched = self.session.stepper.watched(action.shard)
        started = time.perf_counter()
        self.session.show(Phase.COMPUTING, action.shard)
        seeding.seed_shard(self.settings.seed, action.step, action.shard, self.session.world.part[0])
        on_bucket = exchange.submit if exchange is not None else None
        self._store.begin_shard(action.shard, on_bucket, data.micro_batches, watched, action.again)
        if exchange is not None:
            exchange.check(self._store.coming)
        self._recorded = {}
        before = self._buffers.now()
        for batch in data.batches(action.step, action.shard):
            yield batch
            self._store.micro_batch_done()
            if self.session.page is not None:
                self.session.page.beat()
        presence = self._store.end_shard()
        if watched:
            self.rechecks.computed(action.shard, self._store.checksum(), action.again)
        if action.again:
            self.session.stepper.shard_checked(action.shard)
            return
        self._end_shard(ShardRecord(action.shard, presence, (), data.cursor_after(action.shard)), before, started)

    def _end_shard(self, record: ShardRecord, buffers: list[tuple[int, int]], started: float) -> None:
        """The shard's sums are held. ``buffers`` were such when it began, at ``started`` (time.perf_counter)."""
        shard = record.shard
        self._buffers.check(buffers, f"{self.settings.where}, step {self.step}, shard {shard}")
        self._check_metrics()
        self._raw[shard], self._records[shard] = self._recorded, record
        self.session.stepper.shard_done(shard)
        self.shards_computed += 1
        self._mean_seconds = smoothed(self._mean_seconds, self._whole(time.perf_counter() - started))

    def _whole(self, seconds: float) -> float:
        """What a whole shard would have taken, if this one took ``seconds``."""
        return seconds

    def _before_exchange(self, action: core.Exchange, data: ShardedSource) -> Iterator[Any]:
        yield from ()

    def record(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._recorded.setdefault(name, []).append(recorded(value))

    def _check_metrics(self) -> None:
        if not self.metric_names:
            self._facts["metrics"] = sorted(self._recorded)
            self.state.mark_only("planaria")  # whoever heals in this very step may compute nothing of it
        check_names(sorted(self._recorded), list(self.metric_names), f"{self.settings.where}, step {self.step}")

    def _complete_records(self) -> list[ShardRecord]:
        """The records of all shards held, with their metrics as numbers."""
        for shard, raw in self._raw.items():
            values = {name: [float(value) for value in raw[name]] for name in self.metric_names}
            metrics = tuple(math.fsum(of) / len(of) for of in values.values())
            if shard in self._records:
                self._records[shard] = replace(self._records[shard], metrics=metrics)
        self._raw.clear()
        found = [self._records[shard] for shard in sorted(self._store.have)]
        return [replace(each, checksum=self.rechecks.own(each.shard)) for each in found]

    # --- the exchange ----------------------------------------------------------------------------------------

    def _begin(self, work: core.Exchange) -> TreeExchange | None:
        """Get the exchange of this step ready to take buckets. None if its communicator is gone already."""
        try:
            communicator = self.session.communicator(work.quorum)
            if self._exchange is None or self._exchange[0] != work.quorum:
                self._exchange = (work.quorum, TreeExchange(communicator, self._layout))
            exchange = self._exchange[1]
            most = (max(map(len, shards), default=0) for shards in (work.owned, work.twice))
            self._tail_bytes = tail_bytes(len(self.named), METRICS, *most)
            exchange.begin(
                work.nodes(self.settings.shards, self.settings.merges),
                self.settings.shards,
                divisor=self._divisor(work),
                reduction=self.settings.reduction,
                tail_bytes=self._tail_bytes,
                noise=seeding.noise_key(self.settings.seed, work.step),
            )
        except CommunicatorError:
            return None  # the next question to the stepper tells what to do instead
        self._begun = work
        self._partners = tuple(member.group for member in communicator.quorum.members)
        return exchange

    def _divisor(self, work: core.Exchange) -> int:
        return work.present

    def _reduce(self, work: core.Exchange) -> bool:
        """Finish the step's exchange; True if its gradients are final on all ranks of the group."""
        self.session.show(Phase.EXCHANGING)
        final = False
        try:
            final = self._finish(work)
        finally:
            if not final:
                self._store.withdraw()
        return final

    def _finish(self, work: core.Exchange) -> bool:
        found: list[Exchanged] = []
        ok = self.session.attempt(work.quorum, "exchange", lambda: found.append(self._exchange_all(work)))
        # From here on a device stands still: whatever can be done before is done in _prepare.
        told = found[0] if ok else Exchanged([], [], {})
        named = self._named if ok and all(word.planned == self._named for word in told.words) else NO_QUORUM
        note = Note(ok=ok, finite=told.finite, seconds=self._mean_seconds, metrics=told.means, named=named)
        alike = len({word.checksum for word in told.words}) <= 1
        outcome = self.session.agree(replace(note, alike=alike, doubtful=told.doubtful))
        if not (outcome.ok and outcome.alike and not outcome.doubtful):
            self._abandon()
            if outcome.ok and not outcome.alike:
                self.session.stepper.recount()  # whose gradients differ says nothing, for whose states do is not known
            elif outcome.ok:
                self.rechecks.dispute(outcome.doubtful)
            return False
        self.rechecks.settle()
        if not outcome.finite:
            stop_on_nonfinite(told.records, self._store, self.session, work)
        if not self._allow_unused:
            check_presence(told.records, self._store.names, f"job {self.settings.job}, step {self.step}")
        self._store.fulfil()
        self._present, self.groups = len(told.records), self._partners
        self.metrics = outcome.metrics
        self.seconds_per_shard = outcome.seconds
        if self._data is not None:
            self._data.commit(cursors(told.records))
        self._begun = None
        self.session.stepper.exchanged(work.quorum, told.words)
        self._gauges.exchanged(work.quorum, self._partners, told.words, self._mean_seconds)
        self.session.show(Phase.APPLYING)
        return True

    def _exchange_all(self, work: core.Exchange) -> Exchanged:
        if self._begun != work:
            exchange = self._begin(work)
            if exchange is None:
                raise CommunicatorError("it was gone before the exchange began")
            exchange.check(self._store.nodes)
            for bucket in range(len(self._layout.buckets)):
                exchange.submit(bucket, self._store.parts(bucket))
        assert self._exchange is not None
        exchange = self._exchange[1]
        # But for what it names, the same at every rank of the group: the steppers are alike, the speed is the group's.
        self._named = self.session.ready_for()
        checksum = self.session.checks.word(work.step)
        word = self.session.stepper.word(self.seconds_per_shard, self._named, checksum)
        seconds = self.rechecks.seconds(work.twice, exchange.rank)
        exchange.submit_tail(encode_tail(word, self._complete_records(), self._tail_bytes, seconds))
        announced = exchange.announced(lambda: self.session.stopped_waiting(work.quorum))
        told = self._prepare(announced, work)
        result = exchange.finish(lambda: self.session.stopped_waiting(work.quorum))
        return replace(told, finite=result.finite)

    def _prepare(self, announced: Announcement, work: core.Exchange) -> Exchanged:
        """What can be done while the device still works, and does not matter if its results never come."""
        words, records, seconds = open_tails(announced.tails, work.step, work.owned, self.settings.where)
        self._store.expect(announced.buckets, union_presence(records, len(self.named)))
        seeding.seed_apply(self.settings.seed, work.step)
        doubtful = self.rechecks.compare(work.owned, records, seconds)
        means = dict(zip(self.metric_names, mean_metrics(records), strict=False))
        return Exchanged(words, records, means, doubtful=doubtful)

    def _abandon(self) -> None:
        # Peers that have not heard yet may go on reading what was handed out: later sums go to fresh buffers.
        self._store.freeze()
        self._begun = None
