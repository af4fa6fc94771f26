"""What a rank says of its state and of its shards' gradients, and what it finds when others say something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from planaria.core.messages import Corrupted, Member, Quorum, QuorumId, Standing
from planaria.errors import CorruptionError, UsageError
from planaria.rank.promise import SAMPLES
from planaria.rank.records import ShardRecord
from planaria.rank.session import Session
from planaria.rank.settings import read_settings
from planaria.rank.statechecks import Finding, StateChecks
from planaria.torch.data import ShardedDataset
from planaria.torch.job import init
from planaria.torch.low_comm import DiLoCo, LowCommunication, StreamingDiLoCo
from planaria.torch.low_comm_settings import of_low_communication
from planaria.torch.rechecks import STRIKES, Rechecks
from planaria.torch.state import ProtectedState
from planaria.torch.worker import Worker
from tests.torch.test_gradients import backward, net, same_bits, store_of


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, ProtectedState]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, optimizer, ProtectedState(model=model, optimizer=optimizer)


def checks(state: ProtectedState, directory: Path | None = None, every: int = 4) -> StateChecks:
    return StateChecks(every, state, lambda payload: [payload], directory)


def flip(tensor: torch.Tensor) -> None:
    data = tensor.detach().view(-1).view(torch.uint8)
    data[3] ^= 4


def test_parameters_count_in_every_step_and_the_rest_now_and_then() -> None:
    model, optimizer, state = trained()
    one, other = checks(state), checks(trained()[2])
    assert [one.word(step) for step in range(6)] == [other.word(step) for step in range(6)]
    flip(optimizer.state[model[0].weight]["exp_avg"])
    assert [one.word(step) == other.word(step) for step in range(5)] == [False, True, True, True, False]
    flip(model[1].bias)
    assert not any(one.word(step) == other.word(step) for step in range(5))
    assert checks(state, every=0).word(3) == 0


def test_a_state_that_changed_between_the_roll_call_and_the_healing_is_refused() -> None:
    model, optimizer, state = trained()
    source, (_, _, other) = checks(state), trained(seed=1)
    receiver, agreed = checks(other), source.signed(Standing(4, True)).checksum
    other.restore(*state.capture())
    assert receiver.bears_out(agreed)
    assert receiver.bears_out(0)  # who begins with what its script made has not signed it
    flip(optimizer.state[model[0].weight]["exp_avg"])
    other.restore(*state.capture())
    assert not receiver.bears_out(agreed)
    assert checks(other, every=0).bears_out(agreed)


def test_the_tensors_that_differ_are_found_and_kept_as_evidence(tmp_path: Path) -> None:
    """Three members' sums of tensors, as the roll call has them."""
    states = [trained()[2] for _ in range(3)]
    flip(states[1].checked(whole=True)["optimizer.state[model.0.bias].exp_avg_sq"])
    flip(states[1].checked(whole=True)["model.1.weight"])
    members = [checks(state, tmp_path / str(rank)) for rank, state in enumerate(states)]
    standing = Standing(4, True, under=QuorumId(1, 1))
    signed = [each.signed(standing) for each in members]
    assert signed[0] == signed[2] != signed[1] and signed[0].checksum

    def told(payload: bytes) -> list[bytes]:
        sums = [json.dumps(all_sums(state)).encode() for state in states]
        assert payload == sums[0]
        return sums

    (tmp_path / "0").mkdir()
    members[0].look(signed, told)
    members[0].conclude(4)
    what = "model.1.weight, optimizer.state[model.0.bias].exp_avg_sq"
    assert members[0].found == {1: Finding(what, rank=0)}
    facts = json.loads((tmp_path / "0" / "corruption.json").read_text())
    sums = facts["ranks"]["0"]["model.1.weight"]
    assert facts["step"] == 4 and sums["0"] == sums["2"] != sums["1"]
    # Nothing to find where all are alike, or where those that differ are behind or do not count.
    behind = replace(signed[1], step=3)
    for third in (signed[0], behind, replace(signed[1], settled=False)):
        members[0].signed(standing)
        members[0].look([signed[0], third, signed[2]], lambda payload: pytest.fail("nobody need be asked"))
        members[0].conclude(4)
        assert not members[0].found


@pytest.mark.parametrize(
    ("wrong", "finding"),
    [
        ({1}, Finding("rank 1: model.1.weight", 1)),
        ({0, 1}, Finding("rank 0: model.1.weight; rank 1: model.1.weight", -1)),
    ],
)
def test_of_several_ranks_the_one_whose_state_it_is_is_named(wrong: set[int], finding: Finding) -> None:
    """Member 1 of three, of two ranks each: what each rank finds in its own part is put together."""
    states = [trained()[2] for _ in range(3)]
    sums = [json.dumps(all_sums(state)).encode() for state in states]
    flip(states[1].checked(whole=True)["model.1.weight"])
    damaged = [sums[0], json.dumps(all_sums(states[1])).encode(), sums[2]]
    standings = [Standing(4, True, checksum=5 + (member == 1)) for member in range(3)]
    said: list[bytes] = []

    def ranks(payload: bytes) -> list[bytes]:
        said.append(payload)
        return [*said] if len(said) == 2 else [payload, payload]

    for rank in range(2):
        each, heard = StateChecks(4, states[0], ranks, None), damaged if rank in wrong else sums
        each.look(standings, lambda _, heard=heard: heard)  # type: ignore[misc]
        each.conclude(4)
    assert each.found == {1: finding}


def all_sums(state: ProtectedState) -> list[int]:
    from planaria.exchange.checksum import lane_sums

    return lane_sums([*state.checked(whole=True).values()])


def test_a_shard_has_the_same_checksum_whoever_computes_it_and_when() -> None:
    alone, among = net(), net()
    one, other = store_of(alone, 4), store_of(among, 4)
    plain = store_of(third := net(), 4)
    for store in (one, other, plain):
        store.begin_step()
    one.begin_shard(1, summed=True, apart=True)
    backward(alone, 1)
    one.end_shard()
    assert one.have == frozenset() and one.nodes == ()
    for shard in (0, 1, 2):
        other.begin_shard(shard, summed=shard == 1)  # after its sibling, to which it would have been added at once
        backward(among, shard)
        other.end_shard()
        if shard == 1:
            assert other.checksum().tolist() == one.checksum().tolist()
        plain.begin_shard(shard)
        backward(third, shard)
        plain.end_shard()
    for bucket in range(len(plain.bucket_numels)):
        assert same_bits(other.parts(bucket), plain.parts(bucket))  # to be watched changes nothing
    right = one.checksum().tolist()
    weight = next(alone.parameters())
    weight.register_hook(lambda grad: flipped(grad))
    one.begin_shard(1, summed=True)
    backward(alone, 1)
    one.end_shard()
    assert one.have == {1} and one.checksum().tolist() != right


def flipped(grad: torch.Tensor) -> torch.Tensor:
    copy = grad.clone()
    flip(copy)
    return copy


@pytest.mark.parametrize(
    ("name", "value"), [("PLANARIA_RECHECK", "1.5"), ("PLANARIA_RECHECK", "often"), ("PLANARIA_CHECK_STATE", "-1")]
)
def test_what_is_no_share_and_no_number(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name.removeprefix("PLANARIA_").lower()):
        read_settings(None, 0, None, None, {name: value})


def test_recheck_needs_bits() -> None:
    with pytest.raises(UsageError, match="recheck compares bits"):
        init(exact=SAMPLES, recheck=0.5, device="cpu")


# --- who computes wrongly ---------------------------------------------------------------------------------------


class Quorum3:
    """What ``Rechecks`` sees of a session: group 0 of three, of ``size`` ranks each."""

    member = Member(0, 0)

    def __init__(self, size: int = 1) -> None:
        self.told: list[str] = []
        self.ranks: list[int] = []  # named
        self.disputed: list[frozenset[int]] = []
        members = tuple(Member(group, 0) for group in range(3))
        target = Quorum(QuorumId(1, 1), members, ("",) * 3, True, "")
        self.named: list[bool] = []
        self.stepper = SimpleNamespace(target=target, step=7, dispute=self._dispute)
        self.world = SimpleNamespace(rank=0, size=size)
        self.settings = SimpleNamespace(where="job train, group 0")

    def _dispute(self, shards: frozenset[int], named: bool) -> None:
        self.disputed.append(shards)
        self.named.append(named)

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload]

    def tell(self, report: Corrupted) -> None:
        self.told.append(report.text)
        self.ranks.append(report.rank)


def compared(rechecks: Rechecks, said: dict[int, int], shard: int = 0) -> frozenset[int]:
    """The shard was computed by two members of the quorum, the first of which holds it, to these sums."""
    (owner, mine), (checker, other) = said.items()
    owned = [frozenset({shard}) if rank == owner else frozenset() for rank in range(3)]
    opinions = [{shard: other} if rank == checker else {} for rank in range(3)]
    return rechecks.compare(owned, [ShardRecord(shard, b"", checksum=mine)], opinions)


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, -1)])
def test_who_computed_a_shard_once_is_not_stubborn_and_who_did_so_twice_is(size: int, rank: int) -> None:
    session = Quorum3(size)
    rechecks = Rechecks(cast(Session, session))
    assert compared(rechecks, {0: 5, 1: 6}) == {0}
    rechecks.dispute(frozenset({0}))
    assert compared(rechecks, {1: 6, 2: 6}) == frozenset()
    rechecks.dispute(frozenset({0}))  # another rank of the group is in doubt: this one computed it once, wrongly
    assert session.disputed == [{0}, {0}] and not session.told
    rechecks.clear()
    assert compared(rechecks, {0: 5, 1: 6}) == {0}
    rechecks.dispute(frozenset({0}))
    assert compared(rechecks, {0: 5, 2: 6}) == {0}
    with pytest.raises(CorruptionError, match="again and again"):
        rechecks.dispute(frozenset({0}))
    assert session.told == ["its gradients are not those that others agree on (shards [0], twice)"]
    assert session.ranks == [rank]  # of several, which make gradients together, it may have been any


@pytest.mark.parametrize("culprit", [0, 1])
def test_who_is_there_whenever_a_step_is_in_dispute_leaves_and_the_job_goes_on(culprit: int) -> None:
    """It computes wrongly now and then, and each time another shard: no shard shows it."""
    session = Quorum3()
    rechecks = Rechecks(cast(Session, session))
    others = [member for member in range(3) if member != culprit]
    for shard, other in enumerate((others[0], others[1])):
        assert compared(rechecks, {culprit: 5 + shard, other: 9}, shard) == {shard}
        rechecks.dispute(frozenset({shard}))
    assert session.named == [False, False]
    assert compared(rechecks, {others[0]: 9, culprit: 7}, 2) == {2}
    if culprit == 0:  # this one
        with pytest.raises(CorruptionError, match="again and again"):
            rechecks.dispute(frozenset({2}))
        assert session.told
    else:
        rechecks.dispute(frozenset({2}))
        assert session.named == [False, False, True] and not session.told


def test_of_two_nobody_can_tell_who_is_there_too_often() -> None:
    session = Quorum3()
    rechecks = Rechecks(cast(Session, session))
    for shard in range(4):
        compared(rechecks, {1: 5 + shard, 2: 9}, shard)
        rechecks.dispute(frozenset({shard}))
    assert session.named == [False] * 4 and not session.told


def test_what_came_out_of_states_that_differ_does_not_count() -> None:
    """Nor does what was said in an exchange that was broken off: nobody was told that it was in dispute."""
    session = Quorum3()
    rechecks = Rechecks(cast(Session, session))
    assert compared(rechecks, {0: 6, 1: 5}) == {0}  # that one's state is found to be wrong, and heals
    assert compared(rechecks, {0: 8, 2: 5}) == {0}  # one flipped bit here: it may compute the shard again
    rechecks.dispute(frozenset({0}))
    assert session.disputed == [{0}] and not session.told


def test_a_step_in_which_it_was_right_ends_a_row_and_one_in_which_nobody_looked_does_not() -> None:
    rechecks = Rechecks(cast(Session, Quorum3()))

    def is_wrong() -> None:
        rechecks.clear()
        compared(rechecks, {0: 5, 1: 6})
        rechecks.dispute(frozenset({0}))
        compared(rechecks, {1: 6, 2: 6})
        rechecks.settle()

    def comes_out_alike(*members: int) -> None:
        rechecks.clear()
        compared(rechecks, dict.fromkeys(members, 6))
        rechecks.settle()

    for _ in range(STRIKES - 1):
        is_wrong()
    comes_out_alike(0, 1)
    for _ in range(STRIKES - 1):
        is_wrong()
    comes_out_alike(1, 2)  # the others
    with pytest.raises(CorruptionError, match="again and again"):
        is_wrong()


# --- shards that are computed again -----------------------------------------------------------------------------


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_shard_in_dispute_is_computed_again_with_what_was_added_to_it(
    forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the sums that travel are of the shards that were agreed on, whatever the stepper takes to be held."""

    def run() -> tuple[list[torch.Tensor], list[int]]:
        job = init(shards=4, seed=1, device="cpu")
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.AdamW(model.parameters())
        job.protect(model=model, optimizer=optimizer)
        data = ShardedDataset(list(torch.randn(32, 4)), batch_size=2)
        counts = []
        for step in job.steps(3):
            counts.append(0)
            for batch in step.batches(data):
                counts[-1] += 1
                model(batch).square().sum().backward()
            optimizer.step()
        return [each.detach() for each in model.parameters()], counts

    end, disputed = Worker._end_shard, []

    def and_dispute(worker: Worker, record: ShardRecord, *more: Any) -> None:
        end(worker, record, *more)
        stepper = worker.session.stepper
        if stepper.step == 1 and len(stepper.have) == 4 and not disputed:  # all are held, as one sum
            disputed.append(0)
            if forgotten:
                stepper.have -= {0}
            else:
                stepper.dispute(frozenset({0}))

    right, counts = run()
    monkeypatch.setattr(Worker, "_end_shard", and_dispute)
    found, more = run()
    assert (counts, more) == ([4, 4, 4], [4, 8, 4])
    assert all(map(torch.equal, right, found))


@pytest.mark.parametrize("streaming", [False, True])
def test_of_low_communication_what_groups_share_is_compared(streaming: bool) -> None:
    def group() -> tuple[nn.Module, ProtectedState]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        inner = torch.optim.AdamW(model.parameters())
        sync: LowCommunication = DiLoCo(model, inner, every=2)
        if streaming:
            sync = StreamingDiLoCo(model, inner, every=4, fragments=2)
        return model, ProtectedState(sync=sync)

    def round(group: tuple[nn.Module, ProtectedState], fragment: int, data: float) -> None:
        """Of inner steps with the group's own data, and a sync with what all have made."""
        model, state = group
        assert state.sync is not None
        model(torch.full((2, 5), data)).sum().backward()
        state.sync.sync.inner[0].step()
        shared = state.sync.shared_of(fragment)
        state.sync.put(fragment, [torch.full_like(parameter, 0.1) for _, parameter in shared], 1.0)
        state.sync.outer_step(fragment, 1.0, keeps=True)

    mine, other = group(), group()
    state = mine[1]
    one, two = checks(state), checks(other[1])
    for fragment in (0, 1, 0) if streaming else (0, 0):
        round(mine, fragment, 1.0)
        round(other, fragment, 2.0)
        assert [one.word(step) for step in range(5)] == [two.word(step) for step in range(5)]
    flip(next(mine[0].parameters()))  # its own
    assert one.word(0) == two.word(0)
    (momentum, *_) = [t for name, t in state.checked(whole=True).items() if "momentum" in name]
    flip(momentum)
    assert [one.word(step) == two.word(step) for step in range(5)] == [False, True, True, True, False]
    assert state.sync is not None
    flip(state.sync.shared_of(0)[0][1])
    assert not any(one.word(step) == two.word(step) for step in range(5))


def test_of_low_communication_a_shard_is_computed_twice_only_where_another_group_can() -> None:
    def settings_of(exact: bool, **more: Any) -> None:
        model = nn.Linear(2, 2)
        state = ProtectedState(sync=DiLoCo(model, torch.optim.SGD(model.parameters()), every=2, exact=exact))
        assert state.sync is not None
        of_low_communication(read_settings(1, 0, None, None, environ={}, **more), state.sync, {})

    settings_of(False, check_state=1)
    settings_of(True, check_state=1, recheck=0.5)
    with pytest.raises(UsageError, match="recheck needs exact=True of DiLoCo"):
        settings_of(False, check_state=1, recheck=0.5)
