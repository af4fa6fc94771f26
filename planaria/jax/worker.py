"""The training thread's side of a step: shards in, the next state out, whatever happens to the other groups.

It follows the stepper, as ``planaria.torch.worker`` does, with less to do: a state that is a value needs no hooks, no
marks, and nothing is ever taken back. A group that heals in mid-step just goes on with the shards of the newer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import jax
import numpy as np
import torch
from jax import Array

from planaria.core import actions as core
from planaria.core.exits import EXIT_INTERRUPTED, EXIT_OK
from planaria.core.messages import NO_QUORUM, Phase, QuorumId
from planaria.errors import CommunicatorError, UsageError
from planaria.exchange import healing
from planaria.exchange.communicator import Communicator
from planaria.exchange.noise import key_of
from planaria.exchange.tree_exchange import TreeExchange
from planaria.jax.checkpoint import Checkpoints
from planaria.jax.gradients import Sums
from planaria.jax.programs import Gradient, Programs, refuse_deleted
from planaria.jax.state import State, said
from planaria.jax.views import settle
from planaria.rank.fingerprint import digest_of_group
from planaria.rank.gauges import Gauges, smoothed
from planaria.rank.journal import Journal
from planaria.rank.nonfinite import stop_on_nonfinite
from planaria.rank.records import METRICS, Exchanged, ShardRecord, encode_tail, mean_metrics, open_tails, tail_bytes
from planaria.rank.rounds import Note
from planaria.rank.session import Session
from planaria.rank.statechecks import disputed


class Worker:
    """One per job. ``begin`` joins the job: it is called when everything has been compiled. ``end`` is called when the
    job has ended in order."""

    def __init__(
        self,
        session: Session,
        state: State,
        programs: Programs,
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self.session = session
        self.settings = session.settings
        self.state = state
        self.digest = ""  # of the final state, once all steps are committed
        self.metrics: dict[str, float] = {}  # means over the shards of the newest committed step
        self.groups: tuple[int, ...] = ()  # that computed it together
        self.shard: int | None = None  # in the script's hands
        self.dry = False  # the shard is there to be compiled for
        self.checkpoints: Checkpoints | None = None  # set before the first step, if any are wanted
        self.void = False  # the job was over before this group could take part in the step
        self._begin = begin
        self._end = end
        self._programs = programs
        self._sums: Sums
        self._names: tuple[str, ...] | None = None  # of the metrics
        self._records: dict[int, ShardRecord] = {}
        self._raw: dict[int, dict[str, Any]] = {}  # metrics of shards, not waited for
        self._late: tuple[int, list[Array]] | None = None  # a shard whose gradients are not in the sums yet
        self._sums_of: tuple[int, int] | None = None
        self._taken = 0  # states, from peers
        self._started = False
        self._mean_seconds = self.seconds_per_shard = 0.0
        self._computed = 0  # shards
        self._exchange: tuple[QuorumId, TreeExchange] | None = None
        self._named = NO_QUORUM
        self._partners: tuple[int, ...] = ()  # the groups of the exchange that was begun last
        self._root = jax.random.key(self.settings.seed)
        self._fold = jax.jit(lambda root, step, shard: jax.random.fold_in(jax.random.fold_in(root, step), shard))
        self._journal = Journal(session.settings.directory)
        self._gauges = Gauges(session)

    @property
    def step(self) -> int:
        """Steps committed: the index of the step being worked on."""
        return self.session.stepper.step if self._started else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the metrics, ascending."""
        return self._names or ()

    @property
    def _first(self) -> bool:
        """Whether this group was the first of the members that made the newest commit."""
        return self.session.stepper.first == self.session.member

    # --- between steps ---------------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Wait until there is work on a step. False: all steps are committed. True at first: work begins with what is
        compiled before this group counts."""
        return not self._started or self._is_work(self.session.advance(self._transfer))

    def _is_work(self, action: core.Action) -> bool:
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
        self._journal.close()
        self.session.close()
        self._end()
        # The script's loop ends here, in order: what follows it would take a half-trained model for the result.
        raise SystemExit(EXIT_OK if action.drained else EXIT_INTERRUPTED)

    def finish(self) -> None:
        """All steps are committed everywhere: tell the digest of the final state."""
        self.digest = digest_of_group(self.state.digest(), self.session.gather)
        self._journal.result(self.step, self.digest, self.metrics)
        self._journal.close()
        self.session.show(Phase.FINISHED)
        self.session.change(lambda s: s.finished(self.digest))
        if self.checkpoints is not None:
            self.checkpoints.end(self.step, self._first)
        self.session.close()
        self._end()

    # --- inside a step ---------------------------------------------------------------------------------------

    def shards(self) -> Iterator[int]:
        """Yield every shard that this group has to compute, exchange, update, commit. See Step.shards."""
        if not self._started:
            yield from self._rehearse()
        while True:
            action = self.session.advance(self._transfer)
            if not self._is_work(action):
                self.void = True
                return
            if not self._reconcile():
                continue
            match action:
                case core.Compute():
                    yield from self._compute(action)
                case core.Exchange():
                    self._collect()
                    self.session.show(Phase.EXCHANGING)
                    if (buckets := self._reduce(action)) is not None:
                        self._commit(buckets)
                        return

    def _rehearse(self) -> Iterator[int]:
        """Compile: with a shard that does not count, and an update of a copy of the state. Then join the job."""
        self.dry, self.shard, self._late = True, 0, None
        yield 0
        if self._late is None:
            raise self._not_added(0)
        self._sums = Sums(self._programs.spread.places, self.settings.shards, self.settings.merges, self.state.device)
        self._collect()
        buckets = [self._sums.parts(bucket)[0] for bucket in range(len(self._sums.layout.buckets))]
        with self._told("while it tried a step"):
            self._programs.try_out(self._sums.layout, buckets)
        self._sums.begin_step()
        self._records.clear()
        self._raw.clear()
        self.dry, self.shard = False, None
        self._begin()
        self._started = True

    def _compute(self, action: core.Compute) -> Iterator[int]:
        began = time.perf_counter()
        self.session.show(Phase.COMPUTING, action.shard)
        self.shard = action.shard
        yield action.shard
        if self.shard is not None:
            raise self._not_added(action.shard)
        if self.session.page is not None:
            self.session.page.beat()
        self.session.stepper.shard_done(action.shard)
        self._computed += 1
        self._mean_seconds = smoothed(self._mean_seconds, time.perf_counter() - began)

    def _not_added(self, shard: int) -> UsageError:
        return UsageError(
            f"{self.settings.where}, step {self.step}, shard {shard}: the body of step.shards() must give each shard's "
            "gradients, by step.grad(function, batch) or step.add(gradients, metrics)"
        )

    def key(self, shard: int) -> Array:
        return self._fold(self._root, self.step, shard)

    def grad(self, function: Gradient, batch: Any) -> Any:
        """See Step.grad."""
        if self.shard is None:
            raise UsageError(f"{self.settings.where}: step.grad must be called in the body of step.shards()")
        if self.session.world.size > 1:
            # Never two programs at a time that wait for other processes: each needs a thread of XLA's for each device,
            # and with all of them waiting in one program here and in another there, nobody gets on (seen).
            self._collect()
        with self._told(f"step {self.step}, shard {self.shard}"):
            gradients, metrics = self._programs.gradient(function, batch, self.key(self.shard), self.dry)
        self.add(gradients, {} if metrics is None else metrics)
        return metrics

    def add(self, gradients: Any, metrics: Mapping[str, Any]) -> None:
        """See Step.add."""
        where = f"{self.settings.where}, step {self.step}"
        if self.shard is None:
            raise UsageError(f"{where}: gradients of a shard are given once, in the body of step.shards()")
        if not isinstance(metrics, Mapping):
            raise UsageError(f"{where}: metrics are a dict of scalars, not {type(metrics).__name__}")
        if odd := [name for name in metrics if not isinstance(name, str)]:
            raise UsageError(f"{where}: the names of metrics are strings, not {odd[0]!r}")
        names = tuple(sorted(metrics))
        if self._names is None and len(names) > METRICS:
            raise UsageError(f"{where}: at most {METRICS} metrics can be recorded, not {len(names)}")
        self._names = names if self._names is None else self._names
        if names != self._names:
            raise UsageError(f"{where}: the metrics {[*names]} of shard {self.shard} were {[*self._names]} before")
        with self._told(f"step {self.step}, shard {self.shard}"):
            leaves = self._programs.leaves(gradients)
        self._collect()  # of the shard before, while this one is computed
        self._late = (self.shard, leaves)
        self._raw[self.shard], self._records[self.shard] = dict(metrics), ShardRecord(self.shard, b"")
        self.shard = None

    def _collect(self) -> None:
        """Put what was computed into the sums; waits for it."""
        if self._late is None:
            return
        (shard, leaves), self._late = self._late, None
        with self._told(f"step {self.step}, shard {shard}"):
            refuse_deleted(leaves)
            jax.block_until_ready(leaves)
        self._sums.add(shard, leaves)

    def _told(self, when: str) -> _Told:
        return _Told(f"{self.settings.where}, {when}")

    def _reconcile(self) -> bool:
        """Hold exactly the shards that the roll call counted for this member. False if fewer are left: then there is
        something else to do."""
        now = (self._taken, self.step)
        if self._sums_of != now:
            # Every member of the quorum in force has left older communicators, so nobody reads the old buffers.
            self._late = None
            self._sums.begin_step()
            self._records.clear()
            self._raw.clear()
            self._sums_of = now
        late = frozenset() if self._late is None else frozenset([self._late[0]])
        counted = frozenset(self.session.stepper.have)
        if self._sums.have | late != counted:
            self._collect()
            held = self._sums.keep(counted)
            self._records = {shard: record for shard, record in self._records.items() if shard in held}
            self.session.stepper.have &= held
            return held == counted
        return True

    # --- the exchange ----------------------------------------------------------------------------------------

    def _reduce(self, work: core.Exchange) -> list[torch.Tensor] | None:
        """The mean gradient of all shards, in flat buckets; None if something came between."""
        found: list[tuple[Exchanged, list[torch.Tensor]]] = []
        ok = self.session.attempt(work.quorum, "exchange", lambda: found.append(self._exchange_all(work)))
        told, buckets = found[0] if ok else (Exchanged([], [], {}), [])
        named = self._named if ok and all(word.planned == self._named for word in told.words) else NO_QUORUM
        alike = len({word.checksum for word in told.words}) <= 1
        note = Note(ok=ok, finite=told.finite, seconds=self._mean_seconds, metrics=told.means, named=named)
        outcome = self.session.agree(replace(note, alike=alike))
        if not (outcome.ok and outcome.alike):
            self._sums.freeze()
            if outcome.ok:
                self.session.stepper.recount()
            return None
        if not outcome.finite:
            stop_on_nonfinite(told.records, self._sums, self.session, work)
        self._present, self.groups, self.metrics = len(told.records), self._partners, outcome.metrics
        self.seconds_per_shard = outcome.seconds
        self.session.stepper.exchanged(work.quorum, told.words)
        self._gauges.exchanged(work.quorum, self._partners, told.words, self._mean_seconds)
        return buckets

    def _exchange_all(self, work: core.Exchange) -> tuple[Exchanged, list[torch.Tensor]]:
        communicator = self.session.communicator(work.quorum)
        # Now, for once the exchange is complete its communicator may be gone at any moment, and the step counts still.
        self._partners = tuple(member.group for member in communicator.quorum.members)
        if self._exchange is None or self._exchange[0] != work.quorum:
            self._exchange = (work.quorum, TreeExchange(communicator, self._sums.layout))
        exchange, settings = self._exchange[1], self.settings
        size = tail_bytes(0, METRICS, max(map(len, work.owned), default=0))
        exchange.begin(
            work.nodes(settings.shards, settings.merges),
            settings.shards,
            divisor=work.present,
            reduction=settings.reduction,
            tail_bytes=size,
            noise=key_of(settings.seed, work.step),
        )
        exchange.check(self._sums.nodes)
        for bucket in range(len(self._sums.layout.buckets)):
            exchange.submit(bucket, self._sums.parts(bucket))
        self._named = self.session.ready_for()
        word = self.session.stepper.word(self.seconds_per_shard, self._named, self.session.checks.word(work.step))
        exchange.submit_tail(encode_tail(word, self._complete_records(), size))
        result = exchange.finish(lambda: self.session.stopped_waiting(work.quorum))
        words, records, _ = open_tails(result.tails, work.step, work.owned, settings.where)
        means = dict(zip(self.names, mean_metrics(records), strict=False))
        return Exchanged(words, records, means, result.finite), result.buckets

    def _complete_records(self) -> list[ShardRecord]:
        """The records of all shards held, with their metrics as numbers."""
        for shard, raw in self._raw.items():
            if shard in self._records:
                where = f"{self.settings.where}, step {self.step}, shard {shard}"
                metrics = tuple(_number(name, raw[name], where) for name in self.names)
                self._records[shard] = replace(self._records[shard], metrics=metrics)
        self._raw.clear()
        return [self._records[shard] for shard in sorted(self._sums.have)]

    def _commit(self, buckets: list[torch.Tensor]) -> None:
        """The step is safe: only now may the old state go."""
        self.session.show(Phase.APPLYING)
        step, target = self.step, self.session.stepper.target
        with self._told(f"step {step}, update"):
            self._programs.apply(self._sums.layout, buckets)
        self.session.change(lambda s: s.applied())
        if self.checkpoints is not None:
            self.checkpoints.committed(self.step, self._first)
        self._gauges.committed(step + 1, target.id if target else NO_QUORUM, self.metrics, self._computed)
        self._journal.commit(step, self._present, self.metrics)

    # --- healing ---------------------------------------------------------------------------------------------

    def _transfer(self, order: core.Heal, communicator: Communicator) -> Callable[[], bool]:
        """Give the state to members that need it, or take it; returns what puts it in place, and tells whether it is
        what it was when the roll was called."""
        if not order.receive:
            self._journal.flush()  # who heals cannot write these lines, should this group be lost next
            if communicator.rank in order.sources:
                header, tensors = self.state.capture({"metrics": self.metrics})
                healing.serve(communicator, tensors, header, order.sources, order.healers)
                settle(self.state.device)
            return lambda: True
        self.session.say_why(order, communicator.rank)
        pending = healing.receive(communicator, order.sources, order.healers)
        healed = pending.wait(lambda: self.session.stopped_waiting(order.quorum))

        def put() -> bool:
            facts = self.state.restore(healed.manifest, healed.tensors)
            self.metrics = {str(name): float(value) for name, value in facts["metrics"].items()}
            self._taken += 1
            return self.session.checks.bears_out(order.checksum)

        return put


class _Told:
    """Says in which shard it was: what a program raises may come out where somebody waits for its results."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UsageError):
            raise UsageError(f"{self._where}: {error}") from None
        if isinstance(error, Exception) and not isinstance(error, CommunicatorError):
            error.add_note(f"{self._where}: in the script's program")


def _number(name: str, value: Any, where: str) -> float:
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    shape = f" of shape {list(value.shape)}" if isinstance(value, Array | np.ndarray) else ""
    raise UsageError(f"{where}: the metric {name} is no number that can be averaged, but {said(value)}{shape}")
