"""Where a GPU stands still, from the kernels of its streams."""

from bench.gaps import summary


def test_a_gap_that_comes_once_does_not_pass_for_one_of_every_step() -> None:
    ms, at, kernels = 1_000_000, 0, []
    for step in range(4):
        for name, length, rest in (("backward", 3, 900 if step == 0 else 2), ("adam", 1, 0)):
            kernels.append((name, at, at + length * ms))
            at += (length + rest) * ms
    found = summary({7: kernels, 9: [("nccl", 0, 4 * ms)]}, steps=4)
    assert found["busy"] == 4.0
    assert found["idle"] == 2.0
    assert found["others"] == {"9": 1.0}
    assert found["gaps"] == [{"before": "backward", "after": "adam", "ms": 2.0, "times": 4}]
    assert found["kernels"] == [["backward", 3.0], ["adam", 1.0]]


def test_launching_is_no_gap() -> None:
    assert summary({1: [("a", 0, 1000), ("b", 11_000, 12_000)]}, steps=1)["gaps"] == []
    assert summary({}, steps=1) == {}
