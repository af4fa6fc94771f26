"""Lines of metrics: every one there once, whoever wrote it and whatever happened to who wrote before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.train.metrics import Recorder


class Groups:
    """Groups that come and go between steps, each with a recorder on one file. Who joins takes the state of another."""

    def __init__(self, path: Path, count: int) -> None:
        self.path = path
        self.living: dict[int, Recorder] = {group: self.start() for group in range(count)}

    def start(self) -> Recorder:
        return Recorder(self.path, None, 100)

    def step(self, step: int, dying: set[int] = frozenset()) -> None:
        """All living groups compute ``step``; those that die do so after its exchange, before they write."""
        first = min(self.living)
        for group, recorder in self.living.items():
            if group not in dying:
                recorder.computed(step, leads=group == first)
                recorder.line({"step": step, "loss": step / 2}, {"tokens_per_second": 1.0})
        for group in dying:
            del self.living[group]

    def join(self, group: int) -> None:
        healed = self.start()
        healed.state.clear()
        healed.state.update(json.loads(json.dumps(next(iter(self.living.values())).state)))
        self.living[group] = healed


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(row) for row in path.read_text().splitlines()]


@given(data=st.data())
def test_every_line_is_there_once_whoever_dies(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    groups = Groups(tmp_path_factory.mktemp("metrics") / "metrics.jsonl", 3)
    steps = data.draw(st.integers(1, 8))
    for step in range(steps):
        dying = data.draw(st.sets(st.sampled_from(sorted(groups.living)), max_size=len(groups.living) - 1))
        groups.step(step, dying if step < steps - 1 else set())
        for group in data.draw(st.sets(st.sampled_from(range(3)))) - groups.living.keys():
            groups.join(group)
    assert [(line["step"], line["loss"]) for line in lines(groups.path)] == [(s, s / 2) for s in range(steps)]


def test_steps_that_are_done_again_are_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"ste')
    recorder = Recorder(path, None, 10)
    recorder.state["lines"] = [{"step": 0}]
    recorder.computed(1, leads=True)
    recorder.line({"step": 1, "loss": 2.0}, {})
    assert lines(path) == [{"step": 0}, {"step": 1, "loss": 2.0}]


def test_a_group_that_hung_cannot_spoil_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    hung, other = Recorder(path, None, 10), Recorder(path, None, 10)
    for recorder in (hung, other):
        recorder.computed(0, leads=recorder is hung)
        recorder.line({"step": 0}, {})
    other.computed(1, leads=True)
    other.line({"step": 1}, {})
    hung.computed(1, leads=True)  # it wakes up in the middle of the step that the others did without it
    hung.line({"step": 1}, {})
    assert lines(path) == [{"step": 0}, {"step": 1}]


def test_a_full_disk_ends_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file" / "metrics.jsonl"
    (tmp_path / "file").touch()  # in the way of the directory
    recorder = Recorder(path, None, 10)
    recorder.computed(0, leads=True)
    recorder.line({"step": 0, "loss": 1.0}, {})
    assert "cannot write metrics to" in capsys.readouterr().err
    (tmp_path / "file").unlink()
    recorder.line({"step": 1, "loss": 1.0}, {})
    assert [line["step"] for line in lines(path)] == [0, 1]
