"""The training thread's side of a round of low communication: a Worker whose shards are stretches of inner steps, and
whose gradients are what these changed.

To the Worker the *shared* parameters are the model. Their gradients are pseudo-gradients, which are put there when
the inner steps are done, and the optimizer's step is the outer one, at the end of ``step.batches``.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Parameter

from planaria.core import actions as core
from planaria.core.assignment import paced
from planaria.core.messages import NO_QUORUM, ControlWord, Phase, QuorumId
from planaria.errors import NonFiniteError, ProtocolError, UsageError
from planaria.exchange.layout import Layout
from planaria.exchange.tree_exchange import Announcement, TreeExchange, decoded
from planaria.rank.fingerprint import digest_of_group
from planaria.rank.records import ABSENT, Exchanged, ShardRecord, mean_metrics
from planaria.rank.session import Session
from planaria.torch import random as seeding
from planaria.torch.buckets import local_numel
from planaria.torch.catching_up import CatchUp, Missed
from planaria.torch.checks import TrainableWatch
from planaria.torch.data import ShardedSource
from planaria.torch.gradients import GradientStore
from planaria.torch.state import ProtectedState
from planaria.torch.sync_part import SyncPart
from planaria.torch.worker import Worker
from planaria.wire import membership


@dataclass(slots=True)
class _Fragment:
    """What the Worker needs of the parameters that are exchanged together."""

    named: list[tuple[str, Parameter]]
    layout: Layout
    store: GradientStore
    exchange: tuple[QuorumId, TreeExchange] | None = None


class LowCommWorker(Worker):
    """``sync`` is a part of ``state``; ``script``: a run of which this one is a replay."""

    def __init__(
        self,
        session: Session,
        state: ProtectedState,
        facts: dict[str, Any],
        sync: SyncPart,
        script: membership.Script | None,
    ) -> None:
        # A parameter that a loss does not reach has not changed: that is no gradient that is missing.
        super().__init__(session, state, facts, overlap=False, allow_unused=True)
        self._sync = sync
        self._script = script
        self._settled = TrainableWatch(sync.trained)
        self._fragments = [self._fragment(number) for number in range(len(sync.fragments))]
        self._fragment_in_use = 0
        self._computed = False  # something of this step, by the loop's body
        self._steps_seen: list[int] = []  # of each inner optimizer, when the batches had ended
        self._told: list[ShardRecord] = []  # of all shards, as of the newest exchange
        self._words: list[ControlWord] = []  # likewise
        self._pace = sync.sync.steps  # inner steps that this group makes in a round
        self._looked = not sync.sync.paced  # that the script's own state does not depend on how many they are
        self.identity: dict[str, str] = {}  # of the job, once it is known
        self._catch_up: CatchUp | None = None
        # What GPUs exchange stays on them: whoever comes back there takes all of the state.
        if not session.alone and state.device.type == "cpu":
            self._catch_up = CatchUp(session, state, sync, self._sync_again)
            session.follower = self._transfer.catch_up = self._catch_up

    def _fragment(self, number: int) -> _Fragment:
        named = self._sync.shared_of(number)
        layout = Layout([local_numel(parameter) for _, parameter in named])
        store = GradientStore(named, self.settings.shards, layout, overlap=False, merge=self.settings.merges)
        return _Fragment(named, layout, store)

    def begin_step(self) -> bool:
        goes_on = super().begin_step()
        self._computed = False
        if goes_on and self.session.alone:  # else it was marked
            self.state.mark()
        return goes_on

    def commit(self) -> None:
        if not self.overtaken and self._sync.inner_steps != self._steps_seen:
            raise UsageError(
                f"{self.settings.where}, step {self.step}: the inner optimizer was stepped after step.batches had "
                "ended; its steps belong into the loop over the batches"
            )
        overtaken = self.overtaken
        if self._catch_up is not None and overtaken:
            self._catch_up.wait()
        super().commit()
        if self._catch_up is not None and not overtaken:
            self._catch_up.committed(self.step, self.session.stepper.under)

    def finish(self) -> bool:
        if not super().finish():
            return False
        self._sync.settle()
        if not self._sync.sync.exact:
            self._write(self.step, self.digest)
        if self._script is not None and self.step == self._script.syncs:
            self._script.compare("the state at the end", self._script.final, self.digest)
        return True

    def introduced(self, identity: dict[str, str], start: int, initial: str) -> None:
        """What this group is, as all its ranks agree, and the digest of the state with which it starts at step
        ``start``; empty if it takes that of others. Raises UsageError if the run to be replayed was another."""
        self.identity = identity
        if self._catch_up is not None:
            self._catch_up.meet()
        if start == 0:
            self._sync.origin = initial
        if self._script is not None:
            self._script.check(identity)
            self._script.compare("the state at the start", self._script.origin, self._sync.origin)

    def go_back(self) -> tuple[int, QuorumId]:
        if self._catch_up is not None:
            self._catch_up.lose()
        return super().go_back()

    def _give_up(self) -> None:
        super()._give_up()
        self._pace = self._sync.sync.steps  # a rank that is new does not know better

    def _fresh_step(self) -> None:
        if self._store_of != self._now:
            self._fragments[self._fragment_in_use].exchange = self._exchange
            self._fragment_in_use = self.step % len(self._fragments)
            chosen = self._fragments[self._fragment_in_use]
            self.named, self._layout, self._store = chosen.named, chosen.layout, chosen.store
            self._exchange = chosen.exchange
        super()._fresh_step()

    # --- a shard ---------------------------------------------------------------------------------------------

    def _shard(self, action: core.Compute, data: ShardedSource) -> Iterator[Any]:
        sync = self._sync
        started = time.perf_counter()
        before = self._buffers.now()
        steps = self._steps_of(action.step, action.shard)
        watched = self.session.stepper.watched(action.shard)
        anew = self._begin_shard(action.step, action.shard, steps)
        self._store.begin_shard(action.shard, summed=watched, apart=action.again)
        ready = (steps - sync.sync.delay) * data.micro_batches
        weight, presence = 0.0, b""
        own = None if self._looked else self.state.own(data)
        for number, batch in enumerate(self._batches(data, action.step, action.shard, steps), 1):
            yield batch
            if number == ready:
                weight = self._contribute(action, data)
                presence = self._store.end_shard()
                sync.clear(self._fragment_in_use)
                if sync.sync.delay and action.last:
                    self._send_early()
        sync.check_steps(steps, data.micro_batches, f"{self.settings.where}, step {action.step}")
        if own is not None and own != self.state.own(data):
            raise UsageError(
                f"{self.settings.where}, step {action.step}: with paced=True groups make different numbers of inner "
                "steps, and a protected object (a scheduler?) was changed in the loop over step.batches, so it would "
                "come to differ; set learning rates from sync.inner_step there, and change the rest after the batches"
            )
        self._looked = True
        if watched:
            self.rechecks.computed(action.shard, self._store.checksum(), action.again)
        if action.again:
            self.session.stepper.shard_checked(action.shard)
            return
        record = ShardRecord(action.shard, presence, (), data.cursor_after(action.shard), weight, anew, steps)
        self._end_shard(record, before, started)

    def _steps_of(self, step: int, shard: int) -> int:
        """Inner steps of this group's shard."""
        if self._script is None:
            return self._pace
        return dict(self._script.membership.of(step).short).get(shard, self._sync.sync.steps)

    def _whole(self, seconds: float) -> float:
        return seconds * self._sync.sync.steps / self._sync.steps

    def _begin_shard(self, step: int, shard: int, steps: int) -> bool:
        """Whether the shard begins anew."""
        self._computed = True
        self.session.show(Phase.COMPUTING, shard)
        scripted = self._script is not None and shard in self._script.membership.of(step).anew
        anew = self._sync.kept != (step, shard) or scripted
        if anew:
            self.state.put_back(self._data)  # another shard may have been computed since the step began
            self._sync.renew()
        self._sync.kept = None  # from here on this group's own state is the beginning of nothing
        self._sync.begin(step, steps)
        self._recorded = {}
        seeding.seed_shard(self.settings.seed, step, shard, self.session.world.part[0])
        return anew

    def _batches(self, data: ShardedSource, step: int, shard: int, steps: int) -> Iterator[Any]:
        for batch in data.batches(step * self._sync.sync.steps, shard, steps):
            yield batch
            if self.session.page is not None:
                self.session.page.beat()

    def _contribute(self, action: core.Compute, data: ShardedSource) -> float:
        """Make this group's change the gradient of the shared parameters. Its weight; 0 if it does not count."""
        sync, shard = self._sync, action.shard
        due = sync.steps - sync.sync.delay
        sync.check_steps(due, data.micro_batches, f"{self.settings.where}, step {action.step}")
        changes = sync.changes(self._fragment_in_use)
        finite = bool(torch.stack([torch.isfinite(change).all() for change in changes]).all())
        # All ranks of the group count, or none does; and what they count is the group's.
        told = [json.loads(each) for each in self.session.gather(json.dumps([finite, sync.tokens]).encode())]
        weight = math.fsum(tokens for _, tokens in told) or sync.steps / sync.sync.steps
        sync.tokens = 0.0
        if self._script is not None:
            if self._script.absent(action.step, shard):
                return ABSENT
            if shard in self._script.membership.of(action.step).left_out:
                return 0.0
        if not sync.sync.exact and not all(fine for fine, _ in told):
            return 0.0
        sync.put(self._fragment_in_use, changes, weight)
        return weight

    def _send_early(self) -> None:
        """The exchange goes on beside the inner steps that are left."""
        exchange = self._begin(self.session.stepper.work())
        if exchange is not None:
            exchange.check(self._store.nodes)
            for bucket in range(len(self._layout.buckets)):
                exchange.submit(bucket, self._store.parts(bucket))

    def _before_exchange(self, action: core.Exchange, data: ShardedSource) -> Iterator[Any]:
        """Without a shard of its own (the others have all of them already, or it has no slot) a group goes through one
        all the same: what the loop's body changes beside the model, learning rates above all, must be as on the others.
        """
        if self._computed:
            return
        steps = self._sync.sync.steps
        self._begin_shard(action.step, 0, steps)
        yield from self._batches(data, action.step, 0, steps)
        self._recorded = {}
        self._sync.renew(options=False)

    # --- the exchange ----------------------------------------------------------------------------------------

    def _divisor(self, work: core.Exchange) -> int:
        return 1  # sums: the divisor is their weight, which the tails say

    def _prepare(self, announced: Announcement, work: core.Exchange) -> Exchanged:
        told = super()._prepare(announced, work)
        self._told, self._words = told.records, told.words
        counted = [record for record in told.records if record.weight > 0]
        means = dict(zip(self.metric_names, mean_metrics(counted), strict=False))
        # What is absent by script was not there: its samples are not used.
        return replace(told, records=[r for r in told.records if r.weight != ABSENT], means=means)

    def _reduce(self, work: core.Exchange) -> bool:
        if not super()._reduce(work):
            return False
        sync, step = self._sync, work.step
        counted = [record for record in self._told if record.weight > 0]
        out = [record.shard for record in self._told if record.weight == 0]
        if not counted:
            groups = ", ".join(map(str, out))
            raise NonFiniteError(
                f"job {self.settings.job}, sync {step}: what groups {groups} made of the parameters is not finite (NaN "
                "or infinite), and nobody else was there. The shared parameters were not touched; lower the learning "
                "rate, or clip gradients"
            )
        mine = self._store.have
        keeps = not sync.sync.exact and len(mine) == 1 and mine <= {record.shard for record in counted}
        total = math.fsum(record.weight for record in counted)
        if self._catch_up is not None:
            assert self._exchange is not None
            self._catch_up.begin(self._fragment_in_use, total, self._exchange[1].outcome)
        sync.outer_step(self._fragment_in_use, total, keeps)
        sync.kept = (step + 1, *mine) if keeps else None  # type: ignore[assignment]
        self._steps_seen = sync.inner_steps
        if step == 0 and not sync.sync.exact:
            sync.first = digest_of_group(self.state.digest(), self.session.gather)
            if self._script is not None:
                self._script.compare("what the first sync made", self._script.first, sync.first)
        if sync.sync.paced:
            seconds = [word.seconds_per_shard for word in self._words]
            own = self._partners.index(self.session.member.group)
            self._pace = paced(sync.sync.steps, sync.sync.delay + 1, seconds, own, self._pace)
        if not sync.sync.exact:
            self._note(step, counted, out)
        return True

    def _sync_again(self, missed: Missed) -> None:
        """What the sync made of the shared state of the step before it. Raises ProtocolError for what was none."""
        if not 0 <= missed.fragment < len(self._fragments):
            raise ProtocolError(f"a peer tells of a sync of fragment {missed.fragment} of {len(self._fragments)}")
        fragment, reduction = self._fragments[missed.fragment], self.settings.reduction
        sizes = fragment.layout.buckets
        if len(missed.outcome) != len(sizes):
            raise ProtocolError(f"a peer tells of a sync of {len(missed.outcome)} buckets, not {len(sizes)}")
        results = [decoded(each, numel, reduction) for each, numel in zip(missed.outcome, sizes, strict=True)]
        seeding.seed_apply(self.settings.seed, missed.base[0])
        self._sync.set_outer_options(missed.options)
        fragment.store.assign(results, (True,) * len(fragment.named))
        self._sync.outer_step(missed.fragment, missed.total, keeps=False)

    def _note(self, step: int, counted: list[ShardRecord], out: list[int]) -> None:
        there = frozenset(record.shard for record in counted)
        anew = frozenset(record.shard for record in counted if record.anew)
        whole = self._sync.sync.steps
        short = frozenset((record.shard, record.steps) for record in counted if record.steps < whole)
        made = membership.Sync(there, anew, frozenset(out), short)
        if self._script is not None and self._script.membership.of(step) != made:
            was, now = (", ".join(map(str, sorted(sync.counted))) for sync in (self._script.membership.of(step), made))
            raise UsageError(
                f"job {self.settings.job}, sync {step}: groups {was} took part in it in the run that is replayed, and "
                f"groups {now} in this one; a group was lost meanwhile: replay it again"
            )
        self._write(step + 1, durably=self._sync.membership.add(step, made))
        if out and self.session.world.rank == 0 and self.session.member.group in (self.groups[0], *out):
            groups = f"group{'s' if len(out) > 1 else ''} {', '.join(map(str, out))}"
            sys.stderr.write(
                f"planaria: job {self.settings.job}, sync {step}: what {groups} made of the parameters is not finite "
                "(NaN or infinite); left out of this sync, to begin anew with the shared parameters\n"
            )

    def _write(self, syncs: int, final: str = "", durably: bool = True) -> None:
        """Before the step is committed: a sync that counts is on the disk of somebody who lives."""
        directory, sync = self.settings.directory, self._sync
        if directory is None or self.session.world.rank != 0:
            return
        run = membership.Script(directory, self.identity, sync.membership, syncs, sync.origin, sync.first, final)
        target = self.session.stepper.target
        membership.write(directory, run, NO_QUORUM if target is None else target.id, durably)
