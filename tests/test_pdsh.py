"""Real pdsh and DeepSpeed's real runner, with light ranks: what travels, who failed, and that nothing is left."""

from __future__ import annotations

import dataclasses
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import ConfigError, MachineError
from launcher.planning.facts import TextFile
from launcher.rundir import RunDir, complete_checkpoints, read_json
from launcher.running import pdsh
from launcher.spec import RunPlan
from tests.cluster import Cluster, await_that
from tests.planning_support import plan as plan_of

REPO = Path(__file__).resolve().parent.parent
LIGHT = REPO / "tests" / "processes" / "light"
WORDS = (
    *("cluster.transport=pdsh", "env.set.DS_ACCELERATOR=cpu", "checkpoint.export=false", "run.name=r"),
    *("logging.monitor_every_s=null", "cluster.stop_grace_s=20", "cluster.sync=none"),
)


def planned(folder: Path, *words: str, lines: str = "n1 slots=1\nn2 slots=1\n") -> RunPlan:
    hosts = TextFile(path="hosts", text=lines)
    plan = plan_of(
        "cluster.transport=pdsh", "cluster.hostfile=hosts", "env.set.DS_ACCELERATOR=cpu", *words, hostfile=hosts
    )
    return dataclasses.replace(plan, run_dir=str(folder), master_addr="n1", master_port=29500)


@pytest.fixture(autouse=True)
def _plain_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")


@pytest.mark.parametrize("name", ["a run", "a;id", "$HOME", "50%", "it's", "*", "é"])
def test_a_folder_that_a_shell_would_change_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="shells on the hosts would change"):
        pdsh.check_pdsh(planned(tmp_path / name))


@pytest.mark.parametrize(
    ("words", "lines", "said"),
    [
        ((), "n1 slots=1 port=2222\n", "cannot take port=2222 of n1"),
        ((), "me@n1 slots=1\n", "cannot take user=me of n1"),
        ((), "fe80::1 slots=1\n", "IPv6 address"),
        (("cluster.activate=/opt/act",), "n1 slots=1\n", "cluster.activate has no effect"),
        (("cluster.wrap=[nice]",), "n1 slots=1\n", "cluster.wrap has no effect"),
        (("env.set.LD_LIBRARY_PATH='/a b'",), "n1 slots=1\n", "LD_LIBRARY_PATH has characters"),
    ],
)
def test_what_pdsh_cannot_do_is_refused(tmp_path: Path, words: tuple[str, ...], lines: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        pdsh.check_pdsh(planned(tmp_path / "r", *words, lines=lines))
    assert said in str(raised.value)
    assert "cluster.transport=ssh" in str(raised.value)


def program(folder: Path, name: str, says: str) -> Path:
    file = folder / name
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    file.chmod(0o755)
    return folder


def test_without_pdsh_the_line_that_installs_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T12."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="apt-get install pdsh"):
        pdsh.check_pdsh(planned(tmp_path / "r"))


def test_a_pdsh_without_ssh_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T13: pdsh defaults to rsh."""
    program(tmp_path, "pdsh", "pdsh-2.31 (+debug)\nrcmd modules: rsh,exec (default: rsh)")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(MachineError, match="rsh, exec"):
        pdsh.check_pdsh(planned(tmp_path / "r"))


def test_pdsh_is_told_to_end_all_when_it_knows_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T19: the user's own options are passed on."""
    program(tmp_path, "pdsh", "Usage: pdsh\n-k                fail fast on connect failure or non-zero return code")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert pdsh.pdsh_words(["-u", "5"]) == ["-k", "-u", "5"]
    program(tmp_path, "pdsh", "Usage: pdsh\n-h                output usage menu and quit")
    assert pdsh.pdsh_words([]) == []


def test_the_runner_exports_only_what_shells_leave_alone(tmp_path: Path) -> None:
    """T03 T08 T13: secrets and what a shell would change travel otherwise; PDSH_SSH_ARGS_APPEND is extended."""
    words = (
        "env.set.WANDB_NOTES='a $(id)'",
        "env.set.MY_TOKEN=hush",
        "env.set.PART=50%h",
        "env.set.LD_LIBRARY_PATH=/l:/m",
    )
    plan = planned(tmp_path, *words)
    pdsh.write_env_file(plan)
    file = tmp_path / pdsh.ENV_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    lines = file.read_text().splitlines()
    assert {"LD_LIBRARY_PATH=/l:/m", f"LAUNCHER_RUN_ID={plan.run_id}", "DS_ACCELERATOR=cpu"} <= set(lines)
    assert not [line for line in lines if line.startswith(("WANDB_NOTES", "MY_TOKEN", "PART"))]
    assert all("=" in line and line.strip() for line in lines)
    environ = {"PYTHONSTARTUP": "$(id)", "NCCL_X": "`id`", "PDSH_SSH_ARGS_APPEND": "-v", "HOME": "/h"}
    env = pdsh.runner_environment(plan, environ)
    assert "PYTHONSTARTUP" not in env and "NCCL_X" not in env and env["HOME"] == "/h"
    assert env["PDSH_RCMD_TYPE"] == "ssh"
    assert env["PDSH_SSH_ARGS_APPEND"].startswith("-v -o")
    assert env["DS_ENV_FILE"] == str(file)


@pytest.fixture
def started(cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    """Start a run on two hosts from the head, which is none of them."""

    def start(*words: str, **variables: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "launcher", *WORDS, f"cluster.hostfile={cluster.hostfile()}", *words]
        env = {"PYTHONPATH": f"{LIGHT}:{REPO}", **variables}
        return cluster.head.popen(argv, cwd=tmp_path, env=env, stdout=-1, stderr=-1, text=True)

    yield start
    cluster.clear()


def test_a_rank_that_fails_ends_all_and_its_environment_was_what_was_declared(
    cluster: Cluster, tmp_path: Path, started: Any
) -> None:
    """T01 T03: through DeepSpeed's runner too."""
    odd = {"WANDB_NOTES": "a\nb $(id) %h 'c\"", "MLFLOW_NOTE": "`id`", "HF_HOME": "/data/hf"}
    process = started("train.max_steps=9999", "env.set.DEED=1:kill9", **odd, HF_TOKEN="hush", OTHER="x")
    out, errors = process.communicate(timeout=90)
    run = RunDir(tmp_path / "runs" / "r")
    assert process.returncode == 4, out + errors
    first = read_json(run.outcome)["first_failure"]
    assert (first["host"], first["rank"], first["signal"]) == ("n2", 1, signal.SIGKILL), out
    for rank in (0, 1):
        env = read_json(run.path / f"env.{rank}.json")
        assert {name: env.get(name) for name in odd} == odd
        assert "OTHER" not in env
    assert [path for path in run.path.rglob("*") if path.is_file() and b"hush" in path.read_bytes()] == []
    await_that(lambda: not [pid for host in cluster.hosts for pid in host.pids()], 5, lambda: out)


def test_ctrl_c_stops_and_saves(cluster: Cluster, tmp_path: Path, started: Any) -> None:
    process, run = started("train.max_steps=9999"), RunDir(tmp_path / "runs" / "r")
    await_training(run)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130, out + errors
    assert len(complete_checkpoints(run)) == 1
    assert [path.read_text() for path in run.logs.glob("*.log") if "Killing subprocess" in path.read_text()] == []


def test_a_killed_pdsh_is_no_success(cluster: Cluster, tmp_path: Path, started: Any) -> None:
    """DeepSpeed leaves with 0 then, and all ranks go on."""
    process, run = started("train.max_steps=9999"), RunDir(tmp_path / "runs" / "r")
    await_training(run)
    [number] = [pid for pid in cluster.head.pids() if Path(f"/proc/{pid}/comm").read_text().startswith("pdsh")]
    os.kill(number, signal.SIGKILL)
    out, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, 130, 143), out + errors
    assert "runner has left with exit code 0" in out
    await_that(lambda: not [pid for host in cluster.hosts for pid in host.pids()], 5, lambda: out)


def test_a_host_that_pdsh_cannot_reach_is_named(cluster: Cluster, tmp_path: Path, started: Any) -> None:
    config = tmp_path / "ssh_config"  # of pdsh alone
    own = f"IdentityFile {cluster.ssh}/id_ed25519\nUserKnownHostsFile {cluster.ssh}/known_hosts\n"
    config.write_text(f"{own}Host n2\n  Port 1\n")
    process, begun = started(PDSH_SSH_ARGS_APPEND=f"-F {config}"), time.monotonic()
    out, errors = process.communicate(timeout=60)
    first = read_json(tmp_path / "runs" / "r" / "outcome.json")["first_failure"]
    assert process.returncode not in (0, 130, 143), out + errors
    assert first["host"] == "n2", out
    assert time.monotonic() - begun < 40
    await_that(lambda: not [pid for host in cluster.hosts for pid in host.pids()], 5, lambda: out)


def await_training(run: RunDir) -> None:
    """Wait until both ranks take steps; before that they are killed rather than asked to save."""

    def states() -> list[str]:
        return [str(read_json(run.rank(rank))["state"]) for rank in (0, 1) if run.rank(rank).exists()]

    await_that(lambda: states() == ["running"] * 2, 60, lambda: f"{states()}: {list(run.path.rglob('*'))}")
