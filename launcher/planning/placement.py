"""Which hosts, how they are reached, which device and kind of GPU: from what is known, or assumed for planning."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from launcher.errors import ConfigError, Problem
from launcher.planning.facts import Facts, LocalGpu
from launcher.planning.gpus import GPU_KINDS, GpuKind, kind_of
from launcher.planning.hosts import contiguous, is_loopback
from launcher.planning.nodes import allocation, need_identity
from launcher.planning.pool import Pool, find_pool, is_this_machine
from launcher.planning.selection import filter_hosts, limit_gpus, names, take_nodes
from launcher.planning.visible import check_slots, through_visible, visible_warnings
from launcher.spec import Host, RunConfig

__all__ = ["Placement", "check_loopback", "is_this_machine", "meeting_address", "place"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where ranks run."""

    hosts: tuple[Host, ...]
    source: str  # a sentence
    assumed: bool
    transport: str  # local | ssh | env | manual | slurm | pdsh
    device: str  # cuda | cpu
    gpu_kind: str | None
    memory_bytes: int | None  # of one GPU, or of RAM for one CPU rank; None when unknown
    capability: tuple[int, int] | None
    warnings: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return sum(host.slots for host in self.hosts)


def place(config: RunConfig, facts: Facts, *, cpu_only: bool = False) -> Placement:
    """Choose hosts and device; everything wrong with the choice is one ConfigError.

    `cpu_only`: the declared environment keeps DeepSpeed from GPUs, on every host.
    """
    _check_combinations(config)
    facts = dataclasses.replace(facts, gpus=()) if cpu_only else facts
    pool = find_pool(config, facts, cpu_only=cpu_only)
    hosts = _choose(config, pool)
    transport = _transport(config, facts, pool, hosts)
    problems = [*check_loopback(hosts, config.cluster.master_addr), *_ipv6_slots(hosts, pool)]
    problems += check_slots(hosts, facts, pool, transport)
    if problems:
        raise ConfigError(*problems)
    if transport != "slurm":  # there the scheduler says on each host which GPUs are the job's
        here = _hosts_here(hosts, facts, transport)
        visible = [gpu.index for gpu in facts.gpus]
        hosts = tuple(through_visible(host, visible) if host.name in here else host for host in hosts)
    source, warnings = _source(pool, hosts, facts, cpu_only), visible_warnings(hosts, facts, pool, transport)
    seen = _seen(facts, pool, hosts, transport)
    kind, memory, capability = _gpu(config, seen)
    if pool.device == "cpu":
        ram = facts.ram_bytes if transport == "local" else None
        kind, memory, capability = None, None if ram is None else ram // hosts[0].slots, None
    return Placement(
        hosts=hosts,
        source=source,
        assumed=pool.kind == "assumed",
        transport=transport,
        device=pool.device,
        gpu_kind=kind,
        memory_bytes=memory,
        capability=capability,
        warnings=(*_assumption(pool, hosts), *warnings, *_other_kind(config, pool, seen)),
    )


def _hosts_here(hosts: Sequence[Host], facts: Facts, transport: str) -> set[str]:
    """Hosts that are this machine. Where the same command runs on every node, each knows which one it is."""
    if transport == "env":
        return {hosts[need_identity(facts.environ).node_rank].name}
    return {host.name for host in hosts if is_this_machine(host, facts.hostname, facts.addresses)}


def check_loopback(hosts: Sequence[Host], master_addr: str | None) -> list[Problem]:
    """Other machines cannot reach a rank 0 that is called localhost."""
    first = hosts[0]
    loopback = [h for h in hosts if is_loopback(h.name)]
    if len(hosts) == 1 or not loopback or master_addr or first.address or first not in loopback:
        # localhost further down is still this machine for ssh, and dials out to rank 0.
        return []
    text = f"{first.name} stands first beside other hosts, which would be told to meet at 127.0.0.1"
    return [Problem(text, "", (f"{first.name} slots={first.slots} addr=ADDRESS", "cluster.master_addr=ADDRESS"))]


def meeting_address(hosts: Sequence[Host], master_addr: str | None) -> str:
    """Where ranks meet: the address given, else the first host's."""
    first = hosts[0]
    if master_addr:
        return master_addr
    return first.address or ("127.0.0.1" if is_loopback(first.name) else first.name)


def _check_combinations(config: RunConfig) -> None:
    """Filters name hosts and slots already, so a count beside them would be a second answer (as in DeepSpeed)."""
    cluster = config.cluster
    if not (cluster.include or cluster.exclude):
        return
    key = "cluster.include" if cluster.include else "cluster.exclude"
    problems = [
        Problem(f"{name}= and {key}= cannot be combined", "", (f"{name}=null", f"{key}=null"))
        for name in ("nodes", "gpus")
        if getattr(config, name) is not None
    ]
    if problems:
        raise ConfigError(*problems)


def _choose(config: RunConfig, pool: Pool) -> tuple[Host, ...]:
    """The hosts and slots of `pool` that the configuration asks for."""
    if pool.joined is not None:
        return limit_gpus(_all_nodes(config, pool, pool.joined), config.gpus)
    hosts = filter_hosts(pool.hosts, config.cluster.include, config.cluster.exclude)
    return limit_gpus(take_nodes(hosts, config.nodes, pool.name), config.gpus)


def _all_nodes(config: RunConfig, pool: Pool, joined: int) -> tuple[Host, ...]:
    """The command runs on every node already, so that none can be left out."""
    hosts = filter_hosts(pool.hosts, config.cluster.include, config.cluster.exclude)
    hosts = take_nodes(hosts, config.nodes, pool.name)
    if len(hosts) != joined:
        text = f"{joined} nodes have started this command, and {len(hosts)} of {pool.name} are to be used"
        raise ConfigError(Problem(text, "", (f"nodes={joined}", f"NNODES={len(hosts)}")))
    return hosts


def _transport(config: RunConfig, facts: Facts, pool: Pool, hosts: Sequence[Host]) -> str:
    """How hosts are reached. Raises ConfigError when they cannot be reached as asked."""
    asked = config.cluster.transport
    alone = len(hosts) == 1 and is_this_machine(hosts[0], facts.hostname, facts.addresses)
    if asked == "local" and not alone:
        others = f"{pool.name} names {names(hosts)}"
        text = f"cluster.transport=local runs on this machine, {facts.hostname}, and {others}"
        raise ConfigError(Problem(text, "", ("cluster.transport=auto", "cluster.hostfile=null")))
    if asked != "auto" and not (asked == "slurm" and pool.kind == "here"):  # the one host of a job is this one
        return asked
    if alone:
        return "local"
    job = allocation(facts.environ)
    inside = job is not None and {host.name for host in hosts} <= set(job.hosts)
    return "slurm" if inside else "ssh"


def _ipv6_slots(hosts: Sequence[Host], pool: Pool) -> list[Problem]:
    text = "{}: DeepSpeed cannot name slots of a host that is written as an IPv6 address"
    return [
        Problem(text.format(host.name), pool.name, (f"NAME slots={host.slots} addr={host.name}",))
        for host in hosts
        if ":" in host.name and not contiguous(host)
    ]


def _source(pool: Pool, hosts: Sequence[Host], facts: Facts, cpu_only: bool) -> str:
    total = len(pool.hosts)
    if pool.kind == "here":
        visible = "" if facts.visible_devices is None else f" (CUDA_VISIBLE_DEVICES={facts.visible_devices})"
        if pool.device == "cuda":
            return pool.name + visible
        return f"{pool.name}, by DS_ACCELERATOR=cpu" if cpu_only else f"{pool.name}, which has no GPU{visible}"
    if pool.kind == "assumed":
        names = ", ".join(host.name for host in hosts[:3])
        return f"assumed: {names}{' ...' if total > 3 else ''}, {_slots_each(pool, hosts)} each"
    if total == 1 or pool.kind in ("nodes", "queue"):
        return f"{pool.name}: {total} host{'s' if total != 1 else ''}"
    return f"{pool.name}: " + (f"all {total} hosts" if len(hosts) == total else f"{len(hosts)} of its {total} hosts")


def _assumption(pool: Pool, hosts: Sequence[Host]) -> list[str]:
    if pool.kind != "assumed":
        return []
    several = len(pool.hosts) > 1
    count = f"{len(pool.hosts)} assumed host{'s' if several else ''} of {_slots_each(pool, hosts)}"
    give = "cluster.hostfile=FILE names the real ones" if several else "leave cluster.gpu out to use this machine"
    return [f"no host is known: planned for {count}; {give}"]


def _seen(facts: Facts, pool: Pool, hosts: Sequence[Host], transport: str) -> tuple[LocalGpu, ...]:
    """GPUs of this machine that tell about those of the run."""
    if transport == "local":
        return tuple(gpu for gpu in facts.gpus if gpu.index in hosts[0].gpus)
    return facts.gpus if pool.like_here else ()


def _gpu(config: RunConfig, gpus: Sequence[LocalGpu]) -> tuple[str | None, int | None, tuple[int, int] | None]:
    """Kind, memory and capability: what was typed, else what is seen here, else unknown. The smallest GPU decides."""
    asked = config.cluster.gpu
    kind: GpuKind | None = None
    if asked is not None:
        if asked not in GPU_KINDS:
            raise ConfigError(_no_kind(asked))
        name, kind = asked, GPU_KINDS[asked]
        gpus = [gpu for gpu in gpus if kind_of(gpu.name) is kind]
    elif gpus:
        name, kind = gpus[0].name, kind_of(gpus[0].name)
    else:
        name = None
    memory = [gpu.memory_bytes for gpu in gpus if gpu.memory_bytes is not None]
    capability = [gpu.capability for gpu in gpus if gpu.capability is not None]
    return (
        name,
        min(memory) if memory else kind.memory_bytes if kind else None,
        min(capability) if capability else kind.capability if kind else None,
    )


def _no_kind(asked: str) -> Problem:
    """That `cluster.gpu` names no kind, or one of several sizes of memory."""
    sizes = [key for key in GPU_KINDS if key.startswith(f"{asked.lower()}_")]
    if len(sizes) > 1:
        text = f"cluster.gpu={asked}: which one? It is made with {' or '.join(map(_memory, sizes))}"
        return Problem(text, "", tuple(f"cluster.gpu={key}" for key in sizes))
    meant = next((key for key, kind in GPU_KINDS.items() if kind is kind_of(asked)), None)
    alike = difflib.get_close_matches(re.sub(r"[^a-z0-9]+", "_", asked.lower()), GPU_KINDS, n=1, cutoff=0.7)
    near = meant or next(iter(alike), None)
    text = f"cluster.gpu={asked} is no kind of GPU that is known; these are: {', '.join(GPU_KINDS)}"
    tries = (
        (f"cluster.gpu={near}",) if near else ("cluster.gpu=null   (on a machine with such GPUs: the driver is asked)",)
    )
    return Problem(text, "", tries)


def _memory(key: str) -> str:
    """`a100_80g` -> 80 GB."""
    return f"{key.rpartition('_')[2].removesuffix('g')} GB"


def _other_kind(config: RunConfig, pool: Pool, gpus: Sequence[LocalGpu]) -> list[str]:
    """That `cluster.gpu` is not what is here."""
    asked = config.cluster.gpu
    if asked is None:
        return []
    if pool.device == "cpu":
        return [f"cluster.gpu={asked} has no effect: this run uses no GPU"]
    others = [gpu.name for gpu in gpus if kind_of(gpu.name) is not GPU_KINDS[asked]]
    if not others:
        return []
    return [f"planned for cluster.gpu={asked}, and this machine has {others[0]}: leave cluster.gpu out to plan for it"]


def _slots_each(pool: Pool, hosts: Sequence[Host]) -> str:
    unit = "GPU" if pool.device == "cuda" else "rank"
    return f"{hosts[0].slots} {unit}{'s' if hosts[0].slots != 1 else ''}"
