"""A checkpoint gives back what was saved, bit for bit, or says in one sentence why not and changes nothing."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save

from planaria.core.messages import Finished, Saved
from planaria.errors import UsageError
from planaria.rank.durable import MANIFEST, Schedule, make_held, read_schedule
from tests.torch.checkpointing import Thing, names
from tests.torch.pretend_agent import PretendAgent

# Says so for a group of one rank, which is what is meant; in a rank it is not shown.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HOME = Path(__file__).resolve().parents[2]


def refused(thing: Thing, directory: Path, *words: str, **how: Any) -> None:
    """``thing`` cannot start from what is in ``directory``; nothing has changed, neither here nor there."""
    digest, before = thing.state.digest(), snapshot(directory)
    with pytest.raises(UsageError) as caught:
        thing.checkpoints(directory, **how).resume()
    for word in words:
        assert word in str(caught.value)
    assert thing.state.digest() == digest
    assert snapshot(directory) == before


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_everything_comes_back_in_a_script_that_has_not_made_a_step(tmp_path: Path) -> None:
    saved, fresh = Thing(seed=1), Thing(seed=2, steps=0)
    assert saved.checkpoints(tmp_path).save(10) == []
    assert fresh.checkpoints(tmp_path).resume() == 10
    assert fresh.state.digest() == saved.state.digest()
    assert fresh.optimizer.state[fresh.model[0].weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_what_is_saved_is_the_state_of_the_commit_whatever_is_done_to_it_meanwhile(tmp_path: Path) -> None:
    saved, fresh = Thing(seed=1), Thing(seed=2)
    digest = saved.state.digest()
    desk = saved.checkpoints(tmp_path)
    desk.checkpoints.committed(10, True)
    with torch.no_grad():
        for parameter in saved.model.parameters():
            parameter.zero_()
    desk.checkpoints.wait()
    fresh.checkpoints(tmp_path).resume()
    assert fresh.state.digest() == digest


def test_when_it_is_due_and_by_whom(tmp_path: Path) -> None:
    desk = Thing().checkpoints(tmp_path, every=10, keep=9)
    assert desk.resume() == 0
    for step in (9, 10, 20, 999, 1000):
        desk.checkpoints.committed(step, step != 20)
        desk.checkpoints.wait()
    assert names(tmp_path) == ["step-00000010"]
    for step, first in ((10, True), (1000, False), (1000, True), (1000, True)):
        desk.checkpoints.end(step, first)
    assert names(tmp_path) == ["step-00000010", "step-00001000"]
    assert [saved.step for saved in desk.told] == [10, 1000], "what is saved already is not saved again"


def test_only_the_newest_are_kept_and_what_was_left_behind_is_removed(tmp_path: Path) -> None:
    (tmp_path / "step-00000030.partial-rg0i0").mkdir()
    (tmp_path / "step-00000005").mkdir()  # not ours
    (tmp_path / "notes.txt").write_text("mine")
    held = make_held(tmp_path / "step-00000020.partial-rg3i1")  # its writer lives
    desk = Thing().checkpoints(tmp_path, keep=2)
    assert desk.save(10, 20, 30) == []
    os.close(held)
    left = ["notes.txt", "step-00000005", "step-00000020", "step-00000020.partial-rg3i1", "step-00000030"]
    assert names(tmp_path) == left


def test_one_that_is_due_while_the_last_is_being_written_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desk, go_on = Thing().checkpoints(tmp_path), threading.Event()
    desk.checkpoints._tell = lambda saved: (go_on.wait(), None)[1]  # the end of a save that takes long
    desk.checkpoints.committed(10, True)
    desk.checkpoints.committed(20, True)
    go_on.set()
    desk.checkpoints.wait()
    assert "checkpoint of step 20 is left out: that of step 10 is still being written" in capsys.readouterr().err
    desk.checkpoints.committed(30, True)
    desk.checkpoints.wait()
    assert names(tmp_path) == ["step-00000010", "step-00000030"]


def test_tensors_are_in_a_format_that_others_read(tmp_path: Path) -> None:
    thing = Thing()
    thing.checkpoints(tmp_path).save(10)
    data = (tmp_path / "step-00000010" / "rank0.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    entry = header["model.2.weight"]
    assert (entry["dtype"], entry["shape"]) == ("BF16", [2, 20])
    start, end = entry["data_offsets"]
    found = torch.frombuffer(bytearray(body[start:end]), dtype=torch.bfloat16).reshape(2, 20)
    assert torch.equal(found, thing.model[2].weight)
    assert {"optimizer.state[model.0.weight].exp_avg", "ledger.rows[3][0]"} <= header.keys()
    assert max(e["data_offsets"][1] for name, e in header.items() if name != "__metadata__") == len(body)


# --- what cannot be -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Thing(width=7), ["model.0.weight is torch.float32 of shape (7, 2, 3, 3) here but", "(5, 2, 3, 3)"]),
        (lambda: Thing(kind=torch.optim.SGD), ["optimizer is a SGD here but a AdamW there"]),
    ],
)
def test_another_model_or_optimizer(tmp_path: Path, made: Callable[[], Thing], words: list[str]) -> None:
    Thing().checkpoints(tmp_path).save(10)
    refused(made(), tmp_path, f"the checkpoint {tmp_path}/step-00000010 does not fit", *words)


def test_another_seed_number_of_shards_or_fewer_steps(tmp_path: Path) -> None:
    Thing().checkpoints(tmp_path).save(10)
    refused(Thing(), tmp_path, "step-00000010", "its seed is 0, here it is 7", seed=7)
    refused(Thing(), tmp_path, "its number of shards is 4, here it is 8", shards=8)
    refused(Thing(), tmp_path, "10 steps are committed in it, and job.steps asks for 9", total=9)


def test_other_conditions_are_told_and_no_obstacle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = Thing(seed=1)
    saved.checkpoints(tmp_path).save(10)
    torch.set_num_threads(2)
    fresh = Thing(seed=2)
    assert fresh.checkpoints(tmp_path).resume() == 10
    assert "the bits may come to differ from those of a run that never stopped: threads (1 there, 2 here)" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", [MANIFEST, "rank0.json", "rank0.safetensors"])
def test_damage(tmp_path: Path, name: str) -> None:
    Thing().checkpoints(tmp_path).save(10)
    file = tmp_path / "step-00000010" / name
    good = file.read_bytes()
    for place in (0, len(good) // 2, len(good) - 5):
        bad = bytearray(good)
        bad[place] ^= 1
        file.write_bytes(bad)
        refused(Thing(), tmp_path, f"{file} is damaged", "Move that checkpoint away")
    file.write_bytes(good[:-1])
    refused(Thing(), tmp_path, f"{file} is damaged")
    file.unlink()
    refused(Thing(), tmp_path, str(tmp_path / "step-00000010"), name)


def test_a_manifest_that_lies(tmp_path: Path) -> None:
    """With a right checksum: nothing outside of its directory is read, and nothing is believed that cannot be."""
    import xxhash

    Thing().checkpoints(tmp_path).save(10)
    file = tmp_path / "step-00000010" / MANIFEST
    good = json.loads(file.read_bytes())["checkpoint"]

    def lie(change: Callable[[dict[str, Any]], object]) -> None:
        body = json.loads(json.dumps(good))
        change(body)
        text = json.dumps(body, separators=(",", ":")).encode()
        file.write_text(json.dumps({"checksum": xxhash.xxh3_128_hexdigest(text), "checkpoint": body}))
        refused(Thing(), tmp_path, str(file))

    lie(lambda body: body["files"].update({"../../secret": [1, 1, ""]}))
    lie(lambda body: body["tensors"]["model.0.bias"].__setitem__(0, "load"))
    lie(lambda body: body["tensors"]["model.0.bias"][2][0].__setitem__(1, [1 << 40]))
    lie(lambda body: body["tensors"]["model.0.bias"][2][0].__setitem__(3, -1))
    lie(lambda body: body.update(ranks=2))
    lie(lambda body: body.update(version=2))


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["TRAP"],)


def test_a_foreign_checkpoint_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    foreign = tmp_path / "checkpoints"
    save({"a": torch.zeros(3)}, storage_writer=FileSystemWriter(foreign / "step-00000010"), no_dist=True)
    trap = pickle.dumps(Trap())
    for file in (foreign / "step-00000010").iterdir():
        file.write_bytes(trap)
    refused(Thing(), foreign, "step-00000010 has no checkpoint.json")
    shutil.rmtree(foreign / "step-00000010")
    Thing().checkpoints(foreign).save(20)
    for file in (foreign / "step-00000020").iterdir():
        file.write_bytes(trap)
        refused(Thing(), foreign, "is damaged")
    assert not (tmp_path / "sprung").exists()


def test_a_directory_of_other_things(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    refused(Thing(), tmp_path, f"{tmp_path} holds no checkpoints but thesis.tex")
    with pytest.raises(UsageError, match=r"thesis\.tex/x cannot be used"):
        Thing().checkpoints(tmp_path / "thesis.tex" / "x").resume()


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "step-00000010").symlink_to("gone")
    refused(Thing(), tmp_path, "step-00000010")


def test_one_that_is_removed_as_old_while_it_is_looked_at(tmp_path: Path) -> None:
    """A group that need not have looked: the others held the state, saved the next one and removed this."""
    saved, fresh = Thing(seed=1), Thing(seed=2)
    saved.checkpoints(tmp_path).save(10)
    desk = fresh.checkpoints(tmp_path).checkpoints
    find = desk._found

    def find_late() -> list[Path]:
        paths = find()
        if paths and paths[0].name == "step-00000010":
            assert saved.checkpoints(tmp_path, keep=1).save(20) == []
        return paths

    desk._found = find_late
    assert desk.resume() == 20
    assert fresh.state.digest() == saved.state.digest()


# --- when saving fails ----------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]).returncode:
        pytest.skip("cannot mount")
    try:
        desk = Thing().checkpoints(disk, keep=9)
        assert desk.save(10) == []
        (disk / "filler").write_bytes(bytes(40 << 10))
        (trouble,) = desk.save(20)
        assert f"{disk}/step-00000020 could not be written: No space left on device" in trouble
        assert trouble in capsys.readouterr().err
        assert names(disk) == ["filler", "step-00000010"], "what was written of it is gone"
        (disk / "filler").unlink()
        assert desk.save(30) == []
        assert Thing().checkpoints(disk).resume() == 30
    finally:
        subprocess.run(["umount", str(disk)], check=True)


OUT_OF_MEMORY = """
import resource, sys, torch
from pathlib import Path
from tests.torch.checkpointing import Thing
thing = Thing()
thing.facts["large"] = torch.zeros(64 << 20, dtype=torch.uint8)
desk = thing.checkpoints(Path(sys.argv[1]))
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (32 << 20), -1))
(trouble,) = desk.save(10)
print(trouble)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
assert desk.save(20) == []
"""


def test_too_little_memory_costs_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", OUT_OF_MEMORY, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "the checkpoint of step 10 could not be taken" in done.stdout and "memory" in done.stdout
    assert names(tmp_path) == ["step-00000020"]


def test_a_kill_at_any_moment_of_a_save_leaves_the_last_good_one(tmp_path: Path) -> None:
    script = Path(__file__).parent / "scripts" / "killed_in_a_save.py"
    env = {**os.environ, "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(tmp_path / "c")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 15  # every file opened, named or removed is one


# --- in a rank ------------------------------------------------------------------------------------------------


def test_only_who_may_begin_the_job_looks_for_a_checkpoint(tmp_path: Path) -> None:
    where = {"PLANARIA_CHECKPOINT": str(tmp_path / "checkpoints"), "PLANARIA_CHECKPOINT_EVERY": "2"}
    with PretendAgent("slow_shards.py", 2, 2, tmp_path) as agent:
        agent.quiet(**where)
        assert names(tmp_path / "checkpoints") == ["step-00000002", "step-00000003"]
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000003")
        founder, joiner = agent.start(0, PLANARIA_RESUME="1", **where), agent.start(1, PLANARIA_RESUME="0", **where)
        agent.until(lambda: len(agent.ready) == 2)
        assert agent.ready[founder].step == 2 and agent.ready[founder].initial
        assert agent.ready[joiner].step == 0 and not agent.ready[joiner].initial
        agent.publish([founder, joiner], founding=True)
        agent.until(lambda: len(agent.told(Finished)) == 2)
        assert {report.digest for report in agent.told(Finished)} == {agent.quiet()}
        agent.until(lambda: bool(agent.told(Saved)))
        (saved,) = agent.told(Saved)
        assert (saved.member, saved.step, saved.trouble) == (founder, 3, "")


# --- settings -------------------------------------------------------------------------------------------------


def test_the_command_line_s_directory_and_the_script_s_numbers_count() -> None:
    env = {"PLANARIA_CHECKPOINT": "/c", "PLANARIA_CHECKPOINT_EVERY": "7", "PLANARIA_CHECKPOINT_KEEP": "8"}
    assert read_schedule(None, None, None, {}) is None
    assert read_schedule("/s", None, None, {}) == Schedule(Path("/s"), 100, 3)
    assert read_schedule("/s", 5, None, env) == Schedule(Path("/c"), 5, 8)
    assert read_schedule(None, None, None, env) == Schedule(Path("/c"), 7, 8)


@pytest.mark.parametrize(("every", "keep"), [(0, None), (-1, None), (1.5, None), (True, None), (None, 0)])
def test_numbers_that_cannot_be(every: Any, keep: Any) -> None:
    with pytest.raises(UsageError, match="must be a whole number of at least 1"):
        read_schedule("/s", every, keep, {})


def test_a_directory_that_is_no_path() -> None:
    directory: Any = 5
    with pytest.raises(UsageError, match="the directory must be a path, not 5"):
        read_schedule(directory, None, None, {})
