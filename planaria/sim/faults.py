"""What each kind of fault does to a world."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from planaria.core.messages import Phase
from planaria.sim.coordinator import LIGHTHOUSE
from planaria.sim.flips import WIDTH
from planaria.sim.kernel import Process
from planaria.sim.lighthouses import STORE
from planaria.sim.scenario import Fault
from planaria.sim.trainer import RANK_LOST, Trainer

if TYPE_CHECKING:
    from planaria.sim.world import World


# Seconds that a deposed lighthouse lives on after it can know of it: it looks at its lease about once a second.
DEPOSED_TIME = 2.0


def _kill(world: World, fault: Fault) -> None:
    trainer = world.victim(fault.target)
    if trainer is not None:
        trainer.exit = trainer.exit or "SIGKILL"
        trainer.process.die()


def _lose_rank(world: World, fault: Fault) -> None:
    trainer = world.victim(fault.target)
    if trainer is not None:
        _hurt(trainer)


def _hurt(trainer: Trainer) -> None:
    trainer.exit = trainer.exit or RANK_LOST
    trainer.process.die()


def _pause(world: World, fault: Fault) -> None:
    trainer = world.victim(fault.target)
    if trainer is None or trainer.process.paused:
        return
    trainer.process.pause()
    world.supervisor_at(trainer.node).member_paused(fault.target)
    world.lasting(fault.seconds, lambda: _resume(world, trainer.process))


def _resume(world: World, process: Process) -> None:
    process.resume()
    world.fabric.progress()


def _alarm(world: World, fault: Fault) -> None:
    world.supervisor_of(fault.target).suspect(fault.target)


def _flip(world: World, fault: Fault) -> None:
    """One bit of what a member holds: of its weights, or of what its optimizer keeps."""
    trainer = world.victim(fault.target)
    if trainer is not None and trainer.phase not in (Phase.STARTING, Phase.FINISHED):
        bit = (world.config.seed + 7 * world.flips) % WIDTH
        trainer.state = trainer.state.flipped(bit, moments=fault.other % 2 == 1)
        trainer.flips += 1
        world.flips += 1
        world.emit("flip", fault.target, "{} now", trainer.state)


def _slow(world: World, fault: Fault) -> None:
    world.speeds[fault.target] = 0.25
    trainer = world.victim(fault.target)
    if trainer is not None:
        trainer.speed = 0.25


def _cut_data(world: World, fault: Fault) -> None:
    a, b = f"node {world.node_number(fault.target)}", f"node {world.node_number(fault.other)}"
    if a != b:
        world.links.cut(a, b)
        world.lasting(fault.seconds, lambda: world.links.restore(a, b))


def _lose_message(world: World, fault: Fault) -> None:
    """Nobody dies, and all who take part wait for each other for ever."""
    trainer = world.victim(fault.target)
    if trainer is not None and trainer.process.alive:
        world.fabric.lose_message(trainer, alone=fault.other % 2 == 1)


def _freeze_lighthouse(world: World, fault: Fault) -> None:
    """The whole machine stands still, its clocks too: it cannot know of that."""
    coordinator = world.coordinator
    if coordinator is None or coordinator.candidate is None:
        _pause_lighthouse(world, fault)
        return
    candidate = coordinator.candidate
    if candidate.process.alive and not candidate.process.paused:
        world.frozen = True
        candidate.process.pause()

        def thaw() -> None:
            candidate.stood_still += fault.seconds
            candidate.process.resume()

        world.lasting(fault.seconds, thaw)


def _cut_store(world: World, fault: Fault) -> None:
    """One lighthouse does not reach the store, or none does."""
    places = list(world.candidates)
    cut = places if fault.other % 3 == 0 else places[fault.target % max(len(places), 1) :][:1]
    for place in cut:
        world.links.cut(place, STORE)
        world.lasting(fault.seconds, lambda place=place: world.links.restore(place, STORE))  # type: ignore[misc]


def _kill_lighthouse(world: World, fault: Fault) -> None:
    coordinator = world.coordinator
    if coordinator is not None and coordinator.process.alive:
        coordinator.process.die()  # the world starts the next one
        world.coordinator_down = max(fault.seconds, 0.01)


def _crash_between_effects(world: World, fault: Fault) -> None:
    if world.coordinator is not None:
        world.coordinator.crash_after = fault.other
        world.coordinator_down = max(fault.seconds, 0.01)


def _fail_over(world: World, fault: Fault) -> None:
    """The leader stalls, another process takes over, and then the old one goes on, not knowing of that."""
    old = world.coordinator
    if old is None or not old.process.alive or old.process.paused:
        return
    if old.candidate is not None:
        _pause_lighthouse(world, fault)
        return
    old.process.pause()
    world.start_coordinator()
    world.lasting(fault.seconds, old.process.resume)
    world.lasting(fault.seconds + DEPOSED_TIME, old.process.die)


def _pause_lighthouse(world: World, fault: Fault) -> None:
    coordinator = world.coordinator
    if coordinator is not None and coordinator.process.alive and not coordinator.process.paused:
        coordinator.process.pause()
        world.lasting(fault.seconds, coordinator.process.resume)


def _jump_clock(world: World, fault: Fault) -> None:
    world.clock_offset += 30.0 * fault.seconds if fault.other % 2 else -fault.seconds


def _cut_agent(world: World, fault: Fault) -> None:
    """From the lighthouse; of several, from one of them or from all."""
    node, places = f"node {fault.target}", list(world.candidates) or [LIGHTHOUSE]
    for place in places if fault.other % 2 == 0 else places[fault.other % len(places) :][:1]:
        world.links.cut(node, place)
        world.lasting(fault.seconds, lambda place=place: world.links.restore(node, place))  # type: ignore[misc]


def _snap_agent(world: World, fault: Fault) -> None:
    world.supervisors[fault.target].snap()


def _echo(world: World, fault: Fault) -> None:
    world.supervisors[fault.target].echo()


def _pause_agent(world: World, fault: Fault) -> None:
    process = world.supervisors[fault.target].process
    if process.alive and not process.paused:
        process.pause()
        world.lasting(fault.seconds, process.resume)


def _kill_agent(world: World, fault: Fault) -> None:
    supervisor = world.supervisors[fault.target]
    if supervisor.process.alive:
        supervisor.process.die()
        world.lasting(max(fault.seconds, 0.1), lambda: world.start_supervisor(fault.target))


def _kill_all(world: World, fault: Fault) -> None:
    """Every group, within ``seconds``."""
    for trainer in [t for t in world.trainers.values() if t.process.alive]:
        trainer.exit = trainer.exit or "SIGKILL"
        if fault.seconds:
            trainer.process.after(world.kernel.between(0.0, fault.seconds), trainer.process.die)
        else:
            trainer.process.die()


def _hurt_all(world: World, fault: Fault) -> None:
    """Every group loses a rank, within ``seconds``."""
    for trainer in [t for t in world.trainers.values() if t.process.alive]:
        if fault.seconds:
            delay = world.kernel.between(0.0, fault.seconds)
            trainer.process.after(delay, lambda trainer=trainer: _hurt(trainer))  # type: ignore[misc]
        else:
            _hurt(trainer)


def _kill_all_agents(world: World, fault: Fault) -> None:
    """Every machine, with its groups."""
    for node in range(world.config.nodes):
        _kill_agent(world, replace(fault, target=node))


def _kill_everything(world: World, fault: Fault) -> None:
    _kill_all_agents(world, fault)
    _kill_lighthouse(world, fault)


def _operator(verb: str) -> Callable[[World, Fault], None]:
    def command(world: World, fault: Fault) -> None:
        coordinator = world.coordinator
        if coordinator is not None:
            trainer = world.at_work(fault.target)
            if verb == "evict" and trainer is not None:
                world.evicted.add(trainer.member)
            values: tuple[int | str, ...] = (fault.target,)
            if verb in ("kill", "migrate", "drain_rank"):
                values = (fault.target, 9 if verb == "kill" else 0)
            elif verb == "move":
                values = (fault.target, f"node {fault.other % world.config.nodes}")
            elif verb in ("drain_node", "undrain_node"):
                values = (f"node {fault.target}", "")
            world.emit("wish", fault.target, "operator: {} {}", verb, values)
            coordinator.process.post(lambda: coordinator.operate(verb, *values))

    return command


APPLY: dict[str, Callable[[World, Fault], None]] = {
    "kill": _kill,
    "lose rank": _lose_rank,
    "hurt all": _hurt_all,
    "pause": _pause,
    "alarm": _alarm,
    "flip": _flip,
    "slow": _slow,
    "cut data": _cut_data,
    "lose message": _lose_message,
    "kill lighthouse": _kill_lighthouse,
    "crash between effects": _crash_between_effects,
    "fail over": _fail_over,
    "freeze lighthouse": _freeze_lighthouse,
    "cut store": _cut_store,
    "pause lighthouse": _pause_lighthouse,
    "jump clock": _jump_clock,
    "cut agent": _cut_agent,
    "snap agent": _snap_agent,
    "echo": _echo,
    "pause agent": _pause_agent,
    "kill agent": _kill_agent,
    "kill all": _kill_all,
    "kill all agents": _kill_all_agents,
    "kill everything": _kill_everything,
    "drain": _operator("drain"),
    "migrate": _operator("migrate"),
    "move": _operator("move"),
    "scale": _operator("scale"),
    "evict": _operator("evict"),
    "operator kill": _operator("kill"),
    "drain node": _operator("drain_node"),
    "drain rank": _operator("drain_rank"),  # the GPU of a group's rank, as a rule of health wants it too
    "undrain node": _operator("undrain_node"),
}
