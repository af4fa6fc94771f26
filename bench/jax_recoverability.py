"""What JAX itself does when a process dies, beside planaria.jax in the same session.

python bench/jax_recoverability.py [--heartbeat 10] [--patience 60]

Three processes on this machine's CPU step together until one is killed (SIGKILL), and are watched for a while. Each
trial is of one of JAX's own ways (``jax.distributed``, ``jax_enable_recoverability`` with ``live_devices``, with
collectives or without), and then the killed one is started again if anybody is left to meet. The last two are groups of
planaria.jax. Every process is bounded in time, and ended with its trial.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planaria.agent.parent import tied
from planaria.chaos.session import LocalRun, Script
from planaria.chaos.watch import Life, Watch

SIZE = 3
LIMIT = "--xla_cpu_collective_timeout_seconds=8"


@dataclass(frozen=True)
class Trial:
    what: str
    killed: int
    recoverable: bool = True
    collectives: bool = True
    flags: str = ""  # for XLA


TRIALS = (
    Trial("default, psum", 2, recoverable=False),
    Trial("recoverable, live_devices, no collectives", 2, collectives=False),
    Trial("recoverable, live_devices, no collectives", 0, collectives=False),
    Trial("recoverable, live_devices, psum", 2),
    Trial("recoverable, live_devices, psum, collectives with a time limit of 8 s", 2, flags=LIMIT),
    Trial("recoverable, live_devices, psum, collectives with a time limit of 8 s", 0, flags=LIMIT),
)


# --- one process of JAX's -------------------------------------------------------------------------------------


def process(args: argparse.Namespace) -> None:
    """Tells every round that it comes through, as a line of JSON: when, and with whom."""
    import jax

    jax.config.update("jax_enable_recoverability", args.recoverable)
    jax.distributed.initialize(args.address, SIZE, args.process, heartbeat_timeout_seconds=args.heartbeat)
    import numpy as np
    from jax.experimental.multihost_utils import live_devices
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def total(devices: Sequence[Any]) -> int:
        """A sum over the processes, each of which adds 1."""
        mesh = Mesh(np.array(devices), ("process",))
        spread = NamedSharding(mesh, PartitionSpec("process"))
        ones = jax.make_array_from_process_local_data(spread, np.ones(1, np.float32))
        summed = jax.shard_map(
            lambda x: jax.lax.psum(x, "process"),
            mesh=mesh,
            in_specs=PartitionSpec("process"),
            out_specs=PartitionSpec(),
        )
        return int(jax.jit(summed)(ones).addressable_data(0)[0])

    while True:
        try:
            if args.recoverable:
                with live_devices(jax.devices()) as devices:
                    members = sorted({device.process_index for device in devices})
                    told = total(devices) if args.collectives else len(members)
            else:
                members, told = list(range(SIZE)), total(jax.devices())
            tell(members=members, sum=told)
        except Exception as error:  # whatever it raises is what is to be seen
            tell(error=f"{type(error).__name__}: {error}".partition("\n")[0])
        time.sleep(0.05)


def tell(**facts: Any) -> None:
    print(json.dumps({"at": time.time(), **facts}), flush=True)


# --- a trial of JAX's -----------------------------------------------------------------------------------------


class Processes:
    def __init__(self, trial: Trial, directory: Path, heartbeat: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._directory = directory
        self._command = [sys.executable, __file__, "--address", address, "--heartbeat", str(heartbeat)]
        self._command += ["--recoverable"] * trial.recoverable + ["--collectives"] * trial.collectives
        self._env = {**os.environ, "NPROC": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": trial.flags}
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self._lives = 0

    def start(self, index: int) -> Path:
        self._lives += 1
        out = self._directory / f"{index}.{self._lives}.out"
        with out.open("wb") as stdout, out.with_suffix(".err").open("wb") as stderr:
            self.running[index] = subprocess.Popen(
                tied([*self._command, "--process", str(index)]),
                env=self._env,
                stdout=stdout,
                stderr=stderr,
            )
        return out

    def end(self) -> None:
        for each in self.running.values():
            each.kill()
            each.wait()


def said(out: Path) -> list[dict[str, Any]]:
    lines = out.read_text(errors="replace").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.startswith('{"at"') and line.endswith("}\n")]  # gloo speaks too


def rounds(out: Path, members: Sequence[int], after: float) -> list[float]:
    """When a process came through a round with just these members."""
    return [each["at"] for each in said(out) if each.get("members") == list(members) and each["at"] > after]


def until(met: Callable[[], Any], patience: float) -> bool:
    deadline = time.monotonic() + patience
    while not met():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def of_jax(trial: Trial, heartbeat: int, patience: float) -> tuple[str, str]:
    """(the others, the killed one), in words."""
    with tempfile.TemporaryDirectory() as name:
        processes = Processes(trial, Path(name), heartbeat)
        try:
            outs = {index: processes.start(index) for index in range(SIZE)}
            everybody = range(SIZE)
            if not until(lambda: all(len(rounds(out, everybody, 0)) > 2 for out in outs.values()), 2 * patience):
                return f"never began: {last_words(outs)}", "-"
            victim = processes.running.pop(trial.killed)
            killed = time.time()
            victim.kill()
            victim.wait()
            others = {index: outs[index] for index in everybody if index != trial.killed}
            words, alive = watch_others(processes, others, killed, patience)
            if not alive:
                return words, "not tried, for the others hang" if "hangs" in words else "nobody is left to meet"
            return words, come_back(processes, trial.killed, others, patience)
        finally:
            processes.end()


def watch_others(processes: Processes, others: dict[int, Path], killed: float, patience: float) -> tuple[str, bool]:
    """What they did, and whether all of them go on."""
    left = sorted(others)

    def over() -> bool:
        gone = [index for index in left if processes.running[index].poll() is not None]
        on = [index for index in left if len(rounds(others[index], left, killed)) > 2]
        return len(gone) + len(on) == len(left)

    settled = until(over, patience)
    told, on_all = [], True
    for index in left:
        code, on = processes.running[index].poll(), rounds(others[index], left, killed)
        first = next((each["error"] for each in said(others[index]) if "error" in each and each["at"] > killed), "")
        if code is not None:
            told.append(f"{index} died too ({how(code)})")
        elif on:
            told.append(f"{index} goes on after {on[0] - killed:.1f} s")
        else:
            told.append(f"{index} hangs, {patience:.0f} s on" + (f" (it had seen: {first[:90]})" if first else ""))
        on_all = on_all and code is None and bool(on)
    ended = any(process.poll() is not None for process in processes.running.values())
    within = f", within {time.time() - killed:.0f} s" if settled and ended else ""
    return "; ".join(told) + within, on_all


def how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def come_back(processes: Processes, index: int, others: dict[int, Path], patience: float) -> str:
    began = time.time()
    out = processes.start(index)
    everybody = range(SIZE)
    until(
        lambda: (
            processes.running[index].poll() is not None
            or all(len(rounds(each, everybody, began)) > 2 for each in (out, *others.values()))
        ),
        patience,
    )
    time.sleep(1)
    met = [rounds(each, everybody, began) for each in (out, *others.values())]
    if all(met):
        return f"all three step together {max(times[0] for times in met) - began:.1f} s after its start"
    code, now = processes.running[index].poll(), time.time()
    told = ["it does not come back" + (f" ({how(code)})" if code is not None else "")]
    for each in sorted(others):
        late = [e for e in said(others[each]) if e["at"] > now - 3]
        on, ended = [e["members"] for e in late if "members" in e], processes.running[each].poll()
        state = f"goes on with {on[-1]}" if on else "fails in every round" if late else "hangs"
        told.append(f"{each} {state}" if ended is None else f"{each} died of it ({how(ended)})")
    errors = [e["error"] for o in (out, *others.values()) for e in said(o) if "error" in e and e["at"] > began]
    return "; ".join([*told, (errors or [last_words({index: out})])[0][:160]])


def last_words(outs: dict[int, Path]) -> str:
    lines = [out.with_suffix(".err").read_text(errors="replace").strip().splitlines()[-1:] for out in outs.values()]
    return next((each[0][:160] for each in lines if each), "without a word")


# --- planaria.jax ---------------------------------------------------------------------------------------------


def group(args: argparse.Namespace) -> None:
    """One group's script: the same sum, of one number for every shard."""
    import jax.numpy as jnp

    import planaria.jax as pj

    def ones(state: Any, batch: Any, key: Any) -> Any:
        return jnp.ones_like(state), None

    job = pj.init(shards=SIZE)
    for step in job.steps(1_000_000, jnp.zeros(1), lambda state, gradients: gradients):
        for _ in step.shards():
            step.grad(ones, None)
        time.sleep(0.05)


def of_planaria(killed: int, patience: float) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as name:
        run = LocalRun(Script(Path(__file__), ("--group",), SIZE, None, "cpu"), Path(name), ("--quiet",))
        watch = Watch(Path(name))
        try:
            run.start()

            def settled(beyond: int = 0) -> bool:
                watch.poll()
                lives = [life for life in watch.settled() if life.alive]
                return len([life for life in lives if life.commits and life.commits[-1].step > beyond]) == SIZE

            if not until(settled, 2 * patience):
                return f"never began: {run.log.read_text(errors='replace')[-200:]}", "-"
            victim = watch.life(killed)
            assert victim is not None
            step, struck = watch.step, time.monotonic_ns()
            os.kill(victim.processes[0].pid, signal.SIGKILL)

            def others() -> list[Life]:
                watch.poll()
                return [life for life in watch.newest() if life.member.group != killed]

            def after(life: Life) -> list[int]:
                # Steps that were complete before, or whose exchange was, count for nothing.
                return [commit.at_ns for commit in life.commits if commit.at_ns > struck and commit.step > step + 1]

            if not until(lambda: all(after(life) for life in others()), patience):
                return f"not on within {patience:.0f} s", "-"
            words = "; ".join(
                f"{life.member.group} goes on after {(after(life)[0] - struck) / 1e9:.2f} s" for life in others()
            )

            def back() -> bool:
                life = watch.life(killed)
                return settled() and life is not None and life.member.incarnation > victim.member.incarnation

            if not until(back, patience):
                return words, f"not back within {patience:.0f} s"
            return words, f"all three step together {(time.monotonic_ns() - struck) / 1e9:.1f} s after its death"
        finally:
            run.stop()
            watch.close()


# --- all of it ------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heartbeat", type=int, default=10, help="seconds, of jax.distributed (its default is 100)")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds that is waited for anything")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of trials, from 1")
    for name in ("address", "process"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS, type=int if name == "process" else str)
    for name in ("recoverable", "collectives", "group"):
        parser.add_argument(f"--{name}", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.group:
        group(args)
        return
    if args.address:
        process(args)
        return
    from importlib.metadata import version

    print(
        f"jax {version('jax')}, jaxlib {version('jaxlib')}, {SIZE} processes on a CPU, heartbeats of jax.distributed "
        f"missed for {args.heartbeat} s\n"
    )
    print("| what | killed | the others | the killed one, started again |\n|---|---|---|---|")
    number = 0
    for trial in TRIALS:
        number += 1
        if not args.only or number in args.only:
            words = of_jax(trial, args.heartbeat, args.patience)
            print(f"| {trial.what} | {trial.killed} | {' | '.join(words)} |", flush=True)
    for killed in (2, 0):
        number += 1
        if not args.only or number in args.only:
            print(f"| planaria.jax | {killed} | {' | '.join(of_planaria(killed, args.patience))} |", flush=True)


if __name__ == "__main__":
    main()
