"""Loops that Planaria does not drive, and state by the script's own functions: the same bits, or a clear word."""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from planaria.core.messages import Adopted, Finished, Trouble
from planaria.errors import PlanariaError, UsageError
from planaria.torch import random as seeding
from planaria.torch.registered import RegisteredPart
from planaria.torch.state import ProtectedState
from planaria.torch.world import GroupWorld
from tests.torch.pretend_agent import PretendAgent
from tests.torch.test_job_alone import POINTS, no_run, parts, train, weights
from tests.torch.waiting import appear

SCRIPT = Path(__file__).parents[1] / "e2e" / "scripts" / "own_loop.py"
# Says so for a group of one rank, which is what is meant; in a rank it is not shown.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FORMS = pytest.mark.parametrize("form", ["state", "file"])
__all__ = ["no_run"]  # a fixture for every test here


class Trainer:
    """What people have: a model, an optimizer, a step, functions for checkpoints."""

    def __init__(self, **how: Any) -> None:
        self.job, self.model, self.optimizer, self.data = parts(**how)
        self.step = 0

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def save(self, file: io.BytesIO) -> None:
        torch.save(self.state(), file)

    def load(self, file: io.BytesIO) -> None:
        self.restore(torch.load(file, weights_only=True))

    def register(self, form: str = "state", steps: int = 6, **other: Any) -> int:
        functions = {"state": (self.state, self.restore), "file": (self.save, self.load)}[form]
        return self.job.register(
            **{"save": functions[0], "load": functions[1], "model": self.model, "steps": steps} | other
        )

    def body(self, step: Any) -> None:
        for shard in step.shards():
            self.model(self.batch(step.index, shard)).pow(2).mean().backward()
        self.optimizer.step()
        self.step += 1

    def batch(self, step: int, shard: int) -> torch.Tensor:
        return torch.stack([POINTS[i] for i in self.data.sample_ids(step, shard)])

    def part(self, save: Any = None, load: Any = None) -> RegisteredPart:
        return RegisteredPart(save or self.state, load or self.restore, self.model, 1, "here")


def moved(source: Trainer, target: Trainer, form: str, **functions: Any) -> None:
    """``target`` takes over the state of ``source``, as when it heals."""
    save, load = ("save", "load") if form == "file" else ("state", "restore")
    ends = [
        # Beside others, so that its tensors are not the first of all.
        ProtectedState(
            facts={"x": torch.ones(3)}, registered=each.part(functions.get("save") or getattr(each, save), loads)
        )
        for each, loads in ((source, getattr(source, load)), (target, functions.get("load") or getattr(target, load)))
    ]
    manifest, tensors = ends[0].capture()
    ends[1].restore(manifest, [tensor.clone() for tensor in tensors])


# --- a job alone ----------------------------------------------------------------------------------------------


@FORMS
def test_the_same_bits_as_a_loop_that_planaria_drives(form: str) -> None:
    job, model, optimizer, data = parts()
    job.protect(model=model, optimizer=optimizer)
    train(job, model, optimizer, data, 6)
    trainer = Trainer()
    trainer.data.bind(4, 1)
    assert trainer.register(form) == 0
    while trainer.step < 6:
        with trainer.job.step() as step:
            trainer.body(step)
    assert not step.void and step.groups == (0,) and step.index == 5
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(trainer.model), strict=True))


@FORMS
def test_checkpoints_hold_what_is_registered(tmp_path: Path, form: str) -> None:
    ends = []
    for start in (0, 6):
        trainer = Trainer()
        trainer.data.bind(4, 1)
        trainer.job.checkpoint(tmp_path / "checkpoints", every=4)
        trainer.job.protect(facts={"more": [1, 2]})
        assert trainer.register(form) == trainer.step == start
        while trainer.step < 6:
            with trainer.job.step() as step:
                trainer.body(step)
        ends.append(weights(trainer.model))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_checkpoints_of_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in ("1", "fsdp=2"):
        monkeypatch.setattr(GroupWorld, "layout", layout)
        trainer = Trainer()
        trainer.data.bind(4, 1)
        trainer.job.checkpoint(tmp_path / "checkpoints")
        if layout != "1":
            with pytest.raises(UsageError, match="laid out as 1, here it is fsdp=2"):
                trainer.register(steps=1)
            return
        trainer.register(steps=1)
        with trainer.job.step() as step:
            trainer.body(step)


def test_our_own_data_and_several_backward_passes_a_shard() -> None:
    trainer = Trainer()
    trainer.register(overlap=False)
    counts = []
    for _ in range(6):
        with trainer.job.step() as step:
            for x in step.batches(trainer.data):
                for half in x.chunk(2):
                    (trainer.model(half).pow(2).mean() / 2).backward()
                step.record(loss=1.0)
            trainer.optimizer.step()
            counts.append(step.metrics["loss"])
    assert counts == [1.0] * 6


# --- moving a state -------------------------------------------------------------------------------------------


@FORMS
def test_a_state_moves_whole(form: str) -> None:
    source, target = Trainer(), Trainer()
    torch.manual_seed(5)
    for parameter in source.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    source.optimizer.step()
    source.step = 7
    moved(source, target, form)
    assert target.step == 7
    digests = {ProtectedState(registered=each.part()).digest() for each in (source, target)}
    assert len(digests) == 1


def test_a_view_that_repeats_its_elements_moves_whole() -> None:
    source, target = Trainer(), Trainer()
    taken: list[torch.Tensor] = [torch.zeros(4, 3)]

    def load(state: Any) -> None:
        taken[:] = [state["x"]]

    moved(
        source,
        target,
        "state",
        save=lambda: {"x": taken[0] if taken[0].any() else torch.arange(3.0).expand(4, 3)},
        load=load,
    )
    assert torch.equal(taken[0], torch.arange(3.0).expand(4, 3))


@FORMS
@pytest.mark.parametrize("lost", ["model", "optimizer", "step"])
def test_a_load_that_loses_something_is_told(form: str, lost: str) -> None:
    source, target = Trainer(), Trainer()
    for parameter in source.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    source.optimizer.step()
    source.step = 7

    def forgets(state: Any) -> None:
        state = torch.load(state) if form == "file" else state
        target.restore(state | {lost: target.state()[lost]})

    if form == "file" and lost != "model":
        moved(source, target, form, load=forgets)  # what is beside the model in a file, nobody here knows
        return
    with pytest.raises(UsageError, match=rf"after load took over .*(registered\.{lost}|the model)"):
        moved(source, target, form, load=forgets)


def test_a_load_that_rounds_is_told() -> None:
    # Optimizer.load_state_dict casts the state to the type of the parameters.
    source, target = Trainer(), Trainer()
    for each in (source, target):
        each.model.bfloat16()
    for parameter in source.model.parameters():
        source.optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.rand(parameter.shape)}
    with pytest.raises(UsageError, match=r"registered\.optimizer\.state\[0\]\.exp_avg is not what it was"):
        moved(source, target, "state")


@FORMS
def test_a_load_that_fails_or_replaces_parameters(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = Trainer(), Trainer()

    def fails(state: Any) -> None:
        raise KeyError("optimizer.0")

    with pytest.raises(UsageError, match=r"load, registered with job\.register, failed: KeyError: 'optimizer\.0'"):
        moved(source, target, form, load=fails)
    assert "in fails" in capsys.readouterr().err, "the script's own traceback"

    def replaces(state: Any) -> None:
        state = torch.load(state) if form == "file" else state
        target.model.load_state_dict(state["model"], assign=True)

    with pytest.raises(UsageError, match=r"load replaced the parameter model\.0\.weight"):
        moved(source, target, form, load=replaces)


def test_generators_are_the_same_for_save_on_all_groups_and_go_on_as_they_were() -> None:
    seen = []

    def draws() -> dict[str, Any]:
        seen.append((torch.get_rng_state(), random.random(), numpy.random.rand()))
        return {"rng": torch.get_rng_state()}

    trainer = Trainer()
    part = trainer.part(draws)
    for seed in (1, 2):
        seeding.seed_all(seed)
        part.pack([])
        after = (torch.rand(1).item(), random.random(), numpy.random.rand())
        seeding.seed_all(seed)
        assert after == (torch.rand(1).item(), random.random(), numpy.random.rand())
    assert torch.equal(seen[0][0], seen[1][0]) and seen[0][1:] == seen[1][1:]


# --- what a script does wrong -----------------------------------------------------------------------------------


def closes(file: io.BytesIO) -> None:
    file.write(b"x")
    file.close()


def test_a_save_may_close_its_file() -> None:
    tensors: list[torch.Tensor] = []
    Trainer().part(closes).pack(tensors)
    assert tensors[0].tolist() == [ord("x")]


def fails() -> None:
    raise OSError("no room")


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ({"save": lambda: None}, "save returned nothing"),
        ({"save": lambda: b"bytes"}, "save returned a bytes"),
        ({"save": lambda: {"x": numpy.ones(1)}}, r"registered\.x is a numpy.ndarray"),
        ({"save": lambda: {"x": [torch.ones(2).to_sparse()]}}, r"registered\.x\[0\] is of layout torch.sparse_coo"),
        ({"save": lambda file: None}, "save wrote nothing"),
        ({"save": fails}, "save, registered with job.register, failed: OSError: no room"),
        ({"save": lambda step, file: None}, "save needs the arguments step, file"),
        ({"save": {}}, "save must be a function, not a dict"),
        ({"load": lambda: None}, "load is called with one argument"),
        ({"load": lambda state, strict: None}, "it needs state, strict"),
        ({"load": None}, "load must be a function"),
        ({"model": [object()]}, r"model\[0\] is a object"),
        ({"model": nn.Identity()}, "must name the model"),
        ({"steps": 0}, "job.register needs at least one step"),
    ],
)
def test_what_cannot_be_registered(functions: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Trainer().register(**functions)


def test_a_save_that_fails_later_may_be_no_fault_of_the_script() -> None:
    room = [True]

    def save() -> dict[str, Any]:
        return {} if room else fails()  # type: ignore[func-returns-value]

    part = Trainer().part(save)
    part.pack([])
    room.clear()
    with pytest.raises(PlanariaError, match="no room") as caught:
        part.pack([])
    assert not isinstance(caught.value, UsageError)


def test_protected_and_registered() -> None:
    trainer = Trainer()
    trainer.job.protect(net=[trainer.model])
    with pytest.raises(UsageError, match=r"both name the parameter model\.0\.weight"):
        trainer.register()
    for name in ("model", "registered"):
        trainer = Trainer()
        trainer.job.protect(**{name: {}})
        with pytest.raises(UsageError, match=f"both name `{name}`"):
            trainer.register()


def other_objects(trainer: Trainer) -> None:
    with trainer.job.step(), trainer.job.step():
        pass


def again(trainer: Trainer) -> None:
    body = trainer.job.step()
    for _ in range(2):
        with body as step:
            trainer.body(step)


def without_with(trainer: Trainer) -> None:
    trainer.job.step()
    trainer.job.step()


def no_shards(trainer: Trainer) -> None:
    with trainer.job.step():
        pass


def leaves_early(trainer: Trainer) -> None:
    for _ in range(2):
        with trainer.job.step() as step:
            for shard in step.shards():
                trainer.model(trainer.batch(0, shard)).sum().backward()
                break


def leaves_early_and_goes_on(trainer: Trainer) -> None:
    with trainer.job.step() as step:
        for shard in step.shards():
            trainer.model(trainer.batch(0, shard)).sum().backward()
            break
        trainer.body(step)


def one_too_many(trainer: Trainer) -> None:
    for _ in range(7):
        with trainer.job.step() as step:
            trainer.body(step)


def after_an_error(trainer: Trainer) -> None:
    for _ in range(2):
        try:
            with trainer.job.step():
                raise ValueError("a bad sample")
        except ValueError:
            pass


def shards_twice(trainer: Trainer) -> None:
    with trainer.job.step() as step:
        trainer.body(step)
        trainer.body(step)


def counts_first(trainer: Trainer) -> None:
    while trainer.step < 6:
        trainer.step += 1
        with trainer.job.step() as step:
            trainer.body(step)


def grows(trainer: Trainer) -> None:
    save, rows = trainer.state, [0]
    trainer.job.register(
        save=lambda: save() | {"seen": torch.zeros(len(rows))}, load=trainer.restore, model=trainer.model, steps=6
    )
    with trainer.job.step() as step:
        for shard in step.shards():
            rows.append(shard)
            trainer.model(trainer.batch(0, shard)).sum().backward()


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        (other_objects, "step 0: job.step was called inside of it"),
        (again, "every step needs a job.step"),
        (without_with, "with job.step"),
        (no_shards, r"all of step.shards\(\)"),
        (leaves_early, r"all of step.shards\(\)"),
        (leaves_early_and_goes_on, "gone through once"),
        (one_too_many, "all 6 steps are made"),
        (after_an_error, "an error ended the step before"),
        (shards_twice, "gone through once"),
        (counts_first, r"registered\.step, as save gives it, changed between"),
        (grows, r"registered\.seen, as save gives it, changed between"),
        (lambda trainer: trainer.register(), "job.register can be called once"),
        (lambda trainer: next(trainer.job.steps(2)), "can be called once"),
        (lambda trainer: trainer.job.protect(late={}), r"before job\.steps"),
        (lambda trainer: trainer.job.checkpoint("x"), r"before job\.steps"),
    ],
)
def test_loops_that_cannot_be(loop: Callable[[Trainer], None], said: str) -> None:
    trainer = Trainer()
    trainer.data.bind(4, 1)
    if loop is not grows:
        trainer.register()
    with pytest.raises(UsageError, match=said):
        loop(trainer)


def test_a_step_without_registering() -> None:
    with pytest.raises(UsageError, match=r"job\.register before the loop"):
        Trainer().job.step()


def test_errors_of_the_script_go_through() -> None:
    trainer = Trainer()
    trainer.register()
    with pytest.raises(ZeroDivisionError), trainer.job.step():
        1 / 0  # noqa: B018


# --- with others ------------------------------------------------------------------------------------------------


def same_bits(agent: PretendAgent, members: int) -> None:
    agent.until(lambda: len(agent.told(Finished)) == members)
    assert {report.digest for report in agent.told(Finished)} == {agent.quiet()}


@FORMS
def test_a_body_that_is_overtaken(tmp_path: Path, form: str) -> None:
    # B misses the end of the exchange of step 3, which A commits: A is in the body of step 4 when B takes its state.
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    with PretendAgent(SCRIPT, 2, 6, tmp_path, words=[form, "--steps", "8"]) as agent:
        first = agent.start(0, GATE=str(gate), AT="4")
        second = agent.start(1, ACTS="miss-step-3", NOTES=str(notes))
        agent.wait_for(first, second)
        agent.publish([first, second], founding=True)
        agent.until(lambda: bool(agent.told(Trouble)))
        appear(tmp_path / "gate-0")
        last = agent.publish([first, second])
        gate.touch()
        agent.until(lambda: len(agent.told(Adopted, quorum=last.id)) == 2)
        same_bits(agent, 2)
    # The body of step 3 ended before its optimizer stepped, and the state was loaded once, when it had.
    done = ["step 0", "step 1", "step 2", "load 4", *(f"step {step}" for step in range(4, 8))]
    assert notes.read_text().splitlines() == done
    lines = [json.loads(line) for line in (tmp_path / "rg1i0" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 4, 5, 6, 7]
    assert not any(math.isnan(line["loss"]) for line in lines)


@FORMS
def test_who_joins_takes_the_state_where_it_would_resume(tmp_path: Path, form: str) -> None:
    # The third heals from two of which one has healed itself: what its functions write may be other bytes.
    notes, release = tmp_path / "notes", tmp_path / "release"
    words = [form, "--steps", "40", "--pause", "0.01", "--hold", str(release)]
    with PretendAgent(SCRIPT, 3, 6, tmp_path, words=words) as agent:
        first, second, third = (agent.start(group, NOTES=f"{notes}-{group}") for group in range(3))
        agent.wait_for(first, second, third)
        agent.publish([first], founding=True)
        agent.until(lambda: bool(agent.told(Adopted, member=first)))
        for members in ([first, second], [first, second, third]):
            agent.publish(members, urgent=False)
            appear(Path(f"{notes}-{members[-1].group}"))
        release.touch()
        same_bits(agent, 3)
    loads = [Path(f"{notes}-{group}").read_text().count("load") for group in range(3)]
    assert loads == [0, 1, 1]


@pytest.mark.parametrize(("form", "lost", "acts"), [("state", 0, ""), ("file", 1, ""), ("state", 1, "swallow")])
def test_a_rank_of_a_sharded_trainer_is_replaced_under_the_other(
    tmp_path: Path, form: str, lost: int, acts: str
) -> None:
    release = tmp_path / "release"
    words = [form, "--steps", "40", "--pause", "0.01", "--hold", str(release)]
    with PretendAgent(SCRIPT, 2, 6, tmp_path, ranks=2, words=words) as agent:
        first, second = agent.start(0), agent.start(1, NOTES=str(tmp_path / "notes"), ACTS=acts)
        agent.wait_for(first, second)
        founding = agent.publish([first, second], founding=True)
        agent.until(lambda: len(agent.told(Adopted, quorum=founding.id)) == 2)
        appear(tmp_path / "notes")  # a step is made
        survivor = agent.process(second, 1 - lost)
        third = agent.replace(second, lost)
        agent.until(lambda: bool(agent.told(Trouble, member=first, quorum=founding.id)))
        agent.publish([first])
        agent.wait_for(third)
        agent.publish([first, third], urgent=False)
        agent.until(lambda: bool(agent.told(Adopted, member=third)))
        assert survivor.is_alive() and agent.process(third, 1 - lost) is survivor
        release.touch()
        same_bits(agent, 2)
