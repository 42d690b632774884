"""Commands and environment: DeepSpeed's own parsers read our lines, shells give back our words."""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.planning.command import command_script, node_launcher_argv, with_port
from launcher.planning.describe import describe
from launcher.planning.facts import TextFile
from launcher.planning.hosts import render_hosts
from launcher.rundir import RunDir
from launcher.running.nodelaunch import Accelerator
from tests.planning_support import gpus, hostfile, plan

TRAINING = ["train", "--plan", "/home/me/runs/x/plan.json"]
PLANS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "one machine": (("run.name=x",), {}),
    "some GPUs": (("run.name=x", "gpus=2"), {"gpus": gpus(8)[3:7], "visible_devices": "3,4,5,6"}),
    "two hosts": (("run.name=x", "cluster.master_port=29511"), {"hostfile": hostfile("example")}),
    "fields": (("run.name=x",), {"hostfile": hostfile("example_fields")}),
    "slots": (("run.name=x", "gpus=[1,3]"), {"hostfile": hostfile("example")}),
    "unequal": (("run.name=x",), {"hostfile": TextFile(path="h", text="a slots=3 # three\r\n\tb\tslots=2\r\n")}),
    "addresses": (("run.name=x",), {"hostfile": TextFile(path="h", text="[2001:db8::1] slots=3\nme@n[1-2] slots=2")}),
}


@pytest.fixture(scope="module")
def runner() -> ModuleType:
    """DeepSpeed's front end."""
    return importlib.import_module("deepspeed.launcher.runner")


@pytest.mark.parametrize("name", PLANS)
def test_deepspeed_reads_our_hostfile_and_lines(name: str, runner: ModuleType, tmp_path: Path) -> None:
    words, facts = PLANS[name]
    made = plan(*words, **facts)
    file = tmp_path / "hostfile"
    file.write_text(render_hosts(made.hosts))
    for rank, host in enumerate(made.hosts):
        program, *argv = made.commands[host.name]
        assert program == "deepspeed"
        args = runner.parse_args(argv)
        assert args.hostfile == str(RunDir(Path(made.run_dir)).hostfile)
        pool = runner.fetch_hostfile(str(file))
        chosen = runner.parse_inclusion_exclusion(pool, args.include, args.exclude)
        assert dict(chosen) == {h.name: list(h.gpus) for h in made.hosts}
        assert (args.no_ssh, args.node_rank, args.no_local_rank, args.module) == (True, rank, True, True)
        assert (args.master_addr, args.master_port) == (made.master_addr, made.master_port or 29500)
        assert [args.user_script, *args.user_args] == ["launcher.training", *TRAINING]


def test_the_node_launcher_reads_our_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = importlib.import_module("deepspeed.launcher.launch")
    made = with_port(plan("run.name=x", "gpus=[1,3]", hostfile=hostfile("example")), 23456)
    program, unbuffered, flag, module, *argv = node_launcher_argv(made, 1, "/env/bin/python")
    assert (program, unbuffered, flag, module) == ("/env/bin/python", "-u", "-m", "launcher.running.nodelaunch")
    monkeypatch.setattr(sys, "argv", ["launch", *argv])
    args = launch.parse_args()
    assert json.loads(base64.urlsafe_b64decode(args.world_info)) == {"worker-1": [1, 3], "worker-2": [1, 3]}
    assert (args.node_rank, args.master_addr, args.master_port) == (1, "worker-1", 23456)
    assert (args.module, args.no_local_rank) == (True, True)
    assert [args.training_script, *args.training_script_args] == ["launcher.training", *TRAINING]
    with pytest.raises(ValueError, match="master_port"):
        node_launcher_argv(plan(), 0, "python")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_node_launcher_s_stand_in_answers_as_the_accelerator_does(kind: str) -> None:
    real = vars(importlib.import_module(f"deepspeed.accelerator.{kind}_accelerator"))[f"{kind.upper()}_Accelerator"]
    theirs: dict[str, str] = {}
    ours: dict[str, str] = {}
    real.set_visible_devices_envs(object.__new__(real), theirs, [2, 5])
    Accelerator().set_visible_devices_envs(ours, [2, 5])
    assert ours == theirs == {"CUDA_VISIBLE_DEVICES": "2,5"}
    assert Accelerator().visible_devices_envs() == real.visible_devices_envs(object.__new__(real))


def test_a_port_found_later_reaches_the_lines() -> None:
    made = with_port(plan(), 23456)
    assert made.master_port == 23456
    assert shlex.join(made.commands["localhost"]).count("--master_port 23456") == 1
    assert "meet at 127.0.0.1, port 23456" in describe(made)


VALUES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(value=VALUES, folder=st.text("a b'\"$`\\*é", min_size=1, max_size=8))
def test_the_script_gives_back_every_word(value: str, folder: str, tmp_path: Path) -> None:
    made = with_port(plan(f"run.dir={json.dumps(str(tmp_path))}"), 23456)
    made = with_port(dataclasses.replace(made, env={"VALUE": value}, run_dir=f"/runs/{folder}"), 23456)
    script = tmp_path / "command.sh"
    script.write_text(command_script(made))
    # A stand-in for `deepspeed` that shows what the shell hands to it.
    (tmp_path / "deepspeed").write_text(
        f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([sys.argv[1:], os.environ['VALUE']]))\n"
    )
    (tmp_path / "deepspeed").chmod(0o755)
    ran = subprocess.run(
        ["/bin/sh", str(script)], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    argv, seen = json.loads(ran.stdout)
    assert argv == list(made.commands["localhost"][1:])
    assert seen == value


def test_the_script_knows_its_node_and_keeps_secrets() -> None:
    made = plan("env.set.HF_TOKEN=hf_secret", hostfile=hostfile("example"))
    script = command_script(made)
    assert "hf_secret" not in script
    assert "# export HF_TOKEN=" in script
    assert made.env["HF_TOKEN"] == "hf_secret"
    for rank, host in enumerate(made.hosts):
        assert f"  {rank})\n    exec {shlex.join(made.commands[host.name])}\n" in script
    own = {"worker-2": {"NCCL_SOCKET_IFNAME": "eth 1", "X_TOKEN": "hidden"}}
    script = command_script(dataclasses.replace(made, host_env=own))
    exports = "    export NCCL_SOCKET_IFNAME='eth 1'\n    # export X_TOKEN=...  a secret: set it yourself\n"
    assert f"  1)\n{exports}    exec" in script
    assert script.count("NCCL_SOCKET_IFNAME") == 1
