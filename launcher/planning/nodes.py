"""What a scheduler tells the processes it starts: an allocation of hosts, and which node of several this is.

Pure: the environment is a value. Names of variables are those of torchrun (NNODES ...), PyTorchJob (PET_NNODES ...,
or RANK and WORLD_SIZE counted in nodes) and Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.errors import ConfigError, Problem
from launcher.planning.ranges import MAX_HOSTS, expand_list

NUM_NODES = ("NNODES", "PET_NNODES")
NODE_RANK = ("NODE_RANK", "PET_NODE_RANK")
MASTER_ADDR = ("MASTER_ADDR", "PET_MASTER_ADDR")
MASTER_PORT = ("MASTER_PORT", "PET_MASTER_PORT")
_TRY = "NNODES=2 NODE_RANK=0 MASTER_ADDR=HOST MASTER_PORT=29500   (each node with its own NODE_RANK)"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeIdentity:
    """Which of several nodes this is, where the same command is started on every one."""

    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int | None  # None: not told
    hosts: tuple[str, ...] = ()  # their names by rank; empty: not told


@dataclass(frozen=True, kw_only=True, slots=True)
class Allocation:
    """The hosts that Slurm has given to the job we run in."""

    job_id: str
    hosts: tuple[str, ...]  # in Slurm's order: SLURM_NODEID counts them
    gpus: int | None  # on each host; None: not told, or none asked for


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The Slurm job around this process, None outside of one. Raises ConfigError for a list that cannot be read."""
    job, nodes = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not job or not nodes:
        return None
    try:
        hosts = tuple(expand_list(nodes))
    except ValueError as error:
        text = f"SLURM_JOB_NODELIST={nodes}: {error}"
        raise ConfigError(Problem(text, "environment", ("cluster.hostfile=FILE", "unset SLURM_JOB_ID"))) from None
    return Allocation(job_id=job, hosts=hosts, gpus=_slurm_gpus(environ, len(hosts)))


def node_identity(environ: Mapping[str, str]) -> NodeIdentity | None:
    """Which node this is, None when no variable says so. Raises ConfigError that names what is missing or wrong."""
    count, rank = _first(environ, *NUM_NODES), _first(environ, *NODE_RANK)
    if count is None and rank is None:
        if environ.get("SLURM_NODEID") and environ.get("SLURM_JOB_ID"):
            return _of_slurm(environ)
        if "LOCAL_RANK" not in environ:  # there they count processes
            count, rank = _first(environ, "WORLD_SIZE"), _first(environ, "RANK")
    if count is None and rank is None:
        return None
    address, port = _first(environ, *MASTER_ADDR), _first(environ, *MASTER_PORT)
    needed = {"NNODES": count, "NODE_RANK": rank, "MASTER_ADDR": address}
    missing = [name for name, found in needed.items() if found is None]
    if missing:
        raise _wrong(f"{', '.join(missing)} must be set too, where the same command is started on every node")
    assert count is not None
    assert rank is not None
    assert address is not None
    num_nodes = _number(count, 1, MAX_HOSTS)
    return NodeIdentity(
        node_rank=_number(rank, 0, num_nodes - 1),
        num_nodes=num_nodes,
        master_addr=address[1],
        master_port=None if port is None else _number(port, 1, 65535),
    )


def need_identity(environ: Mapping[str, str]) -> NodeIdentity:
    """As `node_identity`, and nothing at all is a ConfigError too."""
    identity = node_identity(environ)
    if identity is None:
        names = "NNODES, NODE_RANK and MASTER_ADDR"
        raise _wrong(f"cluster.transport=env needs {names} of this node, and none of them is set")
    return identity


def _of_slurm(environ: Mapping[str, str]) -> NodeIdentity | None:
    """From what srun sets for each task."""
    job = allocation(environ)
    if job is None:
        return None
    steps = environ.get("SLURM_STEP_NODELIST")  # srun may use a part of the job's hosts
    hosts = tuple(expand_list(steps)) if steps else job.hosts
    tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks.isdigit() and int(tasks) > len(hosts):
        text = f"srun starts {tasks} tasks on {len(hosts)} nodes, and one launcher a node is wanted"
        raise ConfigError(Problem(text, "environment", ("srun --ntasks-per-node=1",)))
    address, port = _first(environ, *MASTER_ADDR), _first(environ, *MASTER_PORT)
    return NodeIdentity(
        node_rank=_number(("SLURM_NODEID", environ["SLURM_NODEID"]), 0, len(hosts) - 1),
        num_nodes=len(hosts),
        master_addr=address[1] if address else hosts[0],
        master_port=None if port is None else _number(port, 1, 65535),
        hosts=hosts,
    )


def _slurm_gpus(environ: Mapping[str, str], num_hosts: int) -> int | None:
    """GPUs of each host: of this one, as asked for a host, or an equal part of the job's."""
    on_node, listed = environ.get("SLURM_GPUS_ON_NODE", ""), environ.get("SLURM_JOB_GPUS", "")
    each, total = environ.get("SLURM_GPUS_PER_NODE", ""), environ.get("SLURM_GPUS", "")
    if re.fullmatch(r"[0-9]+", on_node):
        return int(on_node) or None
    if re.fullmatch(r"[0-9]+(,[0-9]+)*", listed):
        return len(listed.split(","))
    if match := re.fullmatch(r"(?:[^:]+:)?([0-9]+)", each):  # 8, or h100:8
        return int(match.group(1)) or None
    match = re.fullmatch(r"(?:[^:]+:)?([0-9]+)", total)
    return int(match.group(1)) // num_hosts or None if match and int(match.group(1)) % num_hosts == 0 else None


def _first(environ: Mapping[str, str], *names: str) -> tuple[str, str] | None:
    """The first variable of `names` that is set, and its value."""
    return next(((name, environ[name].strip()) for name in names if environ.get(name, "").strip()), None)


def _number(found: tuple[str, str], low: int, high: int) -> int:
    name, value = found
    if not re.fullmatch(r"[0-9]{1,9}", value):
        remark = ": the number of nodes cannot change during a run" if re.fullmatch(r"[0-9]+:[0-9]+", value) else ""
        raise _wrong(f"{name}={value} is no whole number{remark}")
    if not low <= int(value) <= high:
        raise _wrong(f"{name}={value} must be from {low} to {high}")
    return int(value)


def _wrong(text: str) -> ConfigError:
    return ConfigError(Problem(text, "environment", (_TRY,)))
