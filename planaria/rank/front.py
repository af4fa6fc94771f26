"""What a front brings: the ranks of its group, and a state that can be compared with that of other groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from planaria.core.messages import Standing
from planaria.core.tree import Node
from planaria.exchange.waiting import Bell
from planaria.rank.rounds import Note


class World(Protocol):
    """The ranks of this group, as the session needs them. ``planaria.torch.world.GroupWorld`` says more."""

    rank: int
    size: int
    idle: bool  # this process takes the place of a rank that was lost, and has not met the others yet
    renewable: bool  # whether lost ranks can be replaced under the others

    @property
    def shape(self) -> Mapping[str, int]:
        """Of the mesh of the group's ranks, by dimension."""

    @property
    def part(self) -> tuple[int, int]:
        """(index, count): which part of every shard's samples this rank takes."""

    def round(self, note: Note) -> list[Note]:
        """Everybody's note, by rank. Raises RuntimeError if a rank of the group is lost."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Everybody's payload, by rank; lengths may differ. Raises RuntimeError if a rank of the group is lost."""

    def cut(self) -> None:
        """End all connections to the other ranks of the group. Any thread, never blocks."""

    def renew(self, port: int, name: str, bell: Bell, cancelled: Callable[[], bool]) -> None:
        """Connect to the ranks of the group again, among which is a new one."""

    def await_devices(self, cancelled: Callable[[], bool] = ...) -> None:
        """Wait for what ``renew`` has left to do. Raises Interrupted or CommunicatorError."""

    def collectives(self) -> int:
        """How many this rank has begun with the others of its group; 0 if they do not all begin the same ones."""


class Comparable(Protocol):
    """A state that all groups hold alike."""

    @property
    def device(self) -> torch.device:
        """Where gradients are exchanged."""

    def checked(self, whole: bool) -> dict[str, Tensor]:
        """The tensors that must have the same bits on all groups, by name; ``whole``: what optimizers keep as well."""


class Follower(Protocol):
    """Low communication: what can be made of an older state, and told of the way from there to this one."""

    def told(self, standing: Standing) -> Standing:
        """With what the roll call must know of that."""


class Sums(Protocol):
    """The gradients of the shards that a rank has computed for a step, as sums of subtrees."""

    shards: int  # of the job

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The subtrees whose sums are held, ascending."""

    @property
    def bucket_numels(self) -> Sequence[int]:
        """Elements of every bucket."""

    def parts(self, bucket: int) -> list[Tensor]:
        """The sums of a bucket, in the order of ``nodes``: flat, fp32."""
