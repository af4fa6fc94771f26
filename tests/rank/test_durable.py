"""Directories of checkpoints that several groups write, and clear up, at once."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from planaria.rank import durable
from planaria.rank.durable import MANIFEST, make_held, prune, step_directory, sweep


def at_once(*deeds: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run(deed: Callable[[], None]) -> None:
        try:
            deed()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(deed,)) for deed in deeds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_what_one_group_begins_another_does_not_sweep_away(tmp_path: Path) -> None:
    over = threading.Event()

    def saves(owner: str) -> Callable[[], None]:
        def save() -> None:
            for step in range(300):
                partial = tmp_path / f"step-{step:08}.partial-{owner}"
                held = make_held(partial)
                (partial / "file").write_text("x")
                assert (partial / "file").read_text() == "x"
                partial.rename(tmp_path / f"{owner}-{step}")
                os.close(held)

        return save

    def clears() -> None:
        while not over.is_set():
            sweep(tmp_path)

    sweeper = threading.Thread(target=lambda: at_once(clears, clears))
    sweeper.start()
    try:
        at_once(saves("rg0i0"), saves("rg1i0"))
    finally:
        over.set()
        sweeper.join()
    assert len(list(tmp_path.glob("*/file"))) == 600
    shutil.rmtree(tmp_path)


def test_two_groups_remove_the_same_old_ones(tmp_path: Path) -> None:
    for step in range(1, 200):
        step_directory(tmp_path, step).mkdir()
        (step_directory(tmp_path, step) / MANIFEST).write_text("{}")
        (step_directory(tmp_path, step) / "file").write_text("x")
    at_once(*[lambda: prune(tmp_path, 3)] * 3)
    assert len(os.listdir(tmp_path)) == 3


def test_one_that_stands_still_while_it_sweeps_costs_a_save_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_SWEPT_SECONDS", 0.2)
    path = tmp_path / "step-00000010.partial-rg0i0"
    sweeper = make_held(path)  # as if it had been faster with the lock
    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", lambda *_, **__: None)  # it is there, as if made just now
        with pytest.raises(TimeoutError, match="another process removes it"):
            make_held(path)
    os.close(sweeper)
