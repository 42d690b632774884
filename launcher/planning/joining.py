"""A run whose launchers are started on every node by something else: what a follower takes from node rank 0, and the
lines that a person types for the other nodes. Pure."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import ConfigError, Problem
from launcher.planning.command import with_port
from launcher.planning.secrets import is_secret
from launcher.spec import RunPlan

# Variables that node rank 0 may set for the ranks of another node: what its checks found out, nothing that names code.
GIVEN = re.compile(
    r"(NCCL|GLOO|TP|UCX|FI)_[A-Z0-9_]*(IFNAME|FAMILY|HCA|GID_INDEX|HOSTID|DEVICES)|(OMP|MKL)_NUM_THREADS"
    r"|NCCL_(IB_DISABLE|IB_PCI_RELAXED_ORDERING|P2P_DISABLE|P2P_LEVEL|SOCKET_NTHREADS|NSOCKS_PERTHREAD|TOPO_FILE)"
    r"|NCCL_(SOCKET_NTHREADS|NSOCKS_PERTHREAD|IB_DISABLE|IB_PCI_RELAXED_ORDERING|P2P_DISABLE|P2P_LEVEL|TOPO_FILE)"
)
_ADDRESS = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")
_WORD = re.compile(r"[A-Za-z0-9_.:+-]{1,100}")
_STEP = re.compile(r"step-[0-9]+")


def settled(plan: RunPlan, said: Mapping[str, Any], node_rank: int) -> RunPlan:
    """The follower's own plan with what only node rank 0 knows: names, places and network settings, no command.

    ConfigError when the run lies where this node keeps none, ValueError for what node rank 0 would never say.
    """
    host = plan.hosts[node_rank].name
    port, cores = said.get("master_port"), said.get("cores", [])
    if type(port) is not int or not 0 < port < 65536:
        raise ValueError(f"master_port {port!r}")
    if not isinstance(cores, list) or not all(isinstance(c, list) and all(type(n) is int for n in c) for c in cores):
        raise ValueError(f"cores {cores!r}")
    settled = dataclasses.replace(
        plan,
        run_id=_text(said, "run_id", _WORD),
        created_at=_text(said, "created_at", _WORD),
        run_dir=_run_dir(plan, said.get("run_dir")),
        master_addr=_text(said, "master_addr", _ADDRESS),
        host_env={host: _env(said.get("host_env", {}))},
        cores={host: tuple(map(tuple, cores))} if cores else {},
    )
    resume_from = _resume_from(plan, settled, said.get("resume_from"))
    return with_port(dataclasses.replace(settled, resume_from=resume_from), port)


def _text(said: Mapping[str, Any], name: str, form: re.Pattern[str]) -> str:
    value = said.get(name)
    if not isinstance(value, str) or not form.fullmatch(value):
        raise ValueError(f"{name} {value!r}")
    return value


def _run_dir(plan: RunPlan, run_dir: Any) -> str:
    own, run = Path(plan.run_dir), plan.config.run
    if not isinstance(run_dir, str) or not run_dir.startswith("/") or ".." in Path(run_dir).parts:
        raise ValueError(f"run_dir {run_dir!r}")
    free = run.dir is None and run.name is None and plan.config.resume is None
    if Path(run_dir) == own or (free and Path(run_dir).parent == own.parent):
        return run_dir
    text = f"node rank 0 keeps this run in {run_dir}, and this node would keep it in {own}"
    tries = ("start the command in the same folder on every node", f"run.root={Path(run_dir).parent}   on every node")
    raise ConfigError(Problem(text, tries=tries))


def _env(given: Any) -> dict[str, str]:
    if not isinstance(given, dict):
        raise ValueError("host_env")
    for name, value in given.items():
        if not GIVEN.fullmatch(name) or not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
            raise ValueError(f"{name} among host_env")
    return dict(given)


def _resume_from(own: RunPlan, settled: RunPlan, where: Any) -> str | None:
    """A checkpoint that this node has found itself, or one of this very run."""
    if where is None or where == own.resume_from:
        return own.resume_from if where is not None else None
    path = Path(where) if isinstance(where, str) else Path()
    if path.parent != Path(settled.run_dir, "checkpoints") or not _STEP.fullmatch(path.name):
        raise ValueError(f"resume_from {where!r}")
    return str(path)


def join_lines(
    plan: RunPlan, words: Sequence[str], *, address: str, port: int, cwd: str, python: str
) -> tuple[list[str], list[str]]:
    """For each node but the first, the line that starts its launcher; and variables that a person sets there first.

    `words` are those of this run, in a form that means the same from every folder, as `CommandLine.recorded` gives.
    """
    secrets = {name for name, value in plan.env.items() if is_secret(name, value) and _is_given(plan, name)}
    words = [w for w in words if not w.startswith("cluster.transport=") and _variable(w) not in secrets]
    passed = {
        name: value
        for name, value in plan.env.items()
        if plan.env_sources.get(name) == "forwarded" and name not in secrets
    }
    lines = []
    for rank in range(1, len(plan.hosts)):
        meet = {"NNODES": len(plan.hosts), "NODE_RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": port}
        assigned = [f"{name}={shlex.quote(str(value))}" for name, value in {**passed, **meet}.items()]
        command = [python, "-m", "launcher", *words, "cluster.transport=env"]
        lines.append(f"cd {shlex.quote(cwd)} && {' '.join(assigned)} {shlex.join(command)}")
    return lines, sorted(secrets)


def _is_given(plan: RunPlan, name: str) -> bool:
    return plan.env_sources.get(name) in ("forwarded", "env.set")


def _variable(word: str) -> str:
    key = word.partition("=")[0]
    return key.removeprefix("env.set.") if key.startswith("env.set.") else ""
