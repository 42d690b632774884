"""Which hosts there are to choose from, and who knows: a hostfile, Slurm, each node's variables, this machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from launcher.errors import ConfigError, Problem
from launcher.planning.facts import Facts
from launcher.planning.hosts import is_loopback, parse_hostfile
from launcher.planning.nodes import Allocation, allocation, need_identity, node_identity
from launcher.planning.selection import slots_of
from launcher.spec import Host, RunConfig

LOCAL = "localhost"
DEFAULT_GPUS = 8
DEFAULT_CPU_RANKS = 2
CPU_TRY = "env.set.DS_ACCELERATOR=cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Hosts before include, exclude, nodes and gpus choose among them."""

    hosts: tuple[Host, ...]
    kind: str  # hostfile | slurm | nodes | queue | here | assumed
    name: str  # how a person calls the source
    device: str  # cuda | cpu
    like_here: bool = False  # this machine's GPUs tell about those of the hosts
    joined: int | None = None  # nodes that have started this command already


def find_pool(config: RunConfig, facts: Facts, *, cpu_only: bool) -> Pool:
    """The first source that knows hosts; `cpu_only`: GPUs are not to be used anywhere.

    Raises ConfigError when the source that was asked for knows none.
    """
    asked, file = config.cluster.transport, facts.hostfile
    if file is not None and config.cluster.hostfile is not None:
        return _from_hostfile(config, facts, cpu_only)
    if asked == "env":
        return _from_nodes(config, facts)
    job = None if asked == "local" else allocation(facts.environ)
    if job is not None:
        return _from_slurm(config, facts, job, cpu_only)
    if asked == "slurm":
        return _from_queue(config, cpu_only)
    if file is not None and asked != "local":
        return _from_hostfile(config, facts, cpu_only)
    return _without_names(config, facts, cpu_only)


def _without_names(config: RunConfig, facts: Facts, cpu_only: bool) -> Pool:
    """Nobody names hosts."""
    asked, nodes = config.cluster.transport, 1 if config.nodes is None else config.nodes
    if asked == "manual":
        return _from_hands(config, facts, cpu_only)
    if asked != "local" and (nodes > 1 or (config.cluster.gpu is not None and not facts.gpus)):
        return _assumed(config, nodes, cpu_only)
    if asked in ("ssh", "pdsh"):
        text = f"cluster.transport={asked} needs hosts, and none is named"
        raise ConfigError(Problem(text, "", ("cluster.hostfile=FILE", "cluster.transport=local")))
    if asked == "auto":
        _refuse_one_of_several(facts)
    return _this_machine(config, facts)


def is_this_machine(host: Host, hostname: str, addresses: tuple[str, ...] = ()) -> bool:
    """Whether `host` is the machine called `hostname` with these addresses, as far as names tell."""
    name = host.name.lower()
    named = is_loopback(name) or name in (hostname.lower(), hostname.lower().partition(".")[0])
    return named or name in addresses or host.address in addresses


def _from_hostfile(config: RunConfig, facts: Facts, cpu_only: bool) -> Pool:
    assert facts.hostfile is not None
    path = facts.hostfile.path
    hosts = parse_hostfile(facts.hostfile.text, path)
    here = all(is_this_machine(host, facts.hostname, facts.addresses) for host in hosts)
    cpu = cpu_only or (here and not facts.gpus and config.cluster.gpu is None)
    joined = need_identity(facts.environ).num_nodes if config.cluster.transport == "env" else None
    return Pool(hosts=hosts, kind="hostfile", name=path, device="cpu" if cpu else "cuda", like_here=here, joined=joined)


def _this_machine(config: RunConfig, facts: Facts, name: str = "this machine") -> Pool:
    # Slot numbers count the visible GPUs from 0, as CUDA does.
    host = Host(name=LOCAL, gpus=_slots_like_here(config, facts))
    return Pool(hosts=(host,), kind="here", name=name, device=_device(facts), like_here=True)


def _from_slurm(config: RunConfig, facts: Facts, job: Allocation, cpu_only: bool) -> Pool:
    _refuse_one_of_many_tasks(facts)
    name, inside = f"Slurm job {job.job_id}", _short(facts.hostname) in map(_short, job.hosts)
    if inside and len(job.hosts) == 1 and config.cluster.transport == "auto":
        return _this_machine(config, facts, f"this machine ({name})")
    device = "cuda"
    if cpu_only or (inside and not facts.gpus and job.gpus is None):
        slots, device = _slots_like_here(config, dataclasses.replace(facts, gpus=())), "cpu"
    elif job.gpus is not None or inside:
        slots = tuple(range(job.gpus or len(facts.gpus)))
    elif config.gpus is not None:
        slots = slots_of(config.gpus)
    else:
        text = f"{name} does not say how many GPUs each host has"
        raise ConfigError(Problem(text, "", ("gpus=8", CPU_TRY)))
    hosts = tuple(Host(name=host, gpus=slots) for host in job.hosts)
    return Pool(hosts=hosts, kind="slurm", name=name, device=device, like_here=inside)


def _from_nodes(config: RunConfig, facts: Facts) -> Pool:
    """One command on every node: this one knows how many there are, and looks like the others."""
    identity = need_identity(facts.environ)
    names = identity.hosts or tuple(f"node{n}" for n in range(identity.num_nodes))
    slots = _slots_like_here(config, facts)
    hosts = [Host(name=name, gpus=slots) for name in names]
    if identity.master_addr != names[0]:
        hosts[0] = dataclasses.replace(hosts[0], address=identity.master_addr)
    return Pool(
        hosts=tuple(hosts),
        kind="nodes",
        name="the environment of each node",  # the same words on every node
        device=_device(facts),
        like_here=True,
        joined=identity.num_nodes,
    )


def _from_hands(config: RunConfig, facts: Facts, cpu_only: bool) -> Pool:
    """Somebody starts a line on each node."""
    if config.nodes is None:
        text = "cluster.transport=manual needs hosts, or how many there are"
        raise ConfigError(Problem(text, "", ("nodes=2", "cluster.hostfile=FILE")))
    if config.cluster.gpu is not None and not facts.gpus and not cpu_only:  # GPUs are there, if not here
        slots, device = slots_of(DEFAULT_GPUS if config.gpus is None else config.gpus), "cuda"
        name = f"nodes that you start by hand, taken to have {len(slots)} GPU{'s' if len(slots) != 1 else ''}"
    else:
        slots, device = _slots_like_here(config, facts), _device(facts)
        name = "nodes that you start by hand, taken to be like this machine"
    hosts = tuple(Host(name=f"node{n}", gpus=slots) for n in range(config.nodes))
    return Pool(hosts=hosts, kind="nodes", name=name, device=device, like_here=True)


def _from_queue(config: RunConfig, cpu_only: bool) -> Pool:
    """Outside an allocation the run is handed to Slurm, which picks hosts later."""
    if config.gpus is None and not cpu_only:
        text = "cluster.transport=slurm asks Slurm for GPUs, and must know how many a host"
        raise ConfigError(Problem(text, "", ("gpus=8", CPU_TRY)))
    slots = slots_of(DEFAULT_CPU_RANKS if config.gpus is None else config.gpus)
    hosts = tuple(Host(name=f"node{n}", gpus=slots) for n in range(config.nodes or 1))
    device = "cpu" if cpu_only else "cuda"
    return Pool(hosts=hosts, kind="queue", name="a Slurm job that is submitted", device=device)


def _assumed(config: RunConfig, nodes: int, cpu_only: bool) -> Pool:
    gpus = slots_of(DEFAULT_GPUS if config.gpus is None else config.gpus)
    hosts = tuple(Host(name=f"node{n}", gpus=gpus) for n in range(1, nodes + 1))
    return Pool(hosts=hosts, kind="assumed", name="assumed", device="cpu" if cpu_only else "cuda")


def _slots_like_here(config: RunConfig, facts: Facts) -> tuple[int, ...]:
    """Slots of this machine, and of nodes that are taken to be like it."""
    if facts.gpus:
        return tuple(range(len(facts.gpus)))
    return slots_of(DEFAULT_CPU_RANKS if config.gpus is None else config.gpus)


def _device(facts: Facts) -> str:
    return "cuda" if facts.gpus else "cpu"


def _short(name: str) -> str:
    return name.lower().partition(".")[0]


def _refuse_one_of_several(facts: Facts) -> None:
    """The same command on every node would be as many runs, each of which believes to be alone."""
    explicit = {"NNODES", "PET_NNODES"} & facts.environ.keys() and {"NODE_RANK", "PET_NODE_RANK"} & facts.environ.keys()
    identity = node_identity(facts.environ) if explicit else None
    if identity is not None and identity.num_nodes > 1:
        text = f"this is node {identity.node_rank} of {identity.num_nodes} by its environment, and no hosts are named"
        raise ConfigError(Problem(text, "", ("cluster.transport=env", "cluster.transport=local")))


def _refuse_one_of_many_tasks(facts: Facts) -> None:
    tasks = facts.environ.get("SLURM_STEP_NUM_TASKS", "")
    if tasks.isdigit() and int(tasks) > 1:
        text = f"srun has started this command {tasks} times; once is enough, and each host is reached from there"
        tries = ("python -m launcher ...   (without srun)", "cluster.transport=env   (with srun --ntasks-per-node=1)")
        raise ConfigError(Problem(text, "", tries))
