"""What a rank says of its state and of its shards' gradients, and what it finds when others say something else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from planaria.core.messages import QuorumId, Standing
from planaria.errors import UsageError
from planaria.rank.promise import SAMPLES
from planaria.rank.settings import read_settings
from planaria.rank.statechecks import StateChecks
from planaria.torch.job import init
from planaria.torch.state import ProtectedState
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
    assert receiver.bears_out(0)  # of a founding quorum nobody has signed
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
    assert members[0].found == {1: "model.1.weight, optimizer.state[model.0.bias].exp_avg_sq"}
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
