"""What is given to Slurm, and what is read from it."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from planaria.engines.keeper import HostState
from planaria.engines.placing import life_in, name_of
from planaria.engines.slurm.commands import SlurmJob, environ_for, expand, parse
from planaria.engines.slurm.scripts import Template, options_given, render, whole
from planaria.errors import UsageError

TEMPLATE = Template(
    run="llama",
    planaria=("python", "-m", "planaria"),
    words=("--groups", "3", "--shards", "6"),
    script=("train.py", "--name", "it's $HOME"),
    directory=Path("/logs/a b"),
    cwd=Path("/home/x"),
    lighthouse=Path("/logs/a b/lighthouse.addr"),
)


def sbatch_lines(text: str) -> list[str]:
    """As sbatch splits them."""
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in lines for word in shlex.split(line.removeprefix("#SBATCH "))]


def run(text: str, code: int, tmp_path: Path, name: str = "n1") -> tuple[int, list[str]]:
    """Run a batch script where srun runs its command here, and planaria ends with ``code``: (exit code, its words)."""
    tools = {
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "scontrol": 'echo "NodeName=$3 NodeAddr=10.0.0.7 Port=1"',
        "python": f'printf "%s\\n" "$@" > "{tmp_path}/words"; env > "{tmp_path}/env"; exit {code}',
    }
    for tool, body in tools.items():
        (tmp_path / tool).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / tool).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": name, "SLURM_JOB_ID": "20042", "SLURM_NODEID": "1"}
    env["SLURM_JOB_NODELIST"] = "n[1-2]"
    done = subprocess.run(["bash", "-c", text], env=env, timeout=60)
    return done.returncode, (tmp_path / "words").read_text().splitlines()


def test_the_job_of_a_group(tmp_path: Path) -> None:
    text = render(TEMPLATE, 1, 4, avoid=["n9", "n3"])
    options = sbatch_lines(text)
    assert "--job-name=llama-rg1-i4" in options and "--no-requeue" in options and "--open-mode=append" in options
    assert "--output=/logs/a b/rg1-i4/slurm.log" in options
    assert "--exclude=n3,n9" in options
    code, words = run(text, 0, tmp_path)
    assert code == 0
    assert words[:8] == ["-m", "planaria", "run", "--groups", "3", "--shards", "6", "--job"]
    assert words[-7:] == ["--log-dir", "/logs/a b/rg1-i4", "--host", "10.0.0.7", "train.py", "--name", "it's $HOME"]
    assert words[words.index("--first-group") :][:4] == ["--first-group", "1", "--local-groups", "1"]


def test_what_the_environment_says_to_the_supervisor_is_not_said_to_agents(tmp_path: Path) -> None:
    for text in (render(TEMPLATE, 0, 0), whole(TEMPLATE, 3, ["python", "-m", "planaria"])):
        run(f"export PLANARIA_RUN_ENGINE=slurm PLANARIA_RUN_HTTP=:80 OTHER=1\n{text}", 0, tmp_path)
        env = (tmp_path / "env").read_text()
        assert "OTHER=1" in env and "PLANARIA_RUN_" not in env


def test_the_exit_code_of_the_agent_is_that_of_the_job(tmp_path: Path) -> None:
    for code in (1, 2, 75, 143):
        assert run(render(TEMPLATE, 0, 0), code, tmp_path)[0] == code


def test_what_the_first_node_said_counts_more_than_what_srun_makes_of_it(tmp_path: Path) -> None:
    template = replace(TEMPLATE, directory=tmp_path, nodes=2)
    (tmp_path / "rg0-i0").mkdir()
    (tmp_path / "rg0-i0" / "summary.json").write_text('{\n  "outcome": "failed",\n  "exit_code": 2,\n  "step": 7\n}\n')
    assert run(render(template, 0, 0), 143, tmp_path)[0] == 2


def test_a_group_of_several_nodes_meets_on_the_first(tmp_path: Path) -> None:
    several = replace(TEMPLATE, nodes=2)
    text = render(several, 0, 0)
    assert "--nodes=2" in sbatch_lines(text)
    _, words = run(text, 0, tmp_path)
    assert words[words.index("--nnodes") :][:6] == [
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--group-addr",
        "10.0.0.7:20042",
    ]


def test_names_of_files_are_no_patterns() -> None:
    assert "--output=/logs/50%%j/rg0-i0/slurm.log" in sbatch_lines(
        render(replace(TEMPLATE, directory=Path("/logs/50%j")), 0, 0)
    )


def test_options_of_sbatch_pass_through_and_ours_give_way() -> None:
    given = options_given(["--account=me", "signal=B:USR1@600", "exclusive", "p=gpu now", "exclude=n1"])
    options = sbatch_lines(render(replace(TEMPLATE, sbatch=given), 0, 0, avoid=["n2"]))
    assert [option for option in options if "signal" in option] == ["--signal=B:USR1@600"]
    assert {"--account=me", "--exclusive", "--partition=gpu now", "--exclude=n1,n2"} <= set(options)


@pytest.mark.parametrize("text", ["", "=3", "two words", "a=1\n#SBATCH --b", "array=0-3", "requeue", "J=x"])
def test_what_is_no_option_or_is_ours_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--sbatch"):
        options_given([text])


def test_names_lead_back_to_lives() -> None:
    assert life_in(name_of("a-rg1-i2", 3, 45), "a-rg1-i2") == (3, 45)
    assert life_in("llama-rg3-i1", "llam") is None
    assert life_in("llama-rg3", "llama") is None


def test_what_squeue_says() -> None:
    text = """\
17|r-rg0-i0|RUNNING|0|n1|2026-11-28T20:46:50|N/A|None|
18|r-rg1-i0|PENDING|0||N/A|N/A|QOSMaxJobsPerUserLimit|
19|r-rg2-i0|FAILED|512|n2|2026-11-28T20:46:50|2026-11-28T20:47:50|NonZeroExitCode|
20|r-rg2-i1|CANCELLED|15|n[2-3]|2026-11-28T20:46:50|2026-11-28T20:47:50|None|
21|r-rg2-i2|NODE_FAIL|0|n3|2026-11-28T20:46:50|2026-11-28T20:47:50|NodeDown|
22|r-rg2-i3|COMPLETING|0|n3|2026-11-28T20:46:50|2026-11-28T20:47:50|None|
23|r-rg2-i4|FAILED|0:9|n3|2026-11-28T20:46:50|2026-11-28T20:47:50|None|
24|r-rg2-i5|COMPLETED|0|n3|2026-11-28T20:46:50|2026-11-28T20:47:50|None|
slurm_load_jobs error: something
"""
    jobs = {job.id: job for job in parse(text)}
    assert len(jobs) == 8
    assert (jobs["17"].state, jobs["17"].nodes) == (HostState.RUNNING, ("n1",))
    assert (jobs["18"].state, jobs["18"].reason) == (HostState.PENDING, "QOSMaxJobsPerUserLimit")
    assert (jobs["19"].state, jobs["19"].exit_code, jobs["19"].reason) == (HostState.ENDED, 2, "FAILED, exit code 2")
    assert (jobs["20"].exit_code, jobs["20"].nodes, jobs["20"].lost) == (143, ("n2", "n3"), False)
    assert (jobs["21"].exit_code, jobs["21"].lost) == (None, True)
    assert jobs["22"].state is HostState.RUNNING, "it may still be leaving in order"
    assert jobs["23"].exit_code == 137
    assert jobs["24"] == SlurmJob("24", "r-rg2-i5", HostState.ENDED, ("n3",), 0, jobs["24"].since, "COMPLETED")


@pytest.mark.parametrize(
    "state", ["RESV_DEL_HOLD", "POWER_UP_NODE", "EXPEDITING", "REQUEUED", "CONFIGURING", "SPECIAL_EXIT"]
)
def test_who_waits_has_not_ended(state: str) -> None:
    (job,) = parse(f"7|r-rg0-i0|{state}|0||N/A|N/A|None|\n")
    assert (job.state, job.exit_code) == (HostState.PENDING, None)


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "UPDATE_DB", "NEW_IN_30"])
def test_a_state_that_nobody_knows_is_no_end(state: str) -> None:
    (job,) = parse(f"7|r-rg0-i0|{state}|0|n1|2026-11-28T20:46:50|N/A|None|\n")
    assert (job.state, job.exit_code) == (HostState.RUNNING, None)


@pytest.mark.parametrize("state", ["FAILED", "OUT_OF_MEMORY", "BOOT_FAIL", "NODE_FAIL", "LAUNCH_FAILED"])
def test_only_who_has_completed_has_ended_in_peace(state: str) -> None:
    """A script that never began has said nothing, and the exit code is 0."""
    (job,) = parse(f"7|r-rg0-i0|{state}|0|n1|2026-11-28T20:46:50|2026-11-28T20:46:51|None|\n")
    assert (job.state, job.exit_code) == (HostState.ENDED, None)


def test_what_the_environment_says_to_slurm_is_not_said_by_it_instead_of_us() -> None:
    mine = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "SBATCH_ACCOUNT": "me", "SBATCH_PARTITION": "gpu"}
    others = {
        "SBATCH_JOB_NAME": "x",
        "SBATCH_ARRAY_INX": "0-9",
        "SQUEUE_PARTITION": "debug",
        "SCANCEL_STATE": "PENDING",
    }
    around = {"SLURM_JOB_ID": "7", "SLURM_MEM_PER_NODE": "2048", "SRUN_CPUS_PER_TASK": "1", "SLURM_EXPORT_ENV": "NONE"}
    assert environ_for("sbatch", mine | others | around) == mine | {"SLURM_TIME_FORMAT": "standard"}
    assert environ_for("sbatch", {"SLURM_DEBUG": "1"})["SLURM_DEBUG"] == "1", "there is no job around it"
    seen = environ_for("squeue", mine | others)
    assert not [name for name in seen if name.startswith(("SQUEUE_", "SCANCEL_"))]
    assert environ_for("squeue", {"SLURM_TIME_FORMAT": "relative"})["SLURM_TIME_FORMAT"] == "standard"


def test_lists_of_hosts() -> None:
    assert expand("n1") == ["n1"]
    assert expand("gpu[08-10,12],login,r[1-2]c[1,3]") == [
        *("gpu08", "gpu09", "gpu10", "gpu12", "login"),
        *("r1c1", "r1c3", "r2c1", "r2c3"),
    ]
    assert expand("") == []
