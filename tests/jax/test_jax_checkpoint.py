"""Durable checkpoints of pytrees: the same bits come back, or a sentence."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import xxhash

import planaria.jax as pj
from planaria.core.messages import Member, Saved
from planaria.engines.local import hold_port
from planaria.jax.checkpoint import Checkpoint, Checkpoints
from planaria.jax.state import State
from planaria.jax.world import SoleWorld
from planaria.rank.durable import MANIFEST, Schedule, checkpoints_in
from planaria.rank.settings import read_settings

pytest.importorskip("orbax", reason="needs planaria[jax-checkpoint]")

PATIENCE = 500.0  # seconds: a hang, below the time that a test has


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PLANARIA_")]:
        monkeypatch.delenv(name)


class Desk:
    """The checkpoints of one state, without a job around them."""

    def __init__(self, tree: Any, directory: Path, *, keep: int = 3, seed: int = 1, total: int = 1000) -> None:
        self.state = State(tree, jax.devices()[0])
        self.told: list[Saved] = []
        self.checkpoints = Checkpoints(
            Schedule(directory, 10, keep), read_settings(4, seed, None, None), SoleWorld(), self.state, total,
            lambda: Member(0, 0), lambda payload: [payload], self.told.append, lambda: {"loss": 0.5},
        )  # fmt: skip

    def save(self, *steps: int) -> Desk:
        for step in steps:
            self.checkpoints.committed(step, True)
            self.checkpoints.wait()
        assert [each.trouble for each in self.told] == [""] * len(steps)
        return self


def mesh(*shape: int) -> jax.sharding.Mesh:
    names = ("x", "y")[: len(shape)]
    return jax.make_mesh(shape, names, devices=jax.devices()[: int(np.prod(shape))])


def spread(array: Any, over: jax.sharding.Mesh, *spec: str | None) -> jax.Array:
    return jax.device_put(array, jax.sharding.NamedSharding(over, jax.sharding.PartitionSpec(*spec)))


DTYPES = [
    *("bool", "int2", "uint2", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("float16", "bfloat16", "float32", "complex64", "float4_e2m1fn", "float8_e3m4", "float8_e4m3"),
    *("float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def odd_tree(fill: int, over: jax.sharding.Mesh | None = None) -> Any:
    """Of all kinds of leaves, which are others for another ``fill``."""
    params = {name: (jnp.arange(8) + fill).astype(jnp.uint8).astype(name) for name in DTYPES}
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0, 1, 0x80000001, 0x7F800000], np.uint32)
    params["nan"] = np.roll(bits, fill).view(np.float32)
    params["negative zeros"] = -np.zeros(4, np.float32) if fill else np.zeros(4, np.float32)
    if over is not None:
        params = {name: spread(leaf, over, "x") for name, leaf in params.items()}
    return {
        "params": params,
        "opt": optax.adamw(1e-3).init({"w": jnp.full((2, 3), fill, jnp.float32)}),
        "key": jax.random.key(fill),
        "keys": [jax.random.split(jax.random.key(fill, impl="rbg"), 3), None],
        "numbers": (fill, 0.5 + fill, fill > 0, 1j * fill),
        "empty": jnp.zeros((0, 3)),
        "": {"..": jnp.full((), fill), "/é\n": jnp.full(2, fill)},
    }


@pytest.mark.parametrize("devices", [0, 2])
def test_all_kinds_of_leaves_come_back_with_their_bits(tmp_path: Path, devices: int) -> None:
    over = mesh(devices) if devices else None
    saved = Desk(odd_tree(1, over), tmp_path).save(10)
    fresh = Desk(odd_tree(0, over), tmp_path)
    assert fresh.state.digest() != saved.state.digest()
    assert fresh.checkpoints.resume() == (10, {"loss": 0.5})
    assert fresh.state.digest() == saved.state.digest()
    for mine, theirs in zip(fresh.state.leaves, saved.state.leaves, strict=True):
        assert (mine.dtype, mine.sharding, mine.committed) == (theirs.dtype, theirs.sharding, True)
        assert not getattr(mine, "weak_type", False)


@pytest.mark.parametrize(("before", "after"), [((4,), (2,)), ((2,), ()), ((), (2, 2)), ((4,), (2, 2))])
def test_another_layout_takes_it_up(tmp_path: Path, before: tuple[int, ...], after: tuple[int, ...]) -> None:
    def tree(shape: tuple[int, ...], fill: float) -> Any:
        w = jnp.full((8, 4), fill).at[3].set(7)
        return {"w": spread(w, mesh(*shape), *("x", "y")[: len(shape)]) if shape else w}

    Desk(tree(before, 1.0), tmp_path).save(10)
    fresh = Desk(tree(after, 0.0), tmp_path)
    shardings = fresh.state.shardings
    fresh.checkpoints.resume()
    assert np.array_equal(fresh.state.leaves[0], np.asarray(tree((), 1.0)["w"]))
    assert [leaf.sharding for leaf in fresh.state.leaves] == shardings


def test_plain_orbax_reads_it(tmp_path: Path) -> None:
    Desk({"params": {"w": jnp.ones(3)}, "key": jax.random.key(4)}, tmp_path).save(10)
    import orbax.checkpoint

    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "step-00000010" / "state")
    assert found["params"]["w"].tolist() == [1.0] * 3
    assert jax.random.wrap_key_data(found["key"]) == jax.random.key(4)


def test_a_step_that_takes_the_memory_changes_nothing(tmp_path: Path) -> None:
    """The next steps begin at once, while the state is copied."""
    update = jax.jit(lambda leaf: leaf + 1, donate_argnums=0)
    update(jnp.zeros(3_000_000))  # compiled
    desk = Desk({"w": jnp.zeros(3_000_000)}, tmp_path)
    for step in (10, 20, 30):
        digest = desk.state.digest()
        desk.checkpoints.committed(step, True)
        for _ in range(5):
            desk.state.leaves = [update(leaf) for leaf in desk.state.leaves]
        desk.checkpoints.wait()
        fresh = Desk({"w": jnp.ones(3_000_000)}, tmp_path)
        assert fresh.checkpoints.resume()[0] == step
        assert fresh.state.digest() == digest


def test_old_ones_go_and_one_under_way_is_not_overtaken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk({"w": jnp.zeros(1000)}, tmp_path, keep=2).save(10, 20, 30)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000030", "step-00000020"]
    save, may = desk.checkpoints._save_tree, threading.Event()
    monkeypatch.setattr(desk.checkpoints, "_save_tree", lambda *given: may.wait() and save(*given))
    desk.checkpoints.committed(40, True)
    desk.checkpoints.committed(50, True)
    desk.checkpoints.committed(55, True)  # not due
    desk.checkpoints.committed(60, False)  # another's
    may.set()
    assert "step 50 is left out: that of step 40 is still being written" in capsys.readouterr().err
    desk.checkpoints.end(57, True)
    assert [each.step for each in desk.told] == [10, 20, 30, 40, 57]


# --- what is refused, and what is passed over ------------------------------------------------------------------


def test_another_structure_is_refused_with_the_paths(tmp_path: Path) -> None:
    Desk({"a": jnp.zeros(3), "b": jnp.zeros(2), "c": 1}, tmp_path).save(10)
    fresh = Desk({"a": jnp.zeros(3, jnp.bfloat16), "c": 1, "d": jnp.zeros(2)}, tmp_path)
    digest = fresh.state.digest()
    with pytest.raises(pj.UsageError) as caught:
        fresh.checkpoints.resume()
    assert (
        f"the state in the checkpoint {tmp_path / 'step-00000010'} does not fit that of this group: state['b'] is "
        "missing here; state['d'] is only here; state['a'] is float32[3] there but bfloat16[3] here"
    ) in str(caught.value)
    assert fresh.state.digest() == digest


def test_another_job_is_refused(tmp_path: Path) -> None:
    Desk({"a": jnp.zeros(3)}, tmp_path).save(10)
    with pytest.raises(pj.UsageError, match="is of another job: its seed is 1, here it is 2"):
        Desk({"a": jnp.zeros(3)}, tmp_path, seed=2).checkpoints.resume()


def test_a_state_of_more_steps_than_are_asked_for_is_no_result(tmp_path: Path) -> None:
    Desk({"a": jnp.zeros(3)}, tmp_path).save(10)
    fresh = Desk({"a": jnp.ones(3)}, tmp_path, total=9)
    with pytest.raises(pj.UsageError, match=r"10 steps are committed in it, and job\.steps asks for 9"):
        fresh.checkpoints.resume()
    assert fresh.state.tree["a"].tolist() == [1, 1, 1]
    assert Desk({"a": jnp.ones(3)}, tmp_path, total=10).checkpoints.resume() == (10, {"loss": 0.5})


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest(checkpoint: Path) -> Path:
    return max((each for each in (checkpoint / "state").rglob("*") if each.is_file()), key=lambda f: f.stat().st_size)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit": (lambda path: flip(largest(path)), "has other bytes"),
    "torn": (lambda path: os.truncate(largest(path), 7), "has 7 bytes, not"),
    "gone": (lambda path: largest(path).unlink(), "is missing"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "has no checkpoint.json"),
    "empty manifest": (lambda path: (path / MANIFEST).write_bytes(b""), "does not hold what a manifest holds"),
    "a bit of the manifest": (lambda path: flip(path / MANIFEST), "does not hold what a manifest holds"),
    "a link to nowhere": (lambda path: shutil.rmtree(path) or path.symlink_to("gone"), "has no checkpoint.json"),
    "empty": (lambda path: shutil.rmtree(path) or path.mkdir(), "has no checkpoint.json"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_one_is_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
    spoil, said = DAMAGE[how]
    saved = Desk({"w": jnp.arange(1000.0)}, tmp_path).save(10, 20)
    spoil(tmp_path / "step-00000020")
    fresh = Desk({"w": jnp.zeros(1000)}, tmp_path)
    assert fresh.checkpoints.resume()[0] == 10
    assert fresh.state.digest() == saved.state.digest()
    told = capsys.readouterr().err
    assert f"the checkpoint {tmp_path / 'step-00000020'} is passed over, for it is damaged" in told and said in told
    assert fresh.checkpoints.damaged == 20
    fresh.save(20)  # it makes way for a whole one
    assert Checkpoint.read(tmp_path / "step-00000020").step == 20
    spoil(tmp_path / "step-00000020")
    spoil(tmp_path / "step-00000010")
    with pytest.raises(pj.UsageError, match="is whole; give another directory"):
        fresh.checkpoints.resume()


def test_one_that_this_user_may_not_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the job would go on from an older one, with nothing wrong on the disk."""
    Desk({"w": jnp.arange(1000.0)}, tmp_path).save(10, 20)
    read = Path.read_bytes

    def forbidden(path: Path) -> bytes:  # chmod does not keep root out
        if path.parent.name == "step-00000020":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(pj.UsageError, match=r"cannot read .*step-00000020.*: Permission denied"):
        Desk({"w": jnp.zeros(1000)}, tmp_path).checkpoints.resume()


def test_those_of_the_other_front(tmp_path: Path) -> None:
    (tmp_path / "step-00000010").mkdir()
    text = b'{"version":1}'
    whole = {"checksum": xxhash.xxh3_128_hexdigest(text), "checkpoint": json.loads(text)}
    (tmp_path / "step-00000010" / MANIFEST).write_text(json.dumps(whole))
    with pytest.raises(pj.UsageError, match=r"is of version 1, planaria\.jax reads 'jax 1'"):
        Desk({"w": jnp.zeros(3)}, tmp_path).checkpoints.resume()


def test_two_leaves_of_one_name(tmp_path: Path) -> None:
    with pytest.raises(pj.UsageError, match=r"state\['a'\]\['b'\] and state\['a.b'\] would have one name \(a.b\)"):
        Desk({"a": {"b": jnp.zeros(1)}, "a.b": jnp.ones(1)}, tmp_path)


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Desk(odd_tree(1), tmp_path).save(10)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pickle was read")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    assert Desk(odd_tree(0), tmp_path).checkpoints.resume()[0] == 10


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounts a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]).returncode:
        pytest.skip("cannot mount")
    yield disk
    # What has been told of may still hold a file for a moment.
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    desk = Desk({"w": jnp.asarray(np.random.default_rng(0).normal(size=40_000), jnp.float32)}, small_disk)
    for step in (10, 20, 30, 40):
        desk.checkpoints.committed(step, True)
        desk.checkpoints.wait()
    bad = [each for each in desk.told if each.trouble]
    assert bad and not desk.told[0].trouble
    assert "No space left" in bad[0].trouble or "RESOURCE_EXHAUSTED" in bad[0].trouble
    assert f"Training goes on; the next one is due at step {bad[0].step + 10}" in capsys.readouterr().err
    assert not list(small_disk.glob("*.partial-*"))
    for path in checkpoints_in(small_disk):
        Checkpoint.read(path)


# --- in a job ---------------------------------------------------------------------------------------------------


def train(steps: int, **options: Any) -> pj.Job:
    job = pj.init(shards=2, seed=1)
    if options:
        job.checkpoint(**options)
    grad = jax.jit(lambda state, batch, key: (state["w"] - jax.random.normal(key, (3,)), {"loss": state["w"].sum()}))
    state = {"w": jnp.zeros(3), "n": 0}
    for step in job.steps(steps, state, lambda s, g: {"w": s["w"] - 0.5 * g, "n": s["n"] + 1}):
        for shard in step.shards():
            step.grad(grad, float(shard))
    return job


def test_a_job_goes_on_where_another_ended(tmp_path: Path) -> None:
    train(7, directory=tmp_path, every=3, keep=9)
    assert {"step-00000007", "step-00000003"} <= {path.name for path in checkpoints_in(tmp_path)}
    job, quiet = train(12, directory=tmp_path, every=100), train(12)
    assert job.state["w"].tolist() == quiet.state["w"].tolist() and int(job.state["n"]) == 12
    with pytest.raises(pj.UsageError, match=r"before job\.steps"):
        job.checkpoint(tmp_path)
    with pytest.raises(pj.UsageError, match="every must be a whole number"):
        pj.init(shards=2).checkpoint(tmp_path, every=0)


def test_orbax_is_asked_for_by_name(tmp_path: Path) -> None:
    text = (
        "import sys; sys.modules['orbax'] = None\n"
        "import planaria.jax as pj\n"
        "job = pj.init(shards=1)\n"
        "import jax.numpy as jnp\n"
        f"job.checkpoint({str(tmp_path)!r})\n"
        "next(job.steps(1, {'w': jnp.ones(1)}, lambda s, g: s))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(pj.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=PATIENCE)
    assert "pip install 'planaria[jax-checkpoint]'" in done.stderr


def test_in_a_larger_jax_world(tmp_path: Path) -> None:
    """Orbax would wait for its other processes, which have no part in the save."""
    text = (
        "import jax, sys\n"
        "jax.distributed.initialize('127.0.0.1:' + sys.argv[1], 2, int(sys.argv[2]))\n"
        "import jax.numpy as jnp\n"
        "import planaria.jax as pj\n"
        "job = pj.init(shards=1)\n"
        f"job.checkpoint({str(tmp_path)!r})\n"
        "try:\n"
        "    next(job.steps(1, {'w': jnp.ones(1)}, lambda s, g: s))\n"
        "except pj.UsageError as error:\n"
        "    print(error, flush=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(pj.__file__).parents[2]), "JAX_PLATFORMS": "cpu", "NPROC": "1"}
    with hold_port() as held, ExitStack() as at_end:
        both = []
        for rank in ("0", "1"):
            command = [sys.executable, "-c", text, str(held.getsockname()[1]), rank]
            process = at_end.enter_context(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
            at_end.callback(process.kill)
            both.append(process)
        for each in both:
            told = each.communicate(timeout=PATIENCE)[0]
            assert "in a larger JAX world of the script's own no checkpoints are saved" in told
