"""Who comes back to a low-communication job takes the syncs that it missed, not the whole shared state.

Every member keeps what was exchanged in the last syncs, in as few bytes as it travelled in, and copies of its shared
state in memory that outlives its process (kept.py). One that comes back, or was left out for a while, says in the roll
call which state it has. If members have all syncs since (core/catching_up.py), it is given those, and everything of
the state that syncs do not make (rates, schedulers, buffers, the script's own data, the record of who took part). It
steps the outer optimizer with each, as the others did, and has the same bits. A checksum says so; if it does not match,
what was made counts for nothing, and the whole state is taken.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash
from torch import Tensor

from planaria.core.actions import Heal
from planaria.core.catching_up import HISTORY, alike
from planaria.core.messages import CODED, NO_QUORUM, QuorumId, Standing
from planaria.errors import ProtocolError, UsageError
from planaria.rank.session import Session
from planaria.torch import plain
from planaria.torch.buddies import Key
from planaria.torch.kept import Kept, age, read_paths
from planaria.torch.parts import feed, spec_of, wire_form
from planaria.torch.state import VERSION, ProtectedState, tensor_specs
from planaria.torch.sync_part import SyncPart


@dataclass(frozen=True, slots=True)
class Missed:
    """One sync: what it made of the state of ``base`` depends on nothing else."""

    base: Key
    fragment: int  # of the parameters
    total: float  # weight of what was summed
    options: Any  # of the outer optimizer, packed
    outcome: list[Tensor]  # the sums, by bucket: see exchange.tree_exchange.decoded


class CatchUp:
    """One per rank, on its training thread. All ranks of a group call its methods together, but for ``wait``.
    ``again`` makes of the shared state what a sync made of it."""

    def __init__(
        self, session: Session, state: ProtectedState, sync: SyncPart, again: Callable[[Missed], None]
    ) -> None:
        self._session = session
        self._state = state
        self._sync = sync
        self._again = again
        self._log: deque[Missed] = deque()  # of neighbours, of which the last made what is there now
        self._pending: Missed | None = None
        self._here: Key | None = None  # the shared state that is there now; None: none that a commit made
        self._copied: Key | None = None  # of which all ranks of the group have a copy
        self._thread: threading.Thread | None = None
        self._kept = self._open()

    def _open(self) -> Kept | None:
        settings = self._session.settings
        place = f"{settings.job} {settings.born.group} {settings.rank} {settings.world_size} {settings.seed}"
        whose = f"{place} {self._sync.method} {self._state.describe()}"
        try:
            paths = read_paths()
            return Kept(paths, whose.encode()) if paths else None
        except OSError as error:
            self._say(f"its node keeps no copies of the shared state ({error}); who comes back takes all of it")
            return None

    def meet(self) -> None:
        """The ranks of the group are all there, and some may be new: what have all of them?"""
        self.wait()
        mine = {*(self._kept.whole() if self._kept is not None else ()), *([self._here] if self._here else [])}
        common = set.intersection(*map(set, self._everybodys([*mine])))
        self._copied = max(common, key=age, default=None)
        self._log.clear()
        self._pending = None
        if self._here != self._copied:
            self._here = None

    def told(self, standing: Standing) -> Standing:
        """With what this group can follow from, and lead from: what all its ranks can, for all must conclude the same
        from a roll call. Raises what ``gather`` raises."""
        own = [self._here or self._copied or (0, NO_QUORUM)]
        if self._here == (standing.step, standing.under):
            own += [each.base for each in reversed(self._log)]
        base, *leads = alike(self._everybodys(own)) or [(0, NO_QUORUM)]
        return replace(standing, base=base, history=tuple(under for _, under in leads))

    def _everybodys(self, mine: Sequence[Key]) -> list[list[Key]]:
        """What each rank of the group says."""
        told = json.dumps([[step, under.epoch, under.number] for step, under in mine]).encode()
        each = (json.loads(said) for said in self._session.gather(told))
        return [[(step, QuorumId(*under)) for step, *under in keys] for keys in each]

    # --- a sync ----------------------------------------------------------------------------------------------

    def begin(self, fragment: int, total: float, outcome: Callable[[], list[Tensor]]) -> None:
        """The outer optimizer is about to step. ``outcome``: copies what was exchanged."""
        self.wait()
        options = self._sync.outer_options()
        self._pending = None
        if self._here is not None and options is not None and self._most():
            self._pending = Missed(self._here, fragment, total, options, outcome())
        self._here = None

    def committed(self, step: int, under: QuorumId) -> None:
        """The step that ``begin`` was about is committed, the last of ``step``, under ``under``."""
        if self._pending is None:
            self._log.clear()
        else:
            self._log.append(self._pending)
        self._pending = None
        while len(self._log) > self._most():
            self._log.popleft()
        self._has((step, under))

    def _most(self) -> int:
        """Syncs that are less than the state: of more nobody has use."""
        fragments, width = len(self._sync.fragments), 1 if self._session.settings.reduction in CODED else 4
        return min(HISTORY, math.ceil(fragments * self._sync.copies * 4 / width) - 1)

    def _has(self, key: Key) -> None:
        """All ranks of the group have this state."""
        self._here, self._copied = key, None
        if self._kept is None or not self._most():  # nobody could lead from it
            return
        tensors: list[Tensor] = []
        body = self._sync.pack_synced(tensors)
        specs, wires = [spec_of(each) for each in tensors], [wire_form(each) for each in tensors]

        def copy() -> None:
            if self._kept is not None and not self._kept.write(key, body, wires, specs):
                self._say("memory has no room for copies of the shared state; who comes back takes all of it")
                self._kept = None

        # Beside the inner steps: nothing but the next outer step, which waits for it, changes what it reads.
        self._thread = threading.Thread(target=copy, name="planaria-kept", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing reads the shared state: it is about to change."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    # --- healing ---------------------------------------------------------------------------------------------

    def lead(self, since: int, marked: bool) -> tuple[bytes, list[Tensor]]:
        """(description, tensors): what somebody needs who has the state of step ``since``. ``marked``: as of
        ProtectedState.capture."""
        manifest, tensors = self._state.capture(marked)
        synced = self._state.synced_places(manifest)
        missed = [each for each in self._log if each.base[0] >= since]
        said = {
            "version": VERSION,
            "objects": [],
            "manifest": manifest.decode("ascii"),
            "digest": _digest([tensors[index] for index in sorted(synced)]),
            "missed": [
                [s.base[0], s.base[1].epoch, s.base[1].number, s.fragment, s.total, s.options, len(s.outcome)]
                for s in missed
            ],
        }
        rest = [each for index, each in enumerate(tensors) if index not in synced]
        specs = [spec_of(each).to_list() for each in (*rest, *(wire for s in missed for wire in s.outcome))]
        return plain.dump({**said, "tensors": specs}), [*rest, *(wire for s in missed for wire in s.outcome)]

    def follow(self, order: Heal, description: bytes, tensors: Sequence[Tensor]) -> tuple[bytes, list[Tensor]] | None:
        """Make of what is here what ``lead`` was called for; ``tensors`` as they were sent. The state's manifest and
        tensors, or None, on all ranks of the group, if what came out is something else at one of them."""
        self.wait()
        base = self._here or self._copied
        copied, self._here, self._copied = self._here is None, None, None
        self._pending = None
        try:
            found = self._followed(order, description, tensors, base, copied)
        except (ProtocolError, UsageError) as error:
            self._say(f"at sync {order.step}: it cannot follow ({error})")
            found = None
        if not all(each == b"1" for each in self._session.gather(b"1" if found is not None else b"0")):
            self._log.clear()
            return None
        return found

    def _followed(
        self, order: Heal, description: bytes, tensors: Sequence[Tensor], base: Key | None, copied: bool
    ) -> tuple[bytes, list[Tensor]] | None:
        said = plain.load(description)
        missed, rest = _opened(said, tensors)
        mine = [each for each in missed if base is not None and each.base[0] >= base[0]]
        whole = base is not None and [each.base[0] for each in mine] == list(range(base[0], order.step))
        if not whole or (mine[0].base if mine else (order.step, order.under)) != base:
            return None
        if copied:
            self._log.clear()
            if not self._take_copy(base):
                return None
        for each in mine:
            self._again(each)
            self._log.append(each)
        manifest = said["manifest"].encode("ascii")
        living: list[Tensor] = []
        own = self._sync.pack(living)
        here = {name: wire_form(living[index]) for index, name in self._sync.synced_places(own).items()}
        places = self._state.synced_places(manifest)
        if len(rest) + len(places) != len(tensor_specs(manifest)) or not here.keys() >= set(places.values()):
            return None
        others = iter(rest)
        count = len(rest) + len(places)
        merged = [here[places[index]] if index in places else next(others) for index in range(count)]
        if _digest([merged[index] for index in sorted(places)]) != said["digest"]:
            return None
        missing = sum(each.nbytes for each in tensors) / 1e6
        self._say(
            f"at sync {order.step}: it had the shared state of sync {order.step - len(mine)}"
            f"{', kept by its node' if copied else ''}, and took the {len(mine)} since ({missing:.1f} MB) in place of "
            f"all of it ({sum(each.nbytes for each in merged) / 1e6:.1f} MB)"
        )
        return manifest, merged

    def _take_copy(self, key: Key) -> bool:
        found = self._kept.read(key) if self._kept is not None else None
        if found is None:
            return False
        try:
            self._sync.apply_synced(*found)
        except (UsageError, ProtocolError, KeyError, TypeError, IndexError):
            return False  # it would take somebody who made the checksums match
        return True

    def lose(self) -> None:
        """The state that is here counts no more, and another is about to be put in its place."""
        self.wait()
        self._here = self._copied = self._pending = None
        self._log.clear()

    def has(self, order: Heal) -> None:
        """The state of a healing is in place."""
        while len(self._log) > self._most():
            self._log.popleft()
        self._has((order.step, order.under))

    def took_all(self, order: Heal, tensors: Sequence[Tensor]) -> None:
        size = sum(each.nbytes for each in tensors) / 1e6
        self._say(f"at sync {order.step}: it took the whole shared state ({size:.1f} MB)")

    def _say(self, sentence: str) -> None:
        """Once for a group."""
        if self._session.world.rank == 0:
            sys.stderr.write(f"{self._session.settings.where}: {sentence}\n")
            sys.stderr.flush()


def _digest(tensors: Sequence[Tensor]) -> str:
    hasher = xxhash.xxh3_128()
    for each in tensors:
        feed(hasher, each)
    return hasher.hexdigest()


def _opened(said: Any, tensors: Sequence[Tensor]) -> tuple[list[Missed], list[Tensor]]:
    """The syncs, and the tensors that no sync makes. Raises ProtocolError."""
    try:
        lines = list(said["missed"])
        good = isinstance(said["manifest"], str) and all(type(total) is float for _, _, _, _, total, _, _ in lines)
        numbers = [(step, *under, fragment, count) for step, *under, fragment, _, _, count in lines]
        if not good or not all(type(each) is int and each >= 0 for line in numbers for each in line):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise ProtocolError("a peer's account of the syncs that were missed is malformed") from None
    at = len(tensors) - sum(count for *_, count in lines)
    if at < 0:
        raise ProtocolError("a peer tells of more of the syncs that were missed than it has sent")
    rest, missed = list(tensors[:at]), []
    for step, epoch, number, fragment, total, options, count in lines:
        missed.append(Missed((step, QuorumId(epoch, number)), fragment, total, options, list(tensors[at : at + count])))
        at += count
    return missed, rest
