"""RunPlan -> the `deepspeed` line of each host, the node launcher's argv, and a script a person can paste.

Commands are lists. They are quoted once, for display and for `command.sh`.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.planning.hosts import contiguous
from launcher.planning.secrets import is_secret
from launcher.rundir import RunDir
from launcher.spec import RunPlan


def deepspeed_argv(
    included: Sequence[str], node_rank: int, *, run_dir: str, master_addr: str, master_port: int | None
) -> tuple[str, ...]:
    """The line that starts one host's ranks without the launcher, to be typed on that host."""
    run = RunDir(Path(run_dir))
    port = [] if master_port is None else ["--master_port", str(master_port)]
    return (
        "deepspeed",
        *("--hostfile", str(run.hostfile)),
        *included,
        "--no_ssh",
        *("--node_rank", str(node_rank)),
        *("--master_addr", master_addr),
        *port,
        "--no_local_rank",
        *("--module", *_training(run)),
    )


def with_port(plan: RunPlan, master_port: int | None) -> RunPlan:
    """The plan with the port that ranks meet at, and the commands of its hosts; None leaves DeepSpeed's default."""
    included: tuple[str, ...] = ()
    if not all(contiguous(host) for host in plan.hosts):
        included = "--include", "@".join(f"{host.name}:{','.join(map(str, host.gpus))}" for host in plan.hosts)
    commands = {
        host.name: deepspeed_argv(
            included, rank, run_dir=plan.run_dir, master_addr=plan.master_addr, master_port=master_port
        )
        for rank, host in enumerate(plan.hosts)
    }
    return dataclasses.replace(plan, master_port=master_port, commands=commands)


def node_launcher_argv(plan: RunPlan, node_rank: int, python: str) -> list[str]:
    """What the `deepspeed` line of host `node_rank` would exec, DeepSpeed's node launcher: no shell, and torch is
    imported by ranks only."""
    if plan.master_port is None:
        raise ValueError("the plan has no master_port yet")
    world = {host.name: list(host.gpus) for host in plan.hosts}
    return [
        python,
        *("-u", "-m", "launcher.running.nodelaunch"),
        f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
        f"--master_addr={plan.master_addr}",
        f"--master_port={plan.master_port}",
        f"--node_rank={node_rank}",
        "--module",
        "--no_local_rank",
        *_training(RunDir(Path(plan.run_dir))),
    ]


def command_script(plan: RunPlan) -> str:
    """`command.sh`: the environment and the `deepspeed` line of each host; secrets are left to the reader."""
    lines = [
        "#!/bin/sh",
        "# Starts this run without the launcher. On each host, in the folder the run was started from:",
        f"#   sh {shlex.quote(str(RunDir(Path(plan.run_dir)).command))} NODE_RANK",
        *(f"#   NODE_RANK {rank} is {host.name}" for rank, host in enumerate(plan.hosts)),
    ]
    lines += _exports(plan.env)
    lines.append('case "${1:-0}" in')
    for rank, host in enumerate(plan.hosts):
        own = [f"    {line}" for line in _exports(plan.host_env.get(host.name, {}))]
        lines += [f"  {rank})", *own, f"    exec {shlex.join(plan.commands[host.name])}", "    ;;"]
    return "\n".join([*lines, "esac", ""])


def _exports(env: Mapping[str, str]) -> list[str]:
    return [
        f"# export {name}=...  a secret: set it yourself"
        if is_secret(name, value)
        else f"export {name}={shlex.quote(value)}"
        for name, value in env.items()
    ]


def _training(run: RunDir) -> tuple[str, ...]:
    return ("launcher.training", "train", "--plan", str(run.plan))
